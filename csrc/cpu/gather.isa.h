#pragma once

// Weighted sums, maxima and minima of gathered rows in fp32, for spmm and attention. Included once an instruction set.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "csr.h"
#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kSegment = 512;   // edges whose weights are prepared at once (2 KB a head)
constexpr int64_t kPrefetch = 128;  // edges ahead; 64 to 256 measured alike, 16 and fewer gain nothing

// Row numbers 0..., for kernels that read the rows in order: they look like any other col.
struct Identity {
  alignas(64) int32_t index[kSegment];
  constexpr Identity() : index() {
    for (int32_t i = 0; i < kSegment; ++i) index[i] = i;
  }
};
constexpr Identity kIdentity;

// A run of edges of one row. With col null in the Csr, rows are counted from the first edge of the run.
struct Segment {
  const int32_t* col;
  int64_t count;
  int64_t base;   // added to col: the first row, or 0
  int64_t ahead;  // prefetch distance; 0 near the end of col
};

inline Segment segment(const Csr& csr, int64_t begin, int64_t end) {
  if (csr.col == nullptr) return {kIdentity.index, end - begin, begin, 0};
  return {csr.col + begin, end - begin, 0, end + kPrefetch <= csr.num_edges ? kPrefetch : 0};
}

template <typename T>
struct Rows {
  const T* data;
  int64_t stride;
  int64_t width;
};

inline float widen_one(float v) { return v; }
inline float widen_one(int8_t v) { return static_cast<float>(v); }
inline float widen_one(Bf16 v) { return from_bits(static_cast<int32_t>(static_cast<uint32_t>(v.bits) << 16)); }

// How the weights of an edge apply to the columns.
enum class Weight { none, edge, head };

struct Weights {
  const float* data;  // [count, heads], or null
  int64_t heads;
  int64_t head_width;  // columns a head
};

#ifdef __AVX512F__

template <typename T>
GNNC_INLINE __m512 load16(const T* p) {
  return load(p, Whole{});
}
template <typename T>
GNNC_INLINE __m512 load16(const T* p, int64_t columns) {
  return load(p, Tail{static_cast<int>(columns)});
}

template <typename T>
inline void prefetch_row(const T* row, int64_t bytes) {
  const char* p = reinterpret_cast<const char*>(row);
  for (int64_t b = 0; b < bytes; b += 64) _mm_prefetch(p + b, _MM_HINT_T0);
}

// NV vectors of 16 columns: the sum over a segment, in registers. Two sets of accumulators hide the latency of the
// multiply-add where there are few columns.
template <typename T, Weight W, int NV>
GNNC_INLINE void add_row(__m512 (&acc)[NV], const T* row, int64_t last, const float* w,
                                                    const int64_t (&head)[NV]) {
  __m512 all = _mm512_setzero_ps();
  if constexpr (W == Weight::edge) all = _mm512_set1_ps(*w);
#pragma GCC unroll 16
  for (int v = 0; v < NV; ++v) {
    const __m512 x = v + 1 < NV ? load16(row + v * 16) : load16(row + v * 16, last);
    if constexpr (W == Weight::none) {
      acc[v] = _mm512_add_ps(acc[v], x);
    } else if constexpr (W == Weight::edge) {
      acc[v] = _mm512_fmadd_ps(x, all, acc[v]);
    } else {
      acc[v] = _mm512_fmadd_ps(x, _mm512_set1_ps(w[head[v]]), acc[v]);
    }
  }
}

template <typename T, Weight W, int NV>
void sum_block(const Segment& s, const Rows<T>& rows, int64_t column, const Weights& weights, bool first, float* out) {
  constexpr int kSets = NV <= 4 ? 2 : 1;
  const T* base = rows.data + s.base * rows.stride + column;
  const int64_t last = std::min<int64_t>(rows.width - column - (NV - 1) * 16, 16);
  int64_t head[NV];
  for (int v = 0; v < NV; ++v) head[v] = W == Weight::head ? (column + v * 16) / weights.head_width : 0;
  const int64_t step = W == Weight::head ? weights.heads : 1;
  __m512 acc[kSets][NV];
#pragma GCC unroll 2
  for (int u = 0; u < kSets; ++u) {
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) acc[u][v] = _mm512_setzero_ps();
  }
  const float* w = weights.data;
  int64_t e = 0;
  for (; e + kSets <= s.count; e += kSets) {
#pragma GCC unroll 2
    for (int u = 0; u < kSets; ++u) {
      prefetch_row(base + s.col[e + u + s.ahead] * rows.stride, NV * 16 * static_cast<int64_t>(sizeof(T)));
      add_row<T, W, NV>(acc[u], base + s.col[e + u] * rows.stride, last, w, head);
      if constexpr (W != Weight::none) w += step;
    }
  }
  if (kSets > 1 && e < s.count) {
    prefetch_row(base + s.col[e + s.ahead] * rows.stride, NV * 16 * static_cast<int64_t>(sizeof(T)));
    add_row<T, W, NV>(acc[0], base + s.col[e] * rows.stride, last, w, head);
  }
