#pragma once

// edge_softmax_backward: out[e, h] = alpha[e, h] * (grad[e, h] - sum of alpha * grad over the edges of e's row).
//
// Layout: alpha, grad and out fp32 [E, heads] in CSR order. Traffic: alpha and grad once (a row's second read is in L1,
// unless the row is a hub), out once.

#include <cstdint>

#include "csr.h"
#include "gnnc/isa.h"

namespace gnnc {

struct EdgeSoftmaxBackwardArgs {
  Csr csr;
  const float* alpha;
  const float* grad;
  int64_t heads;
  float* out;
};

GNNC_EACH_ISA(void edge_softmax_backward(const EdgeSoftmaxBackwardArgs& args, int64_t row_begin, int64_t row_end);)

}  // namespace gnnc
