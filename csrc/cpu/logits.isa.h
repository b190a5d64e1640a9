#pragma once

// Computes the logits of one row's edges, [edges][heads], and factors of edges. Buffers have room for whole vectors;
// elements past the last edge are not read.

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "dot.isa.h"
#include "gather.isa.h"
#include "softmax.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

// Gathers table[col[k] * Stride + 0..H) of kLanes / H edges, side by side. Lanes past the last edge repeat the last
// edge (or hold 0).
template <int H, bool Full, int Stride = H>
GNNC_INLINE Floats gather_heads(const float* table, const int32_t* col, int64_t left) {
  constexpr int kEdges = kLanes / H;
  const auto row = [&](int64_t k) __attribute__((always_inline)) {
    return table + static_cast<int64_t>(col[Full ? k : std::min(k, left - 1)]) * Stride;
  };
#ifdef __AVX512F__
  if constexpr (H == 16) {
    return load(row(0));
  } else if constexpr (H == 8) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(row(0))), _mm256_loadu_ps(row(1)), 1);
  } else if constexpr (H == 4) {
    __m512 v = _mm512_broadcast_f32x4(_mm_loadu_ps(row(0)));
    v = _mm512_mask_broadcast_f32x4(v, 0x00f0, _mm_loadu_ps(row(1)));
    v = _mm512_mask_broadcast_f32x4(v, 0x0f00, _mm_loadu_ps(row(2)));
    return _mm512_mask_broadcast_f32x4(v, 0xf000, _mm_loadu_ps(row(3)));
  } else if constexpr (H == 1 && Stride == 1) {
    const auto mask = static_cast<__mmask16>(Full ? 0xffff : (1u << left) - 1);
    return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, _mm512_maskz_loadu_epi32(mask, col), table, 4);
  }
#endif
  Floats v;
  for (int k = 0; k < kEdges; ++k) {
    for (int h = 0; h < H; ++h) v[k * H + h] = row(k)[h];
  }
  return v;
}

// Gathers scale[col[k]] of kLanes / H edges, each repeated H times.
template <int H, bool Full>
GNNC_INLINE Floats repeat_scales(const float* scale, const int32_t* col, int64_t left) {
  if constexpr (H == 1) return gather_heads<1, Full>(scale, col, left);
  const auto of = [&](int64_t k)
                      __attribute__((always_inline)) { return scale + col[Full ? k : std::min(k, left - 1)]; };
  Floats v = splat(*of(0));
#pragma GCC unroll 8
  for (int k = 1; k < kLanes / H; ++k) {
#ifdef __AVX512F__
    v = _mm512_mask_broadcastss_ps(v, static_cast<__mmask16>(((1u << H) - 1) << (H * k)), _mm_load_ss(of(k)));
#else
    for (int h = 0; h < H; ++h) v[k * H + h] = *of(k);
#endif
  }
  return v;
}

template <int H>
GNNC_INLINE Floats scales_of_edges(const float* scale, const int32_t* col, int64_t left) {
  return left >= kLanes / H ? repeat_scales<H, true>(scale, col, left) : repeat_scales<H, false>(scale, col, left);
}

// The terms of the additive logits of one row.
struct Additive {
  Floats own;  // a_dst of the row, one head a lane, repeated
  Floats slope;
  const float* edge;
};

template <int H, bool Full>
GNNC_INLINE void additive_vector(const AttentionArgs& a, const Additive& row, const int32_t* col, int64_t k,
                                 int64_t left, float* logits) {
  Floats l = gather_heads<H, Full>(a.a_src, col + k, left) + row.own;
  if (row.edge != nullptr) {
    const float* edge = row.edge + k * H;
    l = l + (Full ? load(edge) : load(edge, Tail{static_cast<int>(left * H)}));
  }
  store(logits + k * H, l > 0.0f ? l : l * row.slope);
}

template <int H>
void additive_logits(const AttentionArgs& a, const Segment& s, int64_t row, int64_t begin, float* logits) {
  constexpr int kEdges = kLanes / H;
  const Additive terms{repeat_heads<H>(a.a_dst + row * H), splat(a.slope),
                       a.edge == nullptr ? nullptr : a.edge + begin * H};
  int64_t k = 0;
  for (; k + kEdges <= s.count; k += kEdges) {
    const int32_t* next = s.col + k + s.ahead;
#pragma GCC unroll 16
    for (int u = 0; u < kEdges; ++u) prefetch_far(a.a_src + static_cast<int64_t>(next[u]) * H);
    additive_vector<H, true>(a, terms, s.col, k, kEdges, logits);
  }
  if (k == s.count) return;
  for (int64_t u = k; u < s.count; ++u) prefetch_far(a.a_src + static_cast<int64_t>(s.col[u + s.ahead]) * H);
  additive_vector<H, false>(a, terms, s.col, k, s.count - k, logits);
}

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
    for (int64_t line = 0; line < std::min<int64_t>(stride * 4, 1024); line += 64) prefetch_far(next + line);
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

// Multiplies weights[e, h] *= x_scale[col[e]].
inline void fold_scale(const float* x_scale, const Segment& s, int64_t heads, float* weights) {
  for (int64_t k = 0; k < s.count; ++k) {
    for (int64_t h = 0; h < heads; ++h) weights[k * heads + h] *= x_scale[s.col[k]];
  }
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
