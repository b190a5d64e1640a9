#pragma once

// Exact integer sums of gathered int8 rows, weighted by nothing, by a power of two a source row, or by an int8 an edge.
//
// vpdpbusd adds four products of a 32-bit word to one 32-bit sum. Bytes of two edges are interleaved, so that a word holds
// two columns of both; one instruction takes the even columns and one the odd, the weights of the others being zero. An
// edge of 64 columns costs 1 shuffle and 2 multiply-adds, needs no widening, and gets its weight for nothing. Sums come
// out in the order of the interleaving and are put in column order once a row.
// A 32-bit sum takes at most 2^16 edges: 255 * 128 * 2^16 < 2^31. Longer rows add such sums in 64 bits.

#include "gather.isa.h"
#include "scratch.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kGroup = 65536;

enum class IntWeight { none, pow2, signed8 };

inline int64_t padded(int64_t width) { return (width + 63) / 64 * 64; }

// The weights of a segment: row_weight[e] as bytes, and what has to come off every column.
struct IntWeights {
  const uint8_t* shift;   // by source row
  const int8_t* value;    // by edge
  int64_t first_edge;
};

#ifdef __AVX512F__

// A word of weights for even columns in the low half, for odd columns in the high half.
inline uint64_t pair_word(uint32_t first, uint32_t second) {
  const uint64_t pair = (first & 0xff) | (second & 0xff) << 8;
  return pair | pair << 48;
}

inline void pow2_words(const Segment& s, const uint8_t* shift, uint64_t* words) {
  const uint8_t* k = shift + s.base;
  int64_t e = 0;
  for (; e + 2 <= s.count; e += 2) *words++ = pair_word(128u >> k[s.col[e]], 128u >> k[s.col[e + 1]]);
  if (e < s.count) *words = pair_word(128u >> k[s.col[e]], 0);
}

// Data goes in as unsigned q + 128 where weights are signed, so 128 times the sum of the weights is too much.
inline int64_t signed_words(const Segment& s, const int8_t* value, uint64_t* words) {
  int64_t sum = 0;
  int64_t e = 0;
  for (; e + 2 <= s.count; e += 2) {
    sum += value[e] + value[e + 1];
    *words++ = pair_word(static_cast<uint8_t>(value[e]), static_cast<uint8_t>(value[e + 1]));
  }
  if (e < s.count) {
    sum += value[e];
    *words = pair_word(static_cast<uint8_t>(value[e]), 0);
  }
  return sum * 128;
}

// One vector of 64 columns: sums of even and odd columns of the low and the high half of every 16.
struct Sums {
  __m512i low_even, low_odd, high_even, high_odd;
};

template <IntWeight W>
GNNC_INLINE void add_pair(Sums& s, __m512i a, __m512i b, __m512i even, __m512i odd) {
  if constexpr (W == IntWeight::signed8) {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    a = _mm512_xor_si512(a, sign);
    b = _mm512_xor_si512(b, sign);
  }
  const __m512i low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
  if constexpr (W == IntWeight::signed8) {
    s.low_even = _mm512_dpbusd_epi32(s.low_even, low, even);
    s.low_odd = _mm512_dpbusd_epi32(s.low_odd, low, odd);
    s.high_even = _mm512_dpbusd_epi32(s.high_even, high, even);
    s.high_odd = _mm512_dpbusd_epi32(s.high_odd, high, odd);
  } else {
    s.low_even = _mm512_dpbusd_epi32(s.low_even, even, low);
    s.low_odd = _mm512_dpbusd_epi32(s.low_odd, odd, low);
    s.high_even = _mm512_dpbusd_epi32(s.high_even, even, high);
    s.high_odd = _mm512_dpbusd_epi32(s.high_odd, odd, high);
  }
}

