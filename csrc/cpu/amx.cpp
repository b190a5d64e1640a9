#include "amx.h"

#include <cstdlib>

#include "gnnc/isa.h"

#if defined(GNNC_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace gnnc {
namespace {

#if defined(GNNC_X86) && defined(__linux__)
constexpr unsigned kBf16AndTiles = 1u << 22 | 1u << 24;  // of leaf 7, edx
constexpr long kRequestPermission = 0x1023;              // ARCH_REQ_XCOMP_PERM of arch_prctl
constexpr long kTileData = 18;                           // XFEATURE_XTILEDATA

bool grants_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (isa() != Isa::avx512 || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  return (d & kBf16AndTiles) == kBf16AndTiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool grants_tiles() { return false; }
#endif

}  // namespace

bool has_amx() {
  static const bool granted = std::getenv("GNNC_ISA") == nullptr && grants_tiles();
  return granted;
}

}  // namespace gnnc
