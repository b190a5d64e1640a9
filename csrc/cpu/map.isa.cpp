// See map.h for layout, traffic and floor.

#include "map.h"

#include <algorithm>

#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {
namespace {

template <typename T>
void load_rows(const MapArgs& m, int64_t row, int rows, float* tile, int64_t ld) {
  for (int r = 0; r < rows; ++r) {
    const T* x = static_cast<const T*>(m.x) + (row + r) * m.x_stride;
    const bool scaled = m.x_scale != nullptr;
    const Floats scale = splat(scaled ? m.x_scale[(row + r) * m.scale_stride] : 1.0f);
    float* to = tile + r * ld;
    for_columns(m.width, [&](int64_t c, auto n) { store(to + c, scaled ? load(x + c, n) * scale : load(x + c, n)); });
  }
}

}  // namespace

void map_rows(const MapArgs& m, int64_t row_begin, int64_t row_end, float* tile) {
  const auto load_tile = m.x_type == Scalar::i8     ? &load_rows<int8_t>
                         : m.x_type == Scalar::bf16 ? &load_rows<Bf16>
                                                    : &load_rows<float>;
  const int64_t ld = map_stride(m), step = map_tile_rows(m);
  for (int64_t row = row_begin; row < row_end; row += step) {
    const int rows = static_cast<int>(std::min(step, row_end - row));
    load_tile(m, row, rows, tile, ld);
    run(*m.program, tile, ld, row, rows, m.width);
  }
}

}  // namespace gnnc::GNNC_ISA
