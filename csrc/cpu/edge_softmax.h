#pragma once

// edge_softmax: out[e, h] = exp(l[e, h] - max) / (sum + eps), max and sum over the edges of e's row.
//
// Layout: logits and out fp32 [E, heads] in CSR order. Traffic: logits and out once. Floor: one read and one write of 4
// E heads bytes, about 20 instructions a vector of logits.

#include <cstdint>

#include "csr.h"
#include "gnnc/isa.h"

namespace gnnc {

struct EdgeSoftmaxArgs {
  Csr csr;
  const float* logits;
  int64_t heads;
  float eps;
  float* out;
};

GNNC_EACH_ISA(void edge_softmax(const EdgeSoftmaxArgs& args, int64_t row_begin, int64_t row_end);)

}  // namespace gnnc
