#pragma once

// The body of the SpMM kernels: loads the weights of edges, adds up gathered rows, and passes finished rows to the
// epilogue, or parts of split rows to the staging buffer. See spmm.cuh for layout, traffic and floor.

#include "sparse/spmm_config.cuh"

namespace gnnc {
// Returns the FP32 result of the reduction, as the epilogue takes it, from an accumulator over `count` edges.
template <class Config, class T>
__device__ inline float result_of(T sum, int64_t count) {
  const float v = static_cast<float>(sum);
  if constexpr (Config::kReduce == Reduce::sum) return v;
  if (count == 0) return 0.0f;
  return Config::kReduce == Reduce::mean ? __fdiv_rn(v, static_cast<float>(count)) : v;
}

// Returns result_of for an integer sum below 2^22: the sum is placed in the low bits of a float, because an
// int-to-float conversion runs at a quarter of the rate.
template <class Config>
__device__ inline float result_of_few(int32_t sum, int32_t count) {
  const float v = __fsub_rn(__uint_as_float(0x4b400000u + static_cast<uint32_t>(sum)), 12582912.0f);
  return Config::kReduce == Reduce::mean && count > 0 ? __fdiv_rn(v, static_cast<float>(count)) : v;
}
constexpr int32_t kFew = (1 << 22) / (127 * 128);  // most edges whose sum is below 2^22

// The body that stream() runs: loads the weights of edges, adds gathered rows, and finishes rows.
template <class Config, class Epilogue, class Runs = Runs>
struct SpmmBody {
  using S = Spmm<Config>;
  using Layout = typename S::Layout;
  using Word = typename S::Word;
  using Total = typename S::Total;
  static constexpr bool kPower = Config::kScale == Scale::power, kRow = Config::kScale == Scale::row;
  static constexpr bool kByteWeights = S::kExact && S::kWeight != Weight::none;
  static constexpr bool kSingly = S::kWeight == Weight::none && (S::kBytes || S::kHalves);
  static constexpr bool kOne = S::kHeadWidth % Layout::kColumns == 0;  // each piece belongs to one head
  static constexpr int kColumns = Layout::kColumns;

  static constexpr bool kBundle = S::kBundle;
  static constexpr int kStep = Config::kStep;
  static constexpr bool kValued = is_valued(Config::kValue, Config::kHeads);
  static constexpr bool kFixes = S::kBytes && S::kWeight == Weight::real;  // real weights become fixed-point integers
  static constexpr bool kByHead = kFixes && Config::kHeads > 1;            // each thread loads the weights of its head
  // kOwns: each thread loads the value and the scale of one or two edges of a step, converts the product to a
  // fixed-point weight and shuffles this weight to its neighbors, because there are no registers for the values and
  // scales of eight edges.
  static constexpr bool kOwns =
      kFixes && !kByHead && (Config::kScale == Scale::none || kRow) && Layout::kPieces >= 4 && !Runs::kStaged;
  // kMasks: `add` must skip missing edges. A row of zeros adds nothing to a sum, but is not neutral for max; and FP32
  // weights by head are loaded in `add`, where the index of a missing edge would be out of range.
  static constexpr bool kMasks = !S::kAdds || (Config::kHeads > 1 && !kByHead);
  // kTight: no registers are spare, and writing zeros for missing rows would make a gather wait for other gathers.
  // the last piece is partly past the width
  static constexpr bool kRagged = S::kHalves && Config::kRowWidth % kColumns != 0;
  static constexpr bool kTight =
      kSingly && !Runs::kStaged && (kRagged || Config::kSlices > 1) && (S::kBytes || kArchitecture < 1000);
  static constexpr bool kWhole = kMasks || kOwns || (kFixes && kValued && kRow) || kTight;

  struct Extra {
    float value[4];    // edge values, if kValued and not kOwns; or if kByHead
    float scale[4];    // scales of source rows, if not kOwns
    uint32_t code[4];  // int8 weights (sign-extended), or shifts; a missing edge has the one that gives weight 0
    bool shifted;      // whether `code` holds shifts
    uint32_t pair[2];  // if kOwns: the weights of two edges a word
    int64_t edge;      // first of the four edges
  };

  const SpmmArgsOn<Runs>& a;
  const Epilogue& epilogue;
  Word* words;  // shared memory for the warp's row, if !kBundle
  int pass;
  typename S::Sum sum;
  int32_t first_column = 0;       // first column of the slice
  const float* values = nullptr;  // if kByHead: value of the first edge for the head of this thread's piece

