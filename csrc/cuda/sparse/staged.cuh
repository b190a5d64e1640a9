#pragma once

// Streams the edges of runs through warps, as stream.cuh does, on graphs most of whose edges join neighbours. A block
// works on the rows of one stretch at a time, kStretch consecutive ids, and begins by copying the rows of x of the same
// ids to shared memory, the window: sources of near edges are read there, at twice the rate of L1, and nothing of them
// comes from L2 but the window. Far edges gather theirs from memory.
//
// The edges of an entry are words of 16 bytes (stage_edges.cuh): near ones first, eight a word, by their place in the
// window, from 1 on, the last word filled up with place 0, a row of zeros; then far ones, four a word, by their row of
// x, the last word filled up with row 0, which nobody adds.
//
// A window holds all rows of a stretch where they have at most 64 bytes, and the first 1660 in slices of 128 bytes
// where they have more. All blocks go through the graph once for each slice.
//
// A warp takes the words of its edges in chunks of one step or more, the next chunk while it works on one. Where a
// chunk has several steps, the far rows of all but the first are fetched to L2 when the chunk begins: more rows are on
// their way from DRAM than registers could hold.
//
// A body has, beside what stream.cuh asks for:
//   load_near(extra, place, window)   the loads of four near edges, by their places in the window

#include "sparse/stream.cuh"

namespace gnnc {

constexpr int kStretch = 2048;

// Rows of so many bytes that a window holds, the first of its stretch.
__host__ __device__ constexpr int window_rows(int row_bytes) { return row_bytes <= 64 ? kStretch : 1660; }

// Steps of a chunk. Narrow rows are found in L2 as they are.
__host__ __device__ constexpr int steps_of_chunk(int row_bytes) { return row_bytes <= 64 ? 1 : 2; }

// Entries of a run, at most, where a window holds so many rows.
__host__ __device__ constexpr int entries_within(int window) { return window == kStretch ? 16 : 8; }

// A row or a part of one.
struct alignas(16) StagedEntry {
  int32_t row;
  int32_t near;   // edges
  int32_t far;    // edges
  int32_t first;  // word

  // Unsigned numbers are halved in one instruction, signed ones in three.
  __device__ int32_t near_words() const { return static_cast<int32_t>((static_cast<uint32_t>(near) + 7) / 8); }
  __device__ int32_t far_words() const { return static_cast<int32_t>((static_cast<uint32_t>(far) + 3) / 4); }
  __device__ int32_t words() const { return near_words() + far_words(); }
};

struct StagedRuns {
  static constexpr bool kStaged = true;
  const int64_t* rowptr;  // [rows + 1]
  const int4* word;       // [words]
  const StagedEntry* entry;
  const Run* run;        // [runs], by stretch
  const Split* split;    // [slots], the row of each part
  const int32_t* begin;  // [stretches + 1], the first run of each
  const int32_t* share;  // [blocks + 1], the first run of each block of threads
  int64_t sources;       // rows of x
};

// Fetches words to L2: of one entry all, of several the second line of each. By the whole warp.
__device__ inline void prefetch_sources(const StagedRuns& runs, const Run& now, const StagedEntry* entries) {
  constexpr int kLine = 8;  // words in 128 bytes
  const int lane = static_cast<int>(threadIdx.x % 32);
  const StagedEntry& which = entries[now.count == 1 ? 0 : min(lane, now.count - 1)];
  const int32_t at = now.count == 1 ? lane * kLine : kLine;
  if (at < which.words()) asm volatile("prefetch.global.L2 [%0];" ::"l"(runs.word + which.first + at));
}

// The rows of x of a stretch in the dynamic shared memory of a block, behind a row of zeros, and behind them what
// belongs to a row: kFactor bytes, a scale (4) or the weight 2^(7 - shift) (1).
template <class Layout, int kFactor>
struct Window {
  static_assert(Layout::kPasses == 1 && Layout::kPieces <= 8, "a row is a slice");
  static constexpr int kRow = Layout::kPieces * 16, kRows = window_rows(kRow), kFactors = (kRows + 1) * kRow;
  static constexpr int kBytes = kFactors + (kRows * kFactor + 15) / 16 * 16 + 16;

  char* memory;
  uint32_t piece;  // the address of this thread's piece of row 0, of what was fetched last

  __device__ explicit Window(void* shared) : memory(static_cast<char*>(shared)) {
    for (int i = static_cast<int>(threadIdx.x); i < kRow; i += static_cast<int>(blockDim.x)) memory[i] = 0;
    if (threadIdx.x < kFactor) memory[kFactors + threadIdx.x] = 0;
  }

