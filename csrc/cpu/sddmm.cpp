// Launcher of sddmm.

#include "sddmm.h"

#include <limits>

#include "launch.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::Ids;
using sparse::MaybeTensor;
using sparse::ScalarType;
using sparse::Tensor;

constexpr int64_t kMaxIntegerWidth = 65536;

void check_tables(const sparse::Matrix& dst, const sparse::Matrix& src, const MaybeTensor& a_scale,
                  const MaybeTensor& b_scale, int64_t op, int64_t heads) {
  STD_TORCH_CHECK(dst.type == src.type, "sddmm: a and b must have one type");
  STD_TORCH_CHECK(dst.width == src.width, "sddmm: a has ", dst.width, " columns, but b has ", src.width);
  STD_TORCH_CHECK(op >= 0 && op <= 5, "sddmm: op is ", op,
                  ", but must be 0 dot, 1 add, 2 sub, 3 mul, 4 copy_src or 5 copy_dst");
  STD_TORCH_CHECK(heads >= 1 && dst.width % heads == 0, "sddmm: ", heads, " heads do not divide a width of ",
                  dst.width);
  STD_TORCH_CHECK(dst.type == ScalarType::Char || (!a_scale.has_value() && !b_scale.has_value()),
                  "sddmm: a_scale and b_scale belong to int8 a and b");
  STD_TORCH_CHECK(dst.type != ScalarType::Char || dst.width / heads <= kMaxIntegerWidth,
                  "sddmm: an int8 dot of more than ", kMaxIntegerWidth, " columns could overflow 32 bits");
}

template <Ids ids>
void sddmm(Tensor rowptr, Tensor col, Tensor a, Tensor b, MaybeTensor a_scale, MaybeTensor b_scale, int64_t op,
           int64_t heads, Tensor out) {
  const sparse::Matrix dst = sparse::matrix(a, "sddmm", "a"), src = sparse::matrix(b, "sddmm", "b");
  check_tables(dst, src, a_scale, b_scale, op, heads);
  // A copy reads the rows of one end only: the caller passes the table twice, and the rows of the other end are not
  // read.
  const bool scaled = a_scale.has_value() || b_scale.has_value();
  const bool copies_src = op == static_cast<int64_t>(EdgeOp::copy_src) && !scaled;
  const bool copies_dst = op == static_cast<int64_t>(EdgeOp::copy_dst) && !scaled;
  const int64_t num_src = copies_dst ? std::numeric_limits<int32_t>::max() : src.rows;
  const sparse::Structure<ids> structure(rowptr, col, num_src, "sddmm");
  const Csr& csr = structure.csr_of();
  STD_TORCH_CHECK(copies_src || dst.rows == csr.num_dst, "sddmm: a has ", dst.rows, " rows, but there are ",
                  csr.num_dst, " destination nodes");
  const int64_t per_edge = op == 0 ? heads : dst.width;
  const SddmmArgs args{
      csr,
      dst.data,
      src.data,
      copies_src ? 0 : dst.stride,
      copies_dst ? 0 : src.stride,
      dst.width,
      sparse::element(dst.type),
      sparse::flat<float>(a_scale, ScalarType::Float, dst.rows, "sddmm", "a_scale"),
      sparse::flat<float>(b_scale, ScalarType::Float, src.rows, "sddmm", "b_scale"),
      static_cast<EdgeOp>(op),
      heads,
      sparse::flat<float>(out, ScalarType::Float, product(csr.num_edges, per_edge, "sddmm"), "sddmm", "out")};
  sparse::for_each_chunk(args.csr, sparse::kSerialWork / 2,
                         [&](int64_t begin, int64_t end) { GNNC_DISPATCH(sddmm, args, begin, end); });
}

}  // namespace
}  // namespace gnnc

GNNC_CSR_OP(sddmm,
            "(Tensor rowptr, Tensor col, Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, int op, int heads, "
            "Tensor(a!) out) -> ()")
