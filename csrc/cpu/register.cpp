#include <torch/csrc/stable/library.h>

#include <string>

#include "amx.h"
#include "gnnc/isa.h"

namespace {

std::string isa() { return gnnc::isa_name(gnnc::isa()); }

}  // namespace

// Each op's file adds its ops with STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m).
STABLE_TORCH_LIBRARY(gnnc_cpu, m) {
  m.def("isa() -> str");
  m.def("has_amx() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("has_amx", TORCH_BOX(&gnnc::has_amx));
}
