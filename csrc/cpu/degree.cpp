// degree: out[i] = the number of edges of row i, as fp32.
//
// The kernel runs on one thread: 8 bytes read and 4 written a row, once for each graph.

#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::ScalarType;
using sparse::Tensor;

void degree(Tensor rowptr, Tensor out) {
  const int64_t rows = out.numel();
  const auto* starts = sparse::flat<int64_t>(rowptr, ScalarType::Long, rows + 1, "degree", "rowptr");
  auto* counts = sparse::flat<float>(out, ScalarType::Float, rows, "degree", "out");
  for (int64_t i = 0; i < rows; ++i) counts[i] = static_cast<float>(starts[i + 1] - starts[i]);
}

}  // namespace
}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) { m.def("degree(Tensor rowptr, Tensor(a!) out) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CPU, m) { m.impl("degree", TORCH_BOX(&gnnc::degree)); }
