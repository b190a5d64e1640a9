#pragma once

// Four gathered int8 rows at a time, for sums with vpdpbusd, which adds four products of bytes to a 32-bit sum.
//
// The bytes of four rows are interleaved, so that a word holds one column of all four. 64 columns become four vectors,
// and word j of 128-bit lane l of vector i is column 16 l + 4 i + j.

#include <algorithm>

#include "gather.isa.h"

#ifdef __AVX512F__

namespace gnnc::GNNC_ISA {
namespace {

// acc += products of unsigned and signed bytes. g++ 12 copies every accumulator twice a step around the intrinsic.
GNNC_INLINE void dot_bytes(__m512i& acc, __m512i u, __m512i s) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s));
}

GNNC_INLINE void interleave(__m512i a, __m512i b, __m512i c, __m512i d, __m512i (&x)[4]) {
  const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
  const __m512i ab_high = _mm512_unpackhi_epi8(a, b), cd_high = _mm512_unpackhi_epi8(c, d);
  x[0] = _mm512_unpacklo_epi16(ab, cd);
  x[1] = _mm512_unpackhi_epi16(ab, cd);
  x[2] = _mm512_unpacklo_epi16(ab_high, cd_high);
  x[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
}

// Puts 64 sums into the order of columns.
GNNC_INLINE void order_columns(__m512 (&v)[4]) {
  const __m512 a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[0], v[1], 0xee);
  const __m512 c = _mm512_shuffle_f32x4(v[2], v[3], 0x44), d = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
  v[0] = _mm512_shuffle_f32x4(a, c, 0x88);
  v[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
  v[2] = _mm512_shuffle_f32x4(b, d, 0x88);
  v[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}

struct Fours {
  const int8_t *a, *b, *c, *d;
};

template <typename Stride, typename Body>
GNNC_INLINE void for_fours_at(const Segment& s, const int8_t* base, Stride stride, int64_t bytes, const Body& body) {
  asm("" : "+r"(base));  // one register, not a sum that is made again for every row
  const int32_t* next = s.col + s.ahead;
  const int64_t last = s.count - 1, full = last / 4 * 4;
  const auto row = [&](const int32_t* col, int64_t e) __attribute__((always_inline)) { return base + col[e] * stride; };
  const auto four = [&](int64_t e, int64_t e1, int64_t e2, int64_t e3, int64_t edges) __attribute__((always_inline)) {
    prefetch_row(row(next, e), bytes);
    prefetch_row(row(next, e1), bytes);
    prefetch_row(row(next, e2), bytes);
    prefetch_row(row(next, e3), bytes);
    body(e, Fours{row(s.col, e), row(s.col, e1), row(s.col, e2), row(s.col, e3)}, edges);
  };
  for (int64_t e = 0; e < full; e += 4) four(e, e + 1, e + 2, e + 3, 4);
  const auto upto = [&](int64_t e) __attribute__((always_inline)) { return std::min(e, last); };
  four(full, upto(full + 1), upto(full + 2), last, s.count - full);
}

// body(first edge, four rows, edges): edges is 4 but for the last time, when rows past the last repeat that one.
template <typename Body>
GNNC_INLINE void for_fours(const Segment& s, const int8_t* base, int64_t stride, int64_t bytes, const Body& body) {
  if (stride == 64) return for_fours_at(s, base, std::integral_constant<int64_t, 64>{}, bytes, body);
  for_fours_at(s, base, stride, bytes, body);
}

}  // namespace
}  // namespace gnnc::GNNC_ISA

#endif
