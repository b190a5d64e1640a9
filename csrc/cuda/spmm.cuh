#pragma once

// spmm: out[i, :] = reduce over the edges e of row i of weight(e) * x[col[e], :], then the epilogue.
//
// Layout: x fp32, fp16, bf16 or int8, rows 16-byte aligned, read in pieces of 16 bytes (what is past the width is read
// but never used); col int32. Sums of int8, fp16 and bf16 without a weight a head run on the tensor cores
// (mma_sum.cuh), all else in FP32 (lane_reduce.cuh). Traffic: 4 B of col (+ 4 B a weight) and a row of x an edge, the
// epilogue's outputs a row, 8 B a column and slot of a row that is split. Floor: the gather from L1 and L2.
//
// Launch: spmm with one block of Config::kThreads threads for every chunk of runs.chunk; then, where rows are split,
// spmm_combine with one block of 256 threads for every row of runs.split. No dynamic shared memory.
// staging: slots * Spmm<Config>::kStaged words of 4 bytes.
//
// Exact: int8 sums without real weights are integers, rounded to FP32 once (a mean is divided in FP32 after that).

#include "lane_reduce.cuh"
#include "mma_sum.cuh"
#include "row_tile.cuh"
#include "runs.cuh"

namespace gnnc {

struct SpmmArgs {
  Runs runs;
  const void* x;
  int64_t x_stride;      // bytes, a multiple of 16, below 2^32
  const void* value;     // [E] or [E, heads] float, or [E] int8; null where Config::kValue is none
  const float* x_scale;  // [num_src], where Config::kScale is row
  const uint8_t* shift;  // [num_src], where Config::kScale is power: row weight 2^(7 - shift)
  void* staging;         // where rows are split
};

enum class Value { none, real, integer };
enum class Scale { none, row, power };

// How many blocks of 256 threads an SM can hold without spilling a register.
__host__ __device__ constexpr int spmm_blocks(Element element, Reduce reduce, bool weighted) {
  if (weighted) return 2;
  const bool few =
      element == Element::f32 || (element == Element::i8 && (reduce == Reduce::sum || reduce == Reduce::mean));
  return few ? 4 : 3;
}

// What a kernel is specialised for. kValue::integer and kScale other than none need int8 rows. kBlocks is how many
// blocks of kThreads an SM should hold.
template <Element kElement_, int kWidth_, Reduce kReduce_, Value kValue_ = Value::none, Scale kScale_ = Scale::none,
          int kHeads_ = 1, int kThreads_ = 256,
          int kBlocks_ = spmm_blocks(kElement_, kReduce_, kValue_ != Value::none || kScale_ != Scale::none)>
struct SpmmConfig {
  static constexpr Element kElement = kElement_;
  static constexpr int kWidth = kWidth_;
  static constexpr Reduce kReduce = kReduce_;
  static constexpr Value kValue = kValue_;
  static constexpr Scale kScale = kScale_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kBlocks = kBlocks_;
};

template <class Config>
struct Spmm {
  static constexpr Element kElement = Config::kElement;
  static constexpr int kWidth = Config::kWidth, kHeads = Config::kHeads;
  static constexpr bool kAdds = Config::kReduce == Reduce::sum || Config::kReduce == Reduce::mean;
  static constexpr Weight kWeight = Config::kValue == Value::real || Config::kScale == Scale::row ? Weight::real
                                    : Config::kValue == Value::integer                            ? Weight::signed8
                                    : Config::kScale == Scale::power                              ? Weight::power8
                                                                                                  : Weight::none;
  // Narrow int8 rows with real weights would need a product for every pair of a warp's sets: more than the sums in
  // FP32.
  static constexpr bool kProducts = kAdds && kHeads == 1 && kElement != Element::f32 &&
                                    !(kElement == Element::i8 && kWeight == Weight::real && kWidth <= 32);
  static constexpr bool kExact = kElement == Element::i8 && kProducts && kWeight != Weight::real;
  static_assert(kElement == Element::i8 || (Config::kValue != Value::integer && Config::kScale == Scale::none),
                "integer values and scales of rows go with int8 rows");
  static_assert(Config::kValue != Value::integer || Config::kScale == Scale::none, "an int8 value takes no scale");
  static_assert(kWidth % kHeads == 0, "heads divide the width");

