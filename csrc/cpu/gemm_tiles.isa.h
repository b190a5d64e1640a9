#pragma once

// gemm of bf16 values with tiles: a block of rows is two tiles, which are multiplied by two strips of columns at once.

#include "amx.isa.h"
#include "gemm_dots.isa.h"
#include "gemm_layout.isa.h"

#ifdef __AVX512F__

namespace gnnc::GNNC_ISA {
namespace {

constexpr int kRowsOfTile = kBlockRows / 2;

// Computes kStrips strips of a block of rows, `stride` values apart.
template <int kStrips>
void multiply_strips(const Bf16* a, int64_t stride, const int32_t* w, int64_t step, int64_t steps, float* acc,
                     int64_t ld) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(Bf16));
  const Bf16* below = a + kRowsOfTile * stride;
  clear_tile<0>();
  clear_tile<1>();
  clear_tile<2>();
  clear_tile<3>();
  for (int64_t k = 0; k < steps; k += 16, w += 16 * step) {
    load_tile<4>(a + 2 * k, bytes);
    load_tile<6>(w, step * 4);
    multiply_tiles<0, 4, 6>();
    load_tile<5>(below + 2 * k, bytes);
    multiply_tiles<2, 5, 6>();
    if constexpr (kStrips == 2) {
      load_tile<7>(w + kLanes, step * 4);
      multiply_tiles<1, 4, 7>();
      multiply_tiles<3, 5, 7>();
    }
  }
  store_tile<0>(acc, ld * 4);
  store_tile<2>(acc + kRowsOfTile * ld, ld * 4);
  if constexpr (kStrips == 2) {
    store_tile<1>(acc + kLanes, ld * 4);
    store_tile<3>(acc + kRowsOfTile * ld + kLanes, ld * 4);
  }
}

// Computes a block of rows; buffer has room for it.
void compute_tiles(const GemmArgs& g, int64_t row, int rows, Bf16* buffer, float* acc, int64_t ld) {
  const auto [a, stride] = rows_of_bf16(g, row, rows, buffer);
  for (int64_t s = 0; s < strips_of(g); s += 2) {
    const Panel panel = panel_of(g, s / kPanelStrips);
    const int64_t inside = s % kPanelStrips;
    const int32_t* w = panel.data + inside * kLanes;
    if (inside + 2 <= panel.strips) {
      multiply_strips<2>(a, stride, w, panel.step(), steps_of(g), acc + s * kLanes, ld);
    } else {
      multiply_strips<1>(a, stride, w, panel.step(), steps_of(g), acc + s * kLanes, ld);
    }
  }
}

}  // namespace
}  // namespace gnnc::GNNC_ISA

#endif
