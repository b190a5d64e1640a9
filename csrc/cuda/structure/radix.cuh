#pragma once

// radix: sorts the edges of a new graph by the node at one of their ends, stably, and permutes the nodes at the other
// ends along. The algorithm is an LSD radix sort, least digit first, kBits bits a pass; a pass consists of radix_count,
// radix_sums of the counts, and radix_scatter. radix_rowptr then computes the row pointers, and radix_rows computes the
// row of every edge from the row pointers.
//
// A block takes a tile of consecutive edges. The block counts each digit once a warp, the threads with equal digits
// together, so that an edge's rank among the edges of its digit is known without atomics on data: equal bits in every
// call. The tile is first sorted in shared memory, so that neighboring threads write to neighboring addresses.
//
// Ids out of range set a flag; their digits are sorted like all others, and no memory is addressed by such ids.
//
// kLoops: every node gets exactly one self-loop. Self-loops that the graph already has are sorted last, with the key
// ids_bound.
//
// The nodes at the other ends are moved in every pass: a gather at the end would read a sector of memory for each edge.
//
// Traffic, an edge: keys twice, places and other ends once in, all three out: 28 B a pass (36 B in the first, of int64
// ids, 16 B more with kLoops; 32 B in the last, whose places are perm). Floor: these bytes at copy bandwidth.
//
// Tiles are large, so that the edges of one digit of a tile are written to a long contiguous range: with 3072 edges a
// tile, passes took up to twice as long.
//
// Launch: blocks of Radix::kThreads threads, one for every tile; radix_scatter with a RadixShared of dynamic shared
// memory. radix_sums: blocks of 256 threads, one for every digit. radix_rowptr: a thread a row, and one more.
// radix_rows: a block of 256 threads for as many rows.

#include "common/block_sums.cuh"
#include "common/types.cuh"

namespace gnnc {

struct RadixArgs {
  const void* ids;  // Id [given], ids_stride elements apart: keys of the first pass
  int64_t ids_stride;
  int64_t ids_bound;
  const void* others;  // Id [given], others_stride elements apart: nodes at the other ends
  int64_t others_stride;
  int64_t others_bound;
  const uint32_t* keys;   // [edges], keys of a later pass
  const int32_t* places;  // [edges], positions in the caller's order
  const int32_t* ends;    // [edges], nodes at the other ends
  uint32_t* keys_out;     // [edges]
  int32_t* places_out;    // [edges], unused in the last pass
  int32_t* ends_out;      // [edges]
  int64_t* perm;          // [edges], out of the last pass: positions in the caller's order
  int32_t* counts;        // [digits, tiles]; after radix_sums: the exclusive sums over tiles
  int32_t* totals;        // [digits], out of radix_sums
  int32_t* out_of_range;  // [2]: whether an id is out of range, and whether another end is
  int64_t edges, tiles, shift;
  int64_t given;  // number of edges of ids and others; with kLoops the edges after these are self-loops, one a node
};

// Sizes of the radix sort, and the device functions that its kernels share.
template <int kBits>
struct Radix {
  static constexpr int kThreads = 512, kWarps = kThreads / 32, kItems = 16, kTile = kThreads * kItems;
  static constexpr int kDigits = 1 << kBits;
  // Least blocks of a multiprocessor, as the registers allow.
  static constexpr int kBlocks = kArchitecture == 900 ? 2 : 1;
  static_assert(kDigits <= kThreads, "thread d handles digit d");

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static uint32_t before_me() { return (1u << lane()) - 1u; }
  __device__ static uint32_t digit(uint32_t key, int64_t shift) { return key >> shift & (kDigits - 1); }

  // Returns a bit mask of the threads of this warp with the same digit.
  __device__ static uint32_t peers(uint32_t digit) {
    uint32_t same = 0xffffffffu;
#pragma unroll
    for (int bit = 0; bit < kBits; ++bit) {
      const bool set = digit >> bit & 1;
      const uint32_t those = __ballot_sync(0xffffffffu, set);
      same &= set ? those : ~those;
    }
    return same;
  }

