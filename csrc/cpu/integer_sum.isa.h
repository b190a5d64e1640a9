#pragma once

// Exact integer sums of gathered int8 rows, weighted by nothing, by a power of two a source row, or by an int8 an edge.
//
// vpdpbusd adds four products of a 32-bit word to one 32-bit sum. Bytes of two edges are interleaved, so that a word
// holds two columns of both; one instruction takes the even columns and one the odd, the weights of the others being
// zero. An edge of 64 columns costs 1 shuffle and 2 multiply-adds, needs no widening, and gets its weight for nothing.
// Sums come out in the order of the interleaving and are put in column order once a row. A 32-bit sum takes at most
// 2^16 edges: 255 * 128 * 2^16 < 2^31. Longer rows add such sums in 64 bits.

#include "gather.isa.h"
#include "scratch.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kGroup = 65536;

enum class IntWeight { none, pow2, signed8 };

inline int64_t padded(int64_t width) { return (width + 63) / 64 * 64; }

struct IntSum {
  Csr csr;
  Rows<int8_t> rows;
  const uint8_t* power;  // 2^(7 - shift) by edge, for pow2
  const int8_t* value;   // by edge, for signed8
  int32_t* sums;         // [padded width], scratch
  int64_t* totals;       // [width], scratch
};

// power[e] = 2^(7 - shift) of the source of every edge of a tile: a gather, kept apart from the rows that wait for it.
inline void powers_of_edges(const Csr& csr, const uint8_t* shift, int64_t begin, int64_t end, uint8_t* power) {
  int64_t e = begin;
#ifdef __AVX512F__
  // Shifts are fetched as the aligned words that hold them, so that none past the last is read from another page.
  const auto address = reinterpret_cast<uintptr_t>(shift);
  const auto* aligned = reinterpret_cast<const int32_t*>(address & ~uintptr_t{3});
  const __m512i start = _mm512_set1_epi32(static_cast<int32_t>(address & 3)), three = _mm512_set1_epi32(3);
  for (; csr.col != nullptr && e + 16 <= end; e += 16) {
    const __m512i at = _mm512_add_epi32(_mm512_loadu_si512(csr.col + e), start);
    const __m512i word = _mm512_i32gather_epi32(_mm512_srli_epi32(at, 2), aligned, 4);
    const __m512i k = _mm512_srlv_epi32(word, _mm512_slli_epi32(_mm512_and_si512(at, three), 3));
    const __m512i w = _mm512_srlv_epi32(_mm512_set1_epi32(128), _mm512_and_si512(k, _mm512_set1_epi32(7)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(power + (e - begin)), _mm512_cvtepi32_epi8(w));
  }
#endif
  for (; e < end; ++e) power[e - begin] = static_cast<uint8_t>(128 >> shift[csr.col == nullptr ? e : csr.col[e]]);
}

#ifdef __AVX512F__

alignas(64) constexpr int8_t kZeroRow[256] = {};

// The weights of a segment, a word a pair of edges, with room for whole vectors.
using WeightWords = uint64_t[kSegment / 2 + 8];

// Two weights as the word for even columns in the low half and the word for odd columns in the high half.
GNNC_INLINE __m512i pair_words(__m512i pairs) { return _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 48)); }

// acc += products of unsigned and signed bytes. g++ 12 copies every accumulator twice a step around the intrinsic.
GNNC_INLINE void dot_bytes(__m512i& acc, __m512i u, __m512i s) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s));
}

// The weights of a segment as words, from bytes.
GNNC_INLINE void spread_words(const void* bytes, int64_t count, uint64_t* words) {
  for (int64_t e = 0; e < count; e += 16) {
    const auto mask = static_cast<__mmask16>(count - e >= 16 ? 0xffff : (1u << (count - e)) - 1);
    const __m128i w = _mm_maskz_loadu_epi8(mask, static_cast<const char*>(bytes) + e);
    _mm512_storeu_si512(words + e / 2, pair_words(_mm512_cvtepu16_epi64(w)));
  }
}

GNNC_INLINE int64_t sum_of_bytes(const int8_t* bytes, int64_t count) {
  __m512i sum = _mm512_setzero_si512();
  for (int64_t e = 0; e < count; e += 64) {
    const uint64_t mask = count - e >= 64 ? ~uint64_t{0} : (uint64_t{1} << (count - e)) - 1;
    dot_bytes(sum, _mm512_set1_epi8(1), _mm512_maskz_loadu_epi8(mask, bytes + e));
  }
  return _mm512_reduce_add_epi32(sum);
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
    dot_bytes(s.low_even, low, even);
    dot_bytes(s.low_odd, low, odd);
    dot_bytes(s.high_even, high, even);
    dot_bytes(s.high_odd, high, odd);
  } else {
    dot_bytes(s.low_even, even, low);
    dot_bytes(s.low_odd, odd, low);
    dot_bytes(s.high_even, even, high);
    dot_bytes(s.high_odd, odd, high);
  }
}

