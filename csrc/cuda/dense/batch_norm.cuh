#pragma once

// batch_norm_moments: makes the moments of each column of a matrix of the sums of its values and of their squared
// distances from the mean, and the running moments of the next call.
//
// Layout: FP32 vectors of `width` columns. Traffic: these vectors. Floor: a launch.
//
// Launch: blocks of 256 threads, one for every 256 columns.

#include "common/types.cuh"

namespace gnnc {

struct BatchNormMomentsArgs {
  const float* sum;
  const float* squares;
  const float* running_mean;
  const float* running_var;
  float* mean;
  float* factor;
  float* next_mean;
  float* next_var;
  int64_t rows;
};

// Numbers: the momentum, and what is added to the variance.
template <int kWidth, class Numbers>
__global__ void __launch_bounds__(256) batch_norm_moments(BatchNormMomentsArgs args) {
  begin_kernel();
  const int column = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (column >= kWidth) return;
  if (args.rows == 0) {  // the running moments stay, as in torch
    args.mean[column] = args.factor[column] = 0.0f;
    args.next_mean[column] = args.running_mean[column];
    args.next_var[column] = args.running_var[column];
    return;
  }
  const auto rows = static_cast<float>(args.rows);
  const float mean = args.sum[column] / rows, squares = args.squares[column];
  args.mean[column] = mean;
  args.factor[column] = 1.0f / sqrtf(squares / rows + Numbers::eps);
  constexpr float kMomentum = Numbers::momentum;
  args.next_mean[column] = args.running_mean[column] * (1.0f - kMomentum) + mean * kMomentum;
  args.next_var[column] = args.running_var[column] * (1.0f - kMomentum) + squares / (rows - 1.0f) * kMomentum;
}

}  // namespace gnnc
