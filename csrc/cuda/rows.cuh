#pragma once

// How a group of threads reads the gathered rows of x, in pieces of 16 bytes: thread (slot, piece) of a group reads one
// piece of a row of edges of its own. Rows wider than the pieces of a group are read in several passes over the edges.

#include "types.cuh"

namespace gnnc {

enum class Element { f32, f16, bf16, i8 };

__host__ __device__ constexpr int bytes_of(Element e) { return e == Element::f32 ? 4 : e == Element::i8 ? 1 : 2; }

__host__ __device__ constexpr int power_of_two_from(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

__host__ __device__ constexpr int smaller_of(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int larger_of(int a, int b) { return a > b ? a : b; }

template <Element kElement_, int kWidth_, int kSlots_, int kMaxPieces, int kMinPieces = 1>
struct RowLayout {
  static constexpr Element kElement = kElement_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kColumns = 16 / bytes_of(kElement);           // in a piece
  static constexpr int kTotal = (kWidth + kColumns - 1) / kColumns;  // pieces in a row
  static constexpr int kPieces =                                     // pieces that a group reads at once
      larger_of(kMinPieces, smaller_of(kMaxPieces, power_of_two_from(kTotal)));
  static constexpr int kPasses = (kTotal + kPieces - 1) / kPieces;
  static constexpr int kSlots = kSlots_;                        // edges that a group reads at once
  static constexpr int kLanes = kSlots * kPieces;               // threads of a group
  static constexpr int kSets = 32 / kLanes;                     // groups of a warp
  static constexpr int kStep = 4 * kSlots;                      // edges a step: four a thread
  static constexpr int kPadded = kPasses * kPieces * kColumns;  // columns, with what is past the width
  static_assert(kLanes <= 32, "a group lies in one warp");
};

template <class Layout>
struct LanePlace {
  int slot, piece, set;
  __device__ LanePlace() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    slot = lane % Layout::kSlots;
    piece = lane / Layout::kSlots % Layout::kPieces;
    set = lane / Layout::kLanes;
  }
};

// 16 bytes of a row, or zeros.
__device__ inline uint4 gather(const char* x, uint32_t row, uint32_t stride, bool take) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (take) v = __ldg(reinterpret_cast<const uint4*>(x + static_cast<uint64_t>(row) * stride));
  return v;
}

}  // namespace gnnc
