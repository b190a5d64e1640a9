#pragma once

// Sums of gathered int8 rows with a float weight an edge and head, in integer arithmetic.
//
// The weights of a segment become 16-bit integers, in proportion to the largest of their head: one errs by at most
// 2^-17 of that. Each is split into two bytes. Four rows are interleaved, so that a word holds one column of four
// edges, and vpdpbusd multiplies it by a word of four weights: an edge of 64 columns takes 1 load, 2 shuffles and 2
// multiply-adds, where conversion to float takes 12 instructions. 255 * 127 * kSegment < 2^24: a sum is exact as a
// float.

#include "byte_dot.isa.h"
#include "heads.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

#ifdef __AVX512F__

constexpr int kFixedHeads = 8;
constexpr float kLeastUnit = 1e-30f;  // the largest weight of a head must be this, for its reciprocal to be a float

// The weights of a segment: for every four edges and each head a word of four high bytes and one of four low bytes.
struct FixedWeights {
  alignas(64) uint32_t high[kSegment / 4 * kFixedHeads + 16];
  alignas(64) uint32_t low[kSegment / 4 * kFixedHeads + 16];
  __m512 unit;  // a head a lane, repeated: what 1 stands for
};

// Which byte of a vector of weights [edge][head], 32 bits each, comes where: words of four edges, a head after the
// other, low bytes first, then as many high bytes.
template <int H>
struct WordOrder {
  alignas(64) uint8_t byte[64] = {};
  constexpr WordOrder() {
    constexpr int kBytes = H == 8 ? 32 : 16;
    for (int i = 0; i < kBytes; ++i) {
      const int group = i / (4 * H), head = i / 4 % H, edge = i % 4;
      byte[i] = static_cast<uint8_t>(((group * 4 + edge) * H + head) * 4);
      byte[kBytes + i] = static_cast<uint8_t>(byte[i] + 1);
    }
  }
};
template <int H>
constexpr WordOrder<H> kWordOrder;

GNNC_INLINE __m512 weights_at(const float* w, int64_t left) {
  return left >= 16 ? _mm512_loadu_ps(w) : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), w);
}

// The bits of the largest weight of each head. Those of non-negative floats order like the numbers; a sign, an infinity
// or a NaN is more than all.
template <int H>
GNNC_INLINE __m512i largest_weights(const float* w, int64_t count) {
  const int64_t flat = count * H;
  __m512i bits = _mm512_setzero_si512();
  for (int64_t i = 0; i < flat; i += 16) {
    bits = _mm512_max_epu32(bits, _mm512_castps_si512(weights_at(w + i, flat - i)));
  }
  const auto larger = [](Ints a, Ints b)
                          __attribute__((always_inline)) { return (Ints)_mm512_max_epu32((__m512i)a, (__m512i)b); };
  return (__m512i)fold_heads<H>((Ints)bits, larger);
}

// False where a weight is negative, NaN or infinite, or where all weights of a head are tiny.
template <int H>
GNNC_INLINE bool fix_weights(const Weights& weights, int64_t count, FixedWeights& out) {
  const float* w = weights.data;
  const int64_t flat = count * H;
  const __m512i bits = weights.largest != nullptr ? _mm512_loadu_si512(weights.largest) : largest_weights<H>(w, count);
  const __m512 top = _mm512_castsi512_ps(bits), full = _mm512_set1_ps(65535.0f);
  const __mmask16 some = _mm512_cmpneq_epi32_mask(bits, _mm512_setzero_si512());
  const __m512i least = _mm512_set1_epi32(to_bits(kLeastUnit)), infinity = _mm512_set1_epi32(0x7f800000);
  if ((_mm512_mask_cmplt_epu32_mask(some, bits, least) | _mm512_cmpge_epu32_mask(bits, infinity)) != 0) return false;
  const __m512 factor = _mm512_maskz_div_ps(some, full, top);
  out.unit = top * _mm512_set1_ps(1.0f / 65535.0f);
  if (weights.factor != nullptr) out.unit *= repeat_heads<H>(weights.factor);
  const auto fixed = [&](int64_t i) __attribute__((always_inline)) {
    return _mm512_cvtps_epi32(weights_at(w + i, flat - i) * factor);
  };
  if constexpr (H == 1) {
    for (int64_t i = 0; i < flat; i += 16) {
      const __m512i v = fixed(i);
      _mm_store_si128(reinterpret_cast<__m128i*>(out.low + i / 4), _mm512_cvtepi32_epi8(v));
      _mm_store_si128(reinterpret_cast<__m128i*>(out.high + i / 4), _mm512_cvtepi32_epi8(_mm512_srli_epi32(v, 8)));
    }
  } else if constexpr (H == 8) {
    const __m512i order = _mm512_load_si512(kWordOrder<H>.byte);
    for (int64_t i = 0; i < flat; i += 32) {
      const __m512i second = flat - i > 16 ? fixed(i + 16) : _mm512_setzero_si512();
      const __m512i bytes = _mm512_permutex2var_epi8(fixed(i), order, second);
      _mm256_store_si256(reinterpret_cast<__m256i*>(out.low + i / 4), _mm512_castsi512_si256(bytes));
      _mm256_store_si256(reinterpret_cast<__m256i*>(out.high + i / 4), _mm512_extracti64x4_epi64(bytes, 1));
    }
  } else {
    const __m512i order = _mm512_load_si512(kWordOrder<H>.byte);
    for (int64_t i = 0; i < flat; i += 16) {
      const __m512i bytes = _mm512_permutexvar_epi8(order, fixed(i));
      _mm_store_si128(reinterpret_cast<__m128i*>(out.low + i / 4), _mm512_castsi512_si128(bytes));
      _mm_store_si128(reinterpret_cast<__m128i*>(out.high + i / 4), _mm512_extracti32x4_epi32(bytes, 1));
    }
  }
  return true;
}

