#pragma once

// Row-program instructions that quantize the rows of a tile, and the column maxima that dynamic scales need.

#include <algorithm>
#include <cstring>

#include "gnnc/quantize.h"
#include "philox.isa.h"
#include "row_chain.isa.h"
#include "row_tile.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

// Stores the quantized values of row r of a tile: value(c, n) rounded to nearest, or stochastically.
template <Clamp kClamp, typename Value>
GNNC_INLINE void store_quantized_row(const Tile& t, int64_t r, const Value& value, Fractions* random, int8_t* out) {
  if (random == nullptr) return store_quantized<kClamp>(t.width, value, 0, out);
  const uint16_t* bits = random->row(t.first + r);
  const auto raised = [&](int64_t c, auto n) { return value(c, n) + fractions(bits + c); };
  store_quantized<Clamp::floor>(t.width, raised, 0, out);
}

// The random fractions of a tile whose next quantization is stochastic.
struct TileFractions {
  explicit TileFractions(const Tile& t)
      : stochastic(t.rounding != nullptr), random(seed_of(t), stream_of(t), t.width) {}

  static uint64_t seed_of(const Tile& t) {
    if (t.rounding == nullptr) return 0;
    return static_cast<uint64_t>(*static_cast<const int64_t*>(t.program.operands[t.rounding->a].data));
  }
  static int32_t stream_of(const Tile& t) { return t.rounding == nullptr ? 0 : t.rounding->b; }
  Fractions* get() { return stochastic ? &random : nullptr; }

  bool stochastic;
  Fractions random;
};

void quant_row(const Tile& t, const RowView& quantized, const RowView& scales) {
  alignas(64) float scale[kGroup], inverse[kGroup];
  TileFractions fractions(t);
  for (int begin = 0; begin < t.rows; begin += kGroup) {
    const int count = std::min(kGroup, t.rows - begin);
    row_scales(t.row(begin), t.ld, count, t.width, scale, inverse);
    std::memcpy(static_cast<float*>(scales.data) + t.first + begin, scale, static_cast<size_t>(count) * sizeof(float));
    for (int i = 0; i < count; ++i) {
      const float* row = t.row(begin + i);
      const Floats factor = splat(inverse[i]);
      const auto value = [&](int64_t c, auto) { return load(row + c) * factor; };
      store_quantized_row<Clamp::none>(t, begin + i, value, fractions.get(),
                                       row_of<int8_t>(quantized, t.first + begin + i));
    }
  }
}

// Returns the number of values that rint takes beyond +-127.
int64_t count_saturated(const float* row, const float* inverse, int64_t width) {
  const Floats limit = splat(127.5f);
  Ints total{};
  for_columns(width,
              [&](int64_t c, auto n) { total -= (absolute(keep(load(row + c) * load(inverse + c), n)) >= limit); });
  int64_t count = 0;
  for (int i = 0; i < kLanes; ++i) count += total[i];
  return count;
}

void quant_static(const Tile& t, const RowView& quantized, const float* inverse, int64_t* saturated) {
  int64_t count = 0;
  TileFractions fractions(t);
  for (int r = 0; r < t.rows; ++r) {
    const float* row = t.row(r);
    const auto value = [&](int64_t c, auto) { return load(row + c) * load(inverse + c); };
    store_quantized_row<Clamp::both>(t, r, value, fractions.get(), row_of<int8_t>(quantized, t.first + r));
    if (saturated != nullptr) count += count_saturated(row, inverse, t.width);
  }
  if (count > 0) __atomic_fetch_add(saturated, count, __ATOMIC_RELAXED);
}

// Returns the largest k in 0..7 with top * 2^k <= 127. The exponent of a non-negative float is stored from bit 23 on,
// so that the difference of bits gives k; a NaN or an infinity gives 0.
GNNC_INLINE Ints shifts_of(Floats tops) {
  const Ints room = (splat(to_bits(127.0f)) - as_ints(tops)) >> 23;
  return room > 7 ? splat(7) : larger(room, Ints{});
}
GNNC_INLINE Floats powers_of(Ints shifts) { return as_floats((shifts + 127) << 23); }

void quant_pow2(const Tile& t, const RowView& quantized, const RowView& shifts, const float* inverse) {
  alignas(64) float tops[kGroup], powers[kGroup];
  TileFractions fractions(t);
  for (int begin = 0; begin < t.rows; begin += kGroup) {
    const int count = std::min(kGroup, t.rows - begin);
    Group group;
    for (int i = 0; i < count; ++i) {
      const float* row = t.row(begin + i);
      Ints top{};
      for_columns(t.width,
                  [&](int64_t c, auto n) { top = larger(top, magnitude(keep(load(row + c) * load(inverse + c), n))); });
      group.set(i, as_floats(top));
    }
    group.largest(tops);
    std::fill(tops + count, tops + kGroup, 0.0f);  // shifts_of subtracts whole vectors
    for (int i = 0; i < count; i += kLanes) {
      const Ints k = shifts_of(load(tops + i));
      store(powers + i, powers_of(k));
      auto* to = static_cast<uint8_t*>(shifts.data) + t.first + begin + i;
      for (int j = 0; j < std::min(kLanes, count - i); ++j) to[j] = static_cast<uint8_t>(k[j]);
    }
    for (int i = 0; i < count; ++i) {
      const float* row = t.row(begin + i);
      const Floats power = splat(powers[i]);
      const auto value = [&](int64_t c, auto) { return load(row + c) * load(inverse + c) * power; };
      store_quantized_row<Clamp::both>(t, begin + i, value, fractions.get(),
                                       row_of<int8_t>(quantized, t.first + begin + i));
    }
  }
}

