#pragma once

// spmm: out[i, :] = reduce over the edges e of row i of weight(e) * x[col[e], :], then the epilogue.
//
// Layout: x fp32, fp16, bf16 or int8, rows 16-byte aligned, read in pieces of 16 bytes (what is past the width is read
// but never used); col int32. Sums of int8, and of fp16 and bf16 without weights, are those of product_sum.cuh,
// extremes of all three without weights those of pairs of elements (PairExtremes in lane_reduce.cuh), all else is FP32
// (LaneReduce). Where sums of int8 have a weight a head, each head of x begins on 16 bytes (pack_rows.cuh), so that a
// piece lies in one. Traffic: 4 B of col (+ 4 B a weight) and a row of x an edge, the epilogue's outputs a row, 8 B a
// column and slot of a row that is split. Floor: the gather from L1 and L2.
//
// Launch: spmm, or spmm_sliced for rows of more than kMostWhole bytes whose epilogue looks at each column alone, with
// one block of as many threads as they are compiled for a multiprocessor, no dynamic shared memory; spmm_staged as it
// says. staging: slots * Spmm<Config>::kStagedBytes.
//
// Exact: int8 sums without real weights are integers, rounded to FP32 once (a mean is divided in FP32 after that).

#include "sparse/lane_reduce.cuh"
#include "sparse/product_sum.cuh"
#include "common/row_tile.cuh"
#include "sparse/split_rows.cuh"
#include "sparse/staged.cuh"
#include "sparse/stream.cuh"

