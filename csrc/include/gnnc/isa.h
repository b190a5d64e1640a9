#pragma once

namespace gnnc {

enum class Isa { generic, avx512 };

// The instruction set that every kernel uses: the best this CPU has, or the one that the environment variable
// GNNC_ISA names. Throws std::runtime_error if that one is unknown or cannot run here.
Isa isa();

const char* isa_name(Isa isa);

}  // namespace gnnc
