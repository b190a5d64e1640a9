// See batch_norm.h for layout, traffic and floor.

#include "batch_norm.h"

#include <algorithm>
#include <cstring>

#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kRowsAtOnce = 4;  // rows whose values are added before the sums are stored

float wide(float v) { return v; }
float wide(Bf16 v) { return from_bits(static_cast<int32_t>(static_cast<uint32_t>(v.bits) << 16)); }

template <typename T>
const T* row_of(const NormArgs& a, int64_t row) {
  return static_cast<const T*>(a.x) + row * a.x_stride;
}

// Adds `rows` rows; kRows, if not 0, is their number.
template <int kRows, typename T>
void add_values(const NormArgs& a, int64_t row, int64_t rows, double* __restrict first, double* __restrict second) {
  const int64_t count = kRows == 0 ? rows : kRows;
  const T* x = row_of<T>(a, row);
  for (int64_t c = 0; c < a.width; ++c) {
    double sum = 0.0, squares = 0.0;
    for (int64_t r = 0; r < count; ++r) {
      const double v = wide(x[r * a.x_stride + c]);
      sum += v;
      squares += v * v;
    }
    first[c] += sum;
    second[c] += squares;
  }
}

template <int kRows, typename T>
void add_gradients(const NormArgs& a, int64_t row, int64_t rows, double* __restrict first, double* __restrict second) {
  const int64_t count = kRows == 0 ? rows : kRows;
  const T* x = row_of<T>(a, row);
  const float* grad = a.grad + row * a.grad_stride;
  for (int64_t c = 0; c < a.width; ++c) {
    double sum = 0.0, products = 0.0;
    for (int64_t r = 0; r < count; ++r) {
      const double d = grad[r * a.grad_stride + c];
      sum += d;
      products += d * (static_cast<double>(wide(x[r * a.x_stride + c])) - static_cast<double>(a.mean[c]));
    }
    first[c] += sum;
    second[c] += products;
  }
}

template <typename T>
void sums_of(const NormArgs& a, int64_t begin, int64_t end, double* sums) {
  double *first = sums, *second = sums + a.width;
  std::memset(sums, 0, static_cast<size_t>(2 * a.width) * sizeof(double));
  int64_t row = begin;
  for (; row + kRowsAtOnce <= end; row += kRowsAtOnce) {
    a.grad == nullptr ? add_values<kRowsAtOnce, T>(a, row, 0, first, second)
                      : add_gradients<kRowsAtOnce, T>(a, row, 0, first, second);
  }
  if (row == end) return;
  a.grad == nullptr ? add_values<0, T>(a, row, end - row, first, second)
                    : add_gradients<0, T>(a, row, end - row, first, second);
}

template <typename T>
void rows_of(const NormArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = row_of<T>(a, row);
    const float* grad = a.grad == nullptr ? nullptr : a.grad + row * a.grad_stride;
    float* out = a.out + row * a.out_stride;
    for_columns(a.width, [&](int64_t c, auto n) {
      if (grad == nullptr) return store(out + c, load(x + c, n) * load(a.factor + c, n) + load(a.shift + c, n), n);
      const Floats centered = load(x + c, n) - load(a.mean + c, n);
      const Floats rest = load(grad + c, n) - load(a.constant + c, n) - centered * load(a.slope + c, n);
      store(out + c, rest * load(a.scale + c, n), n);
    });
  }
}

}  // namespace

void batch_norm_sums(const NormArgs& a, int64_t begin, int64_t end, double* sums) {
  a.x_type == Scalar::bf16 ? sums_of<Bf16>(a, begin, end, sums) : sums_of<float>(a, begin, end, sums);
}

void batch_norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
  a.x_type == Scalar::bf16 ? rows_of<Bf16>(a, begin, end) : rows_of<float>(a, begin, end);
}

}  // namespace gnnc::GNNC_ISA
