#pragma once

// The unit of work of the sparse kernels: a run of rows (GNNAdvisor's neighbour group).
//
// A run is up to 16 entries, rows with few edges that are worked on side by side, or one entry: a row with many
// edges, or a part of one. Entries of one run have about as many edges, since short rows are sorted by that within a
// window of neighbouring rows. Parts go to a staging buffer, one slot each, and are joined in order (split_rows.cuh):
// no atomics on data, equal bits in every call. A multiprocessor is given one large block. Blocks take chunks of
// consecutive runs in turns, so that all work on neighbouring rows at a time, whose sources often are neighbours and
// lie in L1 and L2; in a block, whichever warp is free takes the next run.

#include "common/copies.cuh"
#include "common/types.cuh"

namespace gnnc {

// Threads of that block, and edges that a slot gathers at once: what the registers allow without a spill.
struct Residency {
  int threads;
  int step;
};

// A row or a part of one.
struct alignas(16) Entry {
  int32_t row;
  int32_t count;  // edges
  int64_t first;  // the first of them
};

struct alignas(16) Run {
  int32_t first;    // entry
  int32_t count;    // entries; 0: no run
  int32_t slot;     // in the staging buffer, of a part; -1: whole rows
  int32_t stretch;  // where its rows lie (staged.cuh)
};

// A row that has several parts.
struct alignas(16) Split {
  int32_t row;
  int32_t slot;   // of the first part
  int32_t parts;  // in slots one after another
  int32_t unused;
};

struct Runs {
  static constexpr bool kStaged = false;
  const int64_t* rowptr;  // [rows + 1]
  const int32_t* col;     // [E], readable up to a multiple of four, on 16 bytes
  const Entry* entry;     // [entries]
  const Run* run;         // [runs]
  const Split* split;     // [slots], the row of each part
  int64_t count;          // runs
  int64_t chunk;          // runs, a power of two
  int64_t edges;          // E
};

// Reads 16 bytes.
template <class T>
__device__ inline T load_record(const T* p) {
  static_assert(sizeof(T) == 16, "a record is 16 bytes");
  const int4 v = __ldg(reinterpret_cast<const int4*>(p));
  return *reinterpret_cast<const T*>(&v);
}

// Has the queues of this block begin, each behind the runs that are dealt: those its warps take by `at`. By the whole
// block.
template <int kQueues>
__device__ inline void open_queues(int32_t (&next)[kQueues], int32_t dealt = 0) {
  constexpr int kThreads = 128;  // that every block has
#pragma unroll 1
  for (int first = 0; first < (kQueues > kThreads ? kQueues : 1); first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kThreads && i < kQueues) next[i] = dealt;
  }
  __syncthreads();
}

// Hands out the runs of this block, one at a time to a warp.
struct RunQueue {
  const Run* run;
  int32_t count, chunk;
  int32_t* next;  // shared by the block, open

  __device__ RunQueue(const Runs& runs, int32_t* next)
      : run(runs.run), count(static_cast<int32_t>(runs.count)), chunk(static_cast<int32_t>(runs.chunk)), next(next) {}

  // A run of this block, null past the last.
  __device__ const Run* at(int32_t index) const {
    const int32_t within = index & (chunk - 1);
    const int32_t place =
        (index - within) * static_cast<int32_t>(gridDim.x) + static_cast<int32_t>(blockIdx.x) * chunk + within;
    return place < count ? run + place : nullptr;
  }

  // The next run, null where all are taken; for one thread of a warp.
  __device__ const Run* take_one() { return at(atomicAdd(next, 1)); }

  // The next run, the same in the whole warp; none (count 0) where all are taken.
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

// Fetches the sources of a run's edges to L2: of one entry all, of several the second line of each, since the first is
// on its way. By the whole warp.
__device__ inline void prefetch_sources(const Runs& runs, const Run& now, const Entry* entries) {
  constexpr int kLine = 32;  // columns in 128 bytes
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Entry& which = entries[now.count == 1 ? 0 : min(lane, now.count - 1)];
  const int32_t at = now.count == 1 ? lane * kLine : kLine;
  if (at < which.count) asm volatile("prefetch.global.L2 [%0];" ::"l"(runs.col + which.first + at));
}

// The runs of a warp, with their entries, in shared memory: while one is worked on, the entries of the next are fetched
// and the record of the one after.
template <class Entry, int kEntries>
struct RunFeed {
  static constexpr int kTurns = 2;
  Run run[kTurns];
  Entry entry[kTurns][kEntries];

  // Runs that the warps of a block begin with: every warp has one before any has two, so that a small graph is the
  // work of all.
  __device__ static int dealt() { return kTurns * warps(); }

  // Call once before `advance`, with a queue that leaves out what is dealt.
  template <class Runs, class Queue>
  __device__ void begin(const Runs& runs, const Queue& queue) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    for (int turn = 0; turn < kTurns; ++turn) fetch_run(queue.at(turn * warps() + warp), turn);
    settle();
    fetch_entries(runs, 0);
  }

  // Returns a run whose entries are in entry[turn], turn = 0, 1, 0, ..; none (count 0) where there are no more. Those
  // of the next are there once the copies that it starts are.
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

  // By one thread of the warp.
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
      entry[turn][0] = Entry{};  // where there is no run, an entry without edges
    }
  }
};

constexpr int kMostEntries = 16;  // of a run
constexpr int kMostPart = 2048;   // edges of one entry

// Fours of edges that a slot is given at a time: so many that the threads of a row ask for 64 bytes at once. (L2
// answers so many requests a second, however few bytes they are for.) With values, for which there is less room, half
// as many where four threads read a row, and where it takes several passes.
__host__ __device__ constexpr int fours_of(int pieces, int step, bool valued, bool one_pass = true) {
  if (pieces < 4) return pieces == 1 ? step / 4 : 2;
  const int fours = pieces == 4 ? 4 : pieces / 2;
  return valued && fours > 2 && (pieces == 4 || !one_pass) ? fours / 2 : fours;
}

// Halves that these are read from in turns. A chunk of one step is in registers before the next is copied.
__host__ __device__ constexpr int halves_of(int fours, int step) { return fours * 4 > step ? 2 : 1; }

// Shared memory that a warp takes to find its work and what its edges are (Feed in stream.cuh).
__host__ __device__ constexpr int feed_bytes(int pieces, int fours, int step, bool valued) {
  const int words = fours * (32 / pieces) * halves_of(fours, step);
  return 16 * (2 * (1 + kMostEntries) + words * (valued ? 2 : 1));
}

// So many warps that what they hold fits into the static shared memory of a block, beside what the block does.
__host__ __device__ constexpr Residency fitting_warps(Residency r, int bytes_a_warp) {
  while (r.threads > 128 && r.threads / 32 * bytes_a_warp > 48 * 1024 - 64) r.threads -= 128;
  return r;
}

// Returns the residency that fits where each warp holds a feed and `words` words in shared memory.
__host__ __device__ constexpr Residency fitting(Residency r, int pieces, int words, bool valued = false,
                                                bool one_pass = true) {
  return fitting_warps(r, words * 4 + feed_bytes(pieces, fours_of(pieces, r.step, valued, one_pass), r.step, valued));
}

}  // namespace gnnc
