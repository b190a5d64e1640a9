#pragma once

// Streams the edges of runs through warps, as stream.cuh does, for graphs most of whose edges join nodes with nearby
// ids. A block of threads works on the rows of one block of ids at a time (kNodeBlock consecutive ids), and begins by
// copying the rows of x with the same ids to shared memory, the window. An edge is near if its source lies in the
// window, and far otherwise. Sources of near edges are read from shared memory, at twice the rate of L1, and only the
// window itself is read from L2. Sources of far edges are gathered from global memory.
//
// The edges of an entry are stored as words of 16 bytes (stage_edges.cuh): first the near edges, eight a word, each by
// the place of its source in the window, from 1 on; the last word is padded with place 0, a row of zeros. Then the far
// edges, four a word, each by its row of x; the last word is padded with row 0, which is masked out.
//
// A window holds all rows of a block of ids if a row has at most 64 bytes; otherwise it holds the first 1660 rows, in
// slices of 128 bytes, and all thread blocks traverse the graph once for each slice.
//
// A warp copies the words of its edges in chunks of one step or more, the next chunk while it works on one. If a chunk
// has several steps, the far rows of all steps but the first are prefetched to L2 when the chunk begins: more rows are
// in flight from DRAM than registers could hold.
//
// A body must provide, in addition to the interface of stream.cuh:
//   load_near(extra, place, window)   starts the loads of the weights of four near edges, by their places in the window

#include "sparse/stream.cuh"

namespace gnnc {

constexpr int kNodeBlock = 2048;

// Returns the number of rows of `row_bytes` bytes that a window holds: the first rows of its block of ids.
__host__ __device__ constexpr int window_rows(int row_bytes) { return row_bytes <= 64 ? kNodeBlock : 1660; }

// Returns the number of steps of a chunk: one for narrow rows, which hit in L2 without a prefetch.
__host__ __device__ constexpr int steps_of_chunk(int row_bytes) { return row_bytes <= 64 ? 1 : 2; }

// Returns the most entries of a run, for a window of `window` rows.
__host__ __device__ constexpr int entries_within(int window) { return window == kNodeBlock ? 16 : 8; }

// An entry of a run: the near and far edges of a row, or of a part of a row.
struct alignas(16) StagedEntry {
  int32_t row;
  int32_t near;   // number of near edges
  int32_t far;    // number of far edges
  int32_t first;  // index of the first word

  // The divisions are unsigned: an unsigned division by a power of two takes one instruction, a signed division three.
  __device__ int32_t near_words() const { return static_cast<int32_t>((static_cast<uint32_t>(near) + 7) / 8); }
  __device__ int32_t far_words() const { return static_cast<int32_t>((static_cast<uint32_t>(far) + 3) / 4); }
  __device__ int32_t words() const { return near_words() + far_words(); }
};

// The run table of a graph with staged edges, ordered by block of ids.
struct StagedRuns {
  static constexpr bool kStaged = true;
  const int64_t* rowptr;  // [rows + 1]
  const int4* word;       // [words]
  const StagedEntry* entry;
  const Run* run;        // [runs], ordered by block of ids
  const Split* split;    // [slots], the split row that each part belongs to
  const int32_t* begin;  // [blocks of ids + 1], the first run of each
  const int32_t* share;  // [thread blocks + 1], the first run of each
  int64_t sources;       // number of rows of x
};

// Prefetches the words of a run to L2: for a run of one entry all cache lines, for a run of several entries the second
// line of each. Called by the whole warp.
__device__ inline void prefetch_sources(const StagedRuns& runs, const Run& now, const StagedEntry* entries) {
  constexpr int kLine = 8;  // words in 128 bytes
  const int lane = static_cast<int>(threadIdx.x % 32);
  const StagedEntry& which = entries[now.count == 1 ? 0 : min(lane, now.count - 1)];
  const int32_t at = now.count == 1 ? lane * kLine : kLine;
  if (at < which.words()) asm volatile("prefetch.global.L2 [%0];" ::"l"(runs.word + which.first + at));
}

// The window: the rows of x of a block of ids in the dynamic shared memory of a thread block, after a row of zeros, and
// followed by one factor of kFactor bytes a row: a scale (4) or the weight 2^(7 - shift) (1).
template <class Layout, int kFactor>
struct Window {
  static_assert(Layout::kPasses == 1 && Layout::kPieces <= 8, "a row must be read in one pass, of at most 8 pieces");
  static constexpr int kRow = Layout::kPieces * 16, kRows = window_rows(kRow), kFactors = (kRows + 1) * kRow;
  static constexpr int kBytes = kFactors + (kRows * kFactor + 15) / 16 * 16 + 16;

