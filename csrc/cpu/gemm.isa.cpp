// See gemm.h for layout, traffic and floor.
//
// The loop over k keeps a tile of 6 x 4 vectors of accumulators in registers (8 x 3, 12 x 2, 12 x 1 for narrow panels).
// The accumulators are arrays that are indexed by constants only, unrolled by templates: g++ 12 spills arrays that
// loops index (a test reads the object code). Rows past the end of a block are computed from whatever the buffer holds,
// and discarded.

#include "gemm.h"

#include <type_traits>
#include <utility>

#include "gemm_dots.isa.h"
#include "gemm_layout.isa.h"
#include "gemm_tiles.isa.h"
#include "gemm_zeros.isa.h"
#include "gnnc/quantize.h"
#include "scratch.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kFloatDepth = 2048;  // values of k of one pass over the rows of a block: half an L2 of weights
// Most products of a sum in floats: 127 * 127 * 1024 < 2^24, so that sums of quantized products are exact.
constexpr int64_t kExactDepth = 1024;

constexpr int tile_rows(int strips) {
  if (!kVnni) return kLanes == 8 ? 3 : 2;
  return strips == 4 ? 6 : strips == 3 ? 8 : 12;
}

int64_t panels_of(const GemmArgs& g) { return (strips_of(g) + kPanelStrips - 1) / kPanelStrips; }

// Calls body(strips) with the number of strips as a compile-time constant.
template <typename Body>
GNNC_INLINE void with_strips(int64_t strips, const Body& body) {
  switch (strips) {
    case 4:
      return body(std::integral_constant<int, 4>{});
    case 3:
      return body(std::integral_constant<int, 3>{});
    case 2:
      return body(std::integral_constant<int, 2>{});
    default:
      return body(std::integral_constant<int, 1>{});
  }
}

// Prefetches a part of the rows of the next block in each step of a tile, so that loading x overlaps with products.
struct Ahead {
  const char* at;
  int64_t step;  // bytes; 0: nothing to prefetch

  template <int kLines>
  GNNC_INLINE void next() {
    for (int i = 0; i < kLines; ++i) prefetch_far(at + 64 * i);
    at += step;
  }
};

// Returns the prefetch of the rows that will replace the `rows` rows from `row` on, in the steps of the first panel.
Ahead ahead_of(const GemmArgs& g, int64_t panel, int64_t row, int rows) {
  const int64_t size = g.x_type == Scalar::f32 ? 4 : g.x_type == Scalar::bf16 ? 2 : 1;
  const int64_t next = row + kBlockRows;
  if (panel > 0 || next + rows > g.rows) return {static_cast<const char*>(g.x), 0};
  return {static_cast<const char*>(g.x) + next * g.x_stride * size, rows * g.x_stride * size / steps_of(g)};
}

template <int kRows, int kStrips>
using Sums = std::make_integer_sequence<int, kRows * kStrips>;

// Computes acc (+)= a * w for kRows rows and kStrips vectors of columns; rows of a are lda floats apart.
template <int kRows, int kStrips, int... I>
GNNC_INLINE void float_tile(const float* a, int64_t lda, const float* w, int64_t depth, bool add, Ahead ahead,
                            float* acc, int64_t ld, std::integer_sequence<int, I...>) {
  Floats sums[kRows * kStrips] = {(add ? load(acc + I / kStrips * ld + I % kStrips * kLanes) : Floats{})...};
  for (int64_t k = 0; k < depth; ++k) {
    Floats factors[kStrips], value{};
    ahead.next<1>();
    for (int j = 0; j < kStrips; ++j) factors[j] = load(w + (k * kStrips + j) * kLanes);
    ((value = I % kStrips == 0 ? splat(a[I / kStrips * lda + k]) : value,
      sums[I] = fused(value, factors[I % kStrips], sums[I])),
     ...);
  }
  (store(acc + I / kStrips * ld + I % kStrips * kLanes, sums[I]), ...);
}

template <int kStrips>
__attribute__((noinline)) void gemm_float_tile(const float* a, int64_t lda, const float* w, int64_t depth, bool add,
                                               Ahead ahead, float* acc, int64_t ld) {
  constexpr int kRows = tile_rows(kStrips);
  float_tile<kRows, kStrips>(a, lda, w, depth, add, ahead, acc, ld, Sums<kRows, kStrips>{});
}

