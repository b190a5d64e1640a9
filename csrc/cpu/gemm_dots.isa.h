#pragma once

// gemm of bf16 values: the rows of a block, and register tiles of products of pairs (vdpbf16ps).

#include <cstring>
#include <utility>

#include "bf16_pairs.isa.h"
#include "gemm_layout.isa.h"

#ifdef __AVX512F__

namespace gnnc::GNNC_ISA {
namespace {

// Copies the rows of a block, rounded to bf16, `stride` values apart, with zeros behind the depth.
template <typename T>
void narrow_rows(const GemmArgs& g, const T* x, int rows, int64_t stride, Bf16* to) {
  const int64_t depth = 2 * steps_of(g);
  for (int r = 0; r < rows; ++r, x += g.x_stride, to += stride) {
    const T* next = x + kBlockRows * g.x_stride;
    for_columns(g.depth, [&](int64_t c, auto n) {
      prefetch_far(next + c);
      store(to + c, load(x + c, n), n);
    });
    std::memset(to + g.depth, 0, static_cast<size_t>(depth - g.depth) * sizeof(Bf16));
  }
}

// Rows in bf16, `stride` values apart.
struct NarrowRows {
  const Bf16* data;
  int64_t stride;
};

// Returns the rows of a block in bf16, with zeros behind the depth: where they are, or in the buffer.
NarrowRows rows_of_bf16(const GemmArgs& g, int64_t row, int rows, Bf16* buffer) {
  const int64_t stride = round_up(g.depth, 64);
  if (g.x_type == Scalar::f32) {
    narrow_rows(g, static_cast<const float*>(g.x) + row * g.x_stride, rows, stride, buffer);
    return {buffer, stride};
  }
  const Bf16* x = static_cast<const Bf16*>(g.x) + row * g.x_stride;
  if (rows == kBlockRows && 2 * steps_of(g) == g.depth) return {x, g.x_stride};
  narrow_rows(g, x, rows, stride, buffer);
  return {buffer, stride};
}

// Computes acc = a * w for kRows rows and kStrips vectors of columns; `ahead` prefetches in each step.
template <int kRows, int kStrips, typename Ahead, int... I>
GNNC_INLINE void dot_tile(const Bf16* a, int64_t lda, const int32_t* w, int64_t steps, Ahead ahead, float* acc,
                          int64_t ld, std::integer_sequence<int, I...>) {
  __m512 sums[kRows * kStrips] = {(static_cast<void>(I), _mm512_setzero_ps())...};
  for (int64_t k = 0; k < steps; ++k) {
    __m512i columns[kStrips], value = _mm512_setzero_si512();
    for (int j = 0; j < kStrips; ++j) columns[j] = _mm512_loadu_si512(w + (k * kStrips + j) * 16);
    ahead.template next<1>();
    ((value = I % kStrips == 0 ? _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(a + I / kStrips * lda + 2 * k))
                               : value,
      sums[I] = add_dots(sums[I], value, columns[I % kStrips])),
     ...);
  }
  (store(acc + I / kStrips * ld + I % kStrips * 16, sums[I]), ...);
}

}  // namespace
}  // namespace gnnc::GNNC_ISA

#endif
