#pragma once

// Sums and extrema of gathered rows in FP32, each thread over the columns of its own 16 bytes: for FP32 rows, for
// real weights of halves, and for max and min. int8 becomes FP32 by byte permutation (2^23 + code + 128, less 2^23 +
// 128), which is exact and cheaper than a conversion.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "rows.cuh"

namespace gnnc {

enum class Reduce { sum, mean, max, min };

template <Element kElement>
__device__ inline void unpack(const uint4& v, float (&out)[16 / bytes_of(kElement)]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (kElement == Element::f32) {
      out[j] = __uint_as_float(words[j]);
    } else if constexpr (kElement == Element::bf16) {
      out[2 * j] = __uint_as_float(words[j] << 16);
      out[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
    } else if constexpr (kElement == Element::f16) {
      const __half2 pair = *reinterpret_cast<const __half2*>(&words[j]);
      out[2 * j] = __low2float(pair);
      out[2 * j + 1] = __high2float(pair);
    } else {
      const uint32_t offset = words[j] ^ 0x80808080u;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        out[4 * j + k] = __fsub_rn(__uint_as_float(__byte_perm(offset, 0x4b000000u, 0x7440u + k)), 8388736.0f);
      }
    }
  }
}

template <Reduce kReduce>
__device__ inline float start_of() {
  if constexpr (kReduce == Reduce::max) return __int_as_float(0xff800000);
  if constexpr (kReduce == Reduce::min) return __int_as_float(0x7f800000);
  return 0.0f;
}

// A NaN wins over everything, as in torch.
template <Reduce kReduce>
__device__ inline float combine(float a, float b) {
  if constexpr (kReduce == Reduce::max) {
    return larger_or_nan(a, b);
  } else if constexpr (kReduce == Reduce::min) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
  } else {
    return __fadd_rn(a, b);
  }
}

__device__ inline float power_of_two(float v) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}

template <class Layout, Reduce kReduce>
struct LaneReduce {
  static constexpr int kColumns = Layout::kColumns;
  static constexpr bool kAdds = kReduce == Reduce::sum || kReduce == Reduce::mean;
  using Word = float;

  float acc[kColumns];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) acc[i] = start_of<kReduce>();
  }

  // One edge; where it does not count, x is zeros.
  __device__ __forceinline__ void add(const uint4& x, bool counts) {
    float v[kColumns];
    unpack<Layout::kElement>(x, v);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) put(i, v[i], counts);
  }

  // weight(i) is that of column i of the piece.
  template <class Weights>
  __device__ __forceinline__ void add(const uint4& x, bool counts, const Weights& weight) {
    float v[kColumns];
    unpack<Layout::kElement>(x, v);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if constexpr (kAdds) {
        acc[i] = fmaf(weight(i), v[i], acc[i]);
      } else {
        put(i, __fmul_rn(weight(i), v[i]), counts);
      }
    }
  }

  // Four edges of a weight each.
  __device__ __forceinline__ void add(const uint4 (&x)[4], const float (&w)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) add(x[i], true, [&](int) { return w[i]; });
  }

  // All weights so far times 2^-times.
  __device__ __forceinline__ void lower(int times) {
    const float by = power_of_two(static_cast<float>(-times));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) acc[i] = __fmul_rn(acc[i], by);
  }

  __device__ __forceinline__ void take(Word (&out)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = acc[i];
    clear();
  }

 private:
  __device__ void put(int i, float v, bool counts) {
    if constexpr (kAdds) {
      acc[i] = __fadd_rn(acc[i], v);
    } else {
      acc[i] = combine<kReduce>(acc[i], counts ? v : start_of<kReduce>());
    }
  }
};

}  // namespace gnnc
