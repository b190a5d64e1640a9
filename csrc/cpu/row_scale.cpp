// row_scale: the scale of each row of row_pow2 values, base / 2^shift.
//
// Traffic: a byte and four bytes a row. Floor: copy bandwidth.

#include <cmath>

#include "launch.h"
#include "replay.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::ScalarType;
using sparse::Tensor;

constexpr int64_t kSlice = 1 << 16;
constexpr int kShifts = 256;

void row_scale(Tensor base, Tensor shift, Tensor out) {
  const int64_t rows = out.numel();
  const float scale = *sparse::flat<float>(base, ScalarType::Float, 1, "row_scale", "base");
  const auto* shifts = sparse::flat<uint8_t>(shift, ScalarType::Byte, rows, "row_scale", "shift");
  auto* scales = sparse::flat<float>(out, ScalarType::Float, rows, "row_scale", "out");
  float of_shift[kShifts];
  for (int i = 0; i < kShifts; ++i) of_shift[i] = scale * std::ldexp(1.0f, -i);
  parallel_slices(rows, kSlice, 2 * kSlice, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) scales[i] = of_shift[shifts[i]];
  });
}

}  // namespace
}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) { m.def("row_scale(Tensor base, Tensor shift, Tensor(a!) out) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CPU, m) { gnnc::implement<&gnnc::row_scale>(m, "gnnc_cpu", "row_scale"); }