namespace gnnc {

template <class Runs>
struct SpmmArgsOn {
  Runs runs;
  const void* x;
  int64_t x_stride;      // bytes, a multiple of 16, below 2^32
  const void* value;     // [E] float on 16 bytes, [E, heads] float, or [E] int8; null where Config::kValue is none
  const float* x_scale;  // [num_src], where Config::kScale is row
  const uint8_t* shift;  // [num_src], where Config::kScale is power: row weight 2^(7 - shift)
  Staging staging;       // where rows are split
};
using SpmmArgs = SpmmArgsOn<Runs>;
using StagedSpmmArgs = SpmmArgsOn<StagedRuns>;

enum class Value { none, real, integer };
enum class Scale { none, row, power, in_row };  // in_row: power, and each row holds its weight (weight_place)

// Whether every edge has a float of its own, which all columns share.
__host__ __device__ constexpr bool is_valued(Value value, int heads) { return value == Value::real && heads == 1; }

__host__ __device__ constexpr Weight weight_of(Value value, Scale scale) {
  if (value == Value::real || scale == Scale::row) return Weight::real;
  if (value == Value::integer) return Weight::signed8;
  return scale == Scale::none ? Weight::none : Weight::power8;
}

// Whether elements are compared as they are, two at a time: nothing is multiplied with them.
__host__ __device__ constexpr bool is_extreme_of_pairs(Element element, Reduce reduce, Weight weight, int heads) {
  return element != Element::f32 && reduce >= Reduce::max && weight == Weight::none && heads == 1;
}

__host__ __device__ constexpr bool is_sum_of_codes(Element element, Reduce reduce) {
  return element == Element::i8 && reduce <= Reduce::mean;
}

// Columns of a row of x from one head to the next: what is made FP32 may have several in a piece.
__host__ __device__ constexpr int spmm_head_stride(Element element, int width, Reduce reduce, int heads) {
  return is_sum_of_codes(element, reduce) ? head_stride(element, width, heads) : width / heads;
}

__host__ __device__ constexpr Residency spmm_registers(Element element, int width, Reduce reduce, Value value,
                                                       Scale scale) {
  const Weight weight = weight_of(value, scale);
  const bool bytes = element == Element::i8;
  const bool extreme = reduce >= Reduce::max && !is_extreme_of_pairs(element, reduce, weight, 1);
  if (!is_one_pass(element, width) || kArchitecture < 900) return {512, bytes || extreme ? 4 : 8};
  const int pieces = pieces_of(element, width);
  if (bytes && weight == Weight::none && !extreme) return {pieces == 1 ? 896 : 768, 8};
  if (bytes && value == Value::real && !extreme) {
    if (kArchitecture >= 1000) return {scale != Scale::row ? 640 : 512, 8};
    return {pieces >= 8 || scale != Scale::row ? 768 : 640, 8};
  }
  if (scale == Scale::row && pieces >= 4 && !extreme && kArchitecture < 1000) return {768, 8};
  if (bytes) return {weight == Weight::power8 && kArchitecture < 1000 ? 896 : 768, 4};
  const bool plain = weight == Weight::none && !extreme && pieces <= 16 && width * bytes_of(element) % 16 == 0;
  return {plain && (element == Element::f32 || kArchitecture < 1000) ? 896 : 768, 8};
}

// The same of weights a head, where a row of x has so many columns.
__host__ __device__ constexpr Residency spmm_registers_by_head(Element element, int width, int gathered,
                                                               Reduce reduce) {
  if (kArchitecture < 900 || !is_sum_of_codes(element, reduce) || !is_one_pass(element, gathered)) return {512, 4};
  return {kArchitecture < 1000 && gathered == width ? 640 : 512, 8};
}

__host__ __device__ constexpr Residency spmm_residency(Element element, int width, Reduce reduce, Value value,
                                                       Scale scale, int heads) {
  const int gathered = heads * spmm_head_stride(element, width, reduce, heads);
  Residency r = heads > 1 ? spmm_registers_by_head(element, width, gathered, reduce)
                          : spmm_registers(element, width, reduce, value, scale);
  const int pieces = pieces_of(element, gathered);
  if (pieces == 1) r.step = 4;  // a team of four takes sixteen
  const bool one_pass = is_one_pass(element, gathered);
  const int held = one_pass && gathered == width ? 4 : padded_width(element, gathered);
  return fitting(r, pieces, held, is_valued(value, heads), one_pass);
}

// What a kernel is specialised for. kValue::integer and kScale other than none need int8 rows.
template <Element kElement_, int kWidth_, Reduce kReduce_, Value kValue_ = Value::none, Scale kScale_ = Scale::none,
          int kHeads_ = 1,
          int kThreads_ = spmm_residency(kElement_, kWidth_, kReduce_, kValue_, kScale_, kHeads_).threads,
          int kStep_ = spmm_residency(kElement_, kWidth_, kReduce_, kValue_, kScale_, kHeads_).step>
struct SpmmConfig {
  static constexpr Element kElement = kElement_;
  static constexpr int kWidth = kWidth_;
  static constexpr Reduce kReduce = kReduce_;
  static constexpr Value kValue = kValue_;
  static constexpr Scale kScale = kScale_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kStep = kStep_;
  static constexpr int kRowWidth = kWidth, kSlices = 1;  // of which these columns are one
};

template <class Config>
struct Spmm {
  static constexpr Element kElement = Config::kElement;
  static constexpr int kWidth = Config::kWidth, kHeads = Config::kHeads;
  static constexpr bool kAdds = Config::kReduce == Reduce::sum || Config::kReduce == Reduce::mean;
  static constexpr Weight kWeight = weight_of(Config::kValue, Config::kScale);
  static constexpr bool kBytes = is_sum_of_codes(kElement, Config::kReduce);
  static constexpr int kHeadWidth = kWidth / kHeads;
  static constexpr int kHeadStride = spmm_head_stride(kElement, kWidth, Config::kReduce, kHeads);
  static constexpr int kStride = kHeads * kHeadStride;  // columns of a row of x
  using Layout = RowLayout<kElement, kStride>;
  // Four threads share a row of the matrix product, and what is not finite.
  static constexpr bool kHalves = (kElement == Element::f16 || kElement == Element::bf16) && kAdds &&
                                  kWeight == Weight::none && Layout::kPieces >= 4;
  static constexpr bool kExact = kBytes && kWeight != Weight::real;
  static_assert(kElement == Element::i8 || (Config::kValue != Value::integer && Config::kScale == Scale::none),
                "integer values and scales of rows go with int8 rows");
  static_assert(Config::kValue != Value::integer || Config::kScale == Scale::none, "an int8 value takes no scale");
  static_assert(Config::kScale != Scale::in_row || (kExact && Config::kValue == Value::none &&
                                                    is_one_pass(kElement, kWidth) && weight_place(kWidth) >= 0),
                "the weight comes with the row, and is its only one");
  static_assert(kWidth % kHeads == 0, "heads divide the width");
  static_assert(kHeads == 1 || Config::kValue == Value::real, "weights a head are floats");

