#pragma once

// The softmax over the edges of one destination row, for edge_softmax and attention: exp(l - max) / (sum + eps), per head.
//
// The logits of a row lie as [edges][heads] and are handled flat, 16 at a time, where the number of heads divides 16:
// then every vector repeats the same heads, and a maximum or sum over edges is one vector to be folded at the end.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2High = 0.693145751953125f;
constexpr float kLn2Low = 1.42860682030941723e-6f;
constexpr float kExpUnderflow = -87.33654f;

// exp(x) for x <= 0, to 2e-7 relative; 0 below the smallest normal float. A NaN stays one.
GNNC_INLINE Floats exp_of_negative(Floats x) {
  const Floats n = nearest(x * splat(kLog2E));
  const Floats r = (x - n * splat(kLn2High)) - n * splat(kLn2Low);
  Floats p = splat(1.0f / 5040);
  p = fused(p, r, splat(1.0f / 720));
  p = fused(p, r, splat(1.0f / 120));
  p = fused(p, r, splat(1.0f / 24));
  p = fused(p, r, splat(1.0f / 6));
  p = fused(p, r, splat(0.5f));
  p = fused(p, r, splat(1.0f));
  p = fused(p, r, splat(1.0f));
  const Ints exponent = __builtin_convertvector(n, Ints) << 23;
  const Floats value = as_floats(as_ints(p) + exponent);
  const Floats tiny = x < kExpUnderflow ? Floats{} : value;
  return x == x ? tiny : x;
}

GNNC_INLINE float exp_one(float x) { return exp_of_negative(splat(x))[0]; }

// NaN if either is: a plain maximum would lose it.
GNNC_INLINE float larger_or_nan(float a, float b) { return b > a || b != b ? b : a; }

// The vectors that hold `heads` numbers a period.
constexpr bool periodic(int64_t heads) { return kLanes % heads == 0; }

inline void max_of_heads(const float* logits, int64_t edges, int64_t heads, float* top) {
  std::fill_n(top, heads, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  const int64_t flat = edges * heads;
  if (periodic(heads) && flat >= kLanes) {
    Floats best = load(logits);
    Floats bad = best - best;  // NaN where any logit was NaN or infinite: those rows take the careful loop
    for (i = kLanes; i + kLanes <= flat; i += kLanes) {
      const Floats l = load(logits + i);
      best = larger(l, best);
      bad = bad + (l - l);
    }
    if (any(bad != bad)) {
      i = 0;
    } else {
      for (int lane = 0; lane < kLanes; ++lane) top[lane % heads] = std::max(top[lane % heads], best[lane]);
    }
  }
  for (; i < flat; ++i) top[i % heads] = larger_or_nan(top[i % heads], logits[i]);
  // A row whose logits are all -inf has no softmax; 0 keeps it from being NaN.
  for (int64_t h = 0; h < heads; ++h) top[h] = top[h] == -std::numeric_limits<float>::infinity() ? 0.0f : top[h];
}

// logits becomes exp(logits - top); adds their sums to sum.
inline void exp_of_block(float* logits, int64_t edges, int64_t heads, const float* top, float* sum) {
  const int64_t flat = edges * heads;
  if (!periodic(heads)) {
    for (int64_t i = 0; i < flat; ++i) logits[i] -= top[i % heads];
    int64_t i = 0;
    for (; i + kLanes <= flat; i += kLanes) store(logits + i, exp_of_negative(load(logits + i)));
    if (i < flat) store(logits + i, exp_of_negative(load(logits + i, Tail{int(flat - i)})), Tail{int(flat - i)});
    for (int64_t h = 0; h < heads; ++h) {
      float total = 0.0f;
      for (i = h; i < flat; i += heads) total += logits[i];
      sum[h] += total;
    }
    return;
  }
  Floats tops, total{};
  for (int lane = 0; lane < kLanes; ++lane) tops[lane] = top[lane % heads];
  int64_t i = 0;
  for (; i + kLanes <= flat; i += kLanes) {
    const Floats e = exp_of_negative(load(logits + i) - tops);
    total = total + e;
    store(logits + i, e);
  }
  if (i < flat) {
    const Tail tail{static_cast<int>(flat - i)};
    const Floats e = keep(exp_of_negative(load(logits + i, tail) - tops), tail);
    total = total + e;
    store(logits + i, e, tail);
  }
  for (int lane = 0; lane < kLanes; ++lane) sum[lane % heads] += total[lane];
}

// The same of a whole row. Blocks keep the rounding of a long row's sum small.
inline void exp_of_heads(float* logits, int64_t edges, int64_t heads, const float* top, float* sum) {
  constexpr int64_t kBlock = 1024;
  std::fill_n(sum, heads, 0.0f);
  for (int64_t e = 0; e < edges; e += kBlock) {
    exp_of_block(logits + e * heads, std::min(kBlock, edges - e), heads, top, sum);
  }
}

// out = values / (sum + eps), a head at a time of the period.
inline void divide_heads(const float* values, int64_t edges, int64_t heads, const float* sum, float eps, float* out) {
  for (int64_t e = 0; e < edges; ++e) {
    for (int64_t h = 0; h < heads; ++h) out[e * heads + h] = values[e * heads + h] / (sum[h] + eps);
  }
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
