#pragma once

// Dot products of one row with gathered rows, one for each head, [edges][heads], in units of the scales of int8 rows.
//
// `out` has room for kDotRoom elements past the last edge.

#include <algorithm>
#include <cstdint>

#include "byte_dot.isa.h"
#include "gather.isa.h"
#include "heads.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kDotRoom = 64;

// The row that the edges share.
struct OwnRow {
  const float* values;      // padded to whole vectors
  const int8_t* quantized;  // the same values in int8; null if they are not
};

#ifdef __AVX512F__
GNNC_INLINE __m512 add_floats(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
GNNC_INLINE __m512 add_integers(__m512 a, __m512 b) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

// Adds the 128-bit lanes of a vector that belong to one head of H, of four.
template <int H, typename Add>
GNNC_INLINE __m512 add_lanes(__m512 v, const Add& add) {
  if constexpr (H == 1) v = add(v, _mm512_shuffle_f32x4(v, v, 0x4e));
  return add(v, _mm512_shuffle_f32x4(v, v, 0xb1));
}

// Stores the sums of four rows whose 16 partial sums belong to H heads of equal size, [rows][H]. Partial sums are
// floats, or integers: then as_sums converts them to floats.
template <int H, typename Add, typename Convert>
GNNC_INLINE void store_folded(const __m512 (&row)[4], const Add& add, const Convert& as_sums, float* out) {
  if constexpr (H == 8) {
    const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    each<2>([&](auto i) __attribute__((always_inline)) {
      const __m512 a = row[2 * i], b = row[2 * i + 1];
      const __m512 sums = add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
      _mm512_storeu_ps(out + 16 * i, _mm512_permutexvar_ps(order, as_sums(sums)));
    });
    return;
  }
  // Lane l of four rows, [lane][row].
  const __m512 lanes = fold_all<0, 4>(row, add);
  if constexpr (H == 4) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(order, as_sums(lanes)));
  } else if constexpr (H == 2) {
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512 sums = _mm512_permutexvar_ps(order, as_sums(add_lanes<2>(lanes, add)));
    _mm256_storeu_ps(out, _mm512_castps512_ps256(sums));
  } else {
    _mm_storeu_ps(out, _mm512_castps512_ps128(as_sums(add_lanes<1>(lanes, add))));
  }
}

// Returns whether byte_head_dots takes heads of this size: each has whole words of the one vector of a row, or there is
// one, and its sums fit 32 bits.
GNNC_INLINE bool bytes_divide(int64_t width, int heads) { return heads == 1 ? width <= 65536 : width == 64; }

// The same for two int8 rows, exactly, in integers. vpdpbusd multiplies unsigned by signed bytes: gathered values are
// taken as q + 128, and sums begin at -128 times the sum of the shared row.
template <int H>
void byte_head_dots(const Segment& s, const Rows<int8_t>& rows, const int8_t* own, float* out) {
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
  const auto as_floats = [](__m512 v)
                             __attribute__((always_inline)) { return _mm512_cvtepi32_ps(_mm512_castps_si512(v)); };
  const int64_t bytes = (rows.width + 63) / 64 * 64;
  __m512i start = _mm512_setzero_si512();
  for (int64_t c = 0; c < bytes; c += 64) dot_bytes(start, flip, _mm512_loadu_si512(own + c));
  start = _mm512_sub_epi32(_mm512_setzero_si512(), start);
  for_fours(s, rows.data, rows.stride, bytes, [&](const Fours& four) __attribute__((always_inline)) {
    __m512i sums[4] = {start, start, start, start};
    for (int64_t c = 0; c < bytes; c += 64) {
      const __m512i mine = _mm512_loadu_si512(own + c);
      each<4>([&](auto i) __attribute__((always_inline)) {
        dot_bytes(sums[i], _mm512_xor_si512(_mm512_loadu_si512(four.row[i] + c), flip), mine);
      });
    }
    __m512 row[4];
    each<4>([&](auto i) __attribute__((always_inline)) { row[i] = _mm512_castsi512_ps(sums[i]); });
    store_folded<H>(row, add_integers, as_floats, out + four.first * H);
  });
}

