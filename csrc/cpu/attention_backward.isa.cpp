// See attention_backward.h for layout, traffic and floor.

#include "attention_backward.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "fixed_sum.isa.h"
#include "head_dots.isa.h"
#include "logits.isa.h"
#include "scratch.h"
#include "softmax.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kColumnEdges = 64;  // edges of a segment whose rows are still in L1 when they are read again

// Returns `count` rounded up to whole vectors.
constexpr int64_t whole(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

GNNC_INLINE Floats leaky(Floats v, Floats slope) { return v > 0.0f ? v : v * slope; }

// Copies a row to floats, without its scale.
template <typename T>
void widen_row(const T* row, int64_t width, float* out) {
  for_columns(width, [&](int64_t c, auto lanes) { store(out + c, load(row + c, lanes), lanes); });
}

// Returns row i of one end of the edges, widened in `out`; its values in int8, too, if the rows that are gathered are.
template <typename Gathered>
OwnRow own_row(const EndRows& rows, int64_t i, int64_t width, float* out) {
  const int64_t at = i * rows.stride;
  if (rows.element == Element::f32) {
    widen_row(static_cast<const float*>(rows.data) + at, width, out);
    return {out, nullptr};
  }
  if (rows.element == Element::bf16) {
    widen_row(static_cast<const Bf16*>(rows.data) + at, width, out);
    return {out, nullptr};
  }
  const int8_t* row = static_cast<const int8_t*>(rows.data) + at;
  widen_row(row, width, out);
  return {out, std::is_same_v<Gathered, int8_t> ? row : nullptr};
}

GNNC_INLINE float scale_of_row(const EndRows& rows, int64_t i) { return rows.scale == nullptr ? 1.0f : rows.scale[i]; }

// Returns the sum over the edges of value(e, h) for one head of any number, in FP64: rows may have a million edges.
template <typename F>
GNNC_INLINE float sum_of_head(int64_t edges, int64_t heads, int64_t h, F value) {
  double sum = 0.0;
  for (int64_t i = h; i < edges * heads; i += heads) sum += value(i);
  return static_cast<float>(sum);
}

// The buffers of one row, [edges][heads], padded to whole vectors.
struct RowBuffers {
  float *ends, *weights, *dots;
};

// Calls body(edge, edges left, is_full) for groups of edges that fill a vector with H heads each.
template <int H, typename Body>
GNNC_INLINE void for_vectors(int64_t count, const Body& body) {
  constexpr int64_t kEdges = kLanes / H;
  int64_t e = 0;
  for (; e + kEdges <= count; e += kEdges) body(e, kEdges, std::true_type{});
  if (e < count) body(e, count - e, std::false_type{});
}

// Prefetches what later edges read of a table with a row of `width` floats for each node.
GNNC_INLINE void prefetch_table(const Segment& s, int64_t edge, int64_t edges, const float* table, int64_t width) {
  for (int64_t k = 0; k < edges; ++k) prefetch_far(table + s.col[edge + k + s.ahead] * width);
}

// Whether the values of edges with H heads are gathered a vector at a time; single values are loaded one by one (see
// copy_of_edges in gather.isa.h).
template <int H>
constexpr bool kGathersVectors = H > 1;

// Sets out[e, h] = table[col[e], h] + own[h].
template <int H>
GNNC_INLINE void add_ends(const Segment& s, const float* table, const float* own, int64_t heads, float* out) {
  if constexpr (kGathersVectors<H>) {
    const Floats mine = repeat_heads<H>(own);
    return for_vectors<H>(s.count, [&](int64_t e, int64_t left, auto full) __attribute__((always_inline)) {
      prefetch_table(s, e, left, table, H);
      store(out + e * H, gather_heads<H, full>(table, s.col + e, left) + mine);
    });
  }
  const int64_t count = H == 0 ? heads : H;
  for (int64_t e = 0; e < s.count; ++e) {
    prefetch_far(table + s.col[e + s.ahead] * count);
    const float* source = table + s.col[e] * count;
    for (int64_t h = 0; h < count; ++h) out[e * count + h] = source[h] + own[h];
  }
}

// Multiplies the dot products of each edge by the scale of the row that it gathers.
template <int H>
GNNC_INLINE void scale_dots(const Segment& s, const float* scale, int64_t heads, float* dots) {
  if constexpr (kGathersVectors<H>) {
    return for_vectors<H>(s.count, [&](int64_t e, int64_t left, auto full) __attribute__((always_inline)) {
      prefetch_table(s, e, left, scale, 1);
      store(dots + e * H, load(dots + e * H) * repeat_scales<H, full>(scale, s.col + e, left));
    });
  }
  const int64_t count = H == 0 ? heads : H;
  for (int64_t e = 0; e < s.count; ++e) {
    prefetch_far(scale + s.col[e + s.ahead]);
    const float factor = scale[s.col[e]];
    for (int64_t h = 0; h < count; ++h) dots[e * count + h] *= factor;
  }
}

// Computes the statistics of a row and its da_dst, for a number of heads that divides the lanes.
template <int H>
void finish_row(const AttentionRowsArgs& a, int64_t row, int64_t edges, const RowBuffers& b) {
  const Floats slope = splat(a.ends.slope);
  const int64_t flat = edges * H;
  for (int64_t i = 0; i < flat; i += kLanes) store(b.weights + i, leaky(load(b.ends + i), slope));
  pad_logits(b.weights, flat);
  const Floats top = top_of_row<H>(b.weights, edges);
  const Floats sum = sum_of_row<H>(edges, [&](int64_t i) __attribute__((always_inline)) {
    const Floats e = exp_of_negative(load(b.weights + i) - top);
    store(b.weights + i, e);
    return e;
  });
  const Floats scale = splat(scale_of_row(a.ends.grad, row));
  const Floats inverse = splat(1.0f) / (sum + a.eps);
  const Floats mean = sum_of_row<H>(edges, [&](int64_t i) { return load(b.weights + i) * load(b.dots + i); }) * inverse;
  const Floats da = sum_of_row<H>(edges, [&](int64_t i) {
    const Floats d = load(b.weights + i) * inverse * (load(b.dots + i) - mean);
    return load(b.ends + i) > 0.0f ? d : d * slope;
  });
  float* to = a.statistics + row * 4 * H;
  const Tail own{H};
  std::memcpy(to, a.a_dst + row * H, H * sizeof(float));
  store(to + H, top, own);
  store(to + 2 * H, inverse * scale, own);
  store(to + 3 * H, mean, own);
  store(a.da_dst + row * H, da * scale, own);
}

// Computes the statistics of a row and its da_dst, for any number of heads.
void finish_row_of_any_heads(const AttentionRowsArgs& a, int64_t row, int64_t edges, const RowBuffers& b) {
  const int64_t heads = a.ends.heads, flat = edges * heads;
  const Floats slope = splat(a.ends.slope);
  const float scale = scale_of_row(a.ends.grad, row);
  float* to = a.statistics + row * 4 * heads;
  float *top = to + heads, *inverse = to + 2 * heads, *mean = to + 3 * heads;
  std::memcpy(to, a.a_dst + row * heads, static_cast<size_t>(heads) * sizeof(float));
  for (int64_t i = 0; i < flat; i += kLanes) store(b.weights + i, leaky(load(b.ends + i), slope));
  std::fill_n(top, heads, kNothing);
  for (int64_t i = 0; i < flat; ++i) top[i % heads] = std::max(b.weights[i], top[i % heads]);
  for (int64_t i = 0; i < flat; ++i) b.weights[i] -= top[i % heads];
  for (int64_t i = 0; i < flat; i += kLanes) store(b.weights + i, exp_of_negative(load(b.weights + i)));
  for (int64_t h = 0; h < heads; ++h) {
    const auto weight = [&](int64_t i) { return b.weights[i]; };
    const float one = 1.0f / (sum_of_head(edges, heads, h, weight) + a.eps);
    mean[h] = one * sum_of_head(edges, heads, h, [&](int64_t i) { return b.weights[i] * b.dots[i]; });
    a.da_dst[row * heads + h] = scale * sum_of_head(edges, heads, h, [&](int64_t i) {
                                  const float slope_here = b.ends[i] > 0.0f ? 1.0f : a.ends.slope;
                                  return b.weights[i] * one * (b.dots[i] - mean[h]) * slope_here;
                                });
    inverse[h] = one * scale;
  }
}

template <typename T>
struct RowPass {
  const AttentionRowsArgs& a;
  Rows<T> x;

  explicit RowPass(const AttentionRowsArgs& args)
      : a(args), x{static_cast<const T*>(args.ends.x.data), args.ends.x.stride, args.ends.width} {}

  template <int H>
  void edges(int64_t row, const Segment& s, const OwnRow& own, const RowBuffers& b) const {
    const AttentionEnds& n = a.ends;
    const float* a_dst = a.a_dst + row * n.heads;
    add_ends<H>(s, n.a_src, a_dst, n.heads, b.ends);
    if constexpr (H == 0) {
      any_head_dots(s, x, own, n.heads, b.dots);
    } else {
      head_dots<H>(s, x, own, b.dots);
    }
    if (n.x.scale != nullptr) scale_dots<H>(s, n.x.scale, n.heads, b.dots);
    if constexpr (H == 0) {
      finish_row_of_any_heads(a, row, s.count, b);
    } else {
      finish_row<H>(a, row, s.count, b);
    }
  }
};

template <typename T>
void rows_of(const AttentionRowsArgs& a, int64_t row_begin, int64_t row_end) {
  static thread_local Scratch buffers, owns;
  const AttentionEnds& n = a.ends;
  const RowPass<T> pass(a);
  auto* own = owns.get<float>(static_cast<size_t>(whole(n.width)));
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = n.csr.rowptr[row], edges = n.csr.rowptr[row + 1] - begin;
    if (edges == 0) {
      std::memset(a.statistics + row * 4 * n.heads, 0, static_cast<size_t>(4 * n.heads) * sizeof(float));
      std::memset(a.da_dst + row * n.heads, 0, static_cast<size_t>(n.heads) * sizeof(float));
      continue;
    }
    const int64_t flat = edges * n.heads, room = whole(flat) + kDotRoom;
    auto* p = buffers.get<float>(static_cast<size_t>(3 * room));
    const RowBuffers b{p, p + room, p + 2 * room};
    const OwnRow grad = own_row<T>(n.grad, row, n.width, own);
    const Segment s = segment(n.csr, begin, begin + edges, n.width * static_cast<int64_t>(sizeof(T)));
    // Lanes past the last edge have a weight of 0, and what they hold must be finite.
    for (float* each : {b.ends, b.dots}) std::fill(each + flat / kLanes * kLanes, each + whole(flat), 0.0f);
    const bool periodic = with_heads(n.heads, [&]<int H>() { pass.template edges<H>(row, s, grad, b); });
    if (!periodic) pass.template edges<0>(row, s, grad, b);
  }
}

