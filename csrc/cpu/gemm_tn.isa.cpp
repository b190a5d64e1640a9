// See gemm_tn.h for layout, traffic and floor.

#include "gemm_tn.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "gnnc/simd.h"
#include "scratch.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kBlock = 128;
constexpr int kRows = kLanes == 16 ? 8 : 6;  // with two vectors each, as many sums as there are registers for

// Copies `rows` rows of `width` values to floats, `padded` apart, with zeros behind the width; int8 rows times a scale.
template <typename T>
void pack(const T* from, const float* scale, int64_t stride, int64_t rows, int64_t width, int64_t padded, float* to) {
  for (int64_t r = 0; r < rows; ++r, from += stride, to += padded) {
    const auto value = [&](int64_t c, auto count) {
      const Floats loaded = load(from + c, count);
      if constexpr (std::is_same_v<T, int8_t>) return loaded * splat(scale[r]);
      return loaded;
    };
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) store(to + c, value(c, Whole{}));
    const Tail tail{static_cast<int>(width - c)};
    if (c < width) store(to + c, value(c, tail), tail);
    for (c = width; c < padded; ++c) to[c] = 0.0f;
  }
}

void pack(const GradMatrix& m, int64_t row, int64_t rows, int64_t width, int64_t padded, float* to) {
  const auto rest = [&](const auto* from, const float* scale) {
    pack(from + row * m.stride, scale, m.stride, rows, width, padded, to);
  };
  if (m.element == GradElement::bf16) return rest(static_cast<const Bf16*>(m.data), nullptr);
  if (m.element == GradElement::i8) return rest(static_cast<const int8_t*>(m.data), m.scale + row);
  rest(static_cast<const float*>(m.data), nullptr);
}

// Adds the products of `rows` rows to R x V vectors of the result.
template <int R, int V>
GNNC_INLINE void tile(const float* a, int64_t inner, const float* b, int64_t padded, int64_t rows, float* out) {
  Floats sums[R][V];
  each<R>([&](auto r) { each<V>([&](auto v) { sums[r][v] = load(out + r * padded + v * kLanes); }); });
  for (int64_t n = 0; n < rows; ++n, a += inner, b += padded) {
    Floats right[V];
    each<V>([&](auto v) { right[v] = load(b + v * kLanes); });
    each<R>([&](auto r) {
      const Floats left = splat(a[r]);
      each<V>([&](auto v) { sums[r][v] = fused(left, right[v], sums[r][v]); });
    });
  }
  each<R>([&](auto r) { each<V>([&](auto v) { store(out + r * padded + v * kLanes, sums[r][v]); }); });
}

template <int R>
void strip(const float* a, int64_t inner, const float* b, int64_t padded, int64_t rows, float* out) {
  int64_t c = 0;
  for (; c + 2 * kLanes <= padded; c += 2 * kLanes) tile<R, 2>(a, inner, b + c, padded, rows, out + c);
  for (; c < padded; c += kLanes) tile<R, 1>(a, inner, b + c, padded, rows, out + c);
}

}  // namespace

void gemm_tn(const GemmTnArgs& g, int64_t begin, int64_t end, float* out) {
  static thread_local Scratch lefts, rights;
  std::memset(out, 0, static_cast<size_t>(g.inner * g.padded) * sizeof(float));
  auto* a = lefts.get<float>(static_cast<size_t>(kBlock * g.inner));
  auto* b = rights.get<float>(static_cast<size_t>(kBlock * g.padded));
  for (int64_t row = begin; row < end; row += kBlock) {
    const int64_t rows = std::min(kBlock, end - row);
    pack(g.a, row, rows, g.inner, g.inner, a);
    pack(g.b, row, rows, g.outer, g.padded, b);
    int64_t k = 0;
    const auto strips = [&]<int R>() {
      for (; k + R <= g.inner; k += R) strip<R>(a + k, g.inner, b, g.padded, rows, out + k * g.padded);
    };
    strips.template operator()<kRows>();
    strips.template operator()<4>();
    strips.template operator()<2>();
    strips.template operator()<1>();
  }
}

}  // namespace gnnc::GNNC_ISA
