#pragma once

// Row-program instructions that reduce each row of a tile: layer norm, L2 norm, softmax, mean of heads, dot products.

#include <algorithm>
#include <cmath>
#include <limits>

#include "gnnc/simd_math.h"
#include "heads.isa.h"
#include "row_tile.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

// Fills the lanes past the width with the neutral element of the next reduction.
void fill_tail(float* row, int64_t width, float value) {
  const int64_t end = (width + kLanes - 1) / kLanes * kLanes;
  for (int64_t c = width; c < end; ++c) row[c] = value;
}

template <typename Function>
float sum_row(const float* row, int64_t width, const Function& f) {
  Floats total{};
  for (int64_t c = 0; c < width; c += kLanes) total += f(load(row + c));
  return sum(total);
}

void layer_norm(const Tile& t, const RowView& weight, const RowView& bias, float eps) {
  const float count = static_cast<float>(t.width);
  const bool has_weight = weight.cols > 0, has_bias = bias.cols > 0;
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    fill_tail(row, t.width, 0.0f);
    const float mean = sum_row(row, t.width, [](Floats v) { return v; }) / count;
    fill_tail(row, t.width, mean);
    const Floats center = splat(mean);
    const float var = sum_row(row, t.width, [&](Floats v) { return (v - center) * (v - center); }) / count;
    const Floats factor = splat(1.0f / std::sqrt(var + eps));
    for_columns(t.width, [&](int64_t c, auto n) {
      Floats v = (load(row + c) - center) * factor;
      if (has_weight) v *= load(floats(weight) + c, n);
      if (has_bias) v += load(floats(bias) + c, n);
      store(row + c, v);
    });
  }
}

void l2_normalize(const Tile& t, float eps) {
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    fill_tail(row, t.width, 0.0f);
    const float norm = std::sqrt(sum_row(row, t.width, [](Floats v) { return v * v; }));
    const Floats factor = splat(1.0f / (norm < eps ? eps : norm));
    for (int64_t c = 0; c < t.width; c += kLanes) store(row + c, load(row + c) * factor);
  }
}

float largest_of_row(const float* row, int64_t width) {
  Floats top = load(row);
  for (int64_t c = kLanes; c < width; c += kLanes) top = larger(load(row + c), top);
  return largest(top);
}

void softmax(const Tile& t, bool logarithm) {
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    fill_tail(row, t.width, -std::numeric_limits<float>::infinity());
    const Floats top = splat(largest_of_row(row, t.width));
    if (logarithm) {
      const float total = sum_row(row, t.width, [&](Floats v) { return exp(v - top); });
      const Floats rest = log(splat(total));
      for (int64_t c = 0; c < t.width; c += kLanes) store(row + c, (load(row + c) - top) - rest);
    } else {
      for (int64_t c = 0; c < t.width; c += kLanes) store(row + c, exp(load(row + c) - top));
      const Floats share = splat(1.0f / sum_row(row, t.width, [](Floats v) { return v; }));
      for (int64_t c = 0; c < t.width; c += kLanes) store(row + c, load(row + c) * share);
    }
  }
}

// Adds the rows to the partial sum of their kSumRows rows, in order: the sums do not depend on the cut into tiles.
void col_sum(const Tile& t, float* sums) {
  const int64_t stride = (t.width + 15) / 16 * 16;
  for (int64_t r = 0; r < t.rows;) {
    const int64_t slot = (t.first + r) / kSumRows, end = std::min<int64_t>(t.rows, (slot + 1) * kSumRows - t.first);
    float* to = sums + slot * stride;
    for (int64_t c = 0; c < t.width; c += kLanes) {
      Floats total = load(to + c);
      for (int64_t i = r; i < end; ++i) total += load(t.row(i) + c);
      store(to + c, total);
    }
    r = end;
  }
}

void head_mean(Tile& t, int64_t heads) {
  t.width /= heads;
  const Floats count = splat(static_cast<float>(heads));
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    for_columns(t.width, [&](int64_t c, auto n) {
      Floats total = load(row + c, n);
      for (int64_t h = 1; h < heads; ++h) total += load(row + h * t.width + c, n);
      store(row + c, total / count, n);
    });
  }
}

#ifdef __AVX512F__
// Computes the dot products of kGroup / H rows at a time, in registers. Rows past the last repeat the last row.
template <int H>
void dots_of_rows(const Tile& t, const float* att, float* out) {
  const int64_t depth = t.width / H;
  for (int r = 0; r < t.rows; r += kGroup / H) {
    const float* rows[kGroup / H];
    each<kGroup / H>([&](auto i) __attribute__((always_inline)) { rows[i] = t.row(std::min(r + i, t.rows - 1)); });
    Floats dots[kGroup] = {};
    for_columns(depth, [&](int64_t c, auto n) __attribute__((always_inline)) {
      each<kGroup>([&](auto i) __attribute__((always_inline)) {
        const int64_t at = i % H * depth + c;
        dots[i] = fused(load(rows[i / H] + at, n), load(att + at, n), dots[i]);
      });
    });
    const Floats sums = fold_all(dots, [](__m512 a, __m512 b) { return a + b; });
    store(out + r * H, sums, Tail{std::min((t.rows - r) * H, kGroup)});
  }
}
#endif

GNNC_INLINE Floats products(const float* a, const float* b, int64_t count) {
  Floats total{};
  for_columns(count, [&](int64_t c, auto n) { total = fused(load(a + c, n), load(b + c, n), total); });
  return total;
}

// Computes dot products by row and head; sums are reduced for 16 pairs of row and head at once.
void row_dot(const Tile& t, const RowView& att, const RowView& out, int64_t heads) {
#ifdef __AVX512F__
  const auto whole = [&]<int H>() { dots_of_rows<H>(t, floats(att), row_of<float>(out, t.first)); };
  if (out.stride == heads && with_heads(heads, whole)) return;
#endif
  const int64_t depth = t.width / heads;
  Group group;
  alignas(64) float sums[kGroup];
  int64_t count = 0, from_row = 0, from_head = 0;
  const auto flush = [&] {
    float* first = row_of<float>(out, t.first + from_row) + from_head;
    if (out.stride == heads && count == kGroup) {
      group.sums(first);
    } else {
      group.sums(sums);
      int64_t r = from_row, h = from_head;
      for (int64_t i = 0; i < count; ++i) {
        row_of<float>(out, t.first + r)[h] = sums[i];
        if (++h == heads) h = 0, ++r;
      }
    }
    count = 0;
  };
  for (int r = 0; r < t.rows; ++r) {
    const float* row = t.row(r);
    for (int64_t h = 0; h < heads; ++h) {
      if (count == 0) from_row = r, from_head = h;
      group.set(count, products(row + h * depth, floats(att) + h * depth, depth));
      if (++count == kGroup) flush();
    }
  }
  if (count > 0) flush();
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
