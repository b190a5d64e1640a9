#pragma once

// Exact integer sums of gathered int8 rows, unweighted, weighted by a power of two a source row, or by an int8 an edge.
//
// An edge of 64 columns takes 1 load, 2 shuffles and 1 multiply-add, without widening, and weights cost nothing extra.
// Sums are permuted into the order of columns once a row. A 32-bit sum takes at most 2^16 edges: 255 * 128 * 2^16 <
// 2^31. For longer rows such sums are added in 64 bits.

#include "byte_dot.isa.h"
#include "scratch.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kGroup = 65536;

// The weight of an edge: none, a power of two by source row, or an int8 by edge.
enum class IntWeight { none, pow2, signed8 };

inline int64_t padded(int64_t width) { return (width + 63) / 64 * 64; }

// The arguments of an integer sum.
struct IntSum {
  Csr csr;
  Rows<int8_t> rows;
  const uint8_t* shift;  // [num_src], for pow2
  const int8_t* value;   // [E], for signed8
  int32_t* sums;         // [padded width], scratch
  int64_t* totals;       // [width], scratch
};

#ifdef __AVX512F__

GNNC_INLINE int64_t sum_of_bytes(const int8_t* bytes, int64_t count) {
  __m512i sum = _mm512_setzero_si512();
  for (int64_t e = 0; e < count; e += 64) {
    const uint64_t mask = count - e >= 64 ? ~uint64_t{0} : (uint64_t{1} << (count - e)) - 1;
    dot_bytes(sum, _mm512_set1_epi8(1), _mm512_maskz_loadu_epi8(mask, bytes + e));
  }
  return _mm512_reduce_add_epi32(sum);
}

// Sums of 64 columns, in the interleaved order of byte_dot.isa.h.
struct Sums {
  __m512i part[4];
};

// Returns the weights of a segment: shifts by source, or values by edge.
template <IntWeight W>
GNNC_INLINE const uint8_t* weights_of(const IntSum& a, const Segment& s, int64_t begin) {
  if constexpr (W == IntWeight::pow2) return a.shift + s.base;
  if constexpr (W == IntWeight::signed8) return reinterpret_cast<const uint8_t*>(a.value) + begin;
  return nullptr;
}

// Returns the weights of four edges, a byte each, in every word; 0 past the end of the segment.
template <IntWeight W>
GNNC_INLINE __m512i weight_word(const uint8_t* weights, const Fours& four) {
  const uint32_t inside = _bzhi_u32(~0u, static_cast<uint32_t>(8 * std::min<int64_t>(four.left, 4)));
  if constexpr (W == IntWeight::none) return _mm512_set1_epi32(static_cast<int>(0x01010101 & inside));
  if constexpr (W == IntWeight::signed8) {
    const auto lanes = static_cast<__mmask16>(_bzhi_u32(0xf, static_cast<uint32_t>(std::min<int64_t>(four.left, 4))));
    return _mm512_broadcastd_epi32(_mm_maskz_loadu_epi8(lanes, weights + four.first));
  }
  uint32_t shifts = ~inside;  // the shuffle below makes 0 of a byte whose highest bit is set
  each<4>([&](auto i) __attribute__((always_inline)) { shifts |= uint32_t{weights[four.source[i]]} << (8 * i); });
  const __m128i powers = _mm_set1_epi64x(0x0102040810204080);
  const __m128i word = _mm_shuffle_epi8(powers, _mm_cvtsi32_si128(static_cast<int>(shifts)));
  return _mm512_broadcastd_epi32(word);
}

template <IntWeight W>
GNNC_INLINE __m512i row_bytes(const int8_t* row) {
  const __m512i q = _mm512_loadu_si512(row);
  return W == IntWeight::signed8 ? _mm512_xor_si512(q, _mm512_set1_epi8(static_cast<char>(0x80))) : q;
}

template <IntWeight W, int NV, typename Stride>
GNNC_INLINE void integer_block(const Segment& s, const int8_t* base, Stride stride, const uint8_t* weights,
                               Sums (&acc)[NV]) {
  for_fours(s, base, stride, NV * 64, [&](const Fours& four) __attribute__((always_inline)) {
    const __m512i w = weight_word<W>(weights, four);
    each<NV>([&](auto v) __attribute__((always_inline)) {
      const auto at = [&](const int8_t* p) __attribute__((always_inline)) { return row_bytes<W>(p + v * 64); };
      __m512i x[4];
      interleave(at(four.row[0]), at(four.row[1]), at(four.row[2]), at(four.row[3]), x);
      each<4>([&](auto i) __attribute__((always_inline)) {
        W == IntWeight::signed8 ? dot_bytes(acc[v].part[i], x[i], w) : dot_bytes(acc[v].part[i], w, x[i]);
      });
    });
  });
}

