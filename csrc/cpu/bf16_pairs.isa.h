#pragma once

// Pairs of bf16 values in dwords, and sums of their products. Functions that use vdpbf16ps run only where
// has_bf16_dots() is true; it is written out, so that no other code of the file may use AVX512_BF16.

#include "gnnc/simd.h"

#ifdef __AVX512F__

namespace gnnc::GNNC_ISA {
namespace {

// Returns the bf16 values of `first` and `second`, which have no more bits, side by side: lane i holds a pair.
GNNC_INLINE __m512i pairs(Floats first, Floats second) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_castps_si512(second));
}

// Returns the sums, to each lane of which both products of a pair of bf16 values are added.
GNNC_INLINE __m512 add_dots(__m512 sums, __m512i a, __m512i b) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
  return sums;
}

}  // namespace
}  // namespace gnnc::GNNC_ISA

#endif
