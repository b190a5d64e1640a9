// Launcher of gemm: checks the arguments, packs the weight, and distributes blocks of rows over the threads.

#include "gemm.h"

#include <optional>
#include <vector>

#include "amx.h"
#include "launch.h"
#include "replay.h"
#include "scratch.h"

namespace gnnc {
namespace {

using torch::stable::Tensor;

constexpr int64_t kMaxIntegerDepth = 133144;     // the largest depth with 127 * 127 * depth < 2^31
constexpr int64_t kMaxWidth = int64_t{1} << 26;  // columns of all weights: their scales take 8 bytes a column
constexpr int64_t kSliceWork = 8 << 20;          // products of a slice; about 30 us in int8
constexpr int64_t kShares = 4;            // least slices of a thread; with fewer, threads would be loaded unevenly
constexpr int64_t kSerialWork = 4 << 20;  // products below which waking a thread costs more than it saves
constexpr int64_t kSerialWeights = 64 << 10;

GemmMode mode_of(int64_t mode) {
  STD_TORCH_CHECK(mode == 0 || mode == 1 || mode == 3, "gemm: mode must be 0 (float), 1 (int8) or 3 (bfloat16), not ",
                  mode);
  return static_cast<GemmMode>(mode);
}

// Stores the checked weights in g; the array is valid in this thread until the next call.
void take_weights(GemmArgs& g, const std::vector<Tensor>& weights, const std::vector<int64_t>& is_kn) {
  static thread_local std::vector<GemmWeight> taken;
  taken.clear();
  STD_TORCH_CHECK(!weights.empty() && weights.size() == is_kn.size(), "gemm: needs a weight, and the layout of each");
  for (size_t i = 0; i < weights.size(); ++i) {
    const RowView view = matrix_of(weights[i], "gemm", "w");
    STD_TORCH_CHECK(view.type == Scalar::f32, "gemm: w must be float32");
    const bool kn = is_kn[i] != 0;
    const int64_t depth = kn ? view.rows : view.cols, width = kn ? view.cols : view.rows;
    STD_TORCH_CHECK(depth == g.depth, "gemm: x has ", g.depth, " columns, but w takes ", depth);
    const int64_t first = (g.width + 15) / 16 * 16;
    STD_TORCH_CHECK(width <= kMaxWidth - first, "gemm: the weights have more than ", kMaxWidth, " columns");
    taken.push_back({static_cast<const float*>(view.data), kn ? 1 : view.stride, kn ? view.stride : 1, width, first});
    g.width = first + width;
  }
  g.weights = taken.data();
  g.weight_count = static_cast<int64_t>(taken.size());
}

void take_scale(GemmArgs& g, const std::optional<Tensor>& scale) {
  if (!scale.has_value()) {
    STD_TORCH_CHECK(g.x_type != Scalar::i8, "gemm: an int8 x needs x_scale");
    return;
  }
  STD_TORCH_CHECK(g.mode == GemmMode::i8, "gemm: x_scale has a meaning in int8 mode only");
  g.x_scale = scales_of(*scale, "gemm");
  const int64_t count = scale->numel();
  g.x_scale_is_single = count == 1;
  STD_TORCH_CHECK(count == 1 || (g.x_type == Scalar::i8 && count == g.rows),
                  "gemm: x_scale must have one element, or one a row where x is int8; it has ", count);
}

GemmArgs check(const Tensor& x, const std::optional<Tensor>& x_scale, const std::vector<Tensor>& w,
               const std::vector<int64_t>& is_kn, int64_t mode) {
  const RowView view = matrix_of(x, "gemm", "x");
  GemmArgs g{};
  g.mode = mode_of(mode);
  g.tiles = g.mode == GemmMode::bf16 && has_amx();
  g.dots = g.mode == GemmMode::bf16 && !g.tiles && has_bf16_dots();
  g.x = view.data, g.x_type = view.type, g.x_stride = view.stride;
  g.rows = view.rows, g.depth = view.cols;
  STD_TORCH_CHECK(g.x_type == Scalar::f32 || g.x_type == Scalar::bf16 || g.x_type == Scalar::i8,
                  "gemm: x must be float32, bfloat16 or int8");
  STD_TORCH_CHECK(g.x_type != Scalar::i8 || g.mode == GemmMode::i8, "gemm: an int8 x needs mode 1");
  STD_TORCH_CHECK(g.mode != GemmMode::i8 || g.depth <= kMaxIntegerDepth, "gemm: int8 sums of ", g.depth,
                  " products do not fit 32 bits; at most ", kMaxIntegerDepth, " columns");
  take_weights(g, w, is_kn);
  take_scale(g, x_scale);
  return g;
}

void pack(GemmArgs& g) {
  static thread_local Scratch packed, columns;
  const auto padded = static_cast<size_t>((g.width + 63) / 64 * 64);
  g.packed = packed.get<char>(static_cast<size_t>(GNNC_DISPATCH(gemm_packed_bytes, g)));
  g.w_scale = columns.get<float>(2 * padded);
  g.w_init = reinterpret_cast<int32_t*>(g.w_scale + padded);
  const int64_t strips = GNNC_DISPATCH(gemm_strips, g);
  const int64_t worth = g.depth * g.width < kSerialWeights ? strips + 1 : 0;
  parallel_slices(strips, 1, worth, [&](int64_t begin, int64_t end) { GNNC_DISPATCH(gemm_pack, g, begin, end); });
}

void compute(const GemmArgs& g) {
  const int64_t block = GNNC_DISPATCH(gemm_block_rows, g);
  const int64_t work =
      g.depth * (g.width + 48) + 16 * g.width + 1;  // work of a row: its quantization and its epilogue count too
  const int64_t share = g.rows / (kShares * static_cast<int64_t>(torch::stable::get_num_threads()));
  const int64_t blocks = std::max<int64_t>(1, std::min(kSliceWork / work, share) / block);
  const int64_t slice = rounded(blocks * block, g.program->row_step);
  parallel_slices(g.rows, slice, kSerialWork / work, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    auto* memory = scratch.get<char>(static_cast<size_t>(GNNC_DISPATCH(gemm_scratch_bytes, g)));
    GNNC_DISPATCH(gemm_rows, g, begin, end, memory);
  });
}

void gemm(Tensor x, std::optional<Tensor> x_scale, std::vector<Tensor> w, std::vector<int64_t> w_is_kn, int64_t mode,
          std::vector<int64_t> program, std::vector<Tensor> operands, std::vector<double> consts,
          std::vector<Tensor> outs) {
  GemmArgs g = check(x, x_scale, w, w_is_kn, mode);
  g.program = &parse_program("gemm", {program, operands, consts, outs}, g.rows, g.width);
  if (g.rows == 0 || g.width == 0 || outs.empty()) return;
  pack(g);
  compute(g);
  finish_program(*g.program, g.rows);
}

}  // namespace
}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) {
  m.def("gemm(Tensor x, Tensor? x_scale, Tensor[] w, int[] w_is_kn, int mode, " GNNC_PROGRAM_SCHEMA ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CPU, m) { gnnc::implement<&gnnc::gemm>(m, "gnnc_cpu", "gemm"); }
