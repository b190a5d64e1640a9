#pragma once

// Joins the parts of split rows, in the kernel that makes them: whichever group of threads ends the last of up to
// kJoined neighbouring parts adds these up, whichever ends the last of as many such sums adds those, and so on. So a
// hub of a million edges is no one's work alone, and every sum is made in the same order in every call.
//
// Parts, and sums of them, wait in a staging buffer, one slot each; a sum takes the slot of its first part. Who is last
// is counted in `arrived`: a number a slot, 0 before and after every kernel; of rows in slices one for each slice,
// since their parts are joined slice by slice.

#include "sparse/runs.cuh"

namespace gnnc {

constexpr int kJoined = 16;

struct Staging {
  void* memory;      // a row for every slot
  int32_t* arrived;  // [slots, slices]
};

// Counts one of so many that are to come; whether it is the last. What this group has stored before is there for
// whoever that is.
template <int kLanes>
__device__ __forceinline__ bool is_last(int32_t* arrived, int32_t expected) {
  const uint32_t group = group_members<kLanes>();
  __syncwarp(group);
  uint32_t before = 0;
  if (threadIdx.x % kLanes == 0) {
    // Not an acquire, for which L1 would be emptied: that is for the last alone.
    asm volatile("atom.release.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(arrived), "r"(expected - 1)
                 : "memory");
  }
  before = __shfl_sync(group, before, 0, kLanes);
  if (before + 1 < static_cast<uint32_t>(expected)) return false;
  __threadfence();
  __syncwarp(group);  // the thread that counted has acquired for all
  return true;
}

// Call when a group of kLanes threads has stored a part, or a slice of one, with its slot.
// join(split, slot, apart, count, whole) adds up `count` parts, from a slot on, `apart` from one to the next, in order,
// and stores that as the first of them or, if it is whole, as the row.
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
    // Sums of a level are kJoined slots or more apart, so that each level can count in a slot of its own.
    int32_t* arrived = staging.arrived + static_cast<int64_t>(first + level) * kSlices + slice;
    if (count > 1 && !is_last<kLanes>(arrived, count)) return;
    const bool whole = group >= split.parts;
    if (count > 1) join(split, first, apart, count, whole);
    if (whole) return;
  }
}

// join(part) for each of `count` parts, in order: load(i), kTogether at a time, since each is a wait for memory, and
// past the last one `nothing`.
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

// Four columns of a slot.
template <class T>
struct alignas(16) StagedColumns {
  T v[4];
};

// Reads them past L1, where a line of an earlier sum may be.
template <class T>
__device__ __forceinline__ StagedColumns<T> load_staged(const T* from) {
  StagedColumns<T> columns;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(columns) / 16); ++i) {
    reinterpret_cast<int4*>(&columns)[i] = __ldcg(reinterpret_cast<const int4*>(from) + i);
  }
  return columns;
}

// Stores the columns from `first` on that are below `past` (both multiples of four) of a slot.
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

// Stores the row that a warp holds in shared memory into a slot of the staging buffer; called by the whole warp.
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
