#pragma once

// Computes the weights of a row's edges for logits leaky_relu(a_dst + a_src) from an upper bound of the logits, without
// the maximum of the row and without an exponential an edge.
//
// A softmax does not change if the same number is subtracted from all its logits. bound = leaky_relu(a_dst + top),
// where top is the largest a_src of the graph, is above every logit of the row and known beforehand. And since exp is
// increasing and leaky_relu(l) is the larger of l and slope l, with t = a_dst + top,
//
//   exp(leaky_relu(a_dst + a_src) - bound) = max(exp(a_src - top) exp(t - bound),
//                                                exp(slope (a_src - top)) exp(slope t - bound)):
//
// two factors of the source, stored in a table, times two factors of the destination. All factors are at most 1. If the
// bound is so far above a row's logits that the sum underflows, the row is computed from its maximum instead
// (softmax.isa.h).

#include <array>

#include "fixed_sum.isa.h"
#include "logits.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr float kLeastSum = 1e-20f;  // terms that underflowed are below 1e-18 of this sum

// A permutation that selects lanes of two concatenated vectors, for __builtin_shuffle.
using LaneTable = std::array<int32_t, kLanes>;
template <typename Function>
constexpr LaneTable lanes_by(const Function& f) {
  LaneTable lanes{};
  for (int i = 0; i < kLanes; ++i) lanes[i] = f(i);
  return lanes;
}
GNNC_INLINE Ints as_lanes(const LaneTable& t) {
  Ints v;
  std::memcpy(&v, t.data(), sizeof v);
  return v;
}

// Permutations that interleave two vectors of [row][H] to [row][both][H], and that separate them again.
template <int H, int kHalf>
constexpr LaneTable kPaired = lanes_by([](int i) {
  const int at = i + kHalf * kLanes;
  return at / (2 * H) * H + at % H + (at / H % 2) * kLanes;
});
template <int H, int kWhich>
constexpr LaneTable kUnpaired = lanes_by([](int i) { return i / H * 2 * H + kWhich * H + i % H; });

template <int H>
GNNC_INLINE void store_pairs(float* out, Floats a, Floats b) {
  store(out, __builtin_shuffle(a, b, as_lanes(kPaired<H, 0>)));
  store(out + kLanes, __builtin_shuffle(a, b, as_lanes(kPaired<H, 1>)));
}

// Computes the factors of the destinations first ... first + rows - 1 as [row][both][H]; out needs room for two vectors
// more.
template <int H>
GNNC_INLINE void destination_factors(const AttentionArgs& a, int64_t first, int64_t rows, float* out) {
  const Floats tops = load(a.src_tops), slope = splat(a.slope);
  for_columns(rows * H, [&](int64_t i, auto lanes) {
    const Floats t = load(a.a_dst + first * H + i, lanes) + tops, low = t * slope;
    const Floats bound = larger(t, low);
    store_pairs<H>(out + 2 * i, exp_of_negative(t - bound), exp_of_negative(low - bound));
  });
}

// Floats of one source's record in the table: its factors as [both][H], or, with one head, quadruples that hold the
// scale of the row of x too.
template <int H>
constexpr int64_t kRecord = factors_of(H);

// Buffers of one row: weights[edge][head], and vectors of [edges of a vector][head] from which the sum and the largest
// weight are reduced.
struct BoundedRow {
  const float* own;      // factors of the destination
  const float* records;  // with one head: a copy of the records of the row's edges
  float *weights, *sum;
  // Maximum of the bits as unsigned numbers: a negative value, an infinity or a NaN is above all others.
  float* largest;
};

// Returns the exponentials of the edges of one vector. kInside: all ids of the vector may be read, within the row or
// not.
template <int H, bool kInside>
GNNC_INLINE Floats exponentials(const AttentionArgs& a, const float* own, const int32_t* col, int64_t left) {
  if constexpr (H == kLanes) {
    const float* record = a.factors + static_cast<int64_t>(*col) * 2 * H;
    return larger(load(record) * load(own), load(record + H) * load(own + H));
  } else {
    constexpr int kHalf = kLanes / (2 * H);
    const Floats both = repeat_heads<2 * H>(own);
    const Floats low = gather_heads<2 * H, kInside>(a.factors, col, left) * both;
    // Past the last edge, the last edge is read again; its lanes are discarded.
    const bool more = kInside || left > kHalf;
    const int32_t* next = col + (more ? kHalf : 0);
    const Floats high = gather_heads<2 * H, kInside>(a.factors, next, more ? left - kHalf : left) * both;
    return larger(__builtin_shuffle(low, high, as_lanes(kUnpaired<H, 0>)),
                  __builtin_shuffle(low, high, as_lanes(kUnpaired<H, 1>)));
  }
}

