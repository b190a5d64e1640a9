#pragma once

// Products of the tiles of edge_body in low precision: rows in int8 with a scale each, or in bf16, times a weight that
// was quantized or rounded before.
//
// A row of int8 is its quantized values, padded to 64 bytes (with VNNI xor 0x80, so that they are unsigned), and a
// vector whose first lane is the scale. A packed weight begins with two rows: the scales of its columns and, with VNNI,
// the initial values of the sums, -128 times the sum of a column. Then come dwords, [steps, padded outputs]: 4 values
// of consecutive k with VNNI, 2 with vdpbf16ps, else 1, as a float: products of bytes in floats are exact up to
// kExactInputs. A result of int8 is float(sum) * scale of the row * scale of the column + summand, each rounded, as the
// ops of the quantized graph compute it.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "bf16_pairs.isa.h"
#include "edge_body.h"
#include "edge_product.isa.h"
#include "gnnc/quantize.h"

namespace gnnc::GNNC_ISA {
namespace {

#ifdef __AVX512F__
constexpr bool kByteDots = true;
#else
constexpr bool kByteDots = false;
#endif
constexpr uint8_t kFlip = kByteDots ? 0x80 : 0;

inline int64_t padded_outputs(const BodyWeight& w) { return (w.outputs + kBodyPad - 1) / kBodyPad * kBodyPad; }
inline float* scales_of(const BodyWeight& w) { return w.packed; }
inline int32_t* starts_of(const BodyWeight& w) { return reinterpret_cast<int32_t*>(w.packed + padded_outputs(w)); }
inline float* values_of(const BodyWeight& w) { return w.packed + kWeightRows * padded_outputs(w); }

// Writes a value of a packed weight: as one of the `parts` values of type T of a dword.
template <typename T>
void put(const BodyWeight& w, int64_t k, int64_t n, int64_t parts, T value) {
  auto* dword = reinterpret_cast<T*>(values_of(w) + k / parts * padded_outputs(w) + n);
  dword[k % parts] = value;
}

template <typename T>
const T& weight_at(const BodyWeight& w, int64_t k, int64_t n) {
  return static_cast<const T*>(w.data)[k * w.input_stride + n * w.output_stride];
}

inline void pack_int8(const BodyWeight& w) {
  for (int64_t n = 0; n < w.outputs; ++n) {
    int32_t total = 0;
    for (int64_t k = 0; k < w.inputs; ++k) {
      const int8_t code = weight_at<int8_t>(w, k, n);
      total += code;
      if constexpr (kByteDots) {
        put(w, k, n, 4, code);
      } else {
        put(w, k, n, 1, static_cast<float>(code));
      }
    }
    scales_of(w)[n] = w.scales[n * w.scale_stride];
    starts_of(w)[n] = -128 * total;
  }
}

inline void pack_bf16(const BodyWeight& w) {
  const bool dots = w.format == BodyFormat::bf16_dots;
  for (int64_t n = 0; n < w.outputs; ++n) {
    for (int64_t k = 0; k < w.inputs; ++k) {
      const Bf16 value = weight_at<Bf16>(w, k, n);
      if (dots) {
        put(w, k, n, 2, value);
      } else {
        put(w, k, n, 1, from_bits(static_cast<int32_t>(value.bits) << 16));
      }
    }
  }
}

// Packs a weight of floats; one of a single column is a row, which multiply_by_column reads.
inline void pack_floats(const BodyWeight& w) {
  if (w.outputs == 1) {
    for (int64_t k = 0; k < w.inputs; ++k) values_of(w)[k] = weight_at<float>(w, k, 0);
    return;
  }
  for (int64_t k = 0; k < w.inputs; ++k) {
    for (int64_t n = 0; n < w.outputs; ++n) put(w, k, n, 1, weight_at<float>(w, k, n));
  }
}

inline void pack_weight(const BodyWeight& w) {
  std::fill_n(w.packed, packed_floats(w), 0.0f);
  switch (w.format) {
    case BodyFormat::f32:
      return pack_floats(w);
    case BodyFormat::i8:
      return pack_int8(w);
    default:
      return pack_bf16(w);
  }
}

// Quantizes rows of `width` floats, each with the scale of its maximum.
inline void quantize_rows(const Rows& x, int64_t rows, int64_t width, const RowsOut& to) {
  constexpr int kAtOnce = 16;
  alignas(64) float scales[kAtOnce + 16], inverses[kAtOnce + 16];
  const int64_t scale_at = (width + 63) / 64 * 16;
  for (int64_t begin = 0; begin < rows; begin += kAtOnce) {
    const int count = static_cast<int>(std::min<int64_t>(kAtOnce, rows - begin));
    const float* first = x.data + begin * x.stride;
    row_scales(first, x.stride, count, width, scales, inverses);
    for (int r = 0; r < count; ++r) {
      const float* row = first + r * x.stride;
      const Floats factor = splat(inverses[r]);
      float* out = to.data + (begin + r) * to.stride;
      store_quantized<Clamp::none>(
          width, [&](int64_t c, auto n) { return load(row + c, n) * factor; }, kFlip, reinterpret_cast<int8_t*>(out));
      out[scale_at] = scales[r];
    }
  }
}

// Rounds rows of `width` floats to bf16, with zeros behind them.
inline void round_rows(const Rows& x, int64_t rows, int64_t width, const RowsOut& to) {
  const int64_t padded = (width + 31) / 32 * 32;
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = x.data + r * x.stride;
    auto* out = reinterpret_cast<Bf16*>(to.data + r * to.stride);
    for_columns(width, [&](int64_t c, auto n) { store(out + c, load(row + c, n), n); });
    std::memset(out + width, 0, static_cast<size_t>(padded - width) * sizeof(Bf16));
  }
}

GNNC_INLINE float float_of(float v) { return v; }
GNNC_INLINE float float_of(int8_t v) { return v; }
GNNC_INLINE float float_of(Bf16 v) { return from_bits(static_cast<int32_t>(v.bits) << 16); }

// The rows and the weight of a product, and where its result goes.
struct LowProduct {
  const BodyWeight& w;
  Rows x;  // in low precision; the stride is in floats
  int64_t rows;
  Rows summand;  // data may be null
  RowsOut out;
};

// Sums of a block of rows and vectors of columns, of which the last has `last` lanes.
template <int kRows, int kVectors, typename Type, typename N>
GNNC_INLINE void store_block(const LowProduct& p, int64_t row, int64_t c, N last, Type (&sums)[kRows][kVectors]) {
  const bool scaled = p.w.format == BodyFormat::i8;
  const int64_t scale_at = (p.w.inputs + 63) / 64 * 16;
  each<kRows>([&](auto r) __attribute__((always_inline)) {
    float* to = p.out.data + (row + r) * p.out.stride + c;
    const Floats scale = splat(scaled ? p.x.data[(row + r) * p.x.stride + scale_at] : 1.0f);
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      Floats value;
      if constexpr (std::is_same_v<Type, Ints>) {
        value = to_floats(sums[r][v]);
      } else {
        value = sums[r][v];
      }
      if (scaled) value = value * scale * load(scales_of(p.w) + c + v * kLanes);
      if (p.summand.data != nullptr)
        value = value + load(p.summand.data + (row + r) * p.summand.stride + c + v * kLanes);
      if constexpr (v + 1 == kVectors) {
        store(to + v * kLanes, value, last);
      } else {
        store(to + v * kLanes, value);
      }
    });
  });
}

