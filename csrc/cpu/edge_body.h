#pragma once

// edge_body: runs a small program at every edge, and keeps what it computes, reduces it by row, or sums it by source or
// over all edges: each result in its own way.
//
// A program works on registers: matrices of one row an edge of the tile, or, where they are uniform, of one row for all
// edges. Rows are padded to whole vectors. A tile is a few whole rows of the CSR; a row of more edges than fit begins a
// tile of its own and is cut at multiples of the tile. So the cuts depend on the graph alone, and a value of an edge
// has the same bits wherever the edge is. Sums by source are in the order of the edges: with several threads, rows of
// edges wait in `pending` until each thread adds those of its sources.
//
// Layout: operands are fp32 matrices, rows any stride apart; out is fp32. Traffic: a gathered row of each dst and src
// operand an edge, the edge operands and out once; registers stay in L1 and L2. Floor: the gathers, or the products at
// the peak of fused multiply-adds.

#include <cstdint>
#include <vector>

#include "csr.h"
#include "gnnc/isa.h"

namespace gnnc {

// The numbers are those of gnnc/runtime/cpu/edge_opcodes.py; a test compares the two.
enum class BodyOp : int32_t {
  load,
  move,
  fill,
  unary,
  binary,
  where,
  fold,
  narrow,
  product,
  matmul,
  reduce,
  keep,
  total,
  outer,
  scatter
};

enum class Unary : int32_t {
  relu,
  leaky_relu,
  elu,
  sigmoid,
  tanh,
  gelu,
  gelu_tanh,
  silu,
  exp,
  log,
  softplus,
  neg,
  abs,
  square,
  sqrt,
  rsqrt,
  recip,
  clamp_min,
  clamp_max,
  logical_not
};

enum class Binary : int32_t {
  add,
  sub,
  mul,
  div,
  maximum,
  minimum,
  eq,
  ne,
  lt,
  le,
  gt,
  ge,
  threshold_backward,
  leaky_relu_backward,
  silu_backward,
  sigmoid_backward,
  tanh_backward,
  softplus_backward
};

enum class Reduction : int32_t { sum, mean, max, min, softmax };

// Instruction of a body's program. Its operands a to d are, by op:
//   load           group, operand; of group 4: table, ids that choose its rows
//   move           register, first run, runs
//   fill           constant
//   unary          register, kind, constant
//   binary         two registers, kind, constant
//   where          mask, two registers
//   fold           register, values of a result, 0 for their sum and 1 for their maximum, results side by side: their
//                  values are as far apart
//   narrow         register, format, rows an edge, each of which is quantized or rounded by itself
//   product        register (of a weight in low precision: one that `narrow` wrote), weight, summand (a register
//                  or -1), rows an edge; a summand of each edge has one row,
//                  and is added last; one of all edges is what the sum of FP32 products begins with, but is added
//                  last where the weight has one column
//   matmul         two registers: a matrix an edge in each; rows of the left one, rows of the right one
//   reduce         two registers, kind, first column of the result
//   keep, scatter  register: rows of edges, sums by source
//   total          register
//   outer          two registers, rows an edge
// `to` is a register, the number of a result, or, of total and outer, a place among the sums over all edges.
struct BodyStep {
  BodyOp op;
  int32_t to, a, b, c, d;
  int32_t state;  // of a softmax: the place of its state
};

// `length` values from `from` on, `step` apart, are moved to `to`, `to + 1` and so on.
struct Run {
  int32_t to, from, length, step;
};

struct BodyOperand {
  const float* data;
  int64_t stride, width;
};

// A matrix whose rows the ids of edges choose.
struct BodyTable {
  const float* data;
  int64_t stride, rows, width;
};

struct Register {
  int64_t width, stride, offset;  // offset: in floats for an edge of the tile, or in the memory of uniform registers
  bool uniform;
};

// Format of the operands of a product. The numbers up to bf16 are those of gnnc/runtime/cpu/edge_opcodes.py; a launcher
// makes bf16_dots of bf16 where the processor has vdpbf16ps.
enum class BodyFormat : int32_t { f32, i8, bf16, bf16_dots };

// A weight of a product, packed [inputs, padded outputs], or as edge_low_product.isa.h says.
struct BodyWeight {
  BodyFormat format;
  const void* data;
  int64_t inputs, outputs, input_stride, output_stride;
  const float* scales;  // of the outputs, of i8
  int64_t scale_stride;
  float* packed;
};

// A result.
struct BodyOut {
  float* data;
  int64_t rows, stride, width;
  float* pending;  // rows of the edges from pending_edge on that are not yet added to those of their sources, or null
  int64_t pending_edge;
};

struct EdgeBodyArgs {
  Csr csr;
  std::vector<BodyOperand> operands[3];  // of destinations, sources and edges
  std::vector<BodyTable> tables;         // of the constants, in their order; those that are no matrix have no rows
  std::vector<const int64_t*> ids;       // [num_edges]
  std::vector<Register> registers;
  std::vector<BodyStep> steps;
  std::vector<Run> runs;
  std::vector<float> consts;
  std::vector<BodyWeight> weights;
  float* uniform;
  int64_t tile_edges, tile_floats;
  int64_t state_floats;  // of the softmax of a row that goes from tile to tile
  std::vector<BodyOut> outs;
};

constexpr int64_t kBodyPad = 16;        // floats that the rows of registers are a multiple of
constexpr int64_t kWeightRows = 2;      // rows in front of a packed weight
constexpr int64_t kExactInputs = 1024;  // inputs of a product of bytes in floats, at most

// Returns the floats of a packed weight.
inline int64_t packed_floats(const BodyWeight& w) {
  return (w.inputs + kWeightRows) * ((w.outputs + kBodyPad - 1) / kBodyPad * kBodyPad);
}

// Returns the floats of a row of low precision: its values, padded to 64 bytes, and a vector for a scale.
inline int64_t narrow_floats(BodyFormat format, int64_t width) {
  return format == BodyFormat::i8 ? (width + 63) / 64 * 16 + kBodyPad : (width + 31) / 32 * 16;
}

// prepare: computes the uniform registers and packs the weights.
// run: computes the rows of a chunk; `scratch` has tile_floats + state_floats floats, and `totals` has those that the
// steps `total` and `outer` add to, or is null.
// add_pending: adds the pending rows of the edges before `edge_end` to those of their sources, of a range of sources.
GNNC_EACH_ISA(void prepare_edge_body(const EdgeBodyArgs& args);
              void run_edge_body(const EdgeBodyArgs& args, int64_t row_begin, int64_t row_end, float* scratch,
                                 float* totals);
              void add_pending(const Csr& csr, const BodyOut& out, int64_t edge_end, int64_t source_begin,
                               int64_t source_end);)

}  // namespace gnnc