  template <class Work>
  __device__ __forceinline__ void begin(const Work&, int which) {
    pass = which;
    if constexpr (kByHead) {
      const int head = min(first_of_piece() / S::kHeadStride, Config::kHeads - 1);
      values = opaque(static_cast<const float*>(a.value) + head);
    }
  }

  // Starts the loads of the weights. The loaded values are first used in `add`: if they were used here, the thread
  // would wait for the loads before it gathers the rows.
  __device__ __forceinline__ void load(Extra& e, const Four& four, const int32_t (&source)[4], uint32_t mask) {
    if constexpr (Config::kHeads > 1 && !kByHead) e.edge = four.edge;
    e.shifted = kPower;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool there = mask >> i & 1;
      if constexpr (kValued && !kOwns) e.value[i] = four.value[i];
      if constexpr (kByHead) e.value[i] = load_if(there, values + (four.edge + i) * Config::kHeads, 0.0f);
      if constexpr (kRow && !kOwns) e.scale[i] = load_if(there, a.x_scale + source[i], 0.0f);
      if constexpr (kPower) e.code[i] = load_if(there, a.shift + source[i], 31u);
      if constexpr (Config::kValue == Value::integer) {
        e.code[i] = load_if(there, static_cast<const int8_t*>(a.value) + four.edge + i, 0u);
      }
    }
  }

