#pragma once

// body_attention: attention (attention.cuh) whose logits are computed from the rows at both ends of an edge: logit[e,
// h] = finish(sum over the columns c of head h of term(i[row, h, c], j[col[e], h, c]), edge[e, h]), in FP32. The kernel
// makes one pass over the edges, and gathers x once, if j is x (GATv2), or the rows of both (dot products).
//
// Layout: as attention; j has the element type and the layout of x; i, of floats, has its heads on 16 bytes, too. A
// thread computes the terms of its columns; the threads of a head add them by shuffles, in one order. `Logit` is a
// functor that the lowering writes: constants(head, column, c), term(i, j, c) and finish(total, edge).
// With features, the rows at both ends are dot products' (term, finish) and the features have one, too: total = sum of
// term + sum over f of feature_own[row, h, f] * features[e, f].
// Traffic: 4 B of col, a row of x and, if it is another, of j an edge; a row of i a row.
// Floor: the gather; or about 8 instructions a column of 16 bits an edge.
//
// Launch: as attention, for rows that a warp reads in one pass.

#include "sparse/attention.cuh"
#include "sparse/own_columns.cuh"

namespace gnnc {

struct BodyAttentionArgs {
  AttentionArgs attention;
  const void* own;           // [rows], i
  int64_t own_stride;        // bytes
  const void* key;           // [num_src], j, if !kSame
  int64_t key_stride;        // bytes
  const float* key_scale;    // [num_src], if !kSame, of rows of one byte an element
  float* logits;             // [E, heads], written if kStores
  const float* feature_own;  // [rows, heads, kFeatures]
  int64_t feature_stride;    // floats
};

__host__ __device__ constexpr Residency body_attention_residency(Element element, int width, int heads,
                                                                 int features = 0) {
  const bool bundles = has_bundles(element, width, heads);
  const int held = bundles ? 6 : 2 * width + 128 + 16 * heads;
  const int usual = kArchitecture < 900 || bytes_of(element) == 1 || features > 0 || !bundles ? 512 : 640;
  const int threads = features == 0 || bytes_of(element) == 4 ? usual : bytes_of(element) == 1 ? 256 : 384;
  return fitting({threads, 4}, pieces_of(element, heads * head_stride(element, width, heads)), held);
}

// Compile-time configuration: of attention, the element type of i, whether j is x, and whether logits are stored.
template <class Attention_, Element kOwn_, bool kSame_, bool kStores_, class Logit_>
struct BodyAttentionConfig {
  using Attention = Attention_;
  using Logit = Logit_;
  static constexpr Element kOwn = kOwn_;
  static constexpr bool kSame = kSame_, kStores = kStores_;
};

// The body that stream() runs.
template <class Config, class Epilogue>
struct BodyAttentionBody : AttentionBody<typename Config::Attention, Epilogue> {
  using Base = AttentionBody<typename Config::Attention, Epilogue>;
  using A = typename Base::A;
  using Layout = typename Base::Layout;
  using Logit = typename Config::Logit;
  static constexpr Element kElement = Config::Attention::kElement;
  static constexpr bool kSame = Config::kSame, kStores = Config::kStores, kEdge = Config::Attention::kEdge;
  static constexpr int kHeads = A::kHeads, kColumns = Layout::kColumns;
  static constexpr int kConstants = Logit::kConstants > 0 ? Logit::kConstants : 1;
  static constexpr int kShare = (A::kHeadStride + kColumns - 1) / kColumns;  // threads of a head
  // kRagged: some columns of threads lie in no head. kByShuffle: the threads of a head are neighbors whose number is a
  // power of two, so that sums by exchange are those of a head.
  static constexpr bool kRagged = A::kHeadWidth % kColumns != 0 || kHeads * kShare != Layout::kPieces;
  static constexpr bool kByExchange =
      kHeads == 1 || (kHeads * kShare == Layout::kPieces && (kShare & (kShare - 1)) == 0);
  static_assert(Layout::kPasses == 1, "a row must fit into one pass");

  struct Extra : Base::Extra {
    uint4 key[kSame ? 1 : 4];
    float key_scale[!kSame && A::kScaled ? 4 : 1];
    int64_t first;
  };

  const BodyAttentionArgs& b;
  const Logit& logit_of;
  const char* key;
  int column;  // of this thread's first column, in its head
  float own[kColumns];
  float constant[kColumns][kConstants];
  float feature_own[Base::kOwnFeatures];

  // Called once, before the edges.
  __device__ __forceinline__ void open() {
    const int head = min(Layout::piece() / kShare, kHeads - 1);
    column = Layout::piece() * kColumns - head * A::kHeadStride;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if constexpr (Logit::kConstants > 0) logit_of.constants(head, min(column + c, A::kHeadWidth - 1), constant[c]);
    }
    if constexpr (!kSame) key = piece_of<Layout>(whole_rows<Layout>(b.key, b.key_stride), 0);
  }

