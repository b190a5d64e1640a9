// See spmm.h for layout, traffic and floor.

#include "spmm.h"

#include "extreme.isa.h"
#include "gather.isa.h"
#include "gnnc/row_program.h"
#include "integer_sum.isa.h"
#include "scratch.h"

namespace gnnc::GNNC_ISA {
namespace {

// weight(e, head) as one float, into buffer; or a pointer into value where nothing else scales.
const float* edge_weights(const SpmmArgs& a, const Segment& s, int64_t begin, float* buffer) {
  if (a.x_scale == nullptr && a.shift == nullptr) return a.value == nullptr ? nullptr : a.value + begin * a.heads;
  for (int64_t e = 0; e < s.count; ++e) {
    const int64_t source = s.base + s.col[e];
    float scale = a.x_scale == nullptr ? 1.0f : a.x_scale[source];
    if (a.shift != nullptr) scale *= static_cast<float>(128 >> a.shift[source]);
    for (int64_t h = 0; h < a.heads; ++h) {
      buffer[e * a.heads + h] = a.value == nullptr ? scale : a.value[(begin + e) * a.heads + h] * scale;
    }
  }
  return buffer;
}

template <typename T>
void float_row(const SpmmArgs& a, int64_t begin, int64_t end, float* out) {
  static thread_local Scratch scratch;
  auto* buffer = scratch.get<float>(static_cast<size_t>(kSegment * a.heads));
  const Rows<T> rows{static_cast<const T*>(a.x), a.x_stride, a.width};
  for (int64_t e = begin; e < end; e += kSegment) {
    const Segment s = segment(a.csr, e, std::min(e + kSegment, end));
    const Weights weights{edge_weights(a, s, e, buffer), a.heads, a.width / a.heads};
    if (a.reduce == Reduce::max || a.reduce == Reduce::min) {
      extreme_rows(s, rows, weights, a.reduce == Reduce::max, e == begin, out);
    } else {
      sum_rows(s, rows, weights, e == begin, out);
    }
  }
}

bool sums_integers(const SpmmArgs& a) {
  return a.element == Element::i8 && a.value == nullptr && a.x_scale == nullptr &&
         (a.reduce == Reduce::sum || a.reduce == Reduce::mean);
}

void reduce_row(const SpmmArgs& a, int64_t begin, int64_t end, float* out) {
  if (begin == end) {
    std::memset(out, 0, static_cast<size_t>(a.width) * sizeof(float));
  } else if (sums_integers(a)) {
    const Rows<int8_t> rows{static_cast<const int8_t*>(a.x), a.x_stride, a.width};
    integer_row(a.csr, rows, {a.shift, a.integer_value, 0}, begin, end, out);
  } else if (a.element == Element::i8) {
    float_row<int8_t>(a, begin, end, out);
  } else if (a.element == Element::bf16) {
    float_row<Bf16>(a, begin, end, out);
  } else {
    float_row<float>(a, begin, end, out);
  }
  if (a.reduce != Reduce::mean) return;
  const auto count = static_cast<float>(std::max<int64_t>(end - begin, 1));
  for (int64_t c = 0; c < a.width; ++c) out[c] /= count;
}

}  // namespace

void spmm(const SpmmArgs& args, int64_t row_begin, int64_t row_end) {
  static thread_local Scratch scratch;
  const int64_t stride = padded(args.width);
  auto* tile = scratch.get<float>(static_cast<size_t>(kTileRows * stride));
  for (int64_t row = row_begin; row < row_end; row += kTileRows) {
    const int64_t rows = std::min(kTileRows, row_end - row);
    for (int64_t r = 0; r < rows; ++r) {
      reduce_row(args, args.csr.rowptr[row + r], args.csr.rowptr[row + r + 1], tile + r * stride);
    }
    run(*args.program, tile, stride, row, static_cast<int>(rows), args.width);
  }
}

}  // namespace gnnc::GNNC_ISA
