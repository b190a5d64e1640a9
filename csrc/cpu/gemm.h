#pragma once

// gemm: acc = x @ w^T in FP32 or int8, then the row program.
//
// Several weights produce their columns side by side, each from a multiple of 16 on, and x is read once for all
// weights.
//
// Layout: x [M, K] with rows x_stride elements apart. w is packed once per call into panels of up to 4 vectors of
// columns, one panel after the other: for each k (int8 with VNNI: each 4 k) the values of the panel's columns. The int8
// path quantizes a block of rows into a buffer in L1 (u8 = q xor 0x80; the sums start at -128 * colsum(w)), multiplies
// the block with every panel, and passes complete FP32 rows to the row program: q, sums and accumulators never leave
// the cache. Rows that are mostly zeros (counts of words) are multiplied one at a time, only by their nonzero elements
// (gemm_zeros.isa.h).
// With AMX, bf16 products are those of tiles (gemm_tiles.isa.h), else with AVX512_BF16 those of vdpbf16ps
// (gemm_dots.isa.h): a dword of the packed weight is a pair of bf16 values. Traffic: x once (4 M K bytes in FP32), w 4
// O K bytes read and packed, then from L1 or L2 once per tile of rows; the outputs of the program once. Floor: the
// larger of that and 2 x 64 products of bytes (16 of floats, 32 of bf16 values, 512 in tiles) a cycle and core.

#include <cstdint>

#include "gnnc/isa.h"
#include "gnnc/row_program.h"

namespace gnnc {

enum class GemmMode { f32 = 0, i8 = 1, bf16 = 3 };

// One weight of a gemm.
struct GemmWeight {
  const float* data;  // w(o, k) = data[o * stride_o + k * stride_k], one of the strides 1
  int64_t stride_o, stride_k;
  int64_t width;  // number of columns of the result
  int64_t first;  // first column of the result, a multiple of 16
};

struct GemmArgs {
  const void* x;
  Scalar x_type;
  int64_t x_stride;
  const float* x_scale;    // null: int8 mode computes a scale for each row from its maximum
  bool x_scale_is_single;  // one scale for all rows; otherwise one per row
  const GemmWeight* weights;
  int64_t weight_count;
  int64_t rows, depth, width;  // M, K, O: number of columns up to the last column of the last weight
  GemmMode mode;
  bool tiles;       // bf16 products with AMX
  bool dots;        // bf16 products with vdpbf16ps
  void* packed;     // packed weight, packed_bytes long
  float* w_scale;   // [padded width]
  int32_t* w_init;  // [padded width], initial values of the integer sums
  const RowProgram* program;
};

#define GNNC_DECLARE_GEMM                                                       \
  int64_t gemm_packed_bytes(const GemmArgs& args);                              \
  int64_t gemm_strips(const GemmArgs& args); /* columns, packed separately */   \
  void gemm_pack(const GemmArgs& args, int64_t strip_begin, int64_t strip_end); \
  int64_t gemm_scratch_bytes(const GemmArgs& args);                             \
  int64_t gemm_block_rows(const GemmArgs& args);                                \
  void gemm_rows(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* scratch);

GNNC_EACH_ISA(GNNC_DECLARE_GEMM)

#undef GNNC_DECLARE_GEMM

}  // namespace gnnc
