// Packs the weight of a gemm: see gemm.h. A strip of columns is read once for its maxima (int8) and once to pack; for
// the second read the strip is in L1 or L2.

#include "bf16_pairs.isa.h"
#include "gemm_layout.isa.h"
#include "gnnc/quantize.h"
#include "transpose.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

// A strip of columns to pack: where it is read, and where it is written.
struct Strip {
  const GemmArgs& g;
  const float* w;  // the weight, from the first column of the strip on
  int64_t stride_o, stride_k;
  int32_t* to;
  int64_t stride;  // dwords from one step to the next
  int64_t first;   // first column
  int columns;     // number of columns that exist
};

Strip strip_of(const GemmArgs& g, int64_t index) {
  const Panel panel = panel_of(g, index / kPanelStrips);
  const int64_t first = index * kLanes;
  const GemmWeight* w = g.weights;
  while (w + 1 < g.weights + g.weight_count && w[1].first <= first) ++w;
  const int64_t column = first - w->first, left = std::max<int64_t>(w->width - column, 0);
  return {g,           w->data + std::min(column, w->width) * w->stride_o, w->stride_o,
          w->stride_k, panel.data + index % kPanelStrips * kLanes,         panel.step(),
          first,       static_cast<int>(std::min<int64_t>(kLanes, left))};
}

// Returns the columns of one k, if columns are adjacent in memory.
GNNC_INLINE Floats row_of_columns(const Strip& s, int64_t k) { return load(s.w + k * s.stride_k, Tail{s.columns}); }

#ifdef __AVX512F__

// Stores 16 steps of a strip, given the dwords of each column; column(c) returns 16 dwords.
template <typename Column>
GNNC_INLINE void store_steps(const Strip& s, int64_t step, const Column& column) {
  alignas(64) int32_t dwords[16][16] = {};
#pragma GCC unroll 1
  for (int c = 0; c < s.columns; ++c) _mm512_store_si512(dwords[c], column(c));
  __m512i v[16];
  for (int c = 0; c < 16; ++c) v[c] = _mm512_load_si512(dwords[c]);
  transpose(v);
  for (int c = 0; c < 16; ++c) _mm512_store_si512(dwords[c], v[c]);
  const int64_t count = std::min<int64_t>(16, steps_of(s.g) - step);
#pragma GCC unroll 1
  for (int64_t i = 0; i < count; ++i) {
    _mm512_storeu_si512(s.to + (step + i) * s.stride, _mm512_load_si512(dwords[i]));
  }
}

GNNC_INLINE Floats part(const float* row, int64_t k, int64_t depth) {
  const int64_t left = depth - k;
  if (left >= 16) return load(row + k);
  return left > 0 ? load(row + k, Tail{static_cast<int>(left)}) : Floats{};
}

void pack_pairs_of_rows(const Strip& s) {
  for (int64_t step = 0; step < steps_of(s.g); step += 16) {
    store_steps(s, step, [&](int c) {
      const float* row = s.w + c * s.stride_o;
      const int64_t k = 2 * step;
      alignas(64) Bf16 values[32];
      store(values, part(row, k, s.g.depth));
      store(values + 16, part(row, k + 16, s.g.depth));
      return _mm512_load_si512(values);
    });
  }
}

void pack_pairs_of_columns(const Strip& s) {
  const auto values = [&](int64_t k) { return k < s.g.depth ? round_to_bf16(row_of_columns(s, k)) : Floats{}; };
  for (int64_t step = 0; step < steps_of(s.g); ++step) {
    _mm512_storeu_si512(s.to + step * s.stride, pairs(values(2 * step), values(2 * step + 1)));
  }
}

void pack_pairs(const Strip& s) { s.stride_k == 1 ? pack_pairs_of_rows(s) : pack_pairs_of_columns(s); }

void pack_float_rows(const Strip& s) {
  const bool round = s.g.mode == GemmMode::bf16;
  for (int64_t k = 0; k < s.g.depth; k += 16) {
    store_steps(s, k, [&](int c) {
      const Floats v = part(s.w + c * s.stride_o, k, s.g.depth);
      return _mm512_castps_si512(round ? round_to_bf16(v) : v);
    });
  }
}

void pack_int8_rows(const Strip& s, const float* inverse) {
  for (int64_t k = 0; k < s.g.depth; k += 64) {
    store_steps(s, k / 4, [&](int c) {
      const float* row = s.w + c * s.stride_o;
      const Floats factor = splat(inverse[c]);
      const auto value = [&](int64_t at) { return part(row, at, s.g.depth) * factor; };
      return pack_int8<Clamp::none>(value(k), value(k + 16), value(k + 32), value(k + 48));
    });
  }
}

