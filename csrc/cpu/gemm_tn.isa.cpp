// See gemm_tn.h for layout, traffic and floor.

#include "gemm_tn.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "gemm_tn_block.isa.h"
#include "gemm_tn_pairs.isa.h"
#include "gemm_tn_tiles.isa.h"
#include "gnnc/simd.h"
#include "scratch.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kBlock = 64;  // rows whose tiles of both matrices fit in L1

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

// The products of floats, for multiply_block.
struct FloatProducts {
  using Sum = Floats;
  static GNNC_INLINE Sum start(const float* out) { return load(out); }
  static GNNC_INLINE Floats left(const float* a) { return splat(*a); }
  static GNNC_INLINE Floats right(const float* b) { return load(b); }
  static GNNC_INLINE Sum add(Sum sum, Floats a, Floats b) { return fused(a, b, sum); }
  GNNC_INLINE void finish(float* out, int64_t, Sum sum) const { store(out, sum); }
};

// Adds the products of rows [begin, end) as floats.
void sum_rows_of_floats(const GemmTnArgs& g, int64_t begin, int64_t end, float* out) {
  static thread_local Scratch lefts, rights;
  auto* a = lefts.get<float>(static_cast<size_t>(kBlock * g.inner));
  auto* b = rights.get<float>(static_cast<size_t>(kBlock * g.padded));
  for (int64_t row = begin; row < end; row += kBlock) {
    const int64_t rows = std::min(kBlock, end - row);
    const Block left = block_of(g.a, row, rows, g.inner, g.inner, a);
    const Block right = block_of(g.b, row, rows, g.outer, g.padded, b);
    multiply_block(g, FloatProducts{}, left, right, rows, out);
  }
}

}  // namespace

void gemm_tn(const GemmTnArgs& g, int64_t begin, int64_t end, float* out) {
  std::memset(out, 0, static_cast<size_t>((g.inner + 15) / 16 * 16 * g.padded) * sizeof(float));
#ifdef __AVX512F__
  if (g.products == GradProducts::tiles) return sum_rows_with_tiles(g, begin, end, out);
  if (g.products == GradProducts::dots) return sum_rows_of_pairs(g, begin, end, out);
  if (g.products == GradProducts::integers) return sum_rows_of_integers(g, begin, end, out, sum_rows_of_floats);
#endif
  sum_rows_of_floats(g, begin, end, out);
}

}  // namespace gnnc::GNNC_ISA
