// See edge_softmax.h for layout, traffic and floor.

#include "edge_softmax.h"

#include <cstring>

#include "scratch.h"
#include "softmax.isa.h"

namespace gnnc::GNNC_ISA {

void edge_softmax(const EdgeSoftmaxArgs& a, int64_t row_begin, int64_t row_end) {
  static thread_local Scratch scratch;
  auto* top = scratch.get<float>(static_cast<size_t>(2 * a.heads));
  float* sum = top + a.heads;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = a.csr.rowptr[row], edges = a.csr.rowptr[row + 1] - begin;
    if (edges == 0) continue;
    float* out = a.out + begin * a.heads;
    std::memmove(out, a.logits + begin * a.heads, static_cast<size_t>(edges * a.heads) * sizeof(float));
    max_of_heads(out, edges, a.heads, top);
    exp_of_heads(out, edges, a.heads, top, sum);
    divide_heads(out, edges, a.heads, sum, a.eps, out);
  }
}

}  // namespace gnnc::GNNC_ISA
