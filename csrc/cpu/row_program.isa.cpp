// See include/gnnc/row_program.h for layout, traffic and floor.

#include "gnnc/row_program.h"

#include "gnnc/simd.h"
#include "gnnc/simd_math.h"
#include "row_chain.isa.h"
#include "row_quantize.isa.h"
#include "row_reductions.isa.h"
#include "row_store.isa.h"
#include "row_tile.isa.h"

namespace gnnc::GNNC_ISA {
namespace {
void add_quantized(const Tile& t, const RowView& quantized, const RowView& scales) {
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    const int8_t* q = row_of<const int8_t>(quantized, t.first + r);
    const Floats scale = splat(floats(scales)[t.first + r]);
    for_columns(t.width, [&](int64_t c, auto n) { store(row + c, load(row + c) + load(q + c, n) * scale); });
  }
}

// Sets the values whose bit is 0 to 0.
void mask_bits(const Tile& t, const RowView& bits) {
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    const auto* mask = row_of<const uint8_t>(bits, t.first + r);
    int64_t c = 0;
#ifdef __AVX512F__
    for (; c + kLanes <= t.width; c += kLanes) {
      __mmask16 lanes;
      std::memcpy(&lanes, mask + c / 8, 2);
      _mm512_storeu_ps(row + c, _mm512_maskz_loadu_ps(lanes, row + c));
    }
#endif
    for (; c < t.width; ++c) {
      if ((mask[c / 8] >> (c % 8) & 1) == 0) row[c] = 0.0f;
    }
  }
}

// Multiplies by the derivative of an ELU at v, its operand or its result.
void elu_backward(const Tile& t, const RowView& v, float alpha, bool is_result) {
  const Floats a = splat(alpha), zero{};
  if (is_result) return map_full(t, v, [&](Floats x, Floats y) { return y <= zero ? x * (y + a) : x; });
  map_full(t, v, [&](Floats x, Floats y) { return y <= zero ? x * (a * exp(y)) : x; });
}

void apply_arithmetic(const Tile& t, const RowInstruction& in) {
  const auto operand = [&](int32_t i) -> const RowView& { return t.program.operands[i]; };
  const auto divide = [](Floats x, Floats v) { return x / v; };
  switch (in.op) {
    case RowOp::div_row:
      return map_rows(t, operand(in.a), divide);
    case RowOp::div_col:
      return map_columns(t, operand(in.a), divide);
    case RowOp::div_full:
      return map_full(t, operand(in.a), divide);
    case RowOp::rsub_full:
      return map_full(t, operand(in.a), [](Floats x, Floats v) { return v - x; });
    case RowOp::mask_bits:
      return mask_bits(t, operand(in.a));
    case RowOp::elu_backward:
      return elu_backward(t, operand(in.a), t.program.consts[in.b], in.c != 0);
    case RowOp::leaky_relu_backward:
      return map_full(t, operand(in.a),
                      [k = splat(t.program.consts[in.b])](Floats x, Floats v) { return v > Floats{} ? x : x * k; });
    case RowOp::threshold_backward:
      return map_full(t, operand(in.a), [](Floats x, Floats v) { return v <= Floats{} ? Floats{} : x; });
    default:
      return add_quantized(t, operand(in.a), operand(in.b));
  }
}

// Applies an activation. Comparisons are written so that a NaN propagates, as in torch.
void apply_activation(const Tile& t, const RowInstruction& in) {
  const bool has_constant = in.op == RowOp::clamp_min || in.op == RowOp::clamp_max;
  const float constant = has_constant ? t.program.consts[in.b] : 0.0f;
  const Floats k = splat(constant), one = splat(1.0f);
  switch (in.op) {
    case RowOp::sigmoid:
      return map_values(t, [](Floats x) { return sigmoid(x); });
    case RowOp::tanh:
      return map_values(t, [](Floats x) { return tanh(x); });
    case RowOp::gelu:
      return map_values(t, [](Floats x) { return gelu(x); });
    case RowOp::gelu_tanh:
      return map_values(t, [](Floats x) { return gelu_tanh(x); });
    case RowOp::silu:
      return map_values(t, [](Floats x) { return silu(x); });
    case RowOp::exp:
      return map_values(t, [](Floats x) { return exp(x); });
    case RowOp::neg:
      return map_values(t, [](Floats x) { return -x; });
    case RowOp::abs:
      return map_values(t, [](Floats x) { return absolute(x); });
    case RowOp::square:
      return map_values(t, [](Floats x) { return x * x; });
    case RowOp::sqrt:
      return map_values(t, [](Floats x) { return square_root(x); });
    case RowOp::recip:
      return map_values(t, [&](Floats x) { return one / x; });
    case RowOp::clamp_min:
      return map_values(t, [&](Floats x) { return larger(k, x); });
    case RowOp::clamp_max:
      return map_values(t, [&](Floats x) { return smaller(k, x); });
    case RowOp::log:
      return map_values(t, [](Floats x) { return log(x); });
    case RowOp::softplus:
      return map_values(t, [](Floats x) { return softplus(x); });
    default:
      return map_values(t, [&](Floats x) { return one / square_root(x); });
  }
}