// The buffers of a segment of edges of one column, [edges][heads], padded to whole vectors; those of dot products and
// weights alone where the number of heads divides the lanes.
struct ColumnBuffers {
  float *ends, *tops, *inverse, *means, *dots, *weights, *grads;

  explicit ColumnBuffers(int64_t heads) {
    static thread_local Scratch scratch;
    const int64_t room = whole(kColumnEdges * heads) + kDotRoom;
    auto* p = scratch.get<float>(static_cast<size_t>(7 * room));
    for (float** each : {&ends, &tops, &inverse, &means, &dots, &weights, &grads}) *each = std::exchange(p, p + room);
  }
};

// Statistics of the destinations of some edges, [edges][heads].
struct Statistics {
  Floats ends, tops, inverse, means;
};

// Gathers the statistics of the destinations of kLanes / H edges.
template <int H, bool Full>
GNNC_INLINE Statistics gather_statistics(const float* table, const int32_t* col, int64_t left) {
#ifdef __AVX512F__
  if constexpr (H == 1) {  // lane l of vector k has the statistics of edge 4 l + k
    const auto row = [&](int64_t e) __attribute__((always_inline)) {
      return _mm_loadu_ps(table + static_cast<int64_t>(col[Full ? e : std::min(e, left - 1)]) * 4);
    };
    __m512 v[4];
    each<4>([&](auto k) __attribute__((always_inline)) {
      v[k] = _mm512_castps128_ps512(row(k));
      v[k] = _mm512_mask_broadcast_f32x4(v[k], 0x00f0, row(4 + k));
      v[k] = _mm512_mask_broadcast_f32x4(v[k], 0x0f00, row(8 + k));
      v[k] = _mm512_mask_broadcast_f32x4(v[k], 0xf000, row(12 + k));
    });
    const auto doubles = [](__m512 x) __attribute__((always_inline)) { return _mm512_castps_pd(x); };
    const auto floats = [](__m512d x) __attribute__((always_inline)) { return _mm512_castpd_ps(x); };
    const __m512d a = doubles(_mm512_unpacklo_ps(v[0], v[1])), b = doubles(_mm512_unpacklo_ps(v[2], v[3]));
    const __m512d c = doubles(_mm512_unpackhi_ps(v[0], v[1])), d = doubles(_mm512_unpackhi_ps(v[2], v[3]));
    return {floats(_mm512_unpacklo_pd(a, b)), floats(_mm512_unpackhi_pd(a, b)), floats(_mm512_unpacklo_pd(c, d)),
            floats(_mm512_unpackhi_pd(c, d))};
  }
#endif
  const auto part = [&](int i) __attribute__((always_inline)) {
    return gather_heads<H, Full, 4 * H>(table + i * H, col, left);
  };
  return {part(0), part(1), part(2), part(3)};
}