  template <class Window>
  __device__ __forceinline__ void load_near(Extra& e, const uint32_t (&place)[4], const Window& window) {
    static_assert(Config::kValue == Value::none, "edge weights are stored in CSR order, staged edges are not");
    e.shifted = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kRow) e.scale[i] = window.template factor<float>(place[i]);
      if constexpr (kPower) e.code[i] = window.template factor<uint8_t>(place[i]);
    }
  }

  template <class Own>
  __device__ __forceinline__ void load_own(Own& own) const {
#pragma unroll
    for (int j = 0; j < Own::kCount; ++j) {
      if constexpr (kRow) own.scale[j] = load_if(own.there[j], a.x_scale + own.source[j], 0.0f);
    }
  }

  template <int kFours, class Own>
  __device__ __forceinline__ void weigh(Extra (&extra)[kFours], const Own& own) {
    float made[Own::kCount], most = 0.0f;
#pragma unroll
    for (int j = 0; j < Own::kCount; ++j) {
      made[j] = weight_of_own(own, j);
      most = S::Sum::largest(most, made[j]);
    }
    const float factor = sum.admit(own.across(most, [](float p, float q) { return S::Sum::largest(p, q); }));
    uint32_t fixed[Own::kCount], pairs[kFours][2];
#pragma unroll
    for (int j = 0; j < Own::kCount; ++j) fixed[j] = sum.fixed(made[j], factor);
    own.pair_up(fixed, pairs);
#pragma unroll
    for (int k = 0; k < kFours; ++k) extra[k].pair[0] = pairs[k][0], extra[k].pair[1] = pairs[k][1];
  }

  template <bool kMasked>
  __device__ __forceinline__ void add(const uint4 (&data)[4], const Extra& e, uint32_t mask) {
    if constexpr (kOwns) {
      sum.add_fixed(data, e.pair);
    } else if constexpr (kFixes) {
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = weight(e, i);
      sum.add(data, w);
    } else if constexpr (Config::kScale == Scale::in_row) {
      sum.add(data, weights_of(data));
    } else if constexpr (kByteWeights) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = byte_of(e, i);
      sum.add(data, w);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kSingly) {
          add_one(data[i]);
        } else {
          add_weighted(data[i], e, i, !kMasked || mask >> i & 1);
        }
      }
    }
  }

  // Adds a row without a weight. Columns past the width are cleared first: they may hold NaN, which a product with
  // zeros would spread to other columns.
  __device__ __forceinline__ void add_one(const uint4& x) {
    if constexpr (kSingly && kRagged) {
      const int piece = first_column / kColumns + pass * Layout::kPieces + Layout::piece();
      sum.add_one(RowLayout<S::kElement, Config::kRowWidth>::within(x, piece));
    } else if constexpr (kSingly) {
      sum.add_one(x);
    }
  }

  template <class Work>
  __device__ __forceinline__ void finish(const Work& work, int) {
    const auto join = [](Word p, Word q) { return joined(p, q); };
    Word out[kColumns];
    sum.take(out);
    if constexpr (S::kSpread) {
      if (work.shared) return finish_spread<Layout::kSlots>(out, join, work);
    }
    if constexpr (kBundle && Layout::kTeam > 1) {
      if (!work.shared) return finish_spread<Layout::kTeam>(out, join, work);
    }
    if (work.shared) join_slots<Layout>(out, join);
    if constexpr (kBundle) {
      settle<typename S::Tile>(out, Layout::piece() * kColumns, work);
    } else {
      hold(out);
      if (pass + 1 < Layout::kPasses) return;
      __syncwarp();
      if (work.part >= 0) {
        store_held<S::kStaged>(staged(work.part), words);
      } else {
        emit_held(work.row(), [&](Word v) { return result_of<Config>(v, work.total()); });
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void end_run(const Run& run) const {
    if (run.slot < 0) return;
    const auto join = [&](const Split& split, int32_t slot, int32_t apart, int32_t count, bool whole) {
      join_parts(split, slot, apart, count, whole);
    };
    end_part<32, Config::kSlices>(a.runs.split, a.staging, run.slot, join, first_column / Config::kWidth);
  }

 private:
  template <class T>
  __device__ static T joined(T p, T q) {
    if constexpr (S::kExact) {
      return p + q;
    } else {
      return combine<Config::kReduce>(p, q);
    }
  }

  // Finishes a row, or a part of a split row, that kSlots slots share; the columns are spread over all threads of those
  // slots.
  template <int kSlots, class Join, class Work>
  __device__ __forceinline__ void finish_spread(const Word (&out)[kColumns], const Join& join, const Work& work) const {
    constexpr int kThreads = Layout::kPieces * kSlots, kRun = spread_run<Layout, kSlots>();
    Word own[kRun];
    spread_slots<Layout, kSlots, kRun>(out, join, own);
    settle<RowTile<Config::kWidth, kThreads, kRun, true>>(own, Layout::lane() % kThreads * kRun, work);
  }

  // Returns the weights that four rows hold in their padding (Scale::in_row), a byte each; 0 for a row of zeros.
  __device__ static uint32_t weights_of(const uint4 (&x)[4]) {
    const uint32_t low = __byte_perm(x[0].w, x[1].w, 0x0073), high = __byte_perm(x[2].w, x[3].w, 0x7300);
    return __shfl_sync(0xffffffffu, __byte_perm(low, high, 0x7610), Layout::kTotal - 1, Layout::kPieces);
  }

  // Returns the int8 weight of an edge.
  __device__ static uint32_t byte_of(const Extra& e, int i) { return e.shifted ? 128u >> e.code[i] : e.code[i]; }

  // Returns the weight of an edge that this thread prepares for its neighbors (kOwns); 0 for a missing edge.
  template <class Own>
  __device__ static float weight_of_own(const Own& own, int j) {
    if constexpr (!kValued) return own.scale[j];
    if constexpr (!kRow) return own.there[j] ? own.value[j] : 0.0f;
    return own.there[j] ? __fmul_rn(own.value[j], own.scale[j]) : 0.0f;
  }

  // Returns the weight of an edge for all heads or for this thread's head; 0 for a missing edge where weights are
  // loaded.
  __device__ static float weight(const Extra& e, int i) {
    constexpr bool kGiven = kValued || kByHead;
    const float value = kGiven ? e.value[i] : 1.0f;
    if constexpr (kRow) return kGiven ? __fmul_rn(value, e.scale[i]) : e.scale[i];
    if constexpr (kPower) {
      const auto power = static_cast<float>(byte_of(e, i));
      return kGiven ? __fmul_rn(value, power) : power;
    }
    if constexpr (Config::kValue == Value::integer) return static_cast<float>(static_cast<int8_t>(e.code[i]));
    return value;
  }

  __device__ __forceinline__ void add_weighted(const uint4& x, const Extra& e, int i, bool counts) {
    if constexpr (S::kWeight == Weight::none) {
      sum.add(x, counts);
    } else if constexpr (Config::kHeads == 1) {
      const float w = weight(e, i);
      sum.add(x, counts, [&](int) { return w; });
    } else {
      if (!counts) return;
      const float scale = weight(e, i);
      const float* value = static_cast<const float*>(a.value) + (e.edge + i) * Config::kHeads;
      const int column = first_of_piece();
      const auto of = [&](int c) {
        const int head = (column + c) / S::kHeadWidth;
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

  // Returns the first column of this thread's piece.
  __device__ int first_of_piece() const { return (pass * Layout::kPieces + Layout::piece()) * kColumns; }

  // Returns first_column, made opaque at each use: otherwise the compiler keeps derived values in registers across all
  // rows.
  __device__ int32_t start() const { return Config::kSlices == 1 ? 0 : opaque(first_column); }

  __device__ Total* staged(int32_t slot) const {
    return static_cast<Total*>(a.staging.memory) + static_cast<int64_t>(slot) * S::kStaged + start();
  }
  // Returns the number of columns of a slot of the staging buffer from this slice's first column on.
  __device__ int32_t staged_columns() const {
    constexpr int kColumns = (S::kStride + 3) / 4 * 4;
    return min(kColumns, S::kStaged - start());
  }

  // Stores a finished row, or a part of a split row, of which this thread holds the columns from `first` on.
  template <class Tile, int kCount, class Work>
  __device__ __forceinline__ void settle(const Word (&out)[kCount], int first, const Work& work) const {
    if (work.part >= 0) {
      store_staged(staged(work.part), first, staged_columns(), out);
    } else {
      emit<Tile>(out, work);
    }
  }

  template <class Tile, int kCount, class Work>
  __device__ __forceinline__ void emit(const Word (&out)[kCount], const Work& work) const {
    Tile tile;
    static_assert(Tile::kPer == kCount, "the tile must hold as many columns a thread as the sums do");
    const int32_t count = work.total();
    if (S::kExact && count <= kFew) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (tile.valid(i)) tile.v[i] = result_of_few<Config>(static_cast<int32_t>(out[i]), count);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (tile.valid(i)) tile.v[i] = result_of<Config>(out[i], count);
      }
    }
    end_row(tile, work.row());
  }

  template <class Tile>
  __device__ __forceinline__ void end_row(Tile& tile, int32_t row) const {
    if constexpr (Config::kSlices == 1) {
      epilogue(tile, row);
    } else {
      SliceTile<Tile, Config::kRowWidth> slice(tile, first_column);
      epilogue(slice, row);
    }
  }

  // Rows that take several passes, or have padding between their heads, are collected in shared memory.

  __device__ __forceinline__ void hold(const Word (&out)[kColumns]) const {
    if (Layout::slot() > 0) return;
    Word* to = words + pass * Layout::kPassColumns + Layout::piece() * kColumns;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) to[c] = out[c];
  }

  template <class Result>
  __device__ __forceinline__ void emit_held(int32_t row, const Result& result) const {
    typename S::Tile tile;
#pragma unroll
    for (int i = 0; i < S::Tile::kPer; ++i) {
      if (tile.valid(i)) tile.v[i] = result(words[place_of<S::kHeadWidth, S::kHeadStride>(tile.column(i))]);
    }
    epilogue(tile, row);
  }

  // Joins `count` parts of a split row; called by end_part.
  __device__ __forceinline__ void join_parts(const Split& split, int32_t slot, int32_t apart, int32_t count,
                                             bool whole) const {
    const int64_t edges = whole ? a.runs.rowptr[split.row + 1] - a.runs.rowptr[split.row] : 0;
    const Total start = S::kExact ? Total{0} : static_cast<Total>(start_of<Config::kReduce>());
    const StagedColumns<Total> nothing{{start, start, start, start}};
    Total* to = staged(slot);
    RowTile<S::kStride, 32> tile;
    constexpr int kUnrolled = kBundle ? tile.kPer / 4 : 1;
#pragma unroll kUnrolled
    for (int i = 0; i < tile.kPer; i += 4) {
      const int column = tile.column(i);
      if (column >= staged_columns()) continue;
      StagedColumns<Total> total = nothing;
      const auto load = [&](int32_t which) {
        return load_staged(to + static_cast<int64_t>(which) * apart * S::kStaged + column);
      };
      each_part<32 / sizeof(Total)>(count, nothing, load, [&](const StagedColumns<Total>& part) {
#pragma unroll
        for (int c = 0; c < 4; ++c) total.v[c] = joined(total.v[c], part.v[c]);
      });
      if (!whole) store_staged(to, column, staged_columns(), total.v);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float result = result_of<Config>(total.v[c], edges);
        if constexpr (kBundle) {
          if (tile.valid(i + c)) tile.v[i + c] = result;
        } else {
          reinterpret_cast<float*>(words)[column + c] = result;
        }
      }
    }
    if (!whole) return;
    if constexpr (kBundle) {
      end_row(tile, split.row);
    } else {
      __syncwarp();
      emit_held(split.row, [](Word v) { return *reinterpret_cast<const float*>(&v); });
      __syncwarp();
    }
  }
};

}  // namespace gnnc
