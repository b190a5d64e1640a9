#pragma once

// cut_rows: builds the run table of a new graph (runs.cuh).
//
// A thread block cuts a window of kWindow neighboring rows. Rows with few edges are sorted by degree, in descending
// order, and consecutive groups of kGroup rows are combined into runs, each of about the cost run_cost. Every other row
// is one run, or is cut into parts, each of which is one run. count_runs counts the entries, runs and slots of a
// window; write_runs writes the entries, runs and slots at the offsets that the running sums of the counts (computed by
// torch) give.
//
// The run table can be divided into shares of about equal cost, one for each block of the sparse kernels: share_runs
// finds where shares begin, by the running sum of the costs, and deal_runs copies the runs of each share, in descending
// order of cost, so that the warps of a block finish at about the same time.
//
// Sizes stay on the device until the host needs them, together with the flag that says whether ids are out of range: if
// the flag is set, rowptr may hold anything, and nothing is written at offsets that depend on it.
//
// Traffic: 8 B a row, twice; 16 B out for each entry, run and slot, 12 B more for a run's cost and its sum; with
// shares, 20 B in and 16 B out for each run. Floor: these bytes at copy bandwidth.
//
// Launch: blocks of kWindow threads: one a window, one for share_runs, one for each share.

#include "common/block_sums.cuh"
#include "sparse/runs.cuh"

namespace gnnc {

constexpr int kWindow = 256;    // rows of a window, and threads of a block
constexpr int kGroup = 8;       // rows of a group
constexpr int kRowCost = 4;     // the cost of a row, in edges, in addition to its edges
constexpr int kEdgesOnce = 32;  // edges of a part are a multiple of this, so that slots of a warp get whole steps

struct CutArgs {
  const int64_t* rowptr;   // [rows + 1]
  const int32_t* refused;  // not 0 if a destination is out of range; may be null
  int32_t* counts;         // [3, windows], out of count_runs: number of entries, runs and slots of a window
  const int32_t* sums;     // [3, windows], inclusive running sums of counts
  Entry* entry;
  Run* run;
  Split* split;
  int32_t* cost;        // [runs]
  const int64_t* ends;  // [runs], the running sum of the costs
  int32_t* begin;       // [shares + 1], the first run of each share
  int32_t* sizes;       // [4], out of share_runs: number of entries, runs and slots, and most runs of a share
  Run* per_block;       // [shares, share], out of deal_runs: the runs of each share, padded with empty runs
  int64_t rows, windows;
  int64_t part, few;             // most edges of a part, and most edges of a row with few edges
  int64_t run_cost, least_cost;  // target cost of a run, and least cost that a group counts for
  int64_t shares, share;         // number of shares (used shares: at most the number of runs), and most runs of a share
};

// The cut of a row with many edges into parts with about the same number of edges.
struct Parts {
  int32_t count = 0;
  int32_t edges = 0;  // edges of each part but the last

  __device__ Parts() {}
  __device__ Parts(int32_t degree, int64_t most) {
    const int64_t least = (degree - 1) / most + 1;
    edges = static_cast<int32_t>(((degree - 1) / (least * kEdgesOnce) + 1) * kEdgesOnce);
    count = (degree - 1) / edges + 1;
  }
};

// Shared memory of CutWindow.
struct CutShared {
  int32_t key[kWindow];
  int32_t degree[kWindow];  // degrees of the rows with few edges, in sorted order
  BlockSums<kWindow / 32> sums[2];
  uint32_t opens;
};

// The runs and entries that one window of rows is cut into; computed by the whole block.
struct CutWindow {
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWindow + threadIdx.x;
  int64_t first = 0;  // first edge of the row
  int32_t degree = 0;
  bool has_few = false;
  int32_t rank = 0;  // rank among the rows with few edges
  int32_t few = 0;   // number of rows with few edges in the window
  uint32_t opens;    // bit mask of the groups that begin a run
  Parts parts;       // the cut of a row with many edges
  int32_t parts_before, all_parts, slots_before, all_slots;

