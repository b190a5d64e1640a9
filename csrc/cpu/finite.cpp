// first_not_finite: returns the index of the first of some fp32 tensors that holds NaN or an infinity, or -1 if none
// does.
//
// Programs check their scales with this op before they return. Traffic: 4 bytes a value, read once.

#include <atomic>
#include <bit>
#include <vector>

#include "launch.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::ScalarType;
using sparse::Tensor;

constexpr int64_t kSlice = 64 << 10;  // values of a slice; fewer than two slices are faster on one thread

bool is_finite(const float* values, int64_t count) {
  constexpr uint32_t kExponent = 0x7f800000;
  uint32_t bad = 0;
  for (int64_t i = 0; i < count; ++i) bad |= (std::bit_cast<uint32_t>(values[i]) & kExponent) == kExponent;
  return bad == 0;
}

int64_t first_not_finite(std::vector<Tensor> tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t count = tensors[i].numel();
    const auto* values = sparse::flat<float>(tensors[i], ScalarType::Float, count, "first_not_finite", "a tensor");
    std::atomic<bool> finite{true};
    parallel_slices(count, kSlice, 2 * kSlice, [&](int64_t begin, int64_t end) {
      if (!is_finite(values + begin, end - begin)) finite.store(false, std::memory_order_relaxed);
    });
    if (!finite.load(std::memory_order_relaxed)) return static_cast<int64_t>(i);
  }
  return -1;
}

}  // namespace
}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) { m.def("first_not_finite(Tensor[] tensors) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CPU, m) { m.impl("first_not_finite", TORCH_BOX(&gnnc::first_not_finite)); }
