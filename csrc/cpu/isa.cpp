#include "gnnc/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace gnnc {
namespace {

bool has_avx512() {
#ifdef GNNC_HAVE_AVX512
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

Isa choose() {
  const char* forced = std::getenv("GNNC_ISA");
  const std::string name = forced ? forced : "";
  if (name.empty()) return has_avx512() ? Isa::avx512 : Isa::generic;
  if (name == "generic") return Isa::generic;
  if (name != "avx512") {
    throw std::runtime_error("GNNC_ISA is '" + name + "'; set it to generic or avx512, or unset it");
  }
  if (!has_avx512()) {
    throw std::runtime_error(
        "GNNC_ISA is avx512, which this CPU or build lacks (F, BW, DQ, VL, VNNI, VBMI are needed); "
        "set it to generic, or unset it");
  }
  return Isa::avx512;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* isa_name(Isa isa) { return isa == Isa::avx512 ? "avx512" : "generic"; }

}  // namespace gnnc
