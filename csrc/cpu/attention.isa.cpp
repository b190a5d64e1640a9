// See attention.h for layout, traffic and floor.

#include "attention.h"

#include "bounded_softmax.isa.h"
#include "fixed_sum.isa.h"
#include "logits.isa.h"
#include "scratch.h"
#include "softmax.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kTileFloats = 4096;  // half of L1
constexpr int64_t kMaxTileRows = 64;   // with long steps, the latency of each row's first loads matters less

// A row of a tile that has at least one edge.
struct TileRow {
  int64_t begin, end;  // edges
  int64_t index;       // row index in the tile
  float* weights;      // [edges, heads], padded to a vector: logits, then exp(logits - max), times the scale of x

  int64_t edges() const { return end - begin; }
};

// A tile: rows that go through each step (logits, softmax, sum) together, because the steps of a single row depend on
// each other.
struct Tile {
  int64_t first, height;
  float* values;  // [height, stride]
  int64_t stride;
  TileRow rows[kMaxTileRows];
  int64_t count;
  uint64_t bounded;    // bit mask of the rows whose weights are computed by bounded_softmax.isa.h
  RowFactors factors;  // [count, heads], factors of the bounded rows
  float* inverse;      // [count, inverse_ld], of the other rows: 1 / (sum + eps) of each head, padded to a vector
  int64_t inverse_ld;

  bool is_bounded(int64_t r) const { return (bounded >> r & 1) != 0; }
};

// Turns the logits of a row into the weights of its edges, without the factor 1 / (sum + eps).
void softmax_row(const AttentionArgs& a, const TileRow& t, float* inverse) {
  const Segment s = segment(a.csr, t.begin, t.end);
  pad_logits(t.weights, s.count * a.heads);
  const auto raw = []<int H>(int64_t, Floats e) __attribute__((always_inline)) { return e; };
  const auto scaled = [&]<int H>(int64_t edge, Floats e) __attribute__((always_inline)) {
    return e * scales_of_edges<H>(a.x_scale, s.col + edge, s.count - edge);
  };
  const bool periodic = with_heads(a.heads, []<int H>() {});
  const bool fold_later = a.x_scale != nullptr && (a.alpha_out != nullptr || !periodic);
  if (a.x_scale == nullptr || fold_later) {
    softmax_parts(t.weights, s.count, a.heads, a.eps, inverse, raw);
  } else {
    softmax_parts(t.weights, s.count, a.heads, a.eps, inverse, scaled);
  }
  if (a.alpha_out != nullptr) normalize_edges(t.weights, s.count, a.heads, inverse, a.alpha_out + t.begin * a.heads);
  if (fold_later) fold_scale(a.x_scale, s, a.heads, t.weights);
}

void weigh_row(const AttentionArgs& a, const Tile& t, int64_t r) {
  const TileRow& row = t.rows[r];
  const int64_t bytes = a.kind == Logit::dot ? a.heads * a.dot_width * static_cast<int64_t>(sizeof(float)) : 64;
  row_logits(a, segment(a.csr, row.begin, row.end, bytes), t.first + row.index, row.begin, row.weights);
  softmax_row(a, row, t.inverse + r * t.inverse_ld);
}

// Intermediate results of the bounded rows of a tile.
struct Partial {
  float* own;          // factors of the destinations
  float *sums, *tops;  // one vector a row: partial sums and maxima of the weights
  float* records;      // with one head, the records of all edges
};

template <int H>
Partial start_tile(const AttentionArgs& a, Tile& t) {
  static thread_local Scratch floats, copies;
  const int64_t vectors = (t.count + kLanes) * kLanes, factors = t.height * H + 2 * kLanes;
  auto* p = floats.get<float>(static_cast<size_t>(2 * vectors + 5 * factors));
  float* rest = p + 2 * vectors;
  t.factors = {rest, rest + factors, rest + 2 * factors};
  const Partial partial{rest + 3 * factors, p, p + vectors, nullptr};
  destination_factors<H>(a, t.first, t.height, partial.own);
  if constexpr (H > 1) return partial;
  const int64_t begin = t.rows[0].begin, end = t.rows[t.count - 1].end;
  auto* records = copies.get<float>(static_cast<size_t>((end - begin + kLanes) * kRecord<1>));
  copy_records(a, segment(a.csr, begin, end), records);
  return {partial.own, partial.sums, partial.tops, records - begin * kRecord<1>};
}

