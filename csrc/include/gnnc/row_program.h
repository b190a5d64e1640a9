#pragma once

// The row program: the epilogue of every kernel.
//
// A kernel makes tiles of complete rows, acc[rows][width] in FP32, `ld` floats apart (a multiple of 16, so that whole
// vectors may be read and written; lanes past the width hold anything), 64-byte aligned. While the tile is in L1 it
// calls `run`, which applies the instructions in order to that one accumulator and stores what they say.
//
// Traffic: the outputs and operands once; the tile stays in L1, one pass an instruction, or a chain of cheap ones (with
// AVX-512 and up to 64 columns, one for a chain and the quantization behind it). Floor: two loads and one store of 64
// bytes a cycle.

#include <cstdint>

#include "gnnc/isa.h"

namespace gnnc {

// Mirrored in runtime/row_program/opcodes.py, and a test compares the two.
enum class RowOp : int32_t {
  mul_row = 1,
  add_row = 2,
  mul_col = 3,
  add_col = 4,
  mul_full = 5,
  add_full = 6,
  add_qrow = 7,
  mul_const = 8,
  add_const = 9,
  mul_tensor = 10,
  add_tensor = 11,
  rsub_full = 12,
  div_row = 13,
  div_full = 14,
  div_col = 15,
  relu = 20,
  leaky_relu = 21,
  elu = 22,
  sigmoid = 23,
  tanh = 24,
  gelu = 25,
  gelu_tanh = 26,
  silu = 27,
  exp = 28,
  neg = 29,
  abs = 30,
  square = 31,
  sqrt = 32,
  recip = 33,
  clamp_min = 34,
  clamp_max = 35,
  log = 36,
  softplus = 37,
  rsqrt = 38,
  batch_norm = 40,
  layer_norm = 41,
  l2_normalize = 42,
  softmax = 43,
  log_softmax = 44,
  head_mean = 45,
  window = 46,
  store_f32 = 60,
  store_bf16 = 61,
  quant_row = 62,
  quant_static = 63,
  quant_pow2 = 64,
  amax = 65,
  row_dot = 66,
  store_fp16 = 67,    // on CUDA only: the CPU's kernels know no such instructions
  scale_tensor = 68,  // on CUDA only
};

// `window` turns to the columns a .. a + b of what the kernel made (a a multiple of 16): a gemm with several weights
// has one for each.
struct RowInstruction {
  RowOp op;
  int32_t a, b, c;
};

enum class Scalar : uint8_t { f32, bf16, i8, u8, i64 };

// An operand or an output. A vector of n elements has one row; the stride is in elements.
struct RowView {
  void* data;
  int64_t rows, cols, stride;
  Scalar type;
};

// Checked and prepared once per call by parse_program (csrc/cpu/launch.h), then shared by all threads.
struct RowProgram {
  const RowInstruction* code;
  int64_t length;
  const RowView* operands;
  const float* consts;
  const RowView* outs;
  // Column vectors, padded to whole vectors. An instruction holds the place of its own: batch_norm in c (A, then B at
  // the next multiple of 16), quant_static in b and quant_pow2 in c (inverse scales).
  const float* prepared;
};

// `fetch` asks for what the program will read of the rows r0 .. r0 + rows, before they are computed.
// `run` applies the program to the rows r0 .. r0 + rows, whose values are acc[0 .. rows). Changes acc.
GNNC_EACH_ISA(void fetch(const RowProgram& program, int64_t r0, int rows);
              void run(const RowProgram& program, float* acc, int64_t ld, int64_t r0, int rows, int64_t width);)

}  // namespace gnnc
