#pragma once

// Random bits of stochastic rounding, as gnnc/ir/philox.py defines them: Philox4x32-10 with the seed as its key. The
// counter of eight columns of a row is row * ceil(width / 8) + column / 8, and the stream; each gives 8 x 16 bits, in
// the order of the columns. Only for *.isa.cpp files.
//
// Traffic: none; the bits of some rows stay in L1. Floor: 10 rounds of four 32-bit products for eight values.

#include <cstdint>

#include "gnnc/simd.h"
#include "scratch.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int kPhiloxBlock = 8;  // columns that share a counter
constexpr int kCounters = 32;    // counters that are computed together

constexpr uint32_t kPhiloxA = 0xD2511F53u, kPhiloxB = 0xCD9E8D57u, kWeylA = 0x9E3779B9u, kWeylB = 0xBB67AE85u;

#ifdef __AVX512F__
// Stores the bits of the counters first .. first + kCounters - 1. A word of a counter is the lower half of a 64-bit
// lane, whose upper half holds anything: a product of two words reads the lower halves, and leaves its lower word where
// it is.
GNNC_INLINE void philox(uint64_t seed, uint32_t stream, uint64_t first, uint16_t* out) {
  constexpr int kVectors = kCounters / 8;
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // counters in a row end in one vector
  const __m512i a = _mm512_set1_epi64(kPhiloxA), b = _mm512_set1_epi64(kPhiloxB);
  __m512i c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
  each<kVectors>([&](auto i) __attribute__((always_inline)) {
    c0[i] = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(first + 8 * i)), order);
    c1[i] = _mm512_srli_epi64(c0[i], 32);
    c2[i] = _mm512_set1_epi64(stream), c3[i] = _mm512_setzero_si512();
  });
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round, key0 += kWeylA, key1 += kWeylB) {
    const __m512i k0 = _mm512_set1_epi32(static_cast<int>(key0)), k1 = _mm512_set1_epi32(static_cast<int>(key1));
    each<kVectors>([&](auto i) __attribute__((always_inline)) {
      const __m512i by_a = _mm512_mul_epu32(c0[i], a), by_b = _mm512_mul_epu32(c2[i], b);
      c0[i] = _mm512_ternarylogic_epi32(_mm512_srli_epi64(by_b, 32), c1[i], k0, 0x96);
      c2[i] = _mm512_ternarylogic_epi32(_mm512_srli_epi64(by_a, 32), c3[i], k1, 0x96);
      c1[i] = by_b, c3[i] = by_a;
    });
  }
  const auto pairs = [](__m512i low, __m512i high) __attribute__((always_inline)) {
    return _mm512_mask_mov_epi32(low, 0xaaaa, _mm512_slli_epi64(high, 32));
  };
  each<kVectors>([&](auto i) __attribute__((always_inline)) {
    const __m512i front = pairs(c0[i], c1[i]), back = pairs(c2[i], c3[i]);
    _mm512_storeu_si512(out + 64 * i, _mm512_unpacklo_epi64(front, back));
    _mm512_storeu_si512(out + 64 * i + 32, _mm512_unpackhi_epi64(front, back));
  });
}
#else
GNNC_INLINE void philox(uint64_t seed, uint32_t stream, uint64_t first, uint16_t* out) {
  uint32_t c[4][kCounters];
  for (int i = 0; i < kCounters; ++i) {
    const uint64_t counter = first + static_cast<uint64_t>(i);
    c[0][i] = static_cast<uint32_t>(counter), c[1][i] = static_cast<uint32_t>(counter >> 32);
    c[2][i] = stream, c[3][i] = 0;
  }
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, key0 += kWeylA, key1 += kWeylB) {
    for (int i = 0; i < kCounters; ++i) {
      const uint64_t a = uint64_t{kPhiloxA} * c[0][i], b = uint64_t{kPhiloxB} * c[2][i];
      c[0][i] = static_cast<uint32_t>(b >> 32) ^ c[1][i] ^ key0, c[1][i] = static_cast<uint32_t>(b);
      c[2][i] = static_cast<uint32_t>(a >> 32) ^ c[3][i] ^ key1, c[3][i] = static_cast<uint32_t>(a);
    }
  }
  for (int i = 0; i < kCounters; ++i) {
    for (int word = 0; word < 4; ++word) {
      out[8 * i + 2 * word] = static_cast<uint16_t>(c[word][i]);
      out[8 * i + 2 * word + 1] = static_cast<uint16_t>(c[word][i] >> 16);
    }
  }
}
#endif

// The random fractions of rows of `width` columns; `row` is to be called with rows in rising order.
class Fractions {
 public:
  Fractions(uint64_t seed, int32_t stream, int64_t width)
      : seed_(seed), stream_(static_cast<uint32_t>(stream)), blocks_((width + kPhiloxBlock - 1) / kPhiloxBlock) {}

  // Returns the bits of a row, which the next call may overwrite.
  const uint16_t* row(int64_t r) {
    if (r < begin_ || r >= end_) compute(r);
    return bits_ + (r - begin_) * blocks_ * kPhiloxBlock;
  }

 private:
  // Computes the bits of a row, and of rows after it that share its vectors.
  __attribute__((noinline)) void compute(int64_t r) {
    static thread_local Scratch scratch;
    const int64_t rows = blocks_ >= kCounters ? 1 : kCounters / blocks_;
    const int64_t counters = (rows * blocks_ + kCounters - 1) / kCounters * kCounters;
    // Vectors of columns may end past the last block.
    bits_ = scratch.get<uint16_t>(static_cast<size_t>(counters * kPhiloxBlock + kLanes));
    const auto first = static_cast<uint64_t>(r * blocks_);
    for (int64_t i = 0; i < counters; i += kCounters) {
      philox(seed_, stream_, first + static_cast<uint64_t>(i), bits_ + i * kPhiloxBlock);
    }
    begin_ = r, end_ = r + rows;
  }

  uint64_t seed_;
  uint32_t stream_;
  int64_t blocks_, begin_ = 0, end_ = 0;
  uint16_t* bits_ = nullptr;
};

// Returns (bits + 1/2) / 2^16 of the 16 bits at p: they are the fraction of a float between 1 and 2.
GNNC_INLINE Floats fractions(const uint16_t* p) {
#ifdef __AVX512F__
  const Ints bits = (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  Ints bits{};
  for (int i = 0; i < kLanes; ++i) bits[i] = p[i];
#endif
  return as_floats((bits << 7) | 0x3f800040) - splat(1.0f);
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
