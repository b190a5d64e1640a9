#pragma once

// The gradient of out[i, h, :] = sum over the edges e of row i of alpha[e, h] * x[col[e], h, :], where alpha is the
// softmax over the row of leaky_relu(a_dst[i, h] + a_src[col[e], h]).
//
// Two passes over the edges; nothing is stored for an edge. attention_rows computes, by rows, the gradient of a_dst,
// and of each row and head what the other needs to compute alpha and the gradient of a logit again. With p the
// exponentials under a running bound of the logits (as in attention.cuh), w the slope of the leaky ReLU at an edge and
// d = <grad[i], x[j]>, it sums p, p d, p w d and p w; the gradient of a_dst is (sum p w d - t sum p w) / sum p, t = sum
// p d / sum p. attention_columns computes, over the transpose, the gradients of x and of a_src, and adds to the former
// what comes through a_dst and a_src where these are products of x.
//
// The threads that share a head reduce the products of four edges so that each has those of kOwn edges, and computes
// the exponentials of these alone.
//
// Rows of x and of grad may each be int8 or 8-bit floats with a scale a row. The scale of grad[i] is part of what
// attention_rows stores of row i, so that attention_columns gathers no scales: the stored inverse is multiplied by it,
// and d stays in units of it in both passes. Dot products of two int8 rows are exact integers (dp4a); sums of int8 rows
// are in fixed point (ByteProducts in product_sum.cuh).
//
// Layout: a_dst, a_src fp32 or bf16 [N, kAllHeads], of which the kernels process kHeads; rows of x and grad on 16
// bytes; the columns of a head are a power of two of 16-byte pieces of either type, or there is one head.
// Traffic: of an edge 4 B of col, one row of x or grad, 2 or 4 and 16 heads B, and by rows 4 B of a scale.
// Floor: the gathers of two spmm.
//
// Launch: as spmm. The staging buffer holds kStaged words a slot.

#include "common/row_tile.cuh"
#include "sparse/attention.cuh"
#include "sparse/head_threads.cuh"
#include "sparse/own_columns.cuh"
#include "sparse/product_sum.cuh"

namespace gnnc {

struct AttentionRowsArgs {
  Runs runs;
  const void* x;
  int64_t x_stride;      // bytes, a multiple of 16, below 2^32
  const float* x_scale;  // [num_src], where a value of Config::kX is a byte
  const void* grad;
  int64_t grad_stride;      // bytes, a multiple of 16
  const float* grad_scale;  // [rows], where a value of Config::kGrad is a byte
  const void* a_dst;        // float, or bf16 where Config::kBf16
  const void* a_src;
  // [rows, heads]: a_dst, maximum logit (times log2 e), scale / (sum + eps), sum of alpha * <grad, x> / scale, where
  // scale is that of the row of grad, or 1
  float4* stats;
  float* da_dst;
  Staging staging;
};

struct AttentionColumnsArgs {
  Runs runs;  // of the transpose
  const void* grad;
  int64_t grad_stride;  // bytes, a multiple of 16, below 2^32
  const void* x;
  int64_t x_stride;      // bytes, a multiple of 16
  const float* x_scale;  // [rows of the transpose], where a value of Config::kX is a byte
  const float4* stats;
  const void* a_src;     // float, or bf16 where Config::kBf16
  const float* da_dst;   // where Config::kAttDst
  const float* att_dst;  // [kWidth], where Config::kAttDst: a_dst is the product of x with it
  const float* att_src;  // [kWidth], where Config::kAttSrc
  float* da_src;
  Staging staging;
};

// The pass by rows needs fewer registers than the one by columns.
__host__ __device__ constexpr Residency attention_backward_residency(Element element, int width, int threads) {
  return fitting({threads, 4}, pieces_of(element, width), 0);
}

// Compile-time configuration of both passes. kBf16: a_dst and a_src are bf16. Constants as in AttentionConfig.
template <Element kX_, Element kGrad_, int kWidth_, int kHeads_, int kAllHeads_, bool kBf16_, bool kAttDst_,
          bool kAttSrc_, class Constants_,
          int kRowThreads_ = attention_backward_residency(kX_, kWidth_, kArchitecture < 900 ? 512 : 768).threads,
          int kThreads_ = attention_backward_residency(kGrad_, kWidth_, 512).threads>
struct AttentionBackwardConfig {
  static constexpr Element kX = kX_, kGrad = kGrad_;
  static constexpr int kWidth = kWidth_, kHeads = kHeads_, kAllHeads = kAllHeads_;
  static constexpr bool kBf16 = kBf16_, kAttDst = kAttDst_, kAttSrc = kAttSrc_;
  using Constants = Constants_;
  static constexpr int kRowThreads = kRowThreads_, kThreads = kThreads_, kStep = 4;
};

// Loads half of a logit.
template <bool kBf16>
__device__ __forceinline__ float logit_part(const void* parts, int64_t at) {
  if constexpr (!kBf16) return __ldg(static_cast<const float*>(parts) + at);
  return __uint_as_float(static_cast<uint32_t>(__ldg(static_cast<const uint16_t*>(parts) + at)) << 16);
}

// Loads half of a logit if `there`, by a predicated load; otherwise returns 0.
template <bool kBf16>
__device__ __forceinline__ float logit_part_if(bool there, const void* parts, int64_t at) {
  if constexpr (!kBf16) return load_if(there, static_cast<const float*>(parts) + at, 0.0f);
  return __uint_as_float(load_if(there, static_cast<const uint16_t*>(parts) + at, 0u) << 16);
}

// This thread's columns of an int8 row that the edges share, for dot products with int8 rows.
template <int kWidth>
struct OwnQuantized {
  uint32_t word[4];

