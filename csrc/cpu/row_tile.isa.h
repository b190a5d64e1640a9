#pragma once

// A tile of finished rows that a row program works on, and functions that map over its values, rows and columns. See
// include/gnnc/row_program.h for layout, traffic and floor.

#include "gnnc/row_program.h"
#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int kGroup = 16;  // rows that share a vector of results by row

// A tile: `rows` rows of `width` floats, ld floats apart, whose first row is row `first` of the result.
struct Tile {
  const RowProgram& program;
  float* acc;
  int64_t ld, first;
  int rows;
  int64_t width;
  const RowInstruction* rounding = nullptr;  // the instruction `stochastic` before the next quantization

  float* row(int64_t r) const { return acc + r * ld; }
};

const float* floats(const RowView& v) { return static_cast<const float*>(v.data); }

template <typename T>
T* row_of(const RowView& v, int64_t r) {
  return static_cast<T*>(v.data) + r * v.stride;
}

// Applies acc = f(acc) to whole vectors: lanes past the width are not read later. Adjacent rows are mapped as one long
// row.
template <typename Function>
void map_values(const Tile& t, const Function& f) {
  const bool touch = t.ld - t.width < kLanes;
  const int rows = touch ? 1 : t.rows;
  const int64_t width = touch ? t.rows * t.ld : t.width;
  for (int r = 0; r < rows; ++r) {
    float* row = t.row(r);
#pragma GCC unroll 4
    for (int64_t c = 0; c < width; c += kLanes) store(row + c, f(load(row + c)));
  }
}

template <typename Function>
void map_rows(const Tile& t, const RowView& v, const Function& f) {
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    const Floats value = splat(floats(v)[t.first + r]);
    for (int64_t c = 0; c < t.width; c += kLanes) store(row + c, f(load(row + c), value));
  }
}

template <typename Function>
void map_columns(const Tile& t, const RowView& v, const Function& f) {
  for_columns(t.width, [&](int64_t c, auto n) {
    const Floats value = load(floats(v) + c, n);
    float* at = t.acc + c;
#pragma GCC unroll 4
    for (int r = 0; r < t.rows; ++r, at += t.ld) store(at, f(load(at), value));
  });
}

// Return the scale of an int8 row, repeated over the lanes, and values times it; floats have none.
template <typename T>
GNNC_INLINE Floats scale_of_row(const RowView& v, int64_t row) {
  return splat(std::is_same_v<T, int8_t> ? v.scales[row] : 1.0f);
}
template <typename T>
GNNC_INLINE Floats scaled(Floats v, Floats scale) {
  return std::is_same_v<T, int8_t> ? v * scale : v;
}

template <typename T, typename Function>
void map_matrix(const Tile& t, const RowView& v, const Function& f) {
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    const T* values = row_of<const T>(v, t.first + r);
    const Floats scale = scale_of_row<T>(v, t.first + r);
    for_columns(t.width,
                [&](int64_t c, auto n) { store(row + c, f(load(row + c), scaled<T>(load(values + c, n), scale))); });
  }
}

template <typename Function>
void map_full(const Tile& t, const RowView& v, const Function& f) {
  if (v.type == Scalar::i8) return map_matrix<int8_t>(t, v, f);
  v.type == Scalar::bf16 ? map_matrix<Bf16>(t, v, f) : map_matrix<float>(t, v, f);
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
