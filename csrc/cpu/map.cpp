// Launcher of map.

#include "map.h"

#include <optional>

#include "launch.h"
#include "replay.h"
#include "scratch.h"

namespace gnnc {
namespace {

using torch::stable::Tensor;

constexpr int64_t kSliceValues = 64 << 10;
constexpr int64_t kSerialValues = 32 << 10;

MapArgs check(const Tensor& x, const std::optional<Tensor>& x_scale) {
  const RowView view = matrix_of(x, "map", "x");
  STD_TORCH_CHECK(view.type == Scalar::f32 || view.type == Scalar::bf16 || view.type == Scalar::i8,
                  "map: x must be float32, bfloat16 or int8");
  MapArgs m{view.data, view.type, view.stride, nullptr, 0, view.rows, view.cols, nullptr};
  if (!x_scale.has_value()) return m;
  STD_TORCH_CHECK(view.type == Scalar::i8, "map: x_scale belongs to an int8 x, and to no other");
  m.x_scale = scales_of(*x_scale, "map");
  STD_TORCH_CHECK(x_scale->numel() == 1 || x_scale->numel() == m.rows,
                  "map: x_scale must have one element, or one a row; it has ", x_scale->numel());
  m.scale_stride = x_scale->numel() == 1 ? 0 : 1;
  return m;
}

void map(Tensor x, std::optional<Tensor> x_scale, std::vector<int64_t> program, std::vector<Tensor> operands,
         std::vector<double> consts, std::vector<Tensor> outs) {
  MapArgs m = check(x, x_scale);
  m.program = &parse_program("map", {program, operands, consts, outs}, m.rows, m.width);
  if (m.rows == 0 || m.width == 0) return;
  const int64_t step = map_tile_rows(m);
  const int64_t slice = rounded(std::max<int64_t>(1, kSliceValues / m.width / step) * step, m.program->row_step);
  parallel_slices(m.rows, slice, kSerialValues / m.width + 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    auto* tile = scratch.get<float>(static_cast<size_t>(step * map_stride(m)));
    GNNC_DISPATCH(map_rows, m, begin, end, tile);
  });
  finish_program(*m.program, m.rows);
}

}  // namespace
}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) { m.def("map(Tensor x, Tensor? x_scale, " GNNC_PROGRAM_SCHEMA ") -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CPU, m) { gnnc::implement<&gnnc::map>(m, "gnnc_cpu", "map"); }
