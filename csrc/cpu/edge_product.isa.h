#pragma once

// Products of the tiles of edge_body: a few rows by a few vectors of columns stay in registers. The sum of each result
// is in the order of its terms, so a row has the same bits in any tile.

#include <algorithm>
#include <cstdint>

#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {
namespace {

// A factor of a product: `count` rows (of the left factor) or terms (of the right one).
struct Factor {
  const float* data;
  int64_t row_stride, column_stride, count;
};

struct Rows {
  const float* data;
  int64_t stride;
};

struct RowsOut {
  float* data;
  int64_t stride;
};

#ifdef __AVX512F__
constexpr int kProductRows = 6, kProductVectors = 4;
#else
constexpr int kProductRows = 4, kProductVectors = 2;
#endif

template <int kRows, int kVectors, typename N>
GNNC_INLINE void product_block(const Factor& a, const Factor& b, int64_t row, int64_t c, N last, const Rows& start,
                               const Rows& after, const RowsOut& out) {
  Floats acc[kRows][kVectors];
  each<kRows>([&](auto r) __attribute__((always_inline)) {
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      const float* from = start.data + (row + r) * start.stride + c + v * kLanes;
      acc[r][v] = start.data == nullptr ? Floats{} : load(from);
    });
  });
  const float* left = a.data + row * a.row_stride;
  const float* right = b.data + c;
  for (int64_t k = 0; k < b.count; ++k, left += a.column_stride, right += b.row_stride) {
    Floats columns[kVectors];
    each<kVectors>([&](auto v) __attribute__((always_inline)) { columns[v] = load(right + v * kLanes); });
    each<kRows>([&](auto r) __attribute__((always_inline)) {
      const Floats x = splat(left[r * a.row_stride]);
      each<kVectors>([&](auto v) __attribute__((always_inline)) { acc[r][v] = fused(x, columns[v], acc[r][v]); });
    });
  }
  if (after.data != nullptr) {
    each<kRows>([&](auto r) __attribute__((always_inline)) {
      const float* from = after.data + (row + r) * after.stride + c;
      each<kVectors>([&](auto v) __attribute__((always_inline)) { acc[r][v] += load(from + v * kLanes); });
    });
  }
  each<kRows>([&](auto r) __attribute__((always_inline)) {
    float* to = out.data + (row + r) * out.stride + c;
    each<kVectors - 1>([&](auto v) __attribute__((always_inline)) { store(to + v * kLanes, acc[r][v]); });
    store(to + (kVectors - 1) * kLanes, acc[r][kVectors - 1], last);
  });
}

template <int kVectors, typename N>
void product_columns(const Factor& a, const Factor& b, int64_t c, N last, const Rows& start, const Rows& after,
                     const RowsOut& out) {
  int64_t row = 0;
  for (; row + kProductRows <= a.count; row += kProductRows) {
    product_block<kProductRows, kVectors>(a, b, row, c, last, start, after, out);
  }
  for (; row + 2 <= a.count; row += 2) product_block<2, kVectors>(a, b, row, c, last, start, after, out);
  for (; row < a.count; ++row) product_block<1, kVectors>(a, b, row, c, last, start, after, out);
}

// Computes out = (start + a b) + after, `columns` wide; start and after may be null. The rows of b, start and after are
// whole vectors.
inline void add_product(const Factor& a, const Factor& b, int64_t columns, const Rows& start, const Rows& after,
                        const RowsOut& out) {
  int64_t c = 0;
  for (; c + kProductVectors * kLanes <= columns; c += kProductVectors * kLanes) {
    product_columns<kProductVectors>(a, b, c, Whole{}, start, after, out);
  }
  for (; c + kLanes <= columns; c += kLanes) product_columns<1>(a, b, c, Whole{}, start, after, out);
  if (c < columns) product_columns<1>(a, b, c, Tail{static_cast<int>(columns - c)}, start, after, out);
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
