// See edge_softmax.h for layout, traffic and floor.

#include "edge_softmax.h"

#include <cstring>

#include "scratch.h"
#include "softmax.isa.h"

namespace gnnc::GNNC_ISA {

void edge_softmax(const EdgeSoftmaxArgs& a, int64_t row_begin, int64_t row_end) {
  static thread_local Scratch rows, inverses;
  auto* inverse = inverses.get<float>(static_cast<size_t>(a.heads + kLanes));
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = a.csr.rowptr[row], edges = a.csr.rowptr[row + 1] - begin;
    if (edges == 0) continue;
    const int64_t flat = edges * a.heads;
    auto* logits = rows.get<float>(static_cast<size_t>(flat + kLanes));
    std::memcpy(logits, a.logits + begin * a.heads, static_cast<size_t>(flat) * sizeof(float));
    pad_logits(logits, flat);
    softmax_parts(logits, edges, a.heads, a.eps, inverse, []<int H>(int64_t, Floats e) { return e; });
    normalize_edges(logits, edges, a.heads, inverse, a.out + begin * a.heads);
  }
}

}  // namespace gnnc::GNNC_ISA