  // Starts to copy; the factors are there when it returns. By the whole block.
  __device__ void fetch(const Gathered& x, const void* factor, int64_t source, int64_t sources) {
    const auto rows = static_cast<int>(min(sources - source, static_cast<int64_t>(kRows)));
    piece = static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + min(Layout::piece(), x.pieces - 1) * 16;
    for (int i = static_cast<int>(threadIdx.x); i < rows * Layout::kTotal; i += static_cast<int>(blockDim.x)) {
      const int row = i / Layout::kTotal, at = i % Layout::kTotal;
      if (at >= x.pieces) continue;
      const char* from = row_at(x.first, static_cast<int32_t>(source) + row, x.stride) + at * 16;
      start_copy(reinterpret_cast<int4*>(memory + (1 + row) * kRow + at * 16), reinterpret_cast<const int4*>(from));
    }
    if constexpr (kFactor > 0) {
      using T = typename Select<kFactor == 4, float, uint8_t>::Type;
      const T* from = static_cast<const T*>(factor) + source;
      for (int i = static_cast<int>(threadIdx.x); i < rows; i += static_cast<int>(blockDim.x)) {
        reinterpret_cast<T*>(memory + kFactors)[1 + i] = weight_of(from[i]);
      }
    }
  }

  __device__ static float weight_of(float scale) { return scale; }
  __device__ static uint8_t weight_of(uint8_t shift) { return static_cast<uint8_t>(128u >> shift); }

  // This thread's piece of the row at a place; 0: of zeros. Volatile, so that all loads of a step start before the
  // first sum.
  __device__ __forceinline__ uint4 row(uint32_t place) const {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(piece + place * kRow));
    return v;
  }
  template <class T>
  __device__ __forceinline__ T factor(uint32_t place) const {
    static_assert(sizeof(T) == kFactor, "that is what it holds");
    const T* from = reinterpret_cast<const T*>(memory + kFactors) + place;
    __builtin_assume(__isShared(from));
    return *from;
  }
};

// The next piece of work of a slot: the words of one entry.
struct StagedWork {
  int32_t part;  // slot in the staging buffer, -1: a whole row
  bool shared;   // all slots of the warp have this entry

  uint32_t at;  // where that is in shared memory, from where it is read each time: registers are few

  __device__ int32_t row() const { return entry().row; }
  __device__ int32_t total() const { return entry().near + entry().far; }
  __device__ const StagedEntry& entry() const { return *static_cast<const StagedEntry*>(__cvta_shared_to_generic(at)); }
};

// Returns the work of this thread's slot in a run, from entry `at` on.
template <class Layout>
__device__ __forceinline__ StagedWork staged_work_of(const Run& run, const StagedEntry* entries, int32_t at,
                                                     bool shared) {
  const StagedEntry* entry = entries + entry_of<Layout>(run, at, shared);
  return StagedWork{run.slot, shared, static_cast<uint32_t>(__cvta_generic_to_shared(entry))};
}

// The words of an entry that are a slot's own: every n-th of each kind, where n slots share it.
template <class Layout>
struct OwnWords {
  int32_t place;  // of the first, among those of its kind
  int bits;       // from one to the next: 2^bits

  __device__ explicit OwnWords(const StagedWork& work)
      : place(Layout::sharer(work.shared)), bits(Layout::sharer_bits(work.shared)) {}

  __device__ int32_t at(int32_t which) const { return place + (which << bits); }
  // Returns the largest number of words, over the slots of the warp, that a slot takes of an entry with `words` words.
  __device__ int32_t most(int32_t words) const {
    const int32_t own = (words - place + (1 << bits) - 1) >> bits;
    return static_cast<int32_t>(__reduce_max_sync(0xffffffffu, static_cast<uint32_t>(max(own, 0))));
  }
};

// Words of near edges that a slot is given a step, beside `far` words of far ones: about as many as there are of each
// where a window holds all of a stretch, or most of it.
__host__ __device__ constexpr int near_beside(int pieces, int far) {
  return pieces > 1 && window_rows(pieces * 16) == kStretch ? 2 * far : far;
}

// The words that a warp works on, on their way through shared memory. Where a slot has no more, its words are zeros.
template <class Layout, int kFarOfStep_>
struct Words {
  static constexpr int kFarOfStep = kFarOfStep_, kNearOfStep = near_beside(Layout::kPieces, kFarOfStep);
  static constexpr int kSteps = steps_of_chunk(Layout::kPieces * 16);
  static constexpr int kNear = kSteps * kNearOfStep, kFar = kSteps * kFarOfStep, kBoth = kNear + kFar;

  int4 word[2][kBoth][Layout::kSlots];  // near ones first

