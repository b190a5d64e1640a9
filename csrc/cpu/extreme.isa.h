#pragma once

// Maxima and minima of gathered rows. int8 rows without weights are compared as bytes, 64 columns an instruction; all
// other rows as fp32, where a NaN in a row makes the result NaN, as in torch.

#include <limits>
#include <type_traits>

#include "gather.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

#ifdef __AVX512F__

template <bool Max>
void extreme_bytes(const Segment& s, const Rows<int8_t>& rows, const Weights&, bool first, float* out) {
  for (int64_t c = 0; c < rows.width; c += 64) {
    const int8_t* base = rows.data + s.base * rows.stride + c;
    __m512i acc = _mm512_loadu_si512(base + s.col[0] * rows.stride);
    for (int64_t e = 0; e < s.count; ++e) {
      prefetch_row(base + s.col[e + s.ahead] * rows.stride, 64);
      const __m512i x = _mm512_loadu_si512(base + s.col[e] * rows.stride);
      acc = Max ? _mm512_max_epi8(acc, x) : _mm512_min_epi8(acc, x);
    }
    alignas(64) int8_t bytes[64];
    _mm512_store_si512(bytes, acc);
    for (int64_t i = 0; i < 64; i += 16) {
      __m512 v = load16(bytes + i);
      const __m512 old = _mm512_loadu_ps(out + c + i);
      if (!first) v = Max ? _mm512_max_ps(v, old) : _mm512_min_ps(v, old);
      _mm512_storeu_ps(out + c + i, v);
    }
  }
}

template <typename T, bool Max>
void extreme_floats(const Segment& s, const Rows<T>& rows, const Weights& weights, bool first, float* out) {
  constexpr float kWorst = Max ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity();
  for (int64_t c = 0; c < rows.width;) {
    const int64_t head = c / weights.head_width;
    const int64_t step = std::min<int64_t>((head + 1) * weights.head_width - c, 16);
    const T* base = rows.data + s.base * rows.stride + c;
    __m512 acc = first ? _mm512_set1_ps(kWorst) : load16(out + c, step);
    __mmask16 nan = _mm512_cmp_ps_mask(acc, acc, _CMP_UNORD_Q);
    for (int64_t e = 0; e < s.count; ++e) {
      prefetch_row(base + s.col[e + s.ahead] * rows.stride, 64);
      __m512 x = load16(base + s.col[e] * rows.stride, step);
      if (weights.data != nullptr) x = _mm512_mul_ps(x, _mm512_set1_ps(weights.data[e * weights.heads + head]));
      nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      acc = Max ? _mm512_max_ps(acc, x) : _mm512_min_ps(acc, x);
    }
    acc = _mm512_mask_mov_ps(acc, nan, _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
    store(out + c, acc, Tail{static_cast<int>(step)});
    c += step;
  }
}

#else

template <bool Max>
void keep_best(float& best, float x) {
  if (x != x || (Max ? x > best : x < best)) best = x;
}

template <typename T, bool Max>
void extreme_floats(const Segment& s, const Rows<T>& rows, const Weights& weights, bool first, float* out) {
  constexpr float kWorst = Max ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity();
  if (first) std::fill_n(out, rows.width, kWorst);
  for (int64_t e = 0; e < s.count; ++e) {
    const T* row = rows.data + (s.base + s.col[e]) * rows.stride;
    for (int64_t h = 0, c = 0; h < weights.heads; ++h) {
      const float w = weights.data == nullptr ? 1.0f : weights.data[e * weights.heads + h];
      for (int64_t d = 0; d < weights.head_width; ++d, ++c) keep_best<Max>(out[c], w * widen_one(row[c]));
    }
  }
}

template <bool Max>
void extreme_bytes(const Segment& s, const Rows<int8_t>& rows, const Weights&, bool first, float* out) {
  extreme_floats<int8_t, Max>(s, rows, {nullptr, 1, rows.width}, first, out);
}

#endif

template <typename T>
SumKernel<T> extreme_kernel(bool max, bool weighted) {
  if constexpr (std::is_same_v<T, int8_t>) {
    if (!weighted) return max ? extreme_bytes<true> : extreme_bytes<false>;
  }
  return max ? extreme_floats<T, true> : extreme_floats<T, false>;
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
