#pragma once

// check_finite: searches the input values for NaN and infinity, and raises a flag if there is one (step::NanFlag).
//
// Layout: FP32, contiguous. Traffic: 4 B a value in, nothing out if all values are finite. Floor: these bytes at copy
// bandwidth.
//
// Launch: blocks of 256 threads, at most 1024 blocks; the threads process the values in a grid-stride loop.

#include "common/row_steps.cuh"

namespace gnnc {

struct CheckArgs {
  const float* values;
  int64_t count;
  step::NanFlag watch;
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
