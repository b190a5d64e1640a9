#pragma once

// Row-program instructions that store the rows of a tile in FP32 or bf16.

#include <algorithm>

#include "row_tile.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

template <typename T>
void store_rows(const Tile& t, const RowView& out) {
  for (int r = 0; r < t.rows; ++r) {
    const float* row = t.row(r);
    T* to = row_of<T>(out, t.first + r);
    for_columns(t.width, [&](int64_t c, auto n) { store(to + c, load(row + c), n); });
  }
}

#ifdef __AVX512F__
// An output of at least this size leaves the caches before it is read.
constexpr int64_t kStreamBytes = int64_t{16} << 20;
constexpr int64_t kStreamTile = 4096;  // most elements of a tile

// Returns whether to store with non-temporal stores: contiguous rows of a large output are written a whole cache line
// at a time, bypassing the caches, which saves reading the lines first.
template <typename T>
bool streams(const Tile& t, const RowView& out) {
  const bool touch = out.stride == t.width && t.rows * t.width <= kStreamTile;
  return touch && out.rows * out.stride * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
}

template <typename T>
void stream_rows(const Tile& t, const RowView& out) {
  constexpr int64_t kLine = 64 / sizeof(T);
  alignas(64) T lines[kStreamTile + 2 * kLine];
  T* to = row_of<T>(out, t.first);
  const auto before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) / sizeof(T) % kLine);
  T* at = lines + before;
  for (int r = 0; r < t.rows; ++r, at += t.width) {
    const float* row = t.row(r);
    for (int64_t c = 0; c < t.width; c += kLanes) store(at + c, load(row + c));
  }
  const int64_t end = before + t.rows * t.width;
  to -= before;
  int64_t i = 0;
  if (before > 0) {
    const int64_t stop = std::min<int64_t>(end, kLine);
    std::copy(lines + before, lines + stop, to + before);
    i = kLine;
  }
  for (; i + kLine <= end; i += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(lines + i));
  }
  if (i < end) std::copy(lines + i, lines + end, to + i);
  _mm_sfence();
}
#endif

// Stores whether each value is above 0 or NaN, a bit each.
void store_bits(const Tile& t, const RowView& out) {
  for (int r = 0; r < t.rows; ++r) {
    const float* row = t.row(r);
    auto* to = row_of<uint8_t>(out, t.first + r);
    int64_t c = 0;
#ifdef __AVX512F__
    for (; c + kLanes <= t.width; c += kLanes) {
      const __mmask16 bits = _mm512_cmp_ps_mask(_mm512_loadu_ps(row + c), _mm512_setzero_ps(), _CMP_NLE_UQ);
      std::memcpy(to + c / 8, &bits, 2);
    }
#endif
    for (; c < t.width; c += 8) {
      uint8_t bits = 0;
      for (int64_t i = 0; i < std::min<int64_t>(8, t.width - c); ++i) {
        bits = static_cast<uint8_t>(bits | (!(row[c + i] <= 0.0f) << i));
      }
      to[c / 8] = bits;
    }
  }
}

template <typename T>
void store_values(const Tile& t, const RowView& out) {
#ifdef __AVX512F__
  if (streams<T>(t, out)) return stream_rows<T>(t, out);
#endif
  store_rows<T>(t, out);
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