// The buffers of a block of rows, in the thread's scratch memory.
struct Block {
  float* acc;       // [kBlockRows, ld]
  int32_t* sums;    // [kBlockRows, ld], if quantized values are multiplied as floats
  float* scales;    // [kBlockRows + 16], scales of the rows
  float* inverses;  // [kBlockRows + 16], inverses of the scales
  uint8_t* buffer;  // the rows, in the layout that tiles read
  int64_t ld, depth;
  int rows;
};

int64_t buffer_depth(const GemmArgs& g) { return round_up(g.depth, 64); }

Block block_in(const GemmArgs& g, void* scratch, int rows) {
  const int64_t ld = acc_stride(g), cells = kBlockRows * ld;
  auto* floats = static_cast<float*>(scratch);
  float* after = floats + cells * (kVnni ? 1 : 2);
  return {floats,
          reinterpret_cast<int32_t*>(floats + cells),
          after,
          after + 64,
          reinterpret_cast<uint8_t*>(after + 128),
          ld,
          buffer_depth(g),
          rows};
}

void multiply_floats(const GemmArgs& g, const Block& b, int64_t row, const float* a, int64_t lda, int64_t from,
                     int64_t to, bool add) {
  for (int64_t p = 0; p < panels_of(g); ++p) {
    const Panel panel = panel_of(g, p);
    const auto* w = reinterpret_cast<const float*>(panel.data) + from * panel.step();
    const int step = tile_rows(static_cast<int>(panel.strips));
    for (int r = 0; r < b.rows; r += step) {
      const Ahead ahead = ahead_of(g, from == 0 ? p : 1, row + r, step);
      with_strips(panel.strips, [&](auto strips) {
        gemm_float_tile<strips>(a + r * lda + from, lda, w, to - from, add, ahead,
                                b.acc + r * b.ld + p * kPanelStrips * kLanes, b.ld);
      });
    }
  }
}

template <typename T>
void widen_rows(const GemmArgs& g, const Block& b, const T* x) {
  auto* buffer = reinterpret_cast<float*>(b.buffer);
  const bool round = g.mode == GemmMode::bf16 && g.x_type == Scalar::f32;
  for (int r = 0; r < b.rows; ++r) {
    for_columns(g.depth, [&](int64_t c, auto n) {
      Floats v = load(x + r * g.x_stride + c, n);
      if (round) {
        Bf16 narrow[kLanes];
        store(narrow, v);
        v = load(narrow);
      }
      store(buffer + r * b.depth + c, v, n);
    });
  }
}

template <typename T>
const T* rows_at(const GemmArgs& g, int64_t row) {
  return static_cast<const T*>(g.x) + row * g.x_stride;
}

// Computes a block in FP32. Full blocks of floats are read in place, all others are copied to the buffer.
void compute_floats(const GemmArgs& g, const Block& b, int64_t row) {
  const bool in_place = g.x_type == Scalar::f32 && g.mode == GemmMode::f32 && b.rows == kBlockRows;
  if (!in_place) {
    g.x_type == Scalar::f32 ? widen_rows(g, b, rows_at<float>(g, row)) : widen_rows(g, b, rows_at<Bf16>(g, row));
  }
  const float* a = in_place ? rows_at<float>(g, row) : reinterpret_cast<const float*>(b.buffer);
  const int64_t lda = in_place ? g.x_stride : b.depth;
  if (g.depth == 0) std::fill_n(b.acc, b.rows * b.ld, 0.0f);
  for (int64_t k = 0; k < g.depth; k += kFloatDepth) {
    multiply_floats(g, b, row, a, lda, k, std::min(k + kFloatDepth, g.depth), k > 0);
  }
}

template <Clamp kClamp, typename T>
GNNC_INLINE void quantize_row(const GemmArgs& g, const T* x, float inverse, uint8_t* out) {
  const Floats factor = splat(inverse);
  const auto value = [&](int64_t c, auto n) { return load(x + c, n) * factor; };
  store_quantized<kClamp>(g.depth, value, 0x80, reinterpret_cast<int8_t*>(out));
}

