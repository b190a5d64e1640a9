#pragma once

// gemm_tn: out = a^T b, summed over the rows of both: the gradient of a weight.
//
// Rows are cut into chunks whose number depends on the shapes only; every chunk has its own sum, and the sums are added
// in order, so that results have the same bits at any thread count. Within a chunk, blocks of 128 rows are packed as
// floats, and a tile of 8 x 2 (AVX2: 6 x 2) vectors of the result stays in registers. Traffic: a and b once; a chunk's
// sum is in L2. Floor: rows K O fused multiply-adds.

#include <cstdint>

#include "gnnc/isa.h"

namespace gnnc {

constexpr int64_t kGradColumns = 16;  // columns of a chunk's sum are padded to a multiple of this

struct GemmTnArgs {
  const void* a;  // [rows, inner], fp32 or bf16
  const void* b;  // [rows, outer], fp32 or bf16
  bool a_is_bf16, b_is_bf16;
  int64_t inner, outer, padded;
  int64_t a_stride, b_stride;
};

// Writes the sum over rows [begin, end) to out, fp32 [inner, padded].
GNNC_EACH_ISA(void gemm_tn(const GemmTnArgs& args, int64_t begin, int64_t end, float* out);)

}  // namespace gnnc
