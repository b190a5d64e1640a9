#include "launch.h"

#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace gnnc {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The kinds of arguments of an instruction.
enum class Use {
  none,
  spare,           // a field that prepare writes
  constant,        // an index into consts
  heads,           // a number of heads, which divides the width
  flag,            // 0 or 1
  first_column,    // the first column of a window, a multiple of 16
  columns,         // the number of columns of a window
  row,             // operand, fp32 [M]
  column,          // operand, fp32 [F]
  columns2,        // two operands in a row, fp32 [F] or empty
  statistics,      // four operands in a row: mean, var [F], weight, bias [F] or empty
  full,            // operand, fp32 or bf16 [M, F]; or two in a row, int8 [M, F] and its scales, fp32 [M]
  quantized,       // operand, int8 [M, F]
  bits,            // operand, uint8 [M, ceil(F / 8)]
  single,          // operand, fp32, one element
  single_or_none,  // the same; -1: none
  scale,           // operand, fp32, one element or [F]
  seed,            // operand, int64, one element
  stream,          // a number of random bits, not negative
  out_f32,         // output [M, F]
  out_bf16,        // output [M, F]
  out_quantized,   // output, int8 [M, F], rows padded to 64 bytes
  out_row,         // output, fp32 [M]
  out_shift,       // output, uint8 [M]
  out_count,       // output, int64, one element; -1: none
  out_amax,        // output, fp32, one element or [F]
  out_per_head,    // output, fp32 [M, heads]
  out_bits,        // output, uint8 [M, ceil(F / 8)]
  out_sum,         // output, fp32 [F]
  out_single,      // output, fp32, one element
};

// The kinds of the arguments a, b and c of an instruction.
struct Spec {
  RowOp op;
  Use a = Use::none, b = Use::none, c = Use::none;
};

constexpr Spec kSpecs[] = {
    {RowOp::mul_row, Use::row},
    {RowOp::add_row, Use::row},
    {RowOp::mul_col, Use::column},
    {RowOp::add_col, Use::column},
    {RowOp::mul_full, Use::full},
    {RowOp::add_full, Use::full},
    {RowOp::add_qrow, Use::quantized, Use::row},
    {RowOp::mul_const, Use::none, Use::constant},
    {RowOp::add_const, Use::none, Use::constant},
    {RowOp::mul_tensor, Use::single},
    {RowOp::add_tensor, Use::single},
    {RowOp::rsub_full, Use::full},
    {RowOp::div_row, Use::row},
    {RowOp::div_full, Use::full},
    {RowOp::div_col, Use::column},
    {RowOp::mask_bits, Use::bits},
    {RowOp::elu_backward, Use::full, Use::constant, Use::flag},
    {RowOp::leaky_relu_backward, Use::full, Use::constant},
    {RowOp::threshold_backward, Use::full},
    {RowOp::relu},
    {RowOp::leaky_relu, Use::none, Use::constant},
    {RowOp::elu, Use::none, Use::constant},
    {RowOp::sigmoid},
    {RowOp::tanh},
    {RowOp::gelu},
    {RowOp::gelu_tanh},
    {RowOp::silu},
    {RowOp::exp},
    {RowOp::neg},
    {RowOp::abs},
    {RowOp::square},
    {RowOp::sqrt},
    {RowOp::recip},
    {RowOp::clamp_min, Use::none, Use::constant},
    {RowOp::clamp_max, Use::none, Use::constant},
    {RowOp::log},
    {RowOp::softplus},
    {RowOp::rsqrt},
    {RowOp::batch_norm, Use::statistics, Use::constant, Use::spare},
    {RowOp::layer_norm, Use::columns2, Use::constant},
    {RowOp::l2_normalize, Use::none, Use::constant},
    {RowOp::softmax},
    {RowOp::log_softmax},
    {RowOp::head_mean, Use::none, Use::heads},
    {RowOp::window, Use::first_column, Use::columns},
    {RowOp::mul_shifted, Use::single, Use::constant},
    {RowOp::add_scaled, Use::full, Use::constant, Use::single_or_none},
    {RowOp::store_f32, Use::out_f32},
    {RowOp::store_bf16, Use::out_bf16},
    {RowOp::quant_row, Use::out_quantized, Use::out_row},
    {RowOp::quant_static, Use::out_quantized, Use::scale, Use::out_count},
    {RowOp::quant_pow2, Use::out_quantized, Use::out_shift, Use::scale},
    {RowOp::amax, Use::out_amax},
    {RowOp::row_dot, Use::column, Use::out_per_head, Use::heads},
    {RowOp::store_bits, Use::out_bits},
    {RowOp::col_sum, Use::out_sum, Use::spare, Use::spare},
    {RowOp::scale_tensor, Use::out_single},
    {RowOp::stochastic, Use::seed, Use::stream},
};