// Returns the position of the sum of a column in the interleaved order.
inline int64_t place_of(int64_t column) {
  const int64_t vector = column / 64, lane = column % 64 / 16, part = column % 16 / 4;
  return vector * 64 + part * 16 + lane * 4 + column % 4;
}

// Stores 64 sums, less the correction, as floats in the order of columns.
GNNC_INLINE void store_columns(const Sums& s, __m512i correction, float* out) {
  __m512 v[4];
  each<4>([&](auto i)
              __attribute__((always_inline)) { v[i] = _mm512_cvtepi32_ps(_mm512_sub_epi32(s.part[i], correction)); });
  order_columns(v);
  each<4>([&](auto i) __attribute__((always_inline)) { _mm512_storeu_ps(out + i * 16, v[i]); });
}

// Returns the excess in the sum of every column: with signed weights, values are added as unsigned q + 128.
template <IntWeight W>
GNNC_INLINE int64_t correction_of(const IntSum& a, int64_t begin, int64_t count) {
  return W == IntWeight::signed8 ? 128 * sum_of_bytes(a.value + begin, count) : 0;
}

// Sums NV vectors of 64 columns, and passes the sums to finish(column, acc).
template <IntWeight W, int NV, typename Finish>
GNNC_INLINE int64_t sum_vectors(const IntSum& a, const Segment& s, int64_t column, const uint8_t* weights,
                                const Finish& finish) {
  Sums acc[NV]{};
  integer_block<W, NV>(s, a.rows.data + s.base * a.rows.stride + column, a.rows.stride, weights, acc);
  each<NV>([&](auto v) __attribute__((always_inline)) { finish(column + v * 64, acc[v]); });
  return column + NV * 64;
}

template <IntWeight W, typename Finish>
GNNC_INLINE void sum_segment(const IntSum& a, int64_t begin, int64_t end, const Finish& finish) {
  const Segment s = segment(a.csr, begin, end);
  const uint8_t* weights = weights_of<W>(a, s, begin);
  if (a.rows.stride == 64) {  // one vector, and a constant stride
    Sums acc[1]{};
    constexpr std::integral_constant<int64_t, 64> stride;
    integer_block<W, 1>(s, a.rows.data + s.base * stride, stride, weights, acc);
    return finish(0, acc[0]);
  }
  for (int64_t c = 0; c < a.rows.width;) {
    const int64_t vectors = (a.rows.width - c + 63) / 64;
    if (vectors >= 4) {
      c = sum_vectors<W, 4>(a, s, c, weights, finish);
    } else if (vectors >= 2) {
      c = sum_vectors<W, 2>(a, s, c, weights, finish);
    } else {
      c = sum_vectors<W, 1>(a, s, c, weights, finish);
    }
  }
}

// Sums at most 2^16 edges into a.sums. Returns the correction that must be subtracted from every column.
template <IntWeight W>
int64_t sum_group(const IntSum& a, int64_t begin, int64_t end) {
  std::memset(a.sums, 0, static_cast<size_t>(padded(a.rows.width)) * sizeof(int32_t));
  for (int64_t e = begin; e < end; e += kSegment) {
    sum_segment<W>(a, e, std::min(e + kSegment, end), [&](int64_t c, const Sums& sums) __attribute__((always_inline)) {
      auto* to = reinterpret_cast<Sums*>(a.sums + c);
      for (int i = 0; i < 4; ++i) to->part[i] = _mm512_add_epi32(to->part[i], sums.part[i]);
    });
  }
  return correction_of<W>(a, begin, end - begin);
}

template <IntWeight W>
GNNC_INLINE void short_row(const IntSum& a, int64_t begin, int64_t end, float* out) {
  const __m512i correction = _mm512_set1_epi32(static_cast<int32_t>(correction_of<W>(a, begin, end - begin)));
  sum_segment<W>(a, begin, end, [&](int64_t c, const Sums& sums) __attribute__((always_inline)) {
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
    if (W == IntWeight::pow2) w = static_cast<int16_t>(128 >> (a.shift[source] & 7));
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

// Computes the sums of the edges begin .. end, at least one, as floats.
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
