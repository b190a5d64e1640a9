#pragma once

// strided: copies a view of a tensor (a slice, a permutation) to rows of its own, or sums one of its dimensions.
//
// An element of the result is the sum of Config::kTerms elements of x, kTermStride apart, in order; if kTerms is 0, it
// is an element of x. The row and the two or three dimensions behind it have any strides in x. Sums begin at zero, as
// in torch: negative zeros add up to positive zero. Traffic: the elements of x that are read, and the result, once.
// Floor: these bytes at copy bandwidth.
//
// Launch: blocks of 256 threads, a thread an element of the result.

#include "common/row_steps.cuh"

namespace gnnc {

struct StridedArgs {
  const void* x;
  void* out;
  int64_t rows;
};

// Compile-time configuration of strided. kSize1, kSize2, kSize3: sizes of the result behind its rows; kRow, kStride1,
// kStride2, kStride3: strides of its dimensions in x; kOffset: the first element in x; kPitch: elements from one row of
// the result to the next.
template <class X_, class Out_, int kSize1_, int kSize2_, int kSize3_, int64_t kOffset_, int64_t kRow_,
          int64_t kStride1_, int64_t kStride2_, int64_t kStride3_, int kTerms_, int64_t kTermStride_, int64_t kPitch_>
struct StridedConfig {
  using X = X_;
  using Out = Out_;
  static constexpr int kSize1 = kSize1_, kSize2 = kSize2_, kSize3 = kSize3_, kTerms = kTerms_;
  static constexpr int64_t kOffset = kOffset_, kRow = kRow_, kTermStride = kTermStride_, kPitch = kPitch_;
  static constexpr int64_t kStride1 = kStride1_, kStride2 = kStride2_, kStride3 = kStride3_;
};

template <class Config>
__global__ void __launch_bounds__(256) strided(StridedArgs args) {
  begin_kernel();
  constexpr int kWidth = Config::kSize1 * Config::kSize2 * Config::kSize3;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int64_t row = index / kWidth;
  if (row >= args.rows) return;
  const int place = static_cast<int>(index % kWidth);
  const auto* from = static_cast<const typename Config::X*>(args.x) + Config::kOffset + row * Config::kRow +
                     place / (Config::kSize2 * Config::kSize3) * Config::kStride1 +
                     place / Config::kSize3 % Config::kSize2 * Config::kStride2 +
                     place % Config::kSize3 * Config::kStride3;
  float sum = Config::kTerms == 0 ? step::as_float(*from) : 0.0f;
#pragma unroll 4
  for (int i = 0; i < Config::kTerms; ++i) sum += step::as_float(from[i * Config::kTermStride]);
  static_cast<typename Config::Out*>(args.out)[row * Config::kPitch + place] =
      step::from_float<typename Config::Out>(sum);
}

}  // namespace gnnc
