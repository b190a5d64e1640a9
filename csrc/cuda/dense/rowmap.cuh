#pragma once

// rowmap: applies an epilogue to the rows of one tensor. A group of Config::kLanes threads processes one row.
//
// Layout: x fp32, fp16 or bf16, rows Config::kStride elements apart; row_tile.cuh describes the register layout of a
// row, row_steps.cuh the memory layouts of the operands and outputs of the epilogue.
// Traffic: x once, and the operands and outputs of the epilogue, once. Floor: these bytes at copy bandwidth.
//
// Launch: blocks of 256 threads; one for every 256 / kLanes rows.

#include "common/row_steps.cuh"

namespace gnnc {

struct RowmapArgs {
  const void* x;
  int64_t rows;
};

template <class T, int kWidth_, int64_t kStride_, int kLanes_>
struct RowmapConfig {
  using Type = T;
  static constexpr int kWidth = kWidth_, kLanes = kLanes_;
  static constexpr int64_t kStride = kStride_;
};

template <class Config, class Epilogue>
__global__ void __launch_bounds__(256) rowmap(RowmapArgs args, Epilogue epilogue) {
  begin_kernel();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (256 / Config::kLanes) + threadIdx.x / Config::kLanes;
  if (row >= args.rows) return;
  RowTile<Config::kWidth, Config::kLanes> tile;
  const auto* from = static_cast<const typename Config::Type*>(args.x) + row * Config::kStride;
  step::with_row<Config::kStride>(tile, from, [&](int i, float x) { tile.v[i] = x; });
  epilogue(tile, row);
}

}  // namespace gnnc
