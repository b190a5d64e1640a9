#pragma once

// softmax_sum: out[i, f] = sum over the edges e of row i of w[e, f] value[e, f], where w[:, f] is the softmax of
// logits[:, f] over these edges: a softmax for every column, whose weights stay in registers. 0 if a row is empty.
//
// Layout: logits and value fp32 [E, F] in CSR order. A row may be processed in pieces, one call each: state fp32 [3, F]
// holds its maximum, the sum of exp(l - max), and the weighted sum; initially -inf, 0, 0.
// Traffic: logits twice, value and out once. Floor: about 25 instructions a vector, on blocks of edges in L2.

#include <cstdint>

#include "gnnc/isa.h"

namespace gnnc {

struct SoftmaxSumArgs {
  const int64_t* rowptr;
  int64_t rows;
  const float *logits, *value;
  int64_t width;
  float* state;  // state of the only row, or null
  float* out;
  int64_t out_stride;
};

// Computes the columns column_begin .. column_end; column_begin must be a multiple of 16.
GNNC_EACH_ISA(void softmax_sum(const SoftmaxSumArgs& args, int64_t column_begin, int64_t column_end);)

}  // namespace gnnc
