#pragma once

// spmm: out[i, :] = reduce over the edges e of row i of weight(e) * x[col[e], :], then the epilogue.
//
// Layout: x fp32, fp16, bf16 or int8, rows 16-byte aligned, read in pieces of 16 bytes (what is past the width is read
// but never used); col int32. Sums of int8, fp16 and bf16 without a weight a head run on the tensor cores
// (mma_sum.cuh), all else in FP32 (lane_reduce.cuh). Traffic: 4 B of col (+ 4 B a weight) and a row of x an edge, the
// epilogue's outputs a row, 8 B a column and slot of a row that is split. Floor: the gather from L1 and L2.
//
// Launch: spmm with one block of Config::kThreads threads for every chunk of runs.chunk; then, where rows are split,
// spmm_combine with one block of 256 threads for every 8 rows of runs.split, their number as last argument. No dynamic
// shared memory. staging: slots * Spmm<Config>::kStaged words of 4 bytes.
//
// Exact: int8 sums without real weights are integers, rounded to FP32 once (a mean is divided in FP32 after that).

#include "lane_reduce.cuh"
#include "product_sum.cuh"
#include "row_tile.cuh"
#include "stream.cuh"

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

__host__ __device__ constexpr Weight weight_of(Value value, Scale scale) {
  if (value == Value::real || scale == Scale::row) return Weight::real;
  if (value == Value::integer) return Weight::signed8;
  return scale == Scale::power ? Weight::power8 : Weight::none;
}

__host__ __device__ constexpr Residency spmm_registers(Element element, int width, Reduce reduce, Weight weight,
                                                       int heads) {
  const bool bytes = element == Element::i8, extreme = reduce >= Reduce::max;
  const int row = width * bytes_of(element);
  const bool weighted = weight != Weight::none, single = element == Element::f32;
  if (bytes && heads > 1) return {kArchitecture < 900 ? 256 : 512, false};
  if (kArchitecture < 900) return {512, row <= 512 || !(weighted || extreme)};
  if (heads > 1 || (extreme && !single) || row <= 16) return {512, true};
  if (single && weighted) return {row <= 32 ? 512 : 640, true};
  if (single) return {row > 512 || kArchitecture >= 1000 ? 768 : 1024, true};
  if (bytes && !weighted) return {768, true};
  if (bytes && weight == Weight::real) return {640, true};
  if (weighted) return {1024, false};
  return {row >= 512 ? 512 : kArchitecture >= 1000 ? 768 : 1024, true};
}

// So many threads that their rows fit into the static shared memory of a block.
__host__ __device__ constexpr Residency spmm_residency(Element element, int width, Reduce reduce, Weight weight,
                                                       int heads) {
  Residency r = spmm_registers(element, width, reduce, weight, heads);
  while (r.threads > 32 && r.threads / 32 * (width + 128) * 4 > 47 * 1024) r.threads /= 2;
  return r;
}

// What a kernel is specialised for. kValue::integer and kScale other than none need int8 rows.
template <Element kElement_, int kWidth_, Reduce kReduce_, Value kValue_ = Value::none, Scale kScale_ = Scale::none,
          int kHeads_ = 1,
          int kThreads_ = spmm_residency(kElement_, kWidth_, kReduce_, weight_of(kValue_, kScale_), kHeads_).threads,
          bool kAhead_ = spmm_residency(kElement_, kWidth_, kReduce_, weight_of(kValue_, kScale_), kHeads_).ahead>
struct SpmmConfig {
  static constexpr Element kElement = kElement_;
  static constexpr int kWidth = kWidth_;
  static constexpr Reduce kReduce = kReduce_;
  static constexpr Value kValue = kValue_;
  static constexpr Scale kScale = kScale_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kThreads = kThreads_;
  static constexpr bool kAhead = kAhead_;
};

