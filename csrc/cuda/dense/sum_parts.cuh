#pragma once

// sum_parts: adds up rows of partial sums, each of which a block of an earlier kernel has stored, in a fixed order: the
// result has the same bits in every call. The sums may be divided by a number on the device.
//
// Layout: `parts` FP32 rows of `width` columns, dense; the result is one such row.
// Traffic: 4 B a part and column in, 4 B a column out. Floor: these bytes at L2 bandwidth, and a launch: there are few
// parts, which the kernel before has just written.
//
// Launch: blocks of 1024 threads, one for every 32 columns: the warps of a block share the parts.

#include "common/types.cuh"

namespace gnnc {

struct SumPartsArgs {
  const float* part;
  float* out;
  int64_t parts;
  int64_t width;
  const float* divisor;  // or null
};

__global__ void __launch_bounds__(1024) sum_parts(SumPartsArgs args) {
  begin_kernel();
  constexpr int kWarps = 32;
  __shared__ float sums[kWarps][32];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  float total = 0.0f;
  if (column < args.width) {
#pragma unroll 8
    for (int64_t which = warp; which < args.parts; which += kWarps) total += args.part[which * args.width + column];
  }
  sums[warp][lane] = total;
  __syncthreads();
  if (warp > 0 || column >= args.width) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) total += sums[other][lane];
  args.out[column] = args.divisor == nullptr ? total : __fdiv_rn(total, *args.divisor);
}

}  // namespace gnnc
