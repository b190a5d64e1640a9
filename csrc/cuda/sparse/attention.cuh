#pragma once

// attention: out[i, h, :] = sum over the edges e of row i of alpha[e, h] * x[col[e], h, :], then the epilogue; alpha is
// the softmax over the row of logit[e, h] = leaky_relu(a_src[col[e], h] + a_dst[i, h] + edge[e, h]), or of edge[e, h]
// alone. The kernel makes one pass over the edges (online softmax): each thread keeps, for the edges that it processes,
// a running upper bound of the logits, the sum of exponentials and the weighted sum. The partial results of slots that
// share a row, and of the parts of a split row, are rescaled to a common bound and added. Neither logits nor alpha are
// written to memory. int8 rows are summed in fixed point (ByteProducts in product_sum.cuh).
//
// Layout: as spmm; a_src, a_dst fp32 [N, heads], edge fp32 [E, heads]. If x has several heads, each head begins on a
// 16-byte boundary (pack_rows.cuh), so that a piece never spans two heads. Each row of int8, e4m3 or e5m2 has one
// scale. Traffic: 4 B of col, heads * 4 B of a_src and a row of x an edge. Floor: the gather; an exponential, and 3
// instructions for 4 columns of int8, an edge.
//
// With kFeatures, edges have features, whose weighted sums are a second result: feature_sums[i, h, :] = sum over e of
// alpha[e, h] * features[e, :]. The threads of a head share the features.
//
// Launch: attention as spmm. The staging buffer holds slots * Attention<Config>::kStaged words. The kernel
// attention_weights (launched as attention) writes alpha.

#include "common/row_tile.cuh"
#include "sparse/lane_reduce.cuh"
#include "sparse/product_sum.cuh"
#include "sparse/softmax.cuh"
#include "sparse/split_rows.cuh"
#include "sparse/stream.cuh"

namespace gnnc {

struct AttentionArgs {
  Runs runs;
  const void* x;
  int64_t x_stride;       // bytes, a multiple of 16, below 2^32
  const float* x_scale;   // [num_src], scales of rows of one byte an element
  const float* a_src;     // [num_src, heads], where Config::kAdditive
  const float* a_dst;     // [rows, heads], where Config::kAdditive
  const float* edge;      // [E, heads], where Config::kEdge
  float2* stats;          // [rows, heads]: maximum logit (times log2 e) and sum of exponentials; or null
  Staging staging;        // staging buffer for the parts of split rows
  const float* features;  // [E, kFeatures], on 16 bytes
  float* feature_sums;    // [rows, heads, kFeatures]
};

// Returns whether each slot of a warp can process a row by itself: the row fits into one pass and has no padding
// between its heads.
__host__ __device__ constexpr bool has_bundles(Element element, int width, int heads) {
  return is_one_pass(element, width) && head_stride(element, width, heads) * heads == width;
}

__host__ __device__ constexpr Residency attention_residency(Element element, int width, int heads) {
  const int held = has_bundles(element, width, heads) ? 6 : 2 * width + 128 + 16 * heads;
  const bool bytes = bytes_of(element) == 1;
  const int threads = kArchitecture < 900 ? 512 : kArchitecture < 1000 ? (bytes ? 768 : 896) : bytes ? 512 : 640;
  return fitting({threads, 4}, pieces_of(element, heads * head_stride(element, width, heads)), held);
}

// Compile-time configuration of attention. Constants has static constexpr floats kSlope (negative slope of the leaky
// ReLU; 1: no activation) and kEps (added to the sum of exponentials).
template <Element kElement_, int kWidth_, int kHeads_, bool kAdditive_, bool kEdge_, class Constants_,
          int kThreads_ = attention_residency(kElement_, kWidth_, kHeads_).threads,
          int kStep_ = attention_residency(kElement_, kWidth_, kHeads_).step, int kFeatures_ = 0>
struct AttentionConfig {
  static constexpr Element kElement = kElement_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kHeads = kHeads_;
  static constexpr bool kAdditive = kAdditive_;
  static constexpr bool kEdge = kEdge_;
  using Constants = Constants_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kStep = kStep_;
  static constexpr int kFeatures = kFeatures_;
};

// Types and constants of the attention kernels, derived from a configuration.
template <class Config>
struct Attention {
  static constexpr int kWidth = Config::kWidth, kHeads = Config::kHeads, kHeadWidth = kWidth / kHeads;
  static constexpr bool kScaled = bytes_of(Config::kElement) == 1;
  static constexpr int kHeadStride = head_stride(Config::kElement, kWidth, kHeads);
  static constexpr int kStride = kHeads * kHeadStride;
  using Layout = RowLayout<Config::kElement, kStride>;
  using Sum = typename Select<Config::kElement == Element::i8, ByteProducts<Layout, Weight::real>,
                              LaneReduce<Layout, Reduce::sum>>::Type;
  // Tile is the register layout of a finished row: with kBundle, a row lies in the threads of one slot, each thread
  // holding the columns that it gathers; otherwise a row is spread over the whole warp.
  static constexpr bool kBundle = has_bundles(Config::kElement, kWidth, kHeads);
  using Tile = RowTile<kWidth, kBundle ? Layout::kPieces : 32, kBundle ? Layout::kColumns : 4, true>;
  // kSpread: a row that all slots share is spread over all threads of the warp before it is stored, because each thread
  // of one slot would hold more columns than one store should write.
  static constexpr bool kSpread = kBundle && spread_run<Layout>() < Layout::kColumns;
  static_assert(kWidth % kHeads == 0, "the number of heads must divide the width");
  static constexpr int kColumns = (kStride + 3) / 4 * 4;
  // kShare: threads of a head. kOwnFeatures: features of an edge that a thread adds up.
  static constexpr int kFeatures = Config::kFeatures, kAllFeatures = kHeads * kFeatures;
  static constexpr int kShare = (kHeadStride + Layout::kColumns - 1) / Layout::kColumns;
  static constexpr int kOwnFeatures = kFeatures > 0 ? kFeatures / kShare : 1;
  static_assert(kFeatures == 0 || (kBundle && kFeatures % 4 == 0 && kFeatures % kShare == 0),
                "the threads of a head must share the features of an edge");
  // Words a slot: sums, then (maximum, sum) a head, then the sums of features.
  static constexpr int kFirstFeature = kColumns + (2 * kHeads + 3) / 4 * 4;
  static constexpr int kStaged = kFirstFeature + kAllFeatures;

