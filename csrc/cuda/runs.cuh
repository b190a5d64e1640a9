#pragma once

// The unit of work of the sparse kernels: a run of consecutive edges (GNNAdvisor's neighbour group).
//
// A run is some whole rows with together about as many edges as a limit, or a part of one row that has more. Parts go
// to a staging buffer, one slot each, and are combined in order afterwards: no atomics on data, equal bits in every
// call. Runs are in the order of their edges. A multiprocessor is given one large block, and that a chunk of
// consecutive runs, so that neighbouring rows, whose sources often are neighbours, share its L1 cache; in a block,
// whichever warp is free takes the next run.

#include "types.cuh"

namespace gnnc {

// Threads of that block, and whether gathers run a step ahead of the sums: what the registers allow without a spill.
struct Residency {
  int threads;
  bool ahead;
};

#if defined(__CUDA_ARCH__)
constexpr int kArchitecture = __CUDA_ARCH__;  // the same code takes more registers on some
#else
constexpr int kArchitecture = 0;
#endif

struct Runs {
  const int64_t* rowptr;  // [rows + 1]
  const int32_t* col;     // [E]
  const int64_t* begin;   // [runs + 1], the first edge of every run
  const int2* place;  // [runs + 1], (first row, slot in the staging buffer or -1 for whole rows); (rows, -1) at last
  const int2* chunk;  // [blocks], (first run, past the last run) of every block
  const int2* split;  // [splits], (first run, number of runs) of every row that is split
};

// A run as it lies in memory: what is loaded ahead, and not looked at before it is needed. past = -1: no run.
struct RunRecord {
  int64_t begin, past;
  int2 place;
  int32_t next_row;

  __device__ RunRecord(const Runs& runs, int32_t index, int32_t last) : begin(0), past(-1), place{0, -1}, next_row(0) {
    if (index >= last) return;
    begin = runs.begin[index];
    past = runs.begin[index + 1];
    place = runs.place[index];
    next_row = runs.place[index + 1].x;
  }
};

// The edges and rows that a warp works on. Edges count from `base`, the first one.
struct Run {
  int64_t base;
  int32_t end;      // past the last
  int32_t row;      // first row
  int32_t row_end;  // past the last row that ends in this run; row + 1 for a part of a row
  int32_t slot;     // -1: whole rows

  __device__ Run() : base(0), end(0), row(0), row_end(0), slot(-1) {}

  __device__ explicit Run(const RunRecord& record) : Run() {
    if (record.past < 0) return;
    base = record.begin;
    end = static_cast<int32_t>(record.past - base);
    row = record.place.x;
    slot = record.place.y;
    row_end = slot < 0 ? record.next_row : row + 1;
  }

  // The edges of one row of this run.
  __device__ Run only(const Runs& runs, int32_t which) const {
    if (slot >= 0) return *this;
    Run one;
    one.base = runs.rowptr[which];
    one.end = static_cast<int32_t>(runs.rowptr[which + 1] - one.base);
    one.row = which;
    one.row_end = which + 1;
    return one;
  }

  // Past the last edge of a row, which is in this run.
  __device__ int32_t end_of(const Runs& runs, int32_t which) const {
    return slot >= 0 ? end : static_cast<int32_t>(runs.rowptr[which + 1] - base);
  }
};

// Hands out the runs of this block, one at a time to a warp.
struct RunQueue {
  int32_t* next;  // shared by the block
  int32_t last;

  __device__ RunQueue(const Runs& runs, int32_t* shared) : next(shared), last(runs.chunk[blockIdx.x].y) {
    if (threadIdx.x == 0) *next = runs.chunk[blockIdx.x].x;
    __syncthreads();
  }

  // The index of the next run, the same in the whole warp.
  __device__ int32_t take() {
    int32_t index = 0;
    if (threadIdx.x % 32 == 0) index = atomicAdd(next, 1);
    return __shfl_sync(0xffffffffu, index, 0);
  }
};

// Reads something of 4 bytes an edge that is used once: it should not push gathered rows out of L1, and what follows
// should come to L2 with it.
template <class T>
__device__ inline T load_once(const T* p) {
  static_assert(sizeof(T) == 4, "an element is 4 bytes");
  int32_t v;
  asm("ld.global.nc.L1::no_allocate.L2::256B.s32 %0, [%1];" : "=r"(v) : "l"(p));
  return *reinterpret_cast<const T*>(&v);
}

}  // namespace gnnc
