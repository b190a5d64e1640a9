#pragma once

// Products of matrices on the tensor cores (mma.sync), sums in FP32: 16 rows by 8 columns a step, by 16 terms of 16
// bits or by 8 of FP32.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/types.cuh"

namespace gnnc {

__device__ inline void multiply_halves(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply_halves(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// FP32 values as sums of two TF32 values, which have a mantissa of 10 bits: the nearest one, and what it leaves, of
// which products read 10 bits. kExact: the values come from 16 bits, which one TF32 value holds.
template <int kWords, bool kExact = false>
struct Tf32Parts {
  uint32_t high[kWords], low[kExact ? 1 : kWords];
  __device__ __forceinline__ void set(int i, float x) {
    if constexpr (kExact) {
      high[i] = __float_as_uint(x);
    } else {
      asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high[i]) : "f"(x));
      low[i] = __float_as_uint(x - __uint_as_float(high[i]));
    }
  }
};

__device__ inline void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Products of FP32 values: the product of both low parts is left out.
template <bool kExactA, bool kExactB>
__device__ inline void multiply_floats(float (&c)[4], const Tf32Parts<4, kExactA>& a, const Tf32Parts<2, kExactB>& b) {
  if constexpr (!kExactA) multiply_tf32(c, a.low, b.high);
  if constexpr (!kExactB) multiply_tf32(c, a.high, b.low);
  multiply_tf32(c, a.high, b.high);
}

// Returns two values rounded to 16 bits, the first one in the low half.
__device__ inline uint32_t two_halves(float a, float b, __half) {
  const __half2 v = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ inline uint32_t two_halves(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}

}  // namespace gnnc
