// Launchers of relu_mask and relu_backward.

#include "relu.h"

#include "launch.h"
#include "replay.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::Matrix;
using sparse::ScalarType;
using sparse::Tensor;

constexpr int64_t kSlice = 1 << 15;  // values of a slice
constexpr int64_t kWorth = 1 << 17;  // values from which two threads are faster than one

ReluArgs arguments(const Matrix& values, const Tensor& mask, const char* op, const char* name) {
  STD_TORCH_CHECK(values.type == ScalarType::Float, op, ": ", name, " must be float32");
  ReluArgs a{};
  a.values = static_cast<const float*>(values.data);
  a.width = values.width;
  a.stride = values.stride;
  a.mask = sparse::flat<uint8_t>(mask, ScalarType::Byte, product(values.rows, (values.width + 7) / 8, op), op, "mask");
  return a;
}

template <typename Body>
void for_rows(const Matrix& values, const Body& body) {
  if (values.width == 0) return;
  const int64_t width = values.width;
  parallel_slices(values.rows, std::max<int64_t>(kSlice / width, 1), std::max<int64_t>(kWorth / width, 2), body);
}

void relu_mask(Tensor x, Tensor mask) {
  const Matrix values = sparse::matrix(x, "relu_mask", "x");
  const ReluArgs a = arguments(values, mask, "relu_mask", "x");
  check_apart({{mask, "mask"}}, {{x, "x"}}, "relu_mask");
  for_rows(values, [&](int64_t begin, int64_t end) { GNNC_DISPATCH(relu_mask, a, begin, end); });
}

void relu_backward(Tensor grad, Tensor mask, Tensor out) {
  const Matrix values = sparse::matrix(grad, "relu_backward", "grad");
  ReluArgs a = arguments(values, mask, "relu_backward", "grad");
  a.out = sparse::flat<float>(out, ScalarType::Float, product(values.rows, values.width, "relu_backward"),
                              "relu_backward", "out");
  check_apart({{out, "out"}}, {{grad, "grad"}, {mask, "mask"}}, "relu_backward");
  for_rows(values, [&](int64_t begin, int64_t end) { GNNC_DISPATCH(relu_backward, a, begin, end); });
}

}  // namespace
}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) {
  m.def("relu_mask(Tensor x, Tensor(a!) mask) -> ()");
  m.def("relu_backward(Tensor grad, Tensor mask, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CPU, m) {
  gnnc::implement<&gnnc::relu_mask>(m, "gnnc_cpu", "relu_mask");
  gnnc::implement<&gnnc::relu_backward>(m, "gnnc_cpu", "relu_backward");
}
