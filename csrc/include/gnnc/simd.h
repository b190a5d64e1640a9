#pragma once

// Vectors of floats: 16 lanes with AVX-512, 8 with AVX2, 4 lanes of GCC's vector extension elsewhere. Only for
// *.isa.cpp files: all functions live in the namespace of the instruction set.
//
// `Tail` holds the number of valid lanes of the last vector of a row; a load zeroes the other lanes, and a store does
// not write them. Rounding is to nearest even. Integer results are equal on all instruction sets; floats differ by
// fused multiply-adds and the order of sums.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#ifdef __AVX2__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12 warns about its own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // every function here is inlined, so that its ABI does not matter

#define GNNC_INLINE inline __attribute__((always_inline))

namespace gnnc::GNNC_ISA {

// Prefetches a cache line that is read later into L2, which can have many more requests in flight than L1.
GNNC_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

// Calls body(0) ... body(N - 1) with compile-time constants, so that arrays that the body indexes stay in registers:
// g++ 12 puts arrays that a loop indexes into memory before it unrolls the loop.
template <int N, typename Body>
GNNC_INLINE void each(const Body& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Words = uint32_t __attribute__((vector_size(kLanes * 4)));
using UnalignedFloats = float __attribute__((vector_size(kLanes * 4), aligned(4)));

struct Bf16 {
  uint16_t bits;
};

struct Whole {};
struct Tail {
  int lanes;
#ifdef __AVX512F__
  GNNC_INLINE __mmask16 mask() const { return static_cast<__mmask16>((1u << lanes) - 1u); }
#endif
};

GNNC_INLINE constexpr int lanes_of(Whole) { return kLanes; }
GNNC_INLINE constexpr int lanes_of(Tail t) { return t.lanes; }

GNNC_INLINE float from_bits(int32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
GNNC_INLINE int32_t to_bits(float v) {
  int32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}

GNNC_INLINE Floats splat(float v) { return v - Floats{}; }
GNNC_INLINE Ints splat(int32_t v) { return v - Ints{}; }
GNNC_INLINE Floats as_floats(Ints v) { return reinterpret_cast<Floats>(v); }
GNNC_INLINE Ints as_ints(Floats v) { return reinterpret_cast<Ints>(v); }
GNNC_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

GNNC_INLINE Floats load(const float* p, Whole = {}) { return *reinterpret_cast<const UnalignedFloats*>(p); }
GNNC_INLINE void store(float* p, Floats v, Whole = {}) { *reinterpret_cast<UnalignedFloats*>(p) = v; }

#ifdef __AVX512F__

GNNC_INLINE Floats load(const float* p, Tail t) { return _mm512_maskz_loadu_ps(t.mask(), p); }
GNNC_INLINE void store(float* p, Floats v, Tail t) { _mm512_mask_storeu_ps(p, t.mask(), v); }

GNNC_INLINE Floats widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
GNNC_INLINE Floats load(const Bf16* p, Whole = {}) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
GNNC_INLINE Floats load(const Bf16* p, Tail t) { return widen(_mm256_maskz_loadu_epi16(t.mask(), p)); }

// Rounds to bf16, to nearest even; a NaN becomes the quiet NaN.
GNNC_INLINE __m256i narrow(Floats v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(
      _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000)), 16));
}
GNNC_INLINE void store(Bf16* p, Floats v, Whole = {}) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
GNNC_INLINE void store(Bf16* p, Floats v, Tail t) { _mm256_mask_storeu_epi16(p, t.mask(), narrow(v)); }

GNNC_INLINE Floats load(const int8_t* p, Whole = {}) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
GNNC_INLINE Floats load(const int8_t* p, Tail t) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(t.mask(), p)));
}

