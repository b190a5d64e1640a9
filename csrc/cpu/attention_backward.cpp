// Launchers of both passes of attention_backward.

#include "attention_backward.h"

#include <cstring>
#include <memory>
#include <new>

#include "launch.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::Ids;
using sparse::MaybeTensor;
using sparse::ScalarType;
using sparse::Tensor;

// The values of half of the logits as floats; of bf16 values a copy.
class Halves {
 public:
  Halves(const Tensor& t, int64_t numel, const char* op, const char* name) {
    if (t.scalar_type() != ScalarType::BFloat16) {
      data_ = sparse::flat<float>(t, ScalarType::Float, numel, op, name);
      return;
    }
    const auto* narrow = sparse::flat<uint16_t>(t, ScalarType::BFloat16, numel, op, name);
    copy_.reset(new float[static_cast<size_t>(numel)]);
    torch::stable::parallel_for(0, numel, kSerialCopy, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const uint32_t bits = static_cast<uint32_t>(narrow[i]) << 16;
        std::memcpy(&copy_[static_cast<size_t>(i)], &bits, sizeof bits);
      }
    });
    data_ = copy_.get();
  }
  const float* data() const { return data_; }

 private:
  static constexpr int64_t kSerialCopy = 65536;
  std::unique_ptr<float[]> copy_;
  const float* data_;
};

// Returns the rows at one end of the edges, whose scales belong to int8 rows.
EndRows end_of(const char* op, const sparse::Matrix& rows, const MaybeTensor& scale, const char* name) {
  STD_TORCH_CHECK((rows.type == ScalarType::Char) == scale.has_value(), op, ": give scales of the rows of ", name,
                  " if they are int8, and else none");
  return {rows.data, rows.stride, sparse::element(rows.type),
          sparse::flat<float>(scale, ScalarType::Float, rows.rows, op, "a scale")};
}

// Returns the checked sizes of both passes. By rows, `own` is the gradient, of the rows of the CSR, and `other` is x;
// by columns the reverse. a_src has a row for each row of x.
AttentionEnds ends_of(const char* op, const Csr& csr, const sparse::Matrix& own, const sparse::Matrix& other,
                      int64_t heads, double slope) {
  STD_TORCH_CHECK(own.width == other.width, op, ": x and grad have rows of ", own.width, " and ", other.width,
                  " elements");
  STD_TORCH_CHECK(heads >= 1 && own.width % heads == 0, op, ": ", heads, " heads do not divide a width of ", own.width);
  STD_TORCH_CHECK(own.rows == csr.num_dst, op, ": there are ", csr.num_dst, " rows of edges, but ", own.rows,
                  " rows of features");
  AttentionEnds n{};
  n.csr = csr;
  n.width = own.width;
  n.heads = heads;
  n.slope = static_cast<float>(slope);
  return n;
}

template <Ids ids>
void attention_backward_rows(Tensor rowptr, Tensor col, Tensor a_dst, Tensor a_src, Tensor x, Tensor grad,
                             MaybeTensor x_scale, MaybeTensor grad_scale, double slope, double eps, int64_t heads,
                             Tensor da_dst, Tensor statistics) {
  const char* op = "attention_backward_rows";
  const sparse::Matrix sent = sparse::matrix(x, op, "x"), received = sparse::matrix(grad, op, "grad");
  const sparse::Structure<ids> structure(rowptr, col, sent.rows, op);
  AttentionRowsArgs a{};
  a.ends = ends_of(op, structure.csr_of(), received, sent, heads, slope);
  a.ends.x = end_of(op, sent, x_scale, "x");
  a.ends.grad = end_of(op, received, grad_scale, "grad");
  const int64_t values = product(received.rows, heads, op);
  const Halves source(a_src, product(sent.rows, heads, op), op, "a_src"), destination(a_dst, values, op, "a_dst");
  a.ends.a_src = source.data();
  a.a_dst = destination.data();
  a.eps = static_cast<float>(eps);
  a.da_dst = sparse::flat<float>(da_dst, ScalarType::Float, values, op, "da_dst");
  a.statistics = sparse::flat<float>(statistics, ScalarType::Float, product(4, values, op), op, "statistics");
  check_apart({{da_dst, "da_dst"}, {statistics, "statistics"}},
              {{rowptr, "rowptr"}, {col, "col"}, {a_dst, "a_dst"}, {a_src, "a_src"}, {x, "x"}, {grad, "grad"}}, op);
  sparse::for_each_chunk(a.ends.csr, sparse::kSerialWork / 4,
                         [&](int64_t begin, int64_t end) { GNNC_DISPATCH(attention_backward_rows, a, begin, end); });
}

