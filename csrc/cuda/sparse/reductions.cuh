#pragma once

// The reductions that message applies to the values of a row's edges, several at a time, in registers.
//
// A Reductions<...> holds the state of one column. It takes the values of one edge after the other; the parts of a
// split row each write their state to the staging buffer, as floats, and are merged in order. Divisors are at least 1:
// __fdividef, which errs by two units in the last place, makes no call that registers are saved for.

#include "common/types.cuh"

namespace gnnc {

enum class Join { sum, mean, max, min, softmax };

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// The state of one reduction: sum, mean, max or min of a value, or the sum of values weighted by a softmax of logits.
template <Join kJoin>
struct Reduction {
  static constexpr int kValues = 1, kWords = 1;
  float total;

  __device__ void start() { total = kJoin == Join::max ? -infinity() : kJoin == Join::min ? infinity() : 0.0f; }
  // A NaN in either operand propagates.
  __device__ void take(const float* value) {
    const float v = *value;
    if constexpr (kJoin == Join::max) {
      total = larger_or_nan(total, v);
    } else if constexpr (kJoin == Join::min) {
      total = smaller_or_nan(total, v);
    } else {
      total += v;
    }
  }
  // Takes the values of the first `count` of kEdges edges, which lie kApart floats from each other.
  template <int kEdges, int kApart>
  __device__ __forceinline__ void take_edges(const float* values, int count) {
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      if (e < count) take(values + e * kApart);
    }
  }
  __device__ void merge(const Reduction& part) { take(&part.total); }
  __device__ Reduction of_thread(int lane) const { return {__shfl_sync(0xffffffffu, total, lane)}; }
  __device__ float result(int64_t count) const {
    if (count == 0) return 0.0f;
    return kJoin == Join::mean ? __fdividef(total, static_cast<float>(count)) : total;
  }
  __device__ void write(float* words, int64_t apart) const { *words = total; }
  __device__ void read(const float* words, int64_t apart) { total = __ldcg(words); }
};

template <>
struct Reduction<Join::softmax> {
  static constexpr int kValues = 2, kWords = 3;
  float top;     // largest logit
  float weight;  // sum of exp(logit - top)
  float total;   // sum of exp(logit - top) * value

  __device__ void start() {
    top = -infinity();
    weight = total = 0.0f;
  }
  __device__ void take(const float* value) {
    const float logit = value[0];
    if (logit > top) {
      const float shrink = expf(top - logit);
      const float own = expf(logit - logit);  // 1; NaN for an infinite logit, as in the reference
      weight = weight * shrink + own;
      total = total * shrink + own * value[1];
      top = logit;
    } else {
      // Behind logits of -infinity alone, top is none: such an edge has no weight unless all are such, which gives 0 /
      // 0.
      const float own = logit == -infinity() ? 0.0f : expf(logit - top);
      weight += own;
      total += own * value[1];
    }
  }
  // Takes several edges with one factor for the state before them: one exponential an edge, and one.
  template <int kEdges, int kApart>
  __device__ __forceinline__ void take_edges(const float* values, int count) {
    float of_all = top;
#pragma unroll
    for (int e = 0; e < kEdges; ++e) of_all = e < count ? fmaxf(of_all, values[e * kApart]) : of_all;
    const float shrink = top == of_all ? 1.0f : expf(top - of_all);
    weight *= shrink, total *= shrink, top = of_all;
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      const float logit = values[e * kApart];
      const float own = e >= count || logit == -infinity() ? 0.0f : expf(logit - of_all);  // inf - inf: NaN, as in take
      weight += own;
      if (e < count) total += own * values[e * kApart + 1];
    }
  }
  __device__ void merge(const Reduction& part) {
    const bool larger = part.top > top;
    const float of_both = larger ? part.top : top;
    const float shrink = larger ? expf(top - of_both) : 1.0f;
    const float own = larger || part.top == top ? 1.0f : expf(part.top - of_both);
    weight = weight * shrink + part.weight * own;
    total = total * shrink + part.total * own;
    top = of_both;
  }
  __device__ float result(int64_t count) const { return count == 0 ? 0.0f : __fdividef(total, weight); }
  __device__ void write(float* words, int64_t apart) const {
    words[0] = top;
    words[apart] = weight;
    words[2 * apart] = total;
  }
  __device__ void read(const float* words, int64_t apart) {
    top = __ldcg(words);
    weight = __ldcg(words + apart);
    total = __ldcg(words + 2 * apart);
  }
};

template <Join... kJoins>
struct Reductions {
  static constexpr int kValues = 0, kWords = 0, kResults = 0;
  __device__ void start() {}
  __device__ void take(const float* values) {}
  template <int kEdges, int kApart>
  __device__ void take_edges(const float* values, int count) {}
  __device__ void merge(const Reductions& part) {}
  __device__ Reductions of_thread(int lane) const { return {}; }
  template <class Store>
  __device__ void results(int64_t count, const Store& store, int first = 0) const {}
  __device__ void write(float* words, int64_t apart) const {}
  __device__ void read(const float* words, int64_t apart) {}
};

template <Join kFirst, Join... kRest>
struct Reductions<kFirst, kRest...> {
  using First = Reduction<kFirst>;
  using Rest = Reductions<kRest...>;
  static constexpr int kValues = First::kValues + Rest::kValues;  // values that an edge gives
  static constexpr int kWords = First::kWords + Rest::kWords;     // words of a state
  static constexpr int kResults = 1 + Rest::kResults;
  First first;
  Rest rest;

  __device__ void start() {
    first.start();
    rest.start();
  }
  __device__ void take(const float* values) {
    first.take(values);
    rest.take(values + First::kValues);
  }
  template <int kEdges, int kApart>
  __device__ __forceinline__ void take_edges(const float* values, int count) {
    first.template take_edges<kEdges, kApart>(values, count);
    rest.template take_edges<kEdges, kApart>(values + First::kValues, count);
  }
  // Returns the state of another thread of the warp, of which all threads call this.
  __device__ Reductions of_thread(int lane) const { return {first.of_thread(lane), rest.of_thread(lane)}; }
  __device__ void merge(const Reductions& part) {
    first.merge(part.first);
    rest.merge(part.rest);
  }
  // Calls store(number, result) for each reduction.
  template <class Store>
  __device__ void results(int64_t count, const Store& store, int number = 0) const {
    store(number, first.result(count));
    rest.results(count, store, number + 1);
  }
  // Words of a state lie `apart` from each other.
  __device__ void write(float* words, int64_t apart) const {
    first.write(words, apart);
    rest.write(words + First::kWords * apart, apart);
  }
  __device__ void read(const float* words, int64_t apart) {
    first.read(words, apart);
    rest.read(words + First::kWords * apart, apart);
  }
};

}  // namespace gnnc
