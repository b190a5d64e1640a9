#pragma once

// Streams the edges of a run through a warp, a step (four edges a thread) at a time. The columns of 32 edges are read
// at once, one a thread, two blocks of 32 ahead, and shuffled to the threads that gather. Rows that end within a step
// cost one masked turn each; all else runs without a test of single edges. What hides the latency of a gather is the
// other warps: a kernel should leave room for 24 or more on an SM.
//
// Body::Extra is what else is loaded an edge (weights, scales). A body has, all called by the whole warp:
//   set_pass(pass)                            before the edges are gone through for the columns of a pass
//   load(extra, run, begin, source, exists)   starts the loads of this thread's edges of the step from `begin` on,
//   which
//                                             are begin + Layout::edge(0 .. 3); bits of exists
//   begin(row, run)                           before the first edge of a row
//   add<kMasked>(x, extra, mask)              adds four edges; with kMasked only those whose bit of mask is set
//   add_one(x)                                instead, where Body::kSingly: adds one edge, zeros where it does not
//   count finish(row, run)                          stores and clears the sums of a row, or of the run's part of it

#include "rows.cuh"
#include "runs.cuh"

namespace gnnc {

// The sources of a run's edges.
template <class Layout>
struct Sources {
  static constexpr int kStep = Layout::kStep;
  static constexpr int kBlock = kStep < 32 ? 32 : kStep;  // edges read at once
  static constexpr int kWords = kBlock / 32;

  const int32_t* next;
  int32_t left;
  int32_t now[kWords], soon[kWords], later[kWords];

  __device__ Sources(const Runs& runs, const Run& run)
      : next(runs.col + run.base + Layout::lane()), left(run.end - Layout::lane()) {
    read(now);
    read(soon);
    read(later);
  }

  // Of the step from `begin` on; steps come in order.
  __device__ __forceinline__ void get(int32_t begin, int32_t (&source)[4]) {
    if (begin % kBlock == 0 && begin > 0) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) now[w] = soon[w], soon[w] = later[w];
      read(later);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // In a step of 64 or 128 edges, each of a thread's edges is in a word known here.
      const int word = kWords == 1 ? 0 : i * kWords / 4;
      source[i] = __shfl_sync(0xffffffffu, now[word], begin + Layout::edge(i));
    }
  }

 private:
  __device__ __forceinline__ void read(int32_t (&words)[kWords]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      words[w] = left > 0 ? load_once(next) : 0;
      next += 32;
      left -= 32;
    }
  }
};

// Four edges a thread, on their way from memory.
template <class Layout, class Body>
struct Step {
  uint4 data[4];
  typename Body::Extra extra;
};

template <class Layout, class Body>
__device__ __forceinline__ void stream(const Runs& runs, const Run& run, const char* x, uint32_t x_stride, int pass,
                                       Body& body) {
  // Threads past the row's last piece read that one again: no test for each load.
  const char* base = x + min(pass * Layout::kPieces + Layout::piece(), Layout::kTotal - 1) * 16;
  Sources<Layout> sources(runs, run);
  int32_t row = run.row, from = 0;
  int32_t first_end = row, ends = 0;  // the ends of the next 32 rows, one a thread
  const auto end_of_row = [&] {
    if (row == run.row || row - first_end == 32) {
      first_end = row;
      ends = run.end_of(runs, min(row + Layout::lane(), run.row_end - 1));
    }
    return __shfl_sync(0xffffffffu, ends, row - first_end);
  };
  if (row == run.row_end) return;
  int32_t row_end = end_of_row();
  body.begin(row, run);

  const auto fetch = [&](Step<Layout, Body>& step, int32_t begin) {
    int32_t source[4];
    sources.get(begin, source);
    uint32_t exists = 15u;
    if (begin + Layout::kStep <= run.end) {
#pragma unroll
      for (int i = 0; i < 4; ++i) step.data[i] = gather(base, source[i], x_stride);
    } else {
      exists = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        step.data[i] = make_uint4(0, 0, 0, 0);
        if (begin + Layout::edge(i) < run.end) {
          step.data[i] = gather(base, source[i], x_stride);
          exists |= 1u << i;
        }
      }
    }
    body.load(step.extra, run, begin, source, exists);
  };
  Step<Layout, Body> step, ahead;
  if constexpr (Body::kAhead) fetch(ahead, 0);

#pragma unroll 1
  for (int32_t begin = 0;; begin += Layout::kStep) {
    const int32_t step_end = begin + Layout::kStep;
    if constexpr (Body::kAhead) {
      step = ahead;
      if (step_end < run.end) fetch(ahead, step_end);
    } else {
      fetch(step, begin);
    }
    const uint4(&data)[4] = step.data;
    const typename Body::Extra& extra = step.extra;
    if (from <= begin && row_end > step_end) {
      body.template add<false>(data, extra, 15u);
      continue;
    }
    from = max(from, begin);
#pragma unroll 1
    while (true) {
      const int32_t to = min(row_end, step_end);
      if constexpr (Body::kSingly) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // a thread's i-th edge is one of these, whichever the thread
          const int32_t low = begin + i * Layout::kSlots, high = low + Layout::kSlots;
          if (from >= high || to <= low) continue;
          const int32_t edge = begin + Layout::edge(i);
          body.add_one((from <= low && to >= high) || (edge >= from && edge < to) ? data[i] : make_uint4(0, 0, 0, 0));
        }
      } else if (from < to) {
        uint32_t mask = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int32_t edge = begin + Layout::edge(i);
          mask |= edge >= from && edge < to ? 1u << i : 0u;
        }
        body.template add<true>(data, extra, mask);
      }
      from = to;
      if (row_end > step_end) break;
      body.finish(row, run);
      if (++row == run.row_end) return;
      row_end = end_of_row();
      body.begin(row, run);
    }
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
