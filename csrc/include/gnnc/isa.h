#pragma once

namespace gnnc {

// From the slowest to the fastest.
enum class Isa { generic, avx2, avx512 };

// The instruction set that every kernel uses: the best this CPU has, or the one that the environment variable
// GNNC_ISA names. Throws std::runtime_error if that one is unknown or cannot run here.
Isa isa();

const char* isa_name(Isa isa);

}  // namespace gnnc

// Declares what a *.isa.cpp file defines, once for each instruction set.
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
