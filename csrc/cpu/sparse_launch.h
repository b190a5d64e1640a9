#pragma once

// Checks and the parallel loop that the launchers of sparse kernels share.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "csr.h"
#include "replay.h"
#include "storage.h"

// Registers an op over a CSR twice: in gnnc_cpu, which anyone may call, and in gnnc_cpu_valid, which programs call on
// the structure that csr built for them.
#define GNNC_CSR_OP(name, schema)                                                       \
  STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu, m) { m.def(#name schema); }                   \
  STABLE_TORCH_LIBRARY_FRAGMENT(gnnc_cpu_valid, m) { m.def(#name schema); }             \
  STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu, CPU, m) {                                         \
    gnnc::implement<&gnnc::name<gnnc::sparse::Ids::any>>(m, "gnnc_cpu", #name);         \
  }                                                                                     \
  STABLE_TORCH_LIBRARY_IMPL(gnnc_cpu_valid, CPU, m) {                                   \
    gnnc::implement<&gnnc::name<gnnc::sparse::Ids::valid>>(m, "gnnc_cpu_valid", #name); \
  }

namespace gnnc::sparse {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline void check_type(const Tensor& t, ScalarType type, const char* op, const char* name) {
  STD_TORCH_CHECK(t.is_cpu(), op, ": ", name, " must be on the CPU");
  STD_TORCH_CHECK(t.scalar_type() == type, op, ": ", name, " must be ", torch::headeronly::toString(type), ", but is ",
                  torch::headeronly::toString(t.scalar_type()));
}

// Returns the data of a contiguous tensor, after checking its type and number of elements.
template <typename T>
T* flat(const Tensor& t, ScalarType type, int64_t numel, const char* op, const char* name) {
  check_type(t, type, op, name);
  STD_TORCH_CHECK(t.is_contiguous(), op, ": ", name, " must be contiguous");
  STD_TORCH_CHECK(t.numel() == numel, op, ": ", name, " must have ", numel, " elements, but has ", t.numel());
  return static_cast<T*>(checked_data(t, numel, op, name));
}

template <typename T>
T* flat(const MaybeTensor& t, ScalarType type, int64_t numel, const char* op, const char* name) {
  return t.has_value() ? flat<T>(*t, type, numel, op, name) : nullptr;
}

// Returns the data of a vector whose elements are any stride apart, of a type that the caller checked.
template <typename T>
const T* strided(const Tensor& t, const char* op, const char* name) {
  const int64_t count = t.numel();
  return static_cast<const T*>(checked_data(t, count == 0 ? 0 : span_of(count, 1, t.stride(0), op), op, name));
}

// Checks numbers of nodes: ids must fit the 32 bits of col, those of destinations too, since a transpose swaps them.
inline void check_counts(int64_t num_src, int64_t num_dst, const char* op) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  STD_TORCH_CHECK(num_src >= 0 && num_dst >= 0 && num_src <= most && num_dst <= most, op,
                  ": num_src and num_dst must not be negative, and must fit 32 bits, but are ", num_src, " and ",
                  num_dst);
}

// A matrix with rows any stride apart, in elements.
struct Matrix {
  void* data;
  int64_t rows;
  int64_t width;
  int64_t stride;
  ScalarType type;
};

inline Matrix matrix(const Tensor& t, const char* op, const char* name) {
  STD_TORCH_CHECK(t.is_cpu(), op, ": ", name, " must be on the CPU");
  STD_TORCH_CHECK(t.dim() == 2, op, ": ", name, " must have 2 dimensions, but has ", t.dim());
  const int64_t rows = t.size(0), width = t.size(1);
  STD_TORCH_CHECK(width <= 1 || t.stride(1) == 1, op, ": the columns of ", name, " must be adjacent");
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Char, op, ": ", name,
                  " must be float32, bfloat16 or int8, but is ", torch::headeronly::toString(type));
  const int64_t stride = rows > 1 ? t.stride(0) : (width + 63) / 64 * 64;
  STD_TORCH_CHECK(stride >= width, op, ": the rows of ", name, " overlap");
  if (type == ScalarType::Char && rows > 1) {
    STD_TORCH_CHECK(stride % 64 == 0, op, ": the int8 rows of ", name, " must be padded to 64 bytes");
  }
  // The kernels read whole vectors of int8 rows, the last row's padding too.
  const int64_t last = type == ScalarType::Char ? (width + 63) / 64 * 64 : width;
  return {checked_data(t, span_of(rows, width == 0 ? 0 : last, stride, op), op, name), rows, width, stride, type};
}

inline Element element(ScalarType type) {
  return type == ScalarType::Float ? Element::f32 : type == ScalarType::BFloat16 ? Element::bf16 : Element::i8;
}

// Returns the CSR of an op's arguments, whose ids are not read: a program's structure was validated when it was built.
inline Csr csr(const Tensor& rowptr, const MaybeTensor& col, int64_t num_src, const char* op) {
  STD_TORCH_CHECK(rowptr.dim() == 1 && rowptr.numel() >= 1, op, ": rowptr must be [num_dst + 1]");
  const int64_t num_dst = rowptr.numel() - 1;
  const auto* starts = flat<int64_t>(rowptr, ScalarType::Long, num_dst + 1, op, "rowptr");
  const int64_t num_edges = starts[num_dst];
  STD_TORCH_CHECK(starts[0] == 0 && num_edges >= 0, op, ": rowptr must start at 0 and grow");
  if (!col.has_value()) {
    STD_TORCH_CHECK(num_edges <= num_src, op, ": rowptr ends at ", num_edges, ", but x has ", num_src, " rows");
    return {starts, nullptr, num_dst, num_edges};
  }
  STD_TORCH_CHECK(col->numel() == 0 || num_src > 0, op, ": x has no rows, but there are edges");
  return {starts, flat<int32_t>(*col, ScalarType::Int, num_edges, op, "col"), num_dst, num_edges};
}

// The ids of the CSR that an op is given: `valid` ones were built by csr, inside of a program, and `any` come from
// anywhere. A kernel uses ids as addresses, so an op copies `any` ids while it validates them: the kernel reads the
// copy, which nobody else can write.
enum class Ids { valid, any };

// A CSR whose ids a kernel may use as addresses.
template <Ids ids>
class Structure {
 public:
  // num_src: the number of rows that col may name.
  Structure(const Tensor& rowptr, const MaybeTensor& col, int64_t num_src, const char* op)
      : csr_(csr(rowptr, col, num_src, op)) {
    if constexpr (ids == Ids::any) {
      copy_rowptr(op);
      if (csr_.col != nullptr) copy_col(num_src, op);
    }
  }
  const Csr& csr_of() const { return csr_; }

 private:
  void copy_rowptr(const char* op) {
    rowptr_.assign(csr_.rowptr, csr_.rowptr + csr_.num_dst + 1);
    csr_.rowptr = rowptr_.data();
    STD_TORCH_CHECK(rowptr_[0] == 0, op, ": rowptr must start at 0, but starts at ", rowptr_[0]);
    for (int64_t i = 0; i < csr_.num_dst; ++i) {
      STD_TORCH_CHECK(rowptr_[i] <= rowptr_[i + 1], op, ": rowptr[", i + 1, "] is ", rowptr_[i + 1], ", but rowptr[", i,
                      "] is ", rowptr_[i], "; it must not fall");
    }
    STD_TORCH_CHECK(rowptr_[csr_.num_dst] == csr_.num_edges, op, ": rowptr was written during the call");
  }

  void copy_col(int64_t num_src, const char* op) {
    col_.reset(new int32_t[static_cast<size_t>(csr_.num_edges)]);
    for (int64_t e = 0; e < csr_.num_edges; ++e) {
      const int32_t id = csr_.col[e];
      STD_TORCH_CHECK(id >= 0 && id < num_src, op, ": col[", e, "] is ", id, ", but must be in 0..", num_src - 1);
      col_[static_cast<size_t>(e)] = id;
    }
    csr_.col = col_.get();
  }

  std::vector<int64_t> rowptr_;
  std::unique_ptr<int32_t[]> col_;
  Csr csr_;
};

constexpr int64_t kSerialWork = 16384;  // rows + edges below which one thread is faster than two, at 3 ns an edge

// Runs body(row_begin, row_end) on every chunk, on one thread up to `serial` rows + edges. Threads take chunks from one
// atomic counter: a slow core gets fewer chunks. Chunks begin at multiples of `step` rows.
template <typename Body>
void for_each_chunk(const Csr& csr, int64_t serial, const Body& body, int64_t step = 1) {
  const int64_t chunks = csr.num_dst + csr.num_edges <= serial ? 1 : chunk_count(csr);
  const int64_t threads = std::min<int64_t>(chunks, torch::stable::get_num_threads());
  if (threads <= 1) {
    if (csr.num_dst > 0) body(int64_t{0}, csr.num_dst);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
      const int64_t begin = chunk == 0 ? 0 : chunk_begin(csr, chunk, step);
      const int64_t end = chunk + 1 == chunks ? csr.num_dst : chunk_begin(csr, chunk + 1, step);
      if (begin < end) body(begin, end);
    }
  });
}

}  // namespace gnnc::sparse
