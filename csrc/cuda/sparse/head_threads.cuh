#pragma once

// The threads that read one head of a row, and how they divide what is the same for all columns of the head: of every
// four edges, each thread computes the values of kOwn edges.

#include "sparse/lane_reduce.cuh"

namespace gnnc {

template <class Layout, int kHeads>
struct HeadThreads {
  static constexpr int kHeadWidth = Layout::kWidth / kHeads;
  // Number of threads that share a head, and of edges out of four whose logits each of them computes.
  static constexpr int kShare = kHeads == 1 ? Layout::kPieces : kHeadWidth / Layout::kColumns;
  static constexpr int kOwn = kShare >= 4 ? 1 : 4 / kShare;
  static_assert(Layout::kPasses == 1, "a row must fit into one pass");
  static_assert((kShare & (kShare - 1)) == 0 && (kHeads == 1 || kShare * Layout::kColumns == kHeadWidth),
                "a head is a power of two of 16-byte pieces");

  // Returns the head that this thread's piece belongs to.
  __device__ static int head_of_thread() { return min(Layout::piece() / kShare, kHeads - 1); }

  // Returns whether this thread writes the values of its head.
  __device__ static bool writes() { return Layout::piece() % kShare == 0 && Layout::piece() < Layout::kTotal; }

  // Returns the place, out of four, of the edge `i` of this thread, and the value of that edge.
  __device__ static int place(int i) {
    const int lane = Layout::lane();
    if (kShare == 1) return i;
    return kShare == 2 ? (lane & 1) * 2 + i : (lane & 1) * 2 + (lane >> 1 & 1);
  }
  template <class T>
  __device__ static T own_of(const T (&v)[4], int i) {
    if constexpr (kShare == 1) return v[i];
    const bool upper = Layout::lane() & 1;
    if constexpr (kShare == 2) return upper ? v[2 + i] : v[i];
    return Layout::lane() & 2 ? (upper ? v[3] : v[1]) : (upper ? v[2] : v[0]);
  }

  // Gives every thread the values of all four edges.
  __device__ static void share(const float (&own)[kOwn], float (&all)[4]) {
    const int first = Layout::lane() & ~(kShare - 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kShare == 1) {
        all[i] = own[i % kOwn];
      } else {
        const int from = kShare == 2 ? i / 2 : i / 2 + i % 2 * 2;
        all[i] = __shfl_sync(0xffffffffu, own[kShare == 2 ? i % kOwn : 0], first + from);
      }
    }
  }

  // Adds up what the threads of a head have of each of four edges; each gets the sums of its own edges.
  __device__ __forceinline__ static void add_up(float (&v)[4], float (&out)[kOwn]) {
    int first;
    share_sums<kShare, Layout>(v, first);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) out[i] = v[i];
  }

  // Reduces a value over the edges of the threads of a head (of which every fourth has the same edges), and over kSlots
  // neighboring slots.
  template <int kSlots, class Combine>
  __device__ static float across(float v, const Combine& combine) {
#pragma unroll
    for (int apart = 1; apart < kShare && apart < 4; apart *= 2) {
      v = combine(v, __shfl_xor_sync(0xffffffffu, v, apart));
    }
#pragma unroll
    for (int apart = Layout::kPieces; apart < Layout::kPieces * kSlots; apart *= 2) {
      v = combine(v, __shfl_xor_sync(0xffffffffu, v, apart));
    }
    return v;
  }

  // Returns a piece with the columns past the width, which may hold anything, set to zero: floats that are no numbers
  // would stay so times 0.
  __device__ static uint4 inside(const uint4& v) {
    if constexpr (Layout::kWidth % Layout::kColumns == 0 || Layout::kElement == Element::i8) return v;
    return Layout::within(v, Layout::piece());
  }
};

}  // namespace gnnc
