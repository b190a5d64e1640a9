#pragma once

// radix: sorts the edges of a new graph by the node at one of their ends, stably, and brings the other end along. Least
// digit first, eight bits a pass; a pass is radix_count, a running sum of the counts (by torch), and radix_scatter.
//
// A block takes a tile of consecutive edges. It counts each digit once for every warp, the threads with equal digits
// together, so that an edge's place among those of its digit is known without atomics on data: equal bits in every
// call. The tile is put in order in shared memory first, so that neighbours write to neighbouring places.
//
// Ids out of range raise a flag; digits of theirs are digits all the same, and nothing is read by them.
//
// Traffic, an edge: keys twice and places once in, keys and places out: 20 B a pass (24 B in the first, of int64 ids).
// The last writes 8 B of perm and 4 B of col for the places, and gathers the other end. Floor: these bytes at copy
// bandwidth, and the gather.
//
// Launch: blocks of 256 threads, one for every tile. counts, sums: 256 rows of as many columns as there are tiles.

#include "types.cuh"

namespace gnnc {

struct RadixArgs {
  const void* ids;  // Id [edges], ids_stride apart: keys of the first pass
  int64_t ids_stride;
  int64_t ids_bound;
  const void* others;  // Id [edges], others_stride apart: the other ends
  int64_t others_stride;
  int64_t others_bound;
  const uint32_t* keys;   // [edges], of a later pass
  const int32_t* places;  // [edges], in the caller's order
  uint32_t* keys_out;     // [edges]
  int32_t* places_out;    // [edges], but for the last pass
  int64_t* perm;          // [edges], of the last pass
  int32_t* col;           // [edges], of the last pass: the other ends
  int32_t* counts;        // [256, tiles]
  const int32_t* sums;    // [256, tiles], running: with the count itself
  int32_t* out_of_range;  // [2]: whether an id is, and whether another end is
  int64_t edges, tiles, shift;
};

struct Radix {
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kItems = 12, kTile = kThreads * kItems, kDigits = 256;
  static_assert(kDigits == kThreads, "a thread looks after one digit");

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static uint32_t before_me() { return (1u << lane()) - 1u; }
  __device__ static uint32_t digit(uint32_t key, int64_t shift) { return key >> shift & (kDigits - 1); }

  // The threads of this warp with the same digit.
  __device__ static uint32_t peers(uint32_t digit) {
    uint32_t same = 0xffffffffu;
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      const bool set = digit >> bit & 1;
      const uint32_t those = __ballot_sync(0xffffffffu, set);
      same &= set ? those : ~those;
    }
    return same;
  }

  // A warp has neighbouring edges, and a thread each 32nd of them: the first, and how many edges there are from it on.
  __device__ static int64_t first_of_tile() { return static_cast<int64_t>(blockIdx.x) * kTile; }
  __device__ static int64_t first_of_thread() { return first_of_tile() + warp() * 32 * kItems + lane(); }
  __device__ static int32_t left_from(const RadixArgs& args, int64_t first) {
    const int64_t left = args.edges - first;
    return left < kTile ? static_cast<int32_t>(left) : kTile;
  }

  // Their keys. What is past the last edge has all bits set, and comes last.
  template <class Id, bool kFirst>
  __device__ static void load(const RadixArgs& args, int64_t first, int32_t left, uint32_t (&keys)[kItems]) {
    const Id* id = static_cast<const Id*>(args.ids) + first * args.ids_stride;
    const uint32_t* key = args.keys + first;
    const int64_t step = 32 * args.ids_stride;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      keys[i] = 0xffffffffu;
      if (32 * i >= left) continue;
      if constexpr (kFirst) {
        const Id v = __ldg(id + i * step);
        if (v < 0 || v >= args.ids_bound) args.out_of_range[0] = 1;
        keys[i] = static_cast<uint32_t>(v);
      } else {
        keys[i] = __ldg(key + 32 * i);
      }
    }
  }

  // The sum of `value` over the threads before this one.
  __device__ static int32_t sum_before(int32_t value, int32_t (&totals)[kWarps]) {
    int32_t sum = value;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum, apart);
      if (lane() >= apart) sum += other;
    }
    if (lane() == 31) totals[warp()] = sum;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += w < warp() ? totals[w] : 0;
    return sum - value;
  }
};