  using Bytes = typename Select<kWeight == Weight::none, ByteSum<Layout>, ByteProducts<Layout, kWeight>>::Type;
  using Halves = HalfSum<Layout>;
  using Lanes = typename Select<is_extreme_of_pairs(kElement, Config::kReduce, kWeight, kHeads),
                                PairExtremes<Layout, Config::kReduce>, LaneReduce<Layout, Config::kReduce>>::Type;
  using Sum = typename Select<kBytes, Bytes, typename Select<kHalves, Halves, Lanes>::Type>::Type;
  using Word = typename Sum::Word;

  // The row of a slot, in the columns that its threads gather; or, of several passes or with something between its
  // heads, the row of the warp.
  static constexpr bool kBundle = Layout::kPasses == 1 && kStride == kWidth;
  using Tile = RowTile<kWidth, kBundle ? Layout::kPieces : 32, kBundle ? Layout::kColumns : 4, true>;
  // A row that all slots share, where they have more columns each than is worth storing at once.
  static constexpr bool kSpread = kBundle && spread_run<Layout>() < Layout::kColumns;
  static constexpr int kWarps = Config::kThreads / 32;
  static constexpr int kHeld = kBundle ? 4 : Layout::kPadded;  // words of the row of a warp
  // What a slot of the staging buffer holds of each column.
  using Total = typename Select<kExact, int64_t, float>::Type;
  static constexpr int kStaged = ((kHeads == 1 ? Config::kRowWidth : kStride) + 3) / 4 * 4;
  static constexpr int kStagedBytes = kStaged * sizeof(Total);
};

// The row as the epilogue takes it, from sums over `count` edges.
template <class Config, class T>
__device__ inline float result_of(T sum, int64_t count) {
  const float v = static_cast<float>(sum);
  if constexpr (Config::kReduce == Reduce::sum) return v;
  if (count == 0) return 0.0f;
  return Config::kReduce == Reduce::mean ? __fdiv_rn(v, static_cast<float>(count)) : v;
}

// The same of a sum below 2^22, which a float holds in its last bits; a conversion runs at a quarter of the rate.
template <class Config>
__device__ inline float result_of_few(int32_t sum, int32_t count) {
  const float v = __fsub_rn(__uint_as_float(0x4b400000u + static_cast<uint32_t>(sum)), 12582912.0f);
  return Config::kReduce == Reduce::mean && count > 0 ? __fdiv_rn(v, static_cast<float>(count)) : v;
}
constexpr int32_t kFew = (1 << 22) / (127 * 128);  // edges

// What stream() needs: the weights of edges, and what becomes of the sums of a row.
template <class Config, class Epilogue, class Runs = Runs>
struct SpmmBody {
  using S = Spmm<Config>;
  using Layout = typename S::Layout;
  using Word = typename S::Word;
  using Total = typename S::Total;
  static constexpr bool kPower = Config::kScale == Scale::power, kRow = Config::kScale == Scale::row;
  static constexpr bool kByteWeights = S::kExact && S::kWeight != Weight::none;
  static constexpr bool kSingly = S::kWeight == Weight::none && (S::kBytes || S::kHalves);
  static constexpr bool kOne = S::kHeadWidth % Layout::kColumns == 0;  // one head a piece
  static constexpr int kColumns = Layout::kColumns;

  static constexpr bool kBundle = S::kBundle;
  static constexpr int kStep = Config::kStep;
  static constexpr bool kValued = is_valued(Config::kValue, Config::kHeads);
  static constexpr bool kFixes = S::kBytes && S::kWeight == Weight::real;  // weights are made integers
  static constexpr bool kByHead = kFixes && Config::kHeads > 1;            // each thread those of its head
  // A thread loads what belongs to one or two edges of a step, makes integers of it and gives them to its neighbours:
  // there are no registers for a value and a scale of eight.
  static constexpr bool kOwns =
      kFixes && !kByHead && (Config::kScale == Scale::none || kRow) && Layout::kPieces >= 4 && !Runs::kStaged;
  // Zeros add nothing, but they are not below every maximum; and floats are given weights a head late.
  static constexpr bool kMasks = !S::kAdds || (Config::kHeads > 1 && !kByHead);
  // Where there are no registers to spare, zeros for rows that are not there have a gather wait for others.
  static constexpr bool kRagged = S::kHalves && Config::kRowWidth % kColumns != 0;  // the last piece is not whole
  static constexpr bool kTight =
      kSingly && !Runs::kStaged && (kRagged || Config::kSlices > 1) && (S::kBytes || kArchitecture < 1000);
  static constexpr bool kWhole = kMasks || kOwns || (kFixes && kValued && kRow) || kTight;

