#pragma once

// edge_softmax: alpha[e, h] = exp(logit[e, h] - maximum) / (sum + eps), with the maximum and the sum of exponentials
// over the edges of a row, for each head.
//
// Layout: logits and alpha fp32 [E, heads], dense. A warp processes a run; rows of a run of several entries have
// kLanes threads each, kSpan of them for the heads of an edge. A row that is split over several runs leaves its maximum
// and sum in the staging buffer; the kernel edge_softmax_parts then writes alpha of such rows.
// Traffic: 4 B of a logit and 4 B of alpha for each edge and head; logits are read three times, the second and third
// time from L1. Floor: these bytes at copy bandwidth.
//
// Launch: both kernels with a warp for every run, 8 warps a block. The staging buffer holds slots * 2 * kHeads floats.

#include "sparse/runs.cuh"
#include "sparse/softmax.cuh"
#include "sparse/split_rows.cuh"

namespace gnnc {

struct EdgeSoftmaxArgs {
  Runs runs;
  Staging staging;
  const float* logits;
  float* alpha;
};

// Softmax of the edges of entries. Constants has a static constexpr float kEps.
template <int kHeads, class Constants>
struct EdgeSoftmax {
  static constexpr int kSpan = kHeads < 32 ? power_of_two_from(kHeads) : 32;
  static constexpr int kLanes = kSpan * 8 < 32 ? kSpan * 8 : 32;

  const EdgeSoftmaxArgs& a;

  // Returns the maximum logit and the sum of exponentials of an entry for a head. All threads of a warp call it; kTeam
  // of them share the entry, and those of the same head get the same result.
  template <int kTeam>
  __device__ __forceinline__ float2 stats(const Entry& entry, int head) const {
    const float* logit = first<kTeam>(entry, head);
    const int32_t count = counted<kTeam>(entry, head);
    float highest = kNoLogit;
#pragma unroll 4
    for (int32_t i = 0; i < count; ++i) highest = fmaxf(highest, in_base_two(logit[i * apart<kTeam>()]));
#pragma unroll
    for (int lanes = kSpan; lanes < kTeam; lanes *= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, lanes));
    }
    float sum = 0.0f;
#pragma unroll 4
    for (int32_t i = 0; i < count; ++i) {
      sum = __fadd_rn(sum, power_of_two(in_base_two(logit[i * apart<kTeam>()]) - highest));
    }
#pragma unroll
    for (int lanes = kSpan; lanes < kTeam; lanes *= 2) {
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
    }
    return make_float2(highest, sum);
  }

  // Writes alpha of an entry for a head.
  template <int kTeam>
  __device__ __forceinline__ void write(const Entry& entry, int head, float2 stat) const {
    const float* logit = first<kTeam>(entry, head);
    float* alpha = a.alpha + (logit - a.logits);
    const int32_t count = counted<kTeam>(entry, head);
    const float inverse = softmax_inverse(stat.y, true, Constants::kEps);
#pragma unroll 4
    for (int32_t i = 0; i < count; ++i) {
      const int32_t at = i * apart<kTeam>();
      alpha[at] = __fmul_rn(power_of_two(in_base_two(logit[at]) - stat.x), inverse);
    }
  }

  // Returns this thread's head among kSpan from `group` on, which may be past the last.
  __device__ static int head_of(int group) { return group + lane() % kSpan; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }

  __device__ float2* staged(int32_t slot) const {
    return static_cast<float2*>(a.staging.memory) + static_cast<int64_t>(slot) * kHeads;
  }

 private:
  // Return the distance between two logits of a thread, the address of the first, and their number.
  template <int kTeam>
  __device__ static constexpr int apart() {
    return kTeam / kSpan * kHeads;
  }
  template <int kTeam>
  __device__ static int edge() {
    return lane() % kTeam / kSpan;
  }
  template <int kTeam>
  __device__ const float* first(const Entry& entry, int head) const {
    return a.logits + (entry.first + edge<kTeam>()) * kHeads + head;
  }
  template <int kTeam>
  __device__ static int32_t counted(const Entry& entry, int head) {
    constexpr int kEdges = kTeam / kSpan;
    return head < kHeads ? max((entry.count - edge<kTeam>() + kEdges - 1) / kEdges, 0) : 0;
  }
};

// Returns the run of this warp; an empty one past the last.
__device__ __forceinline__ Run run_of_warp(const Runs& runs) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  return index < runs.count ? load_record(runs.run + index) : Run{0, 0, -1, 0};
}

template <int kHeads, class Constants>
__global__ void __launch_bounds__(256, 4) edge_softmax(const EdgeSoftmaxArgs a) {
  begin_kernel();
  using Softmax = EdgeSoftmax<kHeads, Constants>;
  const Softmax softmax{a};
  const Run run = run_of_warp(a.runs);
  if (run.count == 1) {
    const Entry entry = load_record(a.runs.entry + run.first);
#pragma unroll 1
    for (int group = 0; group < kHeads; group += Softmax::kSpan) {
      const int head = Softmax::head_of(group);
      const float2 stat = softmax.template stats<32>(entry, head);
      if (run.slot < 0) {
        softmax.template write<32>(entry, head, stat);
      } else if (head < kHeads && Softmax::lane() < Softmax::kSpan) {
        softmax.staged(run.slot)[head] = stat;
      }
    }
    if (run.slot < 0) return;
    const auto join = [&](const Split&, int32_t slot, int32_t apart, int32_t count, bool) {
      for (int h = Softmax::lane(); h < kHeads; h += 32) {
        const float2 nothing = make_float2(kNoLogit, 0.0f);
        float2 total = nothing;
        const auto load = [&](int32_t part) { return __ldcg(softmax.staged(slot + part * apart) + h); };
        each_part<4>(count, nothing, load, [&](float2 part) { total = joined_stats(total, part); });
        softmax.staged(slot)[h] = total;
      }
      __syncwarp();
    };
    return end_part<32>(a.runs.split, a.staging, run.slot, join);
  }
  constexpr int kTeam = Softmax::kLanes;
#pragma unroll 1
  for (int32_t at = 0; at < run.count; at += 32 / kTeam) {
    const int32_t which = min(at + Softmax::lane() / kTeam, run.count - 1);
    const Entry entry = load_record(a.runs.entry + run.first + which);
#pragma unroll 1
    for (int group = 0; group < kHeads; group += Softmax::kSpan) {
      const int head = Softmax::head_of(group);
      softmax.template write<kTeam>(entry, head, softmax.template stats<kTeam>(entry, head));
    }
  }
}

// edge_softmax_parts: writes alpha of the rows that are split, from the statistics that edge_softmax left.
template <int kHeads, class Constants>
__global__ void __launch_bounds__(256, 4) edge_softmax_parts(const EdgeSoftmaxArgs a) {
  begin_kernel();
  using Softmax = EdgeSoftmax<kHeads, Constants>;
  const Softmax softmax{a};
  const Run run = run_of_warp(a.runs);
  if (run.count == 0 || run.slot < 0) return;
  const Entry entry = load_record(a.runs.entry + run.first);
  const float2* stats = softmax.staged(load_record(a.runs.split + run.slot).slot);
#pragma unroll 1
  for (int group = 0; group < kHeads; group += Softmax::kSpan) {
    const int head = Softmax::head_of(group);
    if (head < kHeads) softmax.template write<32>(entry, head, stats[head]);
  }
}

}  // namespace gnnc