Scalar scalar_of(const Tensor& t, const char* op) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Scalar::f32;
    case ScalarType::BFloat16:
      return Scalar::bf16;
    case ScalarType::Char:
      return Scalar::i8;
    case ScalarType::Byte:
      return Scalar::u8;
    case ScalarType::Long:
      return Scalar::i64;
    default:
      STD_TORCH_CHECK(false, op, ": a row program takes float32, bfloat16, int8, uint8 and int64 tensors, not ",
                      torch::headeronly::toString(t.scalar_type()));
  }
}

// Returns a view of an operand. Two-dimensional tensors stay matrices; all others must be contiguous and become one
// row.
RowView view_of(const Tensor& t, const char* op, const char* name) {
  STD_TORCH_CHECK(t.is_cpu(), op, ": the tensors of a row program must be on the CPU");
  const Scalar type = scalar_of(t, op);
  if (t.dim() != 2 || t.is_contiguous()) {
    STD_TORCH_CHECK(t.is_contiguous(), op, ": a tensor of a row program must be contiguous, or a matrix");
    const bool matrix = t.dim() == 2;
    const int64_t rows = matrix ? t.size(0) : 1, cols = matrix ? t.size(1) : t.numel();
    return {checked_data(t, t.numel(), op, name), rows, cols, cols, type};
  }
  const int64_t cols = t.size(1);
  STD_TORCH_CHECK(cols <= 1 || t.stride(1) == 1, op, ": the columns of a matrix of a row program must be adjacent");
  STD_TORCH_CHECK(t.size(0) <= 1 || t.stride(0) >= cols, op, ": the rows of a matrix of a row program overlap");
  const int64_t rows = t.size(0), stride = t.stride(0);
  return {checked_data(t, span_of(rows, cols, stride, op), op, name), rows, cols, stride, type};
}

// Returns the floats between the partial sums of a col_sum.
int64_t padded_sum(const RowInstruction& in) { return (int64_t{in.c} + 15) / 16 * 16; }

// Checks the instructions of a program and prepares it for the kernels.
class Parser {
 public:
  void parse(const char* op, const ProgramArguments& arguments, int64_t rows, int64_t width);
  const RowProgram& result() const { return program_; }

 private:
  void check(const RowInstruction& in, const Spec& spec);
  void check_use(Use use, int32_t value, const RowInstruction& in);
  void check_operand(Use use, int32_t index);
  void check_out(Use use, int32_t index, int64_t heads);
  void prepare(RowInstruction& in);
  int32_t prepare_batch_norm(const RowInstruction& in);
  int32_t prepare_inverse(int32_t index);
  void prepare_sum(RowInstruction& in);
  float* reserve(int32_t* offset);
  const RowView& operand(int64_t index) const;

  bool vector(const RowView& v, int64_t count) const {
    return v.type == Scalar::f32 && v.rows * v.cols == count && (v.rows <= 1 || v.stride == v.cols);
  }
  // Returns whether a view is a matrix of the rows and `cols` columns; a vector becomes a matrix of one column.
  bool matrix(RowView& v, int64_t cols) const {
    if (v.rows == 1 && v.cols == rows_ && cols == 1) v.rows = rows_, v.cols = 1, v.stride = 1;
    return (v.rows == rows_ && v.cols == cols) || (rows_ * cols == 0 && v.rows * v.cols == 0);
  }
  static const float* floats(const RowView& v) { return static_cast<const float*>(v.data); }

  const char* name_ = nullptr;
  int64_t at_ = 0, rows_ = 0, width_ = 0, all_columns_ = 0;
  std::vector<RowInstruction> code_;
  std::vector<RowView> operands_, outs_;
  std::vector<float> consts_, prepared_, sums_;
  int64_t row_step_ = 1;
  const std::vector<Tensor>* given_outs_ = nullptr;
  RowProgram program_{};
};

const RowView& Parser::operand(int64_t index) const {
  STD_TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(operands_.size()), name_, ": instruction ", at_,
                  " names operand ", index, " of ", operands_.size());
  return operands_[static_cast<size_t>(index)];
}

