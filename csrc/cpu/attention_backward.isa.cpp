// See attention_backward.h for layout, traffic and floor.

#include "attention_backward.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "gather.isa.h"
#include "head_dots.isa.h"
#include "scratch.h"
#include "softmax.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kColumnEdges = 64;  // edges of a segment whose rows are still in L1 when they are read again

// Returns `count` rounded up to whole vectors.
constexpr int64_t whole(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

GNNC_INLINE Floats leaky(Floats v, Floats slope) { return v > 0.0f ? v : v * slope; }

// Copies a row to floats.
template <typename T>
void widen_row(const T* row, int64_t width, float* out) {
  for_columns(width, [&](int64_t c, auto lanes) { store(out + c, load(row + c, lanes), lanes); });
}

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

// Sets out[e, h] = table[col[e], h] + own[h].
template <int H>
GNNC_INLINE void add_ends(const Segment& s, const float* table, const float* own, int64_t heads, float* out) {
  const int64_t count = H == 0 ? heads : H;
  for (int64_t e = 0; e < s.count; ++e) {
    prefetch_far(table + s.col[e + s.ahead] * count);
    const float* source = table + s.col[e] * count;
    for (int64_t h = 0; h < count; ++h) out[e * count + h] = source[h] + own[h];
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
  store(to + 2 * H, inverse, own);
  store(to + 3 * H, mean, own);
  store(a.da_dst + row * H, da, own);
}

// Computes the statistics of a row and its da_dst, for any number of heads.
void finish_row_of_any_heads(const AttentionRowsArgs& a, int64_t row, int64_t edges, const RowBuffers& b) {
  const int64_t heads = a.ends.heads, flat = edges * heads;
  const Floats slope = splat(a.ends.slope);
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
    inverse[h] = 1.0f / (sum_of_head(edges, heads, h, weight) + a.eps);
    mean[h] = inverse[h] * sum_of_head(edges, heads, h, [&](int64_t i) { return b.weights[i] * b.dots[i]; });
    a.da_dst[row * heads + h] = sum_of_head(edges, heads, h, [&](int64_t i) {
      const float slope_here = b.ends[i] > 0.0f ? 1.0f : a.ends.slope;
      return b.weights[i] * inverse[h] * (b.dots[i] - mean[h]) * slope_here;
    });
  }
}

template <typename T>
void rows_of(const AttentionRowsArgs& a, int64_t row_begin, int64_t row_end) {
  static thread_local Scratch buffers, owns;
  const AttentionEnds& n = a.ends;
  const Rows<T> x{static_cast<const T*>(n.x), n.x_stride, n.width};
  auto* own = owns.get<float>(static_cast<size_t>(whole(n.width)));
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = n.csr.rowptr[row], edges = n.csr.rowptr[row + 1] - begin;
    if (edges == 0) {
      std::memset(a.statistics + row * 4 * n.heads, 0, static_cast<size_t>(4 * n.heads) * sizeof(float));
      std::memset(a.da_dst + row * n.heads, 0, static_cast<size_t>(n.heads) * sizeof(float));
      continue;
    }
    const int64_t flat = edges * n.heads, room = whole(flat);
    auto* p = buffers.get<float>(static_cast<size_t>(3 * room));
    const RowBuffers b{p, p + room, p + 2 * room};
    widen_row(static_cast<const T*>(n.grad) + row * n.grad_stride, n.width, own);
    const Segment s = segment(n.csr, begin, begin + edges, n.width * static_cast<int64_t>(sizeof(T)));
    const float* a_dst = a.a_dst + row * n.heads;
    std::fill(b.ends + flat, b.ends + room, 0.0f);
    const bool periodic = with_heads(n.heads, [&]<int H>() {
      add_ends<H>(s, n.a_src, a_dst, H, b.ends);
      head_dots<H>(s, x, own, b.dots);
      finish_row<H>(a, row, edges, b);
    });
    if (periodic) continue;
    add_ends<0>(s, n.a_src, a_dst, n.heads, b.ends);
    any_head_dots(s, x, own, n.heads, b.dots);
    finish_row_of_any_heads(a, row, edges, b);
  }
}

// The buffers of a segment of edges of one column, [edges][heads], padded to whole vectors.
struct ColumnBuffers {
  float *ends, *tops, *inverse, *means, *dots, *weights, *grads;

  explicit ColumnBuffers(int64_t heads) {
    static thread_local Scratch scratch;
    const int64_t room = whole(kColumnEdges * heads);
    auto* p = scratch.get<float>(static_cast<size_t>(7 * room));
    for (float** each : {&ends, &tops, &inverse, &means, &dots, &weights, &grads}) *each = std::exchange(p, p + room);
  }
};

