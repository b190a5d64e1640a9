#pragma once

// Multiplication of rows of x that are mostly zeros (counts of words): the nonzero elements are found while a row is
// read, and only these are quantized and multiplied. Reading x from memory takes longer than comparing it with zero, so
// the scan costs little. The results are bit for bit equal to those of the dense path: both sum integers.

#include "gemm_layout.isa.h"
#include "gnnc/quantize.h"

#ifdef __AVX512F__

namespace gnnc::GNNC_ISA {

constexpr int64_t kZerosDepth = 512;   // least depth of rows that are scanned for zeros
constexpr int64_t kFew = 8;            // a row is mostly zeros if at most one of kFew columns is nonzero
constexpr int64_t kAheadBytes = 6144;  // measured: 4096 and 8192 take 10% longer, 2048 a third

// Adds products of unsigned and signed bytes. In assembly, because with the intrinsic g++ 12 copies every sum before it
// adds, and spills the copies.
GNNC_INLINE void add_products(__m512i& sum, __m512i unsigned_values, __m512i signed_values) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_values), "v"(signed_values));
}

// The nonzero elements of a row.
struct NonZeros {
  int32_t* column;  // columns; after quantization the step of four columns that each lies in
  float* value;     // values; after quantization the quantized value, in the byte of its column in the step
  int64_t count;
  int32_t sum;  // sum of the quantized values
};

GNNC_INLINE uint32_t non_zeros(Floats v) { return _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ); }

// Writes the indices of the set bits, and up to four more elements, and returns the number of set bits. Most words have
// at most four set bits, which takes no branch.
GNNC_INLINE int64_t write_bits(uint64_t bits, int32_t first, int32_t* to) {
  const int64_t count = __builtin_popcountll(bits);
  each<4>([&](auto i) __attribute__((always_inline)) {
    to[i] = first + static_cast<int32_t>(_tzcnt_u64(bits));
    bits = _blsr_u64(bits);
  });
  for (to += 4; bits != 0; bits = _blsr_u64(bits)) *to++ = first + static_cast<int32_t>(_tzcnt_u64(bits));
  return count;
}

GNNC_INLINE float value_of(float v) { return v; }
GNNC_INLINE float value_of(Bf16 v) { return from_bits(static_cast<int32_t>(v.bits) << 16); }
GNNC_INLINE float value_of(int8_t v) { return static_cast<float>(v); }

// Writes the nonzero columns of a row, and returns their number, or, as soon as there are more than `most`, a number
// above `most`. Prefetches the following rows, which arrive while the rest of this row is processed.
template <typename T>
GNNC_INLINE int64_t find_non_zeros(const T* x, int64_t width, int64_t most, int32_t* column) {
  int64_t count = 0, c = 0;
  for (; c + 64 <= width; c += 64) {
    uint64_t bits = 0;
    const char* ahead = reinterpret_cast<const char*>(x + c) + kAheadBytes;
    for (int64_t i = 0; i < static_cast<int64_t>(sizeof(T)); ++i) prefetch_far(ahead + 64 * i);
    each<4>([&](auto i) __attribute__((always_inline)) {
      bits |= static_cast<uint64_t>(non_zeros(load(x + c + 16 * i))) << 16 * i;
    });
    count += write_bits(bits, static_cast<int32_t>(c), column + count);
    if (count > most) return count;
  }
  for_columns(width - c, [&](int64_t i, auto n) {
    count += write_bits(non_zeros(load(x + c + i, n)), static_cast<int32_t>(c + i), column + count);
  });
  return count;
}

// Quantizes the values, and splits columns into steps and bytes.
template <Clamp kClamp>
GNNC_INLINE void quantize_non_zeros(NonZeros& found, float inverse) {
  const Floats factor = splat(inverse);
  __m512i sum = _mm512_setzero_si512();
  for_columns(found.count, [&](int64_t i, auto n) {
    __m512i code = integers<kClamp>(load(found.value + i, n) * factor);
    if constexpr (kClamp == Clamp::both) code = _mm512_max_epi32(code, _mm512_set1_epi32(-127));
    auto* column = reinterpret_cast<float*>(found.column + i);
    const __m512i at = _mm512_castps_si512(load(column, n));
    const __m512i bits = _mm512_slli_epi32(_mm512_and_si512(at, _mm512_set1_epi32(3)), 3);
    store(column, _mm512_castsi512_ps(_mm512_srli_epi32(at, 2)), n);
    store(found.value + i, _mm512_castsi512_ps(_mm512_sllv_epi32(_mm512_and_si512(code, _mm512_set1_epi32(255)), bits)),
          n);
    sum = _mm512_add_epi32(sum, code);
  });
  found.sum = _mm512_reduce_add_epi32(sum);
}

// Computes acc = float(q * w) * row scale * column scale for the columns of a panel. The bytes of weights are made
// unsigned by adding 128, which adds 128 times the sum of the row's quantized values to the result; intermediate
// overflow of 32 bits is harmless, because it cancels.
template <int kStrips>
GNNC_INLINE void multiply_non_zeros(const NonZeros& found, const int32_t* w, float row_scale, const float* column_scale,
                                    float* acc) {
  __m512i sums[kStrips];
  const __m512i flip = _mm512_set1_epi8(-128), start = _mm512_slli_epi32(_mm512_set1_epi32(-found.sum), 7);
  each<kStrips>([&](auto j) __attribute__((always_inline)) { sums[j] = start; });
  for (int64_t i = 0; i < found.count; ++i) {
    const __m512i code = _mm512_castps_si512(_mm512_set1_ps(found.value[i]));
    const int32_t* at = w + static_cast<int64_t>(found.column[i]) * (kStrips * 16);
    each<kStrips>([&](auto j) __attribute__((always_inline)) {
      add_products(sums[j], _mm512_xor_si512(_mm512_loadu_si512(at + j * 16), flip), code);
    });
  }
  each<kStrips>([&](auto j) __attribute__((always_inline)) {
    store(acc + j * 16, to_floats(reinterpret_cast<Ints>(sums[j])) * splat(row_scale) * load(column_scale + j * 16));
  });
}

}  // namespace gnnc::GNNC_ISA

#endif
