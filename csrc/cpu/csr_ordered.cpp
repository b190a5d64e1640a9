// csr_ordered: builds the CSR of a graph by destination from an order of its edges that the caller provides.
//
// The order is validated in the pass that copies: every edge must lie in the row of its destination, each edge once,
// and ids must be in range. Rows partition the edges, and within a row edges keep the caller's order, so an order that
// passes gives the result of the stable sort, bit for bit. Traffic: 16 E bytes of indices once (at random through a
// permutation), 12 E bytes written in order.

#include <algorithm>
#include <atomic>
#include <vector>

#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::MaybeTensor;
using sparse::ScalarType;
using sparse::Tensor;

// The caller's edges and the order to validate.
struct Claim {
  const int64_t* src;
  const int64_t* dst;
  int64_t src_stride;
  int64_t dst_stride;
  int64_t num_edges;
  int64_t num_src;
  int64_t num_dst;
  const int64_t* rowptr;
  const int64_t* order;  // null: the edges are sorted already
};

bool has_rows(const Claim& claim) {
  if (claim.rowptr[0] != 0 || claim.rowptr[claim.num_dst] != claim.num_edges) return false;
  for (int64_t d = 0; d < claim.num_dst; ++d) {
    if (claim.rowptr[d] > claim.rowptr[d + 1]) return false;
  }
  return true;
}

bool copy_row(const Claim& claim, int64_t d, int32_t* col, int64_t* perm) {
  const int64_t begin = claim.rowptr[d], end = claim.rowptr[d + 1];
  for (int64_t at = begin; at < end; ++at) perm[at] = claim.order ? claim.order[at] : at;
  if (!std::is_sorted(perm + begin, perm + end)) std::sort(perm + begin, perm + end);
  for (int64_t at = begin; at < end; ++at) {
    const int64_t e = perm[at];
    if (e < 0 || e >= claim.num_edges || (at > begin && e == perm[at - 1])) return false;
    const int64_t s = claim.src[e * claim.src_stride];
    if (claim.dst[e * claim.dst_stride] != d || s < 0 || s >= claim.num_src) return false;
    col[at] = static_cast<int32_t>(s);
  }
  return true;
}

bool csr_ordered(Tensor src, Tensor dst, int64_t num_src, int64_t num_dst, Tensor rowptr, MaybeTensor order, Tensor col,
                 Tensor perm) {
  constexpr const char* op = "csr_ordered";
  sparse::check_type(src, ScalarType::Long, op, "src");
  sparse::check_type(dst, ScalarType::Long, op, "dst");
  STD_TORCH_CHECK(src.dim() == 1 && dst.dim() == 1 && src.numel() == dst.numel(),
                  "csr_ordered: src and dst must have one dimension and equal lengths");
  sparse::check_counts(num_src, num_dst, op);
  const int64_t num_edges = src.numel();
  const auto* given = sparse::flat<int64_t>(rowptr, ScalarType::Long, num_dst + 1, op, "rowptr");
  const std::vector<int64_t> starts(given, given + num_dst + 1);  // read once: its values are used as addresses
  const Claim claim{sparse::strided<int64_t>(src, op, "src"),
                    sparse::strided<int64_t>(dst, op, "dst"),
                    src.stride(0),
                    dst.stride(0),
                    num_edges,
                    num_src,
                    num_dst,
                    starts.data(),
                    sparse::flat<int64_t>(order, ScalarType::Long, num_edges, op, "order")};
  auto* columns = sparse::flat<int32_t>(col, ScalarType::Int, num_edges, op, "col");
  auto* positions = sparse::flat<int64_t>(perm, ScalarType::Long, num_edges, op, "perm");
  check_apart({{col, "col"}, {perm, "perm"}}, {{src, "src"}, {dst, "dst"}, {rowptr, "rowptr"}}, op);
  if (order.has_value()) check_apart({{col, "col"}, {perm, "perm"}}, {{*order, "order"}}, op);
  if (!has_rows(claim)) return false;
  std::atomic<bool> holds{true};
  sparse::for_each_chunk({claim.rowptr, columns, num_dst, num_edges}, sparse::kSerialWork,
                         [&](int64_t begin, int64_t end) {
                           for (int64_t d = begin; d < end; ++d) {
                             if (copy_row(claim, d, columns, positions)) continue;
                             holds.store(false, std::memory_order_relaxed);
                             return;
                           }
                         });
  return holds.load();
}

}  // namespace
}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) {
  m.def(
      "csr_ordered(Tensor src, Tensor dst, int num_src, int num_dst, Tensor rowptr, Tensor? order, Tensor(a!) col, "
      "Tensor(b!) perm) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CPU, m) { m.impl("csr_ordered", TORCH_BOX(&gnnc::csr_ordered)); }
