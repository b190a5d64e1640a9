#pragma once

// The unit of work of the sparse kernels: a run, some consecutive edges of one row (GNNAdvisor's neighbour group).
//
// Most runs are whole rows. A row with more edges than a limit is split into several, whose partial results go to a
// staging buffer, one slot each, and are combined in order afterwards: no atomics on data, equal bits in every call.
// Runs are in the order of their edges. A block of threads takes a chunk of consecutive runs with about equal numbers
// of edges, so that neighbouring rows, whose sources often are neighbours, share the block's L1 cache; in a block,
// whichever warp is free takes the next runs.

#include "types.cuh"

namespace gnnc {

struct Runs {
  const int32_t* col;    // [E], 16-byte aligned
  const int64_t* begin;  // [runs + 1], the first edge of every run
  const int2* place;     // [runs], (row, slot in the staging buffer or -1 where the run is all of its row)
  const int32_t* chunk;  // [blocks + 1], the first run of every block
  const int2* split;     // [splits], (first run, number of runs) of every row that is split
  int64_t edges;         // E
};

struct Run {
  int64_t begin;
  int32_t count;  // edges
  int32_t row;    // -1: none
  int32_t slot;
};

__device__ inline Run run_at(const Runs& runs, int32_t index, int32_t last) {
  if (index >= last) return Run{0, 0, -1, -1};
  const int64_t begin = runs.begin[index];
  const int2 place = runs.place[index];
  return Run{begin, static_cast<int32_t>(runs.begin[index + 1] - begin), place.x, place.y};
}

// Hands out the runs of this block, kSets neighbouring ones at a time to a warp.
template <int kSets>
struct RunQueue {
  int32_t* next;  // shared by the block
  int32_t last;

  __device__ RunQueue(const Runs& runs, int32_t* shared) : next(shared), last(runs.chunk[blockIdx.x + 1]) {
    if (threadIdx.x == 0) *next = runs.chunk[blockIdx.x];
    __syncthreads();
  }

  // The index of the first of the next runs, the same in the whole warp.
  __device__ int32_t take() {
    int32_t first = 0;
    if (threadIdx.x % 32 == 0) first = atomicAdd(next, kSets);
    return __shfl_sync(0xffffffffu, first, 0);
  }
};

// Where a run's edges lie for a group whose threads read four columns of `col` at once: edges count from the last
// multiple of four before the run.
struct EdgeWindow {
  int64_t base;   // edge 0 of the window, a multiple of four
  int32_t head;   // first edge of the run
  int32_t end;    // past the last
  int32_t limit;  // how many edges from base on exist at all

  __device__ EdgeWindow(const Run& run, int64_t edges)
      : base(run.begin & ~int64_t{3}), head(static_cast<int32_t>(run.begin & 3)), end(head + run.count) {
    if (run.count == 0) end = 0;
    const int64_t left = edges - base;
    limit = left < 0x7fffffff ? static_cast<int32_t>(left) : 0x7fffffff;
  }
  __device__ bool holds(int32_t edge) const { return edge >= head && edge < end; }
};

// Reads that are used once and should not push gathered rows out of L1.
__device__ inline int4 load_once(const int4* p) {
  int4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Four elements of 4 bytes an edge, from edge `at` of the window on; 0 where that is past its end.
template <class T>
__device__ inline void load_edges(const T* array, const EdgeWindow& window, int32_t at, T (&out)[4]) {
  static_assert(sizeof(T) == 4, "an edge is 4 bytes");
  const T* p = array + window.base + at;
  if (at < window.end && at + 4 <= window.limit) {
    const int4 v = load_once(reinterpret_cast<const int4*>(p));
    const int32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = *reinterpret_cast<const T*>(&words[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = at + i < window.end ? p[i] : T{};
}

}  // namespace gnnc
