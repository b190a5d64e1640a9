#pragma once

// gemm_tn with pairs of rows in dwords: of bf16 values (vdpbf16ps), or of integers of 16 bits (VNNI). See gemm_tn.h.

#include <algorithm>
#include <cfloat>

#include "bf16_pairs.isa.h"
#include "gemm_tn_block.isa.h"
#include "gemm_tn_tiles.isa.h"
#include "scratch.h"

#ifdef __AVX512F__

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kPairBlock = 128;  // rows: sums of 128 products of 8 and 16 bits fit in 32
constexpr float kMost16 = 32767.0f;

GNNC_INLINE __m512i dwords(const float* p) { return _mm512_loadu_si512(p); }
GNNC_INLINE __m512i splat_dword(const float* p) { return _mm512_set1_epi32(to_bits(*p)); }

struct DotProducts {
  using Sum = __m512;
  static GNNC_INLINE Sum start(const float* out) { return load(out); }
  static GNNC_INLINE __m512i left(const float* a) { return splat_dword(a); }
  static GNNC_INLINE __m512i right(const float* b) { return dwords(b); }
  static GNNC_INLINE Sum add(Sum sum, __m512i a, __m512i b) { return add_dots(sum, a, b); }
  GNNC_INLINE void finish(float* out, int64_t, Sum sum) const { store(out, sum); }
};

struct IntegerProducts {
  const float* scale;  // of the columns of b

  using Sum = __m512i;
  static GNNC_INLINE Sum start(const float*) { return _mm512_setzero_si512(); }
  static GNNC_INLINE __m512i left(const float* a) { return splat_dword(a); }
  static GNNC_INLINE __m512i right(const float* b) { return dwords(b); }
  static GNNC_INLINE Sum add(Sum sum, __m512i a, __m512i b) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // g++ 12 spills the sums around its intrinsic
    return sum;
  }
  GNNC_INLINE void finish(float* out, int64_t c, Sum sum) const {
    store(out, fused(_mm512_cvtepi32_ps(sum), load(scale + c), load(out)));
  }
};

GNNC_INLINE __m512i quantized(const int8_t* p, Whole) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
GNNC_INLINE __m512i quantized(const int8_t* p, Tail t) {
  return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(t.mask(), p));
}

// Returns the low halves of the lanes of `first` and `second` side by side.
GNNC_INLINE __m512i pair16(__m512i first, __m512i second) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, first, _mm512_slli_epi32(second, 16));
}

// Packs `count` rows as pairs: dwords [j, c] of `to` are make(row 2 j, row 2 j + 1) in column c. value(row, column,
// lanes) returns a vector of a row; a row that is missing is zero.
template <typename Value, typename Make>
GNNC_INLINE void pack_pairs_of_rows(int64_t count, int64_t width, int64_t stride, const Value& value, const Make& make,
                                    float* to) {
  for (int64_t r = 0; r < count; r += 2, to += stride) {
    for_columns(width, [&](int64_t c, auto lanes) {
      const auto first = value(r, c, lanes);
      decltype(value(r, c, lanes)) second{};
      if (r + 1 < count) second = value(r + 1, c, lanes);
      _mm512_storeu_si512(to + c, make(first, second));
    });
  }
}

