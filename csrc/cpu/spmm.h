#pragma once

// spmm: out[i, :] = reduce over the edges e of row i of weight(e) * x[col[e], :], then the row program.
//
// Layout: rowptr int64, col int32; x fp32, bf16 or int8 with rows x_stride elements apart (int8: a multiple of 64).
// Traffic: 4 B of col (+ 4 B a weight) and one row of x an edge, the outputs of the program a row. Floor at F=64 where
// x fits in L3: 2 integer or 8 to 12 float instructions of 64 bytes an edge, one gathered row an edge.

#include <cstdint>

#include "csr.h"
#include "gnnc/isa.h"

namespace gnnc {

struct RowProgram;

enum class Reduce { sum, mean, max, min };

struct SpmmArgs {
  Csr csr;
  const void* x;
  int64_t width;     // F
  int64_t x_stride;  // elements
  Element element;
  Reduce reduce;
  int64_t heads;                // weights of an edge; 1 if value is [E]
  const float* value;           // [E, heads], or null
  const int8_t* integer_value;  // [E], or null
  const float* x_scale;         // [num_src], or null
  const uint8_t* shift;         // [num_src], or null: row weight 2^(7 - shift)
  const RowProgram* program;
};

GNNC_EACH_ISA(void spmm(const SpmmArgs& args, int64_t row_begin, int64_t row_end);)

}  // namespace gnnc