// Products as floats, each value of a row times the columns.
template <typename Value, int kRows, int kVectors, typename N>
GNNC_INLINE void float_block(const LowProduct& p, int64_t row, int64_t c, N last) {
  Floats sums[kRows][kVectors] = {};
  const float* w = values_of(p.w) + c;
  const int64_t step = padded_outputs(p.w);
  const float* x = p.x.data + row * p.x.stride;
  for (int64_t k = 0; k < p.w.inputs; ++k, w += step) {
    Floats columns[kVectors];
    each<kVectors>([&](auto v) __attribute__((always_inline)) { columns[v] = load(w + v * kLanes); });
    each<kRows>([&](auto r) __attribute__((always_inline)) {
      const Floats value = splat(float_of(reinterpret_cast<const Value*>(x + r * p.x.stride)[k]));
      each<kVectors>([&](auto v) __attribute__((always_inline)) { sums[r][v] = fused(value, columns[v], sums[r][v]); });
    });
  }
  store_block(p, row, c, last, sums);
}

#ifdef __AVX512F__

GNNC_INLINE Ints add_dots(Ints sums, __m512i a, __m512i b, std::integral_constant<BodyFormat, BodyFormat::i8>) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
  return sums;
}
GNNC_INLINE Floats add_dots(Floats sums, __m512i a, __m512i b,
                            std::integral_constant<BodyFormat, BodyFormat::bf16_dots>) {
  return add_dots(sums, a, b);
}

