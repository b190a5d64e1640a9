#pragma once

// Streams the edges of runs through warps. A slot of a warp (rows.cuh) has a row of its own, or, where a run is one
// entry, an equal part of it; all slots take kStep edges a step, until the longest is through. The columns of the edges
// are read ahead, four a thread of the slot, and shuffled to the threads that gather.
//
// A body has, all called by the whole warp:
//   kBundle                            whether slots may have rows of their own; otherwise all share each row
//   kMasks                             whether add has to know which edges there are; the others' rows are zeros
//   kStep                              edges a slot gathers at once, 4 or 8
//   Extra                              what else is loaded an edge (weights, scales)
//   begin(work, pass)                  before the edges of a row, for the columns of a pass
//   load(extra, edge, source, mask)    starts the loads of this slot's edges edge .. edge + 3 that mask has bits for
//   add<kMasked>(x, extra, mask)       adds four edges; with kMasked only those whose bit of mask is set
//   finish(work, pass)                 stores and clears the sums

#include "rows.cuh"
#include "runs.cuh"

namespace gnnc {

// What a slot does next. Edges count from a multiple of four, so that columns are read in fours.
struct Work {
  int64_t first;  // a multiple of four
  int32_t skip;   // edges before the first that counts, 0 to 3
  int32_t end;    // past the last
  int32_t part;   // slot in the staging buffer, -1: a whole row
  bool shared;    // all slots of the warp have this row

  const Entry* entry;  // in shared memory; null: none

  __device__ int32_t row() const { return entry == nullptr ? -1 : entry->row; }
  // Edges, over all slots that share the row.
  __device__ int32_t total() const { return entry == nullptr ? 0 : entry->count; }
};

// The sources of a slot's edges.
template <class Layout>
struct Sources {
  static constexpr int kChunk = 4 * Layout::kPieces;  // edges read at once, four a thread

  const int4* next;
  int32_t left;
  int4 now, soon;

  __device__ Sources(const int32_t* col, const Work& work)
      : next(reinterpret_cast<const int4*>(col + work.first) + Layout::piece()), left(work.end - 4 * Layout::piece()) {
    now = read();
    soon = read();
  }

  // Of the step from edge `at` of the work on; steps come in order.
  __device__ __forceinline__ void get(int32_t at, int32_t (&source)[4]) {
    if (at % kChunk == 0 && at > 0) {
      now = soon;
      soon = read();
    }
    const int thread = at / 4 % Layout::kPieces;
    source[0] = __shfl_sync(0xffffffffu, now.x, thread, Layout::kPieces);
    source[1] = __shfl_sync(0xffffffffu, now.y, thread, Layout::kPieces);
    source[2] = __shfl_sync(0xffffffffu, now.z, thread, Layout::kPieces);
    source[3] = __shfl_sync(0xffffffffu, now.w, thread, Layout::kPieces);
  }

 private:
  __device__ __forceinline__ int4 read() {
    const int4 four = left > 0 ? load_once(next) : make_int4(0, 0, 0, 0);
    next += Layout::kPieces;
    left -= kChunk;
    return four;
  }
};

template <class Layout, class Body>
__device__ __forceinline__ void stream(const int32_t* col, const Work& work, const char* x, uint32_t x_stride, int pass,
                                       Body& body) {
  // Threads past the row's last piece read that one again: no test for each load.
  const char* base = x + min(pass * Layout::kPieces + Layout::piece(), Layout::kTotal - 1) * 16;
  const char* zeros = reinterpret_cast<const char*>(&kZeros);
  const auto span = static_cast<uint32_t>(work.end - work.skip);
  // A step that lies between these edges has all of its edges, in every slot.
  const auto most = static_cast<int32_t>(__reduce_max_sync(0xffffffffu, static_cast<uint32_t>(work.end)));
  const auto least = static_cast<int32_t>(__reduce_min_sync(0xffffffffu, static_cast<uint32_t>(work.end)));
  const int32_t from = __any_sync(0xffffffffu, work.skip > 0) ? 4 : 0;
  Sources<Layout> sources(col, work);
  body.begin(work, pass);

  // All gathers of a step are started before the first is waited for: what hides their latency is their number.
  constexpr int kFours = Body::kStep / 4;
#pragma unroll 1
  for (int32_t at = 0; at < most; at += Body::kStep) {
    uint4 data[kFours][4];
    typename Body::Extra extra[kFours];
    uint32_t mask[kFours];
    const bool all = !Body::kMasks || (at >= from && at + Body::kStep <= least);
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      int32_t source[4];
      sources.get(at + 4 * f, source);
      mask[f] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool exists = static_cast<uint32_t>(at + 4 * f + i - work.skip) < span;
        data[f][i] = gather(exists ? base + offset_of(source[i], x_stride) : zeros);
        mask[f] |= exists ? 1u << i : 0u;
      }
      body.load(extra[f], work.first + at + 4 * f, source, mask[f]);
    }
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      if (all) {
        body.template add<false>(data[f], extra[f], 15u);
      } else {
        body.template add<true>(data[f], extra[f], mask[f]);
      }
    }
  }
  body.finish(work, pass);
}