  __device__ CutWindow(const CutArgs& args, CutShared& shared) {
    const auto own = static_cast<int32_t>(threadIdx.x);
    const bool exists = row < args.rows;
    if (exists) {
      first = args.rowptr[row];
      degree = static_cast<int32_t>(args.rowptr[row + 1] - first);
      has_few = degree <= args.few;
    }
    const int32_t key = has_few ? degree * kWindow + (kWindow - 1 - own) : -1;
    shared.key[own] = key;
    if (exists && !has_few) parts = Parts(degree, args.part);
    parts_before = sum_before(parts.count, shared.sums[0], all_parts);
    slots_before = sum_before(parts.count > 1 ? parts.count : 0, shared.sums[1], all_slots);
#pragma unroll 8
    for (int32_t i = 0; i < kWindow; ++i) {
      const int32_t other = shared.key[i];
      rank += other > key;
      few += other >= 0;
    }
    if (has_few) shared.degree[rank] = degree;
    __syncthreads();
    if (own < 32) open_runs(args, shared, own);
    __syncthreads();
    opens = shared.opens;
  }

  __device__ int32_t runs() const { return __popc(opens) + all_parts; }
  __device__ int32_t entries() const { return few + all_parts; }

 private:
  // Decides which groups begin a run. Called by the first warp, one group a thread.
  __device__ void open_runs(const CutArgs& args, CutShared& shared, int32_t lane) const {
    static_assert(kWindow == 32 * kGroup, "a warp must have one thread a group");
    const bool exists = lane * kGroup < few;
    const int64_t cost = exists ? kGroup * (shared.degree[lane * kGroup] + kRowCost) : 0;
    const int32_t spent = sum_in_warp(static_cast<int32_t>(max(cost, args.least_cost)));
    const auto run = (spent - 1) / static_cast<int32_t>(args.run_cost);
    const int32_t before = __shfl_up_sync(0xffffffffu, run, 1);
    const uint32_t those = __ballot_sync(0xffffffffu, exists && (lane == 0 || run != before));
    if (lane == 0) shared.opens = those;
  }
};

__device__ inline bool is_refused(const CutArgs& args) { return args.refused != nullptr && *args.refused != 0; }

__global__ void __launch_bounds__(kWindow) count_runs(const CutArgs args) {
  begin_kernel();
  __shared__ CutShared shared;
  const CutWindow window(args, shared);
  if (threadIdx.x > 0) return;
  int32_t* counts = args.counts + blockIdx.x;
  counts[0] = window.entries();
  counts[args.windows] = window.runs();
  counts[2 * args.windows] = window.all_slots;
}

// A row with many edges, as a record in shared memory for the threads that write its parts.
struct LongRow {
  int64_t first;
  int32_t degree, edges, parts, parts_before, slots_before;
};

__global__ void __launch_bounds__(kWindow) write_runs(const CutArgs args) {
  begin_kernel();
  if (is_refused(args)) return;
  __shared__ CutShared shared;
  __shared__ LongRow rows[kWindow];
  const auto own = static_cast<int32_t>(threadIdx.x);
  const CutWindow window(args, shared);
  const auto before = [&](int what) {
    return blockIdx.x == 0 ? 0 : args.sums[what * args.windows + static_cast<int64_t>(blockIdx.x) - 1];
  };
  const int32_t entries = before(0), runs = before(1), slots = before(2);

  const auto row = static_cast<int32_t>(window.row);
  if (window.has_few) args.entry[entries + window.rank] = Entry{row, window.degree, window.first};
  if (own < 32 && (window.opens >> own & 1)) {
    const uint32_t later = window.opens & ~((2u << own) - 1u);
    const int32_t begin = own * kGroup, end = later != 0 ? (__ffs(later) - 1) * kGroup : window.few;
    const int32_t at = runs + __popc(window.opens & ((1u << own) - 1u));
    int32_t cost = (end - begin) * kRowCost;
    for (int32_t i = begin; i < end; ++i) cost += shared.degree[i];
    args.run[at] = Run{entries + begin, end - begin, -1, 0};
    args.cost[at] = cost;
  }

  const Parts& parts = window.parts;
  rows[own] = {window.first, window.degree, parts.edges, parts.count, window.parts_before, window.slots_before};
  __syncthreads();
  for (int32_t at = own; at < window.all_parts; at += kWindow) {
    int32_t which = 0;  // the row that part `at` belongs to: the last row whose parts_before <= at
#pragma unroll
    for (int32_t step = kWindow / 2; step > 0; step /= 2) {
      if (rows[which + step].parts_before <= at) which += step;
    }
    const LongRow& of = rows[which];
    const auto id = static_cast<int32_t>(static_cast<int64_t>(blockIdx.x) * kWindow + which);
    const int32_t number = at - of.parts_before, offset = number * of.edges, split = slots + of.slots_before;
    const int32_t edges = min(of.edges, of.degree - offset), entry = entries + window.few + at;
    const int32_t run = runs + __popc(window.opens) + at;
    args.entry[entry] = Entry{id, edges, of.first + offset};
    args.run[run] = Run{entry, 1, of.parts > 1 ? split + number : -1, 0};
    args.cost[run] = edges + kRowCost;
    if (of.parts > 1) args.split[split + number] = Split{id, split, of.parts, 0};
  }
}

__global__ void __launch_bounds__(kWindow) share_runs(const CutArgs args) {
  begin_kernel();
  if (is_refused(args)) return;
  __shared__ int32_t most;
  const auto own = static_cast<int32_t>(threadIdx.x);
  const auto all = [&](int what) { return args.sums[(what + 1) * args.windows - 1]; };
  const int32_t count = all(1);
  const int64_t shares = min(args.shares, static_cast<int64_t>(count));
  const auto share_of = [&](int32_t run) {
    return (args.ends[run] - args.cost[run] / 2) * shares / args.ends[count - 1];
  };
  if (own == 0) most = 0;
  for (int64_t share = own; share <= args.shares; share += kWindow) {
    int32_t first = 0, past = share < shares ? count : 0;
    while (first < past) {
      const int32_t middle = first + (past - first) / 2;
      if (share_of(middle) >= share) {
        past = middle;
      } else {
        first = middle + 1;
      }
    }
    args.begin[share] = share < shares ? first : count;
  }
  __syncthreads();
  int32_t longest = 0;
  for (int64_t share = own; share < args.shares; share += kWindow) {
    longest = max(longest, args.begin[share + 1] - args.begin[share]);
  }
  atomicMax(&most, longest);
  __syncthreads();
  if (own < 3) args.sizes[own] = all(own);
  if (own == 3) args.sizes[3] = most;
}

__global__ void __launch_bounds__(kWindow) deal_runs(const CutArgs args) {
  begin_kernel();
  __shared__ int32_t costs[kWindow];
  const auto own = static_cast<int32_t>(threadIdx.x);
  const int32_t first = args.begin[blockIdx.x], count = args.begin[blockIdx.x + 1] - first;
  Run* per_block = args.per_block + static_cast<int64_t>(blockIdx.x) * args.share;
  for (int32_t turn = 0; turn < count; turn += kWindow) {
    const int32_t mine = turn + own, cost = mine < count ? args.cost[first + mine] : 0;
    int32_t rank = 0;
    for (int32_t tile = 0; tile < count; tile += kWindow) {
      __syncthreads();
      costs[own] = tile + own < count ? args.cost[first + tile + own] : -1;
      __syncthreads();
#pragma unroll 8
      for (int32_t i = 0; i < kWindow; ++i) rank += costs[i] > cost || (costs[i] == cost && tile + i < mine);
    }
    if (mine < count) per_block[rank] = load_record(args.run + first + mine);
  }
  for (int64_t i = count + own; i < args.share; i += kWindow) per_block[i] = Run{0, 0, -1, 0};
}

}  // namespace gnnc