// The last edge of an odd number goes with a row of zeros, and without a branch that would be mispredicted every
// second row.
template <IntWeight W, int NV>
GNNC_INLINE void integer_block(const Segment& s, const int8_t* base, int64_t stride, const uint64_t* words,
                               Sums (&acc)[NV]) {
  const auto add = [&](const int8_t* a, const int8_t* b, int64_t pair) __attribute__((always_inline)) {
    __m512i even = _mm512_set1_epi32(0x0101), odd = _mm512_set1_epi32(0x01010000);
    if constexpr (W != IntWeight::none) {
      const auto* halves = reinterpret_cast<const int32_t*>(words + pair);
      even = _mm512_set1_epi32(halves[0]);
      odd = _mm512_set1_epi32(halves[1]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      add_pair<W>(acc[v], _mm512_loadu_si512(a + v * 64), _mm512_loadu_si512(b + v * 64), even, odd);
    }
  };
  asm("" : "+r"(base));  // one register, not a sum that is made again for every row
  const int32_t* next = s.col + s.ahead;
  const int64_t full = (s.count - 1) / 2;
  for (int64_t p = 0; p < full; ++p) {
    prefetch_row(base + next[2 * p] * stride, NV * 64);
    prefetch_row(base + next[2 * p + 1] * stride, NV * 64);
    add(base + s.col[2 * p] * stride, base + s.col[2 * p + 1] * stride, p);
  }
  const int64_t tail = s.count - 1;
  prefetch_row(base + next[2 * full] * stride, NV * 64);
  prefetch_row(base + next[tail] * stride, NV * 64);
  const int8_t* second = base + s.col[tail] * stride;
  const int8_t* none = kZeroRow;
  asm("" : "+r"(second), "+r"(none));  // keeps the choice a conditional move
  add(base + s.col[2 * full] * stride, tail == 2 * full ? none : second, full);
}

// Where the sum of a column is.
inline int64_t place_of(int64_t column) {
  const int64_t vector = column / 64, lane = column % 64 / 16, high = column % 16 / 8, pair = column % 8 / 2;
  return vector * 64 + (high * 2 + column % 2) * 16 + lane * 4 + pair;
}

// 64 sums, less the correction, as floats in column order.
GNNC_INLINE void store_columns(const Sums& s, __m512i correction, float* out) {
  const __m512i t0 = _mm512_unpacklo_epi32(s.low_even, s.low_odd), t1 = _mm512_unpackhi_epi32(s.low_even, s.low_odd);
  const __m512i t2 = _mm512_unpacklo_epi32(s.high_even, s.high_odd),
                t3 = _mm512_unpackhi_epi32(s.high_even, s.high_odd);
  const __m512i a = _mm512_shuffle_i32x4(t0, t1, 0x44), b = _mm512_shuffle_i32x4(t0, t1, 0xee);
  const __m512i c = _mm512_shuffle_i32x4(t2, t3, 0x44), d = _mm512_shuffle_i32x4(t2, t3, 0xee);
  const auto put = [&](__m512i v, int at) __attribute__((always_inline)) {
    _mm512_storeu_ps(out + at, _mm512_cvtepi32_ps(_mm512_sub_epi32(v, correction)));
  };
  put(_mm512_shuffle_i32x4(a, c, 0x88), 0);
  put(_mm512_shuffle_i32x4(a, c, 0xdd), 16);
  put(_mm512_shuffle_i32x4(b, d, 0x88), 32);
  put(_mm512_shuffle_i32x4(b, d, 0xdd), 48);
}

// Returns what comes out of every column too much: data goes in as unsigned q + 128 where weights are signed.
template <IntWeight W>
GNNC_INLINE int64_t prepare_words(const IntSum& a, const Segment& s, int64_t begin, uint64_t* words) {
  if constexpr (W == IntWeight::pow2) spread_words(a.power + begin, s.count, words);
  if constexpr (W == IntWeight::signed8) spread_words(a.value + begin, s.count, words);
  return W == IntWeight::signed8 ? 128 * sum_of_bytes(a.value + begin, s.count) : 0;
}

// finish(column, acc) takes the sums of NV vectors.
template <IntWeight W, int NV, typename Finish>
GNNC_INLINE int64_t sum_vectors(const IntSum& a, const Segment& s, int64_t column, const uint64_t* words,
                                const Finish& finish) {
  Sums acc[NV]{};
  integer_block<W, NV>(s, a.rows.data + s.base * a.rows.stride + column, a.rows.stride, words, acc);
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) finish(column + v * 64, acc[v]);
  return column + NV * 64;
}

