#pragma once

// Reductions and broadcasts of values with layout [edges][heads]. If the number of heads divides the lanes of a vector,
// every vector has the same pattern of heads: edges are combined in one vector that is reduced at the end.

#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {
namespace {

// Calls body.operator()<H>() for a number of heads that divides the lanes; returns false for any other number.
template <typename Body>
GNNC_INLINE bool with_heads(int64_t heads, const Body& body) {
  if (heads == 1) return body.template operator()<1>(), true;
  if (heads == 2) return body.template operator()<2>(), true;
  if (heads == 4) return body.template operator()<4>(), true;
  if constexpr (kLanes >= 8) {
    if (heads == 8) return body.template operator()<8>(), true;
  }
  if constexpr (kLanes >= 16) {
    if (heads == 16) return body.template operator()<16>(), true;
  }
  return false;
}

struct LaneNumbers {
  alignas(64) int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};
constexpr LaneNumbers kLaneNumbers;

GNNC_INLINE Ints lane_numbers() { return *reinterpret_cast<const Ints*>(kLaneNumbers.lane); }

// Returns values[0 .. H), repeated over all lanes.
template <int H>
GNNC_INLINE Floats repeat_heads(const float* values) {
  if constexpr (H == 1) return splat(*values);
#ifdef __AVX512F__
  if constexpr (H == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(values));
  if constexpr (H == 8) return _mm512_broadcast_f32x8(_mm256_loadu_ps(values));
#endif
  return __builtin_shuffle(load(values, Tail{H}), lane_numbers() & (H - 1));
}

// Reduces a vector by head; every lane gets the result over the lanes of its head.
template <int H, typename Vector, typename Combine>
GNNC_INLINE Vector fold_heads(Vector v, const Combine& combine) {
#pragma GCC unroll 4
  for (int step = kLanes / 2; step >= H; step /= 2) v = combine(v, __builtin_shuffle(v, lane_numbers() ^ step));
  return v;
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
