#pragma once

// Streams the edges of a run through a warp: rows of x are gathered a step (four edges a thread) at a time, and the
// columns of the two next steps are under way meanwhile. Rows that end within a step cost one masked turn each; all
// else runs without a test of single edges.
//
// Body::Extra is what else is loaded an edge (weights, scales). A body has, all called by the whole warp:
//   load(extra, run, at, source, exists)   starts the loads of this thread's four edges; bits of exists
//   add<kMasked>(x, extra, mask)           adds them; with kMasked only those whose bit of mask is set
//   set_pass(pass)                         before the edges are gone through for the columns of a pass
//   begin(row, run)                        before the first edge of a row
//   finish(row, run)                       stores and clears the sums of a row, or of the run's part of it

#include "rows.cuh"
#include "runs.cuh"

namespace gnnc {

template <class Layout, class Body>
__device__ inline void stream(const Runs& runs, const Run& run, const char* x, uint32_t x_stride, int pass,
                              Body& body) {
  constexpr uint32_t kAll = 0xffffffffu;
  // Threads past the row's last piece read that one again: no test for each load.
  const char* base = x + min(pass * Layout::kPieces + Layout::piece(), Layout::kTotal - 1) * 16;
  int32_t at = Layout::slot() * 4;
  int32_t source[4], following[4];
  load_edges(runs.col, run, at, runs.edges, source);
  load_edges(runs.col, run, at + Layout::kStep, runs.edges, following);

  int32_t row = run.row, from = run.head;
  int32_t first_end = row, ends = 0;  // the ends of the next 32 rows, one a thread
  const auto end_of_row = [&] {
    if (row == run.row_end) return 0x7fffffff;
    if (row == run.row || row - first_end == 32) {
      first_end = row;
      ends = run.end_of(runs, min(row + Layout::lane(), run.row_end - 1));
    }
    return __shfl_sync(kAll, ends, row - first_end);
  };
  int32_t row_end = end_of_row();
  body.begin(row, run);

#pragma unroll 1
  for (int32_t step_end = Layout::kStep; row < run.row_end; step_end += Layout::kStep) {
    uint4 data[4];
    typename Body::Extra extra;
    if (step_end <= run.end) {
#pragma unroll
      for (int i = 0; i < 4; ++i) data[i] = gather(base, source[i], x_stride);
      body.load(extra, run, at, source, 15u);
    } else {
      uint32_t exists = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        data[i] = make_uint4(0, 0, 0, 0);
        if (at + i < run.end) {
          data[i] = gather(base, source[i], x_stride);
          exists |= 1u << i;
        }
      }
      body.load(extra, run, at, source, exists);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) source[i] = following[i];
    load_edges(runs.col, run, at + 2 * Layout::kStep, runs.edges, following);

    if (from <= step_end - Layout::kStep && row_end > step_end) {
      body.template add<false>(data, extra, 15u);
    } else {
#pragma unroll 1
      while (true) {
        const int32_t to = min(row_end, step_end);
        if (from < to) {
          uint32_t mask = 0;
#pragma unroll
          for (int i = 0; i < 4; ++i) mask |= at + i >= from && at + i < to ? 1u << i : 0u;
          body.template add<true>(data, extra, mask);
        }
        from = to;
        if (row_end > step_end) break;
        body.finish(row, run);
        if (++row == run.row_end) break;
        row_end = end_of_row();
        body.begin(row, run);
      }
    }
    from = step_end;
    at += Layout::kStep;
  }
}

// All runs of this block, one at a time to a warp; `next` is shared by the block.
template <class Layout, class Body>
__device__ inline void for_runs(const Runs& runs, const char* x, uint32_t x_stride, int32_t* next, Body& body) {
  RunQueue queue(runs, next);
  int32_t index = queue.take();
  RunRecord record(runs, index, queue.last);
  while (index < queue.last) {
    const Run run(record);
    index = queue.take();
    record = RunRecord(runs, index, queue.last);
    if constexpr (Layout::kPasses == 1) {
      stream<Layout>(runs, run, x, x_stride, 0, body);
    } else {
      for (int32_t row = run.row; row < run.row_end; ++row) {
        const Run one = run.only(runs, row);
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
          body.set_pass(pass);
          stream<Layout>(runs, one, x, x_stride, pass, body);
        }
      }
    }
  }
}

}  // namespace gnnc