template <IntWeight W, typename Finish>
GNNC_INLINE void sum_segment(const IntSum& a, const Segment& s, const uint64_t* words, const Finish& finish) {
  for (int64_t c = 0; c < a.rows.width;) {
    const int64_t vectors = (a.rows.width - c + 63) / 64;
    if (vectors >= 4) {
      c = sum_vectors<W, 4>(a, s, c, words, finish);
    } else if (vectors >= 2) {
      c = sum_vectors<W, 2>(a, s, c, words, finish);
    } else {
      c = sum_vectors<W, 1>(a, s, c, words, finish);
    }
  }
}

// The sums over at most 2^16 edges, in a.sums. Returns what is to be taken off every column.
template <IntWeight W>
int64_t sum_group(const IntSum& a, int64_t begin, int64_t end) {
  alignas(64) WeightWords words;
  std::memset(a.sums, 0, static_cast<size_t>(padded(a.rows.width)) * sizeof(int32_t));
  int64_t correction = 0;
  for (int64_t e = begin; e < end; e += kSegment) {
    const Segment s = segment(a.csr, e, std::min(e + kSegment, end));
    correction += prepare_words<W>(a, s, e, words);
    sum_segment<W>(a, s, words, [&](int64_t c, const Sums& sums) {
      auto* to = reinterpret_cast<Sums*>(a.sums + c);
      to->low_even = _mm512_add_epi32(to->low_even, sums.low_even);
      to->low_odd = _mm512_add_epi32(to->low_odd, sums.low_odd);
      to->high_even = _mm512_add_epi32(to->high_even, sums.high_even);
      to->high_odd = _mm512_add_epi32(to->high_odd, sums.high_odd);
    });
  }
  return correction;
}

template <IntWeight W>
GNNC_INLINE void short_row(const IntSum& a, int64_t begin, int64_t end, float* out) {
  alignas(64) WeightWords words;
  const Segment s = segment(a.csr, begin, end);
  const __m512i correction = _mm512_set1_epi32(static_cast<int32_t>(prepare_words<W>(a, s, begin, words)));
  sum_segment<W>(a, s, words, [&](int64_t c, const Sums& sums) __attribute__((always_inline)) {
    store_columns(sums, correction, out + c);
  });
}

#else

inline int64_t place_of(int64_t column) { return column; }

template <IntWeight W>
int64_t sum_group(const IntSum& a, int64_t begin, int64_t end) {
  std::memset(a.sums, 0, static_cast<size_t>(a.rows.width) * sizeof(int32_t));
  for (int64_t e = begin; e < end; ++e) {
    const int64_t source = a.csr.col == nullptr ? e : a.csr.col[e];
    const int8_t* row = a.rows.data + source * a.rows.stride;
    int16_t w = 1;
    if (W == IntWeight::pow2) w = a.power[e];
    if (W == IntWeight::signed8) w = a.value[e];
    for (int64_t c = 0; c < a.rows.width; ++c) a.sums[c] += w * row[c];
  }
  return 0;
}

template <IntWeight W>
void short_row(const IntSum& a, int64_t begin, int64_t end, float* out) {
  sum_group<W>(a, begin, end);
  for (int64_t c = 0; c < a.rows.width; ++c) out[c] = static_cast<float>(a.sums[c]);
}

#endif

template <IntWeight W>
__attribute__((noinline)) void long_row(const IntSum& a, int64_t begin, int64_t end, float* out) {
  std::memset(a.totals, 0, static_cast<size_t>(a.rows.width) * sizeof(int64_t));
  for (int64_t e = begin; e < end; e += kGroup) {
    const int64_t correction = sum_group<W>(a, e, std::min(e + kGroup, end));
    for (int64_t c = 0; c < a.rows.width; ++c) a.totals[c] += a.sums[place_of(c)] - correction;
  }
  for (int64_t c = 0; c < a.rows.width; ++c) out[c] = static_cast<float>(a.totals[c]);
}

// The sums of the edges begin .. end, at least one, as floats.
template <IntWeight W>
GNNC_INLINE void integer_row(const IntSum& a, int64_t begin, int64_t end, float* out) {
  if (end - begin <= kSegment) {
    short_row<W>(a, begin, end, out);
  } else {
    long_row<W>(a, begin, end, out);
  }
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
