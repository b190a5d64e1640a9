#pragma once

namespace gnnc {

// The instruction sets that kernels are compiled for, from the slowest to the fastest.
enum class Isa { generic, avx2, avx512 };

// Returns the instruction set that every kernel uses: the best that this CPU has, or the one that the environment
// variable GNNC_ISA names. Throws std::runtime_error if the named instruction set is unknown or cannot run on this CPU.
Isa isa();

const char* isa_name(Isa isa);

// Returns whether products of pairs of bf16 values may use vdpbf16ps. The result is false where the environment
// variable GNNC_ISA names an instruction set.
bool has_bf16_dots();

}  // namespace gnnc

// Declares the functions that a *.isa.cpp file defines, once for each instruction set.
#define GNNC_EACH_ISA(...) \
  namespace generic {      \
  __VA_ARGS__              \
  }                        \
  namespace avx2 {         \
  __VA_ARGS__              \
  }                        \
  namespace avx512 {       \
  __VA_ARGS__              \
  }