  char* memory;
  uint32_t piece;  // shared-memory address of this thread's piece of row 0 of the current window

  __device__ explicit Window(void* shared) : memory(static_cast<char*>(shared)) {
    for (int i = static_cast<int>(threadIdx.x); i < kRow; i += static_cast<int>(blockDim.x)) memory[i] = 0;
    if (threadIdx.x < kFactor) memory[kFactors + threadIdx.x] = 0;
  }

  // Starts the copies of the rows; stores the factors synchronously. Called by the whole block.
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

  // Returns this thread's piece of the row at a place; place 0 is a row of zeros. The load is volatile, so that all
  // loads of a step are issued before the first sum.
  __device__ __forceinline__ uint4 row(uint32_t place) const {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(piece + place * kRow));
    return v;
  }
  template <class T>
  __device__ __forceinline__ T factor(uint32_t place) const {
    static_assert(sizeof(T) == kFactor, "the type of the factor must have kFactor bytes");
    const T* from = reinterpret_cast<const T*>(memory + kFactors) + place;
    __builtin_assume(__isShared(from));
    return *from;
  }
};

// The next work item of a slot: the words of one entry.
struct StagedWork {
  int32_t part;  // slot in the staging buffer; -1: a whole row
  bool shared;   // all slots of the warp share this entry

  uint32_t at;  // shared-memory address of the entry, which is read again at each use to save registers

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

// The words of an entry that one slot processes: every n-th word of each kind (near, far), if n slots share the entry.
template <class Layout>
struct OwnWords {
  int32_t place;  // index of the first word, among the words of its kind
  int bits;       // log2 of the distance from one word to the next

  __device__ explicit OwnWords(const StagedWork& work)
      : place(Layout::sharer(work.shared)), bits(Layout::sharer_bits(work.shared)) {}

  __device__ int32_t at(int32_t which) const { return place + (which << bits); }
  // Returns the largest number of words, over the slots of the warp, that a slot takes of an entry with `words` words.
  __device__ int32_t most(int32_t words) const {
    const int32_t own = (words - place + (1 << bits) - 1) >> bits;
    return static_cast<int32_t>(__reduce_max_sync(0xffffffffu, static_cast<uint32_t>(max(own, 0))));
  }
};

// Returns the number of words of near edges that a slot processes a step, together with `far` words of far edges. The
// ratio is about that of near to far edges, in words, in a window that holds all rows of a block of ids (twice as many
// near words), or most of them.
__host__ __device__ constexpr int near_beside(int pieces, int far) {
  return pieces > 1 && window_rows(pieces * 16) == kNodeBlock ? 2 * far : far;
}

// A warp's buffers for its edge words in shared memory, filled by asynchronous copies. Missing words are zeros.
template <class Layout, int kFarOfStep_>
struct Words {
  static constexpr int kFarOfStep = kFarOfStep_, kNearOfStep = near_beside(Layout::kPieces, kFarOfStep);
  static constexpr int kSteps = steps_of_chunk(Layout::kPieces * 16);
  static constexpr int kNear = kSteps * kNearOfStep, kFar = kSteps * kFarOfStep, kBoth = kNear + kFar;

  int4 word[2][kBoth][Layout::kSlots];  // first the near words, then the far words

  // Starts the copy of a chunk into one of the two buffers (`half`).
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