void Parser::check_operand(Use use, int32_t index) {
  if (use == Use::single_or_none && index == -1) return;
  operand(index);
  RowView& v = operands_[static_cast<size_t>(index)];
  const auto expect = [&](bool holds, const char* what) {
    STD_TORCH_CHECK(holds, name_, ": instruction ", at_, " needs operand ", index, " to be ", what, " (rows ", rows_,
                    ", width ", width_, "), but it has ", v.rows, " x ", v.cols, " elements of another shape or type");
  };
  const auto column_or_empty = [&](int64_t i) {
    const RowView& w = operand(i);
    return vector(w, width_) || (vector(w, 0) && w.cols == 0);
  };
  switch (use) {
    case Use::row:
      return expect(vector(v, rows_), "float32 [rows]");
    case Use::column:
      return expect(vector(v, width_), "float32 [width]");
    case Use::columns2:
      return expect(column_or_empty(index) && column_or_empty(index + 1),
                    "weight, then bias: float32 [width] or empty");
    case Use::statistics:
      return expect(vector(v, width_) && vector(operand(index + 1), width_) && column_or_empty(index + 2) &&
                        column_or_empty(index + 3),
                    "mean, then var, weight, bias: float32 [width]");
    case Use::full:
      if (v.type == Scalar::i8) {
        expect(vector(operand(index + 1), rows_), "int8 [rows, width], before its scales, float32 [rows]");
        v.scales = floats(operand(index + 1));
        return expect(matrix(v, width_), "int8 [rows, width]");
      }
      return expect((v.type == Scalar::f32 || v.type == Scalar::bf16) && matrix(v, width_),
                    "float32 or bfloat16 [rows, width]");
    case Use::quantized:
      return expect(v.type == Scalar::i8 && matrix(v, width_), "int8 [rows, width]");
    case Use::bits:
      return expect(v.type == Scalar::u8 && matrix(v, (width_ + 7) / 8), "uint8 with a bit for each value");
    case Use::single:
    case Use::single_or_none:
      return expect(vector(v, 1), "float32 with one element");
    case Use::seed:
      return expect(v.type == Scalar::i64 && v.rows * v.cols == 1, "int64 with one element");
    default:
      return expect(vector(v, 1) || vector(v, width_), "float32 with one element or [width]");
  }
}

void Parser::check_out(Use use, int32_t index, int64_t heads) {
  if (use == Use::out_count && index == -1) return;
  STD_TORCH_CHECK(index >= 0 && index < static_cast<int32_t>(outs_.size()), name_, ": instruction ", at_,
                  " names output ", index, " of ", outs_.size());
  RowView& v = outs_[static_cast<size_t>(index)];
  const auto expect = [&](bool holds, const char* what) {
    STD_TORCH_CHECK(holds, name_, ": instruction ", at_, " needs output ", index, " to be ", what, " (rows ", rows_,
                    ", width ", width_, "), but it has ", v.rows, " x ", v.cols, " elements of another shape or type");
  };
  switch (use) {
    case Use::out_f32:
      return expect(v.type == Scalar::f32 && matrix(v, width_), "float32 [rows, width]");
    case Use::out_bf16:
      return expect(v.type == Scalar::bf16 && matrix(v, width_), "bfloat16 [rows, width]");
    case Use::out_quantized: {
      expect(v.type == Scalar::i8 && matrix(v, width_), "int8 [rows, width]");
      const int64_t padded = (width_ + 63) / 64 * 64;
      if (rows_ <= 1) v.stride = padded;  // the stride of a tensor with one row is arbitrary
      expect(v.stride >= padded, "int8 with rows padded to 64 bytes");
      // Whole vectors are stored, the last row's padding too.
      checked_data((*given_outs_)[static_cast<size_t>(index)], span_of(rows_, padded, v.stride, name_), name_,
                   "an int8 output");
      return;
    }
    case Use::out_row:
      return expect(vector(v, rows_), "float32 [rows]");
    case Use::out_shift:
      return expect(v.type == Scalar::u8 && v.rows * v.cols == rows_ && (v.rows <= 1 || v.stride == v.cols),
                    "uint8 [rows]");
    case Use::out_count:
      return expect(v.type == Scalar::i64 && v.rows * v.cols == 1, "int64 with one element");
    case Use::out_per_head:
      return expect(v.type == Scalar::f32 && matrix(v, heads), "float32 [rows, heads]");
    case Use::out_bits:
      return expect(v.type == Scalar::u8 && matrix(v, (width_ + 7) / 8), "uint8 with a bit for each value");
    case Use::out_sum:
      return expect(vector(v, width_), "float32 [width]");
    case Use::out_single:
      return expect(vector(v, 1), "float32 with one element");
    default:
      return expect(vector(v, 1) || vector(v, width_), "float32 with one element or [width]");
  }
}

