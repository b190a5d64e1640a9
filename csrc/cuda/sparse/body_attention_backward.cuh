#pragma once

// The gradient of out[i, h, :] = sum over the edges e of row i of alpha[e, h] * x[col[e], h, :], where alpha is the
// softmax over the row of logit[e, h] = finish(sum over the columns c of head h of term(i[row, h, c], j[col[e], h,
// c])), as in body_attention.cuh.
//
// Two passes over the edges; nothing is stored for an edge. Both compute the logits s of edges again, and d = <grad[i],
// x[j]>; the gradient of a logit is alpha (d - t) with t = sum alpha d over the row (FlashAttention-2, algorithm 2: dS
// = P * (dP - D)). body_attention_rows, by rows, finds for each row and head what the other pass needs to know alpha
// and t: L = m + log2 sum 2^(s - m), so that alpha = 2^(s - L), and t. It also sums the gradients of the rows i, for
// which t is not known before the last edge: under a running bound of the logits, it keeps sum p g and sum p d g in
// each column, where p are the exponentials and g the derivatives of the logit; the gradient is (sum p d g - t sum p g)
// / sum p. body_attention_columns, over the transpose, sums the gradients of x, of the rows j, and of the constants of
// the terms; the latter are stored for each row, and added up by another kernel, in one order.
//
// The threads of a head divide what is the same for all its columns (head_threads.cuh).
//
// Layout: x, j, i and grad of one element type, on 16 bytes; the columns of a head are a power of two of 16-byte
// pieces, or there is one head. `Logit` is a functor that the lowering writes: of body_attention.cuh, the factors left
// and right of a term, its derivatives of_own, of_key (without the factor `weight`, if kWeighted) and of_constants, and
// the slope of finish. Traffic: of an edge by rows 4 B of col and a row of x, and of j if that is another; by columns 4
// B of col, a row of i and one of grad, and 8 heads B. Floor: the gathers; or about 10 instructions a column of 16 bits
// an edge by rows, and 17 by columns.
//
// Launch: as spmm. The staging buffer holds kStaged words a slot.

#include "common/row_tile.cuh"
#include "sparse/head_threads.cuh"
#include "sparse/own_columns.cuh"
#include "sparse/softmax.cuh"
#include "sparse/split_rows.cuh"
#include "sparse/stream.cuh"