  static constexpr int kTotal = (kWidth * bytes_of(kElement) + 15) / 16;
  static constexpr int kSlots = kProducts ? 4 : smaller_of(4, 32 / smaller_of(32, power_of_two_from(kTotal)));
  using Layout = RowLayout<kElement, kWidth, kSlots, 32 / kSlots, kProducts && kElement != Element::i8 ? 2 : 1>;
  using Integers = IntegerSum<Layout, kWeight>;
  using Halves = HalfSum<Layout, kWeight == Weight::none ? Weight::none : Weight::real>;
  using Lanes = LaneReduce<Layout, Config::kReduce>;
  using Products = typename Select<kElement == Element::i8, Integers, Halves>::Type;
  using Sum = typename Select<kProducts, Products, Lanes>::Type;
  using Tile = RowTile<kWidth, Layout::kLanes>;
  using Word = typename Select<kExact, int32_t, float>::Type;

  static constexpr int kGroups = Config::kThreads / Layout::kLanes;
  static constexpr int kStaged = (kWidth + 3) / 4 * 4;  // words a slot
};

// The weight of one edge of this thread where it is one number: of the row, of the edge, or their product.
template <class Config>
__device__ inline float edge_weight(const SpmmArgs& a, float value, int32_t source, bool exists) {
  float w = Config::kValue == Value::none ? 1.0f : value;
  if constexpr (Config::kScale == Scale::row) w = __fmul_rn(w, exists ? __ldg(a.x_scale + source) : 0.0f);
  if constexpr (Config::kScale == Scale::power) w = exists ? static_cast<float>(128 >> __ldg(a.shift + source)) : 0.0f;
  return exists ? w : 0.0f;
}

// Four edges of this thread: their sources, and their rows' pieces.
template <class Config>
struct Edges {
  using Layout = typename Spmm<Config>::Layout;
  int32_t source[4];
  bool exists[4];
  uint4 x[4];

  __device__ void load_rows(const SpmmArgs& a, const EdgeWindow& window, int32_t at, int offset, bool inside) {
    const char* base = static_cast<const char*>(a.x) + offset;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      exists[i] = window.holds(at + i);
      x[i] = gather(base, static_cast<uint32_t>(source[i]), static_cast<uint32_t>(a.x_stride), exists[i] && inside);
    }
  }
};

// int8 weights of four edges, as bytes.
template <class Config>
__device__ inline uint32_t byte_weights(const SpmmArgs& a, const EdgeWindow& window, int32_t at,
                                        const Edges<Config>& edges) {
  uint32_t bytes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!edges.exists[i]) continue;
    uint32_t w;
    if constexpr (Config::kScale == Scale::power) {
      w = 128u >> __ldg(a.shift + edges.source[i]);
    } else {
      w = __ldg(static_cast<const uint8_t*>(a.value) + window.base + at + i);
    }
    bytes |= w << (8 * i);
  }
  return bytes;
}