  __device__ __forceinline__ void load(const char* row, int first) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int inside = kWidth - first - 4 * j;
      const uint32_t mask = inside >= 4 ? ~0u : inside > 0 ? (1u << 8 * inside) - 1u : 0u;
      word[j] = inside > 0 ? *reinterpret_cast<const uint32_t*>(row + first + 4 * j) & mask : 0u;
    }
  }

  template <Element kOther>
  __device__ __forceinline__ float dot(const uint4& given) const {
    int32_t sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum = __dp4a(static_cast<int32_t>(word_of(given, j)), static_cast<int32_t>(word[j]), sum);
    }
    return static_cast<float>(sum);
  }
};

// Dot products of the ends of an edge, and its logit: the part that both passes share. kGathered and kOwnElement are
// the element types of the rows that edges gather, and of those at the other end.
template <class Config, Element kGathered, Element kOwnElement>
struct AttentionEnds : HeadThreads<RowLayout<kGathered, Config::kWidth>, Config::kHeads> {
  static constexpr int kWidth = Config::kWidth, kHeads = Config::kHeads;
  using Layout = RowLayout<kGathered, kWidth>;
  using Threads = HeadThreads<Layout, kHeads>;
  static constexpr int kColumns = Layout::kColumns, kShare = Threads::kShare, kOwn = Threads::kOwn;

  static constexpr bool kBothQuantized = kGathered == Element::i8 && kOwnElement == Element::i8;
  using Row = typename Select<kBothQuantized, OwnQuantized<kWidth>, OwnColumns<kOwnElement, kWidth, kColumns>>::Type;

  Row row;      // this thread's piece of the row that the edges share; 0 past its width
  float scale;  // of that row
  int head;     // the head that this piece belongs to

  __device__ __forceinline__ void begin(const void* rows, int64_t stride, const float* scales, int32_t which) {
    head = Threads::head_of_thread();
    row.load(static_cast<const char*>(rows) + which * stride, Layout::piece() * kColumns);
    scale = bytes_of(kOwnElement) == 1 ? __ldg(scales + which) : 1.0f;
  }

  // Computes the dot products of the row and the rows of four edges, of which this thread gets those of its own edges.
  __device__ __forceinline__ void dots(const uint4 (&x)[4], float (&out)[kOwn]) const {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = row.template dot<kGathered>(Threads::inside(x[i]));
    Threads::add_up(v, out);
  }

  __device__ static float slope_at(float raw) { return raw > 0.0f ? 1.0f : Config::Constants::kSlope; }

  // Returns the activated logit times log2 e (as Attention<Config>::logit).
  __device__ static float logit(float raw) { return __fmul_rz(__fmul_rn(raw, slope_at(raw)), 1.44269504f); }
};

