#pragma once

// edge_map and message: a small body, written by the lowering, at every edge; kept, or reduced over the edges of a row.
//
// Layout: operands are dense rows of FP32 (or a 16-bit type); the result is FP32, of edges in CSR order. A body is a
// functor that gives one column of one edge's value:
// float operator()(int64_t row, int64_t source, int64_t edge, int column) const.
// Traffic: what the body reads an edge (neighbouring columns share sectors), and 4 B of col; edge_map 4 B of rows and
// 4 kWidth B of result an edge, message 4 kWidth B of result a row and 8 kWidth B a part of a row that is split.
// Floor: these bytes at copy bandwidth, or, where the body reads rows of the sources, the gather of them.
//
// Launch: edge_map with a thread for every element of the result, blocks of 256. message with a group of kLanes threads
// for every run of the run table (runs.cuh), blocks of 256. staging: slots * kWidth floats.

#include "common/row_steps.cuh"
#include "sparse/runs.cuh"
#include "sparse/split_rows.cuh"

namespace gnnc {

struct EdgeMapArgs {
  const int32_t* rows;  // [E], destination of every edge
  const int32_t* col;   // [E]
  float* out;           // [E, kWidth]
  int64_t edges;
};

template <int kWidth, class Body>
__global__ void __launch_bounds__(256) edge_map(EdgeMapArgs args, Body body) {
  begin_kernel();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int64_t edge = index / kWidth;
  if (edge >= args.edges) return;
  args.out[index] = body(args.rows[edge], args.col[edge], edge, static_cast<int>(index % kWidth));
}

struct MessageArgs {
  Runs runs;
  Staging staging;
  float* out;
  int64_t count;  // of runs
};

enum class Join { sum, mean, max, min };

template <Join kJoin>
__device__ inline float join_start() {
  if constexpr (kJoin == Join::max) return -__int_as_float(0x7f800000);
  if constexpr (kJoin == Join::min) return __int_as_float(0x7f800000);
  return 0.0f;
}
// A NaN stays one.
template <Join kJoin>
__device__ inline float join(float a, float b) {
  if constexpr (kJoin == Join::max) return a > b || a != a ? a : b;
  if constexpr (kJoin == Join::min) return a < b || a != a ? a : b;
  return a + b;
}
template <Join kJoin>
__device__ inline float join_end(float total, int64_t count) {
  if (count == 0) return 0.0f;
  return kJoin == Join::mean ? total / static_cast<float>(count) : total;
}

template <int kWidth, int kStride, int kLanes, Join kJoin, class Body>
__global__ void __launch_bounds__(256) message(MessageArgs args, Body body) {
  begin_kernel();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (256 / kLanes) + threadIdx.x / kLanes;
  if (index >= args.count) return;
  const Run run = load_record(args.runs.run + index);
  auto* const staging = static_cast<float*>(args.staging.memory);
  for (int32_t which = 0; which < run.count; ++which) {
    const Entry entry = load_record(args.runs.entry + run.first + which);
    for (int column = threadIdx.x % kLanes; column < kWidth; column += kLanes) {
      float total = join_start<kJoin>();
      for (int64_t edge = entry.first; edge < entry.first + entry.count; ++edge) {
        total = join<kJoin>(total, body(entry.row, args.runs.col[edge], edge, column));
      }
      if (run.slot >= 0) {
        staging[static_cast<int64_t>(run.slot) * kWidth + column] = total;
      } else {
        args.out[static_cast<int64_t>(entry.row) * kStride + column] = join_end<kJoin>(total, entry.count);
      }
    }
  }
  if (run.slot < 0) return;
  end_part<kLanes>(args.runs.split, args.staging, run.slot,
                   [&](const Split& split, int32_t slot, int32_t apart, int32_t count, bool whole) {
                     const int64_t edges = args.runs.rowptr[split.row + 1] - args.runs.rowptr[split.row];
                     for (int column = threadIdx.x % kLanes; column < kWidth; column += kLanes) {
                       const auto load = [&](int32_t which) {
                         return __ldcg(staging + static_cast<int64_t>(slot + which * apart) * kWidth + column);
                       };
                       float total = join_start<kJoin>();
                       each_part<8>(count, join_start<kJoin>(), load,
                                    [&](float part) { total = join<kJoin>(total, part); });
                       if (whole) {
                         args.out[static_cast<int64_t>(split.row) * kStride + column] = join_end<kJoin>(total, edges);
                       } else {
                         staging[static_cast<int64_t>(slot) * kWidth + column] = total;
                       }
                     }
                   });
}

}  // namespace gnnc
