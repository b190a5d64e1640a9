#pragma once

// sddmm: computes, for every edge, one value a head (dot) or one row (elementwise) from the row a[i, :] of its
// destination and the row b[j, :] of its source.
//
// Layout: a and b of one type, or both of 8-bit floats, rows 16-byte aligned; out fp32 [E, heads] for dot, [E, F]
// otherwise, in CSR order. An int8 dot is an exact 32-bit sum (dp4a), rounded to FP32 once. Floats are multiplied and
// summed in FP32. A dot is then multiplied by a_scale[i] and b_scale[j] where given. Traffic: 4 B of col and one
// gathered row of b an edge, the rows of a once, out once. Floor: the gather, or 4 E F bytes written where out is as
// wide as the rows.
//
// Launch: one block of Config::kThreads threads a multiprocessor. With several heads, a head must be a power of two of
// 16-byte pieces, with zeros past its columns, and a row at most 32 pieces.

#include "sparse/lane_reduce.cuh"
#include "sparse/stream.cuh"

namespace gnnc {

enum class EdgeOp { dot, add, sub, mul, copy_src, copy_dst };

struct SddmmArgs {
  Runs runs;
  const void* a;
  int64_t a_stride;  // bytes, a multiple of 16
  const void* b;
  int64_t b_stride;      // bytes, a multiple of 16, below 2^32
  const float* a_scale;  // [rows], where Config::kScaled
  const float* b_scale;  // [num_src], where Config::kScaled
  float* out;
};

__host__ __device__ constexpr Residency sddmm_residency(Element element, int width, EdgeOp op) {
  const bool few = kArchitecture < 900 || op != EdgeOp::dot || !is_one_pass(element, width);
  return fitting(few ? Residency{512, 4} : Residency{640, 8}, pieces_of(element, width), 0);
}

// kElement: of b; kOwn: of a.
template <Element kElement_, int kWidth_, EdgeOp kOp_, int kHeads_ = 1, bool kScaled_ = false,
          Element kOwn_ = kElement_, int kThreads_ = sddmm_residency(kElement_, kWidth_, kOp_).threads,
          int kStep_ = sddmm_residency(kElement_, kWidth_, kOp_).step>
struct SddmmConfig {
  static constexpr Element kElement = kElement_, kOwn = kOwn_;
  static constexpr int kWidth = kWidth_;
  static constexpr EdgeOp kOp = kOp_;
  static constexpr int kHeads = kHeads_;
  static constexpr bool kScaled = kScaled_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kStep = kStep_;
};

// The body that stream() runs: computes and stores the values of edges.
template <class Config>
struct SddmmBody {
  using Layout = RowLayout<Config::kElement, Config::kWidth>;
  static constexpr int kColumns = Layout::kColumns, kHeads = Config::kHeads;
  static constexpr bool kBytes = Config::kElement == Element::i8;
  static constexpr bool kDot = Config::kOp == EdgeOp::dot;
  static_assert(kDot || bytes_of(Config::kElement) > 1, "quantized rows support only dot");
  static_assert(Config::kOwn == Config::kElement || (is_fp8(Config::kOwn) && is_fp8(Config::kElement)),
                "both ends must have one layout");
  using Sum = typename Select<kBytes, int32_t, float>::Type;
  // Number of threads that share a head.
  static constexpr int kShare = kHeads == 1 ? Layout::kPieces : Config::kWidth / kHeads / kColumns;
  static_assert(kHeads == 1 || (Layout::kPasses == 1 && kShare * kHeads * kColumns == Config::kWidth &&
                                (kShare & (kShare - 1)) == 0),
                "a head is a power of two of 16-byte pieces");

  static constexpr bool kBundle = true, kMasks = true, kWhole = true, kValued = false, kOwns = false;
  static constexpr int kStep = Config::kStep;

  struct Extra {
    int64_t edge;  // first of the four edges
    float scale[4];
  };

  const SddmmArgs& a;
  int pass;
  uint4 own;  // this thread's piece of the destination's row
  float own_scale;

  __device__ __forceinline__ void begin(const Work& work, int which) {
    pass = which;
    own = row_of(work.row());
    if constexpr (Config::kScaled) own_scale = __ldg(a.a_scale + work.row());
  }

  __device__ __forceinline__ void load(Extra& e, const Four& four, const int32_t (&source)[4], uint32_t mask) const {
    e.edge = four.edge;
    if constexpr (Config::kScaled) {
#pragma unroll
      for (int i = 0; i < 4; ++i) e.scale[i] = load_if(mask >> i & 1, a.b_scale + source[i], 0.0f);
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void add(const uint4 (&x)[4], const Extra& e, uint32_t mask) {
    if constexpr (kDot) {
      dots(x, e, mask);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!kMasked || mask >> i & 1) write_row(x[i], e.edge + i);
      }
    }
  }

