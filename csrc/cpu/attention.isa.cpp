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
constexpr int64_t kMaxTileRows = 32;   // long steps wait less for the first row of each

// One row of a tile and its place in the buffers.
struct TileRow {
  int64_t row, begin, end;
  float* weights;  // [edges, heads] and room for a vector: logits, then exp(logits - max), times the scale of x
  float* inverse;  // [heads] and room for a vector: 1 / (sum + eps)
  float* largest;  // of the weights, a vector; null: not known
  float* out;

  int64_t edges() const { return end - begin; }
};

// Turns the logits of a row into the weights of its edges, without the factor 1 / (sum + eps).
void softmax_row(const AttentionArgs& a, const TileRow& t) {
  const Segment s = segment(a.csr, t.begin, t.end);
  pad_logits(t.weights, s.count * a.heads);
  const auto raw = []<int H>(int64_t, Floats e) __attribute__((always_inline)) { return e; };
  const auto scaled = [&]<int H>(int64_t edge, Floats e) __attribute__((always_inline)) {
    return e * scales_of_edges<H>(a.x_scale, s.col + edge, s.count - edge);
  };
  const bool periodic = with_heads(a.heads, []<int H>() {});
  const bool fold_later = a.x_scale != nullptr && (a.alpha_out != nullptr || !periodic);
  if (a.x_scale == nullptr || fold_later) {
    softmax_parts(t.weights, s.count, a.heads, a.eps, t.inverse, raw);
  } else {
    softmax_parts(t.weights, s.count, a.heads, a.eps, t.inverse, scaled);
  }
  if (a.alpha_out != nullptr) normalise_edges(t.weights, s.count, a.heads, t.inverse, a.alpha_out + t.begin * a.heads);
  if (fold_later) fold_scale(a.x_scale, s, a.heads, t.weights);
}

void weigh_row(const AttentionArgs& a, const TileRow& t) {
  const int64_t bytes = a.kind == Logit::dot ? a.heads * a.dot_width * static_cast<int64_t>(sizeof(float)) : 64;
  row_logits(a, segment(a.csr, t.begin, t.end, bytes), t.row, t.begin, t.weights);
  softmax_row(a, t);
}

// Values of the sources of a tile's edges, which one head copies beforehand.
struct TileSources {
  int64_t begin;  // first edge
  float *src, *scale;
};

template <int H>
void weigh_bounded(const AttentionArgs& a, TileRow& t, const TileSources& sources) {
  BoundedRow row{t.row, nullptr, nullptr, t.weights, t.inverse, t.largest};
  if constexpr (H == 1) {
    row.src = sources.src + (t.begin - sources.begin);
    row.scale = sources.scale + (t.begin - sources.begin);
  }
  const bool done = t.edges() <= kSegment && bounded_softmax<H>(a, segment(a.csr, t.begin, t.end), row);
  if (done) return;
  t.largest = nullptr;
  weigh_row(a, t);
}

template <int H>
void weigh_tile(const AttentionArgs& a, TileRow* rows, int64_t count) {
  static thread_local Scratch src, scale;
  const int64_t begin = rows[0].begin, edges = rows[count - 1].end - begin;
  TileSources sources{begin, nullptr, nullptr};
  if constexpr (H == 1) {
    const auto room = static_cast<size_t>(edges + kLanes);
    sources = {begin, src.get<float>(room), scale.get<float>(room)};
    const Segment s = segment(a.csr, begin, begin + edges);
    const EdgeCopy of_src{a.a_src, sources.src}, of_scale{a.x_scale, sources.scale};
    a.x_scale == nullptr ? copy_of_edges(s, of_src) : copy_of_edges(s, of_src, of_scale);
  }
  for (int64_t r = 0; r < count; ++r) weigh_bounded<H>(a, rows[r], sources);
}