template <class Config>
__device__ inline void real_weights(const SpmmArgs& a, const EdgeWindow& window, int32_t at, const Edges<Config>& edges,
                                    float (&w)[4]) {
  float value[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if constexpr (Config::kValue == Value::real) {
    load_edges(static_cast<const float*>(a.value), window, at, value);
  } else if constexpr (Config::kValue == Value::integer) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (edges.exists[i]) value[i] = static_cast<float>(static_cast<const int8_t*>(a.value)[window.base + at + i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = edge_weight<Config>(a, value[i], edges.source[i], edges.exists[i]);
}

// Weights that differ from head to head, for the columns of this thread's piece.
template <class Config>
struct HeadWeights {
  static constexpr int kPer = Config::kWidth / Config::kHeads;
  static constexpr bool kOne = kPer % Spmm<Config>::Layout::kColumns == 0;  // one head a piece
  const float* value;                                                       // of this edge
  float scale;
  int column;

  __device__ float operator()(int i) const {
    const int head = (column + (kOne ? 0 : i)) / kPer;
    return head < Config::kHeads ? __fmul_rn(__ldg(value + head), scale) : 0.0f;
  }
};

template <class Config>
__device__ inline void add_edges(const SpmmArgs& a, const EdgeWindow& window, int32_t at,
                                 const LanePlace<typename Spmm<Config>::Layout>& place, int column,
                                 const Edges<Config>& edges, typename Spmm<Config>::Sum& sum) {
  using S = Spmm<Config>;
  if constexpr (S::kProducts && S::kWeight == Weight::none) {
    if constexpr (S::kElement == Element::i8) {
      sum.add_digits(place, edges.x, {0u});
    } else {
      sum.add(place, edges.x);
    }
  } else if constexpr (S::kExact) {
    sum.add_digits(place, edges.x, {byte_weights<Config>(a, window, at, edges)});
  } else if constexpr (S::kHeads > 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!edges.exists[i]) continue;
      const float scale = edge_weight<Config>(a, 1.0f, edges.source[i], true);
      const float* value = static_cast<const float*>(a.value) + (window.base + at + i) * S::kHeads;
      const HeadWeights<Config> weights{value, scale, column};
      if constexpr (HeadWeights<Config>::kOne) {
        const float w = weights(0);
        sum.add(edges.x[i], true, [&](int) { return w; });
      } else {
        sum.add(edges.x[i], true, weights);
      }
    }
  } else if constexpr (S::kWeight == Weight::none) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum.add(edges.x[i], edges.exists[i]);
  } else {
    float w[4];
    real_weights<Config>(a, window, at, edges, w);
    if constexpr (S::kProducts) {
      sum.add(place, edges.x, w);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum.add(edges.x[i], edges.exists[i], [&](int) { return w[i]; });
    }
  }
}

// The sums of a run, into a row of words. The whole warp takes part, with one run a group.
template <class Config>
__device__ inline void reduce_run(const SpmmArgs& a, const Run& run, typename Spmm<Config>::Word* row) {
  using S = Spmm<Config>;
  using Layout = typename S::Layout;
  const LanePlace<Layout> place;
  const EdgeWindow window(run, a.runs.edges);
  int32_t steps = (window.end + Layout::kStep - 1) / Layout::kStep;
  if constexpr (Layout::kSets > 1) {
#pragma unroll
    for (int apart = Layout::kLanes; apart < 32; apart *= 2) {
      steps = max(steps, __shfl_xor_sync(0xffffffffu, steps, apart));
    }
  }
  typename S::Sum sum;
#pragma unroll 1
  for (int pass = 0; pass < Layout::kPasses; ++pass) {
    const int piece = pass * Layout::kPieces + place.piece;
    const bool inside = piece < Layout::kTotal;
    sum.clear();
    Edges<Config> edges;
    int32_t at = place.slot * 4;
    load_edges(a.runs.col, window, at, edges.source);
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) {
      edges.load_rows(a, window, at, piece * 16, inside);
      int32_t following[4];
      load_edges(a.runs.col, window, at + Layout::kStep, following);
      add_edges<Config>(a, window, at, place, piece * Layout::kColumns, edges, sum);
#pragma unroll
      for (int i = 0; i < 4; ++i) edges.source[i] = following[i];
      at += Layout::kStep;
    }
    sum.store(place, row + pass * Layout::kPieces * Layout::kColumns);
  }
}

// The row as the epilogue takes it, from sums over `count` edges.
template <class Config, class T>
__device__ inline float result_of(T sum, int64_t count) {
  if (count == 0) return 0.0f;
  const float v = static_cast<float>(sum);
  return Config::kReduce == Reduce::mean ? __fdiv_rn(v, static_cast<float>(count)) : v;
}