  // Returns a logit after the activation, times log2 e.
  __device__ static float logit(float v) {
    if constexpr (Config::Constants::kSlope != 1.0f) v = v > 0.0f ? v : __fmul_rn(v, Config::Constants::kSlope);
    return in_base_two(v);
  }
  __device__ static float inverse(float sum, bool edges) {
    return softmax_inverse(sum, edges, Config::Constants::kEps);
  }
};

// Partial result of four columns of one head over some edges: the weighted sums, the maximum logit and the sum of
// exponentials.
struct PartOfHead {
  float2 stat = {kNoLogit, 0.0f};
  StagedColumns<float> sum = {{0.0f, 0.0f, 0.0f, 0.0f}};

  __device__ __forceinline__ void join(const PartOfHead& other) {
    const float highest = fmaxf(stat.x, other.stat.x);
    const float by = power_of_two(stat.x - highest), of_other = power_of_two(other.stat.x - highest);
    stat = joined_stats(stat, other.stat);
#pragma unroll
    for (int c = 0; c < 4; ++c) sum.v[c] = fmaf(other.sum.v[c], of_other, __fmul_rn(sum.v[c], by));
  }
};

// The body that stream() runs: computes the logits of edges, adds weighted rows, and finishes rows.
template <class Config, class Epilogue>
struct AttentionBody {
  using A = Attention<Config>;
  using Layout = typename A::Layout;
  static constexpr int kHeads = Config::kHeads, kColumns = Layout::kColumns, kPieces = Layout::kPieces;

  static constexpr bool kBundle = A::kBundle, kMasks = true, kWhole = false, kValued = false, kOwns = false;
  static constexpr int kStep = Config::kStep;

  static constexpr int kFeatures = A::kFeatures, kOwnFeatures = A::kOwnFeatures;

  struct Extra {
    float source[4];  // a_src of each edge's source
    float edge[4];
    float scale[4];
    float feature[kFeatures > 0 ? 4 : 1][kOwnFeatures];
  };

  const AttentionArgs& a;
  const Epilogue& epilogue;
  float* words;   // shared memory for the warp's row, if !kBundle
  float2* heads;  // shared memory for the maximum and sum of each head of the warp's row
  int pass;
  int head;           // the head that this thread's piece belongs to
  const char* parts;  // address of a_src[0, head]
  float own;          // a_dst[row, head]
  float top;          // upper bound of all logits so far, a whole number
  float total;
  typename A::Sum sum;
  float feature_sum[kOwnFeatures];

