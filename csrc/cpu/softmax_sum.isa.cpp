// See softmax_sum.h for layout, traffic and floor.

#include "softmax_sum.h"

#include "softmax.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

// The running state of a vector of columns of a row after some of its edges.
struct Running {
  Floats top = splat(kNothing), sum{}, weighted{};
};

template <typename N>
GNNC_INLINE Running load_state(const SoftmaxSumArgs& a, int64_t c, N n) {
  if (a.state == nullptr) return {};
  const float* state = a.state + c;
  return {load(state, n), load(state + a.width, n), load(state + 2 * a.width, n)};
}

template <typename N>
GNNC_INLINE void store_state(const SoftmaxSumArgs& a, int64_t c, N n, const Running& r) {
  if (a.state == nullptr) return;
  float* state = a.state + c;
  store(state, r.top, n);
  store(state + a.width, r.sum, n);
  store(state + 2 * a.width, r.weighted, n);
}

// Adds the edges begin .. end to the state of the edges before them. If all logits so far are -inf, the sum is 0, its
// quotient is NaN as in torch, and more of the row may follow; a NaN reaches the sum by its exponential.
template <typename N>
GNNC_INLINE Running join(const SoftmaxSumArgs& a, int64_t begin, int64_t end, int64_t c, N n, const Running& before) {
  const float *logits = a.logits + c, *value = a.value + c;
  Running now = before;
  for (int64_t e = begin; e < end; ++e) now.top = larger(load(logits + e * a.width, n), now.top);
  const Floats shift = now.top == splat(kNothing) ? Floats{} : now.top;
  const Floats factor = exp_of_negative(before.top - shift);
  now.sum = before.sum * factor;
  now.weighted = before.weighted * factor;
  for (int64_t block = begin; block < end; block += kSumBlock) {
    Floats sum{}, weighted{};
    for (int64_t e = block; e < std::min(end, block + kSumBlock); ++e) {
      const Floats exponential = exp_of_negative(load(logits + e * a.width, n) - shift);
      sum += exponential;
      weighted += exponential * load(value + e * a.width, n);
    }
    now.sum += sum;
    now.weighted += weighted;
  }
  return now;
}

template <typename N>
void column(const SoftmaxSumArgs& a, int64_t c, N n) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t begin = a.rowptr[row], end = a.rowptr[row + 1];
    float* out = a.out + row * a.out_stride + c;
    if (begin == end) {
      store(out, Floats{}, n);
      continue;
    }
    const Running r = join(a, begin, end, c, n, load_state(a, c, n));
    store_state(a, c, n, r);
    store(out, r.weighted / r.sum, n);
  }
}

}  // namespace

void softmax_sum(const SoftmaxSumArgs& args, int64_t column_begin, int64_t column_end) {
  for_columns(column_end - column_begin, [&](int64_t c, auto n) { column(args, column_begin + c, n); });
}

}  // namespace gnnc::GNNC_ISA
