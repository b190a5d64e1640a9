#pragma once

// sddmm: computes one value, or one row, an edge from the row a[i, :] of its destination and b[j, :] of its source.
//
// Layout: a [num_dst, F], b [num_src, F], both fp32, bf16 or int8 (rows at least F elements apart); out fp32 [E, heads]
// for dot, [E, F] otherwise. An int8 dot is an exact 32-bit sum (F <= 2^16), then times a_scale[i], then times
// b_scale[j]. Traffic: one gathered row of b an edge, the rows of a once, out once; the floor is the gather, or 4 E F
// bytes written where out is as wide as the rows.

#include <cstdint>

#include "csr.h"
#include "gnnc/isa.h"

namespace gnnc {

enum class EdgeOp { dot, add, sub, mul, copy_src, copy_dst };

struct SddmmArgs {
  Csr csr;
  const void* a;
  const void* b;
  int64_t a_stride;
  int64_t b_stride;
  int64_t width;
  Element element;
  const float* a_scale;  // [num_dst], or null
  const float* b_scale;  // [num_src], or null
  EdgeOp op;
  int64_t heads;
  float* out;
};

GNNC_EACH_ISA(void sddmm(const SddmmArgs& args, int64_t row_begin, int64_t row_end);)

}  // namespace gnnc
