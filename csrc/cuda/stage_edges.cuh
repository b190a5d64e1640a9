#pragma once

// stage_edges: writes the words of staged.cuh: the edges of every entry, near ones by their place in the window of the
// entry's stretch, then far ones. count_near counts the near ones first, from which the host makes the entries.
//
// A warp takes an entry, 32 edges at a time: each thread finds its edge's rank among the near ones, or the far ones, by
// a vote, so that edges stay in order.
//
// Traffic, an edge: 4 B of col in, twice; 2 B (near) or 4 B (far) out. Floor: these bytes at copy bandwidth.
//
// Launch: blocks of 256 threads, eight entries each.

#include "staged.cuh"

namespace gnnc {

struct StageArgs {
  const int32_t* col;        // [E]
  const int64_t* first;      // [entries], the first edge of each
  const int32_t* place;      // [entries], where it stands among those of `entry`
  const int32_t* row;        // [entries], of count_near
  const int32_t* edges;      // [entries], of count_near
  int32_t* near;             // [entries], of count_near: out
  const StagedEntry* entry;  // [entries], of stage_edges
  int4* word;                // [words], of stage_edges: out
  int64_t entries;
  int64_t window;  // rows that a window holds
};

// Whether the source of an edge is in the window of its row's stretch.
__device__ inline bool is_near(int32_t source, int32_t row, int64_t window) {
  return source / kStretch == row / kStretch && source % kStretch < window;
}

struct EntryWarp {
  int64_t entry = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  int lane = static_cast<int>(threadIdx.x % 32);

  // f(edge, there, near) for each 32 edges; near: the threads whose edge is a near one.
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
  const EntryWarp warp;
  if (warp.entry >= a.entries) return;
  int32_t near = 0;
  warp.each(a, a.row[warp.entry], a.edges[warp.entry], [&](int32_t, bool, uint32_t those) { near += __popc(those); });
  if (warp.lane == 0) a.near[warp.entry] = near;
}

__global__ void __launch_bounds__(256) stage_edges(const StageArgs a) {
  const EntryWarp warp;
  if (warp.entry >= a.entries) return;
  const StagedEntry entry = a.entry[a.place[warp.entry]];
  auto* near = reinterpret_cast<uint16_t*>(a.word + entry.first);
  auto* far = reinterpret_cast<int32_t*>(a.word + entry.first + entry.near_words());
  const uint32_t before = (1u << warp.lane) - 1u;
  warp.each(a, entry.row, entry.near + entry.far, [&](int32_t source, bool there, uint32_t those) {
    const bool is_near = those >> warp.lane & 1;
    const uint32_t others = __ballot_sync(0xffffffffu, there && !is_near);
    if (is_near) near[__popc(those & before)] = static_cast<uint16_t>(1 + source % kStretch);
    if (there && !is_near) far[__popc(others & before)] = source;
    near += __popc(those);
    far += __popc(others);
  });
  const int32_t rest = entry.near_words() * 8 - entry.near;
  if (warp.lane < rest) near[warp.lane] = 0;
}

}  // namespace gnnc