template <int H, bool kScaled>
GNNC_INLINE void weigh_bounded_rows(const AttentionArgs& a, const Tile& t, const Partial& partial) {
  const int64_t all_begin = t.rows[0].begin;
  const Segment all = segment(a.csr, all_begin, t.rows[t.count - 1].end);
  const auto rows = [&](auto inside) __attribute__((always_inline)) {
    for (int64_t r = 0; r < t.count; ++r) {
      const TileRow& row = t.rows[r];
      for (int64_t e = row.begin; e < row.end; e += kSegment) {
        const Segment s{all.col + (e - all_begin), std::min(kSegment, row.end - e), all.base, all.ahead};
        bounded_edges<H, inside, kScaled>(
            a, s,
            {partial.own + row.index * 2 * H, H == 1 ? partial.records + e * kRecord<H> : nullptr,
             row.weights + (e - row.begin) * H, partial.sums + r * kLanes, partial.tops + r * kLanes},
            e == row.begin);
      }
    }
  };
  all.ahead > 0 ? rows(std::true_type{}) : rows(std::false_type{});
}

template <int H, bool kScaled>
void weigh_tile(const AttentionArgs& a, Tile& t) {
  constexpr int64_t kRows = kLanes / H;
  const Partial partial = start_tile<H>(a, t);
  weigh_bounded_rows<H, kScaled>(a, t, partial);
  for (int64_t r = 0; r < t.count; r += kRows) {
    const RowFactors to{t.factors.inverse + r * H, t.factors.steps + r * H, t.factors.unit + r * H};
    const Ints slow = finish_rows<H, kScaled>(partial.sums + r * kLanes, partial.tops + r * kLanes, to);
    const int64_t some = std::min(kRows, t.count - r);
    t.bounded |= ((uint64_t{1} << some) - 1) << r;
    if (!any(slow & (lane_numbers() < splat(static_cast<int32_t>(some * H))))) continue;
    for (int64_t i = r; i < r + some; ++i) {
      if (!any(slow & (lane_numbers() / H == splat(static_cast<int32_t>(i - r))))) continue;
      t.bounded &= ~(uint64_t{1} << i);
      weigh_row(a, t, i);
    }
  }
}

// Collects the rows of a tile that have edges; sets the result of all other rows to 0.
void lay_out(const AttentionArgs& a, int64_t first, int64_t height, Tile& t) {
  static thread_local Scratch buffers, inverses;
  const int64_t* rowptr = a.csr.rowptr + first;
  const int64_t edges = rowptr[height] - rowptr[0];
  t.first = first;
  t.height = height;
  t.count = 0;
  t.bounded = 0;
  t.inverse_ld = a.heads + kLanes;
  t.inverse = inverses.get<float>(static_cast<size_t>(height * t.inverse_ld));
  auto* weights = buffers.get<float>(static_cast<size_t>(edges * a.heads + (height + 1) * kLanes));
  for (int64_t r = 0; r < height; ++r) {
    const int64_t begin = rowptr[r], end = rowptr[r + 1];
    if (begin == end) {
      std::memset(t.values + r * t.stride, 0, static_cast<size_t>(a.width) * sizeof(float));
      continue;
    }
    t.rows[t.count++] = {begin, end, r, weights};
    weights += ((end - begin) * a.heads + kLanes - 1) / kLanes * kLanes;
  }
}

template <typename T>
void weigh(const AttentionArgs& a, Tile& t) {
  const auto bounded = [&]<int H>() { weigh_tile<H, std::is_same_v<T, int8_t>>(a, t); };
  if (t.count == 0 || (a.factors != nullptr && with_heads(a.heads, bounded))) return;
  for (int64_t r = 0; r < t.count; ++r) weigh_row(a, t, r);
}

// State that all rows of a call share: x, the layout of the weights, and the kernel of the weighted sum.
template <typename T>
struct Sum {
  Rows<T> x;
  Weights shape;
  SumKernel<T> kernel;
};