template <IntWeight W>
GNNC_INLINE void weights_of_pair(const uint64_t*& words, __m512i& even, __m512i& odd) {
  if constexpr (W != IntWeight::none) {
    const auto* half = reinterpret_cast<const int32_t*>(words++);
    even = _mm512_set1_epi32(half[0]);
    odd = _mm512_set1_epi32(half[1]);
  }
}

template <IntWeight W, int NV>
GNNC_INLINE void integer_block(const Segment& s, const int8_t* base, int64_t stride,
                                                         const uint64_t* words, Sums* sums, bool first) {
  Sums acc[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) acc[v] = first ? Sums{} : sums[v];
  __m512i even = _mm512_set1_epi32(0x0101), odd = _mm512_set1_epi32(0x01010000);
  int64_t e = 0;
  for (; e + 2 <= s.count; e += 2) {
    prefetch_row(base + s.col[e + s.ahead] * stride, NV * 64);
    prefetch_row(base + s.col[e + 1 + s.ahead] * stride, NV * 64);
    const int8_t* a = base + s.col[e] * stride;
    const int8_t* b = base + s.col[e + 1] * stride;
    weights_of_pair<W>(words, even, odd);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      add_pair<W>(acc[v], _mm512_loadu_si512(a + v * 64), _mm512_loadu_si512(b + v * 64), even, odd);
    }
  }
  if (e < s.count) {
    prefetch_row(base + s.col[e + s.ahead] * stride, NV * 64);
    const int8_t* a = base + s.col[e] * stride;
    weights_of_pair<W>(words, even, odd);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      add_pair<W>(acc[v], _mm512_loadu_si512(a + v * 64), _mm512_setzero_si512(), even, odd);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) sums[v] = acc[v];
}

template <IntWeight W>
void integer_segment(const Segment& s, const Rows<int8_t>& rows, const uint64_t* words, int32_t* sums, bool first) {
  const int8_t* base = rows.data + s.base * rows.stride;
  auto* acc = reinterpret_cast<Sums*>(sums);
  for (int64_t c = 0; c < rows.width;) {
    const int64_t vectors = (rows.width - c + 63) / 64;
    if (vectors >= 4) {
      integer_block<W, 4>(s, base + c, rows.stride, words, acc, first), c += 256, acc += 4;
    } else if (vectors >= 2) {
      integer_block<W, 2>(s, base + c, rows.stride, words, acc, first), c += 128, acc += 2;
    } else {
      integer_block<W, 1>(s, base + c, rows.stride, words, acc, first), c += 64, acc += 1;
    }
  }
}

// Where the sum of a column is.
inline int64_t place_of(int64_t column) {
  const int64_t vector = column / 64, lane = column % 64 / 16, high = column % 16 / 8, pair = column % 8 / 2;
  return vector * 64 + (high * 2 + column % 2) * 16 + lane * 4 + pair;
}

// 64 sums, less the correction, as floats in column order.
inline void store_columns(const Sums& s, __m512i correction, float* out) {
  const __m512i t0 = _mm512_unpacklo_epi32(s.low_even, s.low_odd), t1 = _mm512_unpackhi_epi32(s.low_even, s.low_odd);
  const __m512i t2 = _mm512_unpacklo_epi32(s.high_even, s.high_odd), t3 = _mm512_unpackhi_epi32(s.high_even, s.high_odd);
  const __m512i a = _mm512_shuffle_i32x4(t0, t1, 0x44), b = _mm512_shuffle_i32x4(t0, t1, 0xee);
  const __m512i c = _mm512_shuffle_i32x4(t2, t3, 0x44), d = _mm512_shuffle_i32x4(t2, t3, 0xee);
  const auto put = [&](__m512i v, int at) {
    _mm512_storeu_ps(out + at, _mm512_cvtepi32_ps(_mm512_sub_epi32(v, correction)));
  };
  put(_mm512_shuffle_i32x4(a, c, 0x88), 0);
  put(_mm512_shuffle_i32x4(a, c, 0xdd), 16);
  put(_mm512_shuffle_i32x4(b, d, 0x88), 32);
  put(_mm512_shuffle_i32x4(b, d, 0xdd), 48);
}

