#pragma once

// The logits of one row's edges, [edges][heads], and their factors. Buffers have room for whole vectors: what lies past
// the last edge is not read.

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "dot.isa.h"
#include "gather.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

#ifdef __AVX512F__

// table[col[k], 0..H) of the 16 / H edges from k on, side by side. Past the last edge it repeats that one.
template <int H>
GNNC_INLINE Floats gather_heads(const float* table, const int32_t* col, int64_t left) {
  constexpr int kEdges = 16 / H;
  const auto row = [&](int k) { return table + static_cast<int64_t>(col[std::min<int64_t>(k, left - 1)]) * H; };
  if constexpr (H == 16) return load(row(0));
  if constexpr (H == 8) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(row(0))), _mm256_loadu_ps(row(1)), 1);
  }
  __m512 v = _mm512_setzero_ps();
  if constexpr (H == 4) {
#pragma GCC unroll 4
    for (int k = 0; k < kEdges; ++k) {
      v = _mm512_mask_broadcast_f32x4(v, static_cast<__mmask16>(0xf << 4 * k), _mm_loadu_ps(row(k)));
    }
  }
  if constexpr (H == 2) {
#pragma GCC unroll 8
    for (int k = 0; k < kEdges; ++k) {
      const __m128d pair = _mm_load_sd(reinterpret_cast<const double*>(row(k)));
      v = _mm512_castpd_ps(_mm512_mask_broadcastsd_pd(_mm512_castps_pd(v), static_cast<__mmask8>(1 << k), pair));
    }
  }
  if constexpr (H == 1) {
    const auto mask = static_cast<__mmask16>(left >= 16 ? 0xffff : (1u << left) - 1);
    v = _mm512_mask_i32gather_ps(v, mask, _mm512_maskz_loadu_epi32(mask, col), table, 4);
  }
  return v;
}

// scale[col[k]] of the 16 / H edges from k on, H times each.
template <int H>
GNNC_INLINE Floats repeat_heads(const float* scale, const int32_t* col, int64_t left) {
  if constexpr (H == 1) return gather_heads<1>(scale, col, left);
  __m512 v = _mm512_setzero_ps();
#pragma GCC unroll 8
  for (int k = 0; k < 16 / H; ++k) {
    const auto mask = static_cast<__mmask16>(((1u << H) - 1) << H * k);
    v = _mm512_mask_broadcastss_ps(v, mask, _mm_load_ss(scale + col[std::min<int64_t>(k, left - 1)]));
  }
  return v;
}

template <int H>
void additive_logits(const AttentionArgs& a, const Segment& s, int64_t row, int64_t begin, float* logits) {
  Floats own;
  for (int lane = 0; lane < 16; ++lane) own[lane] = a.a_dst[row * H + lane % H];
  const Floats slope = splat(a.slope);
  const float* edge = a.edge == nullptr ? nullptr : a.edge + begin * H;
  for (int64_t k = 0; k < s.count; k += 16 / H) {
    for (int u = 0; u < 16 / H; ++u) __builtin_prefetch(a.a_src + s.col[std::min(k + u, s.count - 1) + s.ahead] * H);
    const int64_t left = s.count - k;
    Floats l = gather_heads<H>(a.a_src, s.col + k, left) + own;
    if (edge != nullptr) l = l + load(edge + k * H, Tail{static_cast<int>(std::min<int64_t>(left * H, 16))});
    store(logits + k * H, l > 0.0f ? l : l * slope);
  }
}

template <int H>
void scale_heads(const float* x_scale, const Segment& s, float* weights) {
  for (int64_t k = 0; k < s.count; k += 16 / H) {
    store(weights + k * H, load(weights + k * H) * repeat_heads<H>(x_scale, s.col + k, s.count - k));
  }
}

// Calls body.operator()<H>() for a number of heads that divides 16; false for another.
template <typename Body>
bool with_heads(int64_t heads, const Body& body) {
  switch (heads) {
    case 1:
      return body.template operator()<1>(), true;
    case 2:
      return body.template operator()<2>(), true;
    case 4:
      return body.template operator()<4>(), true;
    case 8:
      return body.template operator()<8>(), true;
    case 16:
      return body.template operator()<16>(), true;
    default:
      return false;
  }
}

#else

template <int H>
void additive_logits(const AttentionArgs&, const Segment&, int64_t, int64_t, float*) {}
template <int H>
void scale_heads(const float*, const Segment&, float*) {}
template <typename Body>
bool with_heads(int64_t, const Body&) {
  return false;
}

#endif

inline float leaky(float l, float slope) { return l > 0.0f ? l : l * slope; }

inline void additive(const AttentionArgs& a, const Segment& s, int64_t row, int64_t begin, float* logits) {
  if (with_heads(a.heads, [&]<int H>() { additive_logits<H>(a, s, row, begin, logits); })) return;
  for (int64_t k = 0; k < s.count; ++k) {
    for (int64_t h = 0; h < a.heads; ++h) {
      float l = a.a_src[s.col[k] * a.heads + h] + a.a_dst[row * a.heads + h];
      if (a.edge != nullptr) l += a.edge[(begin + k) * a.heads + h];
      logits[k * a.heads + h] = leaky(l, a.slope);
    }
  }
}

inline void dots(const AttentionArgs& a, const Segment& s, int64_t row, int64_t begin, float* logits) {
  const int64_t stride = a.heads * a.dot_width;
  for (int64_t k = 0; k < s.count; ++k) {
    const float* own = a.a_dst + row * stride;
    const float* other = a.a_src + s.col[k] * stride;
    const auto* next = reinterpret_cast<const char*>(a.a_src + s.col[k + s.ahead] * stride);
    for (int64_t line = 0; line < std::min<int64_t>(stride * 4, 1024); line += 64) __builtin_prefetch(next + line);
    for (int64_t h = 0; h < a.heads; ++h) {
      float l = a.scale * dot(own + h * a.dot_width, other + h * a.dot_width, a.dot_width);
      if (a.edge != nullptr) l += a.edge[(begin + k) * a.heads + h];
      logits[k * a.heads + h] = l;
    }
  }
}

inline void row_logits(const AttentionArgs& a, const Segment& s, int64_t row, int64_t begin, float* logits) {
  if (a.kind == Logit::additive) return additive(a, s, row, begin, logits);
  if (a.kind == Logit::dot) return dots(a, s, row, begin, logits);
  std::memcpy(logits, a.edge + begin * a.heads, static_cast<size_t>(s.count * a.heads) * sizeof(float));
}

// weights[e, h] *= x_scale[col[e]]
inline void fold_scale(const float* x_scale, const Segment& s, int64_t heads, float* weights) {
  if (with_heads(heads, [&]<int H>() { scale_heads<H>(x_scale, s, weights); })) return;
  for (int64_t k = 0; k < s.count; ++k) {
    for (int64_t h = 0; h < heads; ++h) weights[k * heads + h] *= x_scale[s.col[k]];
  }
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