namespace gnnc {

// Rows at both ends of the edges; strides are in bytes, multiples of 16, below 2^32.
struct BodyAttentionEnds {
  const void* x;  // [num_src]
  int64_t x_stride;
  const void* key;  // [num_src], j, if !kSame
  int64_t key_stride;
  const void* own;  // [num_dst], i
  int64_t own_stride;
  const void* grad;  // [num_dst]
  int64_t grad_stride;
};

struct BodyAttentionRowsArgs {
  Runs runs;
  BodyAttentionEnds ends;
  float2* stats;  // [num_dst, kAllHeads]: L, and t
  float* down;    // [num_dst], the gradient of i
  int64_t down_stride;
  const float* divisor;  // one value that divides it; or null
  Staging staging;
};

struct BodyAttentionColumnsArgs {
  Runs runs;  // of the transpose
  BodyAttentionEnds ends;
  const float2* stats;
  float* dkey;  // [num_src], the gradient of j, if !kJoined
  int64_t dkey_stride;
  const float* divisor;  // one value that divides it; or null
  float* dconst;         // [num_src, constants], of which each has dconst_apart columns, if kConstants
  int64_t dconst_stride;
  int64_t dconst_apart;
  Staging staging;
};

// The pass by columns keeps rows of two matrices at a time, and more sums.
__host__ __device__ constexpr Residency body_attention_backward_residency(Element element, int width, bool columns) {
  return fitting({columns && element == Element::bf16 ? 384 : 512, 4}, pieces_of(element, width), 0);
}

// Compile-time configuration of both passes. kSame: j is x. kJoined: so it is, and its gradients are added up.
// kConstants: gradients of the constants of the terms are wanted. Constants_ has a static constexpr float kEps.
template <Element kElement_, int kWidth_, int kHeads_, int kAllHeads_, bool kSame_, bool kJoined_, bool kConstants_,
          class Constants_, class Logit_,
          int kRowThreads_ = body_attention_backward_residency(kElement_, kWidth_, false).threads,
          int kThreads_ = body_attention_backward_residency(kElement_, kWidth_, true).threads>
struct BodyAttentionBackwardConfig {
  static constexpr Element kElement = kElement_;
  static constexpr int kWidth = kWidth_, kHeads = kHeads_, kAllHeads = kAllHeads_;
  static constexpr bool kSame = kSame_, kJoined = kJoined_, kConstants = kConstants_;
  using Constants = Constants_;
  using Logit = Logit_;
  static constexpr int kRowThreads = kRowThreads_, kThreads = kThreads_, kStep = 4;
  static_assert(kSame || !kJoined, "gradients of two matrices are two");
};

// Returns whether an edge out of four is there. What a logit or a derivative is at a missing edge must not be added,
// even times 0: it may be infinite.
template <bool kMasked>
__device__ __forceinline__ bool exists(uint32_t mask, int place) {
  return !kMasked || (mask >> place & 1);
}

// A thread's columns of the terms of logits: the part that both passes share.
template <class Config>
struct TermColumns {
  using Layout = RowLayout<Config::kElement, Config::kWidth>;
  using Threads = HeadThreads<Layout, Config::kHeads>;
  using Logit = typename Config::Logit;
  using Row = OwnColumns<Config::kElement, Config::kWidth, Layout::kColumns>;
  static constexpr int kColumns = Layout::kColumns, kOwn = Threads::kOwn;
  static constexpr int kCount = Logit::kConstants > 0 ? Logit::kConstants : 1;
  static constexpr int kAll = (Config::kWidth + 3) / 4 * 4;  // columns in the staging buffer
  // Some columns of threads lie in no head.
  static constexpr bool kRagged = Config::kWidth % kColumns != 0 ||
                                  Config::kHeads * Threads::kShare != Layout::kPieces ||
                                  Layout::kTotal != Layout::kPieces;

  const Logit& logit;
  int head, column;  // the head of this thread's piece, and the first column of the piece in its head
  float constant[kColumns][kCount];
  uint32_t zero;

  // Called once, before the edges.
  __device__ __forceinline__ void open() {
    zero = threadIdx.z;
    head = Threads::head_of_thread();
    column = Layout::piece() * kColumns - head * Threads::kHeadWidth;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if constexpr (Logit::kConstants > 0) {
        logit.constants(head, min(column + c, Threads::kHeadWidth - 1), constant[c]);
      }
    }
  }

  // Return the values of a thread's columns of a row.
  __device__ static void load(Row& row, const void* rows, int64_t stride, int32_t which) {
    row.load(static_cast<const char*>(rows) + which * stride, Layout::piece() * kColumns);
  }
  __device__ static void unpacked(const uint4& piece, float (&v)[kColumns]) {
    unpack<Config::kElement>(Threads::inside(piece), v);
  }

  // Returns a piece, but hides from the assembler that it is the same, which would keep what it has unpacked of four
  // edges before: zero is threadIdx.z.
  __device__ __forceinline__ uint4 again(const uint4& v) const {
    return make_uint4(v.x ^ zero, v.y ^ zero, v.z ^ zero, v.w ^ zero);
  }

  // Returns the sum of the terms of this thread's columns.
  __device__ __forceinline__ float part(const float (&own)[kColumns], const float (&key)[kColumns]) const {
    float total = 0.0f;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float left = logit.left(own[c], key[c], constant[c], 1.0f);
      const float right = logit.right(own[c], key[c], constant[c], 1.0f);
      if (!kRagged || column + c < Threads::kHeadWidth) total = fmaf(left, right, total);
    }
    return total;
  }

  __device__ static float dot(const float (&p)[kColumns], const float (&q)[kColumns]) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum = fmaf(p[c], q[c], sum);
    return sum;
  }

  __device__ static int head_of(int at) { return min(at / Threads::kHeadWidth, Config::kHeads - 1); }
};

