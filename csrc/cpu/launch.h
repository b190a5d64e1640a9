#pragma once

// Parts that every launcher shares: the four arguments of the row program, and the dispatch by instruction set.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "gnnc/isa.h"
#include "gnnc/row_program.h"
#include "storage.h"

#define GNNC_PROGRAM_SCHEMA "int[] program, Tensor[] operands, float[] consts, Tensor(z!)[] outs"

// Calls gnnc::<isa>::function for the instruction set of this process.
#ifdef GNNC_X86
#define GNNC_DISPATCH(function, ...)                                            \
  (::gnnc::isa() == ::gnnc::Isa::avx512 ? ::gnnc::avx512::function(__VA_ARGS__) \
   : ::gnnc::isa() == ::gnnc::Isa::avx2 ? ::gnnc::avx2::function(__VA_ARGS__)   \
                                        : ::gnnc::generic::function(__VA_ARGS__))
#else
#define GNNC_DISPATCH(function, ...) ::gnnc::generic::function(__VA_ARGS__)
#endif

namespace gnnc {

// The last four arguments of an op, as torch passes them.
struct ProgramArguments {
  const std::vector<int64_t>& program;
  const std::vector<torch::stable::Tensor>& operands;
  const std::vector<double>& consts;
  const std::vector<torch::stable::Tensor>& outs;
};

// Checks every instruction against the shapes and types of its arguments, for a kernel that computes `rows` rows of
// `width` floats, and prepares the program. The result is valid in this thread until its next call.
const RowProgram& parse_program(const char* op, const ProgramArguments& arguments, int64_t rows, int64_t width);

// Writes the sums and the scales of all rows, after the kernel has run the program on each.
void finish_program(const RowProgram& program, int64_t rows);

// Returns a checked view of a matrix argument: adjacent columns, rows any stride apart.
RowView matrix_of(const torch::stable::Tensor& t, const char* op, const char* name);

// Returns the scales of an int8 matrix: fp32, one element or one a row.
const float* scales_of(const torch::stable::Tensor& t, const char* op);

// Returns `count` rounded up to a multiple of `step`.
constexpr int64_t rounded(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// Runs body(begin, end) in parallel over slices of at most `slice` of `count` items. Threads take slices from one
// atomic counter, so a slow core gets fewer; fewer than `worth` items run on this thread alone.
template <typename Body>
void parallel_slices(int64_t count, int64_t slice, int64_t worth, const Body& body) {
  const int64_t slices = (count + slice - 1) / slice;
  const int64_t threads =
      count < worth ? 1 : std::min<int64_t>(slices, static_cast<int64_t>(torch::stable::get_num_threads()));
  if (threads <= 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < slices;) {
      body(i * slice, std::min(count, (i + 1) * slice));
    }
  });
}

}  // namespace gnnc