void Parser::check_use(Use use, int32_t value, const RowInstruction& in) {
  if (use == Use::none || use == Use::spare) return;
  if (use == Use::constant) {
    STD_TORCH_CHECK(value >= 0 && value < static_cast<int32_t>(consts_.size()), name_, ": instruction ", at_,
                    " names constant ", value, " of ", consts_.size());
  } else if (use == Use::heads) {
    STD_TORCH_CHECK(value > 0 && width_ % value == 0, name_, ": instruction ", at_, " has ", value,
                    " heads, which do not divide the width ", width_);
  } else if (use == Use::flag) {
    STD_TORCH_CHECK(value == 0 || value == 1, name_, ": instruction ", at_, " has the flag ", value,
                    ", which must be 0 or 1");
  } else if (use == Use::stream) {
    STD_TORCH_CHECK(value >= 0, name_, ": instruction ", at_, " has the stream ", value, ", which is negative");
  } else if (use == Use::first_column || use == Use::columns) {
    const bool inside = in.a >= 0 && in.a % 16 == 0 && in.b > 0 && int64_t{in.a} + in.b <= all_columns_;
    STD_TORCH_CHECK(inside, name_, ": instruction ", at_, " has a window of ", in.b, " columns from ", in.a, " of ",
                    all_columns_, "; it must lie inside, and start at a multiple of 16");
  } else if (use < Use::out_f32) {
    check_operand(use, value);
  } else {
    check_out(use, value, in.c);
  }
}

void Parser::check(const RowInstruction& in, const Spec& spec) {
  check_use(spec.c, in.c, in);  // checked first: c may hold the number of heads that b needs
  check_use(spec.a, in.a, in);
  check_use(spec.b, in.b, in);
}

// Reserves room for one value a column, padded to whole vectors with zeros, and returns its address.
float* Parser::reserve(int32_t* offset) {
  *offset = static_cast<int32_t>(prepared_.size());
  prepared_.resize(prepared_.size() + static_cast<size_t>((width_ + 15) / 16 * 16), 0.0f);
  return prepared_.data() + *offset;
}

int32_t Parser::prepare_batch_norm(const RowInstruction& in) {
  const float eps = consts_[static_cast<size_t>(in.b)];
  const float* mean = floats(operand(in.a));
  const float* var = floats(operand(in.a + 1));
  const float* weight = operand(in.a + 2).cols ? floats(operand(in.a + 2)) : nullptr;
  const float* bias = operand(in.a + 3).cols ? floats(operand(in.a + 3)) : nullptr;
  int32_t at_a, at_b;
  reserve(&at_a);
  float* b = reserve(&at_b);
  float* a = prepared_.data() + at_a;
  for (int64_t c = 0; c < width_; ++c) {
    a[c] = (weight ? weight[c] : 1.0f) / std::sqrt(var[c] + eps);
    b[c] = (bias ? bias[c] : 0.0f) - mean[c] * a[c];
  }
  return at_a;
}

int32_t Parser::prepare_inverse(int32_t index) {
  const RowView& scale = operand(index);
  const bool single = scale.rows * scale.cols == 1;
  int32_t at;
  float* inverse = reserve(&at);
  for (int64_t c = 0; c < width_; ++c) {
    const float s = floats(scale)[single ? 0 : c];
    inverse[c] = s >= std::numeric_limits<float>::min() ? 1.0f / s : 0.0f;
  }
  return at;
}

// Reserves the partial sums of an instruction: b is their place, in units of 16 floats, and c the width.
void Parser::prepare_sum(RowInstruction& in) {
  std::fill_n(static_cast<float*>(outs_[static_cast<size_t>(in.a)].data), width_, 0.0f);
  const int64_t place = static_cast<int64_t>(sums_.size()) / 16;
  STD_TORCH_CHECK(place <= std::numeric_limits<int32_t>::max(), name_, ": the sums of ", rows_,
                  " rows do not fit 32 bits");
  in.b = static_cast<int32_t>(place);
  in.c = static_cast<int32_t>(width_);
  sums_.resize(sums_.size() + static_cast<size_t>((rows_ + kSumRows - 1) / kSumRows * padded_sum(in)), 0.0f);
  row_step_ = kSumRows;
}