// Stores the columns of a row from `first` on, divided by what a pointer points to, if it is not null.
template <int kWidth, int kCount>
__device__ __forceinline__ void store_columns(float* row, int first, float (&v)[kCount], const float* divisor) {
  if (divisor != nullptr) {
    const float by = __ldg(divisor);
#pragma unroll
    for (int c = 0; c < kCount; ++c) v[c] = __fdiv_rn(v[c], by);
  }
#pragma unroll
  for (int c = 0; c < kCount; c += 4) {
    if constexpr (kWidth % 4 == 0) {
      if (first + c < kWidth) {
        *reinterpret_cast<float4*>(row + first + c) = make_float4(v[c], v[c + 1], v[c + 2], v[c + 3]);
      }
    } else {
#pragma unroll
      for (int k = c; k < c + 4; ++k) {
        if (first + k < kWidth) row[first + k] = v[k];
      }
    }
  }
}

// Sums of a head over some edges: the bound of the logits, of p, and of p d.
struct SumsOfHead {
  float top = kNoLogit;
  float p = 0.0f, pd = 0.0f;

  // Returns the factor of all sums under another bound.
  __device__ __forceinline__ float raise(float to) {
    const float by = power_of_two(top - to);
    p = __fmul_rn(p, by), pd = __fmul_rn(pd, by);
    top = to;
    return by;
  }

  __device__ static SumsOfHead load(const float* from) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
    return SumsOfHead{v.x, v.y, v.z};
  }
  __device__ void store(float* to) const { *reinterpret_cast<float4*>(to) = make_float4(top, p, pd, 0.0f); }
};

// Joins the sums of parts of a row: of a head, and of kVectors values of each of four columns.
template <int kVectors>
struct PartOfRow {
  SumsOfHead head;
  StagedColumns<float> sum[kVectors > 0 ? kVectors : 1] = {};

  __device__ __forceinline__ void join(PartOfRow other) {
    const float highest = fmaxf(head.top, other.head.top);
    const float by = head.raise(highest), of_other = other.head.raise(highest);
    head.p = __fadd_rn(head.p, other.head.p), head.pd = __fadd_rn(head.pd, other.head.pd);
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[n].v[c] = fmaf(other.sum[n].v[c], of_other, __fmul_rn(sum[n].v[c], by));
    }
  }
};

// The body of the pass by rows.
template <class Config>
struct BodyAttentionRows {
  using Terms = TermColumns<Config>;
  using Layout = typename Terms::Layout;
  using Threads = typename Terms::Threads;
  static constexpr int kHeads = Config::kHeads, kOwn = Terms::kOwn, kColumns = Terms::kColumns, kAll = Terms::kAll;
  static constexpr bool kSame = Config::kSame;
  static constexpr int kStaged = 2 * kAll + 4 * kHeads;
  static constexpr bool kBundle = true, kMasks = true, kWhole = false, kValued = false, kOwns = false;
  static constexpr int kStep = Config::kStep;

  struct Extra {
    uint4 key[kSame ? 1 : 4];
  };

  const BodyAttentionRowsArgs& a;
  Terms terms;
  const char* key;
  typename Terms::Row own, grad;
  SumsOfHead sums;
  float plain[kColumns], dotted[kColumns];  // sums of p g and of p d g, without the weight of their column in g

  __device__ __forceinline__ void open() {
    terms.open();
    if constexpr (!kSame) key = piece_of<Layout>(whole_rows<Layout>(a.ends.key, a.ends.key_stride), 0);
    clear();
  }