// The sums of a head over some edges, and the bound of their logits.
struct RowOfHead {
  float top = kNoLogit;
  float p = 0.0f, pd = 0.0f, pwd = 0.0f, pw = 0.0f;

  __device__ __forceinline__ void raise(float to) {
    const float by = power_of_two(top - to);
    p = __fmul_rn(p, by), pd = __fmul_rn(pd, by), pwd = __fmul_rn(pwd, by), pw = __fmul_rn(pw, by);
    top = to;
  }

  __device__ __forceinline__ void join(RowOfHead other) {
    const float highest = fmaxf(top, other.top);
    raise(highest);
    other.raise(highest);
    p = __fadd_rn(p, other.p), pd = __fadd_rn(pd, other.pd);
    pwd = __fadd_rn(pwd, other.pwd), pw = __fadd_rn(pw, other.pw);
  }

  static constexpr int kWords = 8;  // in the staging buffer

  __device__ void store(float* to) const {
    reinterpret_cast<float4*>(to)[0] = make_float4(top, p, pd, pwd);
    to[4] = pw;
  }
  __device__ static RowOfHead load(const float* from) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
    return RowOfHead{v.x, v.y, v.z, v.w, __ldcg(from + 4)};
  }
};

// The body of the pass by rows.
template <class Config>
struct AttentionRowsBody {
  using Ends = AttentionEnds<Config, Config::kX, Config::kGrad>;
  using Layout = typename Ends::Layout;
  static constexpr int kHeads = Config::kHeads, kOwn = Ends::kOwn, kStaged = RowOfHead::kWords * kHeads;
  static constexpr bool kScaled = bytes_of(Config::kX) == 1;
  static constexpr bool kBundle = true, kMasks = true, kWhole = false, kValued = false, kOwns = false;
  static constexpr int kStep = Config::kStep;

  struct Extra {
    float source[kOwn];
    float scale[kScaled ? kOwn : 1];
  };

  const AttentionRowsArgs& a;
  Ends ends;
  float own;
  RowOfHead sums;

  __device__ __forceinline__ void begin(const Work& work, int) {
    ends.begin(a.grad, a.grad_stride, a.grad_scale, work.row());
    own = logit_part<Config::kBf16>(a.a_dst, static_cast<int64_t>(work.row()) * Config::kAllHeads + ends.head);
  }