  __device__ __forceinline__ void finish(const Work&, int) const {}
  __device__ __forceinline__ void end_run(const Run&) const {}

 private:
  __device__ uint4 row_of(int32_t row) const {
    const int piece = min(pass * Layout::kPieces + Layout::piece(), Layout::kTotal - 1);
    return inside(__ldg(reinterpret_cast<const uint4*>(static_cast<const char*>(a.a) + row * a.a_stride) + piece));
  }

  // Returns a piece with the columns past the width, which may hold anything, set to zero.
  __device__ __forceinline__ uint4 inside(const uint4& v) const {
    return Layout::within(v, pass * Layout::kPieces + Layout::piece());
  }

  __device__ __forceinline__ Sum product(const uint4& given) const {
    const uint4 x = inside(given);
    if constexpr (kBytes) {
      int32_t sum = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum = __dp4a(static_cast<int32_t>(word_of(own, j)), static_cast<int32_t>(word_of(x, j)), sum);
      }
      return sum;
    } else {
      float p[kColumns], q[kColumns], sum = 0.0f;
      unpack<Config::kOwn>(own, p);
      unpack<Config::kElement>(x, q);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum = fmaf(p[c], q[c], sum);
      return sum;
    }
  }

  // Computes the dot products of four edges.
  __device__ __forceinline__ void dots(const uint4 (&x)[4], const Extra& e, uint32_t mask) {
    const bool counts = pass * Layout::kPieces + Layout::piece() < Layout::kTotal;
    Sum v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = counts ? product(x[i]) : Sum{0};
    int first;
    const int count = share_sums<kShare, Layout>(v, first);
    if (Layout::lane() % kShare >= 4) return;
    const int head = kHeads == 1 ? 0 : Layout::piece() / kShare;
    if (head >= kHeads) return;  // these threads lie past the row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count && mask >> (first + i) & 1) write(v[i], e, first + i, head);
    }
  }

  __device__ __forceinline__ void write(Sum v, const Extra& e, int i, int head) {
    float* to = a.out + (e.edge + i) * kHeads + head;
    if constexpr (Layout::kPasses > 1) {
      if (pass > 0) v += *reinterpret_cast<Sum*>(to);
      if (pass + 1 < Layout::kPasses) {
        *reinterpret_cast<Sum*>(to) = v;
        return;
      }
    }
    float result = static_cast<float>(v);
    if constexpr (Config::kScaled) {
      const float scale = i == 0 ? e.scale[0] : i == 1 ? e.scale[1] : i == 2 ? e.scale[2] : e.scale[3];
      result = __fmul_rn(__fmul_rn(result, own_scale), scale);
    }
    *to = result;
  }

  __device__ __forceinline__ void write_row(const uint4& x, int64_t edge) {
    float p[kColumns], q[kColumns];
    unpack<Config::kElement>(own, p);
    unpack<Config::kElement>(x, q);
    const int column = (pass * Layout::kPieces + Layout::piece()) * kColumns;
    float* to = a.out + edge * Config::kWidth + column;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float v = q[c];
      if constexpr (Config::kOp == EdgeOp::add) v = __fadd_rn(p[c], q[c]);
      if constexpr (Config::kOp == EdgeOp::sub) v = __fsub_rn(p[c], q[c]);
      if constexpr (Config::kOp == EdgeOp::mul) v = __fmul_rn(p[c], q[c]);
      if constexpr (Config::kOp == EdgeOp::copy_dst) v = p[c];
      q[c] = v;
    }
    if constexpr (Config::kWidth % 4 == 0) {
#pragma unroll
      for (int c = 0; c < kColumns; c += 4) {
        if (column + c < Config::kWidth)
          *reinterpret_cast<float4*>(to + c) = make_float4(q[c], q[c + 1], q[c + 2], q[c + 3]);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (column + c < Config::kWidth) to[c] = q[c];
      }
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) sddmm(const SddmmArgs a) {
  begin_kernel();
  using Layout = typename SddmmBody<Config>::Layout;
  __shared__ int32_t next[1];
  __shared__ Feed<Layout, SddmmBody<Config>> feed[Config::kThreads / 32];
  SddmmBody<Config> body{a};
  const Gathered b = whole_rows<Layout>(a.b, a.b_stride);
  open_queues(next, feed[0].runs.preassigned());
  for_runs<Layout>(a.runs, nullptr, b, next, feed[threadIdx.x / 32], body);
}

}  // namespace gnnc
