#pragma once

// Quantizes rows of floats to int8 values: q = rint(x * inv), half to even, clamped to +-127, or floor(x * inv + u)
// with a random fraction u. Only for *.isa.cpp files.
//
// scale = amax / 127 (0 where that is below the least normal float, so that 1 / scale is finite), inv = 1 / scale or 0.
// The maximum is taken on bit patterns, so a NaN or an infinity in a row makes its scale non-finite.

#include <limits>

#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {

template <typename T>
GNNC_INLINE Ints row_magnitude(const T* x, int64_t width) {
  Ints top{}, next{};
  int64_t c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes) {
    top = larger(top, magnitude(load(x + c)));
    next = larger(next, magnitude(load(x + c + kLanes)));
    top = larger(top, magnitude(load(x + c + 2 * kLanes)));
    next = larger(next, magnitude(load(x + c + 3 * kLanes)));
  }
  for (; c + kLanes <= width; c += kLanes) top = larger(top, magnitude(load(x + c)));
  if (c < width) next = larger(next, magnitude(load(x + c, Tail{static_cast<int>(width - c)})));
  return larger(top, next);
}

// Turn maxima (as bits) into scales, and scales into the factors that quantization multiplies by.
GNNC_INLINE Floats scale_of(Floats amax) {
  const Floats scale = amax / splat(127.0f);
  return scale < splat(std::numeric_limits<float>::min()) ? splat(0.0f) : scale;
}
GNNC_INLINE Floats inverse_of(Floats scale) {
  return scale > splat(0.0f) ? splat(1.0f) / (scale > splat(0.0f) ? scale : splat(1.0f)) : splat(0.0f);
}
inline float scale_of(float amax) { return scale_of(splat(amax))[0]; }
inline float inverse_of(float scale) { return inverse_of(splat(scale))[0]; }

// Computes scales[r] and inverses[r] of rows 0 .. rows; both arrays need room for 16 more elements.
template <typename T>
GNNC_INLINE void row_scales(const T* x, int64_t stride, int rows, int64_t width, float* scales, float* inverses) {
  Group group;
  for (int begin = 0; begin < rows; begin += 16) {
    const int count = rows - begin < 16 ? rows - begin : 16;
#pragma GCC unroll 1
    for (int i = 0; i < count; ++i) group.set(i, as_floats(row_magnitude(x + (begin + i) * stride, width)));
    group.largest(scales + begin);
  }
  for (int r = 0; r < rows; r += kLanes) {
    const Floats scale = scale_of(load(scales + r));
    store(scales + r, scale);
    store(inverses + r, inverse_of(scale));
  }
}

// Clamping of scaled values before they are quantized, and their rounding.
enum class Clamp {
  none,   // |value| < 127.5 if its row is finite (if the row is not finite, the scale shows it)
  both,   // values of any size, to [-127, 127]
  floor,  // as both, and rounded down
};

#ifdef __AVX512F__

template <Clamp kClamp>
GNNC_INLINE __m512i integers(__m512 v) {
  // Above 2^31 the conversion would change the sign; below -2^31 it does not.
  if constexpr (kClamp != Clamp::none) v = _mm512_min_ps(v, _mm512_set1_ps(127.0f));
  if constexpr (kClamp == Clamp::floor) {
    return _mm512_cvt_roundps_epi32(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  return _mm512_cvtps_epi32(v);
}

// Packs four vectors of scaled values to 64 quantized values.
template <Clamp kClamp>
GNNC_INLINE __m512i pack_int8(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512i low = _mm512_packs_epi32(integers<kClamp>(a), integers<kClamp>(b));
  const __m512i high = _mm512_packs_epi32(integers<kClamp>(c), integers<kClamp>(d));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i quantized = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
  return kClamp != Clamp::none ? _mm512_max_epi8(quantized, _mm512_set1_epi8(-127)) : quantized;
}

// Computes out[c] = quantized value(c) xor flip, in blocks of 64, padded with quantized zeros past the width.
template <Clamp kClamp, typename Value>
GNNC_INLINE void store_quantized(int64_t width, const Value& value, uint8_t flip, int8_t* out) {
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(flip));
  int64_t c = 0;
  for (; c + 64 <= width; c += 64) {
    const __m512i quantized =
        pack_int8<kClamp>(value(c, Whole{}), value(c + 16, Whole{}), value(c + 32, Whole{}), value(c + 48, Whole{}));
    _mm512_storeu_si512(out + c, _mm512_xor_si512(quantized, mask));
  }
  if (c == width) return;
  Floats v[4] = {};
  for (int i = 0; i < 4; ++i) {
    const int64_t left = width - c - 16 * i;
    if (left > 0)
      v[i] = keep(value(c + 16 * i, Tail{left < 16 ? static_cast<int>(left) : 16}),
                  Tail{left < 16 ? static_cast<int>(left) : 16});
  }
  _mm512_storeu_si512(out + c, _mm512_xor_si512(pack_int8<kClamp>(v[0], v[1], v[2], v[3]), mask));
}

#else

// Returns rint(v), or floor(v), clamped to +-127: adding 1.5 * 2^23 puts the integer into the low bits.
template <Clamp kClamp = Clamp::both>
GNNC_INLINE Ints integers(Floats v) {
  const Floats held = larger(smaller(v, splat(127.0f)), splat(-127.0f));
  const Floats magic = splat(12582912.0f), shifted = held + magic;
  const Ints rounded = as_ints(shifted) - splat(to_bits(12582912.0f));
  if constexpr (kClamp == Clamp::floor) return rounded + (shifted - magic > held);
  return rounded;
}

// Computes out[c] = quantized value(c) xor flip, in blocks of 64, padded with quantized zeros past the width.
template <Clamp kClamp, typename Value>
GNNC_INLINE void store_quantized(int64_t width, const Value& value, uint8_t flip, int8_t* out) {
  for_columns(width, [&](int64_t c, auto n) {
    const Ints quantized = integers<kClamp>(value(c, n));
    const int lanes = lanes_of(n);
    for (int i = 0; i < lanes; ++i) out[c + i] = static_cast<int8_t>(quantized[i] ^ flip);
  });
  const int64_t padded = (width + 63) / 64 * 64;
  std::memset(out + width, flip, static_cast<size_t>(padded - width));
}

#endif

}  // namespace gnnc::GNNC_ISA
