#pragma once

// Sums and extrema (max, min) of gathered rows, where each thread accumulates the columns of its 16-byte piece.
// LaneReduce accumulates in FP32: for FP32 rows, for real weights of narrower floats, and for max and min. PairExtremes
// compares unweighted elements of at most two bytes in their type. int8 values, whose sums are computed in
// product_sum.cuh instead, become FP32 by byte permutation (2^23 + value + 128, less 2^23 + 128), which is exact and
// cheaper than a conversion instruction.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/fp8.cuh"
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
    } else if constexpr (is_fp8(kElement)) {
      float four[4];
      widen<typename Select<kElement == Element::e4m3, E4m3, E5m2>::Type>(words[j], four);
#pragma unroll
      for (int k = 0; k < 4; ++k) out[4 * j + k] = four[k];
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

// Combines two values of the reduction. For max and min, a NaN in either value propagates, as in torch.
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

// FP32 sums, maxima or minima of the columns of this thread's piece.
template <class Layout, Reduce kReduce>
struct LaneReduce {
  static constexpr int kColumns = Layout::kColumns;
  static constexpr bool kAdds = kReduce == Reduce::sum || kReduce == Reduce::mean;
  static_assert(!kAdds || Layout::kElement != Element::i8, "int8 sums are computed in product_sum.cuh");
  using Word = float;

  float acc[kColumns];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) acc[i] = start_of<kReduce>();
  }

  // Accumulates the row of one edge; x is zeros if !counts (a masked-out edge).
  __device__ __forceinline__ void add(const uint4& x, bool counts) {
    float v[kColumns];
    unpack<Layout::kElement>(x, v);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) put(i, v[i], counts);
  }

  // Accumulates the row of one edge, multiplied by weight(i) in column i of the piece.
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

  // Accumulates the rows of four edges, each multiplied by its weight.
  __device__ __forceinline__ void add(const uint4 (&x)[4], const float (&w)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) add(x[i], true, [&](int) { return w[i]; });
  }

  // Multiplies the sums by 2^-times, which rescales all weights added so far.
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

// Computes the largest or smallest element of each column for elements of one or two bytes: exactly, two columns an
// instruction. Quantized values become fp16 halves of a word, 1024 + 128 + value, by byte permutation. Without edges
// the result is infinite, as in FP32.
template <class Layout, Reduce kReduce>
struct PairExtremes {
  static_assert(Layout::kElement != Element::f32 && !is_fp8(Layout::kElement), "elements are compared in their type");
  static constexpr bool kBytes = Layout::kElement == Element::i8, kBf16 = Layout::kElement == Element::bf16;
  static constexpr bool kMax = kReduce == Reduce::max;
  static constexpr uint32_t kInfinity = kBf16 ? 0x7f807f80u : 0x7c007c00u, kSigns = kMax ? 0x80008000u : 0u;
  static constexpr int kPairs = Layout::kColumns / 2;
  using Word = float;

  uint32_t best[kPairs];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) best[i] = kInfinity | kSigns;
  }

  // Accumulates the row of one edge; if !counts (a masked-out edge), the row is replaced by the neutral element.
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
      if constexpr (kBf16) {
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
  // Combines a pair of columns into an accumulator. A NaN in either value propagates, as in torch.
  __device__ __forceinline__ static void put(uint32_t& to, uint32_t pair) {
    if constexpr (kMax && kBf16) {
      asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(to) : "r"(pair));
    } else if constexpr (kMax) {
      asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(to) : "r"(pair));
    } else if constexpr (kBf16) {
      asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(to) : "r"(pair));
    } else {
      asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(to) : "r"(pair));
    }
  }
};

// Adds up what kShare neighboring threads, a power of two, have of each of four edges: each step halves the number of
// edges that a thread sums, as long as there are several. v: the sums of this thread's edges. Returns their number;
// first: the first one.
template <int kShare, class Layout, class T>
__device__ __forceinline__ int share_sums(T (&v)[4], int& first) {
  int count = 4;
  first = 0;
#pragma unroll
  for (int apart = 1; apart < kShare; apart *= 2) {
    const bool upper = Layout::lane() & apart;
    if (count == 1) {
      v[0] += __shfl_xor_sync(0xffffffffu, v[0], apart);
      continue;
    }
    count /= 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= count) continue;
      const T other = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i + count], apart);
      v[i] = (upper ? v[i + count] : v[i]) + other;
    }
    if (upper) first += count;
  }
  return count;
}

}  // namespace gnnc
