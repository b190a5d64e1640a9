#pragma once

// column_sum: the sums over all rows of values that a functor computes: of the rows of a matrix (the gradient of a
// bias), or of a body at every edge (gnnc.edge_sum). A block adds up its share of the rows and stores the FP32 sums,
// which sum_parts adds up: no atomics, the same bits in every call.
//
// The threads of a block lie side by side along the columns, and several rows below each other. A thread adds up
// kRun of its rows before it adds them to its total, so that the terms of a sum differ less in size.
//
// Layout: as the functor reads it: float operator()(int64_t row, int column) const.
// Traffic: what the functor reads, once; 4 kWidth B a share out. Floor: these bytes at copy bandwidth.
//
// Launch: blocks of 256 threads, `shares` of them.

#include "common/row_steps.cuh"

namespace gnnc {

struct ColumnSumArgs {
  float* part;  // [shares, kWidth]
  int64_t rows;
  int64_t shares;
};

// Returns the columns that the threads of a block cover at once: a power of two, at most all threads.
__host__ __device__ constexpr int columns_at_once(int width) {
  int columns = 1;
  while (columns < width && columns < 256) columns *= 2;
  return columns;
}

template <int kWidth, class Value>
__global__ void __launch_bounds__(256) column_sum(ColumnSumArgs args, Value value) {
  begin_kernel();
  constexpr int kColumns = columns_at_once(kWidth), kRows = 256 / kColumns, kRun = 8;
  __shared__ float sums[256];
  const int64_t begin = args.rows * blockIdx.x / args.shares, end = args.rows * (blockIdx.x + 1) / args.shares;
  const int above = static_cast<int>(threadIdx.x) / kColumns;
#pragma unroll 1
  for (int first = 0; first < kWidth; first += kColumns) {
    const int column = first + static_cast<int>(threadIdx.x) % kColumns;
    float total = 0.0f;
    if (column < kWidth) {
#pragma unroll 1
      for (int64_t row = begin + above; row < end; row += kRun * kRows) {
        float run = 0.0f;
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          if (row + i * kRows < end) run += value(row + i * kRows, column);
        }
        total += run;
      }
    }
    sums[threadIdx.x] = total;
    __syncthreads();
    if (above == 0 && column < kWidth) {
#pragma unroll 8
      for (int i = 1; i < kRows; ++i) total += sums[i * kColumns + threadIdx.x];
      args.part[static_cast<int64_t>(blockIdx.x) * kWidth + column] = total;
    }
    __syncthreads();
  }
}

}  // namespace gnnc