void Parser::prepare(RowInstruction& in) {
  if (in.op == RowOp::col_sum) prepare_sum(in);
  if (in.op == RowOp::scale_tensor) *static_cast<float*>(outs_[static_cast<size_t>(in.a)].data) = 0.0f;
  if (rows_ > 0) {
    if (in.op == RowOp::batch_norm) in.c = prepare_batch_norm(in);
    if (in.op == RowOp::quant_static) in.b = prepare_inverse(in.b);
    if (in.op == RowOp::quant_pow2) in.c = prepare_inverse(in.c);
  }
  if (in.op == RowOp::head_mean) width_ /= in.b;
  if (in.op == RowOp::window) width_ = in.b;
}

void Parser::parse(const char* op, const ProgramArguments& arguments, int64_t rows, int64_t width) {
  name_ = op, rows_ = rows, width_ = all_columns_ = width, given_outs_ = &arguments.outs;
  product(rows, width, op);
  code_.clear(), operands_.clear(), outs_.clear(), prepared_.clear(), sums_.clear(), row_step_ = 1;
  for (const Tensor& t : arguments.operands) operands_.push_back(view_of(t, op, "an operand"));
  for (const Tensor& t : arguments.outs) outs_.push_back(view_of(t, op, "an output"));
  consts_.assign(arguments.consts.begin(), arguments.consts.end());
  STD_TORCH_CHECK(arguments.program.size() % 4 == 0, op, ": a row program has 4 numbers an instruction, not ",
                  arguments.program.size(), " in all");
  for (size_t i = 0; i < arguments.program.size(); i += 4) {
    const auto word = [&](size_t k) {
      const int64_t number = arguments.program[i + k];
      STD_TORCH_CHECK(number == static_cast<int32_t>(number), op, ": a row program holds ", number,
                      ", which does not fit 32 bits");
      return static_cast<int32_t>(number);
    };
    RowInstruction in{static_cast<RowOp>(word(0)), word(1), word(2), word(3)};
    at_ = static_cast<int64_t>(i / 4);
    const Spec* spec = std::find_if(std::begin(kSpecs), std::end(kSpecs), [&](const Spec& s) { return s.op == in.op; });
    STD_TORCH_CHECK(spec != std::end(kSpecs), op, ": instruction ", at_, " has the unknown opcode ", word(0));
    check(in, *spec);
    prepare(in);
    code_.push_back(in);
  }
  program_ = {code_.data(),     static_cast<int64_t>(code_.size()),
              operands_.data(), consts_.data(),
              outs_.data(),     prepared_.data(),
              sums_.data(),     row_step_};
}

}  // namespace

RowView matrix_of(const Tensor& t, const char* op, const char* name) {
  STD_TORCH_CHECK(t.is_cpu(), op, ": ", name, " must be on the CPU");
  STD_TORCH_CHECK(t.dim() == 2, op, ": ", name, " must have 2 dimensions, but has ", t.dim());
  return view_of(t, op, name);
}

const float* scales_of(const Tensor& t, const char* op) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::Float && t.is_contiguous(), op,
                  ": x_scale must be a contiguous float32 tensor on the CPU");
  return static_cast<const float*>(checked_data(t, t.numel(), op, "x_scale"));
}

void finish_program(const RowProgram& program, int64_t rows) {
  std::vector<double> total;
  for (int64_t i = 0; i < program.length; ++i) {
    const RowInstruction& in = program.code[i];
    if (in.op == RowOp::scale_tensor) {
      auto& scale = *static_cast<float*>(program.outs[in.a].data);
      scale /= 127.0f;
      if (scale < std::numeric_limits<float>::min()) scale = 0.0f;
    }
    if (in.op != RowOp::col_sum) continue;
    const float* sums = program.sums + int64_t{in.b} * 16;
    total.assign(static_cast<size_t>(in.c), 0.0);
    for (int64_t row = 0; row < rows; row += kSumRows, sums += padded_sum(in)) {
      for (int64_t c = 0; c < in.c; ++c) total[static_cast<size_t>(c)] += static_cast<double>(sums[c]);
    }
    std::copy(total.begin(), total.end(), static_cast<float*>(program.outs[in.a].data));
  }
}

const RowProgram& parse_program(const char* op, const ProgramArguments& arguments, int64_t rows, int64_t width) {
  thread_local Parser parser;
  parser.parse(op, arguments, rows, width);
  return parser.result();
}

}  // namespace gnnc
