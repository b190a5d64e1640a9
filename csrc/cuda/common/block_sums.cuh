#pragma once

// Prefix sums over the threads of a warp and of a block.

#include "common/types.cuh"

namespace gnnc {

// Returns the inclusive prefix sum of `value` over the threads of this warp. Called by the whole warp.
__device__ __forceinline__ int32_t sum_in_warp(int32_t value) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, value, apart);
    if (lane >= apart) value += other;
  }
  return value;
}

// Shared memory of one sum over the threads of a block of kWarps warps.
template <int kWarps>
struct BlockSums {
  int32_t warp[kWarps];  // the sum of each warp
};

// Returns the exclusive prefix sum of `value` over the threads of the block, and the total in `all`. Called by the
// whole block; `sums` must not be shared with another call.
template <int kWarps>
__device__ __forceinline__ int32_t sum_before(int32_t value, BlockSums<kWarps>& sums, int32_t& all) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int32_t sum = sum_in_warp(value);
  if (lane == 31) sums.warp[warp] = sum;
  __syncthreads();
  all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    sum += w < warp ? sums.warp[w] : 0;
    all += sums.warp[w];
  }
  return sum - value;
}

}  // namespace gnnc