  __device__ __forceinline__ void begin(const Work& work, int pass) {
    Base::begin(work, pass);
    constexpr int64_t kHeadBytes = head_stride(Config::kOwn, A::kWidth, kHeads) * bytes_of(Config::kOwn);
    OwnColumns<Config::kOwn, A::kHeadWidth, kColumns> row;
    row.load(static_cast<const char*>(b.own) + work.row() * b.own_stride + this->head * kHeadBytes, column);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) own[c] = row.v[c];
    if constexpr (Base::kFeatures > 0) {
      const int64_t first = work.row() * b.feature_stride + this->head * Base::kFeatures;
#pragma unroll
      for (int f = 0; f < Base::kOwnFeatures; ++f) {
        const float v = __ldg(b.feature_own + first + this->first_feature() + f);
        feature_own[f] = Layout::piece() < kHeads * kShare ? v : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void load(Extra& e, const Four& four, const int32_t (&source)[4], uint32_t mask) const {
    Base::load(e, four, source, mask);
    if constexpr (kStores) e.first = four.edge;
    if constexpr (!kSame) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool there = mask >> i & 1;
        e.key[i] = gather_if(there, row_at(key, source[i], static_cast<uint32_t>(b.key_stride)));
        if constexpr (A::kScaled) e.key_scale[i] = load_if(there, b.key_scale + source[i], 0.0f);
      }
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void add(const uint4 (&x)[4], const Extra& e, uint32_t mask) {
    float raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = !A::kScaled ? 1.0f : kSame ? e.scale[i] : e.key_scale[kSame ? 0 : i];
      raw[i] = part(kSame ? x[i] : e.key[kSame ? 0 : i], scale);
      if constexpr (Base::kFeatures > 0) {
#pragma unroll
        for (int f = 0; f < Base::kOwnFeatures; ++f) raw[i] = fmaf(feature_own[f], e.feature[i][f], raw[i]);
      }
    }
    join(raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = logit_of.finish(raw[i], edge_term(e, i));
    if constexpr (kStores) store(raw, e.first, mask);
    Base::template add_weighted<kMasked>(x, raw, e, mask);
  }

 private:
  __device__ static float edge_term(const Extra& e, int i) {
    if constexpr (kEdge) return e.edge[i];
    return 0.0f;
  }

  // Returns the sum of the terms of this thread's columns of a row.
  __device__ __forceinline__ float part(const uint4& row, float scale) const {
    float v[kColumns], total = 0.0f;
    unpack<kElement>(row, v);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float term = logit_of.term(own[c], A::kScaled ? __fmul_rn(v[c], scale) : v[c], constant[c]);
      total = __fadd_rn(total, kRagged && column + c >= A::kHeadWidth ? 0.0f : term);
    }
    return total;
  }

  // Adds up the sums of the threads of a head, of four edges.
  __device__ __forceinline__ static void join(float (&v)[4]) {
    if constexpr (kByExchange) {
#pragma unroll
      for (int apart = 1; apart < (kHeads == 1 ? Layout::kPieces : kShare); apart *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = __fadd_rn(v[i], __shfl_xor_sync(0xffffffffu, v[i], apart));
      }
    } else {
      const int first = min(Layout::piece() / kShare, kHeads - 1) * kShare;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float total = 0.0f;
#pragma unroll
        for (int t = 0; t < kShare; ++t) {
          total = __fadd_rn(total, __shfl_sync(0xffffffffu, v[i], first + t, Layout::kPieces));
        }
        v[i] = total;
      }
    }
  }

  __device__ __forceinline__ void store(const float (&raw)[4], int64_t first, uint32_t mask) const {
    if (column != 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (mask >> i & 1) b.logits[(first + i) * kHeads + this->head] = raw[i];
    }
  }
};

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::Attention::kThreads, 1)
    body_attention(const BodyAttentionArgs a, const typename Config::Logit logit, const Epilogue epilogue) {
  begin_kernel();
  using Body = BodyAttentionBody<Config, Epilogue>;
  using Layout = typename Body::Layout;
  constexpr int kWarps = Config::Attention::kThreads / 32;
  constexpr bool kHeld = !Body::kBundle;
  __shared__ int32_t next[1];
  __shared__ Feed<Layout, Body> feed[kWarps];
  __shared__ __align__(16) float rows[kWarps][kHeld ? Layout::kPadded : 4];
  __shared__ float2 heads[kWarps][kHeld ? Body::kHeads : 1];
  Body body{{a.attention, epilogue, rows[threadIdx.x / 32], heads[threadIdx.x / 32]}, a, logit};
  body.clear();
  body.open();
  const Gathered x = whole_rows<Layout>(a.attention.x, a.attention.x_stride);
  open_queues(next, feed[0].runs.preassigned());
  for_runs<Layout>(a.attention.runs, nullptr, x, next, feed[threadIdx.x / 32], body);
}

}  // namespace gnnc
