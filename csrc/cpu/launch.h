#pragma once

// What every launcher needs: the four arguments of the row program, and the choice of the instruction set.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "gnnc/isa.h"
#include "gnnc/row_program.h"

#define GNNC_PROGRAM_SCHEMA "int[] program, Tensor[] operands, float[] consts, Tensor(z!)[] outs"

// Calls gnnc::<isa>::function.
#ifdef GNNC_HAVE_AVX512
#define GNNC_DISPATCH(function, ...)                                                     \
  (::gnnc::isa() == ::gnnc::Isa::avx512 ? ::gnnc::avx512::function(__VA_ARGS__) \
                                        : ::gnnc::generic::function(__VA_ARGS__))
#else
#define GNNC_DISPATCH(function, ...) ::gnnc::generic::function(__VA_ARGS__)
#endif

namespace gnnc {

// The last four arguments of an op, as they arrive.
struct ProgramArguments {
  const std::vector<int64_t>& program;
  const std::vector<torch::stable::Tensor>& operands;
  const std::vector<double>& consts;
  const std::vector<torch::stable::Tensor>& outs;
};

// Checks every instruction against the shapes and types of what it names, for a kernel that makes `rows` rows of
// `width` floats, and prepares it. The result lives in this thread until its next call.
const RowProgram& parse_program(const char* op, const ProgramArguments& arguments, int64_t rows, int64_t width);

}  // namespace gnnc
