#pragma once

// map: acc = x, then the row program. For row-wise operations that cannot be fused into a gemm or an spmm.
//
// Layout: x [M, F] fp32, bf16 or int8 with rows x_stride elements apart; int8 rows may have a scale.
// Traffic: x and the operands and outputs of the program, once. Floor: the bandwidth of memory.

#include <cstdint>

#include "gnnc/isa.h"
#include "gnnc/row_program.h"

namespace gnnc {

struct MapArgs {
  const void* x;
  Scalar x_type;
  int64_t x_stride;
  const float* x_scale;  // scales of int8 rows, or null
  int64_t scale_stride;  // 0: one scale for all rows
  int64_t rows, width;
  const RowProgram* program;
};

constexpr int64_t kMapTileFloats = 2048;  // floats of a tile: 8 KB

inline int64_t map_stride(const MapArgs& args) { return (args.width + 15) / 16 * 16; }
inline int64_t map_tile_rows(const MapArgs& args) {
  const int64_t rows = kMapTileFloats / (map_stride(args) + 1);
  return rows < 1 ? 1 : rows > 32 ? 32 : rows;
}

// Computes the rows row_begin ... row_end - 1. tile: a buffer of map_tile_rows * map_stride floats.
GNNC_EACH_ISA(void map_rows(const MapArgs& args, int64_t row_begin, int64_t row_end, float* tile);)

}  // namespace gnnc
