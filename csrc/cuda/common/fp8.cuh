#pragma once

// Floats of 8 bits: e4m3 (four exponent bits, the largest value is 448, no infinity) and e5m2 (five, 57344). Both are
// exact in half precision. Conversions from FP32 round to nearest, half to even, and clamp to the largest value.
//
// Conversions of e4m3 need sm_89; e5m2 is the upper byte of a half.

#include <cuda_fp16.h>

#include "common/types.cuh"

namespace gnnc {

struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

// Traits of a type of quantized values: whether it is an integer type, and its largest value.
template <class T>
struct Quantized {
  static constexpr bool kIsInteger = true;
  static constexpr float kLargest = 127.0f;
};
template <>
struct Quantized<E4m3> {
  static constexpr bool kIsInteger = false;
  static constexpr float kLargest = 448.0f;
};
template <>
struct Quantized<E5m2> {
  static constexpr bool kIsInteger = false;
  static constexpr float kLargest = 57344.0f;
};

// Returns two values, the low bytes of `pair`, as two halves of a word.
template <class T>
__device__ __forceinline__ uint32_t halves_of(uint32_t pair);
template <>
__device__ __forceinline__ uint32_t halves_of<E4m3>(uint32_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  return halves;
}
template <>
__device__ __forceinline__ uint32_t halves_of<E5m2>(uint32_t pair) {
  return __byte_perm(pair, 0, 0x1404);
}

// Converts the four values of a word to FP32.
template <class T>
__device__ __forceinline__ void widen(uint32_t word, float (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t halves = halves_of<T>(word >> (8 * i));
    const __half2 pair = *reinterpret_cast<const __half2*>(&halves);
    out[i] = __low2float(pair);
    out[i + 1] = __high2float(pair);
  }
}

// Returns the nearest values to `low` and `high` as the two low bytes of a word.
template <class T>
__device__ __forceinline__ uint32_t narrowed(float low, float high);
template <>
__device__ __forceinline__ uint32_t narrowed<E4m3>(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t narrowed<E5m2>(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace gnnc
