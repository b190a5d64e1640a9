#pragma once

// Returns dot products of two rows, in fp32 or exactly in 32-bit integers.

#include <cstdint>

#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {
namespace {

template <typename T>
GNNC_INLINE float dot(const T* a, const T* b, int64_t width) {
  Floats even{}, odd{};
  int64_t c = 0;
  for (; c + 2 * kLanes <= width; c += 2 * kLanes) {
    even = fused(load(a + c), load(b + c), even);
    odd = fused(load(a + c + kLanes), load(b + c + kLanes), odd);
  }
  for (; c + kLanes <= width; c += kLanes) even = fused(load(a + c), load(b + c), even);
  if (c < width) {
    const Tail tail{static_cast<int>(width - c)};
    odd = fused(load(a + c, tail), load(b + c, tail), odd);
  }
  return sum(even + odd);
}

GNNC_INLINE float dot(const int8_t* a, const int8_t* b, int64_t width) {
  int32_t total = 0;
  int64_t c = 0;
#ifdef __AVX512F__
  const auto wide = [](const int8_t* p, uint32_t mask) {
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, p));
  };
  __m512i acc = _mm512_setzero_si512();
  for (; c < width; c += 32) {
    const uint32_t mask = width - c >= 32 ? ~0u : (1u << (width - c)) - 1;
    acc = _mm512_dpwssd_epi32(acc, wide(a + c, mask), wide(b + c, mask));
  }
  total = _mm512_reduce_add_epi32(acc);
#endif
  for (; c < width; ++c) total += a[c] * b[c];
  return static_cast<float>(total);
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
