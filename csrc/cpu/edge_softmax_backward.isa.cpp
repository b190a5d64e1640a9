// See edge_softmax_backward.h for layout and traffic.

#include "edge_softmax_backward.h"

#include <algorithm>

#include "gnnc/simd.h"
#include "heads.isa.h"
#include "scratch.h"

namespace gnnc::GNNC_ISA {
namespace {

// Calls body(position, lanes) for every vector of `count` values.
template <typename Body>
GNNC_INLINE void each_vector(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, Whole{});
  if (i < count) body(i, Tail{static_cast<int>(count - i)});
}

template <int H>
GNNC_INLINE void row_of_vectors(const float* alpha, const float* grad, int64_t count, float* out) {
  Floats total{};
  each_vector(count,
              [&](int64_t i, auto lanes) { total = fused(load(alpha + i, lanes), load(grad + i, lanes), total); });
  total = fold_heads<H>(total, [](Floats a, Floats b) { return a + b; });
  each_vector(count, [&](int64_t i, auto lanes) {
    store(out + i, load(alpha + i, lanes) * (load(grad + i, lanes) - total), lanes);
  });
}

void row_of_heads(const float* alpha, const float* grad, int64_t edges, int64_t heads, float* total, float* out) {
  std::fill(total, total + heads, 0.0f);
  for (int64_t e = 0; e < edges; ++e) {
    for (int64_t h = 0; h < heads; ++h) total[h] += alpha[e * heads + h] * grad[e * heads + h];
  }
  for (int64_t e = 0; e < edges; ++e) {
    for (int64_t h = 0; h < heads; ++h) out[e * heads + h] = alpha[e * heads + h] * (grad[e * heads + h] - total[h]);
  }
}

}  // namespace

void edge_softmax_backward(const EdgeSoftmaxBackwardArgs& a, int64_t row_begin, int64_t row_end) {
  static thread_local Scratch totals;
  auto* total = totals.get<float>(static_cast<size_t>(a.heads));
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = a.csr.rowptr[row], edges = a.csr.rowptr[row + 1] - begin;
    const int64_t first = begin * a.heads, count = edges * a.heads;
    if (edges == 0) continue;
    const bool fits =
        with_heads(a.heads, [&]<int H>() { row_of_vectors<H>(a.alpha + first, a.grad + first, count, a.out + first); });
    if (!fits) row_of_heads(a.alpha + first, a.grad + first, edges, a.heads, total, a.out + first);
  }
}

}  // namespace gnnc::GNNC_ISA