int64_t padded_to_vectors(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

void sum_rows_of_pairs(const GemmTnArgs& g, int64_t begin, int64_t end, float* out) {
  static thread_local Scratch lefts, rights;
  const int64_t stride = padded_to_vectors(g.inner);
  auto* left = lefts.get<float>(static_cast<size_t>(kPairBlock / 2 * stride));
  auto* right = rights.get<float>(static_cast<size_t>(kPairBlock / 2 * g.padded));
  for (int64_t row = begin; row < end; row += kPairBlock) {
    const int64_t count = std::min(kPairBlock, end - row);
    const auto pack = [&](const GradMatrix& m, int64_t width, int64_t step, float* to) {
      with_rows(m, width, nullptr, nullptr, [&](const auto& rows) {
        const auto value = [&](int64_t r, int64_t c, auto lanes) { return rows.value(row + r, c, lanes); };
        pack_pairs_of_rows(count, width, step, value, [](Floats a, Floats b) { return pairs(a, b); }, to);
      });
    };
    pack(g.a, g.inner, stride, left);
    pack(g.b, g.outer, g.padded, right);
    multiply_block(g, DotProducts{}, {left, stride}, {right, g.padded}, (count + 1) / 2, out);
  }
}

// The rows of the right matrix of a block as floats, and what rounds each column to 16 bits.
struct Columns {
  float* values;   // [kPairBlock, padded]
  float* scale;    // [padded]
  float* inverse;  // [padded]
};

// Loads rows times their scales, and finds the scale of each column; returns false if a value is not finite.
bool load_columns(const GemmTnArgs& g, int64_t row, int64_t count, const Columns& columns) {
  with_rows(g.b, g.outer, g.a.scale, g.b.scale, [&](const auto& rows) {
    for (int64_t r = 0; r < count; ++r) {
      for_columns(g.outer, [&](int64_t c, auto lanes) {
        store(columns.values + r * g.padded + c, rows.value(row + r, c, lanes));  // with zeros behind the width
      });
    }
  });
  Ints most{};
  for (int64_t c = 0; c < g.padded; c += kLanes) {
    Ints top{};
    for (int64_t r = 0; r < count; ++r) top = larger(top, magnitude(load(columns.values + r * g.padded + c)));
    most = larger(most, top);
    const Floats amax = as_floats(top), tiny = splat(FLT_MIN * 2 * kMost16);
    const __mmask16 holds = _mm512_cmp_ps_mask(amax, tiny, _CMP_GE_OQ);
    store(columns.scale + c, _mm512_maskz_mov_ps(holds, amax * splat(1.0f / kMost16)));
    store(columns.inverse + c, _mm512_maskz_div_ps(holds, splat(kMost16), amax));
  }
  return largest(most) < 0x7f800000;
}

// Adds the products of rows [begin, end); sum_floats adds those of rows that are not all finite.
template <typename SumFloats>
void sum_rows_of_integers(const GemmTnArgs& g, int64_t begin, int64_t end, float* out, const SumFloats& sum_floats) {
  static thread_local Scratch lefts, rights, floats;
  const int64_t stride = padded_to_vectors(g.inner);
  auto* left = lefts.get<float>(static_cast<size_t>(kPairBlock / 2 * stride));
  auto* right = rights.get<float>(static_cast<size_t>(kPairBlock / 2 * g.padded));
  auto* values = floats.get<float>(static_cast<size_t>((kPairBlock + 2) * g.padded));
  const Columns columns{values, values + kPairBlock * g.padded, values + (kPairBlock + 1) * g.padded};
  const auto* a = static_cast<const int8_t*>(g.a.data);
  for (int64_t row = begin; row < end; row += kPairBlock) {
    const int64_t count = std::min(kPairBlock, end - row);
    if (!load_columns(g, row, count, columns)) {
      sum_floats(g, row, row + count, out);
      continue;
    }
    const auto code = [&](int64_t r, int64_t c, auto lanes) {
      const int8_t* at = a + (row + r) * g.a.stride + c;
      prefetch_far(at + kPairBlock * g.a.stride);
      return quantized(at, lanes);
    };
    pack_pairs_of_rows(count, g.inner, stride, code, pair16, left);
    const auto rounded = [&](int64_t r, int64_t c, auto) {
      return _mm512_cvtps_epi32(load(columns.values + r * g.padded + c) * load(columns.inverse + c));
    };
    pack_pairs_of_rows(count, g.padded, g.padded, rounded, pair16, right);
    multiply_block(g, IntegerProducts{columns.scale}, {left, stride}, {right, g.padded}, (count + 1) / 2, out);
  }
}

}  // namespace
}  // namespace gnnc::GNNC_ISA

#endif
