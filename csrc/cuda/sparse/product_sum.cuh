#pragma once

// Accumulators for sums of gathered int8, fp16 and bf16 rows that work on packed words and never convert a single value
// by itself.
//
// ByteSum, exact unweighted int8 sums: mma.m16n8k16 with A = two words of a thread as they were loaded (eight groups of
// four threads, 16 columns of four threads) and B = a matrix that selects columns, so that each thread's part of C
// holds the columns of that thread's piece.
//
// ByteProducts, weighted int8 sums, exact or in fixed point: __byte_perm turns the words of two edges into words of two
// columns, and dp2a multiplies and adds two edges at once. (dp4a takes four edges, but transposing four takes as many
// instructions more, on a unit that is already the bottleneck.) Real weights are 15-bit fixed-point numbers with one
// unit a slot and row, 2^(e - 14), where 2^e is above every weight so far; when a larger weight comes, the sums are
// shifted. The error of a weight is at most 2^-15 of that power of two. For rows that take a whole warp the error is
// twice as large: one slot sums all edges of a part, for which 32 bits are one too few. With a weight a head
// (attention, sums by head), all columns of a thread belong to one head, and each thread has a unit by itself.
//
// HalfSum, FP32 sums of fp16 and bf16: mma.m16n8k8 with A = two neighboring words as they were loaded and B = the
// identity, so that each thread's part of C holds the columns of that thread's piece. A value that is not finite makes
// seven other values of the same 32 columns of that row not finite.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sparse/rows.cuh"
#include "sparse/runs.cuh"

namespace gnnc {

// Exact sums of int8 rows without weights, on the tensor cores; the head of this file describes them.
template <class Layout>
struct ByteSum {
  using Word = int32_t;
  int32_t c[2][2][4];  // [pair of words][pair of columns]: two columns of the first word, and of the second

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 16; ++i) c[i / 8][i / 4 % 2][i % 4] = 0;
  }

  // Returns this thread's part of the matrix B that selects, among the 16 columns in the words of four threads, the
  // eight columns of pair `half` of each thread.
  __device__ static uint32_t chosen(int half) {
    const int lane = Layout::lane(), to = lane / 4;
    return to / 2 == lane % 4 ? 1u << (8 * (2 * half + to % 2)) : 0u;
  }

  __device__ __forceinline__ void add_one(const uint4& x) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t b = chosen(half);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int32_t (&to)[4] = c[j][half];
        asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
            : "r"(word_of(x, 2 * j)), "r"(word_of(x, 2 * j + 1)), "r"(b));
      }
    }
  }

  // Returns the sums of this thread's columns and clears the accumulator.
  __device__ __forceinline__ void take(Word (&out)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) out[i] = c[i / 8][i / 2 % 2][i / 4 % 2 * 2 + i % 2];
    clear();
  }
};

// The weight of an edge: none, a signed 8-bit integer, a positive 8-bit integer (a power of two), or a real number.
enum class Weight { none, signed8, power8, real };

// Weighted sums of int8 rows by dp2a, exact for integer weights and in fixed point for real weights; the head of this
// file describes them.
template <class Layout, Weight kWeight>
struct ByteProducts {
  static constexpr bool kReal = kWeight == Weight::real;
  // Bits of a fixed-point weight, so that the sums of a slot's edges fit into 32 bits.
  static constexpr int kBits = Layout::kSlots > 1 ? 14 : 13;
  static_assert(kMostPart / Layout::kSlots * 127 <= 0x7fffffff >> kBits,
                "the fixed-point sum of a part must fit into 32 bits");
  // Least exponent, so that neither the unit nor its inverse leaves the normal numbers.
  static constexpr int kLeast = 20;
  using Word = typename Select<kReal, float, int32_t>::Type;

