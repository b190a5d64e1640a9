#pragma once

// The weights of a row's edges where logits are leaky_relu(a_dst + a_src): in one loop, without the row's maximum.
//
// A softmax does not change where all its logits lose the same number. leaky_relu(a_dst + the largest a_src of the
// graph) is above every logit of the row and known beforehand: logits, exponentials, their sum and the largest weight
// come out of one loop. Where that bound is so far above a row that its sum underflows, the row takes the other way.

#include "logits.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr float kLeastSum = 1e-20f;  // terms that underflowed are below 1e-18 of it

// For one row: weights[edge][head], 1 / sum and the largest weight of every head as whole vectors. With one head the
// values of the sources are copied for a tile of rows first; src and scale are those of the row's first edge.
struct BoundedRow {
  int64_t row;
  const float *src, *scale;
  float *weights, *inverse, *largest;
};

template <int H, bool Full>
GNNC_INLINE Floats bounded_vector(const AttentionArgs& a, const BoundedRow& row, Floats own, Floats bound,
                                  const int32_t* col, int64_t k, int64_t left, Floats& sum) {
  Floats l;
  if constexpr (H == 1) {
    l = load(row.src + k) + own;
  } else {
    l = gather_heads<H, Full>(a.a_src, col + k, left) + own;
  }
  Floats e = exp_of_negative(larger(l, l * splat(a.slope)) - bound);
  if constexpr (!Full) e = keep(e, Tail{static_cast<int>(left * H)});
  sum += e;
  if (a.x_scale == nullptr) return e;
  const Floats scale = H == 1 ? load(row.scale + k) : repeat_scales<H, Full>(a.x_scale, col + k, left);
  if constexpr (Full) return e * scale;
  return keep(e * scale, Tail{static_cast<int>(left * H)});
}

// False where the sum underflows or is not finite.
template <int H>
GNNC_INLINE bool bounded_softmax(const AttentionArgs& a, const Segment& s, const BoundedRow& row) {
  constexpr int kEdges = kLanes / H;
  const Floats own = repeat_heads<H>(a.a_dst + row.row * H), top = own + load(a.src_tops);
  const Floats bound = larger(top, top * splat(a.slope));
  Floats sum{};
  Ints largest{};
  int64_t k = 0;
  const auto put = [&](Floats w) __attribute__((always_inline)) {
    largest = gnnc::GNNC_ISA::larger(largest, magnitude(w));
    store(row.weights + k * H, w);
  };
  for (; k + kEdges <= s.count; k += kEdges) {
    if constexpr (H > 1) {
      const int32_t* next = s.col + k + s.ahead;
      each<kEdges>([&](auto u) __attribute__((always_inline)) {
        __builtin_prefetch(a.a_src + static_cast<int64_t>(next[u]) * H);
      });
    }
    put(bounded_vector<H, true>(a, row, own, bound, s.col, k, kEdges, sum));
  }
  if (k < s.count) put(bounded_vector<H, false>(a, row, own, bound, s.col, k, s.count - k, sum));
  sum = fold_heads<H>(sum, [](Floats x, Floats y) { return x + y; });
  if (any((sum > splat(kLeastSum)) == 0)) return false;
  store(row.inverse, splat(1.0f) / sum);
  const auto combine = [](Ints x, Ints y) { return gnnc::GNNC_ISA::larger(x, y); };
  store(row.largest, as_floats(fold_heads<H>(largest, combine)));
  return true;
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