  // A warp has consecutive edges of the tile; each thread has every 32nd edge of its warp. Return the first edge of the
  // tile or thread, and the number of edges from an edge to the end of the tile.
  __device__ static int64_t first_of_tile() { return static_cast<int64_t>(blockIdx.x) * kTile; }
  __device__ static int place_of_thread() { return warp() * 32 * kItems + lane(); }
  __device__ static int64_t first_of_thread() { return first_of_tile() + place_of_thread(); }
  __device__ static int32_t left_from(const RadixArgs& args, int64_t first) {
    const int64_t left = args.edges - first;
    return left < kTile ? static_cast<int32_t>(left) : kTile;
  }

  // Loads the keys of this thread's edges. Keys past the last edge have all bits set, and are sorted last.
  template <class Id, bool kFirst, bool kLoops>
  __device__ static void load(const RadixArgs& args, int64_t first, int32_t left, uint32_t (&keys)[kItems]) {
    const Id* id = static_cast<const Id*>(args.ids) + first * args.ids_stride;
    const uint32_t* key = args.keys + first;
    const int64_t step = 32 * args.ids_stride;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      keys[i] = 0xffffffffu;
      if (32 * i >= left) continue;
      if constexpr (kFirst) {
        const int64_t edge = first + 32 * i;
        if (kLoops && edge >= args.given) {
          keys[i] = static_cast<uint32_t>(edge - args.given);
          continue;
        }
        const Id v = __ldg(id + i * step);
        if (v < 0 || v >= args.ids_bound) args.out_of_range[0] = 1;
        keys[i] = static_cast<uint32_t>(v);
        if (kLoops && v == __ldg(static_cast<const Id*>(args.others) + edge * args.others_stride)) {
          keys[i] = static_cast<uint32_t>(args.ids_bound);
        }
      } else {
        keys[i] = __ldg(key + 32 * i);
      }
    }
  }

  // Return the position of an edge in the caller's order, and the node at its other end.
  template <bool kFirst>
  __device__ static int32_t place_of(const RadixArgs& args, int64_t edge) {
    return kFirst ? static_cast<int32_t>(edge) : args.places[edge];
  }
  template <class Id, bool kFirst, bool kLoops>
  __device__ static int32_t end_of(const RadixArgs& args, int64_t edge) {
    if constexpr (!kFirst) return args.ends[edge];
    if (kLoops && edge >= args.given) return static_cast<int32_t>(edge - args.given);
    const Id id = static_cast<const Id*>(args.others)[edge * args.others_stride];
    if (id < 0 || id >= args.others_bound) args.out_of_range[1] = 1;
    return static_cast<int32_t>(id);
  }
};

template <class Id, int kBits, bool kFirst, bool kLoops>
__global__ void __launch_bounds__(Radix<kBits>::kThreads, 2) radix_count(const RadixArgs args) {
  begin_kernel();
  using R = Radix<kBits>;
  __shared__ int32_t counts[R::kDigits];
  const auto own = static_cast<int>(threadIdx.x);
  if (own < R::kDigits) counts[own] = 0;
  __syncthreads();
  const int64_t first = R::first_of_thread();
  const int32_t left = R::left_from(args, first);
  uint32_t keys[R::kItems];
  R::template load<Id, kFirst, kLoops>(args, first, left, keys);
#pragma unroll
  for (int i = 0; i < R::kItems; ++i) {
    const bool exists = 32 * i < left;
    const uint32_t digit = R::digit(keys[i], args.shift);
    const uint32_t those = __ballot_sync(0xffffffffu, exists) & R::peers(digit);
    if (exists && (those & R::before_me()) == 0) atomicAdd(counts + digit, __popc(those));
  }
  __syncthreads();
  if (own < R::kDigits) args.counts[own * args.tiles + blockIdx.x] = counts[own];
}