  __device__ __forceinline__ void clear() {
    top = kNoLogit;
    total = 0.0f;
    sum.clear();
    if constexpr (kFeatures > 0) {
#pragma unroll
      for (int f = 0; f < kOwnFeatures; ++f) feature_sum[f] = 0.0f;
    }
  }

  __device__ __forceinline__ void begin(const Work& work, int which) {
    pass = which;
    head = min((pass * Layout::kPieces + Layout::piece()) * kColumns / A::kHeadStride, kHeads - 1);
    if constexpr (Config::kAdditive) {
      own = __ldg(a.a_dst + static_cast<int64_t>(work.row()) * kHeads + head);
      parts = opaque(reinterpret_cast<const char*>(a.a_src + head));
    }
  }

  __device__ __forceinline__ void load(Extra& e, const Four& four, const int32_t (&source)[4], uint32_t mask) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool there = mask >> i & 1;
      if constexpr (Config::kAdditive) {
        const char* part = row_at(parts, source[i], kHeads * sizeof(float));
        e.source[i] = load_if(there, reinterpret_cast<const float*>(part), 0.0f);
      }
      if constexpr (Config::kEdge) e.edge[i] = load_if(there, a.edge + (four.edge + i) * kHeads + head, 0.0f);
      if constexpr (A::kScaled) e.scale[i] = load_if(there, a.x_scale + source[i], 0.0f);
      if constexpr (kFeatures > 0) {
        load_features(e.feature[i], there, a.features + (four.edge + i) * kFeatures + first_feature());
      }
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void add(const uint4 (&x)[4], const Extra& e, uint32_t mask) {
    static_assert(Config::kAdditive || Config::kEdge, "logits need an additive (kAdditive) or an edge term (kEdge)");
    float raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = raw_logit(e, i);
    add_weighted<kMasked>(x, raw, e, mask);
  }