  __device__ __forceinline__ void clear() {
    sums = SumsOfHead{};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) plain[c] = dotted[c] = 0.0f;
  }

  __device__ __forceinline__ void begin(const Work& work, int) {
    Terms::load(own, a.ends.own, a.ends.own_stride, work.row());
    Terms::load(grad, a.ends.grad, a.ends.grad_stride, work.row());
  }

  __device__ __forceinline__ void load(Extra& e, const Four&, const int32_t (&source)[4], uint32_t mask) const {
    if constexpr (!kSame) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        e.key[i] = gather_if(mask >> i & 1, row_at(key, source[i], static_cast<uint32_t>(a.ends.key_stride)));
      }
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void add(const uint4 (&x)[4], const Extra& e, uint32_t mask) {
    float totals[4], dots[4], total[kOwn], dot[kOwn], logit[kOwn];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v[kColumns];
      Terms::unpacked(x[i], v);
      dots[i] = Terms::dot(grad.v, v);
      if constexpr (!kSame) Terms::unpacked(e.key[i], v);
      totals[i] = terms.part(own.v, v);
    }
    Threads::add_up(totals, total);
    Threads::add_up(dots, dot);
    float highest = sums.top;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      logit[i] = in_base_two(terms.logit.finish(total[i], 0.0f));
      if (!exists<kMasked>(mask, Threads::place(i))) logit[i] = -__int_as_float(0x7f800000);
      highest = fmaxf(highest, logit[i]);
    }
    if (__any_sync(0xffffffffu, highest > sums.top)) raise(ceilf(Threads::template across<1>(highest, larger_of)));
    float once[kOwn], times[kOwn], p[4], pd[4];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float weight = power_of_two(logit[i] - sums.top);
      sums.p = __fadd_rn(sums.p, weight), sums.pd = fmaf(weight, dot[i], sums.pd);
      once[i] = weight;
      if (exists<kMasked>(mask, Threads::place(i))) once[i] *= terms.logit.slope(total[i]);
      times[i] = once[i] * dot[i];
    }
    Threads::share(once, p);
    Threads::share(times, pd);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!exists<kMasked>(mask, i)) continue;
      float v[kColumns];
      Terms::unpacked(kSame ? x[i] : e.key[kSame ? 0 : i], v);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float derivative = terms.logit.of_own(own.v[c], v[c], terms.constant[c], 1.0f);
        plain[c] = fmaf(p[i], derivative, plain[c]), dotted[c] = fmaf(pd[i], derivative, dotted[c]);
      }
    }
  }

  __device__ __forceinline__ void finish(const Work& work, int) {
    if (work.shared) {
      join_threads<Layout::kSlots>();
    } else {
      join_threads<Layout::kTeam>();
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float weight = terms.logit.weight(terms.constant[c]);
      plain[c] = __fmul_rn(plain[c], weight), dotted[c] = __fmul_rn(dotted[c], weight);
    }
    if (Layout::sharer(work.shared) == 0 && Layout::piece() < Layout::kTotal) {
      if (work.part >= 0) {
        stage(staged(work.part));
      } else {
        settle(work.row(), work.total() > 0);
      }
    }
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
  __device__ static float larger_of(float p, float q) { return fmaxf(p, q); }

  // Rescales all sums to a bound that is the same for all threads of a head, since their columns add shared weights.
  __device__ __forceinline__ void raise(float to) {
    const float by = sums.raise(to);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) plain[c] = __fmul_rn(plain[c], by), dotted[c] = __fmul_rn(dotted[c], by);
  }

  template <int kSlots>
  __device__ __forceinline__ void join_threads() {
    if constexpr (kSlots > 1) {
      raise(Threads::template across<kSlots>(sums.top, larger_of));
      join_slots<Layout, kSlots>(plain, sum_of);
      join_slots<Layout, kSlots>(dotted, sum_of);
    }
    sums.p = Threads::template across<kSlots>(sums.p, sum_of);
    sums.pd = Threads::template across<kSlots>(sums.pd, sum_of);
  }

  __device__ float* staged(int32_t slot) const {
    return static_cast<float*>(a.staging.memory) + static_cast<int64_t>(slot) * kStaged;
  }
  // Returns where a slot has the sums of a head, behind those of columns.
  __device__ static float* heads_of(float* slot) { return slot + 2 * kAll; }

  __device__ __forceinline__ void stage(float* slot) const {
    const int first = Layout::piece() * kColumns;
    store_staged(slot, first, kAll, plain);
    store_staged(slot + kAll, first, kAll, dotted);
    if (Threads::writes()) sums.store(heads_of(slot) + 4 * terms.head);
  }

  // Stores the gradients of this thread's columns of a finished row, and what the other pass needs of it.
  __device__ __forceinline__ void settle(int32_t row, bool edges) const {
    const float inverse = inverse_of(sums, edges), mean = sums.pd * inverse;
    float v[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) v[c] = gradient(plain[c], dotted[c], mean, inverse);
    store_columns<Config::kWidth>(a.down + row * a.down_stride, Layout::piece() * kColumns, v, a.divisor);
    if (Threads::writes()) store_stats(row, terms.head, sums, mean);
  }

  __device__ static float inverse_of(const SumsOfHead& of, bool edges) {
    return softmax_inverse(of.p, edges, Config::Constants::kEps);
  }
  __device__ static float gradient(float plain, float dotted, float mean, float inverse) {
    return fmaf(-mean, plain, dotted) * inverse;
  }

  __device__ void store_stats(int32_t row, int head, const SumsOfHead& of, float mean) const {
    a.stats[static_cast<int64_t>(row) * Config::kAllHeads + head] =
        make_float2(of.top + log2f(__fadd_rn(of.p, Config::Constants::kEps)), mean);
  }

  // Joins `count` parts of a split row; called by end_part.
  __device__ __forceinline__ void join_parts(const Split& split, int32_t slot, int32_t apart, int32_t count,
                                             bool whole) const {
#pragma unroll 1
    for (int column = Layout::lane() * 4; column < kAll; column += 128) {
      const int head = Terms::head_of(column);
      PartOfRow<2> total;
      const auto load = [&](int32_t which) {
        const float* part = staged(slot + which * apart);
        return PartOfRow<2>{SumsOfHead::load(part + 2 * kAll + 4 * head),
                            {load_staged(part + column), load_staged(part + kAll + column)}};
      };
      each_part<4>(count, PartOfRow<2>{}, load, [&](const PartOfRow<2>& part) { total.join(part); });
      if (whole) {
        const float inverse = inverse_of(total.head, true), mean = total.head.pd * inverse;
        float v[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) v[c] = gradient(total.sum[0].v[c], total.sum[1].v[c], mean, inverse);
        store_columns<Config::kWidth>(a.down + split.row * a.down_stride, column, v, a.divisor);
      } else {
        store_staged(staged(slot), column, kAll, total.sum[0].v);
        store_staged(staged(slot) + kAll, column, kAll, total.sum[1].v);
      }
    }
    __syncwarp();  // all threads have read the sums of the heads of the first part before they are overwritten
    for (int head = Layout::lane(); head < kHeads; head += 32) {
      PartOfRow<0> total;
      const auto load = [&](int32_t which) {
        return PartOfRow<0>{SumsOfHead::load(heads_of(staged(slot + which * apart)) + 4 * head)};
      };
      each_part<2>(count, PartOfRow<0>{}, load, [&](const PartOfRow<0>& part) { total.join(part); });
      if (whole) {
        store_stats(split.row, head, total.head, total.head.pd * inverse_of(total.head, true));
      } else {
        total.head.store(heads_of(staged(slot)) + 4 * head);
      }
    }
    __syncwarp();
  }
};