template <typename T>
void sum_row(const AttentionArgs& a, const Tile& t, const Sum<T>& sum, int64_t r) {
  const TileRow& row = t.rows[r];
  Weights weights = sum.shape;
  weights.factor = t.is_bounded(r) ? t.factors.inverse + r * a.heads : t.inverse + r * t.inverse_ld;
  // One integer scale for a longer row would be too coarse for most of its edges.
  if (t.is_bounded(r) && row.edges() <= kSegment) {
    weights.steps = t.factors.steps + r * a.heads;
    weights.unit = t.factors.unit + r * a.heads;
  }
  for (int64_t e = row.begin; e < row.end; e += kSegment) {
    const Segment s = segment(a.csr, e, std::min(e + kSegment, row.end), a.width * static_cast<int64_t>(sizeof(T)));
    weights.data = row.weights + (e - row.begin) * a.heads;
    sum.kernel(s, sum.x, weights, e == row.begin, t.values + row.index * t.stride);
  }
}

#ifdef __AVX512F__
// Sums bounded rows of up to 64 columns in one loop.
template <int H>
void sum_narrow_rows(const AttentionArgs& a, const Tile& t, const Sum<int8_t>& sum) {
  const FixedColumns<H, 1> columns(0, sum.shape.heads_a_block);
  for (int64_t r = 0; r < t.count; ++r) {
    const TileRow& row = t.rows[r];
    if (!t.is_bounded(r) || row.edges() > kSegment) {
      sum_row(a, t, sum, r);
      continue;
    }
    const FixedScale scale{repeat_heads<H>(t.factors.steps + r * H), repeat_heads<H>(t.factors.unit + r * H)};
    fixed_block(segment(a.csr, row.begin, row.end), sum.x, 0, columns, row.weights, scale, true,
                t.values + row.index * t.stride);
  }
}
#endif

template <typename T>
void sum_rows(const AttentionArgs& a, const Tile& t, const Sum<T>& sum) {
  if (a.width == 0) return;  // there is no memory for a block of columns
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, int8_t>) {
    if (a.width <= 64 && sum.kernel == fixed_sum<1>) return sum_narrow_rows<1>(a, t, sum);
    if (a.width <= 64 && sum.kernel == fixed_sum<4>) return sum_narrow_rows<4>(a, t, sum);
  }
#endif
  for (int64_t r = 0; r < t.count; ++r) sum_row(a, t, sum, r);
}

// Prefetches a_dst of the rows two tiles ahead: these are few cache lines, but the gathers in between defeat the
// hardware prefetcher.
void fetch_destinations(const AttentionArgs& a, int64_t first, int64_t rows) {
  if (a.kind != Logit::additive) return;
  const float* ahead = a.a_dst + (first + 2 * rows) * a.heads;
  for (int64_t i = 0; i < rows * a.heads; i += 16) __builtin_prefetch(ahead + i);
}

template <typename T>
void attention_rows(const AttentionArgs& a, int64_t row_begin, int64_t row_end) {
  static thread_local Scratch tiles;
  const int64_t stride = (a.width + 63) / 64 * 64;
  const int64_t tile_rows = std::clamp<int64_t>(kTileFloats / std::max<int64_t>(stride, 1), 1, kMaxTileRows);
  const Sum<T> sum{{static_cast<const T*>(a.x), a.x_stride, a.width},
                   weights_of(a.width, a.heads),
                   weighted_sum_kernel<T>(a.width, a.heads)};
  Tile t;
  t.values = tiles.get<float>(static_cast<size_t>(tile_rows * stride));
  t.stride = stride;
  for (int64_t first = row_begin; first < row_end; first += tile_rows) {
    const int64_t height = std::min(tile_rows, row_end - first);
    fetch(*a.program, first, static_cast<int>(height));
    fetch_destinations(a, first, tile_rows);
    lay_out(a, first, height, t);
    weigh<T>(a, t);
    sum_rows(a, t, sum);
    run(*a.program, t.values, stride, first, static_cast<int>(height), a.width);
  }
}

}  // namespace

void source_factors(const AttentionArgs& args, int64_t begin, int64_t end) {
  with_heads(args.heads, [&]<int H>() { source_factors_of<H>(args, begin, end); });
}

void attention(const AttentionArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.element == Element::i8) return attention_rows<int8_t>(args, row_begin, row_end);
  if (args.element == Element::bf16) return attention_rows<Bf16>(args, row_begin, row_end);
  attention_rows<float>(args, row_begin, row_end);
}

}  // namespace gnnc::GNNC_ISA