// Copies the records of edges side by side, for one head, one load at a time (see copy_of_edges).
inline void copy_records(const AttentionArgs& a, const Segment& s, float* out) {
  constexpr int64_t kSize = kRecord<1>;
  for (int64_t e = 0; e < s.count; ++e) {
    prefetch_far(a.factors + s.col[e + s.ahead] * kSize);
    std::memcpy(out + e * kSize, a.factors + s.col[e] * kSize, kSize * sizeof(float));
  }
}

// The records of kLanes edges, for one head: quadruples [factor, factor, scale, unused].
struct Quadruples {
  static constexpr int kHalf = kLanes / 2;
  static constexpr LaneTable kFactors = lanes_by([](int i) { return i % kHalf * 4 + i / kHalf; });
  static constexpr LaneTable kScales = lanes_by([](int i) { return i % kHalf * 4 + 2; });
  static constexpr LaneTable kLow = lanes_by([](int i) { return i % kHalf + i / kHalf * kLanes; });
  static constexpr LaneTable kHigh = lanes_by([](int i) { return kHalf + i % kHalf + i / kHalf * kLanes; });

  Floats v[4];

  GNNC_INLINE explicit Quadruples(const float* p) {
    each<4>([&](auto i) __attribute__((always_inline)) { v[i] = load(p + i * kLanes); });
  }
  GNNC_INLINE Floats exponentials(Floats high, Floats low) const {
    const Floats a = __builtin_shuffle(v[0], v[1], as_lanes(kFactors));
    const Floats b = __builtin_shuffle(v[2], v[3], as_lanes(kFactors));
    return larger(__builtin_shuffle(a, b, as_lanes(kLow)) * high, __builtin_shuffle(a, b, as_lanes(kHigh)) * low);
  }
  GNNC_INLINE Floats scales() const {
    const Floats a = __builtin_shuffle(v[0], v[1], as_lanes(kScales));
    const Floats b = __builtin_shuffle(v[2], v[3], as_lanes(kScales));
    return __builtin_shuffle(a, b, as_lanes(kLow));
  }
};

// Computes the weights of a segment, and accumulates them into the vectors of the row. kScaled: x has one scale a row.
template <int H, bool kInside, bool kScaled>
GNNC_INLINE void bounded_edges(const AttentionArgs& a, const Segment& s, const BoundedRow& row, bool first) {
  constexpr int kEdges = kLanes / H;
  Floats sum{};
  Ints largest{};
  const auto step = [&](int64_t k, auto lanes) __attribute__((always_inline)) {
    const int64_t left = s.count - k;
    const int32_t* col = s.col + k;
    Floats e, scale;
    if constexpr (H == 1) {
      const Quadruples quads(row.records + k * 4);
      e = quads.exponentials(splat(row.own[0]), splat(row.own[1]));
      if constexpr (kScaled) scale = quads.scales();
    } else {
      if constexpr (kInside) {
        each<kEdges>([&](auto u) __attribute__((always_inline)) {
          const int64_t next = col[s.ahead + u];
          prefetch_row(a.factors + next * kRecord<H>, kRecord<H> * static_cast<int64_t>(sizeof(float)));
          if (kScaled) prefetch_far(a.x_scale + next);
        });
      }
      e = exponentials<H, kInside>(a, row.own, col, left);
      if constexpr (kScaled) scale = repeat_scales<H, kInside>(a.x_scale, col, left);
    }
    e = keep(e, lanes);
    sum += e;
    if constexpr (kScaled) {
      e = keep(e * scale, lanes);
      largest = larger_bits(largest, as_ints(e));
    }
    store(row.weights + k * H, e);
  };
  int64_t k = 0;
  for (; k + kEdges < s.count; k += kEdges) step(k, Whole{});
  step(k, Tail{static_cast<int>((s.count - k) * H)});
  if (!first) {
    sum += load(row.sum);
    if constexpr (kScaled) largest = larger_bits(largest, as_ints(load(row.largest)));
  }
  store(row.sum, sum);
  if constexpr (kScaled) store(row.largest, as_floats(largest));
}

