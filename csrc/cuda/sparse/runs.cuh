#pragma once

// The run table: the unit of work of the sparse kernels is a run of rows (GNNAdvisor's neighbor group).
//
// A run consists of up to 16 entries (rows with few edges, which a warp processes side by side), or of one entry: a row
// with many edges, or a part of such a row. The entries of a run have about as many edges each, because short rows are
// sorted by degree within a window of neighboring rows. The sums of parts go to a staging buffer, one slot each, and
// are joined in a fixed order (split_rows.cuh): no atomics on data, equal bits in every call. Each multiprocessor runs
// one large block. Blocks take chunks of consecutive runs round-robin, so that all blocks work on neighboring rows at
// a time, whose sources often are neighbors and hit in L1 and L2; within a block, each warp that becomes idle takes
// the next run.

#include "common/copies.cuh"
#include "common/types.cuh"

namespace gnnc {

// Launch shape of a sparse kernel: the threads of a block (one block a multiprocessor) and the edges that a slot
// gathers at once (step), as many as the registers allow without a spill.
struct Residency {
  int threads;
  int step;
};

// An entry of a run: the edges of a row, or of a part of a row.
struct alignas(16) Entry {
  int32_t row;
  int32_t count;  // number of edges
  int64_t first;  // index of the first edge
};

// A run: consecutive entries of the run table that one warp processes.
struct alignas(16) Run {
  int32_t first;       // index of the first entry
  int32_t count;       // number of entries; 0: no run
  int32_t slot;        // slot in the staging buffer, if the run is a part; -1: whole rows
  int32_t node_block;  // block of kNodeBlock ids in which the rows lie (staged.cuh)
};

// A row that is split into several parts.
struct alignas(16) Split {
  int32_t row;
  int32_t slot;   // slot of the first part
  int32_t parts;  // number of parts, in consecutive slots
  int32_t unused;
};

// The run table of a graph, with the CSR arrays that it refers to.
struct Runs {
  static constexpr bool kStaged = false;
  const int64_t* rowptr;  // [rows + 1]
  const int32_t* col;     // [E], readable up to a multiple of four, on 16 bytes
  const Entry* entry;     // [entries]
  const Run* run;         // [runs]
  const Split* split;     // [slots], the split row that each part belongs to
  int64_t count;          // number of runs
  int64_t chunk;          // runs of a chunk, a power of two
  int64_t edges;          // E
};

// Loads a record of 16 bytes with one instruction.
template <class T>
__device__ inline T load_record(const T* p) {
  static_assert(sizeof(T) == 16, "a record is 16 bytes");
  const int4 v = __ldg(reinterpret_cast<const int4*>(p));
  return *reinterpret_cast<const T*>(&v);
}

// Initializes the run queues of a block. Each queue starts at run `preassigned`: the warps take the runs before that
// directly, by RunQueue::at. Called by the whole block.
template <int kQueues>
__device__ inline void open_queues(int32_t (&next)[kQueues], int32_t preassigned = 0) {
  constexpr int kThreads = 128;  // the least number of threads of any block
#pragma unroll 1
  for (int first = 0; first < (kQueues > kThreads ? kQueues : 1); first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kThreads && i < kQueues) next[i] = preassigned;
  }
  __syncthreads();
}

// The queue of the runs of a block; hands one run at a time to a warp.
struct RunQueue {
  const Run* run;
  int32_t count, chunk;
  int32_t* next;  // shared by the block, initialized by open_queues

  __device__ RunQueue(const Runs& runs, int32_t* next)
      : run(runs.run), count(static_cast<int32_t>(runs.count)), chunk(static_cast<int32_t>(runs.chunk)), next(next) {}

  // Returns a run of this block by its index in the block, or null past the last run.
  __device__ const Run* at(int32_t index) const {
    const int32_t within = index & (chunk - 1);
    const int32_t place =
        (index - within) * static_cast<int32_t>(gridDim.x) + static_cast<int32_t>(blockIdx.x) * chunk + within;
    return place < count ? run + place : nullptr;
  }

  // Takes the next run; returns null if all are taken. Called by one thread of a warp.
  __device__ const Run* take_one() { return at(atomicAdd(next, 1)); }

  // Takes the next run and returns it to all threads of the warp; returns an empty run (count 0) if all are taken.
  __device__ Run take() {
    int32_t words[3] = {0, 0, -1};
    if (threadIdx.x % 32 == 0) {
      const Run* p = take_one();
      if (p != nullptr) words[0] = p->first, words[1] = p->count, words[2] = p->slot;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) words[i] = __shfl_sync(0xffffffffu, words[i], 0);
    return Run{words[0], words[1], words[2], 0};
  }
};

