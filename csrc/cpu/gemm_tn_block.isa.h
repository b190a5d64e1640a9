#pragma once

// The register tiles of gemm_tn, whatever its products are: R x V vectors of sums.

#include <cstdint>

#include "gemm_tn.h"
#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int kVectors = kLanes == 16 ? 4 : 2;  // with 6 rows each, as many sums as there are registers for

// A block of packed rows (or of pairs of rows), `stride` dwords apart.
struct Block {
  const float* data;
  int64_t stride;
};

// Adds the products of `rows` packed rows to R x V vectors of the result, whose first is in column c.
template <int R, int V, typename Products>
GNNC_INLINE void tile(const Products& p, const Block& left, const Block& right, int64_t rows, int64_t padded, int64_t c,
                      float* out) {
  typename Products::Sum sums[R][V];
  each<R>([&](auto r) { each<V>([&](auto v) { sums[r][v] = p.start(out + r * padded + v * kLanes); }); });
  const float *a = left.data, *b = right.data;
  for (int64_t n = 0; n < rows; ++n, a += left.stride, b += right.stride) {
    decltype(p.right(b)) vectors[V];
    each<V>([&](auto v) { vectors[v] = p.right(b + v * kLanes); });
    each<R>([&](auto r) {
      const auto value = p.left(a + r);
      each<V>([&](auto v) { sums[r][v] = p.add(sums[r][v], value, vectors[v]); });
    });
  }
  each<R>(
      [&](auto r) { each<V>([&](auto v) { p.finish(out + r * padded + v * kLanes, c + v * kLanes, sums[r][v]); }); });
}

// Adds the products of V vectors of columns of b, from column c on, with all columns of a.
template <int V, typename Products>
__attribute__((noinline)) void columns(const GemmTnArgs& g, const Products& p, Block a, const Block& b, int64_t rows,
                                       int64_t c, float* out) {
  int64_t k = 0;
  const auto strips = [&]<int R>() {
    for (; k + R <= g.inner; k += R, a.data += R) tile<R, V>(p, a, b, rows, g.padded, c, out + k * g.padded);
  };
  strips.template operator()<6>();
  strips.template operator()<4>();
  strips.template operator()<2>();
  strips.template operator()<1>();
}

// Adds the products of a block to the result.
template <typename Products>
void multiply_block(const GemmTnArgs& g, const Products& p, const Block& left, Block right, int64_t rows, float* out) {
  int64_t c = 0;
  const auto strips = [&]<int V>() {
    for (; c + V * kLanes <= g.padded; c += V * kLanes, right.data += V * kLanes) {
      columns<V>(g, p, left, right, rows, c, out + c);
    }
  };
  strips.template operator()<kVectors>();
  strips.template operator()<2>();
  strips.template operator()<1>();
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
