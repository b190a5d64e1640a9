#pragma once

// row_scale: the scale of each row of row_pow2 values, base / 2^shift (gnnc.row_scale). begin_scale sets the scale of a
// whole tensor to zero, before the epilogue of another kernel raises it (step::scale_tensor).
//
// Layout: dense vectors. Traffic: a byte and four bytes a row. Floor: these bytes at copy bandwidth.
//
// Launch: begin_scale with one block; row_scale with a thread for each row, in blocks of 256.

#include "common/types.cuh"

namespace gnnc {

struct BeginScaleArgs {
  float* scale;
};

struct RowScaleArgs {
  const float* base;
  const uint8_t* shift;
  float* out;
  int64_t rows;
};

__global__ void __launch_bounds__(32) begin_scale(BeginScaleArgs args) {
  begin_kernel();
  if (threadIdx.x == 0) *args.scale = 0.0f;
}

__global__ void __launch_bounds__(256) row_scale(RowScaleArgs args) {
  begin_kernel();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (row >= args.rows) return;
  const float power = __int_as_float((127 - static_cast<int>(args.shift[row])) << 23);
  args.out[row] = __fmul_rn(__ldg(args.base), power);
}

}  // namespace gnnc