// Prefetches the source ids (col) of a run's edges to L2: for a run of one entry all cache lines, for a run of several
// entries the second line of each, since the first line is loaded anyway. Called by the whole warp.
__device__ inline void prefetch_sources(const Runs& runs, const Run& now, const Entry* entries) {
  constexpr int kLine = 32;  // columns in 128 bytes
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Entry& which = entries[now.count == 1 ? 0 : min(lane, now.count - 1)];
  const int32_t at = now.count == 1 ? lane * kLine : kLine;
  if (at < which.count) asm volatile("prefetch.global.L2 [%0];" ::"l"(runs.col + which.first + at));
}

// A warp's software pipeline over its runs, in shared memory: while the warp works on one run, the entries of the next
// run and the record of the run after that are fetched.
template <class Entry, int kEntries>
struct RunFeed {
  static constexpr int kTurns = 2;
  Run run[kTurns];
  Entry entry[kTurns][kEntries];

  // Returns the number of runs that are assigned to the warps of a block in advance: every warp has one run before any
  // warp has two, so that a small graph is spread over all warps.
  __device__ static int preassigned() { return kTurns * warps(); }

  // Starts the pipeline. Call once before `advance`, with a queue that starts behind the runs assigned in advance.
  template <class Runs, class Queue>
  __device__ void begin(const Runs& runs, const Queue& queue) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    for (int turn = 0; turn < kTurns; ++turn) fetch_run(queue.at(turn * warps() + warp), turn);
    settle();
    fetch_entries(runs, 0);
  }

  // Returns the current run, whose entries are in entry[turn], turn = 0, 1, 0, ..; an empty run (count 0) after the
  // last. Starts the copies of the next run's entries, which are readable once these copies have completed.
  template <class Runs, class Queue>
  __device__ Run advance(const Runs& runs, Queue& queue, int turn) {
    settle();
    const Run now = run[turn];
    __syncwarp();
    if (now.count == 0) return now;
    prefetch_sources(runs, now, entry[turn]);
    fetch_entries(runs, turn ^ 1);
    if (lane() == 0) fetch_run(queue.take_one(), turn);
    return now;
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int warps() { return static_cast<int>(blockDim.x / 32); }

  __device__ static void settle() {
    wait_for_copies();
    __syncwarp();
  }

  // Starts the copy of a run's record. Only the first thread of the warp acts.
  __device__ void fetch_run(const Run* next, int turn) {
    if (lane() > 0) return;
    if (next == nullptr) {
      run[turn] = Run{0, 0, -1, 0};
    } else {
      start_copy(&run[turn], next);
    }
  }

  template <class Runs>
  __device__ void fetch_entries(const Runs& runs, int turn) {
    if (lane() < run[turn].count) {
      start_copy(&entry[turn][lane()], runs.entry + run[turn].first + lane());
    } else if (lane() == 0) {
      entry[turn][0] = Entry{};  // a missing run gets one entry without edges
    }
  }
};

constexpr int kMostEntries = 16;  // most entries of a run
constexpr int kMostPart = 2048;   // most edges of one entry

// Returns the number of groups of four edges ("fours") whose ids are copied to a slot at a time (a chunk): as many as
// make the threads of a row request 64 bytes at once. (L2 answers a fixed number of requests a second, however few
// bytes each has.) With edge values, which take twice the shared memory, half as many if four threads read a row, or if
// a row takes several passes.
__host__ __device__ constexpr int fours_of(int pieces, int step, bool valued, bool one_pass = true) {
  if (pieces < 4) return pieces == 1 ? step / 4 : 2;
  const int fours = pieces == 4 ? 4 : pieces / 2;
  return valued && fours > 2 && (pieces == 4 || !one_pass) ? fours / 2 : fours;
}

// Returns the number of buffers for these chunks: two (double buffering), or one if a chunk is one step, which is in
// registers before the next chunk is copied.
__host__ __device__ constexpr int halves_of(int fours, int step) { return fours * 4 > step ? 2 : 1; }

// Returns the bytes of shared memory that a warp needs for its runs, source ids and edge values (Feed in stream.cuh).
__host__ __device__ constexpr int feed_bytes(int pieces, int fours, int step, bool valued) {
  const int words = fours * (32 / pieces) * halves_of(fours, step);
  return 16 * (2 * (1 + kMostEntries) + words * (valued ? 2 : 1));
}

// Reduces the number of warps until their data fits into the static shared memory of a block (48 KiB), less 64 bytes
// for the block's variables.
__host__ __device__ constexpr Residency fitting_warps(Residency r, int bytes_a_warp) {
  while (r.threads > 128 && r.threads / 32 * bytes_a_warp > 48 * 1024 - 64) r.threads -= 128;
  return r;
}

// Returns the residency that fits if each warp has a Feed and `words` words in shared memory.
__host__ __device__ constexpr Residency fitting(Residency r, int pieces, int words, bool valued = false,
                                                bool one_pass = true) {
  return fitting_warps(r, words * 4 + feed_bytes(pieces, fours_of(pieces, r.step, valued, one_pass), r.step, valued));
}

}  // namespace gnnc