__global__ void __launch_bounds__(256) radix_sums(const RadixArgs args) {
  begin_kernel();
  constexpr int kThreads = 256, kItems = 7;  // consecutive counts of a thread; odd, to avoid bank conflicts
  constexpr int kChunk = kThreads * kItems;
  __shared__ BlockSums<kThreads / 32> sums;
  __shared__ int32_t chunk[kChunk];
  int32_t* counts = args.counts + blockIdx.x * args.tiles;
  const auto own = static_cast<int>(threadIdx.x);
  int32_t before = 0;
  for (int64_t from = 0; from < args.tiles; from += kChunk) {
    const auto left = static_cast<int>(min(args.tiles - from, static_cast<int64_t>(kChunk)));
#pragma unroll
    for (int i = own; i < kChunk; i += kThreads) chunk[i] = i < left ? counts[from + i] : 0;
    __syncthreads();
    int32_t count = 0, all = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) count += chunk[own * kItems + i];
    int32_t sum = before + sum_before(count, sums, all);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int32_t next = sum + chunk[own * kItems + i];
      chunk[own * kItems + i] = sum;
      sum = next;
    }
    __syncthreads();
#pragma unroll
    for (int i = own; i < kChunk; i += kThreads) {
      if (i < left) counts[from + i] = chunk[i];
    }
    before += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) args.totals[blockIdx.x] = before;
}

struct RowptrArgs {
  const uint32_t* keys;  // [edges], sorted
  int64_t* rowptr;       // [rows + 1]
  int32_t* kept;         // out: number of edges of all rows, without removed self-loops
  int64_t edges, rows;
};

__global__ void __launch_bounds__(256) radix_rowptr(const RowptrArgs args) {
  begin_kernel();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row > args.rows) return;
  // Binary search: the first edge of this row or of a later row lies in first .. first + left.
  int64_t first = 0, left = args.edges;
  while (left > 0) {
    const int64_t half = left / 2;
    const bool is_before = static_cast<int64_t>(__ldg(args.keys + first + half)) < row;
    first = is_before ? first + half + 1 : first;
    left = is_before ? left - half - 1 : half;
  }
  args.rowptr[row] = first;
  if (row == args.rows) *args.kept = static_cast<int32_t>(first);
}

struct RowsArgs {
  const int64_t* rowptr;  // [rows + 1]
  int32_t* row;           // [edges]
  int64_t rows;
};

__global__ void __launch_bounds__(256) radix_rows(const RowsArgs args) {
  begin_kernel();
  constexpr int kThreads = 256;
  __shared__ int64_t begin[kThreads + 1];
  const auto own = static_cast<int>(threadIdx.x);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads;
  for (int i = own; i <= kThreads; i += kThreads) begin[i] = args.rowptr[min(first + i, args.rows)];
  __syncthreads();
  for (int64_t edge = begin[0] + own; edge < begin[kThreads]; edge += kThreads) {
    int row = 0;  // the last row that begins at this edge or before
#pragma unroll
    for (int step = kThreads / 2; step > 0; step /= 2) row += begin[row + step] <= edge ? step : 0;
    args.row[edge] = static_cast<int32_t>(first + row);
  }
}

// Shared memory of radix_scatter.
template <int kBits>
struct RadixShared {
  using R = Radix<kBits>;
  uint32_t keys[R::kTile];                 // sorted
  int32_t values[R::kTile];                // positions, then other ends, sorted
  uint16_t rank[R::kTile];                 // rank of an edge of the tile
  uint16_t before[R::kWarps][R::kDigits];  // number of edges of a digit in earlier warps, plus edges of smaller digits
  int32_t to[R::kDigits];                  // offset from a rank in the tile to a position among all edges
  BlockSums<R::kWarps> sums[2];
};

