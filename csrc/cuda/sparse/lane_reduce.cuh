#pragma once

// Sums and extrema of gathered rows in FP32, each thread over the columns of its own 16 bytes: for FP32 rows, for
// real weights of halves, and for max and min; extremes of elements of at most two bytes without weights as they are.
// int8, of which there are no sums here (product_sum.cuh), becomes FP32 by byte permutation (2^23 + code + 128, less
// 2^23 + 128), which is exact and cheaper than a conversion.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sparse/rows.cuh"

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
  static_assert(!kAdds || Layout::kElement != Element::i8, "codes are added up as they are");
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

// The largest or smallest element of each column, where it has two bytes or one: exact, two columns at once. Codes
// become halves of a word, 1024 + 128 + code, by byte permutation. Without edges it is infinite, as in FP32.
template <class Layout, Reduce kReduce>
struct PairExtremes {
  static_assert(Layout::kElement != Element::f32, "pairs of columns share a word");
  static constexpr bool kBytes = Layout::kElement == Element::i8, kBrain = Layout::kElement == Element::bf16;
  static constexpr bool kMax = kReduce == Reduce::max;
  static constexpr uint32_t kInfinity = kBrain ? 0x7f807f80u : 0x7c007c00u, kSigns = kMax ? 0x80008000u : 0u;
  static constexpr int kPairs = Layout::kColumns / 2;
  using Word = float;

  uint32_t best[kPairs];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) best[i] = kInfinity | kSigns;
  }

  // One edge; where it does not count, nothing is worse.
  __device__ __forceinline__ void add(const uint4& x, bool counts) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (kBytes) {
        const uint32_t offset = word_of(x, j) ^ 0x80808080u;
        const uint32_t code = kMax ? offset & (counts ? ~0u : 0u) : offset | (counts ? 0u : ~0u);
        put(best[2 * j], __byte_perm(code, 0x64u, 0x4140));
        put(best[2 * j + 1], __byte_perm(code, 0x64u, 0x4342));
      } else {
        put(best[j], counts ? word_of(x, j) : kInfinity | kSigns);
      }
    }
  }

  __device__ __forceinline__ void take(Word (&out)[Layout::kColumns]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if constexpr (kBrain) {
        out[2 * i] = __uint_as_float(best[i] << 16);
        out[2 * i + 1] = __uint_as_float(best[i] & 0xffff0000u);
      } else {
        const __half2 pair = *reinterpret_cast<const __half2*>(&best[i]);
        const float offset = kBytes ? 1152.0f : 0.0f;
        out[2 * i] = __fsub_rn(__low2float(pair), offset);
        out[2 * i + 1] = __fsub_rn(__high2float(pair), offset);
      }
    }
    clear();
  }

 private:
  // A NaN wins over everything, as in torch.
  __device__ __forceinline__ static void put(uint32_t& to, uint32_t pair) {
    if constexpr (kMax && kBrain) {
      asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(to) : "r"(pair));
    } else if constexpr (kMax) {
      asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(to) : "r"(pair));
    } else if constexpr (kBrain) {
      asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(to) : "r"(pair));
    } else {
      asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(to) : "r"(pair));
    }
  }
};

}  // namespace gnnc
