#pragma once

// Streams the edges of runs through warps. Each slot of a warp (rows.cuh), or each team of slots, processes a different
// row; if a run is a single entry, all slots share its row. Slots that share a row take its edges in groups of four,
// round-robin. All slots take kStep edges a step, until the slot with the most edges is finished. Slots for which a run
// has no row process its last row again, with the same loads and stores as the slot that the row belongs to, so that
// the warp never diverges.
//
// A body provides the following members; the whole warp calls its functions together:
//   kBundle                            whether slots may process different rows; otherwise all slots share each row
//   kMasks                             whether `add` must know which edges are missing; missing rows are zeros
//   kWhole                             whether steps without missing edges are worth a separate code path
//   kStep                              edges that a slot gathers at once, 4 or 8
//   kValued                            whether every edge has one float value
//   kOwns                              whether the values and scales of edges are divided among threads (OwnEdges)
//   Extra                              the other data that is loaded for four edges (weights, scales)
//   begin(work, pass)                  called before the edges of a row, for the columns of a pass
//   load(extra, four, source, mask)    starts the loads of this slot's four edges whose bits are set in mask, without
//                                      using the results: the rows are gathered after it; missing edges get value 0
//   load_own(own)                      with kOwns: starts the loads of the edges of a step that this thread prepares
//   weigh(extra, own)                  with kOwns: computes the weights of all groups of four of a step, before their
//                                      rows have arrived
//   add<kMasked>(x, extra, mask)       adds four edges; with kMasked only those whose bit of mask is set
//   finish(work, pass)                 stores and clears the sums
//   end_run(run)                       called at the end of a run

#include "sparse/rows.cuh"
#include "sparse/runs.cuh"

namespace gnnc {

// The next work item of a slot: edges of one row.
struct Work {
  int64_t first;
  int32_t count;
  int32_t part;  // slot in the staging buffer; -1: a whole row
  bool shared;   // all slots of the warp share this row

  uint32_t at;  // shared-memory address of the entry

  __device__ int32_t row() const { return entry().row; }
  // Returns the number of edges of the entry, over all slots that share the row.
  __device__ int32_t total() const { return entry().count; }
  __device__ const Entry& entry() const { return *static_cast<const Entry*>(__cvta_shared_to_generic(at)); }
};

// Returns whether edges are copied word by word, so that the groups of four edges of a row begin with its first edge,
// whatever its alignment in memory. Otherwise the groups are aligned to 16 bytes in memory, and a row may touch one
// group more: narrow rows have too few threads to copy so many words.
template <class Layout>
__host__ __device__ constexpr bool by_words() {
  return Layout::kPieces >= 4;
}

// The groups of four edges of a row that one slot processes: every n-th group, if n slots share the row.
template <class Layout>
struct Fours {
  // Offset of the first group from the first edge of the row; negative if the aligned group begins earlier.
  int32_t place;
  int32_t apart;  // edges from one group to the next
  int32_t count;

  __device__ explicit Fours(const Work& work) {
    const int bits = 2 + Layout::sharer_bits(work.shared);
    const auto before = by_words<Layout>() ? 0 : static_cast<int32_t>(static_cast<uint32_t>(work.first) % 4);
    place = 4 * Layout::sharer(work.shared) - before;
    apart = 1 << bits;
    count = (work.count + before + apart - 1) >> bits;
  }
};

// The arrays of the edges of a graph.
struct EdgeArrays {
  const int32_t* col;  // readable up to a multiple of four, on 16 bytes
  const float* value;  // [E], on 16 bytes; for bodies with kValued
  int64_t edges;       // E
};

// Four consecutive edges of a slot, some of which may be missing.
struct Four {
  int64_t edge;    // first edge
  float value[4];  // for bodies with kValued and without kOwns
};

// The edges of a step whose weights this thread prepares for its neighbors (bodies with kOwns): kEdges threads have
// one edge each, or, if a slot has fewer threads, each of four threads has one edge of every group of four.
template <class Layout, int kEdges>
struct OwnEdges {
  static constexpr bool kOne = Layout::kPieces >= kEdges;
  static constexpr int kThreads = kOne ? kEdges : 4, kCount = kEdges / kThreads;
  static_assert(kCount <= 2, "a word holds the weights of two edges");
  int32_t source[kCount];
  float value[kCount];  // for bodies with kValued
  float scale[kCount];  // loaded by load_own
  bool there[kCount];

  // Return the position of an edge: the group of four within the step, and the place within the group.
  __device__ static int four(int j) { return kOne ? thread() / 4 : j; }
  __device__ static int place() { return thread() % 4; }