// Computes the attention weights of a segment; returns the sums of the gradients of its logits. `scale` is that of the
// dot products.
template <int H>
GNNC_INLINE Floats weigh(const Segment& s, const AttentionColumnsArgs& a, const float* a_src, float scale,
                         const ColumnBuffers& b) {
  const Floats own = repeat_heads<H>(a_src), slope = splat(a.ends.slope);
  Floats sum{};
  for_vectors<H>(s.count, [&](int64_t e, int64_t left, auto full) __attribute__((always_inline)) {
    prefetch_table(s, e, left, a.statistics, 4 * H);
    const Statistics of = gather_statistics<H, full>(a.statistics, s.col + e, left);
    const Floats end = of.ends + own;
    const Floats alpha = exp_of_negative(leaky(end, slope) - of.tops) * of.inverse;
    const Floats d = alpha * (load(b.dots + e * H) * scale - of.means);
    store(b.weights + e * H, alpha);
    const Floats grad = end > 0.0f ? d : d * slope;
    sum = sum + (full ? grad : keep(grad, Tail{static_cast<int>(left * H)}));
  });
  return fold_heads<H>(sum, [](Floats x, Floats y) { return x + y; });
}

// Computes the same for any number of heads, and adds the sums to da.
void weigh_any_heads(const Segment& s, const AttentionColumnsArgs& a, const float* a_src, float scale,
                     const ColumnBuffers& b, float* da) {
  const int64_t heads = a.ends.heads, flat = s.count * heads;
  const Floats slope = splat(a.ends.slope);
  for (int64_t e = 0; e < s.count; ++e) {
    const float* from = a.statistics + s.col[e] * 4 * heads;
    const int64_t to = e * heads;
    for (int64_t h = 0; h < heads; ++h) b.ends[to + h] = from[h] + a_src[h];
    for (int64_t h = 0; h < heads; ++h) b.tops[to + h] = from[heads + h];
    for (int64_t h = 0; h < heads; ++h) b.inverse[to + h] = from[2 * heads + h];
    for (int64_t h = 0; h < heads; ++h) b.means[to + h] = from[3 * heads + h];
  }
  for_columns(flat, [&](int64_t i, auto lanes) {
    const Floats end = load(b.ends + i, lanes);
    const Floats alpha = exp_of_negative(leaky(end, slope) - load(b.tops + i, lanes)) * load(b.inverse + i, lanes);
    const Floats d = alpha * (load(b.dots + i, lanes) * scale - load(b.means + i, lanes));
    store(b.weights + i, alpha, lanes);
    store(b.grads + i, end > 0.0f ? d : d * slope, lanes);
  });
  for (int64_t h = 0; h < heads; ++h) {
    da[h] += sum_of_head(s.count, heads, h, [&](int64_t i) { return b.grads[i]; });
  }
}