// Quantizes the rows of a block, a few rows at a time, so that they are still in L1 when their maxima are known.
template <typename T>
void quantize_rows(const GemmArgs& g, const Block& b, const T* x) {
  if (g.x_scale != nullptr) {
    const float inverse = inverse_of(g.x_scale[0]);
    for (int r = 0; r < b.rows; ++r) {
      b.scales[r] = g.x_scale[0];
      quantize_row<Clamp::both>(g, x + r * g.x_stride, inverse, b.buffer + r * b.depth);
    }
    return;
  }
  const int at_once = g.depth <= 256 ? 24 : g.depth <= 1024 ? 8 : 4;
  for (int begin = 0; begin < b.rows; begin += at_once) {
    const int count = std::min(at_once, b.rows - begin);
    row_scales(x + begin * g.x_stride, g.x_stride, count, g.depth, b.scales + begin, b.inverses);
    for (int r = 0; r < count; ++r) {
      quantize_row<Clamp::none>(g, x + (begin + r) * g.x_stride, b.inverses[r], b.buffer + (begin + r) * b.depth);
    }
  }
}

// Copies quantized values xor 0x80. In the padding of the last block of columns, the flipped values are multiplied by
// weights of zero.
void copy_flipped(const int8_t* q, int64_t count, uint8_t* to) {
#ifdef __AVX512F__
  const __m512i flip = _mm512_set1_epi8(-128);
  int64_t c = 0;
  for (; c + 64 <= count; c += 64) _mm512_storeu_si512(to + c, _mm512_xor_si512(_mm512_loadu_si512(q + c), flip));
  if (c == count) return;
  const __mmask64 mask = ~__mmask64{0} >> (64 - (count - c));
  _mm512_storeu_si512(to + c, _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, q + c), flip));
#else
  for (int64_t c = 0; c < count; ++c) to[c] = static_cast<uint8_t>(q[c] ^ 0x80);
  std::fill(to + count, to + round_up(count, 64), uint8_t{0x80});
#endif
}

void copy_quantized(const GemmArgs& g, const Block& b, int64_t row) {
  for (int r = 0; r < b.rows; ++r) {
    const int8_t* q = rows_at<int8_t>(g, row + r);
    uint8_t* to = b.buffer + r * b.depth;
    copy_flipped(q, g.depth, to);
    b.scales[r] = g.x_scale[g.x_scale_is_single ? 0 : row + r];
  }
}

void load_quantized(const GemmArgs& g, const Block& b, int64_t row) {
  switch (g.x_type) {
    case Scalar::i8:
      return copy_quantized(g, b, row);
    case Scalar::f32:
      return quantize_rows(g, b, rows_at<float>(g, row));
    default:
      return quantize_rows(g, b, rows_at<Bf16>(g, row));
  }
}

#ifdef __AVX512F__

// Computes acc = float(init + a * w) * row scale * column scale.
template <int kRows, int kStrips, int... I>
GNNC_INLINE void code_tile(const uint8_t* a, int64_t lda, const int32_t* w, int64_t steps, const int32_t* init,
                           const float* row_scale, const float* column_scale, Ahead ahead, float* acc, int64_t ld,
                           std::integer_sequence<int, I...>) {
  __m512i sums[kRows * kStrips] = {_mm512_loadu_si512(init + I % kStrips * 16)...};
  for (int64_t k = 0; k < steps; ++k) {
    __m512i quantized[kStrips], value = _mm512_setzero_si512();
    for (int j = 0; j < kStrips; ++j) quantized[j] = _mm512_loadu_si512(w + (k * kStrips + j) * 16);
    ahead.next<2>();
    ((value = I % kStrips == 0 ? _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(a + I / kStrips * lda + 4 * k))
                               : value,
      add_products(sums[I], value, quantized[I % kStrips])),
     ...);
  }
  (store(acc + I / kStrips * ld + I % kStrips * 16, to_floats(reinterpret_cast<Ints>(sums[I])) *
                                                        splat(row_scale[I / kStrips]) *
                                                        load(column_scale + I % kStrips * 16)),
   ...);
}