// Reduces vectors of [edges of a vector][H], one vector for each of as many rows as a vector has edges, to one vector
// [row][H].
template <int H, typename Vector, size_t kCount, typename Combine>
GNNC_INLINE Vector fold_rows(const std::array<Vector, kCount>& v, const Combine& combine) {
  if constexpr (kCount == 1) {
    return v[0];
  } else {
    std::array<Vector, kCount / 2> half;
    each<kCount / 2>([&](auto i) __attribute__((always_inline)) {
      half[i] = combine(__builtin_shuffle(v[2 * i], v[2 * i + 1], as_lanes(kUnpaired<H, 0>)),
                        __builtin_shuffle(v[2 * i], v[2 * i + 1], as_lanes(kUnpaired<H, 1>)));
    });
    return fold_rows<H>(half, combine);
  }
}

// Writes the records of the sources begin ... end - 1 to the table.
template <int H>
GNNC_INLINE void source_factors_of(const AttentionArgs& a, int64_t begin, int64_t end) {
  const Floats tops = load(a.src_tops), slope = splat(a.slope);
  const auto records = [&](int64_t i, auto lanes, float* out) __attribute__((always_inline)) {
    const Floats t = load(a.a_src + i, lanes) - tops;
    const Floats high = exp_of_negative(t), low = exp_of_negative(t * slope);
    if constexpr (H > 1) return store_pairs<H>(out, high, low);
    const Floats scale = a.x_scale == nullptr ? Floats{} : load(a.x_scale + i, lanes);
    alignas(64) float factors[2 * kLanes], scales[2 * kLanes];
    store_pairs<1>(factors, high, low);
    store_pairs<1>(scales, scale, scale);
    each<2>([&](auto half) __attribute__((always_inline)) {
      store_pairs<2>(out + half * 2 * kLanes, load(factors + half * kLanes), load(scales + half * kLanes));
    });
  };
  constexpr int64_t kSize = kRecord<H> / H;  // floats of the table for one value of a_src
  float* out = a.factors + begin * kRecord<H>;
  for_columns((end - begin) * H, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    if constexpr (std::is_same_v<decltype(lanes), Whole>) {
      records(begin * H + i, lanes, out + i * kSize);
    } else {
      alignas(64) float last[kSize * kLanes];
      records(begin * H + i, lanes, last);
      std::copy_n(last, lanes.lanes * kSize, out + i * kSize);
    }
  });
}

// Factors of the sums of bounded rows, [row][H] each: 1 / sum; and, if x has one scale a row, the integer steps of a
// weight of 1, and the value of one integer step of the sum.
struct RowFactors {
  float *inverse, *steps, *unit;
};

// Reduces the vectors of kLanes / H rows to one vector, [row][H].
template <int H, typename Combine>
GNNC_INLINE Floats fold_tile_rows(const float* vectors, const Combine& combine) {
  std::array<Floats, kLanes / H> v;
  each<kLanes / H>([&](auto i) __attribute__((always_inline)) { v[i] = load(vectors + i * kLanes); });
  return fold_rows<H>(v, combine);
}

// Computes the factors of kLanes / H rows. Lanes of the result are -1 where a row must be computed from its maximum:
// its sum underflows or is NaN, or its largest weight is too small for integers, or not a finite positive number.
template <int H, bool kScaled>
GNNC_INLINE Ints finish_rows(const float* sums, const float* tops, const RowFactors& out) {
  const Floats sum = fold_tile_rows<H>(sums, [](Floats x, Floats y) { return x + y; });
  const Floats inverse = splat(1.0f) / sum;
  store(out.inverse, inverse);
  Ints fine = sum > splat(kLeastSum);
  if constexpr (kScaled) {
    const auto larger = [](Floats x, Floats y) { return as_floats(larger_bits(as_ints(x), as_ints(y))); };
    const Floats top = fold_tile_rows<H>(tops, larger);
    store(out.steps, splat(kSteps) / top);
    store(out.unit, top * splat(1.0f / kSteps) * inverse);
    fine &= (top >= splat(kLeastTop)) & (top < splat(std::numeric_limits<float>::infinity()));
  }
  return ~fine;
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
