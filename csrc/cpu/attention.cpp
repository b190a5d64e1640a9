// Launcher of attention: checks the arguments, prepares the table of source factors, and runs the kernel in parallel.

#include "attention.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "launch.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::Ids;
using sparse::MaybeTensor;
using sparse::ScalarType;
using sparse::Tensor;

int64_t check_dot_width(const MaybeTensor& a_src, int64_t heads) {
  STD_TORCH_CHECK(a_src.has_value() && a_src->dim() == 2 && a_src->size(1) % heads == 0,
                  "attention: a_src must be [num_src, heads * D]");
  return a_src->size(1) / heads;
}

AttentionArgs check(const Csr& csr, const sparse::Matrix& m, const MaybeTensor& x_scale, int64_t kind,
                    const MaybeTensor& a_src, const MaybeTensor& a_dst, const MaybeTensor& edge, int64_t heads) {
  STD_TORCH_CHECK(kind >= 0 && kind <= 2, "attention: kind is ", kind, ", but must be 0 additive, 1 dot or 2 edge");
  STD_TORCH_CHECK(heads >= 1 && m.width % heads == 0, "attention: ", heads, " heads do not divide a width of ",
                  m.width);
  STD_TORCH_CHECK(x_scale.has_value() == (m.type == ScalarType::Char),
                  "attention: x_scale belongs to an int8 x, and to no other");
  STD_TORCH_CHECK((kind != 2) == a_src.has_value() && (kind != 2) == a_dst.has_value(),
                  "attention: a_src and a_dst belong to kinds 0 and 1, and both are needed there");
  STD_TORCH_CHECK(kind != 2 || edge.has_value(), "attention: kind 2 needs edge");
  AttentionArgs a{};
  a.csr = csr;
  a.x = m.data;
  a.width = m.width;
  a.x_stride = m.stride;
  a.element = sparse::element(m.type);
  a.x_scale = sparse::flat<float>(x_scale, ScalarType::Float, m.rows, "attention", "x_scale");
  a.kind = static_cast<Logit>(kind);
  a.heads = heads;
  a.dot_width = kind == 1 ? check_dot_width(a_src, heads) : 1;
  const int64_t width = product(heads, a.dot_width, "attention");
  a.a_src = sparse::flat<float>(a_src, ScalarType::Float, product(m.rows, width, "attention"), "attention", "a_src");
  a.a_dst =
      sparse::flat<float>(a_dst, ScalarType::Float, product(a.csr.num_dst, width, "attention"), "attention", "a_dst");
  a.edge =
      sparse::flat<float>(edge, ScalarType::Float, product(a.csr.num_edges, heads, "attention"), "attention", "edge");
  return a;
}

constexpr int64_t kTopValues = 65536;  // values of a_src that a thread scans at a time, a multiple of kTops

// Returns whether rows may use an upper bound of their logits in place of the maximum (bounded_softmax.isa.h): eps must
// be negligible.
bool bounds_logits(const AttentionArgs& a) {
  const bool whole = a.heads <= kTops && kTops % a.heads == 0;
  const bool plain = a.kind == Logit::additive && a.edge == nullptr && a.alpha_out == nullptr;
  return plain && whole && a.eps <= 1e-9f && a.slope >= 0.0f && a.slope <= 1.0f;
}

// Finds the largest a_src of each head, repeated with a period of heads over kTops values. A NaN in a_src may or may
// not reach the result: every row that reads the NaN detects it.
void find_source_tops(const AttentionArgs& a, int64_t rows, float (&tops)[kTops]) {
  using Lanes = std::array<float, kTops>;
  Lanes none;
  none.fill(-std::numeric_limits<float>::infinity());
  const int64_t count = rows * a.heads;
  std::vector<Lanes> found(static_cast<size_t>(count / kTopValues + 1), none);
  parallel_slices(count, kTopValues, kTopValues, [&](int64_t begin, int64_t end) {
    Lanes lanes = none;
    for (int64_t i = begin; i < end; i += kTops) {
      for (int64_t lane = 0; lane < std::min<int64_t>(kTops, end - i); ++lane) {
        lanes[lane] = std::max(lanes[lane], a.a_src[i + lane]);
      }
    }
    found[static_cast<size_t>(begin / kTopValues)] = lanes;
  });
  std::copy(none.begin(), none.end(), tops);
  for (const Lanes& lanes : found) {
    for (int64_t lane = 0; lane < kTops; ++lane) {
      for (int64_t same = lane % a.heads; same < kTops; same += a.heads) tops[lane] = std::max(tops[lane], lanes[same]);
    }
  }
}

template <Ids ids>
void attention(Tensor rowptr, Tensor col, Tensor x, MaybeTensor x_scale, int64_t kind, MaybeTensor a_src,
               MaybeTensor a_dst, MaybeTensor edge, double scale, double slope, double eps, int64_t heads,
               MaybeTensor alpha_out, MaybeTensor factors, std::vector<int64_t> program, std::vector<Tensor> operands,
               std::vector<double> consts, std::vector<Tensor> outs) {
  const sparse::Matrix m = sparse::matrix(x, "attention", "x");
  const sparse::Structure<ids> structure(rowptr, col, m.rows, "attention");
  AttentionArgs a = check(structure.csr_of(), m, x_scale, kind, a_src, a_dst, edge, heads);
  a.scale = static_cast<float>(scale);
  a.slope = static_cast<float>(slope);
  a.eps = static_cast<float>(eps);
  a.alpha_out = sparse::flat<float>(alpha_out, ScalarType::Float, product(a.csr.num_edges, heads, "attention"),
                                    "attention", "alpha_out");
  float tops[kTops];
  if (factors.has_value()) {
    STD_TORCH_CHECK(bounds_logits(a),
                    "attention: factors belong to leaky_relu(a_dst + a_src) of a slope of 0 to 1 and 1, 2, 4, 8 or 16 "
                    "heads, with an eps of at most 1e-9 and without alpha_out");
    const int64_t rows = x.size(0), slice = kTopValues / heads;
    a.factors = sparse::flat<float>(factors, ScalarType::Float, rows * factors_of(heads), "attention", "factors");
    find_source_tops(a, rows, tops);
    a.src_tops = tops;
    parallel_slices(rows, slice, slice,
                    [&](int64_t begin, int64_t end) { GNNC_DISPATCH(source_factors, a, begin, end); });
  }
  a.program = &parse_program("attention", {program, operands, consts, outs}, a.csr.num_dst, a.width);
  sparse::for_each_chunk(
      a.csr, sparse::kSerialWork / 4, [&](int64_t begin, int64_t end) { GNNC_DISPATCH(attention, a, begin, end); },
      a.program->row_step);
  finish_program(*a.program, a.csr.num_dst);
}

}  // namespace
}  // namespace gnnc

GNNC_CSR_OP(attention,
            "(Tensor rowptr, Tensor col, Tensor x, Tensor? x_scale, int kind, Tensor? a_src, Tensor? a_dst, "
            "Tensor? edge, float scale, float slope, float eps, int heads, Tensor(b!)? alpha_out, "
            "Tensor(c!)? factors, " GNNC_PROGRAM_SCHEMA ") -> ()")