  // Reduces a value over the threads of the slot that prepare edges; every thread gets the result.
  template <class T, class Combine>
  __device__ static T across(T v, const Combine& combine) {
#pragma unroll
    for (int apart = 1; apart < kThreads; apart *= 2) v = combine(v, __shfl_xor_sync(0xffffffffu, v, apart));
    return v;
  }

  // Shuffles the low 16 bits of what each thread has made of its edges to all threads, two edges a word.
  __device__ static void pair_up(const uint32_t (&made)[kCount], uint32_t (&pairs)[kEdges / 4][2]) {
    const uint32_t mine = kOne ? made[0] : __byte_perm(made[0], made[kCount - 1], 0x5410);
    const uint32_t other = __shfl_xor_sync(0xffffffffu, mine, 1);
#pragma unroll
    for (int k = 0; k < kEdges / 4; ++k) {
      // The pair, in the order of the even thread.
      const uint32_t both = __byte_perm(mine, other, kOne || k == 0 ? 0x5410 : 0x7632);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pairs[k][i] = __shfl_sync(0xffffffffu, both, (kOne ? 4 * k : 0) + 2 * i, kThreads);
      }
    }
  }

 private:
  __device__ static int thread() { return Layout::piece() % kThreads; }
};

// A warp's buffers for the sources and values of its edges, in shared memory: while each slot works on one chunk, the
// next chunk is copied, or the first chunk of the warp's next work item. (If they were read ahead into registers
// instead, the warp would wait for the loads at once: the assembler inserts moves, and a move waits for its source. And
// a value that each slot loads by itself costs a cache line of L1, like a row.)
template <class Layout, int kStep, bool kValued>
struct Sources {
  static constexpr int kChunk = fours_of(Layout::kPieces, kStep, kValued, Layout::kPasses == 1);
  static constexpr int kHalves = halves_of(kChunk, kStep);
  static_assert(kChunk * 4 % kStep == 0, "a chunk must consist of whole steps");

  int4 four[kValued ? 2 : 1][kHalves][kChunk][Layout::kSlots];

  // Starts the copy of a chunk, from offset `place` in the row on, into one of the buffers (`half`). The copy goes
  // through L1: bypassing it would make each copy a request to L2, which is the bottleneck if rows are short.
  __device__ __forceinline__ void fetch(const EdgeArrays& edges, const Work& work, int32_t place, int32_t apart,
                                        int half) {
    if constexpr (by_words<Layout>()) {
      fetch_words(edges, work, place, apart, half);
    } else {
      fetch_fours(edges, work, place, apart, half);
    }
  }

  // Starts the copy of the first chunk of a work item.
  __device__ __forceinline__ void start(const EdgeArrays& edges, const Work& work, int half) {
    const Fours<Layout> fours(work);
    fetch(edges, work, fours.place, fours.apart, half);
  }

  // Returns the sources of a group of four edges; missing edges have any value.
  __device__ __forceinline__ int4 get(int half, int f) const {
    const int4* from = &four[0][half][f][Layout::slot()];
    __builtin_assume(__isShared(from));
    return *from;
  }
  __device__ __forceinline__ float4 values(int half, int f) const {
    const auto* from = reinterpret_cast<const float4*>(&four[kValued ? 1 : 0][half][f][Layout::slot()]);
    __builtin_assume(__isShared(from));
    return *from;
  }

  // Returns element i of a group of four, from the array of columns (0) or of values (1).
  template <class T>
  __device__ __forceinline__ T one(int array, int half, int f, int i) const {
    const auto* from = reinterpret_cast<const T*>(&four[array][half][f][Layout::slot()]) + i;
    __builtin_assume(__isShared(from));
    return *from;
  }

 private:
  __device__ __forceinline__ void fetch_fours(const EdgeArrays& edges, const Work& work, int32_t place, int32_t apart,
                                              int half) {
#pragma unroll
    for (int f = Layout::piece(); f < kChunk; f += Layout::kPieces) {
      const int32_t at = place + f * apart;
      if (at >= work.count) continue;
      const auto* from = reinterpret_cast<const int4*>(edges.col + work.first + at);
      start_copy<true>(&four[0][half][f][Layout::slot()], from);
      if constexpr (kValued) {
        auto* to = reinterpret_cast<float*>(&four[1][half][f][Layout::slot()]);
        const int64_t first = work.first + at;
        start_copy_floats(edges.edges - first, to, edges.value + first);
      }
    }
  }

