#pragma once

// Weighted sums of gathered rows on the tensor cores, without unpacking a byte.
//
// Integers (mma.m16n8k32, exact): a thread's 4-byte word holds 4 neighbouring columns of one edge. As part of matrix A
// the word is a row of A (one 16-byte piece of x) and four steps of k, (edge, residue), residue being the column modulo
// 4. Matrix B[(edge, residue)][(group, residue')] = weight of the edge in that group where residue = residue', else 0.
// So C[piece][(group, residue)] = sum over edges of weight * x. The 16 rows of A are two words of eight pieces, k is 8
// edges, the 8 columns of B are two groups of four residues. A group is one digit of the weights of one set (the
// threads that work on one run).
//
// Real weights are such digits too: w = unit * (256 * high + low), with unit = 2^(e - 14) and 2^e above every weight of
// the run so far; when a larger one comes, the sums are multiplied by the old unit and start again. An error of one
// weight is at most 2^-15 of the power of two above the largest weight of its run.
//
// Halves (mma.m16n8k16, FP32 sums): words of two edges are paired by __byte_perm so that k is the edge alone, and a
// value that is not finite stays in its column. Weights are scaled as above and split into a high and a low half.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "rows.cuh"

namespace gnnc {

template <bool kUnsigned>
__device__ inline void multiply_bytes(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                      uint32_t b1) {
  if constexpr (kUnsigned) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

template <bool kBrain>
__device__ inline void multiply_halves(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                       uint32_t b1) {
  if constexpr (kBrain) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

__device__ inline uint32_t word_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

// The unit of real weights. All threads of a set keep the same one.
struct WeightUnit {
  static constexpr int kLeast = 20;  // so that neither the unit nor its inverse leaves the normal numbers
  int exponent = kLeast;             // every |weight| so far < 2^(exponent - 127)

  // The exponent that these weights need too; four neighbouring threads hold the weights of one set.
  __device__ int needed(const float (&w)[4]) const {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) top = max(top, __float_as_uint(w[i]) & 0x7fffffffu);
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
    return max(exponent, static_cast<int>(top >> 23) + 1);
  }
  // Weights times this are at most 2^14.
  __device__ float inverse() const { return __uint_as_float(static_cast<uint32_t>(max(268 - exponent, 1)) << 23); }
  // NaN once a weight was not finite.
  __device__ float unit() const { return __uint_as_float(exponent > 255 ? 0x7fffffffu : (exponent - 14u) << 23); }
};

enum class Weight { none, signed8, power8, real };

template <class Layout, Weight kWeight>
struct IntegerSum {
  static constexpr int kSets = Layout::kSets, kPieces = Layout::kPieces;
  static constexpr int kDigits = kWeight == Weight::real ? 2 : 1;
  static constexpr int kHalves = kSets / 2;  // pairs of sets
  static constexpr int kProducts = kWeight == Weight::none || kSets == 1 ? 1 : kDigits * kHalves;
  static constexpr bool kReal = kWeight == Weight::real;
  using Word = typename Select<kReal, float, int32_t>::Type;

  int32_t c[kProducts][2][4];
  float total[kReal ? 8 : 1];
  WeightUnit unit;

  __device__ void clear() {
#pragma unroll
    for (int t = 0; t < kProducts; ++t) clear_products(t);
#pragma unroll
    for (int i = 0; i < (kReal ? 8 : 1); ++i) total[i] = 0.0f;
    unit.exponent = WeightUnit::kLeast;
  }

  // x of four edges of this thread, and the weights as bytes: edge i in byte i.
  __device__ void add_digits(const LanePlace<Layout>& at, const uint4 (&x)[4], const uint32_t (&digits)[kDigits]) {
    const int row = static_cast<int>(threadIdx.x) % 32 / 4, residue = row % 4;
#pragma unroll
    for (int t = 0; t < kProducts; ++t) {
      uint32_t b[4];
      if constexpr (kWeight == Weight::none) {
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = 1u << (8 * residue);
      } else {
        const uint32_t word = digit_word(at, digits, t, row / 4);
        const uint32_t none = 0x4444u & ~(0xfu << (4 * residue));
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = __byte_perm(word, 0, none | (i << (4 * residue)));
      }
#pragma unroll
      for (int pair = 0; pair < 4; pair += 2) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          multiply_bytes<kWeight == Weight::power8>(c[t][j], word_of(x[pair], 2 * j), word_of(x[pair], 2 * j + 1),
                                                    word_of(x[pair + 1], 2 * j), word_of(x[pair + 1], 2 * j + 1),
                                                    b[pair], b[pair + 1]);
        }
      }
    }
  }

