#pragma once

// A tile: one complete row of a kernel's result, in FP32, in the registers of a group of threads. Epilogues work on
// tiles.
//
// A group is kLanes neighboring threads of one warp (a power of two). Thread `lane` holds the columns lane * kRun ..
// lane * kRun + kRun - 1 of every block of kRun * kLanes columns. With runs of four, a group stores whole blocks at a
// time: 16 bytes a thread in FP32, 8 in half precision, 4 in int8. Columns past the width hold zeros until an epilogue
// writes to them; reductions never read them.
//
// An epilogue is a functor that a kernel takes by value as its last argument:
//   struct Epilogue { ...; template <class Tile> __device__ void operator()(Tile& tile, int64_t row) const; };
// All threads of a group call the epilogue together, once for each row, also for rows without edges. The groups of a
// warp may call it at different times: the epilogue must not synchronize more than its group (`members`).

#include "common/types.cuh"

namespace gnnc {

// Returns the larger of `top` and |v|, or NaN if either is NaN.
__device__ inline float larger_abs(float top, float v) { return larger_or_nan(top, fabsf(v)); }

// Register layout of a row of kWidth columns over kLanes threads. kTogether: all groups of a warp have a row at the
// same time, so that shuffles use the full warp mask. (Otherwise the mask of the group is computed for each shuffle.)
template <int kWidth_, int kLanes_, int kRun_ = 4, bool kTogether_ = false>
struct RowTile {
  static constexpr int kWidth = kWidth_, kLanes = kLanes_, kRun = kRun_;
  static constexpr bool kTogether = kTogether_;
  static constexpr int kBlock = kRun * kLanes;
  static constexpr int kPer = (kWidth + kBlock - 1) / kBlock * kRun;
  static constexpr int kHeld = kPer / kRun * kBlock;  // columns of all threads, padding included
  static constexpr bool kWhole = true;
  static constexpr bool kFull = true;  // no thread has columns from kHeld on
  static_assert(kLanes >= 1 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "a group is 1, 2, 4, 8, 16 or 32 threads");
  static_assert(kRun % 4 == 0, "epilogues load and store at least four columns");

  float v[kPer];
  int lane;

  __device__ RowTile() : lane(static_cast<int>(threadIdx.x % kLanes)) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) v[i] = 0.0f;
  }

  // Returns the column of v[i]. The columns of a run, i = kRun k .. kRun k + kRun - 1, are consecutive, and the first
  // is a multiple of kRun.
  __device__ int column(int i) const { return column_of(lane, i); }
  __device__ bool valid(int i) const { return column(i) < kWidth; }
  __device__ static constexpr int offset_of(int lane, int i) { return i / kRun * kBlock + lane * kRun + i % kRun; }
  __device__ static int column_of(int lane, int i) { return offset_of(lane, i); }

  __device__ static uint32_t members() { return group_members<kTogether ? 32 : kLanes>(); }

  // Reduces a value over the threads of the group by `combine`, in a fixed order. Every thread gets the result; combine
  // must be commutative, otherwise the threads would get different results.
  template <class T, class Combine>
  __device__ static T across(T value, const Combine& combine) {
#pragma unroll
    for (int apart = kLanes / 2; apart > 0; apart /= 2) {
      value = combine(value, __shfl_xor_sync(members(), value, apart, kLanes));
    }
    return value;
  }

  // Returns the largest f(v[i], i) of the row, or `lowest` if f returns only NaN.
  template <class F>
  __device__ float max(const F& f, float lowest = -__int_as_float(0x7f800000)) const {
    float top = lowest;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (valid(i)) top = fmaxf(top, f(v[i], i));
    }
    return across(top, [](float a, float b) { return fmaxf(a, b); });
  }

  // Returns the sum of f(v[i], i) over the row.
  template <class F>
  __device__ float sum(const F& f) const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (valid(i)) total = __fadd_rn(total, f(v[i], i));
    }
    return across(total, [](float a, float b) { return __fadd_rn(a, b); });
  }
};

// A row, and the sums of the rows that its threads have processed (step::col_sum).
template <class Tile>
struct SummedTile : Tile {
  float sums[Tile::kPer] = {};

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) this->v[i] = 0.0f;
  }
};

// Adds up the sums of the kGroups groups of a block in a fixed order, and stores them. `shared` has room for a row of
// each group; all threads of the block call it.
template <int kGroups, class Tile>
__device__ void store_sums(const Tile& tile, int group, float* shared, float* to) {
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    if (tile.valid(i)) shared[group * Tile::kWidth + tile.column(i)] = tile.sums[i];
  }
  __syncthreads();
#pragma unroll 1
  for (int column = static_cast<int>(threadIdx.x); column < Tile::kWidth; column += static_cast<int>(blockDim.x)) {
    float total = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kGroups; ++i) total += shared[i * Tile::kWidth + column];
    to[column] = total;
  }
}

// A slice of a row of kWidth columns: up to Tile::kWidth columns from `first` on. For epilogues whose steps look at
// each column alone.
template <class Tile, int kWidth_>
struct SliceTile {
  static constexpr int kWidth = kWidth_, kLanes = Tile::kLanes, kRun = Tile::kRun, kPer = Tile::kPer;
  static constexpr int kBlock = 0;  // a slice has no whole blocks
  static constexpr int kHeld = (kWidth + Tile::kWidth - 1) / Tile::kWidth * Tile::kWidth;
  static constexpr bool kWhole = false;
  static constexpr bool kFull = Tile::kHeld == Tile::kWidth;

  float v[kPer];
  int lane;
  int32_t first;

  // The values are opaque; otherwise the compiler computes column addresses before the loop over edges, and keeps them
  // in registers.
  __device__ SliceTile(const Tile& tile, int32_t first_column) : lane(opaque(tile.lane)), first(opaque(first_column)) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) v[i] = tile.v[i];
  }

  __device__ static constexpr int offset_of(int of, int i) { return Tile::offset_of(of, i); }
  // Columns past the slice are mapped far past every row.
  __device__ int column_of(int of, int i) const {
    const int within = offset_of(of, i);
    return kFull || within < Tile::kWidth ? first + within : 1 << 30;
  }
  __device__ int column(int i) const { return column_of(lane, i); }
  __device__ bool valid(int i) const { return column(i) < kWidth; }
  __device__ static uint32_t members() { return Tile::members(); }
  template <class T, class Combine>
  __device__ static T across(T value, const Combine& combine) {
    return Tile::across(value, combine);
  }
};

// Returns the largest |v| of a row or of a slice of it. NaN counts as larger than infinity, so that neither is lost.
template <class Tile>
__device__ float max_abs(const Tile& tile) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) top = larger_abs(top, tile.valid(i) ? tile.v[i] : 0.0f);
  return Tile::across(top, [](float a, float b) { return larger_abs(a, b); });
}

}  // namespace gnnc
