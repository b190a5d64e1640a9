#pragma once

// The CSR that every sparse kernel traverses, and the division of its rows among threads.
//
// Rows are cut into chunks of about equal rows + edges by a binary search in rowptr. The cuts depend on the graph only,
// never on the number of threads, and threads take chunks in any order: a row is always computed by the same code on
// the same tile, so results have the same bits at any thread count.

#include <algorithm>
#include <cstdint>

namespace gnnc {

enum class Element { f32, bf16, i8 };

struct Csr {
  const int64_t* rowptr;  // [num_dst + 1]
  const int32_t* col;     // [num_edges], or null: edge e reads row e
  int64_t num_dst;
  int64_t num_edges;
};

constexpr int64_t kChunkWork = 8192;  // rows + edges of a chunk: 10 to 50 us, and long enough to prefetch within
constexpr int64_t kTileRows = 16;     // rows of a tile of the row program

inline int64_t chunk_count(const Csr& csr) { return (csr.num_dst + csr.num_edges + kChunkWork - 1) / kChunkWork; }

// Returns the first row of a chunk: the first row for which the rows + edges before it reach chunk * kChunkWork,
// rounded up to a multiple of `step`.
inline int64_t chunk_begin(const Csr& csr, int64_t chunk, int64_t step = 1) {
  int64_t low = 0, high = csr.num_dst;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (csr.rowptr[middle] + middle < chunk * kChunkWork) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return std::min(csr.num_dst, (low + step - 1) / step * step);
}

}  // namespace gnnc
