#include "gnnc/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#ifdef GNNC_X86
#include <cpuid.h>
#endif

namespace gnnc {
namespace {

constexpr Isa kAll[] = {Isa::avx512, Isa::avx2, Isa::generic};  // all instruction sets, the fastest first

bool runs(Isa isa) {
#ifdef GNNC_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (isa == Isa::avx2) return avx2;
  if (isa == Isa::avx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("bmi");
  }
#endif
  return isa == Isa::generic;
}

Isa choose() {
  const char* forced = std::getenv("GNNC_ISA");
  const std::string name = forced ? forced : "";
  for (const Isa isa : kAll) {
    if (name.empty() ? runs(isa) : name == isa_name(isa) && runs(isa)) return isa;
    if (name != isa_name(isa)) continue;
    throw std::runtime_error("GNNC_ISA is " + name +
                             ", which this CPU or build lacks (avx512 needs F, BW, DQ, VL, VNNI, VBMI and BMI; avx2 "
                             "needs FMA and BMI2); set it to generic, or unset it");
  }
  throw std::runtime_error("GNNC_ISA is '" + name + "'; set it to generic, avx2 or avx512, or unset it");
}

bool finds_bf16_dots() {
#ifdef GNNC_X86
  constexpr unsigned kBf16 = 1u << 5;  // of leaf 7, subleaf 1, eax
  unsigned a = 0, b = 0, c = 0, d = 0;
  return isa() == Isa::avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kBf16) != 0;
#else
  return false;
#endif
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* isa_name(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "generic"; }

bool has_bf16_dots() {
  static const bool found = std::getenv("GNNC_ISA") == nullptr && finds_bf16_dots();
  return found;
}

}  // namespace gnnc
