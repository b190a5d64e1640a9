#pragma once

namespace gnnc {

// Returns whether products of bf16 values may use AMX, whose tiles the first call asks of the operating system. The
// result is false where the environment variable GNNC_ISA names an instruction set.
bool has_amx();

}  // namespace gnnc
