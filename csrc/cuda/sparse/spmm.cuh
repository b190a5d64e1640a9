#pragma once

// spmm: out[i, :] = reduce over the edges e of row i of weight(e) * x[col[e], :], then the epilogue.
//
// Layout: x fp32, fp16, bf16 or int8, rows 16-byte aligned, read in pieces of 16 bytes (what is past the width is read
// but never used); col int32. Sums of int8, and of fp16 and bf16 without weights, are those of product_sum.cuh,
// extremes of all three without weights those of pairs of elements (PairExtremes in lane_reduce.cuh), all else is FP32
// (LaneReduce). Where sums of int8 have a weight a head, each head of x begins on 16 bytes (pack_rows.cuh), so that a
// piece lies in one. Traffic: 4 B of col (+ 4 B a weight) and a row of x an edge, the epilogue's outputs a row, 8 B a
// column and slot of a row that is split. Floor: the gather from L1 and L2.
//
// Launch: spmm, or spmm_sliced for rows of more than kMostWhole bytes whose epilogue looks at each column alone, with
// one block of as many threads as they are compiled for a multiprocessor, no dynamic shared memory; spmm_staged as it
// says. staging: slots * Spmm<Config>::kStagedBytes.
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
  open_queues(next, feed[0].runs.dealt());
  for_runs<Layout>(a.runs, static_cast<const float*>(a.value), x, next, feed[threadIdx.x / 32], body);
}

// As spmm, slice by slice: all blocks go through the graph once for each.
template <class Config, class Epilogue>
__global__ void __launch_bounds__(Sliced<Config>::Config::kThreads, 1)
    spmm_sliced(const SpmmArgs a, const Epilogue epilogue) {
  begin_kernel();
  using S = Sliced<Config>;
  using Layout = typename Spmm<typename S::Config>::Layout;
  using Body = SpmmBody<typename S::Config, Epilogue>;
  __shared__ int32_t next[S::Slices::kCount];  // of each slice its own: no warp waits for the others between two
  __shared__ Feed<Layout, Body> feed[S::Config::kThreads / 32];
  open_queues(next, feed[0].runs.dealt());
  Body body{a, epilogue, nullptr, 0, {}, 0};
  body.sum.clear();
#pragma unroll 1
  for (int slice = 0; slice < S::Slices::kCount; ++slice) {
    const Gathered x = S::Slices::of(a.x, a.x_stride, slice);
    body.first_column = slice * S::Slices::kWidth;
    for_runs<Layout>(a.runs, static_cast<const float*>(a.value), x, next + slice, feed[threadIdx.x / 32], body);
  }
}

// As spmm, with near sources from shared memory. Launch: runs.share of blocks of Staged<Config>::kThreads threads, with
// Staged<Config>::Window::kBytes of dynamic shared memory. A row of several slices reaches the epilogue slice by slice.
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
