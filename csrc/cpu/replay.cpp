// replay: runs launches of other ops, one after the other, as a program in Python would; and launcher, which returns
// the number of an op for it. The numbers of a launch are the op's, and the arguments as replay.h has them. Two more
// kinds of steps: `dense` appends a value, a tensor as it is or as a dense copy, and `zero` fills a tensor with zeros.
// Ops of gnnc_cpu_valid, which trust the ids of a CSR, are launched by the replay of gnnc_cpu_valid alone.

#include "replay.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>
#include <vector>

#include "storage.h"

namespace gnnc {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kDense = -1, kZero = -2;

struct NamedLauncher {
  std::string name;
  Launcher launcher;
  bool trusts_ids;
};

// Filled while the library is loaded, then only read.
std::vector<NamedLauncher>& launchers() {
  static std::vector<NamedLauncher> table;
  return table;
}

int64_t launcher(std::string name) {
  const auto& table = launchers();
  const auto found = std::find_if(table.begin(), table.end(), [&](const NamedLauncher& l) { return l.name == name; });
  return found == table.end() ? -1 : found - table.begin();
}

Tensor stored(LaunchReader& reader) {
  Tensor tensor = reader.tensor();
  check_stored(tensor, "replay", "a value");
  return tensor;
}

bool is_trusting(const std::string& name) { return name.rfind("gnnc_cpu_valid::", 0) == 0; }

template <bool may_trust>
void replay(Tensor steps, std::vector<Tensor> values) {
  STD_TORCH_CHECK(steps.is_cpu() && steps.scalar_type() == ScalarType::Long && steps.is_contiguous(),
                  "replay: steps must be contiguous int64 on the CPU");
  const auto* begin = static_cast<const int64_t*>(checked_data(steps, steps.numel(), "replay", "steps"));
  LaunchReader reader(begin, begin + steps.numel(), values);
  const auto& table = launchers();
  while (!reader.is_done()) {
    const int64_t step = reader.number();
    if (step == kDense) {
      Tensor tensor = stored(reader);
      values.push_back(tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor));
    } else if (step == kZero) {
      Tensor tensor = stored(reader);
      STD_TORCH_CHECK(tensor.is_contiguous(), "replay: a value that is set to zero must be contiguous");
      torch::stable::zero_(tensor);
    } else {
      STD_TORCH_CHECK(step >= 0 && step < static_cast<int64_t>(table.size()), "replay: there is no launcher ", step);
      const NamedLauncher& found = table[static_cast<size_t>(step)];
      STD_TORCH_CHECK(may_trust || !found.trusts_ids, "replay: ", found.name, " is launched by gnnc_cpu_valid.replay");
      found.launcher(reader);
    }
  }
}

}  // namespace

void add_launcher(const std::string& name, Launcher launcher) {
  launchers().push_back({name, launcher, is_trusting(name)});
}

}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) {
  m.def("launcher(str name) -> int");
  m.def("replay(Tensor steps, Tensor(a!)[] values) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CompositeExplicitAutograd, m) {
  m.impl("launcher", TORCH_BOX(&gnnc::launcher));
  m.impl("replay", TORCH_BOX(&gnnc::replay<false>));
}

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu_valid, m) { m.def("replay(Tensor steps, Tensor(a!)[] values) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu_valid, CompositeExplicitAutograd, m) {
  m.impl("replay", TORCH_BOX(&gnnc::replay<true>));
}