template <int kStrips>
__attribute__((noinline)) void gemm_code_tile(const uint8_t* a, int64_t lda, const int32_t* w, int64_t steps,
                                              const int32_t* init, const float* row_scale, const float* column_scale,
                                              Ahead ahead, float* acc, int64_t ld) {
  constexpr int kRows = tile_rows(kStrips);
  code_tile<kRows, kStrips>(a, lda, w, steps, init, row_scale, column_scale, ahead, acc, ld, Sums<kRows, kStrips>{});
}

// Returns buffers for the nonzero elements of a row, and for the elements that are written past them.
NonZeros room_for_non_zeros(int64_t depth) {
  static thread_local Scratch scratch;
  const int64_t room = depth + kLanes;
  auto* columns = scratch.get<int32_t>(static_cast<size_t>(2 * room));
  return {columns, reinterpret_cast<float*>(columns + room), 0, 0};
}

// Returns the scale that a row is quantized with, and its inverse.
template <typename T>
GNNC_INLINE std::pair<float, float> scale_of_row(const GemmArgs& g, const NonZeros& found, int64_t row) {
  if (g.x_scale != nullptr) {
    const float given = g.x_scale[g.x_scale_is_single ? 0 : row];
    return {given, std::is_same_v<T, int8_t> ? 1.0f : inverse_of(given)};
  }
  const float scale = scale_of(from_bits(largest(row_magnitude(found.value, found.count))));
  return {scale, inverse_of(scale)};
}

// Multiplies a block of rows that are mostly zeros; returns false if the rows are not. A row may have more nonzero
// elements than its share, but the first row not many more, so that for other matrices the scan of each block stops
// after a quarter of a row.
template <typename T>
bool multiply_few(const GemmArgs& g, const Block& b, int64_t row) {
  NonZeros found = room_for_non_zeros(g.depth);
  int64_t left = g.depth / kFew;
  for (int r = 0; r < b.rows; ++r) {
    const T* x = rows_at<T>(g, row + r);
    left += g.depth / kFew;
    found.count = find_non_zeros(x, g.depth, left, found.column);
    if (found.count > left) return false;
    left -= found.count;
    for (int64_t i = 0; i < found.count; ++i) found.value[i] = value_of(x[found.column[i]]);
    const auto [scale, inverse] = scale_of_row<T>(g, found, row + r);
    quantize_non_zeros<std::is_same_v<T, int8_t> ? Clamp::none : Clamp::both>(found, inverse);
    for (int64_t p = 0; p < panels_of(g); ++p) {
      const Panel panel = panel_of(g, p);
      const int64_t column = p * kPanelStrips * kLanes;
      with_strips(panel.strips, [&](auto strips) {
        multiply_non_zeros<strips>(found, panel.data, scale, g.w_scale + column, b.acc + r * b.ld + column);
      });
    }
  }
  return true;
}

bool multiply_few(const GemmArgs& g, const Block& b, int64_t row) {
  if (g.depth < kZerosDepth) return false;
  switch (g.x_type) {
    case Scalar::i8:
      return multiply_few<int8_t>(g, b, row);
    case Scalar::f32:
      return multiply_few<float>(g, b, row);
    default:
      return multiply_few<Bf16>(g, b, row);
  }
}

template <int kStrips>
__attribute__((noinline)) void gemm_dot_tile(const Bf16* a, int64_t lda, const int32_t* w, int64_t steps, Ahead ahead,
                                             float* acc, int64_t ld) {
  constexpr int kRows = tile_rows(kStrips);
  dot_tile<kRows, kStrips>(a, lda, w, steps, ahead, acc, ld, Sums<kRows, kStrips>{});
}

void compute_dots(const GemmArgs& g, const Block& b, int64_t row) {
  const auto [a, stride] = rows_of_bf16(g, row, b.rows, reinterpret_cast<Bf16*>(b.buffer));
  for (int64_t p = 0; p < panels_of(g); ++p) {
    const Panel panel = panel_of(g, p);
    with_strips(panel.strips, [&](auto strips) {
      constexpr int kRows = tile_rows(strips);
      for (int r = 0; r < b.rows; r += kRows) {
        gemm_dot_tile<strips>(a + r * stride, stride, panel.data, steps_of(g),
                              ahead_of(g, g.x_type == Scalar::bf16 ? p : 1, row + r, kRows),
                              b.acc + r * b.ld + p * kPanelStrips * kLanes, b.ld);
      }
    });
  }
}

