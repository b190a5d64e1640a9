#pragma once

// Weighted sums of gathered rows in fp32, for spmm and attention. Included once an instruction set.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "csr.h"
#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kSegment = 512;   // edges whose weights are prepared at once (2 KB a head)
constexpr int64_t kBehind = 7;      // ids past the end of a segment that may be read as if they belonged to it
constexpr int64_t kPrefetch = 384;  // prefetch distance in cache lines; 128 to 768 are equally fast

// Row ids 0..., the col array of kernels that read the rows in order.
struct Identity {
  alignas(64) int32_t index[kSegment];
  constexpr Identity() : index() {
    for (int32_t i = 0; i < kSegment; ++i) index[i] = i;
  }
};
constexpr Identity kIdentity;

// A segment: consecutive edges of one row, at least one. If the Csr has no col, rows are counted from the first edge of
// the segment.
struct Segment {
  const int32_t* col;
  int64_t count;
  int64_t base;   // added to the ids in col: the first row, or 0
  int64_t ahead;  // prefetch distance in edges; if not 0, col may be read up to `ahead` + kBehind past the last edge
};

template <typename T>
GNNC_INLINE void prefetch_row(const T* row, int64_t bytes) {
  const char* p = reinterpret_cast<const char*>(row);
  for (int64_t b = 0; b < bytes; b += 64) prefetch_far(p + b);
}

// Returns the prefetch distance in edges, for row_bytes bytes an edge: the lines must not be evicted before they are
// read.
GNNC_INLINE int64_t edges_ahead(int64_t row_bytes) {
  return row_bytes <= 64 ? kPrefetch : std::max<int64_t>(kPrefetch * 64 / row_bytes, 16);
}

GNNC_INLINE Segment segment(const Csr& csr, int64_t begin, int64_t end, int64_t row_bytes = 64) {
  if (csr.col == nullptr) return {kIdentity.index, end - begin, begin, 0};
  const int64_t ahead = edges_ahead(row_bytes);
  return {csr.col + begin, end - begin, 0, end + ahead + kBehind <= csr.num_edges ? ahead : 0};
}

// Copies out[e] = values[col[e]] for several arrays. Loads are scalar, because a gather instruction is microcode on
// many processors, and slower.
struct EdgeCopy {
  const float* values;
  float* out;
};
template <typename... Copies>
inline void copy_of_edges(const Segment& s, const Copies&... copies) {
  for (int64_t e = 0; e < s.count; ++e) {
    const int64_t source = s.col[e], next = s.col[e + s.ahead];
    (prefetch_far(copies.values + next), ...);
    ((copies.out[e] = copies.values[source]), ...);
    asm("" ::: "memory");  // keeps the compiler from vectorizing to a gather
  }
}

// A matrix whose rows are gathered; the stride is in elements.
template <typename T>
struct Rows {
  const T* data;
  int64_t stride;
  int64_t width;
};

inline float widen_one(float v) { return v; }
inline float widen_one(int8_t v) { return static_cast<float>(v); }
inline float widen_one(Bf16 v) { return from_bits(static_cast<int32_t>(static_cast<uint32_t>(v.bits) << 16)); }

// Layouts of an edge's weights over the columns: one for all, one a head of whole vectors, one a vector.
enum class Weight { none, edge, head, vector };

// The weights of a segment's edges, with their layout over the columns.
struct Weights {
  const float* data;  // [count, heads], or null
  int64_t heads;
  int64_t head_width;             // columns of a head
  float heads_a_block;            // heads in 16 columns
  const float* factor = nullptr;  // [heads], factors of the sums; null: 1
  const float* steps = nullptr;   // [heads], for fixed_sum, if known: number of integer steps of a weight of 1
  const float* unit = nullptr;    // [heads], with steps: value of one step of the sum, times factor
};