  struct Extra {
    float value[4];    // kValued, not kOwns; or kByHead
    float scale[4];    // of rows, not kOwns
    uint32_t code[4];  // int8 weights with their sign, or shifts; of an edge that is not there the one that makes a
                       // weight of 0
    bool shifted;      // whether codes are shifts
    uint32_t pair[2];  // kOwns: weights of two edges
    int64_t edge;      // the first of the four
  };

  const SpmmArgsOn<Runs>& a;
  const Epilogue& epilogue;
  Word* words;  // the warp's row, where slots have none of their own
  int pass;
  typename S::Sum sum;
  int32_t first_column = 0;       // of the slice
  const float* values = nullptr;  // kByHead: of the first edge, for the head of this thread's piece

  template <class Work>
  __device__ __forceinline__ void begin(const Work&, int which) {
    pass = which;
    if constexpr (kByHead) {
      const int head = min(first_of_piece() / S::kHeadStride, Config::kHeads - 1);
      values = opaque(static_cast<const float*>(a.value) + head);
    }
  }

  // What is loaded is not looked at before `add`: that would be to wait for it before the rows are gathered.
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
    static_assert(Config::kValue == Value::none, "weights of edges lie in the order of the CSR");
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

  // What is past the width may be NaN, which a product with zeros would spread.
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

  // Ends a row, or a part of one, that so many slots share, over all of their threads.
  template <int kSlots, class Join, class Work>
  __device__ __forceinline__ void finish_spread(const Word (&out)[kColumns], const Join& join, const Work& work) const {
    constexpr int kThreads = Layout::kPieces * kSlots, kRun = spread_run<Layout, kSlots>();
    Word own[kRun];
    spread_slots<Layout, kSlots, kRun>(out, join, own);
    settle<RowTile<Config::kWidth, kThreads, kRun, true>>(own, Layout::lane() % kThreads * kRun, work);
  }

  // The weights that four rows hold, a byte each; 0 of a row of zeros.
  __device__ static uint32_t weights_of(const uint4 (&x)[4]) {
    const uint32_t low = __byte_perm(x[0].w, x[1].w, 0x0073), high = __byte_perm(x[2].w, x[3].w, 0x7300);
    return __shfl_sync(0xffffffffu, __byte_perm(low, high, 0x7610), Layout::kTotal - 1, Layout::kPieces);
  }

  // The int8 weight of an edge.
  __device__ static uint32_t byte_of(const Extra& e, int i) { return e.shifted ? 128u >> e.code[i] : e.code[i]; }

  // 0 of an edge that is not there.
  template <class Own>
  __device__ static float weight_of_own(const Own& own, int j) {
    if constexpr (!kValued) return own.scale[j];
    if constexpr (!kRow) return own.there[j] ? own.value[j] : 0.0f;
    return own.there[j] ? __fmul_rn(own.value[j], own.scale[j]) : 0.0f;
  }

  // Of an edge that is there, of all heads or of the thread's; 0 of another, where weights are loaded.
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

  // The first column of this thread's piece.
  __device__ int first_of_piece() const { return (pass * Layout::kPieces + Layout::piece()) * kColumns; }

  // Where it is needed: the compiler would keep what it makes of it in registers for all rows.
  __device__ int32_t start() const { return Config::kSlices == 1 ? 0 : opaque(first_column); }

  __device__ Total* staged(int32_t slot) const {
    return static_cast<Total*>(a.staging.memory) + static_cast<int64_t>(slot) * S::kStaged + start();
  }
  // Columns that a slot has from there on.
  __device__ int32_t staged_columns() const {
    constexpr int kColumns = (S::kStride + 3) / 4 * 4;
    return min(kColumns, S::kStaged - start());
  }

