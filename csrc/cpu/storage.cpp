// The checks of storage.h; and first_unstored, which returns the index of the first of some tensors whose storage does
// not hold its elements, or -1. Compiled programs call it on the tensors of a call before anything reads them. It
// touches no element, so it takes tensors of every device.

#include "storage.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <limits>
#include <vector>

namespace gnnc {
namespace {

using torch::stable::Tensor;

constexpr int64_t kTooMany = std::numeric_limits<int64_t>::max();

int64_t storage_bytes(const Tensor& t) {
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
  return bytes;
}

// Returns the number of elements from the first to the last that a tensor's shape and strides address.
int64_t addressed(const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t last = 0;
  bool fits = true;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    int64_t step = 0;
    fits = fits && !__builtin_mul_overflow(sizes[d] - 1, strides[d], &step) && step >= 0 &&
           !__builtin_add_overflow(last, step, &last);
  }
  return fits && last < kTooMany ? last + 1 : kTooMany;
}

// Returns whether `count` elements from a tensor's first lie in its storage.
bool is_stored(const Tensor& t, int64_t count) {
  if (count <= 0) return true;
  const int64_t held = storage_bytes(t) / static_cast<int64_t>(t.element_size()), offset = t.storage_offset();
  return offset >= 0 && offset <= held && count <= held - offset;
}

bool is_stored(const Tensor& t) { return is_stored(t, t.is_contiguous() ? t.numel() : addressed(t)); }

bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()) % t.element_size() == 0; }

int64_t first_unstored(std::vector<Tensor> tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!is_stored(tensors[i])) return static_cast<int64_t>(i);
  }
  return -1;
}

// The bytes that a tensor addresses.
struct Memory {
  const char* begin;
  int64_t bytes;
};

Memory memory_of(const Tensor& t) {
  return {static_cast<const char*>(t.data_ptr()), addressed(t) * static_cast<int64_t>(t.element_size())};
}

bool overlap(const Memory& a, const Memory& b) {
  return a.bytes > 0 && b.bytes > 0 && a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

}  // namespace

int64_t product(int64_t a, int64_t b, const char* op) {
  int64_t result = 0;
  STD_TORCH_CHECK(!__builtin_mul_overflow(a, b, &result), op, ": ", a, " x ", b, " elements do not fit 64 bits");
  return result;
}

int64_t span_of(int64_t rows, int64_t width, int64_t stride, const char* op) {
  if (rows <= 0 || width <= 0) return 0;
  int64_t result = 0;
  STD_TORCH_CHECK(!__builtin_mul_overflow(rows - 1, stride, &result) && !__builtin_add_overflow(result, width, &result),
                  op, ": ", rows, " rows ", stride, " elements apart do not fit 64 bits");
  return result;
}

void* checked_data(const Tensor& t, int64_t count, const char* op, const char* name) {
  if (count <= 0) return t.data_ptr();
  STD_TORCH_CHECK(is_stored(t, count), op, ": the storage of ", name, " has ", storage_bytes(t), " bytes, but ", name,
                  " addresses ", count, " elements of ", t.element_size(), " bytes from element ", t.storage_offset(),
                  ": the storage was freed or shortened, or its rows lack their padding");
  STD_TORCH_CHECK(is_aligned(t), op, ": the address of ", name, " is no multiple of the ", t.element_size(),
                  " bytes of its elements");
  return t.data_ptr();
}

void check_stored(const Tensor& t, const char* op, const char* name) {
  STD_TORCH_CHECK(is_stored(t), op, ": the storage of ", name, " has ", storage_bytes(t), " bytes, fewer than its ",
                  t.numel(), " elements take");
}

void check_apart(std::initializer_list<NamedTensor> written, std::initializer_list<NamedTensor> read, const char* op) {
  for (const NamedTensor* a = written.begin(); a != written.end(); ++a) {
    const Memory memory = memory_of(a->tensor);
    const auto refuse = [&](const NamedTensor& b) {
      STD_TORCH_CHECK(!overlap(memory, memory_of(b.tensor)), op, ": ", a->name, " shares memory with ", b.name,
                      ", but is written");
    };
    for (const NamedTensor* b = a + 1; b != written.end(); ++b) refuse(*b);
    for (const NamedTensor& b : read) refuse(b);
  }
}

}  // namespace gnnc

STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) { m.def("first_unstored(Tensor[] tensors) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CompositeExplicitAutograd, m) {
  m.impl("first_unstored", TORCH_BOX(&gnnc::first_unstored));
}
