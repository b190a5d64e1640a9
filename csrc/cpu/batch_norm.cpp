// Launchers of batch_norm and its gradient.

#include "batch_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "launch.h"
#include "replay.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::Matrix;
using sparse::MaybeTensor;
using sparse::ScalarType;
using sparse::Tensor;

constexpr int64_t kChunkRows = 1024;
constexpr int64_t kMostChunks = 64;
constexpr int64_t kSlice = 1 << 15;  // values of a slice of the second pass
constexpr int64_t kWorth = 1 << 17;  // values from which two threads are faster than one

// Returns the arguments that both directions share.
NormArgs args_of(const Matrix& x, const char* op) {
  STD_TORCH_CHECK(x.type == ScalarType::Float || x.type == ScalarType::BFloat16, op, ": x must be float32 or bfloat16");
  NormArgs a{};
  a.x = x.data;
  a.x_type = x.type == ScalarType::Float ? Scalar::f32 : Scalar::bf16;
  a.x_stride = x.stride;
  a.width = x.width;
  return a;
}

// A vector with an element for each column, or null.
const float* columns_of(const MaybeTensor& t, int64_t width, const char* op, const char* name) {
  return sparse::flat<float>(t, ScalarType::Float, width, op, name);
}

float* results_of(const Tensor& t, int64_t width, const char* op, const char* name) {
  return sparse::flat<float>(t, ScalarType::Float, width, op, name);
}

float mixed(float old, double next, double share) { return static_cast<float>(share * next + (1.0 - share) * old); }

float at(const float* values, int64_t c, float absent) { return values == nullptr ? absent : values[c]; }

// Returns both sums of each column.
std::vector<double> sum_columns(const NormArgs& a, int64_t rows) {
  const int64_t values = 2 * a.width, chunks = std::clamp<int64_t>(rows / kChunkRows, 1, kMostChunks);
  std::vector<double> parts(static_cast<size_t>(chunks * values)), sums(static_cast<size_t>(values));
  parallel_slices(chunks, 1, 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      GNNC_DISPATCH(batch_norm_sums, a, rows * i / chunks, rows * (i + 1) / chunks, parts.data() + i * values);
    }
  });
  for (int64_t i = 0; i < chunks; ++i) {
    for (int64_t c = 0; c < values; ++c) sums[static_cast<size_t>(c)] += parts[static_cast<size_t>(i * values + c)];
  }
  return sums;
}

void compute_rows(const NormArgs& a, int64_t rows) {
  const int64_t width = std::max<int64_t>(a.width, 1);
  parallel_slices(rows, std::max<int64_t>(kSlice / width, 1), std::max<int64_t>(kWorth / width, 2),
                  [&](int64_t begin, int64_t end) { GNNC_DISPATCH(batch_norm_rows, a, begin, end); });
}

void batch_norm(Tensor x, MaybeTensor weight, MaybeTensor bias, MaybeTensor running_mean, MaybeTensor running_var,
                double momentum, double eps, Tensor out, Tensor mean, Tensor inverse, MaybeTensor new_mean,
                MaybeTensor new_var) {
  const char* op = "batch_norm";
  const Matrix values = sparse::matrix(x, op, "x");
  NormArgs a = args_of(values, op);
  const int64_t width = a.width, rows = values.rows;
  const float *scales = columns_of(weight, width, op, "weight"), *shifts = columns_of(bias, width, op, "bias");
  const float *old_mean = columns_of(running_mean, width, op, "running_mean"),
              *old_var = columns_of(running_var, width, op, "running_var");
  float *to_mean = results_of(mean, width, op, "mean"), *to_inverse = results_of(inverse, width, op, "inverse");
  float *next_mean = sparse::flat<float>(new_mean, ScalarType::Float, width, op, "new_mean"),
        *next_var = sparse::flat<float>(new_var, ScalarType::Float, width, op, "new_var");
  STD_TORCH_CHECK((old_mean == nullptr) == (next_mean == nullptr) && (old_var == nullptr) == (next_var == nullptr), op,
                  ": give running statistics and their results, or none of them");
  a.out = results_of(out, product(rows, width, op), op, "out");
  a.out_stride = width;
  check_apart({{out, "out"}, {mean, "mean"}, {inverse, "inverse"}}, {{x, "x"}}, op);
  const std::vector<double> sums = sum_columns(a, rows);
  std::vector<float> columns(static_cast<size_t>(2 * width));
  float *factor = columns.data(), *shift = factor + width;
  const double share = rows == 0 ? 0.0 : momentum;
  const auto count = static_cast<double>(std::max<int64_t>(rows, 1));
  for (int64_t c = 0; c < width; ++c) {
    const double center = sums[static_cast<size_t>(c)] / count;
    const double squares = sums[static_cast<size_t>(width + c)] / count - center * center;
    const double var = squares < 0.0 ? 0.0 : squares;
    to_mean[c] = static_cast<float>(center);
    to_inverse[c] = static_cast<float>(1.0 / std::sqrt(var + eps));
    if (next_mean != nullptr) next_mean[c] = mixed(old_mean[c], center, share);
    const double unbiased = rows == 0 ? 0.0 : var * (count / (count - 1.0));
    if (next_var != nullptr) next_var[c] = mixed(old_var[c], unbiased, share);
    factor[c] = to_inverse[c] * at(scales, c, 1.0f);
    shift[c] = static_cast<float>(at(shifts, c, 0.0f) - center * factor[c]);
  }
  a.factor = factor;
  a.shift = shift;
  compute_rows(a, rows);
}