  __device__ __forceinline__ void fetch_words(const EdgeArrays& edges, const Work& work, int32_t place, int32_t apart,
                                              int half) {
    constexpr int kOnce = Layout::kPieces / 4;  // groups of four that the threads of a row copy at once
    const int32_t f = Layout::piece() / 4, at = place + f * apart + Layout::piece() % 4;
    const int64_t edge = work.first + at;
    auto* to = reinterpret_cast<int32_t*>(&four[0][half][f][Layout::slot()]) + Layout::piece() % 4;
#pragma unroll
    for (int n = 0; n < kChunk; n += kOnce) {
      if (at + n * apart >= work.count) continue;
      int32_t* word = to + 4 * n * Layout::kSlots;
      start_copy_word(word, edges.col + edge + n * apart);
      constexpr int kValues = sizeof(four[0]) / sizeof(int32_t);
      if constexpr (kValued) {
        start_copy_word(reinterpret_cast<float*>(word + kValues), edges.value + edge + n * apart);
      }
    }
  }
};

// A warp's shared memory for its runs and its edges.
template <class Layout, class Body>
struct Feed {
  using Edges = Sources<Layout, Body::kStep, Body::kValued>;
  RunFeed<Entry, kMostEntries> runs;
  Edges edges;
};

// One step: kStep edges of each slot.
template <class Layout, class Body>
struct Step {
  static constexpr int kFours = Body::kStep / 4;
  using Own = OwnEdges<Layout, Body::kStep>;
  int32_t source[kFours][4];
  uint32_t mask[kFours];
  Four four[kFours];
  Own own;
  bool whole;  // no edge is missing; for bodies with kMasks or kWhole

  // Reads the groups of four of a step, which begin at offset `place` in the row and at group f in buffer `half`.
  template <class Edges>
  __device__ __forceinline__ void read(const Edges& edges, int half, int f, const Work& work, int32_t place,
                                       int32_t apart) {
    whole = Body::kMasks || Body::kWhole;
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      const int32_t at = place + k * apart;
      whole = whole && (by_words<Layout>() || at >= 0) && work.count - at >= 4;
      const int4 from = edges.get(half, f + k);
      source[k][0] = from.x, source[k][1] = from.y, source[k][2] = from.z, source[k][3] = from.w;
      mask[k] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool exists = by_words<Layout>() ? i < work.count - at
                                               : static_cast<uint32_t>(at + i) < static_cast<uint32_t>(work.count);
        mask[k] |= exists ? 1u << i : 0u;
      }
      four[k].edge = work.first + at;
      if constexpr (Body::kValued && !Body::kOwns) {
        const float4 value = edges.values(half, f + k);
        four[k].value[0] = value.x, four[k].value[1] = value.y;
        four[k].value[2] = value.z, four[k].value[3] = value.w;
      }
    }
    if constexpr (Body::kOwns) {
#pragma unroll
      for (int j = 0; j < Own::kCount; ++j) {
        const int k = Own::four(j), i = Own::place();
        own.source[j] = edges.template one<int32_t>(0, half, f + k, i);
        if constexpr (Body::kValued) own.value[j] = edges.template one<float>(1, half, f + k, i);
        own.there[j] = i < work.count - (place + k * apart);
      }
    }
  }

  // Gathers the rows of the step's edges, loads their weights, and adds the weighted rows.
  __device__ __forceinline__ void take(const char* base, uint32_t x_stride, Body& body) const {
    if constexpr (Body::kWhole) {
      if (__all_sync(0xffffffffu, whole)) return take_those<true>(base, x_stride, body);
    }
    take_those<false>(base, x_stride, body);
  }

 private:
  template <bool kAll>
  __device__ __forceinline__ void take_those(const char* base, uint32_t x_stride, Body& body) const {
    typename Body::Extra extra[kFours];
    uint4 data[kFours][4];
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      Four those = four[k];
      if constexpr (Body::kValued && !Body::kOwns) {
#pragma unroll
        for (int i = 0; i < 4; ++i) those.value[i] = there<kAll>(k, i) ? those.value[i] : 0.0f;
      }
      body.load(extra[k], those, source[k], kAll ? 15u : mask[k]);
    }
    Own those = own;
    if constexpr (Body::kOwns) {
#pragma unroll
      for (int j = 0; j < Own::kCount; ++j) those.there[j] = kAll || own.there[j];
      body.load_own(those);
    }
    // All gathers are issued before the first result is used: their number hides the latency.
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) data[k][i] = gather_if(there<kAll>(k, i), row_at(base, source[k][i], x_stride));
    }
    if constexpr (Body::kOwns) body.weigh(extra, those);
    bool all = kAll || !Body::kMasks;
    if constexpr (Body::kMasks && !Body::kWhole) all = __all_sync(0xffffffffu, whole);
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      if (all) {
        body.template add<false>(data[k], extra[k], 15u);
      } else {
        body.template add<true>(data[k], extra[k], mask[k]);
      }
    }
  }

  template <bool kAll>
  __device__ __forceinline__ bool there(int k, int i) const {
    return kAll || mask[k] >> i & 1;
  }
};