  // Starts to copy a chunk into a half.
  __device__ __forceinline__ void fetch(const int4* words, const StagedWork& work, int32_t chunk, int half) {
    const OwnWords<Layout> own(work);
    const StagedEntry entry = work.entry();
    const int32_t first = entry.first, near_words = entry.near_words(), far_words = entry.far_words();
#pragma unroll
    for (int w = Layout::piece(); w < kBoth; w += Layout::kPieces) {
      const bool is_near = w < kNear;
      const int32_t at = own.at(is_near ? chunk * kNear + w : chunk * kFar + w - kNear);
      const int32_t from = is_near ? first + at : first + near_words + at;
      start_copy_if(at < (is_near ? near_words : far_words), &word[half][w][Layout::slot()], words + from);
    }
  }

  // Fetches the far rows of all steps but the first to L2. By the whole warp, one row a thread.
  __device__ __forceinline__ void prefetch_rows(int half, const Gathered& x) const {
    constexpr int kRows = (kFar - kFarOfStep) * Layout::kSlots * 4;
    const auto* source = reinterpret_cast<const int32_t*>(word[half][kNear + kFarOfStep]);
    __builtin_assume(__isShared(source));
    for (int i = Layout::lane(); i < kRows; i += 32) {
      if (source[i] <= 0) continue;  // where a slot has no edge there is a 0, too
      asm volatile("prefetch.global.L2 [%0];" ::"l"(row_at(x.first, source[i], x.stride)));
    }
  }

  // The places of eight near edges, and the sources of four far ones.
  __device__ __forceinline__ void places(int half, int which, uint32_t (&place)[8]) const {
    const int4 pairs = get(&word[half][which][Layout::slot()]);
    const int32_t pair[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto both = static_cast<uint32_t>(pair[i / 2]);
      place[i] = i % 2 == 0 ? both & 0xffffu : both >> 16;
    }
  }
  __device__ __forceinline__ void sources(int half, int which, int32_t (&source)[4]) const {
    const int4 four = get(&word[half][kNear + which][Layout::slot()]);
    source[0] = four.x, source[1] = four.y, source[2] = four.z, source[3] = four.w;
  }

 private:
  __device__ static int4 get(const int4* from) {
    __builtin_assume(__isShared(from));
    return *from;
  }
};

template <class Layout, int kFarOfStep>
struct StagedFeed {
  RunFeed<StagedEntry, entries_within(window_rows(Layout::kPieces * 16))> runs;
  Words<Layout, kFarOfStep> words;
};

// Its size.
__host__ __device__ constexpr int staged_feed_bytes(int pieces, int far) {
  const int words = 2 * steps_of_chunk(pieces * 16) * (near_beside(pieces, far) + far) * (32 / pieces);
  return 16 * (2 * (1 + entries_within(window_rows(pieces * 16))) + words);
}

// The runs that a block works on at a time, of one stretch; in shared memory.
struct StagedShare {
  int32_t from, past;
  int32_t next;  // from `from` on
};

// Hands them out, one at a time to a warp.
struct StagedQueue {
  const Run* run;
  StagedShare* share;

  __device__ const Run* at(int32_t index) const {
    const int32_t place = mine().from + index;
    return place < mine().past ? run + place : nullptr;
  }
  __device__ const Run* take_one() { return at(atomicAdd(&share->next, 1)); }

 private:
  __device__ const StagedShare& mine() const {
    __builtin_assume(__isShared(share));
    return *share;
  }
};

// Four near edges of each slot, from `first` on of a word's eight.
template <class Window, class Body>
__device__ __forceinline__ void add_near(const uint32_t (&places)[8], int first, const Window& window, Body& body) {
  typename Body::Extra extra;
  uint4 data[4];
  uint32_t place[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) place[i] = places[first + i];
  body.load_near(extra, place, window);
#pragma unroll
  for (int i = 0; i < 4; ++i) data[i] = window.row(place[i]);
  body.template add<false>(data, extra, 15u);
}

// Far edges of each slot: a step of them, on their way while near ones are summed.
template <class Layout, class Body>
struct FarEdges {
  static constexpr int kFours = Body::kStep / 4;
  typename Body::Extra extra[kFours];
  uint4 data[kFours][4];

  __device__ __forceinline__ void load(const Words<Layout, kFours>& words, int half, int32_t step,
                                       const StagedWork& work, const char* base, uint32_t x_stride, Body& body) {
    const OwnWords<Layout> own(work);
    int32_t source[kFours][4];
    uint32_t mask[kFours];
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      words.sources(half, step % words.kSteps * kFours + k, source[k]);
      const int32_t left = work.entry().far - own.at(step * kFours + k) * 4;
      mask[k] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) mask[k] |= i < left ? 1u << i : 0u;
    }