  __device__ __forceinline__ void load(Extra& e, const Four&, const int32_t (&source)[4], uint32_t mask) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int64_t from = Ends::own_of(source, i);
      const bool there = mask >> Ends::place(i) & 1;
      e.source[i] = logit_part_if<Config::kBf16>(there, a.a_src, from * Config::kAllHeads + ends.head);
      if constexpr (kScaled) e.scale[i] = load_if(there, a.x_scale + from, 0.0f);
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void add(const uint4 (&x)[4], const Extra& e, uint32_t mask) {
    float dot[kOwn], logit[kOwn];
    ends.dots(x, dot);
    if constexpr (kScaled) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) dot[i] = __fmul_rn(dot[i], e.scale[i]);
    }
    float highest = sums.top;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      logit[i] = Ends::logit(__fadd_rn(e.source[i], own));
      if (kMasked && !(mask >> Ends::place(i) & 1)) logit[i] = -__int_as_float(0x7f800000);
      highest = fmaxf(highest, logit[i]);
    }
    if (__any_sync(0xffffffffu, highest > sums.top)) sums.raise(ceilf(highest));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float p = power_of_two(logit[i] - sums.top), pw = p * Ends::slope_at(__fadd_rn(e.source[i], own));
      sums.p = __fadd_rn(sums.p, p), sums.pw = __fadd_rn(sums.pw, pw);
      sums.pd = fmaf(p, dot[i], sums.pd), sums.pwd = fmaf(pw, dot[i], sums.pwd);
    }
  }

  __device__ __forceinline__ void finish(const Work& work, int) {
    if (work.shared) {
      join_threads<Layout::kSlots>();
    } else {
      join_threads<Layout::kTeam>();
    }
    if (Ends::writes() && Layout::sharer(work.shared) == 0) {
      if (work.part >= 0) {
        sums.store(staged(work.part) + RowOfHead::kWords * ends.head);
      } else {
        settle(work.row(), ends.head, sums, ends.scale, work.total() > 0);
      }
    }
    sums = RowOfHead{};
  }

  __device__ __forceinline__ void end_run(const Run& run) const {
    if (run.slot < 0) return;
    const auto join = [&](const Split& split, int32_t slot, int32_t apart, int32_t count, bool whole) {
      for (int h = Layout::lane(); h < kHeads; h += 32) {
        RowOfHead total;
        const auto part = [&](int32_t i) { return RowOfHead::load(staged(slot + i * apart) + RowOfHead::kWords * h); };
        each_part<4>(count, RowOfHead{}, part, [&](const RowOfHead& other) { total.join(other); });
        if (whole) {
          const float scale = bytes_of(Config::kGrad) == 1 ? __ldg(a.grad_scale + split.row) : 1.0f;
          settle(split.row, h, total, scale, true);
        } else {
          total.store(staged(slot) + RowOfHead::kWords * h);
        }
      }
      __syncwarp();
    };
    end_part<32>(a.runs.split, a.staging, run.slot, join);
  }

 private:
  __device__ float* staged(int32_t slot) const {
    return static_cast<float*>(a.staging.memory) + static_cast<int64_t>(slot) * kStaged;
  }

  template <int kSlots>
  __device__ __forceinline__ void join_threads() {
    const auto sum = [](float v, float w) { return __fadd_rn(v, w); };
    sums.raise(Ends::template across<kSlots>(sums.top, [](float v, float w) { return fmaxf(v, w); }));
    sums.p = Ends::template across<kSlots>(sums.p, sum);
    sums.pd = Ends::template across<kSlots>(sums.pd, sum);
    sums.pwd = Ends::template across<kSlots>(sums.pwd, sum);
    sums.pw = Ends::template across<kSlots>(sums.pw, sum);
  }

  // Stores the statistics of a finished row and head, and the gradient of its a_dst. The dot products are to be
  // multiplied by `scale`.
  __device__ void settle(int32_t row, int head, const RowOfHead& of, float scale, bool edges) const {
    const int64_t at = static_cast<int64_t>(row) * Config::kAllHeads + head;
    const float inverse = of.p == 0.0f && !edges ? 0.0f : __fdiv_rn(1.0f, __fadd_rn(of.p, Config::Constants::kEps));
    const float mean = of.pd * inverse, scaled = __fmul_rn(inverse, scale);
    a.stats[at] = make_float4(logit_part<Config::kBf16>(a.a_dst, at), of.top, scaled, mean);
    a.da_dst[at] = (of.pwd - mean * of.pw) * scaled;
  }
};

// Columns of a part of a row, and the gradient of a_src of their head.
struct PartOfColumns {
  StagedColumns<float> sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
  float da = 0.0f;

  __device__ __forceinline__ void join(const PartOfColumns& other) {
    da = __fadd_rn(da, other.da);
#pragma unroll
    for (int c = 0; c < 4; ++c) sum.v[c] = __fadd_rn(sum.v[c], other.sum.v[c]);
  }
};

// The body of the pass by columns.
template <class Config, class Epilogue>
struct AttentionColumnsBody {
  using Ends = AttentionEnds<Config, Config::kGrad, Config::kX>;
  using Layout = typename Ends::Layout;
  using Sum = typename Select<Config::kGrad == Element::i8, ByteProducts<Layout, Weight::real>,
                              LaneReduce<Layout, Reduce::sum>>::Type;
  static constexpr int kHeads = Config::kHeads, kOwn = Ends::kOwn, kColumns = Layout::kColumns;
  static constexpr int kPieces = Layout::kPieces, kAll = (Config::kWidth + 3) / 4 * 4;  // columns in the staging buffer
  static constexpr int kStaged = kAll + (kHeads + 3) / 4 * 4;
  static constexpr bool kBundle = true, kMasks = true, kWhole = false, kValued = false, kOwns = false;
  static constexpr bool kSpread = spread_run<Layout>() < kColumns;
  static constexpr int kStep = Config::kStep;

  struct Extra {
    uint4 stat[kOwn];
  };

  const AttentionColumnsArgs& a;
  const Epilogue& epilogue;
  Ends ends;
  float own;
  float da;
  Sum sum;

  __device__ __forceinline__ void clear() {
    da = 0.0f;
    sum.clear();
  }