// Returns the start of this thread's piece of row 0. Threads past the last piece of a row read that piece again,
// which saves a test for each load.
template <class Layout>
__device__ __forceinline__ const char* piece_of(const Gathered& x, int pass) {
  return opaque(x.first + min(pass * Layout::kPieces + Layout::piece(), x.pieces - 1) * 16);
}

// Processes all edges of a work item in one pass; its first chunk is being copied to buffer `half`; next() returns the
// work item whose first chunk is copied next.
template <class Layout, class Edges, class Body, class Next>
__device__ __forceinline__ void stream(const EdgeArrays& arrays, Edges& edges, int& half, const Work& work,
                                       const Next& next, const char* base, uint32_t x_stride, int pass, Body& body) {
  constexpr int kFours = Body::kStep / 4, kChunk = Edges::kChunk, kHalves = Edges::kHalves;
  const Fours<Layout> fours(work);
  int32_t place = fours.place;
  auto left = static_cast<int32_t>(__reduce_max_sync(0xffffffffu, static_cast<uint32_t>(fours.count)));
  body.begin(work, pass);

#pragma unroll 1
  do {
    wait_for_copies();
    __syncwarp();  // the chunk is visible, and all threads have read the other buffer
    Step<Layout, Body> step;
    if constexpr (kHalves == 1) {
      step.read(edges, half, 0, work, place, fours.apart);
      __syncwarp();  // all threads have read the only buffer
    }
    if (left > kChunk) {
      edges.fetch(arrays, work, place + kChunk * fours.apart, fours.apart, half ^ (kHalves - 1));
    } else {
      edges.start(arrays, next(), half ^ (kHalves - 1));
    }
#pragma unroll 1
    for (int f = 0; f < kChunk && left > 0; f += kFours, left -= kFours, place += kFours * fours.apart) {
      if constexpr (kHalves > 1) step.read(edges, half, f, work, place, fours.apart);
      step.take(base, x_stride, body);
    }
    half ^= kHalves - 1;
  } while (left > 0);
  body.finish(work, pass);
}

// Returns the index of the entry of a run that this thread's slot processes, in the round that starts at entry `at`.
template <class Layout>
__device__ __forceinline__ int32_t entry_of(const Run& run, int32_t at, bool shared) {
  return shared ? at : min(at + Layout::team(), max(run.count, 1) - 1);
}

// Returns the work item of this thread's slot, in the round that starts at entry `at` of a run.
template <class Layout>
__device__ __forceinline__ Work work_of(const Run& run, const Entry* entries, int32_t at, bool shared) {
  const Entry* entry = entries + entry_of<Layout>(run, at, shared);
  Work work{0, 0, run.slot, shared, static_cast<uint32_t>(__cvta_generic_to_shared(entry))};
  if (work.entry().count == 0) return work;
  work.first = work.entry().first;
  work.count = work.entry().count;
  return work;
}

// Processes all runs of this block, one at a time to a warp. `next` is the block's run queue, initialized to start
// behind feed.runs.preassigned() runs; `feed` belongs to the warp. `value`: [E] edge values, for bodies with kValued.
template <class Layout, class Body>
__device__ inline void for_runs(const Runs& runs, const float* value, const Gathered& x, int32_t* next,
                                Feed<Layout, Body>& feed, Body& body) {
  constexpr int kFours = Feed<Layout, Body>::Edges::kChunk;
  static_assert(sizeof(Feed<Layout, Body>) == feed_bytes(Layout::kPieces, kFours, Body::kStep, Body::kValued),
                "feed_bytes, from which the number of threads follows, must be the size of the feed");
  const EdgeArrays arrays{runs.col, value, runs.edges};
  RunQueue queue(runs, next);
  feed.runs.begin(runs, queue);
  const auto is_shared = [](const Run& run) { return !Body::kBundle || run.count == 1; };
  const auto first_of = [&](const Run& run, int turn) {
    return work_of<Layout>(run, feed.runs.entry[turn], 0, is_shared(run));
  };
  const char* first_piece = piece_of<Layout>(x, 0);
  int turn = 0, half = 0;
  Run run = feed.runs.advance(runs, queue, turn);
  feed.edges.start(arrays, first_of(run, turn), half);
#pragma unroll 1
  while (run.count > 0) {
    const bool shared = is_shared(run);
    const int step = shared ? 1 : Layout::kTeams;
#pragma unroll 1
    for (int32_t at = 0; at < run.count; at += step) {
      const Work work = work_of<Layout>(run, feed.runs.entry[turn], at, shared);
#pragma unroll 1
      for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const auto after = [&] {
          if (pass + 1 < Layout::kPasses) return work;
          if (at + step < run.count) return work_of<Layout>(run, feed.runs.entry[turn], at + step, shared);
          return first_of(feed.runs.run[turn ^ 1], turn ^ 1);
        };
        const char* base = Layout::kPasses == 1 ? first_piece : piece_of<Layout>(x, pass);
        stream<Layout>(arrays, feed.edges, half, work, after, base, x.stride, pass, body);
      }
    }
    body.end_run(run);
    turn = opaque(turn ^ 1);  // opaque, because the compiler would keep turn and turn ^ 1 in a register each
    run = feed.runs.advance(runs, queue, turn);
  }
}

