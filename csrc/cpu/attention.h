#pragma once

// attention: out[i, h, :] = sum over the edges e of row i of alpha[e, h] * x[col[e], h, :], then the row program, where
// alpha is the softmax over the row of a logit that the kernel computes for each edge. The kernel makes one pass over
// the edges: a row's logits stay in a buffer of the thread, and neither logits nor alpha are written to memory unless
// alpha_out is given.
//
// Layout: a_src and a_dst fp32 [N, heads] (additive) or [N, heads * D] (dot); edge fp32 [E, heads]; x [num_src, F], F =
// heads * D, fp32, bf16, or int8 whose row scale is folded into alpha. Traffic: 4 B of col, one row of x and one of
// a_src an edge (4 heads B for additive; with a table of factors 8 heads B, 16 B with one head, and no exponential).
// Floor at 4 x 16 int8 for four edges: 12 vector instructions for their weights and 22 for the sum.

#include <cstdint>

#include "csr.h"
#include "gnnc/isa.h"
#include "gnnc/row_program.h"

namespace gnnc {

// The kind of a logit: leaky_relu(a_src + a_dst), a scaled dot product of a_src and a_dst, or the edge term alone.
enum class Logit { additive, dot, edge };

struct AttentionArgs {
  Csr csr;
  const void* x;
  int64_t width;
  int64_t x_stride;
  Element element;
  const float* x_scale;  // [num_src], or null
  Logit kind;
  const float* a_src;
  const float* a_dst;
  const float* edge;  // [E, heads], or null
  int64_t dot_width;  // columns a head of a_src and a_dst, if kind is dot
  float scale;        // factor of the dot product
  float slope;        // negative slope of the leaky ReLU; 1: no activation
  float eps;
  int64_t heads;
  float* alpha_out;  // [E, heads], or null
  float* factors;    // [num_src, factors_of(heads)], table of bounded_softmax.isa.h; null: each row finds its maximum
  const float* src_tops;  // the largest a_src of each head, repeated to kTops values; if factors is given
  const RowProgram* program;
};

constexpr int kTops = 16;

// Returns the number of floats of one source in the table of factors.
constexpr int64_t factors_of(int64_t heads) { return heads == 1 ? 4 : 2 * heads; }

// Write the table of factors for the sources begin ... end - 1, where begin * heads is a multiple of kTops; and compute
// the rows row_begin ... row_end - 1 of the result.
GNNC_EACH_ISA(void source_factors(const AttentionArgs& args, int64_t begin, int64_t end);)
GNNC_EACH_ISA(void attention(const AttentionArgs& args, int64_t row_begin, int64_t row_end);)

}  // namespace gnnc
