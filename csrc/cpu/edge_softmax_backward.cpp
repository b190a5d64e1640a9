// Launcher of edge_softmax_backward.

#include "edge_softmax_backward.h"

#include "launch.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::Ids;
using sparse::ScalarType;
using sparse::Tensor;

template <Ids ids>
void edge_softmax_backward(Tensor rowptr, Tensor alpha, Tensor grad, Tensor out) {
  const char* op = "edge_softmax_backward";
  STD_TORCH_CHECK(alpha.dim() == 1 || alpha.dim() == 2, op, ": alpha must be [E] or [E, heads]");
  const int64_t edges = alpha.size(0), heads = alpha.dim() == 2 ? alpha.size(1) : 1;
  EdgeSoftmaxBackwardArgs a{};
  const sparse::Structure<ids> structure(rowptr, std::nullopt, edges, op);
  a.csr = structure.csr_of();
  const int64_t values = product(edges, heads, op);
  STD_TORCH_CHECK(a.csr.num_edges == edges, op, ": alpha has ", edges, " rows, but there are ", a.csr.num_edges,
                  " edges");
  a.heads = heads;
  a.alpha = sparse::flat<float>(alpha, ScalarType::Float, values, op, "alpha");
  a.grad = sparse::flat<float>(grad, ScalarType::Float, values, op, "grad");
  a.out = sparse::flat<float>(out, ScalarType::Float, values, op, "out");
  check_apart({{out, "out"}}, {{rowptr, "rowptr"}, {alpha, "alpha"}, {grad, "grad"}}, op);
  if (heads == 0) return;
  sparse::for_each_chunk(a.csr, sparse::kSerialWork,
                         [&](int64_t begin, int64_t end) { GNNC_DISPATCH(edge_softmax_backward, a, begin, end); });
}

}  // namespace
}  // namespace gnnc

GNNC_CSR_OP(edge_softmax_backward, "(Tensor rowptr, Tensor alpha, Tensor grad, Tensor(a!) out) -> ()")
