#pragma once

// batch_norm: each column of x minus its mean, divided by its deviation, times weight, plus bias; and its gradient.
//
// Two passes over the rows, forward and backward: one sums columns, one computes the result. Rows are cut into chunks
// whose number depends on the shapes only; every chunk has sums of its own in FP64, added in order, so that results
// have the same bits at any thread count.
//
// Layout: x fp32 or bf16, grad fp32, with rows any stride apart; results fp32. Traffic: every operand twice, the result
// once. Floor: that.

#include <cstdint>

#include "gnnc/isa.h"
#include "gnnc/row_program.h"

namespace gnnc {

struct NormArgs {
  const void* x;
  Scalar x_type;
  int64_t x_stride, width;
  const float* grad;  // null: forward
  int64_t grad_stride;
  const float* mean;                      // backward
  const float *factor, *shift;            // forward: out = x * factor + shift
  const float *scale, *constant, *slope;  // backward: out = (grad - constant - (x - mean) * slope) * scale
  float* out;
  int64_t out_stride;
};

// `batch_norm_sums` computes two sums of each column: of x and its square, or of grad and its product with x - mean.
GNNC_EACH_ISA(void batch_norm_sums(const NormArgs& args, int64_t begin, int64_t end, double* sums);
              void batch_norm_rows(const NormArgs& args, int64_t begin, int64_t end);)

}  // namespace gnnc
