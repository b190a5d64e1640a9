#pragma once

// stage_edges: writes the edge words of staged.cuh: for every entry the near edges, by the place of their source in the
// window, then the far edges. count_near first counts the near edges of each entry, from which the host computes the
// entries; near_edges counts the near edges of a whole graph, by which the host decides whether to use staged edges at
// all. count_entries counts the entries and runs of a graph, so that the host knows all sizes before the graph is
// rearranged.
//
// A warp processes an entry, 32 edges at a time: each thread computes its edge's rank among the edges of its kind by a
// ballot. Near edges are of two kinds, to avoid bank conflicts: rows of 64 bytes at odd places of a window lie in one
// half of the banks of shared memory, rows at even places in the other, and two neighboring slots of a warp read one
// row each at a time. So slots with odd numbers process their odd places first, slots with even numbers their even
// places.
//
// Traffic, an edge: 4 B of col in, twice; 2 B (near) or 4 B (far) out; of near_edges 8 B in; of count_entries 8 B a
// row. Floor: these bytes at copy bandwidth.
//
// Launch: blocks of 256 threads, eight entries each; near_edges with any number of blocks (grid-stride loop);
// count_entries with one block for each block of kNodeBlock ids.

#include "common/block_sums.cuh"
#include "sparse/staged.cuh"

namespace gnnc {

struct StageArgs {
  const int32_t* col;        // [E]
  const int64_t* first;      // [entries], the first edge of each entry
  const int32_t* place;      // [entries], index of each entry in `entry`
  const int32_t* row;        // [entries], for count_near: the row of each entry
  const int32_t* edges;      // [entries], for count_near: the number of edges of each entry
  int32_t* near;             // [entries], out of count_near
  const StagedEntry* entry;  // [entries], for stage_edges
  int4* word;                // [words], out of stage_edges
  // [entries] in the order of `entry`, for stage_edges: 1: an odd slot has the entry, 0: an even slot, -1: all slots.
  const int32_t* slot;
  int64_t entries;
  int64_t window;  // rows that a window holds
};

// Returns whether an edge is near: its source lies in the window of its row's block of ids.
__device__ inline bool is_near(int32_t source, int32_t row, int64_t window) {
  return source / kNodeBlock == row / kNodeBlock && source % kNodeBlock < window;
}

struct NearArgs {
  const int32_t* row;  // [edges], sorted
  const int32_t* col;  // [edges]
  int32_t* near;       // [2], out, initially 0: near edges with rows of x of at most 64 bytes, and with wider rows
  int64_t edges;
  int64_t rows;  // edges with row `rows` are ignored
};

__global__ void __launch_bounds__(256) near_edges(const NearArgs a) {
  begin_kernel();
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int32_t near[2] = {0, 0};
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < a.edges; i += threads) {
    const int32_t source = a.col[i], row = a.row[i];
    near[0] += row < a.rows && is_near(source, row, window_rows(64));
    near[1] += row < a.rows && is_near(source, row, window_rows(65));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t sum = sum_in_warp(near[i]);
    if (threadIdx.x % 32 == 31 && sum > 0) atomicAdd(a.near + i, sum);
  }
}

struct EntriesArgs {
  const int64_t* rowptr;  // [rows + 1]; not validated
  int32_t* counts;        // [4], out, initially 0: entries, parts of split rows, and runs with either size of window
  int64_t rows, part, few;
};

__global__ void __launch_bounds__(256) count_entries(const EntriesArgs a) {
  begin_kernel();
  enum { kEntries, kSlots, kLong, kShort, kCounts };
  __shared__ int32_t all[kCounts];
  if (threadIdx.x < kCounts) all[threadIdx.x] = 0;
  __syncthreads();
  int32_t own[kCounts] = {0, 0, 0, 0};
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kNodeBlock, end = min(first + kNodeBlock, a.rows);
  for (int64_t row = first + threadIdx.x; row < end; row += blockDim.x) {
    const int64_t degree = max(a.rowptr[row + 1] - a.rowptr[row], static_cast<int64_t>(0));
    const int64_t least = (degree + a.part - 1) / a.part;
    const int64_t size = least == 0 ? 1 : (degree + least - 1) / least;  // edges of each part but the last
    const auto parts = static_cast<int32_t>(max((degree + size - 1) / size, static_cast<int64_t>(1)));
    const bool is_short = degree <= a.few && parts == 1;
    own[kEntries] += parts;
    own[kSlots] += parts > 1 ? parts : 0;
    own[kLong] += is_short ? 0 : parts;
    own[kShort] += is_short;
  }
#pragma unroll
  for (int i = 0; i < kCounts; ++i) {
    const int32_t sum = sum_in_warp(own[i]);
    if (threadIdx.x % 32 == 31 && sum > 0) atomicAdd(all + i, sum);
  }
  __syncthreads();
  if (threadIdx.x >= kCounts) return;
  const auto i = static_cast<int>(threadIdx.x);
  const int32_t together = entries_within(window_rows(i == 2 ? 64 : 65));
  const int32_t count = i < 2 ? all[i] : all[kLong] + (all[kShort] + together - 1) / together;
  if (count > 0) atomicAdd(a.counts + i, count);
}