// Raises a shared maximum atomically. The order of threads does not matter for a maximum. Non-negative floats are
// ordered like their bits.
void raise_to(float* out, int32_t bits) {
  auto* shared = reinterpret_cast<int32_t*>(out);
  int32_t now = __atomic_load_n(shared, __ATOMIC_RELAXED);
  while (now < bits && !__atomic_compare_exchange_n(shared, &now, bits, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

void amax(const Tile& t, const RowView& out) {
  auto* tops = static_cast<float*>(out.data);
  const bool single = out.rows * out.cols == 1;
  Ints all{};
  for_columns(t.width, [&](int64_t c, auto n) {
    Ints top{};
    for (int r = 0; r < t.rows; ++r) top = larger(top, magnitude(load(t.row(r) + c, n)));
    all = larger(all, top);
    if (single || !any(top > as_ints(load(tops + c, n)))) return;
    const int lanes = lanes_of(n);
    for (int i = 0; i < lanes; ++i) raise_to(tops + c + i, top[i]);
  });
  if (single) raise_to(tops, largest(all));
}

#ifdef __AVX512F__
// Rows of up to four vectors are quantized directly after a chain without leaving the registers, four rows at a time.
constexpr int kQuantizedRows = 4;

// Returns the largest lane of each row, as signed integers, repeated over the vector.
GNNC_INLINE Floats largest_of_rows(const Floats (&rows)[kQuantizedRows]) {
  const auto combine = [](__m512 a, __m512 b)
                           __attribute__((always_inline)) { return as_floats(larger(as_ints(a), as_ints(b))); };
  __m512 tops = fold_all(rows, combine);
  tops = combine(tops, _mm512_shuffle_f32x4(tops, tops, 0x4e));
  return combine(tops, _mm512_shuffle_f32x4(tops, tops, 0xb1));
}

// Stores the quantized values of rows from `first` on, whose factors are the lanes of each quarter of `factors`.
template <Clamp kClamp, int kVectors>
GNNC_INLINE void store_quantized_block(const Block<kQuantizedRows, kVectors>& block, Floats factors, Fractions* random,
                                       int64_t first, int8_t* to, int64_t stride) {
  each<kQuantizedRows>([&](auto r) __attribute__((always_inline)) {
    const Floats factor = _mm512_permute_ps(factors, 0x55 * r);
    Floats v[4] = {};
    each<kVectors>([&](auto i) __attribute__((always_inline)) { v[i] = block.x[r][i] * factor; });
    if constexpr (kClamp == Clamp::floor) {
      const uint16_t* bits = random->row(first + r);
      each<kVectors>([&](auto i) __attribute__((always_inline)) { v[i] = v[i] + fractions(bits + i * kLanes); });
    }
    _mm512_storeu_si512(to + r * stride, pack_int8<kClamp>(v[0], v[1], v[2], v[3]));
  });
}

// Applies quant_row or quant_pow2 to the rows r .. r + kQuantizedRows; the last vector has n valid lanes. Lanes past
// them are 0, also where fractions are added: these are below 1.
template <int kVectors>
GNNC_INLINE void quantize_block(Block<kQuantizedRows, kVectors>& block, const Tile& t, const RowInstruction& in,
                                int64_t r, Tail n, Fractions* random) {
  const bool pow2 = in.op == RowOp::quant_pow2;
  if (pow2) block.columns(t.program.prepared + in.c, Whole{}, [](Floats x, Floats v) { return x * v; });
  Floats rows[kQuantizedRows];
  each<kQuantizedRows>([&](auto i) __attribute__((always_inline)) {
    Ints top{};
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      if (v + 1 == kVectors) block.x[i][v] = keep(block.x[i][v], n);
      top = larger(top, magnitude(block.x[i][v]));
    });
    rows[i] = as_floats(top);
  });
  const Floats tops = largest_of_rows(rows);
  const RowView &quantized = t.program.outs[in.a], &scales = t.program.outs[in.b];
  auto* to = row_of<int8_t>(quantized, t.first + r);
  if (pow2) {
    const Ints shifts = shifts_of(tops);
    _mm_storeu_si32(static_cast<uint8_t*>(scales.data) + t.first + r, _mm512_cvtepi32_epi8((__m512i)shifts));
    if (random == nullptr) {
      return store_quantized_block<Clamp::both>(block, powers_of(shifts), random, t.first + r, to, quantized.stride);
    }
    store_quantized_block<Clamp::floor>(block, powers_of(shifts), random, t.first + r, to, quantized.stride);
  } else {
    const Floats scale = scale_of(tops);
    _mm_storeu_ps(static_cast<float*>(scales.data) + t.first + r, _mm512_castps512_ps128(scale));
    if (random == nullptr) {
      return store_quantized_block<Clamp::none>(block, inverse_of(scale), random, t.first + r, to, quantized.stride);
    }
    store_quantized_block<Clamp::floor>(block, inverse_of(scale), random, t.first + r, to, quantized.stride);
  }
}

// Applies the chain code[0 .. count) and the quantization `last` to whole groups of kQuantizedRows rows.
template <int kVectors>
__attribute__((noinline)) void chain_to_quantized(const Tile& t, const RowInstruction* code, int64_t count,
                                                  const RowInstruction& last, bool again) {
  const Tail n{static_cast<int>(t.width) - (kVectors - 1) * kLanes};
  TileFractions fractions(t);
  for (int64_t r = 0; r < t.rows; r += kQuantizedRows) {
    Block<kQuantizedRows, kVectors> block;
    block.read(t.row(r), t.ld);
    for (int64_t i = 0; i < count; ++i) step(block, t, code[i], r, 0, n);
    if (again) block.write(t.row(r), t.ld);
    quantize_block(block, t, last, r, n, fractions.get());
  }
}
#endif

}  // namespace
}  // namespace gnnc::GNNC_ISA
