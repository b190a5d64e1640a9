// csr: builds the CSR of a graph by a stable counting sort of the edges by destination.
//
// The sort makes two passes over the edges, both parallel over equal slices of them. The first pass reads the edge
// list, each index once, checks it, copies it and counts the destinations of each slice; nothing is written to the
// outputs before every index is known to be in range. The second pass writes each edge of the copy to its position,
// which the counts determine: the result does not depend on the number of slices, and no index is an address that
// another thread or process could still write. Traffic: 16 E bytes of indices, 8 E bytes of the copy written and read,
// 12 E bytes written (at random inside the destination order), 4 N a slice of counters; the floor is the E random
// writes.

#include "csr.h"

#include <limits>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::ScalarType;
using sparse::Tensor;

constexpr int64_t kMaxSlices = 16;
constexpr int64_t kMinSlice = 32768;

// The edge list of a graph, as the caller passes it.
template <typename Index>
struct EdgeList {
  const Index* src;
  const Index* dst;
  int64_t src_stride;
  int64_t dst_stride;
  int64_t num_edges;
  int64_t num_src;
  int64_t num_dst;

  int64_t source(int64_t e) const { return static_cast<int64_t>(src[e * src_stride]); }
  int64_t destination(int64_t e) const { return static_cast<int64_t>(dst[e * dst_stride]); }
};

// Returns the number of slices. A slice costs a pass over num_dst counters, so the number is limited by that of edges.
int64_t slice_count(int64_t num_edges, int64_t num_dst) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t worth = std::min(num_edges / kMinSlice, 2 * num_edges / std::max<int64_t>(num_dst, 1));
  return std::clamp<int64_t>(std::min(threads, worth), 1, kMaxSlices);
}

template <typename Body>
void for_each_slice(int64_t slices, int64_t num_edges, const Body& body) {
  const auto run = [&](int64_t s) { body(s, num_edges * s / slices, num_edges * (s + 1) / slices); };
  if (slices == 1) return run(0);
  torch::stable::parallel_for(0, slices, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) run(s);
  });
}

// The checked ids of an edge.
struct Ends {
  int32_t src, dst;
};

// An edge with an index out of range; edge -1: none.
struct Wrong {
  int64_t edge = -1, src = 0, dst = 0;
};

// Copies edges [begin, end) and counts their destinations, up to the first edge with an index out of range, if any.
// Self loops are left out, with a negative source, where every node gets a new one.
template <bool kLoops, typename Index, typename Count>
Wrong count_slice(const EdgeList<Index>& edges, int64_t begin, int64_t end, Ends* ends, Count* counts) {
  const auto num_src = static_cast<uint64_t>(edges.num_src), num_dst = static_cast<uint64_t>(edges.num_dst);
  for (int64_t e = begin; e < end; ++e) {
    const int64_t s = edges.source(e), d = edges.destination(e);
    if (static_cast<uint64_t>(s) >= num_src || static_cast<uint64_t>(d) >= num_dst) return {e, s, d};
    if (kLoops && s == d) {
      ends[e].src = -1;
      continue;
    }
    ends[e] = {static_cast<int32_t>(s), static_cast<int32_t>(d)};
    ++counts[d];
  }
  return {};
}

template <typename Index>
[[noreturn]] void report(const EdgeList<Index>& edges, const Wrong& wrong, const char* op) {
  const bool bad_src = wrong.src < 0 || wrong.src >= edges.num_src;
  STD_TORCH_CHECK(false, op, ": ", bad_src ? "src" : "dst", "[", wrong.edge, "] is ", bad_src ? wrong.src : wrong.dst,
                  ", but must be in 0..", (bad_src ? edges.num_src : edges.num_dst) - 1, " (there are ",
                  bad_src ? edges.num_src : edges.num_dst, bad_src ? " source" : " destination", " nodes)");
}

// Turns counts[slice][row] into the position of the slice's first edge of that row, and fills rowptr. New loops take
// the last place of each row.
template <bool kLoops, typename Count>
void place(Count* counts, int64_t slices, int64_t num_dst, int64_t* rowptr) {
  int64_t start = 0;
  for (int64_t d = 0; d < num_dst; ++d) {
    rowptr[d] = start;
    for (int64_t s = 0; s < slices; ++s) {
      Count& count = counts[s * num_dst + d];
      const Count n = count;
      count = static_cast<Count>(start);
      start += n;
    }
    if (kLoops) ++start;
  }
  rowptr[num_dst] = start;
}

template <bool kLoops, typename Count>
void scatter_slice(const Ends* ends, int64_t begin, int64_t end, Count* next, int32_t* col, int64_t* perm) {
  for (int64_t e = begin; e < end; ++e) {
    if (kLoops && ends[e].src < 0) continue;
    const int64_t at = next[ends[e].dst]++;
    col[at] = ends[e].src;
    perm[at] = e;
  }
}

// The tensors that a sort fills.
struct Sorted {
  int64_t* rowptr;
  int32_t* col;
  int64_t* perm;
};

