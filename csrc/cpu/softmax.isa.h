#pragma once

// The softmax over the edges of one destination row, for edge_softmax and attention: exp(l - max) / (sum + eps), per
// head.
//
// Numbers of heads that do not divide the lanes of a vector are processed by scalar loops. A logit that is NaN or inf
// makes its head NaN, and so do logits that are all -inf, as in torch: -inf - -inf.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "heads.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kSumBlock = 1024;  // edges of a partial sum: keeps the rounding errors of long rows small
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Returns exp(x) for x <= 0, to 3e-7 relative; 0 below the smallest normal float.
GNNC_INLINE Floats exp_of_negative(Floats x) {
  const Floats n = nearest(x * splat(1.44269504f));
  const Floats r = fused(n, splat(-1.42860682e-6f), fused(n, splat(-0.693145752f), x));  // ln 2 in two parts
  Floats p = splat(1.0f / 720);
  for (const float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fused(p, r, splat(c));
#ifdef __AVX512F__
  const Floats value = _mm512_scalef_ps(p, n);
#else
  // Unsigned, as lanes that are replaced below, or are not stored, may overflow.
  const Words exponent = reinterpret_cast<Words>(__builtin_convertvector(n, Ints)) << 23;
  const Floats value = x == x ? as_floats(reinterpret_cast<Ints>(reinterpret_cast<Words>(p) + exponent)) : x;
#endif
  return x < -87.33654f ? Floats{} : value;
}

// Fills the rest of the last vector with logits of -inf, which do not change the softmax.
GNNC_INLINE void pad_logits(float* logits, int64_t flat) {
  const auto used = static_cast<int32_t>(flat % kLanes);
  if (used == 0) return;
  float* last = logits + flat - used;
  store(last, lane_numbers() < splat(used) ? load(last) : splat(kNothing));
}

// Returns the maximum of each head's logits; every lane gets that of its head.
template <int H>
GNNC_INLINE Floats top_of_row(const float* logits, int64_t edges) {
  Floats top = load(logits);
  for (int64_t i = kLanes; i < edges * H; i += kLanes) top = larger(load(logits + i), top);
  return fold_heads<H>(top, [](Floats a, Floats b) { return larger(a, b); });
}

// Returns the sums by head of value(position) over the vectors of a row.
template <int H, typename Value>
GNNC_INLINE Floats sum_of_row(int64_t edges, const Value& value) {
  const int64_t flat = edges * H;
  Floats sum{};
  for (int64_t block = 0; block < flat; block += kSumBlock * H) {
    Floats part{};
    for (int64_t i = block; i < std::min(flat, block + kSumBlock * H); i += kLanes) part = part + value(i);
    sum = sum + part;
  }
  return fold_heads<H>(sum, [](Floats a, Floats b) { return a + b; });
}

// Replaces logits by exp(l - max) and returns the sums by head. Scale::operator()(first edge, vector) returns the value
// that is stored for exp(l - max).
template <int H, typename Scale>
GNNC_INLINE Floats exp_of_row(float* logits, int64_t edges, const Scale& scale) {
  const Floats top = top_of_row<H>(logits, edges);
  return sum_of_row<H>(edges, [&](int64_t i) __attribute__((always_inline)) {
    const Floats e = exp_of_negative(load(logits + i) - top);
    store(logits + i, scale(i / H, e));
    return e;
  });
}

// Computes the exponentials and sums for a number of heads that does not divide the lanes, one head at a time.
inline void exp_of_any_row(float* logits, int64_t edges, int64_t heads, float* sum) {
  const int64_t flat = edges * heads;
  for (int64_t h = 0; h < heads; ++h) {
    float top = kNothing;
    for (int64_t i = h; i < flat; i += heads) top = logits[i] > top ? logits[i] : top;
    for (int64_t i = h; i < flat; i += heads) logits[i] -= top;
  }
  for (int64_t i = 0; i < flat; i += kLanes) store(logits + i, exp_of_negative(load(logits + i)));
  for (int64_t h = 0; h < heads; ++h) {
    float total = 0.0f;
    for (int64_t block = h; block < flat; block += kSumBlock * heads) {
      float part = 0.0f;
      for (int64_t i = block; i < std::min(flat, block + kSumBlock * heads); i += heads) part += logits[i];
      total += part;
    }
    sum[h] = total;
  }
}

// Replaces logits (padded to whole vectors) by exp(logits - max), and computes inverse = 1 / (sum + eps) by head;
// `inverse` needs room for at least kLanes floats.
template <typename Scale>
GNNC_INLINE void softmax_parts(float* logits, int64_t edges, int64_t heads, float eps, float* inverse,
                               const Scale& scale) {
  const bool periodic = with_heads(heads, [&]<int H>() __attribute__((always_inline)) {
    const auto scaled = [&](int64_t edge, Floats e)
                            __attribute__((always_inline)) { return scale.template operator()<H>(edge, e); };
    store(inverse, splat(1.0f) / (exp_of_row<H>(logits, edges, scaled) + eps));
  });
  if (periodic) return;
  exp_of_any_row(logits, edges, heads, inverse);
  for (int64_t h = 0; h < heads; ++h) inverse[h] = 1.0f / (inverse[h] + eps);
}

// Computes out = values * inverse by head.
inline void normalize_edges(const float* values, int64_t edges, int64_t heads, const float* inverse, float* out) {
  const int64_t flat = edges * heads;
  const bool periodic = with_heads(heads, [&]<int H>() {
    Floats factor;
    for (int lane = 0; lane < kLanes; ++lane) factor[lane] = inverse[lane % H];
    for_columns(flat, [&](int64_t i, auto lanes) { store(out + i, load(values + i) * factor, lanes); });
  });
  if (periodic) return;
  for (int64_t i = 0; i < flat; ++i) out[i] = values[i] * inverse[i % heads];
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
