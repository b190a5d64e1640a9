// See attention.h for layout, traffic and floor.

#include "attention.h"

#include "gather.isa.h"
#include "logits.isa.h"
#include "scratch.h"
#include "softmax.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

// Makes the weights of the row's edges, without 1 / (sum + eps), which goes to inverse.
void row_weights(const AttentionArgs& a, const Segment& s, int64_t row, int64_t begin, float* weights, float* inverse) {
  row_logits(a, s, row, begin, weights);
  pad_logits(weights, s.count * a.heads);
  const auto raw = []<int H>(int64_t, Floats e) __attribute__((always_inline)) { return e; };
  const auto scaled = [&]<int H>(int64_t edge, Floats e) __attribute__((always_inline)) {
    return e * repeat_heads<H>(a.x_scale, s.col + edge, s.count - edge);
  };
  const bool periodic = with_heads(a.heads, []<int H>() {});
  const bool fold_later = a.x_scale != nullptr && (a.alpha_out != nullptr || !periodic);
  if (a.x_scale == nullptr || fold_later) {
    softmax_parts(weights, s.count, a.heads, a.eps, inverse, raw);
  } else {
    softmax_parts(weights, s.count, a.heads, a.eps, inverse, scaled);
  }
  if (a.alpha_out != nullptr) normalise_edges(weights, s.count, a.heads, inverse, a.alpha_out + begin * a.heads);
  if (fold_later) fold_scale(a.x_scale, s, a.heads, weights);
}

void normalise_row(const AttentionArgs& a, const float* inverse, float* out) {
  const int64_t width = a.width / a.heads;
  for (int64_t h = 0; h < a.heads; ++h) {
    const Floats factor = splat(inverse[h]);
    float* head = out + h * width;
    for_columns(width, [&](int64_t c, auto lanes) { store(head + c, load(head + c, lanes) * factor, lanes); });
  }
}

template <typename T>
void attention_rows(const AttentionArgs& a, int64_t row_begin, int64_t row_end) {
  static thread_local Scratch tiles, buffers, inverses;
  const int64_t stride = (a.width + 63) / 64 * 64;
  auto* tile = tiles.get<float>(static_cast<size_t>(kTileRows * stride));
  auto* inverse = inverses.get<float>(static_cast<size_t>(a.heads + kLanes));
  const Rows<T> x{static_cast<const T*>(a.x), a.x_stride, a.width};
  const SumKernel<T> sum = sum_kernel<T>(a.width, a.heads, true);
  for (int64_t first = row_begin; first < row_end; first += kTileRows) {
    const int64_t rows = std::min(kTileRows, row_end - first);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t begin = a.csr.rowptr[first + r], end = a.csr.rowptr[first + r + 1];
      float* out = tile + r * stride;
      if (begin == end) {
        std::memset(out, 0, static_cast<size_t>(a.width) * sizeof(float));
        continue;
      }
      auto* weights = buffers.get<float>(static_cast<size_t>((end - begin) * a.heads + kLanes));
      row_weights(a, segment(a.csr, begin, end), first + r, begin, weights, inverse);
      for (int64_t e = begin; e < end; e += kSegment) {
        const Segment s = segment(a.csr, e, std::min(e + kSegment, end));
        sum(s, x, {weights + (e - begin) * a.heads, a.heads, a.width / a.heads}, e == begin, out);
      }
      normalise_row(a, inverse, out);
    }
    run(*a.program, tile, stride, first, static_cast<int>(rows), a.width);
  }
}

}  // namespace

void attention(const AttentionArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.element == Element::i8) return attention_rows<int8_t>(args, row_begin, row_end);
  if (args.element == Element::bf16) return attention_rows<Bf16>(args, row_begin, row_end);
  attention_rows<float>(args, row_begin, row_end);
}

}  // namespace gnnc::GNNC_ISA