void apply_row_wise(Tile& t, float* acc, const RowInstruction& in) {
  const RowProgram& p = t.program;
  switch (in.op) {
    case RowOp::window:
      t.acc = acc + in.a;
      t.width = in.b;
      return;
    case RowOp::layer_norm:
      return layer_norm(t, p.operands[in.a], p.operands[in.a + 1], p.consts[in.b]);
    case RowOp::l2_normalize:
      return l2_normalize(t, p.consts[in.b]);
    case RowOp::softmax:
      return softmax(t, false);
    case RowOp::log_softmax:
      return softmax(t, true);
    default:
      return head_mean(t, in.b);
  }
}

void apply_store(const Tile& t, const RowInstruction& in) {
  const RowProgram& p = t.program;
  const auto out = [&](int32_t i) -> const RowView& { return p.outs[i]; };
  switch (in.op) {
    case RowOp::store_f32:
      return store_values<float>(t, out(in.a));
    case RowOp::store_bf16:
      return store_values<Bf16>(t, out(in.a));
    case RowOp::quant_row:
      return quant_row(t, out(in.a), out(in.b));
    case RowOp::quant_static: {
      auto* count = in.c < 0 ? nullptr : static_cast<int64_t*>(out(in.c).data);
      return quant_static(t, out(in.a), p.prepared + in.b, count);
    }
    case RowOp::quant_pow2:
      return quant_pow2(t, out(in.a), out(in.b), p.prepared + in.c);
    case RowOp::amax:
    case RowOp::scale_tensor:
      return amax(t, out(in.a));
    case RowOp::store_bits:
      return store_bits(t, out(in.a));
    case RowOp::col_sum:
      return col_sum(t, p.sums + int64_t{in.b} * 16);
    default:
      return row_dot(t, p.operands[in.a], out(in.b), in.c);
  }
}

#ifdef __AVX512F__
bool quantizes_in_registers(const Tile& t, int64_t at) {
  if (at >= t.program.length || t.width == 0 || t.width > 4 * kLanes) return false;
  return t.program.code[at].op == RowOp::quant_row || t.program.code[at].op == RowOp::quant_pow2;
}

// Applies a chain and the quantization `last` after it. The tile is written back only if a later instruction reads it.
void apply_chain_and_quantize(const Tile& t, const RowInstruction* code, int64_t count, const RowInstruction& last,
                              bool again) {
  const int rows = t.rows / kQuantizedRows * kQuantizedRows;
  const Tile whole{t.program, t.acc, t.ld, t.first, rows, t.width, t.rounding};
  const Tile rest{t.program, t.row(rows), t.ld, t.first + rows, t.rows - rows, t.width, t.rounding};
  switch ((t.width + kLanes - 1) / kLanes) {
    case 4:
      chain_to_quantized<4>(whole, code, count, last, again);
      break;
    case 3:
      chain_to_quantized<3>(whole, code, count, last, again);
      break;
    case 2:
      chain_to_quantized<2>(whole, code, count, last, again);
      break;
    default:
      chain_to_quantized<1>(whole, code, count, last, again);
  }
  if (rest.rows == 0) return;
  apply_chain(rest, code, count);
  apply_store(rest, last);
}
#endif

bool reads_matrix(RowOp op) {
  return op == RowOp::mul_full || op == RowOp::add_full || op == RowOp::add_scaled || op == RowOp::div_full ||
         op == RowOp::rsub_full || op == RowOp::add_qrow || op == RowOp::elu_backward ||
         op == RowOp::leaky_relu_backward || op == RowOp::threshold_backward;
}

int64_t bytes_of(Scalar type) { return type == Scalar::f32 ? 4 : type == Scalar::bf16 ? 2 : 1; }

}  // namespace

void fetch(const RowProgram& program, int64_t r0, int rows) {
  for (int64_t i = 0; i < program.length; ++i) {
    if (!reads_matrix(program.code[i].op)) continue;
    const RowView& v = program.operands[program.code[i].a];
    const char* row = static_cast<const char*>(v.data) + r0 * v.stride * bytes_of(v.type);
    for (int64_t b = 0; b < rows * v.stride * bytes_of(v.type); b += 64) __builtin_prefetch(row + b);
  }
}

void run(const RowProgram& program, float* acc, int64_t ld, int64_t r0, int rows, int64_t width) {
  Tile tile{program, acc, ld, r0, rows, width};
  for (int64_t i = 0; i < program.length; ++i) {
    const RowInstruction& in = program.code[i];
    int64_t chain = 0;
    while (i + chain < program.length && chains(program.code[i + chain].op)) ++chain;
#ifdef __AVX512F__
    const int64_t after = i + chain;
    const bool is_stochastic = after < program.length && program.code[after].op == RowOp::stochastic;
    const int64_t last = after + (is_stochastic ? 1 : 0);
    if (quantizes_in_registers(tile, last)) {
      tile.rounding = is_stochastic ? &program.code[after] : nullptr;
      apply_chain_and_quantize(tile, &in, chain, program.code[last], last + 1 < program.length);
      tile.rounding = nullptr;
      i = last;
      continue;
    }
#endif
    if (chain > 0) {
      apply_chain(tile, &in, chain);
      i += chain - 1;
    } else if (in.op == RowOp::stochastic) {
      tile.rounding = &in;
    } else if (in.op >= RowOp::store_f32) {
      apply_store(tile, in);
      tile.rounding = nullptr;
    } else if (in.op >= RowOp::batch_norm) {
      apply_row_wise(tile, acc, in);
    } else if (in.op >= RowOp::relu) {
      apply_activation(tile, in);
    } else {
      apply_arithmetic(tile, in);
    }
  }
}

}  // namespace gnnc::GNNC_ISA