template <class Config>
struct Spmm {
  static constexpr Element kElement = Config::kElement;
  static constexpr int kWidth = Config::kWidth, kHeads = Config::kHeads;
  static constexpr bool kAdds = Config::kReduce == Reduce::sum || Config::kReduce == Reduce::mean;
  static constexpr Weight kWeight = weight_of(Config::kValue, Config::kScale);
  static constexpr bool kBytes = kElement == Element::i8 && kAdds && kHeads == 1;
  static constexpr bool kHalves =
      (kElement == Element::f16 || kElement == Element::bf16) && kAdds && kWeight == Weight::none;
  static constexpr bool kExact = kBytes && kWeight != Weight::real;
  static_assert(kElement == Element::i8 || (Config::kValue != Value::integer && Config::kScale == Scale::none),
                "integer values and scales of rows go with int8 rows");
  static_assert(Config::kValue != Value::integer || Config::kScale == Scale::none, "an int8 value takes no scale");
  static_assert(kWidth % kHeads == 0, "heads divide the width");

  using Layout = RowLayout<kElement, kWidth>;
  using Bytes = typename Select<kWeight == Weight::none, ByteSum<Layout>, ByteProducts<Layout, kWeight>>::Type;
  using Halves = HalfSum<Layout>;
  using Lanes = LaneReduce<Layout, Config::kReduce>;
  using Sum = typename Select<kBytes, Bytes, typename Select<kHalves, Halves, Lanes>::Type>::Type;
  using Tile = RowTile<kWidth, 32>;
  using Word = typename Select<kExact, int32_t, float>::Type;

  static constexpr int kWarps = Config::kThreads / 32;
  static constexpr int kStaged = (kWidth + 3) / 4 * 4;  // words a slot
};

// The row as the epilogue takes it, from sums over `count` edges.
template <class Config, class T>
__device__ inline float result_of(T sum, int64_t count) {
  if (count == 0) return 0.0f;
  const float v = static_cast<float>(sum);
  return Config::kReduce == Reduce::mean ? __fdiv_rn(v, static_cast<float>(count)) : v;
}

// What stream() needs: the weights of edges, and what becomes of the sums of a row.
template <class Config, class Epilogue>
struct SpmmBody {
  using S = Spmm<Config>;
  using Layout = typename S::Layout;
  using Word = typename S::Word;
  static constexpr bool kPower = Config::kScale == Scale::power, kRow = Config::kScale == Scale::row;
  static constexpr bool kByteWeights = S::kExact && S::kWeight != Weight::none;
  static constexpr bool kSingly = S::kWeight == Weight::none && (S::kBytes || S::kHalves);
  static constexpr int kHeadWidth = Config::kWidth / Config::kHeads;
  static constexpr bool kAhead = Config::kAhead;
  static constexpr bool kOne = kHeadWidth % Layout::kColumns == 0;  // one head a piece

  struct Extra {
    float value[4];  // kValue::real, one head
    float scale[4];  // of rows, or int8 weights as floats
    uint32_t bytes;  // int8 weights, edge i in byte i
    int64_t edge;    // the first of the four, which are kSlots apart
  };

  const SpmmArgs& a;
  const Epilogue& epilogue;
  Word* words;  // the warp's row
  int pass;
  typename S::Sum sum;

  __device__ __forceinline__ void load(Extra& e, const Run& run, int32_t begin, const int32_t (&source)[4],
                                       uint32_t exists) {
    const int64_t first = run.base + begin + Layout::slot();
    if constexpr (Config::kHeads > 1) e.edge = first;
    if constexpr (kByteWeights) e.bytes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool there = exists >> i & 1;
      if constexpr (Config::kValue == Value::real && Config::kHeads == 1) {
        e.value[i] = there ? load_once(static_cast<const float*>(a.value) + first + i * Layout::kSlots) : 0.0f;
      }
      if constexpr (kRow) e.scale[i] = there ? __ldg(a.x_scale + source[i]) : 0.0f;
      uint32_t byte = 0;
      if constexpr (kPower) byte = there ? 128u >> __ldg(a.shift + source[i]) : 0u;
      if constexpr (Config::kValue == Value::integer) {
        byte = there ? __ldg(static_cast<const uint8_t*>(a.value) + first + i * Layout::kSlots) : 0u;
      }
      if constexpr (kByteWeights) {
        e.bytes |= byte << (8 * i);
      } else if constexpr (kPower) {
        e.scale[i] = static_cast<float>(byte);
      } else if constexpr (Config::kValue == Value::integer) {
        e.scale[i] = static_cast<float>(static_cast<int8_t>(byte));
      }
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void add(const uint4 (&data)[4], const Extra& e, uint32_t mask) {
    if constexpr (kByteWeights) {
      // Bits 0 to 3 of the mask as bytes.
      const uint32_t bytes = kMasked ? e.bytes & ((mask * 0x00204081u & 0x01010101u) * 255u) : e.bytes;
      sum.add(data, bytes);
    } else if constexpr (S::kBytes && S::kWeight == Weight::real) {
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = !kMasked || mask >> i & 1 ? weight(e, i) : 0.0f;
      sum.add(data, w);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool counts = !kMasked || mask >> i & 1;
        const uint4 x = counts ? data[i] : make_uint4(0, 0, 0, 0);
        if constexpr (kSingly) {
          add_one(x);
        } else {
          add_weighted(x, e, i, counts);
        }
      }
    }
  }