GNNC_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// Return the smaller or larger value; if a is NaN, the result is b, so that a clamp never lets a NaN through.
GNNC_INLINE Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
GNNC_INLINE Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
GNNC_INLINE Floats square_root(Floats v) { return _mm512_sqrt_ps(v); }
GNNC_INLINE Floats nearest(Floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
GNNC_INLINE Ints larger(Ints a, Ints b) { return reinterpret_cast<Ints>(_mm512_max_epi32((__m512i)a, (__m512i)b)); }
GNNC_INLINE Ints larger_bits(Ints a, Ints b) { return (Ints)_mm512_max_epu32((__m512i)a, (__m512i)b); }
GNNC_INLINE float sum(Floats v) { return _mm512_reduce_add_ps(v); }
GNNC_INLINE float largest(Floats v) { return _mm512_reduce_max_ps(v); }
GNNC_INLINE int32_t largest(Ints v) { return _mm512_reduce_max_epi32((__m512i)v); }
GNNC_INLINE bool any(Ints v) { return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0; }
GNNC_INLINE Floats keep(Floats v, Whole) { return v; }
GNNC_INLINE Floats keep(Floats v, Tail t) { return _mm512_maskz_mov_ps(t.mask(), v); }

#else

GNNC_INLINE Floats load(const float* p, Tail t) {
  Floats v{};
  for (int i = 0; i < t.lanes; ++i) v[i] = p[i];
  return v;
}
GNNC_INLINE void store(float* p, Floats v, Tail t) {
  for (int i = 0; i < t.lanes; ++i) p[i] = v[i];
}

GNNC_INLINE Floats load(const Bf16* p, Tail t) {
  Ints v{};
  for (int i = 0; i < t.lanes; ++i) v[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i].bits) << 16);
  return as_floats(v);
}
GNNC_INLINE Floats load(const Bf16* p, Whole = {}) {
#ifdef __AVX2__
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return as_floats((Ints)_mm256_slli_epi32(wide, 16));
#else
  return load(p, Tail{kLanes});
#endif
}

// Stores v rounded to bf16, to nearest even; a NaN becomes the quiet NaN.
GNNC_INLINE void store(Bf16* p, Floats v, Tail t) {
  const Words bits = reinterpret_cast<Words>(v);
  const Words rounded = (bits + (((bits >> 16) & 1) + 0x7fffu)) >> 16;
  const Words result = v == v ? rounded : rounded * 0 + 0x7fc0u;
  for (int i = 0; i < t.lanes; ++i) p[i].bits = static_cast<uint16_t>(result[i]);
}
GNNC_INLINE void store(Bf16* p, Floats v, Whole = {}) { store(p, v, Tail{kLanes}); }

GNNC_INLINE Floats load(const int8_t* p, Tail t) {
  Ints v{};
  for (int i = 0; i < t.lanes; ++i) v[i] = p[i];
  return to_floats(v);
}
GNNC_INLINE Floats load(const int8_t* p, Whole = {}) {
#ifdef __AVX2__
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return load(p, Tail{kLanes});
#endif
}

GNNC_INLINE Floats fused(Floats a, Floats b, Floats c) {
#ifdef __AVX2__
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
// Return the smaller or larger value; if a is NaN, the result is b, so that a clamp never lets a NaN through.
GNNC_INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
GNNC_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
GNNC_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
GNNC_INLINE Ints larger_bits(Ints a, Ints b) { return reinterpret_cast<Words>(a) > reinterpret_cast<Words>(b) ? a : b; }
GNNC_INLINE Floats square_root(Floats v) {
  for (int i = 0; i < kLanes; ++i) v[i] = std::sqrt(v[i]);
  return v;
}
// Rounds to the nearest integer by adding 1.5 * 2^23, which leaves no bits for a fraction; floats from 2^22 on have no
// fraction that matters (or overflow in the caller's next step anyway).
GNNC_INLINE Floats nearest(Floats v) {
  const Floats magic = splat(12582912.0f);
  const Floats rounded = (v + magic) - magic;
  return (v < 4194304.0f) & (v > -4194304.0f) ? rounded : v;
}
GNNC_INLINE float sum(Floats v) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) v[i] += v[i + step];
  }
  return v[0];
}
GNNC_INLINE float largest(Floats v) {
  float top = v[0];
  for (int i = 1; i < kLanes; ++i) top = top > v[i] ? top : v[i];
  return top;
}
GNNC_INLINE int32_t largest(Ints v) {
  int32_t top = v[0];
  for (int i = 1; i < kLanes; ++i) top = top > v[i] ? top : v[i];
  return top;
}
GNNC_INLINE bool any(Ints v) {
  int32_t all = 0;
  for (int i = 0; i < kLanes; ++i) all |= v[i];
  return all != 0;
}
GNNC_INLINE Floats keep(Floats v, Whole) { return v; }
GNNC_INLINE Floats keep(Floats v, Tail t) {
  for (int i = t.lanes; i < kLanes; ++i) v[i] = 0.0f;
  return v;
}