// Returns the layout of the weights for rows of `width` columns, with null data.
inline Weights weights_of(int64_t width, int64_t heads) {
  const int64_t head_width = width / heads;
  return {nullptr, heads, head_width, 16.0f / static_cast<float>(head_width)};
}

// A kernel that computes out[0 .. width) = or += the sum over a segment; `out` needs room for whole vectors.
template <typename T>
using SumKernel = void (*)(const Segment&, const Rows<T>&, const Weights&, bool first, float* out);

#ifdef __AVX512F__

template <typename T>
GNNC_INLINE __m512 load16(const T* p) {
  return load(p, Whole{});
}
template <typename T>
GNNC_INLINE __m512 load16(const T* p, int64_t columns) {
  return load(p, Tail{static_cast<int>(columns)});
}

template <typename T, Weight W, int NV>
GNNC_INLINE void add_row(__m512 (&acc)[NV], const T* row, int64_t last, const float* w, const int64_t (&head)[NV]) {
  __m512 all = _mm512_setzero_ps();
  if constexpr (W == Weight::edge) all = _mm512_set1_ps(*w);
#pragma GCC unroll 16
  for (int v = 0; v < NV; ++v) {
    constexpr bool kPadded = std::is_same_v<T, int8_t>;  // rows of int8 are padded with zeros
    const __m512 x = kPadded || v + 1 < NV ? load16(row + v * 16) : load16(row + v * 16, last);
    if constexpr (W == Weight::none) {
      acc[v] = _mm512_add_ps(acc[v], x);
    } else if constexpr (W == Weight::edge) {
      acc[v] = _mm512_fmadd_ps(x, all, acc[v]);
    } else {
      acc[v] = _mm512_fmadd_ps(x, _mm512_set1_ps(w[W == Weight::vector ? v : head[v]]), acc[v]);
    }
  }
}

// Adds 32 bf16 columns a load: even columns shifted up, odd columns masked, in two registers that are permuted into
// column order at the end.
template <int NV>
GNNC_INLINE void add_pairs(__m512 (&acc)[NV], const Bf16* row, __m512 w) {
#pragma GCC unroll 16
  for (int v = 0; v < NV; v += 2) {
    const __m512i x = _mm512_loadu_si512(row + v * 16);
    const __m512i odd = _mm512_and_si512(x, _mm512_set1_epi32(-65536));
    acc[v] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), w, acc[v]);
    acc[v + 1] = _mm512_fmadd_ps(_mm512_castsi512_ps(odd), w, acc[v + 1]);
  }
}

template <int NV>
GNNC_INLINE void order_pairs(__m512 (&acc)[NV]) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#pragma GCC unroll 16
  for (int v = 0; v < NV; v += 2) {
    const __m512 even = acc[v], odd = acc[v + 1];
    acc[v] = _mm512_permutex2var_ps(even, low, odd);
    acc[v + 1] = _mm512_permutex2var_ps(even, high, odd);
  }
}

