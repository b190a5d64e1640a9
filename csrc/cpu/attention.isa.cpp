// See attention.h for layout, traffic and floor.

#include "attention.h"

#include "gather.isa.h"
#include "logits.isa.h"
#include "scratch.h"
#include "softmax.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

struct RowBuffers {
  float* logits;  // [edges, heads]; later the weights of the edges
  float* top;     // [heads]
  float* sum;     // [heads]
};

RowBuffers row_buffers(int64_t edges, int64_t heads) {
  static thread_local Scratch logits, heads_scratch;
  auto* top = heads_scratch.get<float>(static_cast<size_t>(2 * heads));
  return {logits.get<float>(static_cast<size_t>(edges * heads + kLanes)), top, top + heads};
}

template <typename T>
void weighted_sum(const AttentionArgs& a, int64_t begin, int64_t end, const float* weights, float* out) {
  const Rows<T> rows{static_cast<const T*>(a.x), a.x_stride, a.width};
  for (int64_t e = begin; e < end; e += kSegment) {
    const Segment s = segment(a.csr, e, std::min(e + kSegment, end));
    sum_rows(s, rows, {weights + (e - begin) * a.heads, a.heads, a.width / a.heads}, e == begin, out);
  }
}

void normalise(const AttentionArgs& a, const float* sum, float* out) {
  const int64_t width = a.width / a.heads;
  for (int64_t h = 0; h < a.heads; ++h) {
    const Floats factor = splat(1.0f / (sum[h] + a.eps));
    for_columns(width, [&](int64_t c, auto lanes) {
      store(out + h * width + c, load(out + h * width + c, lanes) * factor, lanes);
    });
  }
}

void attention_row(const AttentionArgs& a, int64_t row, float* out) {
  const int64_t begin = a.csr.rowptr[row], end = a.csr.rowptr[row + 1], edges = end - begin;
  if (edges == 0) {
    std::memset(out, 0, static_cast<size_t>(a.width) * sizeof(float));
    return;
  }
  const RowBuffers b = row_buffers(edges, a.heads);
  const Segment s = segment(a.csr, begin, end);
  row_logits(a, s, row, begin, b.logits);
  max_of_heads(b.logits, edges, a.heads, b.top);
  exp_of_heads(b.logits, edges, a.heads, b.top, b.sum);
  if (a.alpha_out != nullptr) divide_heads(b.logits, edges, a.heads, b.sum, a.eps, a.alpha_out + begin * a.heads);
  if (a.x_scale != nullptr) fold_scale(a.x_scale, s, a.heads, b.logits);
  if (a.element == Element::i8) {
    weighted_sum<int8_t>(a, begin, end, b.logits, out);
  } else if (a.element == Element::bf16) {
    weighted_sum<Bf16>(a, begin, end, b.logits, out);
  } else {
    weighted_sum<float>(a, begin, end, b.logits, out);
  }
  normalise(a, b.sum, out);
}

}  // namespace

void attention(const AttentionArgs& args, int64_t row_begin, int64_t row_end) {
  static thread_local Scratch scratch;
  const int64_t stride = (args.width + 63) / 64 * 64;
  auto* tile = scratch.get<float>(static_cast<size_t>(kTileRows * stride));
  for (int64_t row = row_begin; row < row_end; row += kTileRows) {
    const int64_t rows = std::min(kTileRows, row_end - row);
    for (int64_t r = 0; r < rows; ++r) attention_row(args, row + r, tile + r * stride);
    run(*args.program, tile, stride, row, static_cast<int>(rows), args.width);
  }
}

}  // namespace gnnc::GNNC_ISA
