#pragma once

// fp16_scale: the power of two that brings the largest magnitude of a tensor to at least 2^14 and below 2^15
// (gnnc.fp16_scale). begin_fp16_scale sets it to the largest power of two; fp16_scale, or an epilogue of another kernel
// (step::fp16_scale), lowers it.
//
// Layout: count FP32 values, dense, aligned to 16 bytes. Traffic: each value once. Floor: 4 B a value at copy
// bandwidth.
//
// Launch: begin_fp16_scale with one block; fp16_scale with blocks of 256 threads, enough to fill the device.

#include "common/row_steps.cuh"

namespace gnnc {

struct BeginFp16ScaleArgs {
  float* power;
};

struct Fp16ScaleArgs {
  const float* x;
  int64_t count;
  float* power;
};

__global__ void __launch_bounds__(32) begin_fp16_scale(BeginFp16ScaleArgs args) {
  begin_kernel();
  if (threadIdx.x == 0) *args.power = step::power_for(0.0f);
}

__global__ void __launch_bounds__(256) fp16_scale(Fp16ScaleArgs args) {
  begin_kernel();
  constexpr int kUnroll = 4;
  const int64_t fours = args.count / 4, step = static_cast<int64_t>(gridDim.x) * 256;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  float top = 0.0f;
#pragma unroll 1
  for (int64_t i = thread; i < fours; i += kUnroll * step) {
    Vector<float, 4> read[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      read[u] =
          i + u * step < fours ? reinterpret_cast<const Vector<float, 4>*>(args.x)[i + u * step] : Vector<float, 4>{};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int k = 0; k < 4; ++k) top = larger_abs(top, read[u].v[k]);
    }
  }
  if (4 * fours + thread < args.count) top = larger_abs(top, args.x[4 * fours + thread]);
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) top = larger_abs(top, __shfl_xor_sync(0xffffffffu, top, apart));
  if (threadIdx.x % 32 == 0) step::lower_power(args.power, top);
}

}  // namespace gnnc