template <class Id, bool kFirst>
__global__ void __launch_bounds__(Radix::kThreads) radix_count(const RadixArgs args) {
  __shared__ int32_t counts[Radix::kDigits];
  counts[threadIdx.x] = 0;
  __syncthreads();
  const int64_t first = Radix::first_of_thread();
  const int32_t left = Radix::left_from(args, first);
  uint32_t keys[Radix::kItems];
  Radix::load<Id, kFirst>(args, first, left, keys);
#pragma unroll
  for (int i = 0; i < Radix::kItems; ++i) {
    const bool exists = 32 * i < left;
    const uint32_t digit = Radix::digit(keys[i], args.shift);
    const uint32_t those = __ballot_sync(0xffffffffu, exists) & Radix::peers(digit);
    if (exists && (those & Radix::before_me()) == 0) atomicAdd(counts + digit, __popc(those));
  }
  __syncthreads();
  args.counts[threadIdx.x * args.tiles + blockIdx.x] = counts[threadIdx.x];
}

template <class Id, bool kFirst, bool kLast>
__global__ void __launch_bounds__(Radix::kThreads, 3) radix_scatter(const RadixArgs args) {
  constexpr int kItems = Radix::kItems, kTogether = 4;
  __shared__ uint32_t tile_keys[Radix::kTile];
  __shared__ int32_t tile_places[Radix::kTile];
  __shared__ int32_t before[Radix::kWarps][Radix::kDigits];  // of a digit: in earlier warps, and of smaller ones
  __shared__ int32_t to[Radix::kDigits];                     // from a place in the tile to one among all edges
  __shared__ int32_t totals[Radix::kWarps];
  const int thread = static_cast<int>(threadIdx.x), warp = Radix::warp();

  const int64_t first = Radix::first_of_thread();
  const int32_t left = Radix::left_from(args, first);
  uint32_t keys[kItems];
  int32_t places[kItems], rank[kItems];
  Radix::load<Id, kFirst>(args, first, left, keys);
#pragma unroll
  for (int w = 0; w < Radix::kWarps; ++w) before[w][thread] = 0;
  __syncthreads();

  // Among those of its digit in this warp, then in the tile.
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t digit = Radix::digit(keys[i], args.shift), those = Radix::peers(digit);
    const int32_t sofar = before[warp][digit];
    __syncwarp();
    rank[i] = sofar + __popc(those & Radix::before_me());
    if ((those & Radix::before_me()) == 0) before[warp][digit] = sofar + __popc(those);
    __syncwarp();
  }
  __syncthreads();

  // Thread d looks after digit d.
  int32_t total = 0;
#pragma unroll
  for (int w = 0; w < Radix::kWarps; ++w) {
    const int32_t count = before[w][thread];
    before[w][thread] = total;
    total += count;
  }
  const int32_t smaller = Radix::sum_before(total, totals);
#pragma unroll
  for (int w = 0; w < Radix::kWarps; ++w) before[w][thread] += smaller;
  const int64_t mine = thread * args.tiles + blockIdx.x;
  to[thread] = args.sums[mine] - args.counts[mine] - smaller;
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    rank[i] += before[warp][Radix::digit(keys[i], args.shift)];
    tile_keys[rank[i]] = keys[i];
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    places[i] = static_cast<int32_t>(first) + 32 * i;
    if (!kFirst && 32 * i < left) places[i] = args.places[first + 32 * i];
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) tile_places[rank[i]] = places[i];
  __syncthreads();

  const int32_t exist = Radix::left_from(args, Radix::first_of_tile());
#pragma unroll 1
  for (int begin = thread; begin < exist; begin += kTogether * Radix::kThreads) {
    int32_t place[kTogether], other[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = begin + i * Radix::kThreads;
      if (at >= exist) continue;
      place[i] = tile_places[at];
      if constexpr (kLast) {
        const Id id = __ldg(static_cast<const Id*>(args.others) + place[i] * args.others_stride);
        if (id < 0 || id >= args.others_bound) args.out_of_range[1] = 1;
        other[i] = static_cast<int32_t>(id);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = begin + i * Radix::kThreads;
      if (at >= exist) continue;
      const uint32_t key = tile_keys[at];
      const int64_t out = to[Radix::digit(key, args.shift)] + at;
      args.keys_out[out] = key;
      if constexpr (kLast) {
        args.perm[out] = place[i];
        args.col[out] = other[i];
      } else {
        args.places_out[out] = place[i];
      }
    }
  }
}

}  // namespace gnnc
