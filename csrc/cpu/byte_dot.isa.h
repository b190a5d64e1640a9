#pragma once

// Loads and interleaves four gathered int8 rows at a time, for sums with vpdpbusd, which adds four products of bytes to
// a 32-bit sum.
//
// The bytes of four rows are interleaved, so that a word holds one column of all four rows. 64 columns become four
// vectors, and word j of 128-bit lane l of vector i is column 16 l + 4 i + j.

#include <algorithm>

#include "gather.isa.h"

#ifdef __AVX512F__

namespace gnnc::GNNC_ISA {
namespace {

// Adds the products of unsigned and signed bytes to acc. In assembly, because with the intrinsic g++ 12 copies every
// accumulator twice a step.
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

// Permutes 64 sums from the interleaved order into the order of columns.
GNNC_INLINE void order_columns(__m512 (&v)[4]) {
  const __m512 a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[0], v[1], 0xee);
  const __m512 c = _mm512_shuffle_f32x4(v[2], v[3], 0x44), d = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
  v[0] = _mm512_shuffle_f32x4(a, c, 0x88);
  v[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
  v[2] = _mm512_shuffle_f32x4(b, d, 0x88);
  v[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}

// Four edges of a segment. Edges past the end of the segment are arbitrary edges of the graph: their weights must be 0.
struct Fours {
  int64_t first;  // index of the first edge
  int64_t left;   // edges of the segment from the first on
  int64_t source[4];
  const int8_t* row[4];
};

// Calls body(four) for the edges of a segment. kInside: col continues past the segment, so that four ids, and four ids
// at the prefetch distance, may always be read.
template <bool kInside, typename Stride, typename Body>
GNNC_INLINE void for_fours_at(const Segment& s, const int8_t* base, Stride stride, int64_t bytes, const Body& body) {
  asm("" : "+r"(base));  // keeps base in one register; otherwise g++ recomputes the sum for every row
  for (int64_t e = 0; e < s.count; e += 4) {
    Fours four{e, s.count - e, {}, {}};
    each<4>([&](auto i) __attribute__((always_inline)) {
      if constexpr (kInside) prefetch_row(base + s.col[e + i + s.ahead] * stride, bytes);
      four.source[i] = s.col[kInside ? e + i : std::min<int64_t>(e + i, s.count - 1)];
      four.row[i] = base + four.source[i] * stride;
    });
    body(four);
  }
}

// Calls body(four) for the edges of a segment; prefetches the first `bytes` bytes of their rows.
template <typename Stride, typename Body>
GNNC_INLINE void for_fours(const Segment& s, const int8_t* base, Stride stride, int64_t bytes, const Body& body) {
  if (s.ahead == 0) return for_fours_at<false>(s, base, stride, bytes, body);
  if (stride == 64) return for_fours_at<true>(s, base, std::integral_constant<int64_t, 64>{}, bytes, body);
  for_fours_at<true>(s, base, stride, bytes, body);
}

}  // namespace
}  // namespace gnnc::GNNC_ISA

#endif
