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

// kInside: all of the vector's edges may be read, those of the row or not.
template <int H, bool kInside>
GNNC_INLINE Floats bounded_vector(const AttentionArgs& a, const BoundedRow& row, Floats own, Floats bound,
                                  const int32_t* col, int64_t k, int64_t left, Floats& sum) {
  Floats l;
  if constexpr (H == 1) {
    l = load(row.src + k) + own;
  } else {
    l = gather_heads<H, kInside>(a.a_src, col + k, left) + own;
  }
  const Tail lanes{static_cast<int>(std::min<int64_t>(left * H, kLanes))};
  const Floats e = keep(exp_of_negative(larger(l, l * splat(a.slope)) - bound), lanes);
  sum += e;
  if (a.x_scale == nullptr) return e;
  const Floats scale = H == 1 ? load(row.scale + k) : repeat_scales<H, kInside>(a.x_scale, col + k, left);
  return keep(e * scale, lanes);
}

template <int H, bool kInside>
GNNC_INLINE bool bounded_softmax_of(const AttentionArgs& a, const Segment& s, const BoundedRow& row) {
  constexpr int kEdges = kLanes / H;
  const Floats own = repeat_heads<H>(a.a_dst + row.row * H), top = own + load(a.src_tops);
  const Floats bound = larger(top, top * splat(a.slope));
  Floats sum{};
  Ints largest{};
  for (int64_t k = 0; k < s.count; k += kEdges) {
    if constexpr (H > 1 && kInside) {
      const int32_t* next = s.col + k + s.ahead;
      each<kEdges>([&](auto u) __attribute__((always_inline)) {
        prefetch_far(a.a_src + static_cast<int64_t>(next[u]) * H);
        if (a.x_scale != nullptr) prefetch_far(a.x_scale + next[u]);
      });
    }
    const Floats w = bounded_vector<H, kInside>(a, row, own, bound, s.col, k, s.count - k, sum);
    largest = gnnc::GNNC_ISA::larger(largest, magnitude(w));
    store(row.weights + k * H, w);
  }
  sum = fold_heads<H>(sum, [](Floats x, Floats y) { return x + y; });
  if (any((sum > splat(kLeastSum)) == 0)) return false;
  store(row.inverse, splat(1.0f) / sum);
  const auto combine = [](Ints x, Ints y) { return gnnc::GNNC_ISA::larger(x, y); };
  store(row.largest, as_floats(fold_heads<H>(largest, combine)));
  return true;
}

// False where the sum underflows or is not finite.
template <int H>
GNNC_INLINE bool bounded_softmax(const AttentionArgs& a, const Segment& s, const BoundedRow& row) {
  return s.ahead > 0 ? bounded_softmax_of<H, true>(a, s, row) : bounded_softmax_of<H, false>(a, s, row);
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