// Adds up the partial sums of side 0, att_dst, or 1, att_src.
void add_up(const AttentionColumnsArgs& a, int64_t side, float* out) {
  if (out == nullptr) return;
  const int64_t count = (a.ends.csr.num_dst + kSumRows - 1) / kSumRows;
  std::fill_n(out, a.ends.width, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    const float* part = a.sums + (2 * i + side) * a.sum_width;
    for (int64_t c = 0; c < a.ends.width; ++c) out[c] += part[c];
  }
}

template <Ids ids>
void attention_backward_columns(Tensor rowptr, Tensor col, Tensor a_src, Tensor statistics, Tensor x, Tensor grad,
                                MaybeTensor x_scale, MaybeTensor grad_scale, MaybeTensor att_dst, MaybeTensor att_src,
                                MaybeTensor da_dst, double slope, int64_t heads, Tensor da_src, MaybeTensor datt_dst,
                                MaybeTensor datt_src, std::vector<int64_t> program, std::vector<Tensor> operands,
                                std::vector<double> consts, std::vector<Tensor> outs) {
  const char* op = "attention_backward_columns";
  const sparse::Matrix sent = sparse::matrix(x, op, "x"), received = sparse::matrix(grad, op, "grad");
  const sparse::Structure<ids> structure(rowptr, col, received.rows, op);
  AttentionColumnsArgs a{};
  a.ends = ends_of(op, structure.csr_of(), sent, received, heads, slope);
  AttentionEnds& n = a.ends;
  n.x = end_of(op, sent, x_scale, "x");
  n.grad = end_of(op, received, grad_scale, "grad");
  const int64_t values = product(sent.rows, heads, op), rows = product(received.rows, heads, op);
  const Halves source(a_src, values, op, "a_src");
  n.a_src = source.data();
  a.statistics = sparse::flat<float>(statistics, ScalarType::Float, product(4, rows, op), op, "statistics");
  STD_TORCH_CHECK(att_dst.has_value() == da_dst.has_value(), op, ": give att_dst and da_dst, or none of them");
  a.att_dst = sparse::flat<float>(att_dst, ScalarType::Float, n.width, op, "att_dst");
  a.att_src = sparse::flat<float>(att_src, ScalarType::Float, n.width, op, "att_src");
  a.da_dst = sparse::flat<float>(da_dst, ScalarType::Float, values, op, "da_dst");
  a.da_src = sparse::flat<float>(da_src, ScalarType::Float, values, op, "da_src");
  float* weights[2] = {sparse::flat<float>(datt_dst, ScalarType::Float, n.width, op, "datt_dst"),
                       sparse::flat<float>(datt_src, ScalarType::Float, n.width, op, "datt_src")};
  check_apart({{da_src, "da_src"}}, {{rowptr, "rowptr"}, {col, "col"}, {a_src, "a_src"}, {x, "x"}, {grad, "grad"}}, op);
  a.program = &parse_program(op, {program, operands, consts, outs}, n.csr.num_dst, n.width);
  a.sum_width = rounded(n.width, 16);
  const bool sums = weights[0] != nullptr || weights[1] != nullptr;
  const int64_t parts = (n.csr.num_dst + kSumRows - 1) / kSumRows;
  try {
    const std::unique_ptr<float[]> partial(sums ? new float[static_cast<size_t>(2 * parts * a.sum_width)]() : nullptr);
    a.sums = partial.get();
    sparse::for_each_chunk(
        n.csr, sparse::kSerialWork / 4,
        [&](int64_t begin, int64_t end) { GNNC_DISPATCH(attention_backward_columns, a, begin, end); },
        sums ? kSumRows : a.program->row_step);
    for (int64_t side = 0; side < 2; ++side) add_up(a, side, weights[side]);
  } catch (const std::bad_alloc&) {
    STD_TORCH_CHECK(false, op, ": there is no memory for the sums of ", n.csr.num_dst, " rows");
  }
  finish_program(*a.program, n.csr.num_dst);
}

}  // namespace
}  // namespace gnnc

GNNC_CSR_OP(attention_backward_rows,
            "(Tensor rowptr, Tensor col, Tensor a_dst, Tensor a_src, Tensor x, Tensor grad, Tensor? x_scale, "
            "Tensor? grad_scale, float slope, float eps, int heads, Tensor(a!) da_dst, Tensor(b!) statistics) -> ()")
GNNC_CSR_OP(attention_backward_columns,
            "(Tensor rowptr, Tensor col, Tensor a_src, Tensor statistics, Tensor x, Tensor grad, Tensor? x_scale, "
            "Tensor? grad_scale, Tensor? att_dst, "
            "Tensor? att_src, Tensor? da_dst, float slope, int heads, Tensor(a!) da_src, Tensor(b!)? datt_dst, "
            "Tensor(c!)? datt_src, " GNNC_PROGRAM_SCHEMA ") -> ()")