#endif

#ifdef __AVX512F__
// Computes one level of the reduction tree of fold_all: combines lanes `apart` in each of two vectors, and places the
// results side by side in one vector.
template <int kLevel, typename Combine>
GNNC_INLINE __m512 fold(__m512 a, __m512 b, const Combine& combine) {
  if constexpr (kLevel == 0) return combine(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  if constexpr (kLevel == 1) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return combine(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  return combine(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Reduces 16 vectors at once: lane i of the result combines all lanes of v[i], in a third of the work of 16 single
// reductions.
template <int kLevel = 0, int kCount = 16, typename Combine>
GNNC_INLINE __m512 fold_all(const __m512 (&v)[kCount], const Combine& combine) {
  if constexpr (kCount == 1) {
    return v[0];
  } else {
    __m512 half[kCount / 2];
    for (int i = 0; i < kCount / 2; ++i) half[i] = fold<kLevel>(v[2 * i], v[2 * i + 1], combine);
    return fold_all<kLevel + 1>(half, combine);
  }
}
#endif

// Sixteen vectors, each of whose lanes are to be reduced to one result.
struct Group {
  alignas(64) float lanes[16][kLanes];

  GNNC_INLINE void set(int64_t i, Floats v) { store(lanes[i], v); }

#ifdef __AVX512F__
  template <typename Combine>
  GNNC_INLINE __m512 fold(const Combine& combine) const {
    __m512 rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = load(lanes[i]);
    return fold_all(rows, combine);
  }
  GNNC_INLINE void sums(float* out) const {
    store(out, fold([](__m512 a, __m512 b) { return a + b; }));
  }
  // Computes the maxima of the vectors as signed integers.
  GNNC_INLINE void largest(float* out) const {
    store(out, fold([](__m512 a, __m512 b) {
            return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
          }));
  }
#else
  GNNC_INLINE void sums(float* out) const {
    for (int i = 0; i < 16; ++i) out[i] = sum(load(lanes[i]));
  }
  // Computes the maxima of the vectors as signed integers.
  GNNC_INLINE void largest(float* out) const {
    for (int i = 0; i < 16; ++i) out[i] = from_bits(gnnc::GNNC_ISA::largest(as_ints(load(lanes[i]))));
  }
#endif
};

// Return the bits of |v|, and |v|. As signed integers the bits are ordered like the numbers, with infinity and then NaN
// on top: a maximum of bits preserves a NaN, and does not depend on order.
GNNC_INLINE Ints magnitude(Floats v) { return as_ints(v) & 0x7fffffff; }
GNNC_INLINE Floats absolute(Floats v) { return as_floats(magnitude(v)); }

// Calls body(column, Whole{}) for every whole vector of a row, then body(column, Tail{...}) for the remaining columns.
template <typename Body>
GNNC_INLINE void for_columns(int64_t width, const Body& body) {
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) body(c, Whole{});
  if (c < width) body(c, Tail{static_cast<int>(width - c)});
}

GNNC_INLINE Floats round_to_bf16(Floats v) {
  Bf16 narrow[kLanes];
  store(narrow, v);
  return load(narrow);
}

}  // namespace gnnc::GNNC_ISA