inline void store_sums(const int32_t* sums, int64_t correction, int64_t width, float* out) {
  const __m512i off = _mm512_set1_epi32(static_cast<int32_t>(correction));
  for (int64_t c = 0; c < width; c += 64) store_columns(*reinterpret_cast<const Sums*>(sums + c), off, out + c);
}

// Returns what is to be taken off every column.
inline int64_t add_segment(const Segment& s, const Rows<int8_t>& rows, const IntWeights& weights, int32_t* sums,
                           bool first) {
  alignas(64) uint64_t words[kSegment / 2];
  if (weights.shift != nullptr) {
    pow2_words(s, weights.shift, words);
    integer_segment<IntWeight::pow2>(s, rows, words, sums, first);
    return 0;
  }
  if (weights.value != nullptr) {
    const int64_t correction = signed_words(s, weights.value + weights.first_edge, words);
    integer_segment<IntWeight::signed8>(s, rows, words, sums, first);
    return correction;
  }
  integer_segment<IntWeight::none>(s, rows, words, sums, first);
  return 0;
}

#else

inline int64_t place_of(int64_t column) { return column; }

inline void store_sums(const int32_t* sums, int64_t correction, int64_t width, float* out) {
  for (int64_t c = 0; c < width; ++c) out[c] = static_cast<float>(sums[c] - static_cast<int32_t>(correction));
}

inline int64_t add_segment(const Segment& s, const Rows<int8_t>& rows, const IntWeights& weights, int32_t* sums,
                           bool first) {
  if (first) std::memset(sums, 0, static_cast<size_t>(rows.width) * sizeof(int32_t));
  for (int64_t e = 0; e < s.count; ++e) {
    const int64_t source = s.base + s.col[e];
    const int8_t* row = rows.data + source * rows.stride;
    int16_t w = 1;
    if (weights.shift != nullptr) w = static_cast<int16_t>(128 >> weights.shift[source]);
    if (weights.value != nullptr) w = weights.value[weights.first_edge + e];
    for (int64_t c = 0; c < rows.width; ++c) sums[c] += w * row[c];
  }
  return 0;
}

#endif

// The sums over at most 2^16 edges. Returns what is to be taken off every column.
inline int64_t add_group(const Csr& csr, const Rows<int8_t>& rows, IntWeights weights, int64_t begin, int64_t end,
                         int32_t* sums) {
  int64_t correction = 0;
  for (int64_t e = begin; e < end; e += kSegment) {
    weights.first_edge = e;
    correction += add_segment(segment(csr, e, std::min(e + kSegment, end)), rows, weights, sums, e == begin);
  }
  return correction;
}

inline void integer_row(const Csr& csr, const Rows<int8_t>& rows, const IntWeights& weights, int64_t begin, int64_t end,
                        float* out) {
  static thread_local Scratch sum_scratch, total_scratch;
  auto* sums = sum_scratch.get<int32_t>(static_cast<size_t>(padded(rows.width)));
  if (end - begin <= kGroup) {
    const int64_t correction = add_group(csr, rows, weights, begin, end, sums);
    return store_sums(sums, correction, rows.width, out);
  }
  auto* totals = total_scratch.get<int64_t>(static_cast<size_t>(rows.width));
  std::memset(totals, 0, static_cast<size_t>(rows.width) * sizeof(int64_t));
  for (int64_t e = begin; e < end; e += kGroup) {
    const int64_t correction = add_group(csr, rows, weights, e, std::min(e + kGroup, end), sums);
    for (int64_t c = 0; c < rows.width; ++c) totals[c] += sums[place_of(c)] - correction;
  }
  for (int64_t c = 0; c < rows.width; ++c) out[c] = static_cast<float>(totals[c]);
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
