#pragma once

// gather_rows: rows of a matrix, picked by ids (aten.index_select): the values of edges in another order of the edges.
//
// Layout: rows of kPieces pieces, kStride pieces apart; the result is dense. A thread copies one piece. An id that
// names no row stops the program, as in PyTorch. Traffic: ids once for every piece, from L1; rows are read in sectors
// of 32 bytes, and written once. Floor: the time of a copy of these bytes.
//
// Launch: a thread for each piece of the result, in blocks of 256.

#include "common/types.cuh"

namespace gnnc {

struct GatherRowsArgs {
  const void* x;
  const void* ids;
  void* out;
  int64_t rows;   // of x
  int64_t count;  // of ids
};

template <class Piece, class Id, int kPieces, int kStride>
__global__ void __launch_bounds__(256) gather_rows(GatherRowsArgs args) {
  begin_kernel();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (index >= args.count * kPieces) return;
  const int64_t id = static_cast<const Id*>(args.ids)[index / kPieces];
  if (id < 0 || id >= args.rows) __trap();
  static_cast<Piece*>(args.out)[index] = static_cast<const Piece*>(args.x)[id * kStride + index % kPieces];
}

}  // namespace gnnc
