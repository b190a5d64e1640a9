#pragma once

// Dot products of one row with gathered rows, one for each head, [edges][heads].

#include <algorithm>
#include <cstdint>

#include "gather.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

// Returns the sums of kLanes vectors side by side.
GNNC_INLINE Floats fold_each(const Floats (&v)[kLanes]) {
#ifdef __AVX512F__
  __m512 s[4];
  each<4>([&](auto i) {
    const auto pair = [&](int k) __attribute__((always_inline)) {
      return _mm512_unpacklo_ps(v[k], v[k + 1]) + _mm512_unpackhi_ps(v[k], v[k + 1]);
    };
    const __m512d low = _mm512_castps_pd(pair(4 * i)), high = _mm512_castps_pd(pair(4 * i + 2));
    s[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)) + _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
  });
  const auto quarters = [](__m512 a, __m512 b) __attribute__((always_inline)) {
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  };
  return quarters(quarters(s[0], s[1]), quarters(s[2], s[3]));
#else
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = sum(v[i]);
  return out;
#endif
}

// Computes out[e, h] = <own[h, :], rows[col[e], h, :]>, where H divides the lanes; `out` has room for whole vectors.
template <int H, typename T>
void head_dots(const Segment& s, const Rows<T>& rows, const float* own, float* out) {
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
void any_head_dots(const Segment& s, const Rows<T>& rows, const float* own, int64_t heads, float* out) {
  const int64_t width = rows.width / heads;
  for (int64_t e = 0; e < s.count; ++e) {
    const T* row = rows.data + s.col[e] * rows.stride;
    for (int64_t h = 0; h < heads; ++h) {
      Floats total{};
      for_columns(width, [&](int64_t c, auto lanes) {
        total = fused(load(row + h * width + c, lanes), load(own + h * width + c, lanes), total);
      });
      out[e * heads + h] = sum(total);
    }
  }
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