  // What is past the width may be NaN, which a product with zeros would spread.
  __device__ __forceinline__ void add_one(const uint4& x) {
    if constexpr (kSingly && S::kHalves && Config::kWidth % Layout::kColumns != 0) {
      sum.add_one(Layout::within(x, pass * Layout::kPieces + Layout::piece()));
    } else if constexpr (kSingly) {
      sum.add_one(x);
    }
  }

  __device__ __forceinline__ void set_pass(int which) { pass = which; }

  __device__ __forceinline__ void begin(int32_t, const Run&) const {}

  __device__ __forceinline__ void finish(int32_t row, const Run& run) {
    sum.store(words + pass * Layout::kPassColumns);
    if (pass + 1 < Layout::kPasses) return;
    __syncwarp();
    if (run.slot >= 0) {
      stage(run.slot);
    } else {
      emit(row);
    }
    __syncwarp();
  }

 private:
  // Of an edge that counts, where all heads have the same.
  __device__ static float weight(const Extra& e, int i) {
    constexpr bool kValued = Config::kValue == Value::real && Config::kHeads == 1;
    constexpr bool kScaled = Config::kScale != Scale::none || Config::kValue == Value::integer;
    if constexpr (kValued && kScaled) return __fmul_rn(e.value[i], e.scale[i]);
    if constexpr (kValued) return e.value[i];
    if constexpr (kScaled) return e.scale[i];
    return 1.0f;
  }

  __device__ __forceinline__ void add_weighted(const uint4& x, const Extra& e, int i, bool counts) {
    if constexpr (S::kWeight == Weight::none) {
      sum.add(x, counts);
    } else if constexpr (Config::kHeads == 1) {
      const float w = counts ? weight(e, i) : 0.0f;
      sum.add(x, counts, [&](int) { return w; });
    } else {
      if (!counts) return;
      const float scale = weight(e, i);
      const float* value = static_cast<const float*>(a.value) + (e.edge + i * Layout::kSlots) * Config::kHeads;
      const int column = (pass * Layout::kPieces + Layout::piece()) * Layout::kColumns;
      const auto of = [&](int c) {
        const int head = (column + c) / kHeadWidth;
        return head < Config::kHeads ? __fmul_rn(__ldg(value + head), scale) : 0.0f;
      };
      if constexpr (kOne) {
        const float w = of(0);
        sum.add(x, true, [&](int) { return w; });
      } else {
        sum.add(x, true, of);
      }
    }
  }

  __device__ __forceinline__ void stage(int32_t slot) const {
    const typename S::Tile tile;
    Word* to = static_cast<Word*>(a.staging) + static_cast<int64_t>(slot) * S::kStaged;
#pragma unroll
    for (int i = 0; i < S::Tile::kPer; i += 4) {
      const int column = tile.column(i);
      if (column < S::kStaged) *reinterpret_cast<int4*>(to + column) = *reinterpret_cast<const int4*>(words + column);
    }
  }

