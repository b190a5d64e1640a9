#pragma once

// Checks that the memory of a tensor holds what its shape and strides address: a storage can be freed or shortened
// (`untyped_storage().resize_`) under a tensor whose shape stays.

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace gnnc {

// Returns a * b.
// Throws if the product does not fit 64 bits.
int64_t product(int64_t a, int64_t b, const char* op);

// Returns the number of elements from the first to the last of `rows` rows of `width` elements, `stride` apart.
int64_t span_of(int64_t rows, int64_t width, int64_t stride, const char* op);

// Returns the address of a tensor's first element.
// Throws unless `count` elements from there lie in the tensor's storage, at a multiple of their size.
void* checked_data(const torch::stable::Tensor& t, int64_t count, const char* op, const char* name);

// Throws unless a tensor's storage holds its elements, whatever its strides.
void check_stored(const torch::stable::Tensor& t, const char* op, const char* name);

// Throws if two of some tensors share memory.
struct NamedTensor {
  const torch::stable::Tensor& tensor;
  const char* name;
};
void check_apart(std::initializer_list<NamedTensor> written, std::initializer_list<NamedTensor> read, const char* op);

}  // namespace gnnc