  // Prefetches the far rows of all steps but the first to L2. Called by the whole warp, one row a thread.
  __device__ __forceinline__ void prefetch_rows(int half, const Gathered& x) const {
    constexpr int kRows = (kFar - kFarOfStep) * Layout::kSlots * 4;
    const auto* source = reinterpret_cast<const int32_t*>(word[half][kNear + kFarOfStep]);
    __builtin_assume(__isShared(source));
    for (int i = Layout::lane(); i < kRows; i += 32) {
      if (source[i] <= 0) continue;  // missing edges have id 0, too
      asm volatile("prefetch.global.L2 [%0];" ::"l"(row_at(x.first, source[i], x.stride)));
    }
  }

  // Return the places of the eight near edges of a word, and the sources of the four far edges of a word.
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

// A warp's shared memory for its runs and its edge words.
template <class Layout, int kFarOfStep>
struct StagedFeed {
  RunFeed<StagedEntry, entries_within(window_rows(Layout::kPieces * 16))> runs;
  Words<Layout, kFarOfStep> words;
};

// Returns sizeof(StagedFeed).
__host__ __device__ constexpr int staged_feed_bytes(int pieces, int far) {
  const int words = 2 * steps_of_chunk(pieces * 16) * (near_beside(pieces, far) + far) * (32 / pieces);
  return 16 * (2 * (1 + entries_within(window_rows(pieces * 16))) + words);
}

// The runs of one block of ids that a thread block works on; in shared memory.
struct StagedShare {
  int32_t from, past;
  int32_t next;  // next run to take, relative to `from`
};

// The queue of a StagedShare; hands one run at a time to a warp.
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

// Adds four near edges of each slot: four of the eight of a word, from `first` on.
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

// The far edges of one step of each slot; their rows are loaded while the near edges are summed.
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

// Processes all edges of a work item, whose first chunk is being copied to buffer `half`; next() returns the work item
// whose first chunk is copied next.
template <class Layout, class Words, class Window, class Body, class Next>
__device__ __forceinline__ void stream_staged(const int4* word, Words& words, int& half, const StagedWork& work,
                                              const Next& next, const Gathered& x, const char* base,
                                              const Window& window, Body& body) {
  static_assert(!Body::kMasks, "staged edges have no masks: missing rows are zeros, which must add nothing");
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
      __syncwarp();  // the chunk is visible, and all threads have read the other buffer
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

// Processes the runs of this thread block that lie in one block of ids, whose window is being copied.
template <class Layout, class Feed, class Window, class Body>
__device__ __forceinline__ void for_node_block(const StagedRuns& runs, StagedQueue& queue, const Gathered& x,
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
  __syncthreads();  // the window is complete: each thread has waited for its copies
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
    turn = opaque(turn ^ 1);  // opaque, because the compiler would keep turn and turn ^ 1 in a register each
    run = feed.runs.advance(runs, queue, turn);
  }
}

// Processes all runs of this thread block, one at a time to a warp; `share` belongs to the thread block, `feed` to the
// warp.
template <class Layout, class Feed, class Window, class Body>
__device__ __forceinline__ void for_staged_runs(const StagedRuns& runs, const Gathered& x, const void* factor,
                                                Window& window, StagedShare* share, Feed& feed, Body& body) {
  StagedQueue queue{runs.run, share};
  int32_t from = runs.share[blockIdx.x];
#pragma unroll 1
  while (from < runs.share[blockIdx.x + 1]) {
    const int32_t node_block = runs.run[from].node_block;
    __syncthreads();  // all threads have read the previous window and share
    if (threadIdx.x == 0) {
      *share = StagedShare{from, min(runs.share[blockIdx.x + 1], runs.begin[node_block + 1]), feed.runs.preassigned()};
    }
    window.fetch(x, factor, static_cast<int64_t>(node_block) * kNodeBlock, runs.sources);
    __syncthreads();
    for_node_block<Layout>(runs, queue, x, window, feed, body);
    from = share->past;
  }
}

}  // namespace gnnc