  __device__ __forceinline__ void emit(int32_t row) const {
    typename S::Tile tile;
    int64_t count = 1;
    if constexpr (Config::kReduce != Reduce::sum) count = a.runs.rowptr[row + 1] - a.runs.rowptr[row];
#pragma unroll
    for (int i = 0; i < S::Tile::kPer; ++i) {
      if (tile.valid(i)) tile.v[i] = result_of<Config>(words[tile.column(i)], count);
    }
    epilogue(tile, row);
  }
};

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1) spmm(const SpmmArgs a, const Epilogue epilogue) {
  using S = Spmm<Config>;
  using Layout = typename S::Layout;
  __shared__ int32_t next;
  __shared__ __align__(16) typename S::Word rows[S::kWarps][Layout::kPadded];
  const auto* x = static_cast<const char*>(a.x);
  const auto stride = static_cast<uint32_t>(a.x_stride);
  SpmmBody<Config, Epilogue> body{a, epilogue, rows[threadIdx.x / 32], 0, {}};
  body.sum.clear();
  for_runs<Layout>(a.runs, x, stride, &next, body);
}

// Joins the parts of split rows, a warp a row; the whole block does the rows of its warps that have many parts. The
// order of a row's additions depends on nothing but its number of parts.
template <class Config, class Epilogue>
struct Combine {
  using S = Spmm<Config>;
  using Tile = typename S::Tile;
  using Total = typename Select<S::kExact, int64_t, float>::Type;
  static constexpr int kPer = Tile::kPer, kWarps = 8, kMany = 16;

  const SpmmArgs& a;
  const Epilogue& epilogue;
  Tile tile;
  Total total[kPer];

  __device__ static Total join(Total p, Total q) {
    if constexpr (S::kExact) {
      return p + q;
    } else {
      return combine<Config::kReduce>(p, q);
    }
  }

  // The parts from `first` on, `by` apart.
  __device__ void sum_parts(int2 split, int first, int by) {
    const int slot = a.runs.place[split.x].y;
    const auto* staging = static_cast<const typename S::Word*>(a.staging) + static_cast<int64_t>(slot) * S::kStaged;
#pragma unroll
    for (int i = 0; i < kPer; ++i) total[i] = S::kExact ? Total{0} : static_cast<Total>(start_of<Config::kReduce>());
#pragma unroll 4
    for (int part = first; part < split.y; part += by) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        if (tile.valid(i)) total[i] = join(total[i], staging[static_cast<int64_t>(part) * S::kStaged + tile.column(i)]);
      }
    }
  }

  __device__ __forceinline__ void emit(int2 split) {
    const int32_t row = a.runs.place[split.x].x;
    const int64_t count = a.runs.rowptr[row + 1] - a.runs.rowptr[row];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (tile.valid(i)) tile.v[i] = result_of<Config>(total[i], count);
    }
    epilogue(tile, row);
  }
};

template <class Config, class Epilogue>
__global__ void __launch_bounds__(256, 2)
    spmm_combine(const SpmmArgs a, const Epilogue epilogue, const int64_t splits) {
  using C = Combine<Config, Epilogue>;
  __shared__ typename C::Total parts[C::kWarps][C::S::kStaged];
  C work{a, epilogue};
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * C::kWarps;
  if (first + warp < splits && a.runs.split[first + warp].y <= C::kMany) {
    const int2 split = a.runs.split[first + warp];
    work.sum_parts(split, 0, 1);
    work.emit(split);
  }
  for (int64_t index = first; index < first + C::kWarps && index < splits; ++index) {
    const int2 split = a.runs.split[index];
    if (split.y <= C::kMany) continue;
    work.tile = typename C::Tile();
    work.sum_parts(split, warp, C::kWarps);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < C::kPer; ++i) {
      if (work.tile.valid(i)) parts[warp][work.tile.column(i)] = work.total[i];
    }
    __syncthreads();
    if (warp != 0) continue;
#pragma unroll
    for (int i = 0; i < C::kPer; ++i) {
      if (!work.tile.valid(i)) continue;
#pragma unroll 1
      for (int other = 1; other < C::kWarps; ++other) {
        work.total[i] = C::join(work.total[i], parts[other][work.tile.column(i)]);
      }
    }
    work.emit(split);
  }
}

}  // namespace gnnc
