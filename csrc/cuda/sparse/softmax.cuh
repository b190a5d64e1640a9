#pragma once

// Arithmetic of a softmax over the edges of a row: exponentials are powers of two, and the state of some edges is a
// pair of their maximum logit (times log2 e) and the sum of their exponentials.

#include "sparse/lane_reduce.cuh"

namespace gnnc {

// The initial bound of the logits: no finite logit is lower, and since the bound is finite, a difference from it is
// never NaN.
constexpr float kNoLogit = -3.402823466e38f;

// Returns a logit times log2 e. The product is rounded toward zero so that a finite logit stays finite: if masks set
// all logits of a row to the lowest float, all stay equal.
__device__ __forceinline__ float in_base_two(float logit) { return __fmul_rz(logit, 1.44269504f); }

// Returns 1 / sum, the softmax normalization: 0 for a row without edges; NaN for a row whose logits are all -inf, as
// the reference gives (-inf - -inf is NaN).
__device__ __forceinline__ float softmax_inverse(float sum, bool edges, float eps) {
  if (sum == 0.0f) return edges ? __int_as_float(0x7fffffff) : 0.0f;
  return __fdiv_rn(1.0f, __fadd_rn(sum, eps));
}

// Returns the state of the edges of both states.
__device__ __forceinline__ float2 joined_stats(float2 a, float2 b) {
  const float highest = fmaxf(a.x, b.x);
  return make_float2(highest, fmaf(b.y, power_of_two(b.x - highest), __fmul_rn(a.y, power_of_two(a.x - highest))));
}

}  // namespace gnnc
