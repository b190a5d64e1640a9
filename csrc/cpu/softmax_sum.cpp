// Launcher of softmax_sum.

#include "softmax_sum.h"

#include "launch.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::Ids;
using sparse::MaybeTensor;
using sparse::ScalarType;
using sparse::Tensor;

constexpr int64_t kSlice = 16;  // columns of a slice: a cache line of out, and whole vectors of every instruction set
constexpr int64_t kSerialValues = 16384;  // values below which one thread is faster than two

template <Ids ids>
void softmax_sum(Tensor rowptr, Tensor logits, Tensor value, MaybeTensor state, Tensor out) {
  STD_TORCH_CHECK(logits.dim() == 2, "softmax_sum: logits must be [E, F]");
  const int64_t edges = logits.size(0), width = logits.size(1);
  const sparse::Structure<ids> structure(rowptr, std::nullopt, edges, "softmax_sum");
  const Csr& csr = structure.csr_of();
  const int64_t values = product(edges, width, "softmax_sum");
  STD_TORCH_CHECK(csr.num_edges == edges, "softmax_sum: there are ", edges, " logits, but ", csr.num_edges, " edges");
  const sparse::Matrix to = sparse::matrix(out, "softmax_sum", "out");
  STD_TORCH_CHECK(to.type == ScalarType::Float && to.rows == csr.num_dst && to.width == width,
                  "softmax_sum: out must be float32 [", csr.num_dst, ", ", width, "]");
  STD_TORCH_CHECK(!state.has_value() || csr.num_dst == 1, "softmax_sum: state goes with one row");
  const SoftmaxSumArgs a{
      csr.rowptr,
      csr.num_dst,
      sparse::flat<float>(logits, ScalarType::Float, values, "softmax_sum", "logits"),
      sparse::flat<float>(value, ScalarType::Float, values, "softmax_sum", "value"),
      width,
      sparse::flat<float>(state, ScalarType::Float, product(3, width, "softmax_sum"), "softmax_sum", "state"),
      static_cast<float*>(to.data),
      to.stride};
  parallel_slices(width, kSlice, kSerialValues / (edges + 1) + 1,
                  [&](int64_t begin, int64_t end) { GNNC_DISPATCH(softmax_sum, a, begin, end); });
}

}  // namespace
}  // namespace gnnc

GNNC_CSR_OP(softmax_sum, "(Tensor rowptr, Tensor logits, Tensor value, Tensor(a!)? state, Tensor(b!) out) -> ()")