// The body of the pass by columns.
template <class Config, class Epilogue>
struct BodyAttentionColumns {
  using Terms = TermColumns<Config>;
  using Layout = typename Terms::Layout;
  using Threads = typename Terms::Threads;
  static constexpr int kHeads = Config::kHeads, kOwn = Terms::kOwn, kColumns = Terms::kColumns, kAll = Terms::kAll;
  static constexpr bool kSame = Config::kSame;
  // The gradients of x and of j, or their sum, and those of the constants.
  static constexpr int kKey = Config::kJoined ? 0 : 1, kCount = Config::kConstants ? Terms::Logit::kConstants : 0;
  static constexpr int kResults = 1 + kKey + kCount;
  static constexpr int kStaged = kResults * kAll;
  static constexpr bool kBundle = true, kMasks = true, kWhole = false, kValued = false, kOwns = false;
  static constexpr int kStep = Config::kStep;
  using Tile = RowTile<Config::kWidth, Layout::kPieces, kColumns, true>;

  struct Extra {
    uint4 own[4];
    float bound[kOwn], mean[kOwn];
  };

  const BodyAttentionColumnsArgs& a;
  const Epilogue& epilogue;
  Terms terms;
  const char* own;
  typename Terms::Row x, key;
  float sum[kResults][kColumns];