// The same in floats for one head, four edges at a time.
template <typename T>
void single_head_dots(const Segment& s, const Rows<T>& rows, const float* own, float* out) {
  const auto same = [](__m512 v) __attribute__((always_inline)) { return v; };
  const int64_t width = rows.width, row_bytes = width * static_cast<int64_t>(sizeof(T));
  for (int64_t e = 0; e < s.count; e += 4) {
    const T* row[4];
    each<4>([&](auto k) __attribute__((always_inline)) {
      const int64_t edge = std::min<int64_t>(e + k, s.count - 1);
      prefetch_row(rows.data + s.col[edge + s.ahead] * rows.stride, std::min<int64_t>(row_bytes, 1024));
      row[k] = rows.data + s.col[edge] * rows.stride;
    });
    __m512 sums[4] = {};
    for_columns(width, [&](int64_t c, auto lanes) __attribute__((always_inline)) {
      const __m512 mine = load(own + c, lanes);
      each<4>([&](auto k) __attribute__((always_inline)) {
        sums[k] = _mm512_fmadd_ps(load(row[k] + c, lanes), mine, sums[k]);
      });
    });
    store_folded<1>(sums, add_floats, same, out + e);
  }
}
#endif

// Returns the sums of kLanes vectors side by side.
GNNC_INLINE Floats fold_each(const Floats (&v)[kLanes]) {
#ifdef __AVX512F__
  return fold_all(v, add_floats);
#else
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = sum(v[i]);
  return out;
#endif
}

// Computes out[e, h] = <own[h, :], rows[col[e], h, :]>, where H divides the lanes.
template <int H, typename T>
void head_dots(const Segment& s, const Rows<T>& rows, const OwnRow& shared, float* out) {
  const float* own = shared.values;
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, int8_t> && H <= 8) {
    if (shared.quantized != nullptr && bytes_divide(rows.width, H)) {
      return byte_head_dots<H>(s, rows, shared.quantized, out);
    }
  }
  if constexpr (H == 1) return single_head_dots(s, rows, own, out);
#endif
  constexpr int kEdges = kLanes / H;
  const int64_t width = rows.width / H, row_bytes = rows.width * static_cast<int64_t>(sizeof(T));
  for (int64_t e = 0; e < s.count; e += kEdges) {
    const T* row[kEdges];
    each<kEdges>([&](auto k) {
      const int64_t edge = std::min<int64_t>(e + k, s.count - 1);
      prefetch_row(rows.data + s.col[edge + s.ahead] * rows.stride, std::min<int64_t>(row_bytes, 1024));
      row[k] = rows.data + s.col[edge] * rows.stride;
    });
    Floats sums[kLanes] = {};
    const auto add = [&](int64_t c, auto lanes) __attribute__((always_inline)) {
      each<H>([&](auto h) {
        const Floats mine = load(own + h * width + c, lanes);
        each<kEdges>(
            [&](auto k) { sums[k * H + h] = fused(load(row[k] + h * width + c, lanes), mine, sums[k * H + h]); });
      });
    };
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) add(c, Whole{});
    if (c < width) add(c, Tail{static_cast<int>(width - c)});
    store(out + e * H, fold_each(sums));
  }
}

// Computes the dot products of each head, for any number of heads.
template <typename T>
void any_head_dots(const Segment& s, const Rows<T>& rows, const OwnRow& shared, int64_t heads, float* out) {
  const int64_t width = rows.width / heads;
  for (int64_t e = 0; e < s.count; ++e) {
    const T* row = rows.data + s.col[e] * rows.stride;
    for (int64_t h = 0; h < heads; ++h) {
      Floats total{};
      for_columns(width, [&](int64_t c, auto lanes) {
        total = fused(load(row + h * width + c, lanes), load(shared.values + h * width + c, lanes), total);
      });
      out[e * heads + h] = sum(total);
    }
  }
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