// Products of the 4 bytes, or the 2 values of bf16, of a dword.
template <BodyFormat kFormat, int kRows, int kVectors, typename N>
GNNC_INLINE void dot_block(const LowProduct& p, int64_t row, int64_t c, N last) {
  constexpr bool kBytes = kFormat == BodyFormat::i8;
  using Sums = std::conditional_t<kBytes, Ints, Floats>;
  Sums sums[kRows][kVectors] = {};
  if constexpr (kBytes) {
    each<kRows>([&](auto r) __attribute__((always_inline)) {
      each<kVectors>([&](auto v) __attribute__((always_inline)) {
        sums[r][v] = (Ints)_mm512_loadu_si512(starts_of(p.w) + c + v * kLanes);
      });
    });
  }
  const float* w = values_of(p.w) + c;
  const int64_t step = padded_outputs(p.w), steps = (p.w.inputs + (kBytes ? 3 : 1)) / (kBytes ? 4 : 2);
  const float* x = p.x.data + row * p.x.stride;
  for (int64_t k = 0; k < steps; ++k, w += step) {
    __m512i columns[kVectors];
    each<kVectors>([&](auto v) __attribute__((always_inline)) { columns[v] = _mm512_loadu_si512(w + v * kLanes); });
    each<kRows>([&](auto r) __attribute__((always_inline)) {
      const __m512i value = _mm512_castps_si512(_mm512_set1_ps(x[r * p.x.stride + k]));
      each<kVectors>([&](auto v) __attribute__((always_inline)) {
        sums[r][v] = add_dots(sums[r][v], value, columns[v], std::integral_constant<BodyFormat, kFormat>{});
      });
    });
  }
  store_block(p, row, c, last, sums);
}

template <BodyFormat kFormat, int kRows, int kVectors, typename N>
GNNC_INLINE void low_block(const LowProduct& p, int64_t row, int64_t c, N last) {
  if constexpr (kFormat == BodyFormat::bf16) {
    float_block<Bf16, kRows, kVectors>(p, row, c, last);
  } else {
    dot_block<kFormat, kRows, kVectors>(p, row, c, last);
  }
}

#else

template <BodyFormat kFormat, int kRows, int kVectors, typename N>
GNNC_INLINE void low_block(const LowProduct& p, int64_t row, int64_t c, N last) {
  using Value = std::conditional_t<kFormat == BodyFormat::i8, int8_t, Bf16>;
  float_block<Value, kRows, kVectors>(p, row, c, last);
}

#endif

template <BodyFormat kFormat, int kVectors, typename N>
__attribute__((noinline)) void low_columns(const LowProduct& p, int64_t c, N last) {
  int64_t row = 0;
  for (; row + kProductRows <= p.rows; row += kProductRows) low_block<kFormat, kProductRows, kVectors>(p, row, c, last);
  for (; row < p.rows; ++row) low_block<kFormat, 1, kVectors>(p, row, c, last);
}

template <BodyFormat kFormat>
void low_product(const LowProduct& p) {
  int64_t c = 0;
  for (; c + kProductVectors * kLanes <= p.w.outputs; c += kProductVectors * kLanes) {
    low_columns<kFormat, kProductVectors>(p, c, Whole{});
  }
  for (; c + kLanes <= p.w.outputs; c += kLanes) low_columns<kFormat, 1>(p, c, Whole{});
  if (c < p.w.outputs) low_columns<kFormat, 1>(p, c, Tail{static_cast<int>(p.w.outputs - c)});
}

inline void multiply_low(const LowProduct& p) {
  switch (p.w.format) {
    case BodyFormat::i8:
      return low_product<BodyFormat::i8>(p);
    case BodyFormat::bf16_dots:
      return low_product<BodyFormat::bf16_dots>(p);
    default:
      return low_product<BodyFormat::bf16>(p);
  }
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
