#pragma once

// rowmap: applies an epilogue to the rows of one tensor. A group of Config::kLanes threads processes one row.
// rowmap_sums is for epilogues with a sum over all rows (step::col_sum): a block processes its share of the rows, adds
// up what its groups have summed in a fixed order, and stores the sums of its share, which sum_parts adds up.
//
// Layout: x fp32, fp16, bf16, int8, e4m3 or e5m2, rows Config::kStride elements apart; row_tile.cuh describes the
// register layout of a row, row_steps.cuh the memory layouts of the operands and outputs of the epilogue. Traffic: x
// once, and the operands and outputs of the epilogue, once. Floor: these bytes at copy bandwidth.
//
// Launch: blocks of 256 threads; one for every 256 / kLanes rows, or `shares` of rowmap_sums.

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

struct RowmapSumsArgs {
  const void* x;
  int64_t rows;
  float* part;  // [shares, kWidth]
  int64_t shares;
};

template <class Config, class Epilogue>
__global__ void __launch_bounds__(256) rowmap_sums(RowmapSumsArgs args, Epilogue epilogue) {
  begin_kernel();
  constexpr int kGroups = 256 / Config::kLanes, kWidth = Config::kWidth;
  __shared__ float sums[kGroups * kWidth];
  const int64_t begin = args.rows * blockIdx.x / args.shares, end = args.rows * (blockIdx.x + 1) / args.shares;
  const int group = static_cast<int>(threadIdx.x) / Config::kLanes;
  SummedTile<RowTile<kWidth, Config::kLanes>> tile;
#pragma unroll 1
  for (int64_t row = begin + group; row < end; row += kGroups) {
    tile.clear();
    const auto* from = static_cast<const typename Config::Type*>(args.x) + row * Config::kStride;
    step::with_row<Config::kStride>(tile, from, [&](int i, float x) { tile.v[i] = x; });
    epilogue(tile, row);
  }
  store_sums<kGroups>(tile, group, sums, args.part + static_cast<int64_t>(blockIdx.x) * kWidth);
}

}  // namespace gnnc
