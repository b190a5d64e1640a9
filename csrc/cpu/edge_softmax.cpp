// Launcher of edge_softmax.

#include "edge_softmax.h"

#include "launch.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::Ids;
using sparse::ScalarType;
using sparse::Tensor;

template <Ids ids>
void edge_softmax(Tensor rowptr, Tensor logits, double eps, Tensor out) {
  STD_TORCH_CHECK(logits.dim() == 1 || logits.dim() == 2, "edge_softmax: logits must be [E] or [E, heads]");
  const int64_t edges = logits.size(0), heads = logits.dim() == 2 ? logits.size(1) : 1;
  EdgeSoftmaxArgs a{};
  const sparse::Structure<ids> structure(rowptr, std::nullopt, edges, "edge_softmax");
  a.csr = structure.csr_of();
  const int64_t values = product(edges, heads, "edge_softmax");
  STD_TORCH_CHECK(a.csr.num_edges == edges, "edge_softmax: there are ", edges, " logits, but ", a.csr.num_edges,
                  " edges");
  a.heads = heads;
  a.eps = static_cast<float>(eps);
  a.logits = sparse::flat<float>(logits, ScalarType::Float, values, "edge_softmax", "logits");
  a.out = sparse::flat<float>(out, ScalarType::Float, values, "edge_softmax", "out");
  if (heads == 0) return;
  sparse::for_each_chunk(a.csr, sparse::kSerialWork / 2,
                         [&](int64_t begin, int64_t end) { GNNC_DISPATCH(edge_softmax, a, begin, end); });
}

}  // namespace
}  // namespace gnnc

GNNC_CSR_OP(edge_softmax, "(Tensor rowptr, Tensor logits, float eps, Tensor(a!) out) -> ()")