// Sums NV vectors of 16 columns over a segment, in registers. Two sets of accumulators, of even and of odd edges, hide
// the latency of the additions. Paired: bf16 rows are added two columns at a time, for whole pairs of vectors.
template <typename T, Weight W, int NV, bool Paired>
GNNC_INLINE void sum_block(const Segment& s, const Rows<T>& rows, int64_t column, const Weights& weights, bool first,
                           float* out) {
  const T* base = rows.data + s.base * rows.stride + column;
  asm("" : "+r"(base));  // keeps base in one register; otherwise g++ recomputes the sum for every row
  const int64_t last = std::min<int64_t>(rows.width - column - (NV - 1) * 16, 16);
  int64_t head[NV];
  for (int v = 0; v < NV; ++v) head[v] = W == Weight::head ? (column + v * 16) / weights.head_width : 0;
  const int64_t step = W == Weight::none ? 0 : W == Weight::edge ? 1 : weights.heads;
  const float* first_weight = W == Weight::vector ? weights.data + column / 16 : weights.data;
  __m512 even[NV], odd[NV];
#pragma GCC unroll 16
  for (int v = 0; v < NV; ++v) even[v] = odd[v] = _mm512_setzero_ps();
  const auto add = [&](__m512(&sums)[NV], int64_t e) __attribute__((always_inline)) {
    prefetch_row(base + s.col[e + s.ahead] * rows.stride, NV * 16 * static_cast<int64_t>(sizeof(T)));
    const T* row = base + s.col[e] * rows.stride;
    if constexpr (Paired) {
      add_pairs<NV>(sums, row, W == Weight::none ? _mm512_set1_ps(1.0f) : _mm512_set1_ps(weights.data[e * step]));
    } else {
      add_row<T, W, NV>(sums, row, last, first_weight + e * step, head);
    }
  };
  int64_t e = 0;
  for (; e + 2 <= s.count; e += 2) {
    add(even, e);
    add(odd, e + 1);
  }
  if (e < s.count) add(even, e);
#pragma GCC unroll 16
  for (int v = 0; v < NV; ++v) even[v] = _mm512_add_ps(even[v], odd[v]);
  if constexpr (Paired) order_pairs<NV>(even);
  if (W != Weight::none && weights.factor != nullptr) {
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      const int64_t own = W == Weight::edge ? 0 : W == Weight::vector ? column / 16 + v : head[v];
      even[v] = _mm512_mul_ps(even[v], _mm512_set1_ps(weights.factor[own]));
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < NV; ++v) {
    float* to = out + column + v * 16;
    _mm512_storeu_ps(to, first ? even[v] : _mm512_add_ps(even[v], _mm512_loadu_ps(to)));
  }
}

template <typename T, Weight W, int NV>
GNNC_INLINE int64_t sum_vectors(const Segment& s, const Rows<T>& rows, int64_t column, const Weights& weights,
                                bool first, float* out) {
  if constexpr (std::is_same_v<T, Bf16> && W <= Weight::edge && NV % 2 == 0) {
    if (rows.width - column >= NV * 16) {
      sum_block<T, W, NV, true>(s, rows, column, weights, first, out);
      return column + NV * 16;
    }
  }
  sum_block<T, W, NV, false>(s, rows, column, weights, first, out);
  return column + NV * 16;
}

template <typename T, Weight W>
void sum_columns(const Segment& s, const Rows<T>& rows, const Weights& weights, bool first, float* out) {
  for (int64_t c = 0; c < rows.width;) {
    const int64_t vectors = (rows.width - c + 15) / 16;
    if (vectors >= 8) {
      c = sum_vectors<T, W, 8>(s, rows, c, weights, first, out);
    } else if (vectors >= 4) {
      c = sum_vectors<T, W, 4>(s, rows, c, weights, first, out);
    } else if (vectors == 3) {
      c = sum_vectors<T, W, 3>(s, rows, c, weights, first, out);
    } else if (vectors == 2) {
      c = sum_vectors<T, W, 2>(s, rows, c, weights, first, out);
    } else {
      c = sum_vectors<T, W, 1>(s, rows, c, weights, first, out);
    }
  }
}

// Sums rows with heads whose width is no multiple of 16: the columns of one head at a time, with a mask.
template <typename T>
void sum_ragged_heads(const Segment& s, const Rows<T>& rows, const Weights& weights, bool first, float* out) {
  for (int64_t c = 0; c < rows.width;) {
    const int64_t head = c / weights.head_width, head_end = (head + 1) * weights.head_width;
    const int64_t width = std::min<int64_t>(head_end - c, 16);
    const T* base = rows.data + s.base * rows.stride + c;
    __m512 acc = _mm512_setzero_ps();
    for (int64_t e = 0; e < s.count; ++e) {
      const __m512 w = _mm512_set1_ps(weights.data[e * weights.heads + head]);
      acc = _mm512_fmadd_ps(load16(base + s.col[e] * rows.stride, width), w, acc);
    }
    if (weights.factor != nullptr) acc = acc * splat(weights.factor[head]);
    if (!first) acc = acc + load16(out + c, width);
    store(out + c, acc, Tail{static_cast<int>(width)});
    c += width;
  }
}