  // Adds four rows, weighted by the exponentials of their logits.
  template <bool kMasked>
  __device__ __forceinline__ void add_weighted(const uint4 (&x)[4], const float (&raw)[4], const Extra& e,
                                               uint32_t mask) {
    float logit[4];
    float highest = top;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      logit[i] = A::logit(raw[i]);
      if (kMasked && !(mask >> i & 1)) logit[i] = -__int_as_float(0x7f800000);
      highest = fmaxf(highest, logit[i]);
    }
    if (__any_sync(0xffffffffu, highest > top)) raise(ceilf(highest));
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float p = power_of_two(logit[i] - top);
      total = __fadd_rn(total, p);
      w[i] = A::kScaled ? __fmul_rn(p, e.scale[i]) : p;
      if constexpr (kFeatures > 0) {
#pragma unroll
        for (int f = 0; f < kOwnFeatures; ++f) feature_sum[f] = fmaf(p, e.feature[i][f], feature_sum[f]);
      }
    }
    sum.add(x, w);
  }

  __device__ __forceinline__ void finish(const Work& work, int) {
    float sums[kColumns];
    sum.take(sums);
    if constexpr (kBundle && Layout::kTeam > 1) {
      if (!work.shared) return finish_spread<Layout::kTeam>(sums, work);
    }
    if constexpr (A::kSpread) {
      if (work.shared) return finish_spread<Layout::kSlots>(sums, work);
    }
    if (work.shared) join_totals<Layout::kSlots>(sums);
    if (work.shared) join_slots<Layout>(sums, sum_of);
    if constexpr (kBundle) {
      settle<typename A::Tile>(sums, Layout::piece() * kColumns, inverse(work), work);
      clear();
    } else {
      hold(sums, work.part >= 0 ? 1.0f : inverse(work));
      clear();
      if (pass + 1 < Layout::kPasses) return;
      __syncwarp();
      if (work.part >= 0) {
        stage_held(work.part);
      } else {
        emit_held(work.row());
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void end_run(const Run& run) {
    if (run.slot < 0) return;
    const auto join = [&](const Split& split, int32_t slot, int32_t apart, int32_t count, bool whole) {
      join_parts(split, slot, apart, count, whole);
    };
    end_part<32>(a.runs.split, a.staging, run.slot, join);
  }

  // Returns the first feature that this thread adds up; threads past the last head have any.
  __device__ __forceinline__ int first_feature() const { return Layout::piece() % A::kShare * kOwnFeatures; }

 private:
  __device__ __forceinline__ static void load_features(float (&v)[kOwnFeatures], bool there, const float* from) {
    if constexpr (kOwnFeatures % 4 == 0) {
#pragma unroll
      for (int f = 0; f < kOwnFeatures; f += 4) {
        const uint4 four = gather_if(there, reinterpret_cast<const char*>(from + f));
#pragma unroll
        for (int j = 0; j < 4; ++j) v[f + j] = __uint_as_float(word_of(four, j));
      }
    } else {
#pragma unroll
      for (int f = 0; f < kOwnFeatures; ++f) v[f] = load_if(there, from + f, 0.0f);
    }
  }

  // Stores the sums of this thread's features of a row, times a factor, at the sums of its heads; all slots that share
  // the row store the same values.
  __device__ __forceinline__ void store_features(float* to, float factor) const {
    if (Layout::piece() >= kHeads * A::kShare) return;
#pragma unroll
    for (int f = 0; f < kOwnFeatures; ++f) {
      to[head * kFeatures + first_feature() + f] = __fmul_rn(feature_sum[f], factor);
    }
  }

  __device__ __forceinline__ float raw_logit(const Extra& e, int i) const {
    if constexpr (!Config::kAdditive) return e.edge[i];
    return __fadd_rn(Config::kEdge ? __fadd_rn(e.source[i], e.edge[i]) : e.source[i], own);
  }

  __device__ static float sum_of(float p, float q) { return __fadd_rn(p, q); }

  __device__ __forceinline__ void raise(float to) {
    const float by = power_of_two(top - to);
    total = __fmul_rn(total, by);
    if constexpr (kFeatures > 0) {
#pragma unroll
      for (int f = 0; f < kOwnFeatures; ++f) feature_sum[f] = __fmul_rn(feature_sum[f], by);
    }
    sum.lower(static_cast<int>(fminf(to - top, 1000.0f)));
    top = to;
  }

  // Finishes a row, or a part of a split row, that kSlots slots share; the columns are spread over all threads of those
  // slots.
  template <int kSlots>
  __device__ __forceinline__ void finish_spread(float (&sums)[kColumns], const Work& work) {
    constexpr int kThreads = kPieces * kSlots, kRun = spread_run<Layout, kSlots>();
    join_totals<kSlots>(sums);
    float own[kRun];
    spread_slots<Layout, kSlots, kRun>(sums, sum_of, own);
    const int first = Layout::lane() % kThreads * kRun;
    const float factor = __shfl_sync(0xffffffffu, inverse(work), first / kColumns % kPieces, kThreads);
    settle<RowTile<Config::kWidth, kThreads, kRun, true>>(own, first, factor, work);
    clear();
  }

  // Reduces the maximum and the total over kSlots neighboring slots, so that every slot has the result, and rescales
  // the sums of this slot to that maximum.
  template <int kSlots>
  __device__ __forceinline__ void join_totals(float (&sums)[kColumns]) {
    float highest[1] = {top};
    join_slots<Layout, kSlots>(highest, [](float p, float q) { return fmaxf(p, q); });
    const float by = power_of_two(top - highest[0]);
    top = highest[0];
    float sum[1] = {__fmul_rn(total, by)};
    join_slots<Layout, kSlots>(sum, sum_of);
    total = sum[0];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums[c] = __fmul_rn(sums[c], by);
    if constexpr (kFeatures > 0) {
#pragma unroll
      for (int f = 0; f < kOwnFeatures; ++f) feature_sum[f] = __fmul_rn(feature_sum[f], by);
      join_slots<Layout, kSlots>(feature_sum, sum_of);
    }
  }

  __device__ __forceinline__ float inverse(const Work& work) const { return A::inverse(total, work.total() > 0); }

  __device__ float* staged(int32_t slot) const {
    return static_cast<float*>(a.staging.memory) + static_cast<int64_t>(slot) * A::kStaged;
  }

  // Return the address of the maxima and totals of the heads, which lie behind the sums in a slot of the staging
  // buffer.
  __device__ static float2* stats_of(float* slot) { return reinterpret_cast<float2*>(slot + A::kColumns); }
  __device__ static const float2* stats_of(const float* slot) {
    return reinterpret_cast<const float2*>(slot + A::kColumns);
  }

  // Stores a finished row, or a part of a split row, of which this thread holds the columns from `first` on. Threads of
  // the same head write identical maxima and totals.
  template <class Tile, int kCount>
  __device__ __forceinline__ void settle(const float (&v)[kCount], int first, float factor, const Work& work) const {
    static_assert(Tile::kPer == kCount, "the tile must hold as many columns a thread as the sums do");
    const int32_t row = work.row();
    if (work.part >= 0) {
      store_staged(staged(work.part), first, A::kColumns, v);
      stats_of(staged(work.part))[head] = make_float2(top, total);
      if constexpr (kFeatures > 0) store_features(staged(work.part) + A::kFirstFeature, 1.0f);
    } else {
      if constexpr (kFeatures > 0) {
        store_features(a.feature_sums + static_cast<int64_t>(row) * A::kAllFeatures, inverse(work));
      }
      if (a.stats != nullptr) a.stats[static_cast<int64_t>(row) * kHeads + head] = make_float2(top, total);
      Tile tile;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (tile.valid(i)) tile.v[i] = __fmul_rn(v[i], factor);
      }
      epilogue(tile, row);
    }
  }

  // Rows that take several passes, or have padding between their heads, are collected in shared memory.

  __device__ __forceinline__ void hold(const float (&sums)[kColumns], float factor) {
    if (Layout::slot() > 0) return;
    float* to = words + (pass * Layout::kPieces + Layout::piece()) * kColumns;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) to[c] = __fmul_rn(sums[c], factor);
    heads[head] = make_float2(top, total);
  }

  __device__ __forceinline__ void stage_held(int32_t slot) const {
    float* to = staged(slot);
    store_held<A::kColumns>(to, words);
    for (int h = Layout::lane(); h < kHeads; h += 32) stats_of(to)[h] = heads[h];
  }

  __device__ __forceinline__ void emit_held(int32_t row) const {
    typename A::Tile tile;
#pragma unroll
    for (int i = 0; i < A::Tile::kPer; ++i) {
      if (tile.valid(i)) tile.v[i] = words[place_of<A::kHeadWidth, A::kHeadStride>(tile.column(i))];
    }
    if (a.stats != nullptr) {
      for (int h = Layout::lane(); h < kHeads; h += 32) a.stats[static_cast<int64_t>(row) * kHeads + h] = heads[h];
    }
    epilogue(tile, row);
  }

  // Joins `count` parts of a split row; called by end_part. Threads of the same head compute identical maxima and
  // totals.
  __device__ __forceinline__ void join_parts(const Split& split, int32_t slot, int32_t apart, int32_t count,
                                             bool whole) {
    RowTile<Config::kWidth, 32> tile;
    constexpr int kUnrolled = kBundle ? tile.kPer / 4 : 1;
#pragma unroll kUnrolled
    for (int first = 0; first < A::kColumns; first += 128) {
      const int column = first + Layout::lane() * 4, of = column / A::kHeadStride;
      if (column >= A::kColumns) continue;
      PartOfHead total;
      const auto load = [&](int32_t which) {
        const float* part = staged(slot + which * apart);
        return PartOfHead{__ldcg(stats_of(part) + of), load_staged(part + column)};
      };
      each_part<4>(count, PartOfHead{}, load, [&](const PartOfHead& part) { total.join(part); });
      if (!whole) {
        store_staged(staged(slot), column, A::kColumns, total.sum.v);
        continue;
      }
      const float factor = A::inverse(total.stat.y, true);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float result = __fmul_rn(total.sum.v[c], factor);
        if constexpr (kBundle) {
          if (tile.valid(first / 32 + c)) tile.v[first / 32 + c] = result;
        } else {
          words[column + c] = result;
        }
      }
    }
    if constexpr (kFeatures > 0) join_features(split.row, slot, apart, count, whole);
    __syncwarp();  // all threads have read the statistics of the first part before join_stats overwrites them
    join_stats(split.row, slot, apart, count, whole);
    if (!whole) return;
    if constexpr (kBundle) {
      epilogue(tile, split.row);
    } else {
      __syncwarp();
      emit_held(split.row);
      __syncwarp();
    }
  }

  // Joins the sums of features of the parts of a row.
  __device__ __forceinline__ void join_features(int32_t row, int32_t slot, int32_t apart, int32_t count,
                                                bool whole) const {
#pragma unroll 1
    for (int column = Layout::lane() * 4; column < A::kAllFeatures; column += 128) {
      PartOfHead total;
      const auto load = [&](int32_t which) {
        const float* part = staged(slot + which * apart);
        return PartOfHead{__ldcg(stats_of(part) + column / kFeatures), load_staged(part + A::kFirstFeature + column)};
      };
      each_part<4>(count, PartOfHead{}, load, [&](const PartOfHead& part) { total.join(part); });
      const float factor = whole ? A::inverse(total.stat.y, true) : 1.0f;
      float* to =
          whole ? a.feature_sums + static_cast<int64_t>(row) * A::kAllFeatures : staged(slot) + A::kFirstFeature;
#pragma unroll
      for (int c = 0; c < 4; ++c) to[column + c] = __fmul_rn(total.sum.v[c], factor);
    }
  }

  // Joins the maxima and sums of exponentials of the parts of a row; each thread handles one head at a time.
  __device__ __forceinline__ void join_stats(int32_t row, int32_t slot, int32_t apart, int32_t count,
                                             bool whole) const {
    float2* to = whole ? heads : stats_of(staged(slot));
    if (kBundle && whole) {
      if (a.stats == nullptr) return;
      to = a.stats + static_cast<int64_t>(row) * kHeads;
    }
    for (int h = Layout::lane(); h < kHeads; h += 32) {
      PartOfHead total;
      const auto load = [&](int32_t which) { return PartOfHead{__ldcg(stats_of(staged(slot + which * apart)) + h)}; };
      each_part<4>(count, PartOfHead{}, load, [&](const PartOfHead& part) { total.join(part); });
      to[h] = total.stat;
    }
  }
};

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1) attention(const AttentionArgs a, const Epilogue epilogue) {
  begin_kernel();
  using Layout = typename Attention<Config>::Layout;
  constexpr int kWarps = Config::kThreads / 32;
  constexpr bool kHeld = !Attention<Config>::kBundle;
  __shared__ int32_t next[1];
  using Body = AttentionBody<Config, Epilogue>;
  __shared__ Feed<Layout, Body> feed[Config::kThreads / 32];
  __shared__ __align__(16) float rows[kWarps][kHeld ? Layout::kPadded : 4];
  __shared__ float2 heads[kWarps][kHeld ? Config::kHeads : 1];
  Body body{a, epilogue, rows[threadIdx.x / 32], heads[threadIdx.x / 32]};
  body.clear();
  const Gathered x = whole_rows<Layout>(a.x, a.x_stride);
  open_queues(next, feed[0].runs.preassigned());
  for_runs<Layout>(a.runs, nullptr, x, next, feed[threadIdx.x / 32], body);
}