  __device__ void add(const LanePlace<Layout>& at, const uint4 (&x)[4], const float (&w)[4]) {
    const int exponent = unit.needed(w);
    if (__any_sync(0xffffffffu, exponent > unit.exponent)) {
      flush(at);
      unit.exponent = exponent;
    }
    const float inverse = unit.inverse();
    uint32_t digits[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t fixed = __float2int_rn(__fmul_rn(w[i], inverse));
      const int32_t high = (fixed + 128) >> 8;
      digits[0] |= (static_cast<uint32_t>(fixed) & 0xffu) << (8 * i);  // low digit: fixed - 256 * high, as a byte
      digits[1] |= (static_cast<uint32_t>(high) & 0xffu) << (8 * i);
    }
    add_digits(at, x, digits);
  }

  // The sums of the columns that this thread owns, into a row of its set.
  __device__ void store(const LanePlace<Layout>& at, Word* row) {
    if constexpr (kReal) flush(at);
    int32_t sums[8];
    if constexpr (!kReal) pick(at, 0, sums);
    if (!owns(at)) return;
    Word* to = row + at.piece * 16 + at.slot % 2 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kReal) {
        to[i / 2 * 4 + i % 2] = total[i];
      } else {
        to[i / 2 * 4 + i % 2] = sums[i];
      }
    }
  }

 private:
  __device__ void clear_products(int t) {
#pragma unroll
    for (int i = 0; i < 8; ++i) c[t][i / 4][i % 4] = 0;
  }

  // Digits of the set (and of the digit) that columns group * 4 .. of B belong to.
  __device__ static uint32_t digit_word(const LanePlace<Layout>& at, const uint32_t (&digits)[kDigits], int t,
                                        int group) {
    if constexpr (kSets == 1) {
      return kDigits == 2 && group == 1 ? digits[kDigits - 1] : digits[0];
    } else if constexpr (kSets == 2) {
      return digits[t];
    } else {
      const int source = (2 * (t % kHalves) + group) * Layout::kLanes + at.slot;
      return __shfl_sync(0xffffffffu, digits[t / kHalves], source);
    }
  }

  __device__ static bool owns(const LanePlace<Layout>& at) {
    if constexpr (kWeight == Weight::none || kSets == 1) return at.slot < 2;
    return at.slot / 2 == at.set % 2;
  }

  // Sums of one digit: columns 4 j + 2 (slot % 2) + k of the piece, as [2 j + k].
  __device__ void pick(const LanePlace<Layout>& at, int digit, int32_t (&sums)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int word = i / 2, k = i % 2;
      if constexpr (kProducts == 1) {
        sums[i] = c[0][word / 2][word % 2 * 2 + k];
      } else {
        sums[i] = 0;
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          if (at.set / 2 == h) sums[i] = c[digit * kHalves + h][word / 2][word % 2 * 2 + k];
        }
      }
    }
  }

  __device__ void flush(const LanePlace<Layout>& at) {
    int32_t low[8], high[8];
    pick(at, 0, low);
    if constexpr (kSets == 1) {
#pragma unroll
      for (int i = 0; i < 8; ++i) high[i] = __shfl_xor_sync(0xffffffffu, low[i], 2);
    } else {
      pick(at, 1, high);
    }
    const float by = unit.unit();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float sum = fmaf(static_cast<float>(high[i]), 256.0f, static_cast<float>(low[i]));
      total[i] = fmaf(sum, by, total[i]);
    }
