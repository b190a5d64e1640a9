#pragma once

// Sums of gathered int8 rows with a float weight an edge and head, in integer arithmetic.
//
// Weights are converted to 16-bit integers, relative to the largest weight of their head and segment (or row): the
// error of a weight is at most 2^-17 of the largest. Four rows are interleaved, so that a word holds one column of four
// edges; a word of the low bytes of four weights and a word of the high bytes are shuffled to the columns of their
// head, and vpdpbusd multiplies and adds. Four edges of 64 columns take 4 loads, 8 + 2 shuffles, 8 multiply-adds and 3
// instructions for their weights, where conversion of the rows to float takes 12 an edge. 255 * 127 * kSegment < 2^24:
// a sum is exact as a float.

#include "byte_dot.isa.h"
#include "heads.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

// Least value of the largest weight of a head, so that its reciprocal is a finite float.
constexpr float kLeastTop = 1e-30f;
constexpr float kSteps = 65535.0f;  // the integer that the largest weight becomes

#ifdef __AVX512F__

// Factors by head, one head a lane, repeated: the integer steps of a weight of 1, and the value of one step of the sum.
struct FixedScale {
  __m512 steps, unit;
};

GNNC_INLINE __m512 weights_at(const float* w, int64_t left) {
  return left >= 16 ? _mm512_loadu_ps(w) : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), w);
}

// Returns the bits of the largest weight of each head. The bits of non-negative floats are ordered like the numbers; a
// negative value, an infinity or a NaN is above all others.
template <int H>
GNNC_INLINE __m512i largest_weights(const float* w, int64_t count) {
  const int64_t flat = count * H;
  __m512i bits = _mm512_setzero_si512();
  for (int64_t i = 0; i < flat; i += 16) {
    bits = _mm512_max_epu32(bits, _mm512_castps_si512(weights_at(w + i, flat - i)));
  }
  return (__m512i)fold_heads<H>((Ints)bits, larger_bits);
}

// Computes the factors of a segment. Returns false if a weight is negative, NaN or infinite, or if all weights of a
// head are tiny.
template <int H>
GNNC_INLINE bool fixed_scale(const Weights& weights, int64_t count, FixedScale& out) {
  if (weights.steps != nullptr) {
    out = {repeat_heads<H>(weights.steps), repeat_heads<H>(weights.unit)};
    return true;
  }
  const __m512i bits = largest_weights<H>(weights.data, count);
  const __m512 top = _mm512_castsi512_ps(bits);
  const __mmask16 some = _mm512_cmpneq_epi32_mask(bits, _mm512_setzero_si512());
  const __m512i least = _mm512_set1_epi32(to_bits(kLeastTop)), infinity = _mm512_set1_epi32(0x7f800000);
  if ((_mm512_mask_cmplt_epu32_mask(some, bits, least) | _mm512_cmpge_epu32_mask(bits, infinity)) != 0) return false;
  out = {_mm512_maskz_div_ps(some, _mm512_set1_ps(kSteps), top), top * _mm512_set1_ps(1.0f / kSteps)};
  if (weights.factor != nullptr) out.unit *= repeat_heads<H>(weights.factor);
  return true;
}

// The weights of four edges, [edge][H], as integers; weights past the last edge are 0.
template <int H>
struct FixedWeights {
  __m512i first, second;  // `second` is used with eight heads only

  GNNC_INLINE FixedWeights(const float* w, int64_t left, __m512 steps) {
    first = _mm512_cvtps_epi32(read(w, left * H) * steps);
    if constexpr (H == 8) second = _mm512_cvtps_epi32(read(w + 16, std::max<int64_t>(left * H - 16, 0)) * steps);
  }

  static GNNC_INLINE __m512 read(const float* w, int64_t left) {
    if (left < std::min(4 * H, 16)) return weights_at(w, left);
    if constexpr (H == 1) return _mm512_castps128_ps512(_mm_loadu_ps(w));
    if constexpr (H == 2) return _mm512_castps256_ps512(_mm256_loadu_ps(w));
    return _mm512_loadu_ps(w);
  }

  GNNC_INLINE __m512i bytes(__m512i which) const {
    if constexpr (H == 8) return _mm512_permutex2var_epi8(first, which, second);
    return _mm512_permutexvar_epi8(which, first);
  }
};

// Returns the heads of the four times 16 columns from `column` on, one head for each 128-bit lane.
template <int H>
GNNC_INLINE __m512i heads_of_lanes(int64_t column, float heads_a_block) {
  if constexpr (H == 1) return _mm512_setzero_si512();
  const __m512i lane = _mm512_srli_epi32(_mm512_loadu_si512(kLaneNumbers.lane), 2);
  const __m512 block = _mm512_cvtepi32_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int>(column / 16))));
  return _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_add_ps(block, _mm512_set1_ps(0.5f)), _mm512_set1_ps(heads_a_block)));
}