// Copies the statistics of the destinations of a segment side by side.
template <int H>
GNNC_INLINE void copy_statistics(const Segment& s, const float* table, const float* own, int64_t heads,
                                 const ColumnBuffers& b) {
  const int64_t count = H == 0 ? heads : H;
  for (int64_t e = 0; e < s.count; ++e) {
    const float* next = table + s.col[e + s.ahead] * 4 * count;
    prefetch_far(next);
    const float* from = table + s.col[e] * 4 * count;
    const int64_t to = e * count;
    for (int64_t h = 0; h < count; ++h) b.ends[to + h] = from[h] + own[h];
    for (int64_t h = 0; h < count; ++h) b.tops[to + h] = from[count + h];
    for (int64_t h = 0; h < count; ++h) b.inverse[to + h] = from[2 * count + h];
    for (int64_t h = 0; h < count; ++h) b.means[to + h] = from[3 * count + h];
  }
  for (int64_t i = s.count * count; i < whole(s.count * count); ++i) {
    b.ends[i] = b.tops[i] = b.inverse[i] = b.means[i] = b.dots[i] = 0.0f;
  }
}

// Computes the attention weights of a segment and the gradients of its logits.
GNNC_INLINE void weigh(const ColumnBuffers& b, int64_t flat, Floats slope) {
  for (int64_t i = 0; i < flat; i += kLanes) {
    const Floats end = load(b.ends + i);
    const Floats alpha = exp_of_negative(leaky(end, slope) - load(b.tops + i)) * load(b.inverse + i);
    const Floats d = alpha * (load(b.dots + i) - load(b.means + i));
    store(b.weights + i, alpha);
    store(b.grads + i, end > 0.0f ? d : d * slope);
  }
}

// Adds to out[c] the value of its head times att[c]; to sums[c] that times x[c].
void add_product(const float* values, int64_t heads, int64_t width, const float* att, const float* x, float* out,
                 float* sums) {
  const int64_t head_width = width / heads;
  for (int64_t h = 0; h < heads; ++h) {
    const Floats value = splat(values[h]);
    for_columns(head_width, [&](int64_t column, auto lanes) {
      const int64_t c = h * head_width + column;
      store(out + c, load(out + c, lanes) + value * load(att + c, lanes), lanes);
      if (sums != nullptr) store(sums + c, load(sums + c, lanes) + value * load(x + c, lanes), lanes);
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
        grad{static_cast<const T*>(args.ends.grad), args.ends.grad_stride, args.ends.width},
        shape(weights_of(args.ends.width, args.ends.heads)),
        kernel(sum_kernel<T>(args.ends.width, args.ends.heads, true)) {}

  template <int H>
  void edges(const Segment& s, const float* x, const float* a_src, bool first, float* da, float* out) const {
    const int64_t heads = H == 0 ? a.ends.heads : H, flat = s.count * heads;
    if constexpr (H == 0) {
      any_head_dots(s, grad, x, heads, b.dots);
    } else {
      head_dots<H>(s, grad, x, b.dots);
    }
    copy_statistics<H>(s, a.statistics, a_src, heads, b);
    weigh(b, flat, splat(a.ends.slope));
    Weights weights = shape;
    weights.data = b.weights;
    kernel({s.col, s.count, s.base, 0}, grad, weights, first, out);
    if constexpr (H == 0) {
      for (int64_t h = 0; h < heads; ++h) {
        da[h] += sum_of_head(s.count, heads, h, [&](int64_t i) { return b.grads[i]; });
      }
    } else {
      const Floats sum = sum_of_row<H>(s.count, [&](int64_t i) { return load(b.grads + i); });
      store(da, load(da, Tail{H}) + sum, Tail{H});
    }
  }

  // Computes a row of the result, before the row program.
  void row(int64_t i, const float* x, float* out) const {
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
      widen_row(static_cast<const T*>(n.x) + (row + r) * n.x_stride, n.width, own);
      pass.row(row + r, own, tile + r * stride);
    }
    run(*a.program, tile, stride, row, static_cast<int>(rows), n.width);
  }
}

}  // namespace

void attention_backward_rows(const AttentionRowsArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.ends.element == Element::bf16) return rows_of<Bf16>(args, row_begin, row_end);
  rows_of<float>(args, row_begin, row_end);
}

void attention_backward_columns(const AttentionColumnsArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.ends.element == Element::bf16) return columns_of<Bf16>(args, row_begin, row_end);
  columns_of<float>(args, row_begin, row_end);
}

}  // namespace gnnc::GNNC_ISA