#pragma GCC unroll 16
  for (int v = 0; v < NV; ++v) {
    __m512 total = acc[0][v];
    if constexpr (kSets == 2) total = _mm512_add_ps(total, acc[1][v]);
    if (!first) total = _mm512_add_ps(total, _mm512_loadu_ps(out + column + v * 16));
    _mm512_storeu_ps(out + column + v * 16, total);
  }
}

template <typename T, Weight W>
void sum_columns(const Segment& s, const Rows<T>& rows, const Weights& weights, bool first, float* out) {
  for (int64_t c = 0; c < rows.width;) {
    const int64_t vectors = (rows.width - c + 15) / 16;
    if (vectors >= 8) {
      sum_block<T, W, 8>(s, rows, c, weights, first, out), c += 128;
    } else if (vectors >= 4) {
      sum_block<T, W, 4>(s, rows, c, weights, first, out), c += 64;
    } else if (vectors == 3) {
      sum_block<T, W, 3>(s, rows, c, weights, first, out), c += 48;
    } else if (vectors == 2) {
      sum_block<T, W, 2>(s, rows, c, weights, first, out), c += 32;
    } else {
      sum_block<T, W, 1>(s, rows, c, weights, first, out), c += 16;
    }
  }
}

// Heads whose width is no multiple of 16: the columns of one head at a time, with a mask.
template <typename T>
void sum_ragged_heads(const Segment& s, const Rows<T>& rows, const Weights& weights, bool first, float* out) {
  for (int64_t c = 0; c < rows.width;) {
    const int64_t head = c / weights.head_width, head_end = (head + 1) * weights.head_width;
    const int64_t width = std::min<int64_t>(head_end - c, 16);
    const T* base = rows.data + s.base * rows.stride + c;
    __m512 acc = first ? _mm512_setzero_ps() : load16(out + c, width);
    for (int64_t e = 0; e < s.count; ++e) {
      const __m512 w = _mm512_set1_ps(weights.data[e * weights.heads + head]);
      acc = _mm512_fmadd_ps(load16(base + s.col[e] * rows.stride, width), w, acc);
    }
    store(out + c, acc, Tail{static_cast<int>(width)});
    c += width;
  }
}

// out[0..width) (+)= sum over the segment. out has room for whole vectors.
template <typename T>
void sum_rows(const Segment& s, const Rows<T>& rows, const Weights& weights, bool first, float* out) {
  if (weights.data == nullptr) {
    sum_columns<T, Weight::none>(s, rows, weights, first, out);
  } else if (weights.heads == 1) {
    sum_columns<T, Weight::edge>(s, rows, weights, first, out);
  } else if (weights.head_width % 16 == 0) {
    sum_columns<T, Weight::head>(s, rows, weights, first, out);
  } else {
    sum_ragged_heads(s, rows, weights, first, out);
  }
}

#else

template <typename T>
void add_scaled(const T* row, float w, int64_t width, float* out) {
  for (int64_t c = 0; c < width; ++c) out[c] += w * widen_one(row[c]);
}

template <typename T>
void sum_rows(const Segment& s, const Rows<T>& rows, const Weights& weights, bool first, float* out) {
  if (first) std::memset(out, 0, static_cast<size_t>(rows.width) * sizeof(float));
  const T* base = rows.data + s.base * rows.stride;
  for (int64_t e = 0; e < s.count; ++e) {
    const T* row = base + s.col[e] * rows.stride;
    if (weights.data == nullptr) {
      add_scaled(row, 1.0f, rows.width, out);
      continue;
    }
    const float* w = weights.data + e * weights.heads;
    for (int64_t h = 0; h < weights.heads; ++h) {
      const int64_t c = h * weights.head_width;
      add_scaled(row + c, w[h], weights.head_width, out + c);
    }
  }
}

#endif

}  // namespace
}  // namespace gnnc::GNNC_ISA