void pack_int8_columns(const Strip& s, const float* inverse) {
  const Floats factor = load(inverse);
  const auto byte = [&](int64_t k) {
    if (k >= s.g.depth) return _mm512_setzero_si512();
    const __m512i code = integers<Clamp::none>(row_of_columns(s, k) * factor);
    return _mm512_and_si512(_mm512_max_epi32(code, _mm512_set1_epi32(-127)), _mm512_set1_epi32(255));
  };
  for (int64_t step = 0; step < steps_of(s.g); ++step) {
    const int64_t k = 4 * step;
    const __m512i low = _mm512_or_si512(byte(k), _mm512_slli_epi32(byte(k + 1), 8));
    const __m512i high = _mm512_or_si512(byte(k + 2), _mm512_slli_epi32(byte(k + 3), 8));
    _mm512_storeu_si512(s.to + step * s.stride, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
}

// Computes the initial values of the sums: quantized values of x are stored as q + 128, so the sums start at -128 times
// the column's sum.
void start_sums(const Strip& s) {
  __m512i sums = _mm512_setzero_si512();
  for (int64_t step = 0; step < steps_of(s.g); ++step) {
    sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(-128), _mm512_loadu_si512(s.to + step * s.stride));
  }
  _mm512_storeu_si512(s.g.w_init + s.first, _mm512_sub_epi32(_mm512_setzero_si512(), sums));
}

void pack_int8_weight(const Strip& s, const float* inverse) {
  s.stride_k == 1 ? pack_int8_rows(s, inverse) : pack_int8_columns(s, inverse);
  start_sums(s);
}

#else

void pack_pairs(const Strip&) {}  // there are no products of pairs

void pack_float_rows(const Strip& s) {
  const bool round = s.g.mode == GemmMode::bf16;
  for (int64_t k = 0; k < s.g.depth; ++k) {
    Floats v{};
    for (int c = 0; c < s.columns; ++c) v[c] = s.w[c * s.stride_o + k * s.stride_k];
    store(reinterpret_cast<float*>(s.to + k * s.stride), round ? round_to_bf16(v) : v);
  }
}

void pack_int8_weight(const Strip& s, const float* inverse) {
  const Floats factor = load(inverse);
  for (int64_t k = 0; k < s.g.depth; ++k) {
    Floats v{};
    for (int c = 0; c < s.columns; ++c) v[c] = s.w[c * s.stride_o + k * s.stride_k];
    store(reinterpret_cast<float*>(s.to + k * s.stride), to_floats(integers(v * factor)));
  }
}

#endif

void pack_float_columns(const Strip& s) {
  const bool round = s.g.mode == GemmMode::bf16;
  for (int64_t k = 0; k < s.g.depth; ++k) {
    const Floats v = row_of_columns(s, k);
    store(reinterpret_cast<float*>(s.to + k * s.stride), round ? round_to_bf16(v) : v);
  }
}

// Computes the maximum of each column, as bits.
void column_tops(const Strip& s, float* tops) {
  if (s.stride_k == 1) {
    Group group;
    for (int c = 0; c < s.columns; ++c) group.set(c, as_floats(row_magnitude(s.w + c * s.stride_o, s.g.depth)));
    return group.largest(tops);
  }
  Ints top{};
  for (int64_t k = 0; k < s.g.depth; ++k) top = larger(top, magnitude(row_of_columns(s, k)));
  store(tops, as_floats(top));
}

void pack_quantized(const Strip& s) {
  alignas(64) float tops[16] = {}, inverse[kLanes];
  column_tops(s, tops);
  const Floats scale = scale_of(load(tops));
  store(s.g.w_scale + s.first, scale);
  store(inverse, inverse_of(scale));
  pack_int8_weight(s, inverse);
}

}  // namespace

int64_t gemm_strips(const GemmArgs& g) { return strips_of(g); }

int64_t gemm_packed_bytes(const GemmArgs& g) { return strips_of(g) * kLanes * steps_of(g) * 4; }

void gemm_pack(const GemmArgs& g, int64_t strip_begin, int64_t strip_end) {
  for (int64_t i = strip_begin; i < strip_end; ++i) {
    const Strip s = strip_of(g, i);
    if (g.mode == GemmMode::i8) {
      pack_quantized(s);
    } else if (g.tiles || g.dots) {
      pack_pairs(s);
    } else if (s.stride_k == 1) {
      pack_float_rows(s);
    } else {
      pack_float_columns(s);
    }
  }
}

}  // namespace gnnc::GNNC_ISA
