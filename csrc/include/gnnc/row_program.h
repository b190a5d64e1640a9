#pragma once

// The row program: the epilogue of every kernel, an array of instructions on complete rows of the kernel's result.
//
// A kernel computes tiles of complete rows, acc[rows][width] in FP32, `ld` floats apart (a multiple of 16, so that
// whole vectors may be read and written; lanes past the width hold anything), 64-byte aligned. While the tile is in L1,
// the kernel calls `run`, which applies the instructions in order to that one accumulator and stores their outputs.
//
// Traffic: the outputs and operands once; the tile stays in L1, one pass an instruction, or a chain of cheap ones (with
// AVX-512 and up to 64 columns, one for a chain and the quantization after it). Floor: two loads and one store of 64
// bytes a cycle.

#include <cstdint>

#include "gnnc/isa.h"

namespace gnnc {

// Opcodes, mirrored in runtime/row_program/opcodes.py; a test compares the two files.
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
  mask_bits = 16,
  elu_backward = 17,
  leaky_relu_backward = 18,
  threshold_backward = 19,
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
  mul_shifted = 47,
  add_scaled = 48,
  store_f32 = 60,
  store_bf16 = 61,
  quant_row = 62,
  quant_static = 63,
  quant_pow2 = 64,
  amax = 65,
  row_dot = 66,
  store_fp16 = 67,  // only in CUDA epilogues: the CPU's kernels have no such instruction
  scale_tensor = 68,
  store_bits = 69,
  col_sum = 70,
  div_tensor = 71,  // only in CUDA epilogues
  fp16_scale = 72,  // only in CUDA epilogues
  stochastic = 73,  // the next quantization rounds stochastically
};

// An instruction. The instructions after a `window` apply to the columns a .. a + b of the kernel's result (a a
// multiple of 16): a gemm with several weights has one window for each weight.
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
  const float* scales = nullptr;  // [rows], of an int8 matrix that an instruction reads as floats
};

// A row program, checked and prepared once per call by parse_program (csrc/cpu/launch.h), then shared by all threads.
struct RowProgram {
  const RowInstruction* code;
  int64_t length;
  const RowView* operands;
  const float* consts;
  const RowView* outs;
  // Prepared column vectors, padded to whole vectors. An instruction holds the offset of its vector in this array:
  // batch_norm in c (A, then B at the next multiple of 16), quant_static in b and quant_pow2 in c (inverse scales).
  const float* prepared;
  // Partial sums of col_sum instructions: one vector of columns for each kSumRows rows, from 16 * b floats on.
  float* sums;
  int64_t row_step;  // threads share the rows at multiples of this: kSumRows if there is a col_sum, else 1
};

constexpr int64_t kSumRows = 48;  // rows of a partial sum, so that sums have the same bits at any thread count

// `fetch` prefetches the operands that the program will read for the rows r0 .. r0 + rows, before these rows are
// computed. `run` applies the program to the rows r0 .. r0 + rows, whose values are acc[0 .. rows), and changes acc.
GNNC_EACH_ISA(void fetch(const RowProgram& program, int64_t r0, int rows);
              void run(const RowProgram& program, float* acc, int64_t ld, int64_t r0, int rows, int64_t width);)

}  // namespace gnnc