// A row of x.
struct SentRow {
  OwnRow own;
  float scale;
};

// Adds to out[c] the value of its head times att[c]; to sums[c] that times x[c].
void add_product(const float* values, int64_t heads, int64_t width, const float* att, const SentRow& x, float* out,
                 float* sums) {
  const int64_t head_width = width / heads;
  for (int64_t h = 0; h < heads; ++h) {
    const Floats value = splat(values[h]), scaled = value * x.scale;
    for_columns(head_width, [&](int64_t column, auto lanes) {
      const int64_t c = h * head_width + column;
      store(out + c, load(out + c, lanes) + value * load(att + c, lanes), lanes);
      if (sums != nullptr) store(sums + c, load(sums + c, lanes) + scaled * load(x.own.values + c, lanes), lanes);
    });
  }
}

template <typename T>
struct ColumnPass {
  const AttentionColumnsArgs& a;
  ColumnBuffers b;
  Rows<T> grad;
  Weights shape;
  SumKernel<T> kernel;

  explicit ColumnPass(const AttentionColumnsArgs& args)
      : a(args),
        b(args.ends.heads),
        grad{static_cast<const T*>(args.ends.grad.data), args.ends.grad.stride, args.ends.width},
        shape(weights_of(args.ends.width, args.ends.heads)),
        kernel(weighted_sum_kernel<T>(args.ends.width, args.ends.heads)) {}

