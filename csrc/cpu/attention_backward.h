#pragma once

// The gradient of out[i, h, :] = sum over the edges e of row i of alpha[e, h] * x[col[e], h, :], where alpha is the
// softmax over the row of leaky_relu(a_dst[i, h] + a_src[col[e], h]).
//
// Two passes over the edges. The one by rows computes the gradient of a_dst, and of each row what the other needs to
// compute alpha and the gradient of a logit again. The one by columns, over the transpose, computes the gradients of x
// and a_src. Nothing is stored for an edge.
//
// Rows of x and of grad may each be int8 with a scale a row. Dot products of two int8 rows are exact integers, and sums
// of int8 rows are in fixed point (fixed_sum.isa.h). Row scales of grad are folded into the
// statistics, so that the pass by columns gathers none: 1 / (sum + eps) is multiplied by the scale, and dot products
// stay in units of it.
//
// Layout: a_src, a_dst fp32 [N, heads]; x, grad [N, F], F = heads * D, each fp32, bf16 or int8; statistics fp32
// [num_dst, 4, heads]: a_dst, the largest logit, scale / (sum + eps), and the sum of alpha * <grad, x> / scale, where
// scale is that of the row of grad, or 1. Traffic: of an edge, 4 B of col, one row of x or grad, 4 or 16 heads B, and
// by rows 4 B of a scale. Floor: the gathers of two spmm with F columns.

#include <cstdint>

#include "csr.h"
#include "gnnc/isa.h"
#include "gnnc/row_program.h"

namespace gnnc {

// The rows at one end of the edges.
struct EndRows {
  const void* data;
  int64_t stride;
  Element element;
  const float* scale;  // of each row, if they are int8; else null
};

// The arguments of both passes.
struct AttentionEnds {
  Csr csr;  // by columns: the transpose
  EndRows x, grad;
  int64_t width;
  int64_t heads;
  const float* a_src;
  float slope;
};

struct AttentionRowsArgs {
  AttentionEnds ends;
  const float* a_dst;
  float eps;
  float* da_dst;      // [num_dst, heads]
  float* statistics;  // [num_dst, 4, heads]
};

struct AttentionColumnsArgs {
  AttentionEnds ends;
  const float* statistics;
  const float* da_dst;   // [num_src, heads], or null; if att_dst is given
  const float* att_dst;  // [F], or null: a_dst is not made of x
  const float* att_src;  // [F], or null
  float* da_src;         // [num_src, heads]
  float* sums;           // [ceil(num_src / kSumRows), 2, sum_width]: partial sums of da_dst * x and da_src * x; or null
  int64_t sum_width;     // F, padded to whole vectors
  const RowProgram* program;
};

GNNC_EACH_ISA(void attention_backward_rows(const AttentionRowsArgs& args, int64_t row_begin, int64_t row_end);
              void attention_backward_columns(const AttentionColumnsArgs& args, int64_t row_begin, int64_t row_end);)

}  // namespace gnnc