// Reduces v over kSlots neighboring slots by shuffles, for each piece; every slot gets the result.
template <class Layout, int kSlots = Layout::kSlots, int kCount, class T, class Combine>
__device__ __forceinline__ void join_slots(T (&v)[kCount], const Combine& combine) {
#pragma unroll
  for (int apart = Layout::kPieces; apart < Layout::kPieces * kSlots; apart *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = combine(v[i], __shfl_xor_sync(0xffffffffu, v[i], apart));
  }
}

// Returns the number of columns of a thread, at least four, if a row is spread over kSlots slots.
template <class Layout, int kSlots = Layout::kSlots>
__host__ __device__ constexpr int spread_run() {
  return Layout::kColumns / kSlots > 4 ? Layout::kColumns / kSlots : 4;
}

// Returns first ? a : b by a select instruction; a branch would make the warp diverge.
template <class T>
__device__ __forceinline__ T chosen(bool first, T a, T b) {
  static_assert(sizeof(T) == 4, "the select works on 32-bit words");
  uint32_t word;
  asm("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n selp.b32 %0, %1, %2, p;\n}"
      : "=r"(word)
      : "r"(*reinterpret_cast<const uint32_t*>(&a)), "r"(*reinterpret_cast<const uint32_t*>(&b)),
        "r"(static_cast<uint32_t>(first)));
  return *reinterpret_cast<const T*>(&word);
}

// Reduces v over kSlots slots (as join_slots), and scatters the result: thread t of these slots gets the columns t *
// kRun .. t * kRun + kRun - 1 of the row. In each step, threads exchange half of their columns, until kRun columns are
// left; a final shuffle puts the columns in order. Columns past the row's pieces are undefined.
template <class Layout, int kSlots, int kRun, int kCount = Layout::kColumns, int kApart = Layout::kPieces, class T,
          class Combine>
__device__ __forceinline__ void spread_slots(const T (&v)[kCount], const Combine& combine, T (&out)[kRun]) {
  constexpr int kHalf = kCount > kRun ? kCount / 2 : kCount, kOwners = Layout::kColumns / kRun;
  constexpr int kThreads = Layout::kPieces * kSlots;
  // If all threads hold the same piece and every step halves the columns, the farthest threads exchange first, and the
  // columns end up in order without a final shuffle.
  constexpr bool kInPlace = Layout::kPieces == 1 && kOwners == kSlots;
  if constexpr (kApart < kThreads) {
    constexpr int kOther = kInPlace ? kThreads / 2 / kApart : kApart;
    const bool upper = kHalf < kCount && (Layout::lane() & kOther) != 0;
    T half[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const T kept = chosen(upper, v[kCount - kHalf + i], v[i]), given = chosen(upper, v[i], v[kCount - kHalf + i]);
      half[i] = combine(kept, __shfl_xor_sync(0xffffffffu, given, kOther));
    }
    spread_slots<Layout, kSlots, kRun, kHalf, kApart * 2>(half, combine, out);
  } else {
    // Source thread of the final shuffle: the first half of a piece went to slots whose first bit is unset, and so on.
    int from = Layout::lane() % kThreads / kOwners % Layout::kPieces;
#pragma unroll
    for (int bit = kOwners / 2, apart = Layout::kPieces; bit > 0; bit /= 2, apart *= 2) {
      if (Layout::lane() & bit) from += apart;
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      out[i] = kOwners == 1 || kInPlace ? v[i] : __shfl_sync(0xffffffffu, v[i], from, kThreads);
    }
  }
}

}  // namespace gnnc