void compute_quantized(const GemmArgs& g, const Block& b, int64_t row) {
  if (multiply_few(g, b, row)) return;
  load_quantized(g, b, row);
  for (int64_t p = 0; p < panels_of(g); ++p) {
    const Panel panel = panel_of(g, p);
    const int64_t column = p * kPanelStrips * kLanes;
    with_strips(panel.strips, [&](auto strips) {
      constexpr int kRows = tile_rows(strips);
      for (int r = 0; r < b.rows; r += kRows) {
        gemm_code_tile<strips>(b.buffer + r * b.depth, b.depth, panel.data, steps_of(g), g.w_init + column,
                               b.scales + r, g.w_scale + column, ahead_of(g, p, row + r, kRows),
                               b.acc + r * b.ld + column, b.ld);
      }
    });
  }
}

#else

// Converts the quantized values to floats, stored after the bytes in the buffer.
float* floats_of_quantized(const Block& b) {
  auto* floats = reinterpret_cast<float*>(b.buffer + kBlockRows * b.depth);
  for (int64_t i = 0; i < b.rows * b.depth; ++i) floats[i] = static_cast<float>(b.buffer[i]) - 128.0f;
  return floats;
}

void compute_quantized(const GemmArgs& g, const Block& b, int64_t row) {
  load_quantized(g, b, row);
  const float* quantized = floats_of_quantized(b);
  std::fill_n(b.sums, b.rows * b.ld, 0);
  for (int64_t k = 0; k < g.depth; k += kExactDepth) {
    multiply_floats(g, b, row, quantized, b.depth, k, std::min(k + kExactDepth, g.depth), false);
    for (int r = 0; r < b.rows; ++r) {
      for (int64_t c = r * b.ld; c < r * b.ld + g.width; ++c) b.sums[c] += static_cast<int32_t>(b.acc[c]);
    }
  }
  for (int r = 0; r < b.rows; ++r) {
    for (int64_t c = 0; c < g.width; ++c) {
      b.acc[r * b.ld + c] = static_cast<float>(b.sums[r * b.ld + c]) * b.scales[r] * g.w_scale[c];
    }
  }
}

#endif

void compute(const GemmArgs& g, const Block& b, int64_t row) {
#ifdef __AVX512F__
  if (g.tiles) return compute_tiles(g, row, b.rows, reinterpret_cast<Bf16*>(b.buffer), b.acc, b.ld);
  if (g.dots) return compute_dots(g, b, row);
#endif
  g.mode == GemmMode::i8 ? compute_quantized(g, b, row) : compute_floats(g, b, row);
}

// Computes rows [begin, end), and runs the program on each block while it is in L1.
void blocks(const GemmArgs& g, int64_t row_begin, int64_t row_end, void* scratch) {
  for (int64_t row = row_begin; row < row_end; row += kBlockRows) {
    const int rows = static_cast<int>(std::min(kBlockRows, row_end - row));
    const Block block = block_in(g, scratch, rows);
    compute(g, block, row);
    run(*g.program, block.acc, block.ld, row, rows, g.width);
  }
}

}  // namespace

int64_t gemm_block_rows(const GemmArgs&) { return kBlockRows; }

int64_t gemm_scratch_bytes(const GemmArgs& g) {
  const int64_t value = g.mode != GemmMode::i8 ? 4 : kVnni ? 1 : 5;
  return kBlockRows * (acc_stride(g) * (kVnni ? 4 : 8) + buffer_depth(g) * value) + 128 * 4 + 64;
}

void gemm_rows(const GemmArgs& g, int64_t row_begin, int64_t row_end, void* scratch) {
#ifdef __AVX512F__
  if (g.tiles) {
    const Tiles tiles(kRowsOfTile);
    return blocks(g, row_begin, row_end, scratch);
  }
#endif
  blocks(g, row_begin, row_end, scratch);
}

}  // namespace gnnc::GNNC_ISA
