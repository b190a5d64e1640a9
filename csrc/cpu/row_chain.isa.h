#pragma once

// Chains of cheap row-program instructions, run on blocks of a tile that stay in registers.

#include "gnnc/simd_math.h"
#include "row_tile.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

// Most of a program is a chain of cheap instructions. A chain runs on blocks of the tile that stay in registers, so
// that each instruction costs its arithmetic and not a pass over the tile.
#ifdef __AVX512F__
constexpr int kBlockVectors = 2;
#else
constexpr int kBlockVectors = 1;
#endif
constexpr int kBlockRows = 8;

bool chains(RowOp op) {
  switch (op) {
    case RowOp::mul_row:
    case RowOp::add_row:
    case RowOp::mul_col:
    case RowOp::add_col:
    case RowOp::mul_full:
    case RowOp::add_full:
    case RowOp::mul_const:
    case RowOp::add_const:
    case RowOp::mul_tensor:
    case RowOp::add_tensor:
    case RowOp::relu:
    case RowOp::leaky_relu:
    case RowOp::elu:
    case RowOp::batch_norm:
    case RowOp::mul_shifted:
    case RowOp::add_scaled:
      return true;
    default:
      return false;
  }
}

// Returns the valid lanes of vector v of a block whose last vector has n valid lanes.
template <int kVectors>
GNNC_INLINE Whole lanes_at(int, Whole n) {
  return n;
}
template <int kVectors>
GNNC_INLINE Tail lanes_at(int v, Tail n) {
  return v + 1 < kVectors ? Tail{kLanes} : n;
}

// A block of a tile in registers.
template <int kRows, int kVectors>
struct Block {
  Floats x[kRows][kVectors];

  GNNC_INLINE void read(const float* at, int64_t ld) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[r][v] = load(at + r * ld + v * kLanes);
    }
  }
  GNNC_INLINE void write(float* at, int64_t ld) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(at + r * ld + v * kLanes, x[r][v]);
    }
  }
  template <typename Function>
  GNNC_INLINE void each(const Function& f) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[r][v] = f(x[r][v]);
    }
  }
  template <typename Function>
  GNNC_INLINE void rows(const float* value, const Function& f) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Floats k = splat(value[r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[r][v] = f(x[r][v], k);
    }
  }
  template <typename N, typename Function>
  GNNC_INLINE void columns(const float* value, N n, const Function& f) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Floats k = load(value + v * kLanes, lanes_at<kVectors>(v, n));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) x[r][v] = f(x[r][v], k);
    }
  }
  // Applies x = f(x, value) with the values of a matrix from row `first` and column c on.
  template <typename T, typename N, typename Function>
  GNNC_INLINE void elements(const RowView& matrix, int64_t first, int64_t c, N n, const Function& f) {
    const T* value = row_of<const T>(matrix, first) + c;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Floats scale = scale_of_row<T>(matrix, first + r);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Floats given = load(value + r * matrix.stride + v * kLanes, lanes_at<kVectors>(v, n));
        x[r][v] = f(x[r][v], scaled<T>(given, scale));
      }
    }
  }
};

template <int kRows, int kVectors, typename N>
GNNC_INLINE void step(Block<kRows, kVectors>& block, const Tile& t, const RowInstruction& in, int64_t r, int64_t c,
                      N n) {
  const auto add = [](Floats x, Floats v) { return x + v; };
  const auto multiply = [](Floats x, Floats v) { return x * v; };
  const auto values = [&] { return floats(t.program.operands[in.a]); };
  const auto constant = [&] { return splat(t.program.consts[in.b]); };
  const auto shifted = [&](int32_t operand) {
    const float value = operand < 0 ? 0.0f : floats(t.program.operands[operand])[0];
    return splat(value + t.program.consts[in.b]);
  };
  const auto elements = [&](const auto& f) {
    const RowView& full = t.program.operands[in.a];
    if (full.type == Scalar::i8) return block.template elements<int8_t>(full, t.first + r, c, n, f);
    if (full.type == Scalar::bf16) return block.template elements<Bf16>(full, t.first + r, c, n, f);
    block.template elements<float>(full, t.first + r, c, n, f);
  };
  switch (in.op) {
    case RowOp::mul_full:
      return elements(multiply);
    case RowOp::add_full:
      return elements(add);
    case RowOp::mul_row:
      return block.rows(values() + t.first + r, multiply);
    case RowOp::add_row:
      return block.rows(values() + t.first + r, add);
    case RowOp::mul_col:
      return block.columns(values() + c, n, multiply);
    case RowOp::add_col:
      return block.columns(values() + c, n, add);
    case RowOp::mul_const:
      return block.each([k = constant()](Floats x) { return x * k; });
    case RowOp::add_const:
      return block.each([k = constant()](Floats x) { return x + k; });
    case RowOp::mul_tensor:
      return block.each([k = splat(values()[0])](Floats x) { return x * k; });
    case RowOp::add_tensor:
      return block.each([k = splat(values()[0])](Floats x) { return x + k; });
    case RowOp::mul_shifted:
      return block.each([k = shifted(in.a)](Floats x) { return x * k; });
    case RowOp::add_scaled:
      return elements([k = shifted(in.c)](Floats x, Floats v) { return x + k * v; });
    case RowOp::relu:
      return block.each([zero = splat(0.0f)](Floats x) { return larger(zero, x); });
    case RowOp::leaky_relu:
      return block.each([k = constant(), zero = splat(0.0f)](Floats x) { return x > zero ? x : x * k; });
    case RowOp::elu:
      return block.each([k = t.program.consts[in.b]](Floats x) { return elu(x, k); });
    default: {  // batch_norm
      const float* factor = t.program.prepared + in.c + c;
      block.columns(factor, Whole{}, multiply);
      return block.columns(factor + (t.width + 15) / 16 * 16, Whole{}, add);
    }
  }
}

template <int kRows, int kVectors, typename N>
GNNC_INLINE void chain_block(const Tile& t, const RowInstruction* code, int64_t count, int64_t r, int64_t c, N n) {
  Block<kRows, kVectors> block;
  float* at = t.row(r) + c;
  block.read(at, t.ld);
  for (int64_t i = 0; i < count; ++i) step(block, t, code[i], r, c, n);
  block.write(at, t.ld);
}

template <int kRows>
void chain_rows(const Tile& t, const RowInstruction* code, int64_t count, int64_t r) {
  constexpr int64_t kBlock = kBlockVectors * kLanes;
  int64_t c = 0;
  for (; c + kBlock <= t.width; c += kBlock) chain_block<kRows, kBlockVectors>(t, code, count, r, c, Whole{});
  for (; c + kLanes <= t.width; c += kLanes) chain_block<kRows, 1>(t, code, count, r, c, Whole{});
  if (c < t.width) chain_block<kRows, 1>(t, code, count, r, c, Tail{static_cast<int>(t.width - c)});
}

void apply_chain(const Tile& t, const RowInstruction* code, int64_t count) {
  int64_t r = 0;
  for (; r + kBlockRows <= t.rows; r += kBlockRows) chain_rows<kBlockRows>(t, code, count, r);
  for (; r < t.rows; ++r) chain_rows<1>(t, code, count, r);
}

}  // namespace
}  // namespace gnnc::GNNC_ISA