// The entry that a warp processes.
struct EntryWarp {
  int64_t entry = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  int lane = static_cast<int>(threadIdx.x % 32);

  // Calls f(source, there, near) for every 32 edges of an entry; near: bit mask of the threads whose edge is near.
  template <class F>
  __device__ void each(const StageArgs& a, int32_t row, int32_t edges, const F& f) const {
    const int32_t* col = a.col + a.first[entry];
    for (int32_t from = 0; from < edges; from += 32) {
      const bool there = from + lane < edges;
      const int32_t source = there ? col[from + lane] : 0;
      f(source, there, __ballot_sync(0xffffffffu, there && is_near(source, row, a.window)));
    }
  }
};

__global__ void __launch_bounds__(256) count_near(const StageArgs a) {
  begin_kernel();
  const EntryWarp warp;
  if (warp.entry >= a.entries) return;
  int32_t near = 0;
  warp.each(a, a.row[warp.entry], a.edges[warp.entry], [&](int32_t, bool, uint32_t those) { near += __popc(those); });
  if (warp.lane == 0) a.near[warp.entry] = near;
}

// Computes the position of a near edge in the words of an entry.
struct NearOrder {
  int32_t even_seen, odd_seen;  // edges seen so far, at even places and at odd places
  int32_t even, odd;            // number of edges at even places and at odd places
  int32_t slot;                 // slot of the entry, as in StageArgs

  __device__ int32_t at(bool is_odd, int32_t rank) const {
    if (slot >= 0) return is_odd == (slot == 1) ? rank : (is_odd ? even : odd) + rank;
    const int32_t pairs = min(even, odd) / 8;  // number of pairs of an even word and an odd word
    if (rank < 8 * pairs) return (rank / 8 * 2 + is_odd) * 8 + rank % 8;
    return (is_odd ? even : 8 * pairs) + rank;
  }
};

__global__ void __launch_bounds__(256) stage_edges(const StageArgs a) {
  begin_kernel();
  const EntryWarp warp;
  if (warp.entry >= a.entries) return;
  const int32_t at = a.place[warp.entry];
  const StagedEntry entry = a.entry[at];
  auto* near = reinterpret_cast<uint16_t*>(a.word + entry.first);
  auto* far = reinterpret_cast<int32_t*>(a.word + entry.first + entry.near_words());
  const uint32_t before = (1u << warp.lane) - 1u;
  NearOrder order{0, 0, 0, 0, a.slot[at]};
  warp.each(a, entry.row, entry.near + entry.far, [&](int32_t source, bool, uint32_t those) {
    const uint32_t odd = __ballot_sync(0xffffffffu, those >> warp.lane & 1 && (1 + source % kNodeBlock) % 2 == 1);
    order.even += __popc(those & ~odd);
    order.odd += __popc(odd);
  });
  warp.each(a, entry.row, entry.near + entry.far, [&](int32_t source, bool there, uint32_t those) {
    const bool is_near = those >> warp.lane & 1;
    const int32_t place = 1 + source % kNodeBlock;
    const uint32_t others = __ballot_sync(0xffffffffu, there && !is_near);
    const uint32_t odd = __ballot_sync(0xffffffffu, is_near && place % 2 == 1), even = those & ~odd;
    if (is_near) {
      const bool is_odd = place % 2 == 1;
      const int32_t rank = is_odd ? order.odd_seen + __popc(odd & before) : order.even_seen + __popc(even & before);
      near[order.at(is_odd, rank)] = static_cast<uint16_t>(place);
    }
    if (there && !is_near) far[__popc(others & before)] = source;
    order.even_seen += __popc(even);
    order.odd_seen += __popc(odd);
    far += __popc(others);
  });
  if (warp.lane < entry.near_words() * 8 - entry.near) near[entry.near + warp.lane] = 0;
  if (warp.lane < entry.far_words() * 4 - entry.far) far[warp.lane] = 0;
}

}  // namespace gnnc