  __device__ __forceinline__ void begin(const Work& work, int) {
    ends.begin(a.x, a.x_stride, a.x_scale, work.row());
    own = logit_part<Config::kBf16>(a.a_src, static_cast<int64_t>(work.row()) * Config::kAllHeads + ends.head);
  }

  __device__ __forceinline__ void load(Extra& e, const Four&, const int32_t (&source)[4], uint32_t mask) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int64_t from = static_cast<int64_t>(Ends::own_of(source, i)) * Config::kAllHeads + ends.head;
      e.stat[i] = gather_if(mask >> Ends::place(i) & 1, reinterpret_cast<const char*>(a.stats + from));
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void add(const uint4 (&x)[4], const Extra& e, uint32_t mask) {
    float dot[kOwn], alpha[kOwn], w[4];
    ends.dots(x, dot);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float top = __uint_as_float(e.stat[i].y), inverse = __uint_as_float(e.stat[i].z);
      const float raw = __fadd_rn(__uint_as_float(e.stat[i].x), own);
      alpha[i] = __fmul_rn(power_of_two(Ends::logit(raw) - top), inverse);
      if (kMasked && !(mask >> Ends::place(i) & 1)) alpha[i] = 0.0f;
      const float product = bytes_of(Config::kX) == 1 ? __fmul_rn(dot[i], ends.scale) : dot[i];
      da = fmaf(__fmul_rn(alpha[i], Ends::slope_at(raw)), product - __uint_as_float(e.stat[i].w), da);
    }
    Ends::share(alpha, w);
    sum.add(x, w);
  }

  __device__ __forceinline__ void finish(const Work& work, int) {
    float sums[kColumns];
    sum.take(sums);
    if constexpr (Layout::kTeam > 1) {
      if (!work.shared) return finish_spread<Layout::kTeam>(sums, work);
    }
    if constexpr (kSpread) {
      if (work.shared) return finish_spread<Layout::kSlots>(sums, work);
    }
    if (work.shared) {
      join_slots<Layout>(sums, sum_of);
      da = Ends::template across<Layout::kSlots>(da, sum_of);
    } else {
      da = Ends::template across<1>(da, sum_of);
    }
    settle<RowTile<Config::kWidth, kPieces, kColumns, true>>(sums, Layout::piece() * kColumns, da, work);
    clear();
  }

  __device__ __forceinline__ void end_run(const Run& run) const {
    if (run.slot < 0) return;
    const auto join = [&](const Split& split, int32_t slot, int32_t apart, int32_t count, bool whole) {
      join_parts(split, slot, apart, count, whole);
    };
    end_part<32>(a.runs.split, a.staging, run.slot, join);
  }

 private:
  __device__ static float sum_of(float p, float q) { return __fadd_rn(p, q); }

  __device__ float* staged(int32_t slot) const {
    return static_cast<float*>(a.staging.memory) + static_cast<int64_t>(slot) * kStaged;
  }

  __device__ static int head_of(int column) { return min(column / (Config::kWidth / kHeads), kHeads - 1); }

  // Finishes a row, or a part of a split row, that kSlots slots share; the columns are spread over all threads of those
  // slots.
  template <int kSlots>
  __device__ __forceinline__ void finish_spread(float (&sums)[kColumns], const Work& work) {
    constexpr int kThreads = kPieces * kSlots, kRun = spread_run<Layout, kSlots>();
    const float joined = Ends::template across<kSlots>(da, sum_of);
    float spread[kRun];
    spread_slots<Layout, kSlots, kRun>(sums, sum_of, spread);
    const int first = Layout::lane() % kThreads * kRun;
    const float of_head = __shfl_sync(0xffffffffu, joined, first / kColumns % kPieces, kThreads);
    settle<RowTile<Config::kWidth, kThreads, kRun, true>>(spread, first, of_head, work);
    clear();
  }

  // Stores a finished row, or a part of a split row, of which this thread holds the columns from `first` on, all of one
  // head. Threads of the same head write identical gradients of a_src.
  template <class Tile, int kCount>
  __device__ __forceinline__ void settle(const float (&v)[kCount], int first, float of_head, const Work& work) const {
    static_assert(Tile::kPer == kCount, "the tile must hold as many columns a thread as the sums do");
    const int head = head_of(first);
    if (work.part >= 0) {
      store_staged(staged(work.part), first, kAll, v);
      if (first < Config::kWidth) staged(work.part)[kAll + head] = of_head;
      return;
    }
    Tile tile;
#pragma unroll
    for (int i = 0; i < kCount; ++i) tile.v[i] = v[i];
    emit(tile, work.row(), [&](int) { return head; }, [&](int) { return of_head; });
  }

  // Adds to a finished row what comes through a_dst and a_src, and stores it.
  template <class Tile, class Head, class Of>
  __device__ __forceinline__ void emit(Tile& tile, int32_t row, const Head& head, const Of& of_head) const {
    const int64_t at = static_cast<int64_t>(row) * Config::kAllHeads;
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
      if (!tile.valid(i)) {
        tile.v[i] = 0.0f;
        continue;
      }
      const int column = tile.column(i);
      if constexpr (Config::kAttDst) {
        tile.v[i] = fmaf(__ldg(a.da_dst + at + head(i)), __ldg(a.att_dst + column), tile.v[i]);
      }
      if constexpr (Config::kAttSrc) tile.v[i] = fmaf(of_head(i), __ldg(a.att_src + column), tile.v[i]);
      if (i % 4 == 0) a.da_src[at + head(i)] = of_head(i);
    }
    epilogue(tile, row);
  }

  // Joins `count` parts of a split row; called by end_part.
  __device__ __forceinline__ void join_parts(const Split& split, int32_t slot, int32_t apart, int32_t count,
                                             bool whole) const {
    RowTile<Config::kWidth, 32> tile;
    float of_head[tile.kPer / 4];
#pragma unroll
    for (int n = 0; n < tile.kPer / 4; ++n) {
      const int column = tile.column(4 * n);
      of_head[n] = 0.0f;
      if (column >= kAll) continue;
      PartOfColumns total;
      const auto load = [&](int32_t which) {
        const float* part = staged(slot + which * apart);
        return PartOfColumns{load_staged(part + column), __ldcg(part + kAll + head_of(column))};
      };
      each_part<4>(count, PartOfColumns{}, load, [&](const PartOfColumns& part) { total.join(part); });
      of_head[n] = total.da;
#pragma unroll
      for (int c = 0; c < 4; ++c) tile.v[4 * n + c] = total.sum.v[c];
    }
    __syncwarp();  // all threads have read the first part before it is overwritten
    if (whole) {
      emit(tile, split.row, [&](int i) { return head_of(tile.column(i)); }, [&](int i) { return of_head[i / 4]; });
      return;
    }
#pragma unroll
    for (int n = 0; n < tile.kPer / 4; ++n) {
      const int column = tile.column(4 * n);
      if (column >= kAll) continue;
      const float four[4] = {tile.v[4 * n], tile.v[4 * n + 1], tile.v[4 * n + 2], tile.v[4 * n + 3]};
      store_staged(staged(slot), column, kAll, four);
      staged(slot)[kAll + head_of(column)] = of_head[n];
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kRowThreads, 1) attention_rows(const AttentionRowsArgs a) {
  begin_kernel();
  using Body = AttentionRowsBody<Config>;
  using Layout = typename Body::Layout;
  __shared__ int32_t next[1];
  __shared__ Feed<Layout, Body> feed[Config::kRowThreads / 32];
  Body body{a};
  body.sums = RowOfHead{};
  const Gathered x = whole_rows<Layout>(a.x, a.x_stride);
  open_queues(next, feed[0].runs.preassigned());
  for_runs<Layout>(a.runs, nullptr, x, next, feed[threadIdx.x / 32], body);
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_columns(const AttentionColumnsArgs a, const Epilogue epilogue) {
  begin_kernel();
  using Body = AttentionColumnsBody<Config, Epilogue>;
  using Layout = typename Body::Layout;
  __shared__ int32_t next[1];
  __shared__ Feed<Layout, Body> feed[Config::kThreads / 32];
  Body body{a, epilogue};
  body.clear();
  const Gathered grad = whole_rows<Layout>(a.grad, a.grad_stride);
  open_queues(next, feed[0].runs.preassigned());
  for_runs<Layout>(a.runs, nullptr, grad, next, feed[threadIdx.x / 32], body);
}

}  // namespace gnnc