template <class Config, class Epilogue>
__device__ inline void finish_run(const SpmmArgs& a, const Run& run, const typename Spmm<Config>::Word* row,
                                  const Epilogue& epilogue) {
  using S = Spmm<Config>;
  using Word = typename S::Word;
  typename S::Tile tile;
  if (run.slot >= 0) {
    Word* to = static_cast<Word*>(a.staging) + static_cast<int64_t>(run.slot) * S::kStaged;
#pragma unroll
    for (int i = 0; i < S::Tile::kPer; i += 4) {
      const int column = tile.column(i);
      if (column < S::kStaged) *reinterpret_cast<int4*>(to + column) = *reinterpret_cast<const int4*>(row + column);
    }
  } else if (run.row >= 0) {
#pragma unroll
    for (int i = 0; i < S::Tile::kPer; ++i) {
      if (tile.valid(i)) tile.v[i] = result_of<Config>(row[tile.column(i)], run.count);
    }
    epilogue(tile, run.row);
  }
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks) spmm(const SpmmArgs a, const Epilogue epilogue) {
  using S = Spmm<Config>;
  using Layout = typename S::Layout;
  __shared__ int32_t next;
  __shared__ __align__(16) typename S::Word rows[S::kGroups][Layout::kPadded];
  auto* row = rows[threadIdx.x / Layout::kLanes];
  const int set = static_cast<int>(threadIdx.x) % 32 / Layout::kLanes;
  RunQueue<Layout::kSets> queue(a.runs, &next);
  int32_t index = queue.take();
  Run run = run_at(a.runs, index + set, queue.last);
  while (index < queue.last) {
    index = queue.take();
    const Run following = run_at(a.runs, index + set, queue.last);
    reduce_run<Config>(a, run, row);
    __syncwarp();
    finish_run<Config>(a, run, row, epilogue);
    __syncwarp();
    run = following;
  }
}

// Joins the parts of one split row. Groups take slots in turn, and their sums are added in the order of the groups.
template <class Config, class Epilogue>
__global__ void __launch_bounds__(256) spmm_combine(const SpmmArgs a, const Epilogue epilogue) {
  using S = Spmm<Config>;
  using Tile = typename S::Tile;
  using Total = typename Select<S::kExact, int64_t, float>::Type;
  constexpr int kGroups = 256 / Tile::kLanes, kPer = Tile::kPer;
  constexpr Reduce kReduce = Config::kReduce;
  __shared__ Total parts[kGroups][S::kStaged];
  const int2 split = a.runs.split[blockIdx.x];
  const int2 first = a.runs.place[split.x];
  const auto* staging = static_cast<const typename S::Word*>(a.staging) + static_cast<int64_t>(first.y) * S::kStaged;
  Tile tile;
  const auto join = [](Total p, Total q) {
    if constexpr (S::kExact) {
      return p + q;
    } else {
      return combine<kReduce>(p, q);
    }
  };
  const int group = static_cast<int>(threadIdx.x) / Tile::kLanes;
  Total total[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) total[i] = S::kExact ? Total{0} : static_cast<Total>(start_of<kReduce>());
#pragma unroll 4
  for (int32_t slot = group; slot < split.y; slot += kGroups) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (tile.valid(i)) total[i] = join(total[i], staging[static_cast<int64_t>(slot) * S::kStaged + tile.column(i)]);
    }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (tile.valid(i)) parts[group][tile.column(i)] = total[i];
  }
  __syncthreads();
  if (group != 0) return;
  const int64_t count = a.runs.begin[split.x + split.y] - a.runs.begin[split.x];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (!tile.valid(i)) continue;
#pragma unroll 1
    for (int other = 1; other < kGroups; ++other) total[i] = join(total[i], parts[other][tile.column(i)]);
    tile.v[i] = result_of<Config>(total[i], count);
  }
  epilogue(tile, first.x);
}

}  // namespace gnnc