  __device__ __forceinline__ void open() {
    terms.open();
    own = piece_of<Layout>(whole_rows<Layout>(a.ends.own, a.ends.own_stride), 0);
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kResults; ++n) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[n][c] = 0.0f;
    }
  }

  __device__ __forceinline__ void begin(const Work& work, int) {
    Terms::load(x, a.ends.x, a.ends.x_stride, work.row());
    if constexpr (!kSame) Terms::load(key, a.ends.key, a.ends.key_stride, work.row());
  }

  __device__ __forceinline__ void load(Extra& e, const Four&, const int32_t (&source)[4], uint32_t mask) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool there = mask >> Threads::place(i) & 1;
      const float2* stats = a.stats + static_cast<int64_t>(Threads::own_of(source, i)) * Config::kAllHeads + terms.head;
      e.bound[i] = load_if(there, reinterpret_cast<const float*>(stats), 0.0f);
      e.mean[i] = load_if(there, reinterpret_cast<const float*>(stats) + 1, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      e.own[i] = gather_if(mask >> i & 1, row_at(own, source[i], static_cast<uint32_t>(a.ends.own_stride)));
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void add(const uint4 (&grad)[4], const Extra& e, uint32_t mask) {
    const auto& keys = (kSame ? x : key).v;
    float totals[4], dots[4], total[kOwn], dot[kOwn];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v[kColumns];
      Terms::unpacked(grad[i], v);
      dots[i] = Terms::dot(x.v, v);
      Terms::unpacked(e.own[i], v);
      totals[i] = terms.part(v, keys);
    }
    Threads::add_up(totals, total);
    Threads::add_up(dots, dot);
    float weights[kOwn], slopes[kOwn], alpha[4], slope[4];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      weights[i] = power_of_two(in_base_two(terms.logit.finish(total[i], 0.0f)) - e.bound[i]);
      if (!exists<kMasked>(mask, Threads::place(i))) weights[i] = 0.0f;
      slopes[i] = weights[i] * (dot[i] - e.mean[i]) * terms.logit.slope(total[i]);
    }
    Threads::share(weights, alpha);
    Threads::share(slopes, slope);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!exists<kMasked>(mask, i)) continue;
      float v[kColumns], of_row[kColumns];
      Terms::unpacked(terms.again(grad[i]), v);
      Terms::unpacked(terms.again(e.own[i]), of_row);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        sum[0][c] = fmaf(alpha[i], v[c], sum[0][c]);
        constexpr bool kWeighted = Terms::Logit::kWeighted;  // if not, the slope is the factor
        const float of_key = terms.logit.of_key(of_row[c], keys[c], terms.constant[c], kWeighted ? slope[i] : 1.0f);
        const float factor = kWeighted ? terms.logit.weight(terms.constant[c]) : slope[i];
        sum[kKey][c] = fmaf(of_key, factor, sum[kKey][c]);
        if constexpr (kCount > 0) {
          float g[kCount];
          terms.logit.of_constants(of_row[c], keys[c], terms.constant[c], 1.0f, g);
#pragma unroll
          for (int n = 0; n < kCount; ++n) sum[kKey + 1 + n][c] = fmaf(slope[i], g[n], sum[kKey + 1 + n][c]);
        }
      }
    }
  }

  __device__ __forceinline__ void finish(const Work& work, int) {
#pragma unroll
    for (int n = 0; n < kResults; ++n) {
      if (work.shared) {
        join_slots<Layout>(sum[n], sum_of);
      } else {
        join_slots<Layout, Layout::kTeam>(sum[n], sum_of);
      }
    }
    const int first = Layout::piece() * kColumns;
    if (work.part >= 0) {
#pragma unroll
      for (int n = 0; n < kResults; ++n) store_staged(staged(work.part) + n * kAll, first, kAll, sum[n]);
    } else {
      Tile tile;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (tile.valid(c)) tile.v[c] = sum[0][c];
      }
      epilogue(tile, work.row());
#pragma unroll
      for (int n = 1; n < kResults; ++n) store_result(n, work.row(), first, sum[n]);
    }
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

  // Stores columns of a result other than the gradient of x.
  template <int kColumnsOf>
  __device__ __forceinline__ void store_result(int n, int32_t row, int first, float (&v)[kColumnsOf]) const {
    if (n == kKey) {
      store_columns<Config::kWidth>(a.dkey + row * a.dkey_stride, first, v, a.divisor);
    } else {
      float* to = a.dconst + row * a.dconst_stride + (n - kKey - 1) * a.dconst_apart;
      store_columns<Config::kWidth>(to, first, v, nullptr);
    }
  }

  // Joins `count` parts of a split row; called by end_part.
  __device__ __forceinline__ void join_parts(const Split& split, int32_t slot, int32_t apart, int32_t count,
                                             bool whole) const {
    RowTile<Config::kWidth, 32> tile;
#pragma unroll
    for (int n = 0; n < kResults; ++n) {
#pragma unroll
      for (int k = 0; k < tile.kPer; k += 4) {
        const int column = tile.column(k);
        if (column >= kAll) continue;
        StagedColumns<float> total = {};
        const auto load = [&](int32_t which) { return load_staged(staged(slot + which * apart) + n * kAll + column); };
        each_part<4>(count, StagedColumns<float>{}, load, [&](const StagedColumns<float>& part) {
#pragma unroll
          for (int c = 0; c < 4; ++c) total.v[c] = __fadd_rn(total.v[c], part.v[c]);
        });
        if (!whole) {
          store_staged(staged(slot) + n * kAll, column, kAll, total.v);
        } else if (n > 0) {
          store_result(n, split.row, column, total.v);
        } else {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (tile.valid(k + c)) tile.v[k + c] = total.v[c];
          }
        }
      }
    }
    if (whole) epilogue(tile, split.row);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kRowThreads, 1)
    body_attention_rows(const BodyAttentionRowsArgs a, const typename Config::Logit logit) {
  begin_kernel();
  using Body = BodyAttentionRows<Config>;
  using Layout = typename Body::Layout;
  __shared__ int32_t next[1];
  __shared__ Feed<Layout, Body> feed[Config::kRowThreads / 32];
  Body body{a, {logit}};
  body.open();
  const Gathered x = whole_rows<Layout>(a.ends.x, a.ends.x_stride);
  open_queues(next, feed[0].runs.preassigned());
  for_runs<Layout>(a.runs, nullptr, x, next, feed[threadIdx.x / 32], body);
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1)
    body_attention_columns(const BodyAttentionColumnsArgs a, const typename Config::Logit logit,
                           const Epilogue epilogue) {
  begin_kernel();
  using Body = BodyAttentionColumns<Config, Epilogue>;
  using Layout = typename Body::Layout;
  __shared__ int32_t next[1];
  __shared__ Feed<Layout, Body> feed[Config::kThreads / 32];
  Body body{a, epilogue, {logit}};
  body.open();
  const Gathered grad = whole_rows<Layout>(a.ends.grad, a.ends.grad_stride);
  open_queues(next, feed[0].runs.preassigned());
  for_runs<Layout>(a.runs, nullptr, grad, next, feed[threadIdx.x / 32], body);
}

}  // namespace gnnc