// What this thread's slot does of a run, from entry `at` on.
template <class Layout>
__device__ __forceinline__ Work work_of(const Run& run, const Entry* entry, int32_t at, bool shared) {
  const int32_t which = shared ? at : at + Layout::slot();
  Work work{0, 0, 0, run.slot, shared, which < run.count ? entry + which : nullptr};
  if (work.entry == nullptr || work.entry->count == 0) return work;
  work.first = work.entry->first;
  work.skip = static_cast<int32_t>(work.first % 4);
  work.first -= work.skip;
  work.end = work.skip + work.entry->count;
  if (shared && Layout::kSlots > 1) {
    const int32_t share = ((work.end + Layout::kSlots - 1) / Layout::kSlots + 3) / 4 * 4;
    const int32_t begin = min(share * Layout::slot(), work.end);
    if (begin > 0) work.skip = 0;
    work.first += begin;
    work.end = min(share, work.end - begin);
  }
  return work;
}

// Entries that a run of rows like these has at most.
template <class Layout>
__host__ __device__ constexpr int entries_of() {
  return Layout::kSlots > 8 ? 32 : 16;
}

// All runs of this block, one at a time to a warp; `next` is shared by the block, `feed` by the warp.
template <class Layout, class Body>
__device__ inline void for_runs(const Runs& runs, const char* x, uint32_t x_stride, int32_t* next,
                                RunFeed<entries_of<Layout>()>& feed, Body& body) {
  RunQueue queue(runs, next, feed.dealt());
  feed.begin(runs, queue);
#pragma unroll 1
  for (int turn = 0;; turn = feed.after(turn)) {
    const Run run = feed.advance(runs, queue, turn);
    if (run.count == 0) return;
    const bool shared = !Body::kBundle || run.count == 1;
#pragma unroll 1
    for (int32_t at = 0; at < run.count; at += shared ? 1 : Layout::kSlots) {
      const Work work = work_of<Layout>(run, feed.entry[turn], at, shared);
#pragma unroll 1
      for (int pass = 0; pass < Layout::kPasses; ++pass) stream<Layout>(runs.col, work, x, x_stride, pass, body);
    }
  }
}

// Stores the columns of this thread's piece, those below kColumns (a multiple of four) of a row on 16 bytes.
template <class Layout, int kColumns, class T>
__device__ __forceinline__ void store_piece(T* row, const T (&v)[Layout::kColumns]) {
  static_assert(sizeof(T) == 4, "words");
#pragma unroll
  for (int c = 0; c < Layout::kColumns; c += 4) {
    const int column = Layout::piece() * Layout::kColumns + c;
    if (column >= kColumns) continue;
    const T four[4] = {v[c], v[c + 1], v[c + 2], v[c + 3]};
    *reinterpret_cast<int4*>(row + column) = *reinterpret_cast<const int4*>(four);
  }
}

// Copies kWords words (a multiple of four) on 16 bytes, the whole warp.
template <int kWords, class T>
__device__ __forceinline__ void copy_words(T* to, const T* from) {
  static_assert(sizeof(T) == 4, "words");
#pragma unroll
  for (int first = 0; first < kWords; first += 128) {
    const int at = first + static_cast<int>(threadIdx.x) % 32 * 4;
    if (at < kWords) *reinterpret_cast<int4*>(to + at) = *reinterpret_cast<const int4*>(from + at);
  }
}

// combine(combine(a, b), c).. over the slots of the warp, for each piece; every slot gets the result.
template <class Layout, int kCount, class T, class Combine>
__device__ __forceinline__ void join_slots(T (&v)[kCount], const Combine& combine) {
#pragma unroll
  for (int apart = Layout::kPieces; apart < 32; apart *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = combine(v[i], __shfl_xor_sync(0xffffffffu, v[i], apart));
  }
}

}  // namespace gnnc