// The heads of the four times 16 columns from `column` on, one a lane of four words.
template <int H>
GNNC_INLINE __m512i heads_of_lanes(int64_t column, int64_t head_width) {
  if constexpr (H == 1) return _mm512_setzero_si512();
  const __m512i lane = _mm512_srli_epi32(_mm512_loadu_si512(kLaneNumbers.lane), 2);
  const __m512 block = _mm512_cvtepi32_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int>(column / 16))));
  const __m512 blocks = _mm512_set1_ps(static_cast<float>(head_width / 16));
  return _mm512_cvttps_epi32(_mm512_div_ps(_mm512_add_ps(block, _mm512_set1_ps(0.5f)), blocks));
}

template <int H>
GNNC_INLINE __m512i words_of(const uint32_t* words, __m512i heads) {
  if constexpr (H == 1) return _mm512_set1_epi32(static_cast<int>(*words));
  return _mm512_permutexvar_epi32(heads, _mm512_loadu_si512(words));
}

template <int H, int NV>
GNNC_INLINE void fixed_block(const Segment& s, const Rows<int8_t>& rows, int64_t column, const FixedWeights& w,
                             int64_t head_width, bool first, float* out) {
  __m512i high[NV][4]{}, low[NV][4]{}, heads[NV];
  each<NV>([&](auto v) __attribute__((always_inline)) { heads[v] = heads_of_lanes<H>(column + v * 64, head_width); });
  const int8_t* base = rows.data + s.base * rows.stride + column;
  for_fours(s, base, rows.stride, NV * 64, [&](const Fours& four) __attribute__((always_inline)) {
    const int64_t word = four.first / 4 * H;
    each<NV>([&](auto v) __attribute__((always_inline)) {
      const auto at = [&](const int8_t* p) __attribute__((always_inline)) { return _mm512_loadu_si512(p + v * 64); };
      __m512i x[4];
      interleave(at(four.row[0]), at(four.row[1]), at(four.row[2]), at(four.row[3]), x);
      const __m512i wh = words_of<H>(w.high + word, heads[v]), wl = words_of<H>(w.low + word, heads[v]);
      each<4>([&](auto i) __attribute__((always_inline)) {
        dot_bytes(high[v][i], wh, x[i]);
        dot_bytes(low[v][i], wl, x[i]);
      });
    });
  });
  each<NV>([&](auto v) __attribute__((always_inline)) {
    const __m512 unit = _mm512_permutexvar_ps(heads[v], w.unit);
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
  FixedWeights fixed;
  if (!fix_weights<H>(weights, s.count, fixed)) {
    return sum_kernel<int8_t>(rows.width, weights.heads, true)(s, rows, weights, first, out);
  }
  int64_t c = 0;
  for (; rows.width - c > 64; c += 128) fixed_block<H, 2>(s, rows, c, fixed, weights.head_width, first, out);
  if (c < rows.width) fixed_block<H, 1>(s, rows, c, fixed, weights.head_width, first, out);
}

#endif

// The kernel for sums of rows with a float weight an edge and head; out has room for a multiple of 64 columns.
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