#pragma unroll
    for (int k = 0; k < kFours; ++k) body.load(extra[k], Four{}, source[k], mask[k]);
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) data[k][i] = gather_if(mask[k] >> i & 1, row_at(base, source[k][i], x_stride));
    }
  }

  __device__ __forceinline__ void add(Body& body) const {
#pragma unroll
    for (int k = 0; k < kFours; ++k) body.template add<false>(data[k], extra[k], 15u);
  }
};

// All edges of a piece of work, whose first chunk is on its way to `half`; next() is what follows.
template <class Layout, class Words, class Window, class Body, class Next>
__device__ __forceinline__ void stream_staged(const int4* word, Words& words, int& half, const StagedWork& work,
                                              const Next& next, const Gathered& x, const char* base,
                                              const Window& window, Body& body) {
  static_assert(!Body::kMasks, "rows that are not there add nothing");
  constexpr int kSteps = Words::kSteps, kNear = Words::kNearOfStep, kFar = Words::kFarOfStep;
  const OwnWords<Layout> own(work);
  int32_t left = own.most(work.entry().near_words());
  const int32_t steps = max((left + kNear - 1) / kNear, (own.most(work.entry().far_words()) + kFar - 1) / kFar);
  body.begin(work, 0);
  int32_t step = 0;
#pragma unroll 1
  do {
    if (step % kSteps == 0) {
      wait_for_copies();
      __syncwarp();  // and all threads have read the other half
      half ^= 1;
      if (step + kSteps < steps) {
        words.fetch(word, work, step / kSteps + 1, half);
      } else {
        words.fetch(word, next(), 0, half);
      }
      if constexpr (kSteps > 1) words.prefetch_rows(half ^ 1, x);
    }
    FarEdges<Layout, Body> far;
    far.load(words, half ^ 1, step, work, base, x.stride, body);
#pragma unroll 1
    for (int f = 0; f < min(left, kNear); ++f) {
      uint32_t places[8];
      words.places(half ^ 1, step % kSteps * kNear + f, places);
      add_near(places, 0, window, body);
      add_near(places, 4, window, body);
    }
    far.add(body);
    left -= kNear;
  } while (++step < steps);
  body.finish(work, 0);
}

// The runs of this block that lie in a stretch, whose window is on its way.
template <class Layout, class Feed, class Window, class Body>
__device__ __forceinline__ void for_stretch(const StagedRuns& runs, StagedQueue& queue, const Gathered& x,
                                            const Window& window, Feed& feed, Body& body) {
  const char* base = piece_of<Layout>(x, 0);
  const auto is_shared = [](const Run& run) { return run.count == 1; };
  const auto first_of = [&](const Run& run, int turn) {
    return staged_work_of<Layout>(run, feed.runs.entry[turn], 0, is_shared(run));
  };
  feed.runs.begin(runs, queue);
  int turn = 0, half = 0;
  Run run = feed.runs.advance(runs, queue, turn);
  feed.words.fetch(runs.word, first_of(run, turn), 0, half);
  __syncthreads();  // the window is there: each thread has waited for its copies
#pragma unroll 1
  while (run.count > 0) {
    const bool shared = is_shared(run);
    const int step = shared ? 1 : Layout::kTeams;
#pragma unroll 1
    for (int32_t at = 0; at < run.count; at += step) {
      const auto after = [&] {
        if (at + step < run.count) return staged_work_of<Layout>(run, feed.runs.entry[turn], at + step, shared);
        return first_of(feed.runs.run[turn ^ 1], turn ^ 1);
      };
      const StagedWork work = staged_work_of<Layout>(run, feed.runs.entry[turn], at, shared);
      stream_staged<Layout>(runs.word, feed.words, half, work, after, x, base, window, body);
    }
    body.end_run(run);
    turn = opaque(turn ^ 1);  // or both would have a register each
    run = feed.runs.advance(runs, queue, turn);
  }
}

// All runs of this block, one at a time to a warp; `share` is the block's, `feed` the warp's.
template <class Layout, class Feed, class Window, class Body>
__device__ __forceinline__ void for_staged_runs(const StagedRuns& runs, const Gathered& x, const void* factor,
                                                Window& window, StagedShare* share, Feed& feed, Body& body) {
  StagedQueue queue{runs.run, share};
  int32_t from = runs.share[blockIdx.x];
#pragma unroll 1
  while (from < runs.share[blockIdx.x + 1]) {
    const int32_t stretch = runs.run[from].stretch;
    __syncthreads();  // all have read the window and the share before
    if (threadIdx.x == 0) {
      *share = StagedShare{from, min(runs.share[blockIdx.x + 1], runs.begin[stretch + 1]), feed.runs.dealt()};
    }
    window.fetch(x, factor, static_cast<int64_t>(stretch) * kStretch, runs.sources);
    __syncthreads();
    for_stretch<Layout>(runs, queue, x, window, feed, body);
    from = share->past;
  }
}

}  // namespace gnnc
