// Launcher of spmm.

#include "spmm.h"

#include "launch.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::Ids;
using sparse::MaybeTensor;
using sparse::ScalarType;
using sparse::Tensor;

void take_value(SpmmArgs& a, const Tensor& value, int64_t heads) {
  if (value.scalar_type() == ScalarType::Char) {
    a.integer_value = sparse::flat<int8_t>(value, ScalarType::Char, a.csr.num_edges, "spmm", "value");
    return;
  }
  a.heads = value.dim() == 2 ? value.size(1) : 1;
  STD_TORCH_CHECK(a.heads == 1 || a.heads == heads, "spmm: value has ", a.heads, " heads, but heads is ", heads);
  a.value = sparse::flat<float>(value, ScalarType::Float, product(a.csr.num_edges, a.heads, "spmm"), "spmm", "value");
}

void check_combination(const SpmmArgs& a) {
  const bool bytes = a.element == Element::i8;
  STD_TORCH_CHECK(bytes || (a.x_scale == nullptr && a.shift == nullptr && a.integer_value == nullptr),
                  "spmm: x_scale, shift and int8 values belong to an int8 x");
  STD_TORCH_CHECK(a.x_scale == nullptr || a.shift == nullptr, "spmm: give x_scale or shift, not both");
  const bool sums = a.reduce == Reduce::sum || a.reduce == Reduce::mean;
  STD_TORCH_CHECK(a.integer_value == nullptr || (sums && a.x_scale == nullptr && a.shift == nullptr),
                  "spmm: int8 values go with sum and mean, without x_scale and shift");
}

// The kernel shifts by these: an integer power of two for each of 8 buckets.
void check_shifts(const uint8_t* shift, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(shift[i] <= 7, "spmm: shift[", i, "] is ", int{shift[i]}, ", but must be in 0..7");
  }
}

SpmmArgs check(const Csr& csr, const sparse::Matrix& m, const MaybeTensor& value, const MaybeTensor& x_scale,
               const MaybeTensor& shift, int64_t reduce, int64_t heads) {
  STD_TORCH_CHECK(reduce >= 0 && reduce <= 3, "spmm: reduce is ", reduce,
                  ", but must be 0 sum, 1 mean, 2 max or 3 min");
  STD_TORCH_CHECK(heads >= 1 && m.width % heads == 0, "spmm: ", heads, " heads do not divide a width of ", m.width);
  SpmmArgs a{};
  a.csr = csr;
  a.x = m.data;
  a.width = m.width;
  a.x_stride = m.stride;
  a.element = sparse::element(m.type);
  a.reduce = static_cast<Reduce>(reduce);
  a.heads = 1;
  if (value.has_value()) take_value(a, *value, heads);
  a.x_scale = sparse::flat<float>(x_scale, ScalarType::Float, m.rows, "spmm", "x_scale");
  a.shift = sparse::flat<uint8_t>(shift, ScalarType::Byte, m.rows, "spmm", "shift");
  check_combination(a);
  return a;
}

template <Ids ids>
void spmm(Tensor rowptr, MaybeTensor col, MaybeTensor value, Tensor x, MaybeTensor x_scale, MaybeTensor shift,
          int64_t reduce, int64_t heads, std::vector<int64_t> program, std::vector<Tensor> operands,
          std::vector<double> consts, std::vector<Tensor> outs) {
  const sparse::Matrix m = sparse::matrix(x, "spmm", "x");
  const sparse::Structure<ids> structure(rowptr, col, m.rows, "spmm");
  SpmmArgs a = check(structure.csr_of(), m, value, x_scale, shift, reduce, heads);
  if (ids == Ids::any && a.shift != nullptr) check_shifts(a.shift, m.rows);
  a.program = &parse_program("spmm", {program, operands, consts, outs}, a.csr.num_dst, a.width);
  if (a.width == 0) return;
  sparse::for_each_chunk(
      a.csr, sparse::kSerialWork / 2, [&](int64_t begin, int64_t end) { GNNC_DISPATCH(spmm, a, begin, end); },
      a.program->row_step);
  finish_program(*a.program, a.csr.num_dst);
}

}  // namespace
}  // namespace gnnc

GNNC_CSR_OP(spmm,
            "(Tensor rowptr, Tensor? col, Tensor? value, Tensor x, Tensor? x_scale, Tensor? shift, int reduce, "
            "int heads, " GNNC_PROGRAM_SCHEMA ") -> ()")
