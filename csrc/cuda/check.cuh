#pragma once

// Looks for NaN and infinity among n floats. Traffic: 4 n bytes read.

#include "row_steps.cuh"

namespace gnnc {

struct CheckArgs {
  const float* values;
  int64_t count;
  step::Watch watch;
};

__global__ void check_finite(CheckArgs args) {
  begin_kernel();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  bool fine = true;
  for (int64_t i = first; i < args.count; i += threads) fine = fine && step::is_finite(args.values[i]);
  if (!fine) args.watch.raise();
}

}  // namespace gnnc
