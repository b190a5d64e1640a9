#pragma once

// Memory layout of a packed weight and of a block of rows. One dword of a panel is a float, or with VNNI four quantized
// int8 values of consecutive k, or with AMX or vdpbf16ps two bf16 values.

#include <algorithm>

#include "gemm.h"
#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {

#ifdef __AVX512F__
constexpr bool kVnni = true;
#else
constexpr bool kVnni = false;  // quantized values are multiplied as floats, exactly: see kExactDepth
#endif

constexpr int kPanelStrips = 4;     // a strip is one vector of columns
constexpr int64_t kBlockRows = 24;  // a multiple of the rows of every register tile

GNNC_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

GNNC_INLINE bool packs_int8(const GemmArgs& g) { return kVnni && g.mode == GemmMode::i8; }
GNNC_INLINE int64_t steps_of(const GemmArgs& g) {
  if (g.tiles) return round_up(g.depth, 32) / 2;
  if (g.dots) return (g.depth + 1) / 2;
  return packs_int8(g) ? (g.depth + 3) / 4 : g.depth;
}
GNNC_INLINE int64_t strips_of(const GemmArgs& g) { return (g.width + kLanes - 1) / kLanes; }
GNNC_INLINE int64_t acc_stride(const GemmArgs& g) { return round_up(g.width, 16); }

// A panel of the packed weight: up to kPanelStrips strips of columns.
struct Panel {
  int32_t* data;
  int64_t strips;  // 1 .. kPanelStrips

  int64_t step() const { return strips * kLanes; }  // dwords a step
};

GNNC_INLINE Panel panel_of(const GemmArgs& g, int64_t index) {
  const int64_t first = index * kPanelStrips;
  return {static_cast<int32_t*>(g.packed) + first * kLanes * steps_of(g),
          std::min<int64_t>(kPanelStrips, strips_of(g) - first)};
}

}  // namespace gnnc::GNNC_ISA
