#pragma once

// norm_columns: computes, for a batch norm with given statistics, the factor and the addend of every column. The
// kernels that apply the norm then read two numbers a column, and need neither a square root nor a division.
//
// Layout: vectors of `columns` FP32 numbers; weight and bias may be null, and are 1 and 0 then.
// Traffic: 16 B a column in (8 B without weight and bias), 8 B out. Floor: a launch; a thousand columns are 24 kB.
//
// Launch: blocks of 256 threads, a thread a column.

#include "common/types.cuh"

namespace gnnc {

struct NormColumnsArgs {
  const float* mean;
  const float* var;
  const float* weight;
  const float* bias;
  float* factor;
  float* offset;
  int64_t columns;
};

// Computes both vectors. Config::kEps is added to the variance.
template <class Config>
__global__ void __launch_bounds__(256) norm_columns(NormColumnsArgs args) {
  begin_kernel();
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (c >= args.columns) return;
  const float weight = args.weight == nullptr ? 1.0f : args.weight[c];
  const float bias = args.bias == nullptr ? 0.0f : args.bias[c];
  const float factor = __fdiv_rn(weight, __fsqrt_rn(__fadd_rn(args.var[c], Config::kEps)));
  args.factor[c] = factor;
  args.offset[c] = __fsub_rn(bias, __fmul_rn(args.mean[c], factor));
}

}  // namespace gnnc
