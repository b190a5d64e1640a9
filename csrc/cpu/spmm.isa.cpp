// See spmm.h for layout, traffic and floor.

#include "spmm.h"

#include "extreme.isa.h"
#include "fixed_sum.isa.h"
#include "gather.isa.h"
#include "gnnc/row_program.h"
#include "integer_sum.isa.h"
#include "scratch.h"

namespace gnnc::GNNC_ISA {
namespace {

// Computes weights[e, h] = value[e, h] * the scale of the source of e, for the edges of a tile, in a loop before the
// rows are summed, which depend on the weights.
void scaled_values(const SpmmArgs& a, int64_t begin, int64_t end, float* weights) {
  if (a.csr.col != nullptr && a.x_scale != nullptr && a.heads == 1) {
    copy_of_edges(segment(a.csr, begin, end), EdgeCopy{a.x_scale, weights});
    for (int64_t e = begin; e < end && a.value != nullptr; ++e) weights[e - begin] *= a.value[e];
    return;
  }
  for (int64_t e = begin; e < end; ++e) {
    const int64_t source = a.csr.col == nullptr ? e : a.csr.col[e];
    const float scale = a.x_scale != nullptr ? a.x_scale[source] : static_cast<float>(128 >> (a.shift[source] & 7));
    for (int64_t h = 0; h < a.heads; ++h) {
      weights[(e - begin) * a.heads + h] = a.value == nullptr ? scale : a.value[e * a.heads + h] * scale;
    }
  }
}

void divide(float* out, int64_t width, int64_t count) {
  const Floats divisor = splat(static_cast<float>(count));
  for_columns(width, [&](int64_t c, auto lanes) { store(out + c, load(out + c, lanes) / divisor, lanes); });
}

// For every tile, calls prepare(begin, end) with its edges, compute(begin, end, out) for every row that has edges, and
// then the row program.
template <typename Prepare, typename Compute>
GNNC_INLINE void for_rows(const SpmmArgs& a, int64_t row_begin, int64_t row_end, const Prepare& prepare,
                          const Compute& compute) {
  static thread_local Scratch scratch;
  const int64_t stride = padded(a.width);
  const int64_t* rowptr = a.csr.rowptr;
  auto* tile = scratch.get<float>(static_cast<size_t>(kTileRows * stride));
  for (int64_t row = row_begin; row < row_end; row += kTileRows) {
    const int64_t rows = std::min(kTileRows, row_end - row);
    fetch(*a.program, row, static_cast<int>(rows));
    prepare(rowptr[row], rowptr[row + rows]);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t begin = rowptr[row + r], end = rowptr[row + r + 1];
      float* out = tile + r * stride;
      if (begin == end) {
        std::memset(out, 0, static_cast<size_t>(a.width) * sizeof(float));
        continue;
      }
      compute(begin, end, out);
      if (a.reduce == Reduce::mean) divide(out, a.width, end - begin);
    }
    run(*a.program, tile, stride, row, static_cast<int>(rows), a.width);
  }
}

template <IntWeight W>
void integer_rows(const SpmmArgs& a, int64_t row_begin, int64_t row_end) {
  static thread_local Scratch sums, totals;
  const auto width = static_cast<size_t>(padded(a.width));
  const Rows<int8_t> rows{static_cast<const int8_t*>(a.x), a.x_stride, a.width};
  const IntSum sum{a.csr, rows, a.shift, a.integer_value, sums.get<int32_t>(width), totals.get<int64_t>(width)};
  for_rows(
      a, row_begin, row_end, [](int64_t, int64_t) {},
      [&](int64_t begin, int64_t end, float* out)
          __attribute__((always_inline)) { integer_row<W>(sum, begin, end, out); });
}

template <typename T>
void weighted_rows(const SpmmArgs& a, int64_t row_begin, int64_t row_end, SumKernel<T> kernel) {
  static thread_local Scratch scratch;
  const Rows<T> rows{static_cast<const T*>(a.x), a.x_stride, a.width};
  const int64_t row_bytes = a.width * static_cast<int64_t>(sizeof(T));
  const float* weights = a.value;  // weights, from edge 0 on
  const Weights shape = weights_of(a.width, a.heads);
  const auto prepare = [&](int64_t begin, int64_t end) {
    if (a.x_scale == nullptr && a.shift == nullptr) return;
    auto* buffer = scratch.get<float>(static_cast<size_t>((end - begin) * a.heads));
    scaled_values(a, begin, end, buffer);
    weights = buffer - begin * a.heads;
  };
  for_rows(a, row_begin, row_end, prepare, [&](int64_t begin, int64_t end, float* out) {
    for (int64_t e = begin; e < end; e += kSegment) {
      const Segment s = segment(a.csr, e, std::min(e + kSegment, end), row_bytes);
      Weights own = shape;
      if (weights != nullptr) own.data = weights + e * a.heads;
      kernel(s, rows, own, e == begin, out);
    }
  });
}

template <typename T>
void float_rows(const SpmmArgs& a, int64_t row_begin, int64_t row_end) {
  const bool weighted = a.value != nullptr || a.x_scale != nullptr || a.shift != nullptr;
  if (a.reduce == Reduce::max || a.reduce == Reduce::min) {
    return weighted_rows<T>(a, row_begin, row_end, extreme_kernel<T>(a.reduce == Reduce::max, weighted));
  }
  const SumKernel<T> kernel =
      weighted ? weighted_sum_kernel<T>(a.width, a.heads) : sum_kernel<T>(a.width, a.heads, false);
  weighted_rows<T>(a, row_begin, row_end, kernel);
}

bool sums_integers(const SpmmArgs& a) {
  return a.element == Element::i8 && a.value == nullptr && a.x_scale == nullptr &&
         (a.reduce == Reduce::sum || a.reduce == Reduce::mean);
}

}  // namespace

void spmm(const SpmmArgs& args, int64_t row_begin, int64_t row_end) {
  if (sums_integers(args)) {
    if (args.shift != nullptr) return integer_rows<IntWeight::pow2>(args, row_begin, row_end);
    if (args.integer_value != nullptr) return integer_rows<IntWeight::signed8>(args, row_begin, row_end);
    return integer_rows<IntWeight::none>(args, row_begin, row_end);
  }
  if (args.element == Element::i8) return float_rows<int8_t>(args, row_begin, row_end);
  if (args.element == Element::bf16) return float_rows<Bf16>(args, row_begin, row_end);
  float_rows<float>(args, row_begin, row_end);
}

}  // namespace gnnc::GNNC_ISA