  template <int H>
  void edges(const Segment& s, const SentRow& x, const float* a_src, bool first, float* da, float* out) const {
    if constexpr (H == 0) {
      any_head_dots(s, grad, x.own, a.ends.heads, b.dots);
      weigh_any_heads(s, a, a_src, x.scale, b, da);
    } else {
      head_dots<H>(s, grad, x.own, b.dots);
      store(da, load(da, Tail{H}) + weigh<H>(s, a, a_src, x.scale, b), Tail{H});
    }
    Weights weights = shape;
    weights.data = b.weights;
    kernel({s.col, s.count, s.base, 0}, grad, weights, first, out);
  }

  // Computes a row of the result, before the row program.
  void row(int64_t i, const SentRow& x, float* out) const {
    const AttentionEnds& n = a.ends;
    const int64_t begin = n.csr.rowptr[i], end = n.csr.rowptr[i + 1];
    const float* a_src = n.a_src + i * n.heads;
    float* da = a.da_src + i * n.heads;
    std::memset(da, 0, static_cast<size_t>(n.heads) * sizeof(float));
    if (begin == end) std::memset(out, 0, static_cast<size_t>(n.width) * sizeof(float));
    for (int64_t e = begin; e < end; e += kColumnEdges) {
      const Segment s = segment(n.csr, e, std::min(e + kColumnEdges, end), n.width * static_cast<int64_t>(sizeof(T)));
      const bool periodic = with_heads(n.heads, [&]<int H>() { edges<H>(s, x, a_src, e == begin, da, out); });
      if (!periodic) edges<0>(s, x, a_src, e == begin, da, out);
    }
    float* sums = a.sums == nullptr ? nullptr : a.sums + i / kSumRows * 2 * a.sum_width;
    if (a.att_dst != nullptr) add_product(a.da_dst + i * n.heads, n.heads, n.width, a.att_dst, x, out, sums);
    if (sums != nullptr) sums += a.sum_width;
    if (a.att_src != nullptr) add_product(da, n.heads, n.width, a.att_src, x, out, sums);
  }
};

template <typename T>
void columns_of(const AttentionColumnsArgs& a, int64_t row_begin, int64_t row_end) {
  static thread_local Scratch tiles, owns;
  const AttentionEnds& n = a.ends;
  const ColumnPass<T> pass(a);
  const int64_t stride = (n.width + 63) / 64 * 64;
  auto* tile = tiles.get<float>(static_cast<size_t>(kTileRows * stride));
  auto* own = owns.get<float>(static_cast<size_t>(whole(n.width)));
  for (int64_t row = row_begin; row < row_end; row += kTileRows) {
    const int64_t rows = std::min(kTileRows, row_end - row);
    fetch(*a.program, row, static_cast<int>(rows));
    for (int64_t r = 0; r < rows; ++r) {
      const SentRow x{own_row<T>(n.x, row + r, n.width, own), scale_of_row(n.x, row + r)};
      pass.row(row + r, x, tile + r * stride);
    }
    run(*a.program, tile, stride, row, static_cast<int>(rows), n.width);
  }
}

}  // namespace

void attention_backward_rows(const AttentionRowsArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.ends.x.element == Element::i8) return rows_of<int8_t>(args, row_begin, row_end);
  if (args.ends.x.element == Element::bf16) return rows_of<Bf16>(args, row_begin, row_end);
  rows_of<float>(args, row_begin, row_end);
}

void attention_backward_columns(const AttentionColumnsArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.ends.grad.element == Element::i8) return columns_of<int8_t>(args, row_begin, row_end);
  if (args.ends.grad.element == Element::bf16) return columns_of<Bf16>(args, row_begin, row_end);
  columns_of<float>(args, row_begin, row_end);
}

}  // namespace gnnc::GNNC_ISA
