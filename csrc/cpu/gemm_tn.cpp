// Launcher of gemm_tn.

#include "gemm_tn.h"

#include <algorithm>
#include <memory>
#include <new>

#include "amx.h"
#include "launch.h"
#include "replay.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::Matrix;
using sparse::MaybeTensor;
using sparse::ScalarType;
using sparse::Tensor;

constexpr int64_t kChunkRows = 4096;
constexpr int64_t kMostChunks = 16;
constexpr int64_t kMostValues = 1 << 23;  // floats of all sums

// Adds up the sums of the chunks, each of `values` floats; `exchanged` writes the transpose.
void add_up(const GemmTnArgs& g, const float* sums, int64_t chunks, int64_t values, bool exchanged, float* out) {
  for (int64_t k = 0; k < g.inner; ++k) {
    for (int64_t c = 0; c < g.outer; ++c) {
      float sum = 0.0f;
      for (int64_t i = 0; i < chunks; ++i) sum += sums[i * values + k * g.padded + c];
      out[exchanged ? c * g.inner + k : k * g.outer + c] = sum;
    }
  }
}

GradMatrix grad_matrix(const Matrix& m, const MaybeTensor& scale, bool rounds, const char* name) {
  const bool is_quantized = m.type == ScalarType::Char;
  STD_TORCH_CHECK(is_quantized == scale.has_value(), "gemm_tn: ", name,
                  is_quantized ? " is int8 and needs a scale for each row" : " is not int8 and takes no scale");
  const auto* scales =
      is_quantized ? sparse::flat<float>(*scale, ScalarType::Float, m.rows, "gemm_tn", "a scale") : nullptr;
  STD_TORCH_CHECK(!rounds || m.type == ScalarType::Float, "gemm_tn: ", name, " is not float32, which alone is rounded");
  const GradElement element = rounds                           ? GradElement::rounded
                              : is_quantized                   ? GradElement::i8
                              : m.type == ScalarType::BFloat16 ? GradElement::bf16
                                                               : GradElement::f32;
  return {m.data, scales, element, m.stride};
}

bool is_bf16(GradElement element) { return element == GradElement::bf16 || element == GradElement::rounded; }

GradProducts products_of(GradElement a, GradElement b) {
  if (has_amx() && (a != GradElement::f32 || b != GradElement::f32)) return GradProducts::tiles;
  if (isa() == Isa::avx512 && (a == GradElement::i8 || b == GradElement::i8)) return GradProducts::integers;
  return has_bf16_dots() && is_bf16(a) && is_bf16(b) ? GradProducts::dots : GradProducts::floats;
}

// Returns whether the kernel computes the transpose of the result: it has rules for which matrix is on the left.
bool exchanges(const GemmTnArgs& g) {
  if (g.products == GradProducts::tiles) return g.a.element == GradElement::f32;
  if (g.products != GradProducts::integers) return false;
  return g.a.element != GradElement::i8 || (g.b.element == GradElement::i8 && g.outer > g.inner);
}

void gemm_tn(Tensor a, Tensor b, Tensor out, MaybeTensor a_scale, MaybeTensor b_scale, bool rounds_a, bool rounds_b) {
  const Matrix left = sparse::matrix(a, "gemm_tn", "a"), right = sparse::matrix(b, "gemm_tn", "b");
  const GradMatrix rows_of_a = grad_matrix(left, a_scale, rounds_a, "a");
  const GradMatrix rows_of_b = grad_matrix(right, b_scale, rounds_b, "b");
  STD_TORCH_CHECK(left.rows == right.rows, "gemm_tn: a has ", left.rows, " rows, but b has ", right.rows);
  auto* result =
      sparse::flat<float>(out, ScalarType::Float, product(left.width, right.width, "gemm_tn"), "gemm_tn", "out");
  check_apart({{out, "out"}}, {{a, "a"}, {b, "b"}}, "gemm_tn");
  if (left.width == 0 || right.width == 0) return;
  GemmTnArgs g{rows_of_a, rows_of_b, left.width, right.width, 0, products_of(rows_of_a.element, rows_of_b.element)};
  const bool exchanged = exchanges(g);
  if (exchanged) g = {g.b, g.a, g.outer, g.inner, 0, g.products};
  g.padded = rounded(g.outer, kGradColumns);
  const int64_t values = product(rounded(g.inner, kGradColumns), g.padded, "gemm_tn");
  const int64_t most = std::clamp<int64_t>(kMostValues / values, 1, kMostChunks);
  const int64_t chunks = std::clamp<int64_t>(left.rows / kChunkRows, 1, most);
  try {
    const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(chunks * values)]);
    parallel_slices(chunks, 1, 2, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        GNNC_DISPATCH(gemm_tn, g, left.rows * i / chunks, left.rows * (i + 1) / chunks, sums.get() + i * values);
      }
    });
    add_up(g, sums.get(), chunks, values, exchanged, result);
  } catch (const std::bad_alloc&) {
    STD_TORCH_CHECK(false, "gemm_tn: there is no memory for ", chunks, " sums of ", values, " floats");
  }
}

}  // namespace
}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) {
  m.def(
      "gemm_tn(Tensor a, Tensor b, Tensor(a!) out, Tensor? a_scale=None, Tensor? b_scale=None, "
      "bool rounds_a=False, bool rounds_b=False) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CPU, m) { gnnc::implement<&gnnc::gemm_tn>(m, "gnnc_cpu", "gemm_tn"); }
