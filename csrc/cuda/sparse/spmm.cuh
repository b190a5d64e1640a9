#pragma once

// spmm: out[i, :] = reduce over the edges e of row i of weight(e) * x[col[e], :], then the epilogue.
//
// Layout: x fp32, fp16, bf16, int8, e4m3 or e5m2, rows 16-byte aligned, read in pieces of 16 bytes (columns past the
// width are read but never used); col int32. Sums of int8, and of fp16 and bf16 without weights, use the accumulators
// of product_sum.cuh; max and min of these three types without weights compare pairs of elements (PairExtremes in
// lane_reduce.cuh); everything else is accumulated in FP32 (LaneReduce). In int8 sums with a weight a head, each head
// of x begins on a 16-byte boundary (pack_rows.cuh), so that a piece never spans two heads. Traffic: 4 B of col (+ 4 B
// a weight) and a row of x an edge, the epilogue's outputs a row, 8 B a column and slot of a row that is split. Floor:
// the gather from L1 and L2.
//
// Launch: spmm, or spmm_sliced for rows of more than kMostWhole bytes whose epilogue looks at each column alone, with
// one block a multiprocessor, of as many threads as the kernel is compiled for, and no dynamic shared memory; for
// spmm_staged see its comment. The staging buffer holds slots * Spmm<Config>::kStagedBytes.
//
// Exact: int8 sums without real weights are integers, rounded to FP32 once (a mean is divided in FP32 after that).

#include "sparse/spmm_body.cuh"
#include "sparse/spmm_config.cuh"

namespace gnnc {

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1) spmm(const SpmmArgs a, const Epilogue epilogue) {
  begin_kernel();
  using S = Spmm<Config>;
  using Layout = typename S::Layout;
  __shared__ int32_t next[1];
  using Body = SpmmBody<Config, Epilogue>;
  __shared__ Feed<Layout, Body> feed[Config::kThreads / 32];
  __shared__ __align__(16) typename S::Word rows[S::kWarps][S::kHeld];
  Body body{a, epilogue, rows[threadIdx.x / 32], 0, {}};
  body.sum.clear();
  const Gathered x = whole_rows<Layout>(a.x, a.x_stride);
  open_queues(next, feed[0].runs.preassigned());
  for_runs<Layout>(a.runs, static_cast<const float*>(a.value), x, next, feed[threadIdx.x / 32], body);
}

// spmm_sliced: spmm slice by slice: all blocks traverse the graph once for each slice of columns.
template <class Config, class Epilogue>
__global__ void __launch_bounds__(Sliced<Config>::Config::kThreads, 1)
    spmm_sliced(const SpmmArgs a, const Epilogue epilogue) {
  begin_kernel();
  using S = Sliced<Config>;
  using Layout = typename Spmm<typename S::Config>::Layout;
  using Body = SpmmBody<typename S::Config, Epilogue>;
  __shared__ int32_t next[S::Slices::kCount];  // one queue a slice: no warp waits for others between two slices
  __shared__ Feed<Layout, Body> feed[S::Config::kThreads / 32];
  open_queues(next, feed[0].runs.preassigned());
  Body body{a, epilogue, nullptr, 0, {}, 0};
  body.sum.clear();
#pragma unroll 1
  for (int slice = 0; slice < S::Slices::kCount; ++slice) {
    const Gathered x = S::Slices::of(a.x, a.x_stride, slice);
    body.first_column = slice * S::Slices::kWidth;
    for_runs<Layout>(a.runs, static_cast<const float*>(a.value), x, next + slice, feed[threadIdx.x / 32], body);
  }
}

// spmm_staged: spmm that reads near sources from shared memory (staged.cuh). Launch: as many blocks as runs.share has
// shares, of Staged<Config>::kThreads threads, with Staged<Config>::Window::kBytes of dynamic shared memory. If a row
// has several slices, the epilogue is called slice by slice.
template <class Config, class Epilogue>
__global__ void __launch_bounds__(Staged<Config>::kThreads, 1)
    spmm_staged(const StagedSpmmArgs a, const Epilogue epilogue) {
  begin_kernel();
  using S = Staged<Config>;
  extern __shared__ int4 memory[];
  __shared__ StagedShare share;
  __shared__ typename S::Feed feed[S::kThreads / 32];
  const void* factor = Config::kScale == Scale::row ? static_cast<const void*>(a.x_scale) : a.shift;
  typename S::Window window(memory);
  SpmmBody<typename S::Config, Epilogue, StagedRuns> body{a, epilogue, nullptr, 0, {}, 0};
  body.sum.clear();
#pragma unroll 1
  for (int slice = 0; slice < S::Slices::kCount; ++slice) {
    const Gathered x = S::Slices::of(a.x, a.x_stride, slice);
    body.first_column = slice * S::kWidth;
    for_staged_runs<typename S::Layout>(a.runs, x, factor, window, &share, feed[threadIdx.x / 32], body);
  }
}

}  // namespace gnnc