// attention_weights: writes alpha[e, h], computed from the statistics that the attention kernel stored. Each warp
// processes one run at a time.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) attention_weights(const AttentionArgs a, float* alpha) {
  begin_kernel();
  using A = Attention<Config>;
  constexpr int kHeads = Config::kHeads;
  __shared__ int32_t next[1];
  open_queues(next);
  RunQueue queue(a.runs, next);
  for (Run run = queue.take(); run.count > 0; run = queue.take()) {
    for (int32_t which = 0; which < run.count; ++which) {
      const Entry entry = load_record(a.runs.entry + run.first + which);
      const int64_t end = (entry.first + entry.count) * kHeads;
      for (int64_t e = entry.first * kHeads + threadIdx.x % 32; e < end; e += 32) {
        const int h = static_cast<int>(e % kHeads);
        float v = 0.0f;
        if constexpr (Config::kAdditive) {
          v = __ldg(a.a_src + static_cast<int64_t>(a.runs.col[e / kHeads]) * kHeads + h);
        }
        if constexpr (Config::kEdge) v = __fadd_rn(v, __ldg(a.edge + e));
        if constexpr (Config::kAdditive)
          v = __fadd_rn(v, __ldg(a.a_dst + static_cast<int64_t>(entry.row) * kHeads + h));
        const float2 s = a.stats[static_cast<int64_t>(entry.row) * kHeads + h];
        alpha[e] = __fmul_rn(power_of_two(A::logit(v) - s.x), A::inverse(s.y, true));
      }
    }
  }
}

}  // namespace gnnc