// Sums rows with heads of 8 columns: a vector covers two heads, and its weights are two halves of one vector.
template <typename T>
void sum_heads_of_8(const Segment& s, const Rows<T>& rows, const Weights& weights, bool first, float* out) {
  constexpr int NV = 4;
  for (int64_t c = 0; c < rows.width; c += NV * 16) {
    const T* base = rows.data + s.base * rows.stride + c;
    const float* w = weights.data + c / 8;
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m512 acc[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[v] = _mm512_setzero_ps();
    const auto of_heads = [&](__m512 all, int v) __attribute__((always_inline)) {
      return _mm512_permutexvar_ps(_mm512_add_epi32(halves, _mm512_set1_epi32(2 * v)), all);
    };
    for (int64_t e = 0; e < s.count; ++e, w += weights.heads) {
      prefetch_row(base + s.col[e + s.ahead] * rows.stride, NV * 16 * static_cast<int64_t>(sizeof(T)));
      const T* row = base + s.col[e] * rows.stride;
      const __m512 all = _mm512_castps256_ps512(_mm256_loadu_ps(w));
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[v] = _mm512_fmadd_ps(load16(row + v * 16), of_heads(all, v), acc[v]);
    }
    const bool scaled = weights.factor != nullptr;
    const __m512 factors =
        scaled ? _mm512_castps256_ps512(_mm256_loadu_ps(weights.factor + c / 8)) : _mm512_set1_ps(1.0f);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const __m512 sum = scaled ? acc[v] * of_heads(factors, v) : acc[v];
      _mm512_storeu_ps(out + c + v * 16, first ? sum : sum + _mm512_loadu_ps(out + c + v * 16));
    }
  }
}

template <typename T>
SumKernel<T> sum_kernel(int64_t width, int64_t heads, bool weighted) {
  if (!weighted) return sum_columns<T, Weight::none>;
  if (heads == 1) return sum_columns<T, Weight::edge>;
  if (width / heads == 16) return sum_columns<T, Weight::vector>;
  if (width / heads % 16 == 0) return sum_columns<T, Weight::head>;
  if (width / heads == 8 && width % 64 == 0) return sum_heads_of_8<T>;
  return sum_ragged_heads<T>;
}

#else

// Sums up to 64 columns that share a weight. A segment is summed separately from earlier segments, which keeps rounding
// errors small.
template <typename T>
void sum_block(const Segment& s, const T* base, int64_t stride, int64_t width, const Weights& weights, int64_t head,
               bool first, float* out) {
  float acc[64] = {};
  for (int64_t e = 0; e < s.count; ++e) {
    const float w = weights.data == nullptr ? 1.0f : weights.data[e * weights.heads + head];
    const T* row = base + s.col[e] * stride;
    for (int64_t c = 0; c < width; ++c) acc[c] += w * widen_one(row[c]);
  }
  const float factor = weights.factor == nullptr ? 1.0f : weights.factor[head];
  for (int64_t c = 0; c < width; ++c) out[c] = first ? acc[c] * factor : out[c] + acc[c] * factor;
}

template <typename T>
void sum_rows(const Segment& s, const Rows<T>& rows, const Weights& weights, bool first, float* out) {
  const T* base = rows.data + s.base * rows.stride;
  for (int64_t c = 0; c < rows.width;) {
    const int64_t head = c / weights.head_width;
    const int64_t width = std::min<int64_t>((head + 1) * weights.head_width - c, 64);
    sum_block(s, base + c, rows.stride, width, weights, head, first, out + c);
    c += width;
  }
}

template <typename T>
SumKernel<T> sum_kernel(int64_t, int64_t, bool) {
  return sum_rows<T>;
}

#endif

}  // namespace
}  // namespace gnnc::GNNC_ISA
