#pragma once

// Tiles of AMX: 16 rows of 64 bytes, and products of pairs of bf16 values that are summed in FP32. Functions that use
// them run only where has_amx() is true. The instructions are written out, so that no other code of the file may use
// AMX.

#include "bf16_pairs.isa.h"
#include "gnnc/simd.h"

#ifdef __AVX512F__

namespace gnnc::GNNC_ISA {
namespace {

// Tiles 0 to 3 hold sums, 4 and 5 rows of the left matrix, 6 and 7 pairs of rows of the right one. While an object
// lives, the tiles of this thread are in use.
class Tiles {
 public:
  // Sums and left tiles have `rows` rows.
  explicit Tiles(int rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; ++i) shape.rows[i] = static_cast<uint8_t>(i < 6 ? rows : 16);
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
  }
  ~Tiles() { __asm__ volatile("tilerelease" ::: "memory"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int kTile>
GNNC_INLINE void clear_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// Loads a tile whose rows are `stride` bytes apart.
template <int kTile>
GNNC_INLINE void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
GNNC_INLINE void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}

// Adds the products of a left and a right tile to a tile of sums.
template <int kSum, int kLeft, int kRight>
GNNC_INLINE void multiply_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

// Returns v without the bits that bf16 has no room for: rounded toward zero, so that the rest of v is exact.
GNNC_INLINE Floats truncated(Floats v) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(-65536)));
}

// Returns what a truncated value lacks: zero for an infinity.
GNNC_INLINE Floats rest_of(Floats v, Floats part) { return v == part ? Floats{} : v - part; }

}  // namespace
}  // namespace gnnc::GNNC_ISA

#endif