// Returns the positions of the low bytes of the weights of four edges, for lanes that belong to these heads.
template <int H>
GNNC_INLINE __m512i low_bytes(__m512i heads) {
  constexpr int kEdges = 4 * H * (1 << 8 | 2 << 16 | 3 << 24);
  return _mm512_add_epi32(_mm512_mullo_epi32(heads, _mm512_set1_epi32(0x04040404)), _mm512_set1_epi32(kEdges));
}

// NV times 64 columns: their heads, and the byte positions of their weights.
template <int H, int NV>
struct FixedColumns {
  __m512i heads[NV], low[NV], high[NV];

  GNNC_INLINE FixedColumns(int64_t column, float heads_a_block) {
    each<NV>([&](auto v) __attribute__((always_inline)) {
      heads[v] = heads_of_lanes<H>(column + v * 64, heads_a_block);
      low[v] = low_bytes<H>(heads[v]);
      high[v] = _mm512_add_epi32(low[v], _mm512_set1_epi32(0x01010101));
    });
  }
};

template <int H, int NV>
GNNC_INLINE void fixed_block(const Segment& s, const Rows<int8_t>& rows, int64_t column,
                             const FixedColumns<H, NV>& columns, const float* weights, const FixedScale& scale,
                             bool first, float* out) {
  __m512i high[NV][4]{}, low[NV][4]{};
  const int8_t* base = rows.data + s.base * rows.stride + column;
  for_fours(s, base, rows.stride, NV * 64, [&](const Fours& four) __attribute__((always_inline)) {
    const FixedWeights<H> w(weights + four.first * H, four.left, scale.steps);
    each<NV>([&](auto v) __attribute__((always_inline)) {
      const auto at = [&](const int8_t* p) __attribute__((always_inline)) { return _mm512_loadu_si512(p + v * 64); };
      __m512i x[4];
      interleave(at(four.row[0]), at(four.row[1]), at(four.row[2]), at(four.row[3]), x);
      const __m512i wh = w.bytes(columns.high[v]), wl = w.bytes(columns.low[v]);
      each<4>([&](auto i) __attribute__((always_inline)) {
        dot_bytes(high[v][i], wh, x[i]);
        dot_bytes(low[v][i], wl, x[i]);
      });
    });
  });
  each<NV>([&](auto v) __attribute__((always_inline)) {
    const __m512 unit = _mm512_permutexvar_ps(columns.heads[v], scale.unit);
    __m512 sum[4];
    each<4>([&](auto i) __attribute__((always_inline)) {
      const __m512 tail = _mm512_cvtepi32_ps(low[v][i]);
      sum[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[v][i]), _mm512_set1_ps(256.0f), tail) * unit;
    });
    order_columns(sum);
    each<4>([&](auto i) __attribute__((always_inline)) {
      float* to = out + column + v * 64 + i * 16;
      _mm512_storeu_ps(to, first ? sum[i] : sum[i] + _mm512_loadu_ps(to));
    });
  });
}

template <int H>
void fixed_sum(const Segment& s, const Rows<int8_t>& rows, const Weights& weights, bool first, float* out) {
  FixedScale scale;
  if (!fixed_scale<H>(weights, s.count, scale)) {
    return sum_kernel<int8_t>(rows.width, weights.heads, true)(s, rows, weights, first, out);
  }
  const auto block = [&](int64_t c, auto vectors) __attribute__((always_inline)) {
    const FixedColumns<H, vectors> columns(c, weights.heads_a_block);
    fixed_block(s, rows, c, columns, weights.data, scale, first, out);
  };
  int64_t c = 0;
  for (; rows.width - c > 64; c += 128) block(c, std::integral_constant<int, 2>{});
  if (c < rows.width) block(c, std::integral_constant<int, 1>{});
}

#endif

// Returns the kernel for sums of rows with a float weight an edge and head; `out` needs room for a multiple of 64
// columns.
template <typename T>
SumKernel<T> weighted_sum_kernel(int64_t width, int64_t heads) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, int8_t>) {
    if (heads == 1) return fixed_sum<1>;
    if (width / heads % 16 == 0 && heads == 2) return fixed_sum<2>;
    if (width / heads % 16 == 0 && heads == 4) return fixed_sum<4>;
    if (width / heads % 16 == 0 && heads == 8) return fixed_sum<8>;
  }
#endif
  return sum_kernel<T>(width, heads, true);
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
