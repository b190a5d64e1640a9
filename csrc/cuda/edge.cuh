#pragma once

// edge_map and message: a small body, written by the lowering, at every edge; kept, or reduced over the edges of a row.
//
// Layout: operands are dense rows of FP32 (or a 16-bit type); a body is a functor that gives one column of one edge's
// value: float operator()(int64_t row, int64_t source, int64_t edge, int column) const.
// Traffic: what the body reads an edge (neighbouring columns share sectors), the result once.
//
// Launch: edge_map with a thread for every element of the result, blocks of 256. message with a group of kLanes threads
// for every run of the run table (runs.cuh), blocks of 256; then message_combine with a block of 256 for every row that
// is split. staging: slots * kWidth floats.

#include "row_steps.cuh"
#include "runs.cuh"

namespace gnnc {

struct EdgeMapArgs {
  const int32_t* rows;  // [E], destination of every edge
  const int32_t* col;   // [E]
  float* out;           // [E, kWidth]
  int64_t edges;
};

template <int kWidth, class Body>
__global__ void __launch_bounds__(256) edge_map(EdgeMapArgs args, Body body) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int64_t edge = index / kWidth;
  if (edge >= args.edges) return;
  args.out[index] = body(args.rows[edge], args.col[edge], edge, static_cast<int>(index % kWidth));
}

struct MessageArgs {
  Runs runs;
  float* staging;
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
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (256 / kLanes) + threadIdx.x / kLanes;
  if (index >= args.count) return;
  const Runs& runs = args.runs;
  const int2 place = runs.place[index];
  const int64_t last = runs.begin[index + 1];
  const int64_t row_end = place.y < 0 ? runs.place[index + 1].x : place.x + 1;
  int64_t begin = runs.begin[index];
  for (int64_t row = place.x; row < row_end; ++row) {
    const int64_t end = place.y < 0 ? runs.rowptr[row + 1] : last;
    for (int column = threadIdx.x % kLanes; column < kWidth; column += kLanes) {
      float total = join_start<kJoin>();
      for (int64_t edge = begin; edge < end; ++edge) {
        total = join<kJoin>(total, body(row, runs.col[edge], edge, column));
      }
      if (place.y >= 0) {
        args.staging[static_cast<int64_t>(place.y) * kWidth + column] = total;
      } else {
        args.out[row * kStride + column] = join_end<kJoin>(total, end - begin);
      }
    }
    begin = end;
  }
}

template <int kWidth, int kStride, Join kJoin>
__global__ void __launch_bounds__(256) message_combine(MessageArgs args) {
  const int2 split = args.runs.split[blockIdx.x];
  const int2 first = args.runs.place[split.x];
  const int64_t count = args.runs.begin[split.x + split.y] - args.runs.begin[split.x];
  for (int column = threadIdx.x; column < kWidth; column += 256) {
    float total = join_start<kJoin>();
    for (int64_t slot = first.y; slot < first.y + split.y; ++slot) {
      total = join<kJoin>(total, args.staging[slot * kWidth + column]);
    }
    args.out[static_cast<int64_t>(first.x) * kStride + column] = join_end<kJoin>(total, count);
  }
}

}  // namespace gnnc
