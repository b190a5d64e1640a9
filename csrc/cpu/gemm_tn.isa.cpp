// See gemm_tn.h for layout, traffic and floor.

#include "gemm_tn.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "gemm_tn_tiles.isa.h"
#include "gnnc/simd.h"
#include "scratch.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kBlock = 64;                  // rows whose tiles of both matrices fit in L1
constexpr int kVectors = kLanes == 16 ? 4 : 2;  // with 6 rows each, as many sums as there are registers for

// Copies `rows` rows of `width` values to floats, `padded` apart, with zeros behind the width; int8 rows times a scale.
template <bool kRounds, typename T>
void pack(const T* from, const float* scale, int64_t stride, int64_t rows, int64_t width, int64_t padded, float* to) {
  for (int64_t r = 0; r < rows; ++r, from += stride, to += padded) {
    const auto value = [&](int64_t c, auto count) {
      const Floats loaded = load(from + c, count);
      if constexpr (std::is_same_v<T, int8_t>) return loaded * splat(scale[r]);
      if constexpr (kRounds) return round_to_bf16(loaded);
      return loaded;
    };
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) store(to + c, value(c, Whole{}));
    const Tail tail{static_cast<int>(width - c)};
    if (c < width) store(to + c, value(c, tail), tail);
    for (c = width; c < padded; ++c) to[c] = 0.0f;
  }
}

// A block of rows as floats, `stride` apart.
struct Block {
  const float* data;
  int64_t stride;
};

// Returns the rows of a block, with whole vectors of `padded` columns: packed to `room`, or where they are.
Block block_of(const GradMatrix& m, int64_t row, int64_t rows, int64_t width, int64_t padded, float* room) {
  const auto packed = [&]<bool kRounds>(const auto* from, const float* scale) -> Block {
    pack<kRounds>(from + row * m.stride, scale, m.stride, rows, width, padded, room);
    return {room, padded};
  };
  const auto* floats = static_cast<const float*>(m.data);
  if (m.element == GradElement::f32 && width == padded) return {floats + row * m.stride, m.stride};
  if (m.element == GradElement::f32) return packed.template operator()<false>(floats, nullptr);
  if (m.element == GradElement::rounded) return packed.template operator()<true>(floats, nullptr);
  if (m.element == GradElement::bf16) {
    return packed.template operator()<false>(static_cast<const Bf16*>(m.data), nullptr);
  }
  return packed.template operator()<false>(static_cast<const int8_t*>(m.data), m.scale + row);
}

// Adds the products of `rows` rows to R x V vectors of the result.
template <int R, int V>
GNNC_INLINE void tile(const Block& left, const Block& right, int64_t rows, int64_t padded, float* out) {
  Floats sums[R][V];
  each<R>([&](auto r) { each<V>([&](auto v) { sums[r][v] = load(out + r * padded + v * kLanes); }); });
  const float *a = left.data, *b = right.data;
  for (int64_t n = 0; n < rows; ++n, a += left.stride, b += right.stride) {
    Floats vectors[V];
    each<V>([&](auto v) { vectors[v] = load(b + v * kLanes); });
    each<R>([&](auto r) {
      const Floats value = splat(a[r]);
      each<V>([&](auto v) { sums[r][v] = fused(value, vectors[v], sums[r][v]); });
    });
  }
  each<R>([&](auto r) { each<V>([&](auto v) { store(out + r * padded + v * kLanes, sums[r][v]); }); });
}

// Adds the products of V vectors of columns of b with all columns of a.
template <int V>
void columns(const GemmTnArgs& g, Block a, const Block& b, int64_t rows, float* out) {
  int64_t k = 0;
  const auto strips = [&]<int R>() {
    for (; k + R <= g.inner; k += R, a.data += R) tile<R, V>(a, b, rows, g.padded, out + k * g.padded);
  };
  strips.template operator()<6>();
  strips.template operator()<4>();
  strips.template operator()<2>();
  strips.template operator()<1>();
}

}  // namespace

void gemm_tn(const GemmTnArgs& g, int64_t begin, int64_t end, float* out) {
  static thread_local Scratch lefts, rights;
  std::memset(out, 0, static_cast<size_t>((g.inner + 15) / 16 * 16 * g.padded) * sizeof(float));
#ifdef __AVX512F__
  if (g.tiles) return sum_rows_with_tiles(g, begin, end, out);
#endif
  auto* a = lefts.get<float>(static_cast<size_t>(kBlock * g.inner));
  auto* b = rights.get<float>(static_cast<size_t>(kBlock * g.padded));
  for (int64_t row = begin; row < end; row += kBlock) {
    const int64_t rows = std::min(kBlock, end - row);
    const Block left = block_of(g.a, row, rows, g.inner, g.inner, a);
    Block right = block_of(g.b, row, rows, g.outer, g.padded, b);
    int64_t c = 0;
    const auto strips = [&]<int V>() {
      for (; c + V * kLanes <= g.padded; c += V * kLanes, right.data += V * kLanes) {
        columns<V>(g, left, right, rows, out + c);
      }
    };
    strips.template operator()<kVectors>();
    strips.template operator()<2>();
    strips.template operator()<1>();
  }
}

}  // namespace gnnc::GNNC_ISA
