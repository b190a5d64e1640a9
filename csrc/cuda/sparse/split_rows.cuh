#pragma once

// Joins the parts of split rows inside the kernel that computes them, as a tree reduction without a second launch: the
// group of threads that finishes the last of up to kJoined neighboring parts adds these parts, the group that finishes
// the last of as many such sums adds those sums, and so on. The edges of a hub of a million edges are thus spread over
// many warps, and every sum is made in the same order in every call.
//
// Parts and their partial sums are stored in a staging buffer, one slot each; a partial sum takes the slot of its first
// part. The array `arrived` counts the finished parts to find the last group: one counter a slot, 0 before and after
// every kernel; if rows are cut into slices, one counter a slot and slice, since parts are joined slice by slice.

#include "sparse/runs.cuh"

namespace gnnc {

constexpr int kJoined = 16;

// The staging buffer of the parts of split rows.
struct Staging {
  void* memory;      // one row a slot
  int32_t* arrived;  // [slots, slices], counters of finished parts
};

// Counts this group's arrival; returns whether this group is the last of `expected` arrivals. All stores of this group
// before the call are visible to the group that is last.
template <int kLanes>
__device__ __forceinline__ bool is_last(int32_t* arrived, int32_t expected) {
  const uint32_t group = group_members<kLanes>();
  __syncwarp(group);
  uint32_t before = 0;
  if (threadIdx.x % kLanes == 0) {
    // Release ordering only: an acquire would invalidate L1, and only the last group needs one (the fence below).
    asm volatile("atom.release.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(arrived), "r"(expected - 1)
                 : "memory");
  }
  before = __shfl_sync(group, before, 0, kLanes);
  if (before + 1 < static_cast<uint32_t>(expected)) return false;
  __threadfence();
  __syncwarp(group);  // the fence of the thread that counted covers the whole group
  return true;
}

// Called when a group of kLanes threads has stored a part, or a slice of a part, in its slot.
//
// join(split, slot, apart, count, whole) adds up `count` parts in order, in the slots slot, slot + apart, ..., and
// stores the result in the first of these slots or, if the result is `whole`, as the finished row.
template <int kLanes, int kSlices = 1, class Join>
__device__ __forceinline__ void end_part(const Split* splits, const Staging& staging, int32_t slot, const Join& join,
                                         int slice = 0) {
  const Split split = load_record(splits + slot);
  int32_t part = slot - split.slot;
#pragma unroll 1
  for (int32_t apart = 1, level = 0;; apart *= kJoined, ++level) {
    const int32_t group = apart * kJoined;
    part -= part % group;
    const int32_t count = min(kJoined, (split.parts - part + apart - 1) / apart);
    const int32_t first = split.slot + part;
    // The sums of a level lie kJoined slots or more apart, so that each level has a separate counter among them.
    int32_t* arrived = staging.arrived + static_cast<int64_t>(first + level) * kSlices + slice;
    if (count > 1 && !is_last<kLanes>(arrived, count)) return;
    const bool whole = group >= split.parts;
    if (count > 1) join(split, first, apart, count, whole);
    if (whole) return;
  }
}

// Calls join(part) for each of `count` parts, in order. The parts are loaded by load(i), kTogether at a time, to
// overlap the memory latency; `nothing` takes the place of parts past the last one.
template <int kTogether, class Part, class Load, class Join>
__device__ __forceinline__ void each_part(int32_t count, const Part& nothing, const Load& load, const Join& join) {
#pragma unroll 1
  for (int32_t first = 0; first < count; first += kTogether) {
    Part part[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) part[i] = first + i < count ? load(first + i) : nothing;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) join(part[i]);
  }
}

// Four consecutive columns of a slot of the staging buffer.
template <class T>
struct alignas(16) StagedColumns {
  T v[4];
};

// Loads four columns of a slot, bypassing L1, which may hold a stale line of an earlier sum.
template <class T>
__device__ __forceinline__ StagedColumns<T> load_staged(const T* from) {
  StagedColumns<T> columns;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(columns) / 16); ++i) {
    reinterpret_cast<int4*>(&columns)[i] = __ldcg(reinterpret_cast<const int4*>(from) + i);
  }
  return columns;
}

// Stores the columns of a slot from `first` on that are below `past` (both multiples of four).
template <class T, class Word, int kCount>
__device__ __forceinline__ void store_staged(T* slot, int first, int past, const Word (&v)[kCount]) {
#pragma unroll
  for (int c = 0; c < kCount; c += 4) {
    const int column = first + c;
    if (column >= past) continue;
    const StagedColumns<T> four{
        {static_cast<T>(v[c]), static_cast<T>(v[c + 1]), static_cast<T>(v[c + 2]), static_cast<T>(v[c + 3])}};
    *reinterpret_cast<StagedColumns<T>*>(slot + column) = four;
  }
}

// Stores a row from a warp's shared memory into a slot of the staging buffer; called by the whole warp.
template <int kColumns, class T, class Word>
__device__ __forceinline__ void store_held(T* slot, const Word* words) {
#pragma unroll
  for (int first = 0; first < kColumns; first += 128) {
    const int column = first + static_cast<int>(threadIdx.x % 32) * 4;
    if (column >= kColumns) continue;
    const Word four[4] = {words[column], words[column + 1], words[column + 2], words[column + 3]};
    store_staged(slot, column, kColumns, four);
  }
}

}  // namespace gnnc