void batch_norm_backward(Tensor grad, Tensor x, MaybeTensor weight, Tensor mean, Tensor inverse, Tensor out,
                         Tensor dweight, Tensor dbias) {
  const char* op = "batch_norm_backward";
  const Matrix values = sparse::matrix(x, op, "x"), gradients = sparse::matrix(grad, op, "grad");
  STD_TORCH_CHECK(gradients.type == ScalarType::Float, op, ": grad must be float32");
  STD_TORCH_CHECK(gradients.rows == values.rows && gradients.width == values.width, op, ": grad is ", gradients.rows,
                  " x ", gradients.width, ", but x is ", values.rows, " x ", values.width);
  NormArgs a = args_of(values, op);
  const int64_t width = a.width, rows = values.rows;
  a.grad = static_cast<const float*>(gradients.data);
  a.grad_stride = gradients.stride;
  a.mean = results_of(mean, width, op, "mean");
  const float *inverses = results_of(inverse, width, op, "inverse"), *scales = columns_of(weight, width, op, "weight");
  a.out = results_of(out, product(rows, width, op), op, "out");
  a.out_stride = width;
  float *to_weight = results_of(dweight, width, op, "dweight"), *to_bias = results_of(dbias, width, op, "dbias");
  check_apart({{out, "out"}, {dweight, "dweight"}, {dbias, "dbias"}},
              {{grad, "grad"}, {x, "x"}, {mean, "mean"}, {inverse, "inverse"}}, op);
  const std::vector<double> sums = sum_columns(a, rows);
  std::vector<float> columns(static_cast<size_t>(3 * width));
  float *scale = columns.data(), *constant = scale + width, *slope = constant + width;
  const auto count = static_cast<double>(std::max<int64_t>(rows, 1));
  for (int64_t c = 0; c < width; ++c) {
    const double sum = sums[static_cast<size_t>(c)], products = sums[static_cast<size_t>(width + c)];
    to_bias[c] = static_cast<float>(sum);
    to_weight[c] = static_cast<float>(products * inverses[c]);
    scale[c] = inverses[c] * at(scales, c, 1.0f);
    constant[c] = static_cast<float>(sum / count);
    slope[c] = static_cast<float>(products / count * inverses[c] * inverses[c]);
  }
  a.scale = scale;
  a.constant = constant;
  a.slope = slope;
  compute_rows(a, rows);
}

}  // namespace
}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) {
  m.def(
      "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, float momentum, "
      "float eps, Tensor(a!) out, Tensor(b!) mean, Tensor(c!) inverse, Tensor(d!)? new_mean, Tensor(e!)? new_var) -> "
      "()");
  m.def(
      "batch_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor inverse, Tensor(a!) out, "
      "Tensor(b!) dweight, Tensor(c!) dbias) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CPU, m) {
  gnnc::implement<&gnnc::batch_norm>(m, "gnnc_cpu", "batch_norm");
  gnnc::implement<&gnnc::batch_norm_backward>(m, "gnnc_cpu", "batch_norm_backward");
}
