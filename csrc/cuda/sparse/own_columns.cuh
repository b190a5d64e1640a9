#pragma once

// A thread's columns of the row that all edges of a work item share: the row at their other end.

#include "sparse/lane_reduce.cuh"

namespace gnnc {

// This thread's columns of the row that the edges share, of another element type than the rows that are gathered.
template <Element kElement, int kWidth, int kColumns>
struct OwnColumns {
  float v[kColumns];

  __device__ __forceinline__ void load(const char* row, int first) {
    constexpr int kBytes = bytes_of(kElement), kCount = kColumns * kBytes < 16 ? kColumns : 16 / kBytes;
    using Words = Vector<uint32_t, kCount * kBytes / 4>;
#pragma unroll
    for (int i = 0; i < kColumns; i += kCount) {
      Words words = {};
      if (first + i < kWidth) words = *reinterpret_cast<const Words*>(row + (first + i) * kBytes);
      uint32_t w[4] = {};
#pragma unroll
      for (int j = 0; j < kCount * kBytes / 4; ++j) w[j] = words.v[j];
      float all[16 / kBytes];
      unpack<kElement>(make_uint4(w[0], w[1], w[2], w[3]), all);
#pragma unroll
      for (int k = 0; k < kCount; ++k) v[i + k] = first + i + k < kWidth ? all[k] : 0.0f;
    }
  }

  template <Element kOther>
  __device__ __forceinline__ float dot(const uint4& given) const {
    float of[kColumns], sum = 0.0f;
    unpack<kOther>(given, of);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum = fmaf(v[c], of[c], sum);
    return sum;
  }
};

}  // namespace gnnc
