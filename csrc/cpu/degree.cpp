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
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t begin = starts[i], end = starts[i + 1];
    STD_TORCH_CHECK(0 <= begin && begin <= end, "degree: rowptr[", i + 1, "] is ", end, ", but rowptr[", i, "] is ",
                    begin, "; it must start at 0 and not fall");
    counts[i] = static_cast<float>(end - begin);
  }
}

}  // namespace
}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) { m.def("degree(Tensor rowptr, Tensor(a!) out) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CPU, m) { m.impl("degree", TORCH_BOX(&gnnc::degree)); }