template <typename T>
void sum_row(const AttentionArgs& a, const TileRow& t, const Rows<T>& x, SumKernel<T> sum) {
  for (int64_t e = t.begin; e < t.end; e += kSegment) {
    const Segment s = segment(a.csr, e, std::min(e + kSegment, t.end), a.width * static_cast<int64_t>(sizeof(T)));
    const float* own = t.weights + (e - t.begin) * a.heads;
    sum(s, x, {own, a.heads, a.width / a.heads, t.inverse, t.largest}, e == t.begin, t.out);
  }
}

// The rows of a tile that have edges; the others become 0.
int64_t lay_out(const AttentionArgs& a, int64_t first, int64_t rows, int64_t stride, float* tile, TileRow* out) {
  static thread_local Scratch buffers, inverses;
  const int64_t* rowptr = a.csr.rowptr + first;
  const int64_t edges = rowptr[rows] - rowptr[0];
  auto* weights = buffers.get<float>(static_cast<size_t>(edges * a.heads + (rows + 1) * kLanes));
  auto* inverse = inverses.get<float>(static_cast<size_t>(rows * (a.heads + 2 * kLanes)));
  int64_t count = 0;
  for (int64_t r = 0; r < rows; ++r) {
    float* values = tile + r * stride;
    if (rowptr[r] == rowptr[r + 1]) {
      std::memset(values, 0, static_cast<size_t>(a.width) * sizeof(float));
      continue;
    }
    float* largest = a.src_tops == nullptr ? nullptr : inverse + a.heads + kLanes;
    out[count] = {first + r, rowptr[r], rowptr[r + 1], weights, inverse, largest, values};
    weights += (out[count++].edges() * a.heads + kLanes - 1) / kLanes * kLanes;
    inverse += a.heads + 2 * kLanes;
  }
  return count;
}

// The values of the destinations, two tiles ahead: few cache lines, among gathers that hide them from the hardware.
void fetch_destinations(const AttentionArgs& a, int64_t first, int64_t rows) {
  if (a.kind != Logit::additive) return;
  const float* ahead = a.a_dst + (first + 2 * rows) * a.heads;
  for (int64_t i = 0; i < rows * a.heads; i += 16) __builtin_prefetch(ahead + i);
}

// Each step is done for all rows of a tile before the next: within one row they wait for each other.
template <typename T>
void attention_rows(const AttentionArgs& a, int64_t row_begin, int64_t row_end) {
  static thread_local Scratch tiles;
  const int64_t stride = (a.width + 63) / 64 * 64;
  const int64_t tile_rows = std::clamp<int64_t>(kTileFloats / std::max<int64_t>(stride, 1), 1, kMaxTileRows);
  auto* tile = tiles.get<float>(static_cast<size_t>(tile_rows * stride));
  const Rows<T> x{static_cast<const T*>(a.x), a.x_stride, a.width};
  const SumKernel<T> sum = weighted_sum_kernel<T>(a.width, a.heads);
  TileRow rows[kMaxTileRows];
  for (int64_t first = row_begin; first < row_end; first += tile_rows) {
    const int64_t height = std::min(tile_rows, row_end - first);
    fetch(*a.program, first, static_cast<int>(height));
    fetch_destinations(a, first, tile_rows);
    const int64_t count = lay_out(a, first, height, stride, tile, rows);
    const auto bounded = [&]<int H>() { weigh_tile<H>(a, rows, count); };
    if (count > 0 && (a.src_tops == nullptr || !with_heads(a.heads, bounded))) {
      for (int64_t r = 0; r < count; ++r) weigh_row(a, rows[r]);
    }
    for (int64_t r = 0; r < count; ++r) sum_row(a, rows[r], x, sum);
    run(*a.program, tile, stride, first, static_cast<int>(height), a.width);
  }
}

}  // namespace

void attention(const AttentionArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.element == Element::i8) return attention_rows<int8_t>(args, row_begin, row_end);
  if (args.element == Element::bf16) return attention_rows<Bf16>(args, row_begin, row_end);
  attention_rows<float>(args, row_begin, row_end);
}

}  // namespace gnnc::GNNC_ISA
