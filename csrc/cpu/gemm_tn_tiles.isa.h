#pragma once

// gemm_tn with tiles of bf16: blocks of 128 rows are packed as pairs of rows, the left matrix transposed, and each
// tile of 16 x 16 sums takes 32 rows at once. See gemm_tn.h for what is exact.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "amx.isa.h"
#include "gemm_tn.h"
#include "scratch.h"
#include "transpose.isa.h"

#ifdef __AVX512F__

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kTileRows = 32;    // rows of a matrix in one tile
constexpr int64_t kTileBlock = 128;  // rows packed at once: both matrices stay in L2
constexpr int64_t kTileDwords = 256;

// Rows of a matrix to pack, times the scale of each if there is one; `width` is that of the matrix.
template <typename T, bool kRounds>
struct TileRows {
  const T* data;
  int64_t stride, width;
  const float* scales[2];  // of the rows, each may be null

  template <typename Lanes>
  GNNC_INLINE Floats value(int64_t row, int64_t c, Lanes lanes) const {
    const T* at = data + row * stride + c;
    prefetch_far(at + 2 * kTileRows * stride);
    Floats v = load(at, lanes);
    if constexpr (kRounds) v = round_to_bf16(v);
    for (const float* scale : scales) {
      if (scale != nullptr) v = v * splat(scale[row]);
    }
    return v;
  }
};

// Packs rows [row, row + count), count <= 32, as tiles of 16 columns: lane c of vector j holds the values of rows 2 j
// and 2 j + 1 in column c, or the transpose of that. With two parts, the second tiles hold what the first lack; they
// are `part` dwords behind them. Tiles are `step` dwords apart.
template <int kParts, bool kTransposed, typename Source>
void pack_tiles(const Source& source, int64_t row, int64_t count, int64_t step, int64_t part, int32_t* to) {
  const auto columns = [&](int64_t c, auto lanes) {
    __m512i tiles[kParts][16];
    for (int j = 0; j < 16; ++j) {
      const int64_t first = row + 2 * j;
      const Floats a = 2 * j < count ? source.value(first, c, lanes) : Floats{};
      const Floats b = 2 * j + 1 < count ? source.value(first + 1, c, lanes) : Floats{};
      if constexpr (kParts == 1) {
        tiles[0][j] = pairs(a, b);
      } else {
        const Floats top = truncated(a), next = truncated(b);
        tiles[0][j] = pairs(top, next);
        tiles[1][j] = pairs(round_to_bf16(rest_of(a, top)), round_to_bf16(rest_of(b, next)));
      }
    }
    for (int p = 0; p < kParts; ++p) {
      if constexpr (kTransposed) transpose(tiles[p]);
      int32_t* tile = to + p * part + c / 16 * step;
      for (int j = 0; j < 16; ++j) _mm512_store_si512(tile + j * 16, tiles[p][j]);
    }
  };
  for_columns(source.width, columns);
}

// Calls body with the rows of a matrix.
template <typename Body>
void with_rows(const GradMatrix& m, int64_t width, const float* scale, const float* other, const Body& body) {
  const auto of = [&]<typename T, bool kRounds>() {
    body(TileRows<T, kRounds>{static_cast<const T*>(m.data), m.stride, width, {scale, other}});
  };
  switch (m.element) {
    case GradElement::f32:
      return of.template operator()<float, false>();
    case GradElement::rounded:
      return of.template operator()<float, true>();
    case GradElement::bf16:
      return of.template operator()<Bf16, false>();
    default:
      return of.template operator()<int8_t, false>();
  }
}