#pragma unroll
    for (int t = 0; t < kProducts; ++t) clear_products(t);
  }
};

template <class Layout, Weight kWeight>
struct HalfSum {
  static constexpr bool kBrain = Layout::kElement == Element::bf16;
  static constexpr bool kReal = kWeight == Weight::real;
  static constexpr int kPieces = Layout::kPieces;
  static_assert(kPieces >= 2 && Layout::kSets <= 4, "a set has two columns of B: high and low halves of weights");
  using Word = float;

  float c[4][4];
  float total[kReal ? 8 : 1];
  WeightUnit unit;

  __device__ void clear() {
    clear_products();
#pragma unroll
    for (int i = 0; i < (kReal ? 8 : 1); ++i) total[i] = 0.0f;
    unit.exponent = WeightUnit::kLeast;
  }

  __device__ void add(const LanePlace<Layout>&, const uint4 (&x)[4]) {
    const uint32_t ones = kBrain ? 0x3f803f80u : 0x3c003c00u;
    multiply(x, ones, ones);
  }

  __device__ void add(const LanePlace<Layout>& at, const uint4 (&x)[4], const float (&w)[4]) {
    const int exponent = unit.needed(w);
    if (__any_sync(0xffffffffu, exponent > unit.exponent)) {
      flush();
      unit.exponent = exponent;
    }
    const float inverse = unit.inverse();
    uint32_t part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scaled = __fmul_rn(w[i], inverse);
      const uint32_t high = round(scaled);
      part[i] = at.piece == 0 ? high : at.piece == 1 ? round(__fsub_rn(scaled, widen(high))) : 0;
    }
    multiply(x, part[0] | part[1] << 16, part[2] | part[3] << 16);
  }

  __device__ void store(const LanePlace<Layout>& at, float* row) {
    if constexpr (kReal) {
      flush();
      if (at.slot != at.set * kPieces / 2) return;
      float* to = row + at.piece * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = total[i];
    } else {  // every slot has all sums
      float first = c[0][0], second = c[0][2];
#pragma unroll
      for (int j = 1; j < 4; ++j) {
        if (at.slot == j) first = c[j][0], second = c[j][2];
      }
      *reinterpret_cast<float2*>(row + at.piece * 8 + at.slot * 2) = make_float2(first, second);
    }
  }

 private:
  __device__ void clear_products() {
#pragma unroll
    for (int i = 0; i < 16; ++i) c[i / 4][i % 4] = 0.0f;
  }

  __device__ static uint32_t round(float v) {
    if constexpr (kBrain) return __bfloat16_as_ushort(__float2bfloat16_rn(v));
    return __half_as_ushort(__float2half_rn(v));
  }
  __device__ static float widen(uint32_t bits) {
    if constexpr (kBrain) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  }

  __device__ void multiply(const uint4 (&x)[4], uint32_t b0, uint32_t b1) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t w0 = word_of(x[0], j), w1 = word_of(x[1], j), w2 = word_of(x[2], j), w3 = word_of(x[3], j);
      multiply_halves<kBrain>(c[j], __byte_perm(w0, w1, 0x5410), __byte_perm(w0, w1, 0x7632),
                              __byte_perm(w2, w3, 0x5410), __byte_perm(w2, w3, 0x7632), b0, b1);
    }
  }

  // Column 2 j + k of the piece as [2 j + k]; right in the threads of the slot that has the weights of this set.
  __device__ void flush() {
    const float by = unit.unit();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int j = i / 2, k = i % 2;
      total[i] = fmaf(__fadd_rn(c[j][2 * k], c[j][2 * k + 1]), by, total[i]);
    }
    clear_products();
  }
};

}  // namespace gnnc
