#pragma once

// Registration of ops that a replay can launch: `implement` registers an op's function with torch, and in the table of
// launchers that `replay` reads. A launcher decodes its arguments from numbers and tensors, so that a program pays for
// one call of torch in place of one a launch.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace gnnc {

// The arguments of launches: numbers in a row, in which a tensor is its place among `values`, -1 where it is absent,
// and a list its length and its elements.
class LaunchReader {
 public:
  LaunchReader(const int64_t* begin, const int64_t* end, const std::vector<torch::stable::Tensor>& values)
      : at_(begin), end_(end), values_(values) {}

  bool is_done() const { return at_ == end_; }

  int64_t number() {
    STD_TORCH_CHECK(at_ != end_, "replay: the numbers end within a launch");
    return *at_++;
  }

  torch::stable::Tensor tensor() { return value(number()); }

  template <typename T>
  T read() {
    return read(std::type_identity<T>{});
  }

 private:
  const torch::stable::Tensor& value(int64_t place) const {
    STD_TORCH_CHECK(place >= 0 && place < static_cast<int64_t>(values_.size()), "replay: there is no value ", place,
                    " among ", values_.size());
    return values_[static_cast<size_t>(place)];
  }

  int64_t read(std::type_identity<int64_t>) { return number(); }
  bool read(std::type_identity<bool>) { return number() != 0; }
  double read(std::type_identity<double>) { return std::bit_cast<double>(number()); }
  torch::stable::Tensor read(std::type_identity<torch::stable::Tensor>) { return tensor(); }

  template <typename T>
  std::optional<T> read(std::type_identity<std::optional<T>>) {
    STD_TORCH_CHECK(at_ != end_, "replay: the numbers end within a launch");
    if (*at_ != -1) return read<T>();
    ++at_;
    return std::nullopt;
  }

  template <typename T>
  std::vector<T> read(std::type_identity<std::vector<T>>) {
    const int64_t count = number();
    STD_TORCH_CHECK(count >= 0 && count <= end_ - at_, "replay: a list of ", count,
                    " elements ends behind the numbers");
    std::vector<T> list;
    list.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) list.push_back(read<T>());
    return list;
  }

  const int64_t* at_;
  const int64_t* end_;
  const std::vector<torch::stable::Tensor>& values_;
};

using Launcher = void (*)(LaunchReader&);

// Adds a launcher to the table under the name of its op, such as "gnnc_cpu::gemm".
void add_launcher(const std::string& name, Launcher launcher);

template <auto function, typename... Parameters>
void launch(LaunchReader& reader, void (*)(Parameters...)) {
  std::tuple<std::remove_cvref_t<Parameters>...> arguments{reader.read<std::remove_cvref_t<Parameters>>()...};
  std::apply(function, std::move(arguments));
}

// Registers the function of an op that writes to its arguments and returns nothing.
template <auto function>
void implement(torch::stable::detail::StableLibrary& library, const char* space, const char* name) {
  library.impl(name, TORCH_BOX(function));
  add_launcher(std::string(space) + "::" + name, [](LaunchReader& reader) { launch<function>(reader, function); });
}

}  // namespace gnnc