// Adds the products of `steps` packed tiles of rows to kLeft x kRight tiles of sums.
template <int kLeft, int kRight>
void sum_tiles(const int32_t* left, const int32_t* right, int64_t steps, int64_t parts, int64_t left_step,
               int64_t right_step, int64_t part, int64_t stride, float* out) {
  const int64_t bytes = stride * 4;
  load_tile<0>(out, bytes);
  if constexpr (kRight == 2) load_tile<1>(out + 16, bytes);
  if constexpr (kLeft == 2) load_tile<2>(out + 16 * stride, bytes);
  if constexpr (kLeft == 2 && kRight == 2) load_tile<3>(out + 16 * stride + 16, bytes);
  for (int64_t s = 0; s < steps; ++s, left += left_step, right += right_step) {
    load_tile<4>(left, 64);
    if constexpr (kLeft == 2) load_tile<5>(left + kTileDwords, 64);
    for (int64_t p = 0; p < parts; ++p) {
      const int32_t* b = right + p * part;
      load_tile<6>(b, 64);
      multiply_tiles<0, 4, 6>();
      if constexpr (kRight == 2) {
        load_tile<7>(b + kTileDwords, 64);
        multiply_tiles<1, 4, 7>();
      }
      if constexpr (kLeft == 2) multiply_tiles<2, 5, 6>();
      if constexpr (kLeft == 2 && kRight == 2) multiply_tiles<3, 5, 7>();
    }
  }
  store_tile<0>(out, bytes);
  if constexpr (kRight == 2) store_tile<1>(out + 16, bytes);
  if constexpr (kLeft == 2) store_tile<2>(out + 16 * stride, bytes);
  if constexpr (kLeft == 2 && kRight == 2) store_tile<3>(out + 16 * stride + 16, bytes);
}

// Adds the products of a packed block to the sums.
void multiply_block(const GemmTnArgs& g, const int32_t* left, const int32_t* right, int64_t steps, int64_t parts,
                    int64_t left_step, int64_t right_step, int64_t part, float* out) {
  const int64_t lefts = left_step / kTileDwords, rights = g.padded / 16;
  for (int64_t i = 0; i < lefts; i += 2) {
    for (int64_t j = 0; j < rights; j += 2) {
      const auto sum = [&]<int kLeft, int kRight>() {
        sum_tiles<kLeft, kRight>(left + i * kTileDwords, right + j * kTileDwords, steps, parts, left_step, right_step,
                                 part, g.padded, out + i * 16 * g.padded + j * 16);
      };
      const bool both = j + 2 <= rights;
      if (i + 2 <= lefts) {
        both ? sum.template operator()<2, 2>() : sum.template operator()<2, 1>();
      } else {
        both ? sum.template operator()<1, 2>() : sum.template operator()<1, 1>();
      }
    }
  }
}

void sum_rows_with_tiles(const GemmTnArgs& g, int64_t begin, int64_t end, float* out) {
  static thread_local Scratch lefts, rights;
  const Tiles tiles(16);
  const bool exact = g.a.scale == nullptr && (g.b.element == GradElement::bf16 || g.b.element == GradElement::rounded);
  const int64_t parts = exact ? 1 : 2, most = kTileBlock / kTileRows;
  const int64_t left_step = (g.inner + 15) / 16 * kTileDwords, right_step = g.padded / 16 * kTileDwords;
  const int64_t part = most * right_step;
  auto* left = lefts.get<int32_t>(static_cast<size_t>(most * left_step));
  auto* right = rights.get<int32_t>(static_cast<size_t>(2 * part));
  for (int64_t block = begin; block < end; block += kTileBlock) {
    int64_t steps = 0;
    for (int64_t row = block; row < std::min(block + kTileBlock, end); row += kTileRows, ++steps) {
      const int64_t count = std::min(kTileRows, end - row);
      with_rows(g.a, g.inner, nullptr, nullptr, [&](const auto& rows) {
        pack_tiles<1, true>(rows, row, count, kTileDwords, 0, left + steps * left_step);
      });
      with_rows(g.b, g.outer, g.a.scale, g.b.scale, [&](const auto& rows) {
        int32_t* to = right + steps * right_step;
        exact ? pack_tiles<1, false>(rows, row, count, kTileDwords, part, to)
              : pack_tiles<2, false>(rows, row, count, kTileDwords, part, to);
      });
    }
    multiply_block(g, left, right, steps, parts, left_step, right_step, part, out);
  }
}

}  // namespace
}  // namespace gnnc::GNNC_ISA

#endif