template <bool kLoops, typename Index, typename Count>
void build(const EdgeList<Index>& edges, const Sorted& out, const char* op) {
  const int64_t slices = slice_count(edges.num_edges, edges.num_dst);
  const std::unique_ptr<Ends[]> ends(new Ends[static_cast<size_t>(edges.num_edges)]);
  std::vector<Count> counts(static_cast<size_t>(slices * edges.num_dst), 0);
  std::vector<Wrong> wrong(static_cast<size_t>(slices));
  for_each_slice(slices, edges.num_edges, [&](int64_t s, int64_t begin, int64_t end) {
    Count* own = counts.data() + s * edges.num_dst;
    wrong[static_cast<size_t>(s)] = count_slice<kLoops>(edges, begin, end, ends.get(), own);
  });
  for (const Wrong& first : wrong) {
    if (first.edge >= 0) report(edges, first, op);
  }
  place<kLoops>(counts.data(), slices, edges.num_dst, out.rowptr);
  for_each_slice(slices, edges.num_edges, [&](int64_t s, int64_t begin, int64_t end) {
    scatter_slice<kLoops>(ends.get(), begin, end, counts.data() + s * edges.num_dst, out.col, out.perm);
  });
  for (int64_t d = 0; kLoops && d < edges.num_dst; ++d) {
    const int64_t last = out.rowptr[d + 1] - 1;
    out.col[last] = static_cast<int32_t>(d);
    out.perm[last] = edges.num_edges + d;
  }
}

template <bool kLoops, typename Index>
void build_from(const Tensor& src, const Tensor& dst, int64_t num_src, int64_t num_dst, const Sorted& out,
                const char* op) {
  const EdgeList<Index> edges{sparse::strided<Index>(src, op, "src"),
                              sparse::strided<Index>(dst, op, "dst"),
                              src.stride(0),
                              dst.stride(0),
                              src.numel(),
                              num_src,
                              num_dst};
  if (edges.num_edges + (kLoops ? num_dst : 0) <= std::numeric_limits<int32_t>::max()) {
    build<kLoops, Index, int32_t>(edges, out, op);
  } else {
    build<kLoops, Index, int64_t>(edges, out, op);
  }
}

// Sorts edges by destination; with kLoops, each node has one self loop, in place of those given.
template <bool kLoops>
void sort(const Tensor& src, const Tensor& dst, int64_t num_src, int64_t num_dst, const Tensor& rowptr,
          const Tensor& col, const Tensor& perm, const char* op) {
  const ScalarType type = src.scalar_type();
  STD_TORCH_CHECK(src.is_cpu() && dst.is_cpu(), op, ": src and dst must be on the CPU");
  STD_TORCH_CHECK(src.dim() == 1 && dst.dim() == 1 && src.numel() == dst.numel(), op,
                  ": src and dst must have one dimension and equal lengths");
  STD_TORCH_CHECK((type == ScalarType::Long || type == ScalarType::Int) && type == dst.scalar_type(), op,
                  ": src and dst must both be int64 or both int32");
  sparse::check_counts(num_src, num_dst, op);
  const int64_t room = src.numel() + (kLoops ? num_dst : 0);
  const Sorted out{sparse::flat<int64_t>(rowptr, ScalarType::Long, num_dst + 1, op, "rowptr"),
                   sparse::flat<int32_t>(col, ScalarType::Int, room, op, "col"),
                   sparse::flat<int64_t>(perm, ScalarType::Long, room, op, "perm")};
  check_apart({{rowptr, "rowptr"}, {col, "col"}, {perm, "perm"}}, {{src, "src"}, {dst, "dst"}}, op);
  try {
    if (type == ScalarType::Long) {
      build_from<kLoops, int64_t>(src, dst, num_src, num_dst, out, op);
    } else {
      build_from<kLoops, int32_t>(src, dst, num_src, num_dst, out, op);
    }
  } catch (const std::bad_alloc&) {
    STD_TORCH_CHECK(false, op, ": there is no memory for the copy of ", src.numel(), " edges and their counts");
  }
}

void csr(Tensor src, Tensor dst, int64_t num_src, int64_t num_dst, Tensor rowptr, Tensor col, Tensor perm) {
  sort<false>(src, dst, num_src, num_dst, rowptr, col, perm, "csr");
}

// Returns the number of sorted edges, which fill the first part of col and perm.
int64_t csr_with_loops(Tensor src, Tensor dst, int64_t num_nodes, Tensor rowptr, Tensor col, Tensor perm) {
  sort<true>(src, dst, num_nodes, num_nodes, rowptr, col, perm, "csr_with_loops");
  return static_cast<const int64_t*>(rowptr.data_ptr())[num_nodes];
}

}  // namespace
}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) {
  m.def(
      "csr(Tensor src, Tensor dst, int num_src, int num_dst, Tensor(a!) rowptr, Tensor(b!) col, Tensor(c!) perm) "
      "-> ()");
  m.def(
      "csr_with_loops(Tensor src, Tensor dst, int num_nodes, Tensor(a!) rowptr, Tensor(b!) col, Tensor(c!) perm) "
      "-> int");
}

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CPU, m) {
  m.impl("csr", TORCH_BOX(&gnnc::csr));
  m.impl("csr_with_loops", TORCH_BOX(&gnnc::csr_with_loops));
}