  int32_t sums[4][4];  // [word][column]
  // For real weights: the bits of a float power of two above every |weight| of the row so far; 0: no weight yet.
  uint32_t bound;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = 0;
    bound = 0;
  }

  // Adds four edges with 16-bit integer weights.
  __device__ __forceinline__ void add(const uint4 (&x)[4], const uint32_t (&weights)[4]) {
    add(x, __byte_perm(weights[0], weights[1], 0x5410), __byte_perm(weights[2], weights[3], 0x5410));
  }

  // Adds four edges with positive 8-bit weights, packed in one word.
  __device__ __forceinline__ void add(const uint4 (&x)[4], uint32_t weights) {
    add(x, __byte_perm(weights, 0, 0x4140), __byte_perm(weights, 0, 0x4342));
  }

  __device__ __forceinline__ void add(const uint4 (&x)[4], const float (&w)[4]) {
    const float factor = admit(largest(largest(w[0], w[1]), largest(w[2], w[3])));
    uint32_t weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = fixed(w[i], factor);
    add(x, weights);
  }

  // Adds four edges whose weights are fixed-point integers already (see `fixed`), two weights a word.
  __device__ __forceinline__ void add_fixed(const uint4 (&x)[4], const uint32_t (&pairs)[2]) {
    add(x, pairs[0], pairs[1]);
  }

  // Returns the larger magnitude, or NaN if either argument is NaN.
  __device__ static float largest(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(fabsf(a)), "f"(fabsf(b)));
    return most;
  }

  // Raises the bound so that weights up to `most` fit; returns the factor that turns a weight into a fixed-point
  // integer.
  __device__ __forceinline__ float admit(float most) {
    const uint32_t top = __float_as_uint(most);
    if (top >= bound) {
      const int needed = max(static_cast<int>(top >> 23) + 1, kLeast);
      if (bound > 0) halve(needed - exponent());
      set_bound(needed);
    }
    return __uint_as_float(((254u + kBits) << 23) - bound);  // |weight| times this factor is <= 2^kBits
  }

  // Returns a weight as a fixed-point integer in the low 16 bits: adding 1.5 * 2^23 gives a float without fraction
  // bits.
  __device__ static uint32_t fixed(float w, float factor) { return __float_as_uint(fmaf(w, factor, 12582912.0f)); }

  // Multiplies the sums by 2^-times, which rescales all weights added so far.
  __device__ __forceinline__ void lower(int times) {
    if (bound == 0 || exponent() > 255) return;
    const int lowered = exponent() - times;
    if (lowered < kLeast) halve(kLeast - lowered);
    set_bound(max(lowered, kLeast));
  }

  __device__ __forceinline__ void take(Word (&out)[16]) {
    // The unit is NaN once a weight was not finite.
    const uint32_t least = max(bound, static_cast<uint32_t>(kLeast) << 23);
    const float unit = __uint_as_float(bound >> 31 ? 0x7fffffffu : least - (static_cast<uint32_t>(kBits) << 23));
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if constexpr (kReal) {
        out[i] = __fmul_rn(static_cast<float>(sums[i / 4][i % 4]), unit);
      } else {
        out[i] = sums[i / 4][i % 4];
      }
    }
    clear();
  }

 private:
  __device__ __forceinline__ void add(const uint4 (&x)[4], uint32_t first, uint32_t second) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      add_two(word_of(x[0], j), word_of(x[1], j), first, sums[j]);
      add_two(word_of(x[2], j), word_of(x[3], j), second, sums[j]);
    }
  }

  // Adds one word of each of two edges; `weights` holds the weights of the two edges in its 16-bit halves.
  __device__ static void add_two(uint32_t a, uint32_t b, uint32_t weights, int32_t (&to)[4]) {
    const uint32_t first = __byte_perm(a, b, 0x5140), second = __byte_perm(a, b, 0x7362);
    asm("dp2a.lo.s32.s32 %0, %1, %2, %0;" : "+r"(to[0]) : "r"(weights), "r"(first));
    asm("dp2a.hi.s32.s32 %0, %1, %2, %0;" : "+r"(to[1]) : "r"(weights), "r"(first));
    asm("dp2a.lo.s32.s32 %0, %1, %2, %0;" : "+r"(to[2]) : "r"(weights), "r"(second));
    asm("dp2a.hi.s32.s32 %0, %1, %2, %0;" : "+r"(to[3]) : "r"(weights), "r"(second));
  }

  // Returns the biased exponent of the bound: every |weight| of the row so far < 2^(exponent() - 127).
  __device__ __forceinline__ int exponent() const { return static_cast<int>(bound >> 23); }
  __device__ __forceinline__ void set_bound(int exponent) { bound = static_cast<uint32_t>(exponent) << 23; }

  // Halves the sums, rounding, `times` times (at least once).
  __device__ __forceinline__ void halve(int times) {
    const int by = min(times, 31), half = 1 << (by - 1);
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = (sums[i / 4][i % 4] + half) >> by;
  }
};

// FP32 sums of fp16 or bf16 rows without weights, on the tensor cores; the head of this file describes them.
template <class Layout>
struct HalfSum {
  static constexpr bool kBf16 = Layout::kElement == Element::bf16;
  using Word = float;

  float c[2][4];  // columns 4 j .. 4 j + 3 of this thread's piece

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i / 4][i % 4] = 0.0f;
  }

  __device__ __forceinline__ void add_one(const uint4& x) {
    const int lane = Layout::lane(), column = lane / 4;
    const uint32_t one = kBf16 ? 0x3f80u : 0x3c00u;
    const uint32_t identity = column / 2 == lane % 4 ? one << (16 * (column % 2)) : 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (kBf16) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
            : "r"(word_of(x, 2 * j)), "r"(word_of(x, 2 * j + 1)), "r"(identity));
      } else {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
            : "r"(word_of(x, 2 * j)), "r"(word_of(x, 2 * j + 1)), "r"(identity));
      }
    }
  }

  __device__ __forceinline__ void take(Word (&out)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = c[i / 4][i % 4];
    clear();
  }
};

}  // namespace gnnc
