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
constexpr int kCounters = 16;    // counters that are computed together

constexpr uint32_t kPhiloxA = 0xD2511F53u, kPhiloxB = 0xCD9E8D57u, kWeylA = 0x9E3779B9u, kWeylB = 0xBB67AE85u;

#ifdef __AVX512F__
// The upper and the lower words of the products of 16 words with a factor.
struct Products {
  __m512i high, low;
};
GNNC_INLINE Products product(__m512i words, uint32_t factor) {
  const __m512i by = _mm512_set1_epi32(static_cast<int>(factor));
  const __m512i even = _mm512_mul_epu32(words, by), odd = _mm512_mul_epu32(_mm512_srli_epi64(words, 32), by);
  return {_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd), _mm512_mullo_epi32(words, by)};
}

// Stores the bits of the counters first .. first + 15.
GNNC_INLINE void philox_16(uint64_t seed, uint32_t stream, uint64_t first, uint16_t* out) {
  // Lane 4 q + i has counter 4 i + q, so that the words of four counters in a row end in one vector.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)), order);
  const __mmask16 carried = _mm512_cmplt_epu32_mask(c0, order);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(first >> 32));
  __m512i c1 = _mm512_mask_add_epi32(upper, carried, upper, _mm512_set1_epi32(1));
  __m512i c2 = _mm512_set1_epi32(static_cast<int>(stream)), c3 = _mm512_setzero_si512();
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round, key0 += kWeylA, key1 += kWeylB) {
    const Products a = product(c0, kPhiloxA), b = product(c2, kPhiloxB);
    c0 = _mm512_ternarylogic_epi32(b.high, c1, _mm512_set1_epi32(static_cast<int>(key0)), 0x96);
    c2 = _mm512_ternarylogic_epi32(a.high, c3, _mm512_set1_epi32(static_cast<int>(key1)), 0x96);
    c1 = b.low, c3 = a.low;
  }
  const __m512i low01 = _mm512_unpacklo_epi32(c0, c1), low23 = _mm512_unpacklo_epi32(c2, c3);
  const __m512i high01 = _mm512_unpackhi_epi32(c0, c1), high23 = _mm512_unpackhi_epi32(c2, c3);
  _mm512_storeu_si512(out, _mm512_unpacklo_epi64(low01, low23));
  _mm512_storeu_si512(out + 32, _mm512_unpackhi_epi64(low01, low23));
  _mm512_storeu_si512(out + 64, _mm512_unpacklo_epi64(high01, high23));
  _mm512_storeu_si512(out + 96, _mm512_unpackhi_epi64(high01, high23));
}
#else
GNNC_INLINE void philox_16(uint64_t seed, uint32_t stream, uint64_t first, uint16_t* out) {
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

  // Computes the bits of a row, and of rows after it that share its vectors.
  const uint16_t* row(int64_t r) {
    static thread_local Scratch scratch;
    if (r < begin_ || r >= end_) {
      const int64_t rows = blocks_ >= kCounters ? 1 : kCounters / blocks_;
      const int64_t counters = (rows * blocks_ + kCounters - 1) / kCounters * kCounters;
      // Vectors of columns may end past the last block.
      bits_ = scratch.get<uint16_t>(static_cast<size_t>(counters * kPhiloxBlock + kLanes));
      const auto first = static_cast<uint64_t>(r * blocks_);
      for (int64_t i = 0; i < counters; i += kCounters) {
        philox_16(seed_, stream_, first + static_cast<uint64_t>(i), bits_ + i * kPhiloxBlock);
      }
      begin_ = r, end_ = r + rows;
    }
    return bits_ + (r - begin_) * blocks_ * kPhiloxBlock;
  }

 private:
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