  // Ends a row, or a part of one, of which this thread has the columns from `first` on.
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
    static_assert(Tile::kPer == kCount, "a thread keeps the columns that it has");
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

  // Rows of several passes, or with something between their heads, wait in shared memory.

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

  // See end_part.
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

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1) spmm(const SpmmArgs a, const Epilogue epilogue) {
  begin_kernel();
  using S = Spmm<Config>;
  using Layout = typename S::Layout;
  __shared__ int32_t next[1];
  using Body = SpmmBody<Config, Epilogue>;
  __shared__ Feed<Layout, Body> feed[Config::kThreads / 32];
  __shared__ __align__(16) typename S::Word rows[S::kWarps][S::kHeld];
  Body body{a, epilogue, rows[threadIdx.x / 32], 0, {}};
  body.sum.clear();
  const Gathered x = whole_rows<Layout>(a.x, a.x_stride);
  open_queues(next, feed[0].runs.dealt());
  for_runs<Layout>(a.runs, static_cast<const float*>(a.value), x, next, feed[threadIdx.x / 32], body);
}

// Rows of more bytes are summed in slices where they can be.
constexpr int kMostWhole = 256;

// Bytes of a row that spmm_sliced gathers at a time. What all blocks work on then is in L2 though rows are wide, and
// each warp still reads whole lines.
__host__ __device__ constexpr int slice_bytes(Element element) { return element == Element::i8 ? 128 : 256; }

// Which slice it is takes registers too.
__host__ __device__ constexpr int most_threads_of_slices(Element element, int step) {
  return element != Element::i8 || step == 4 || kArchitecture < 1000 ? 768 : 640;
}

template <class Config_>
struct Sliced {
  using Slices = gnnc::Slices<Config_::kElement, Config_::kWidth, slice_bytes(Config_::kElement)>;
  using Whole = SpmmConfig<Config_::kElement, Slices::kWidth, Config_::kReduce, Config_::kValue, Config_::kScale>;
  static constexpr int kMost = most_threads_of_slices(Config_::kElement, Whole::kStep);
  static constexpr int kThreads = Whole::kThreads < kMost ? Whole::kThreads : kMost;
  struct Config : SpmmConfig<Config_::kElement, Slices::kWidth, Config_::kReduce, Config_::kValue, Config_::kScale, 1,
                             kThreads, Whole::kStep> {
    static constexpr int kRowWidth = Config_::kWidth, kSlices = Slices::kCount;
  };
  static_assert(Config_::kHeads == 1 && Config_::kScale != Scale::in_row, "all columns have the same weight");
  static_assert(Config_::kWidth > Slices::kWidth, "there are several");
};

// As spmm, slice by slice: all blocks go through the graph once for each.
template <class Config, class Epilogue>
__global__ void __launch_bounds__(Sliced<Config>::Config::kThreads, 1)
    spmm_sliced(const SpmmArgs a, const Epilogue epilogue) {
  begin_kernel();
  using S = Sliced<Config>;
  using Layout = typename Spmm<typename S::Config>::Layout;
  using Body = SpmmBody<typename S::Config, Epilogue>;
  __shared__ int32_t next[S::Slices::kCount];  // of each slice its own: no warp waits for the others between two
  __shared__ Feed<Layout, Body> feed[S::Config::kThreads / 32];
  open_queues(next, feed[0].runs.dealt());
  Body body{a, epilogue, nullptr, 0, {}, 0};
  body.sum.clear();
#pragma unroll 1
  for (int slice = 0; slice < S::Slices::kCount; ++slice) {
    const Gathered x = S::Slices::of(a.x, a.x_stride, slice);
    body.first_column = slice * S::Slices::kWidth;
    for_runs<Layout>(a.runs, static_cast<const float*>(a.value), x, next + slice, feed[threadIdx.x / 32], body);
  }
}

// Rows of more than 64 bytes, of which a step is four.
__host__ __device__ constexpr int staged_threads_of_slices(Element element, int row, Weight weight) {
  if (kArchitecture < 900 || weight == Weight::real) return 512;
  if (element != Element::i8) return element == Element::f32 && kArchitecture >= 1000 ? 640 : 768;
  if (row <= 128 && weight == Weight::none) return 768;
  return kArchitecture >= 1000 ? 512 : 640;
}

__host__ __device__ constexpr Residency staged_registers(Element element, int width, Weight weight) {
  const bool bytes = element == Element::i8;
  const int row = width * bytes_of(element), step = bytes || row <= 32 ? 4 : 8;
  if (row > 64) return {staged_threads_of_slices(element, row, weight), 4};
  if (kArchitecture < 900 || !bytes) return {512, step};
  const bool few = row % 16 == 0;
  if (weight == Weight::none) return {few ? 768 : 640, step};
  if (kArchitecture >= 1000) return {512, step};
  return {few && weight == Weight::power8 ? 768 : 640, step};
}

__host__ __device__ constexpr Residency staged_residency(Element element, int width, Weight weight) {
  const int row = width * bytes_of(element);
  const Residency r = staged_registers(element, width, weight);
  return fitting_warps(r, staged_feed_bytes(row > 128 ? 8 : pieces_of(element, width), r.step / 4));
}

// How a row of x is cut into slices of which the window of a stretch holds many.
template <class Config_>
struct Staged {
  using Slices = gnnc::Slices<Config_::kElement, Config_::kWidth, 128>;
  static constexpr int kWidth = Slices::kCount == 1 ? Config_::kWidth : Slices::kWidth;
  static constexpr Residency kResidency =
      staged_residency(Config_::kElement, Config_::kWidth, weight_of(Value::none, Config_::kScale));
  static constexpr int kThreads = kResidency.threads;
  struct Config : SpmmConfig<Config_::kElement, kWidth, Config_::kReduce, Value::none, Config_::kScale, 1, kThreads,
                             kResidency.step> {
    static constexpr int kRowWidth = Config_::kWidth, kSlices = Slices::kCount;
  };
  using Layout = typename Spmm<Config>::Layout;
  using Window = gnnc::Window<Layout, Config::kScale == Scale::row ? 4 : Config::kScale == Scale::power ? 1 : 0>;
  using Feed = StagedFeed<Layout, kResidency.step / 4>;
  static constexpr int kEntries = entries_within(Window::kRows);
  static_assert(sizeof(Feed) == staged_feed_bytes(Layout::kPieces, kResidency.step / 4),
                "threads are as many as there is room for");
  static_assert(Spmm<Config>::kAdds && Config_::kValue == Value::none && Config_::kHeads == 1, "sums of rows");
  static_assert(Config_::kScale != Scale::in_row || Slices::kCount == 1, "a row's weight is in its last slice");
  static_assert(Window::kBytes + kThreads / 32 * sizeof(Feed) + sizeof(StagedShare) <= 227 * 1024,
                "a multiprocessor has so much shared memory");
};

// As spmm, with near sources from shared memory. Launch: runs.share of blocks of Staged<Config>::kThreads threads, with
// Staged<Config>::Window::kBytes of dynamic shared memory. A row of several slices reaches the epilogue slice by slice.
template <class Config, class Epilogue>
__global__ void __launch_bounds__(Staged<Config>::kThreads, 1)
    spmm_staged(const StagedSpmmArgs a, const Epilogue epilogue) {
  begin_kernel();
  using S = Staged<Config>;
  extern __shared__ int4 memory[];
  __shared__ StagedShare share;
  __shared__ typename S::Feed feed[S::kThreads / 32];
  const void* factor = Config::kScale == Scale::row ? static_cast<const void*>(a.x_scale) : a.shift;
  typename S::Window window(memory);
  SpmmBody<typename S::Config, Epilogue, StagedRuns> body{a, epilogue, nullptr, 0, {}, 0};
  body.sum.clear();
#pragma unroll 1
  for (int slice = 0; slice < S::Slices::kCount; ++slice) {
    const Gathered x = S::Slices::of(a.x, a.x_stride, slice);
    body.first_column = slice * S::kWidth;
    for_staged_runs<typename S::Layout>(a.runs, x, factor, window, &share, feed[threadIdx.x / 32], body);
  }
}

}  // namespace gnnc