// Sorts one value (get) of each edge of a tile by rank, and passes the value to `store` with its rank. Called by the
// whole block.
template <int kBits, class Get, class Store>
__device__ __forceinline__ void move_edges(RadixShared<kBits>& shared, int32_t exist, const Get& get,
                                           const Store& store) {
  using R = Radix<kBits>;
  const int mine = R::place_of_thread();
#pragma unroll 4
  for (int i = 0; i < R::kItems; ++i) {
    const int at = mine + 32 * i;
    if (at < exist) shared.values[shared.rank[at]] = get(R::first_of_tile() + at);
  }
  __syncthreads();
#pragma unroll 4
  for (int at = static_cast<int>(threadIdx.x); at < exist; at += R::kThreads) store(at, shared.values[at]);
  __syncthreads();
}

template <class Id, int kBits, bool kFirst, bool kLast, bool kLoops>
__global__ void __launch_bounds__(Radix<kBits>::kThreads, Radix<kBits>::kBlocks) radix_scatter(const RadixArgs args) {
  begin_kernel();
  using R = Radix<kBits>;
  constexpr int kItems = R::kItems;
  extern __shared__ int4 memory[];
  auto& shared = *reinterpret_cast<RadixShared<kBits>*>(memory);
  const int warp = R::warp(), own = static_cast<int>(threadIdx.x);
  const bool has_digit = own < R::kDigits;

  const int64_t first = R::first_of_thread();
  const int32_t left = R::left_from(args, first);
  uint32_t keys[kItems];
  int32_t rank[kItems];
  R::template load<Id, kFirst, kLoops>(args, first, left, keys);
#pragma unroll
  for (int w = 0; w < R::kWarps; ++w) {
    if (has_digit) shared.before[w][own] = 0;
  }
  __syncthreads();

  // First the rank among the edges of the same digit in this warp, later the rank in the tile.
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t digit = R::digit(keys[i], args.shift), those = R::peers(digit);
    const int32_t sofar = shared.before[warp][digit];
    __syncwarp();
    rank[i] = sofar + __popc(those & R::before_me());
    if ((those & R::before_me()) == 0) shared.before[warp][digit] = static_cast<uint16_t>(sofar + __popc(those));
    __syncwarp();
  }
  __syncthreads();
  int32_t total = 0;
#pragma unroll
  for (int w = 0; w < R::kWarps; ++w) {
    if (!has_digit) continue;
    const int32_t count = shared.before[w][own];
    shared.before[w][own] = static_cast<uint16_t>(total);
    total += count;
  }
  int32_t all = 0;
  const int32_t smaller = sum_before(total, shared.sums[0], all);
  const int32_t of_smaller = sum_before(has_digit ? args.totals[own] : 0, shared.sums[1], all);
  if (has_digit) {
#pragma unroll
    for (int w = 0; w < R::kWarps; ++w) shared.before[w][own] += static_cast<uint16_t>(smaller);
    shared.to[own] = of_smaller + args.counts[own * args.tiles + blockIdx.x] - smaller;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    rank[i] += shared.before[warp][R::digit(keys[i], args.shift)];
    shared.keys[rank[i]] = keys[i];
    shared.rank[R::place_of_thread() + 32 * i] = static_cast<uint16_t>(rank[i]);
  }

  const int32_t exist = R::left_from(args, R::first_of_tile());
  const auto keep_place = [&](int at, int32_t place) {
    const uint32_t key = shared.keys[at];
    const int32_t out = shared.to[R::digit(key, args.shift)] + at;
    args.keys_out[out] = key;
    if constexpr (kLast) {
      args.perm[out] = place;
    } else {
      args.places_out[out] = place;
    }
  };
  const auto keep_end = [&](int at, int32_t end) {
    args.ends_out[shared.to[R::digit(shared.keys[at], args.shift)] + at] = end;
  };
  move_edges<kBits>(shared, exist, [&](int64_t edge) { return R::template place_of<kFirst>(args, edge); }, keep_place);
  move_edges<kBits>(
      shared, exist, [&](int64_t edge) { return R::template end_of<Id, kFirst, kLoops>(args, edge); }, keep_end);
}

}  // namespace gnnc
