#pragma once

// pack_rows: copies rows of x into the layout that the sparse kernels gather from: each head of a row begins on a
// 16-byte boundary, and the padding between heads is zeros.
//
// Layout: x any type, rows Config::kFrom elements apart; rows of the copy kTo elements apart, on 16 bytes.
// Traffic: kHeads * kHeadWidth elements a row in, kTo out. Floor: these bytes at copy bandwidth.
//
// Launch: blocks of 256 threads, a thread for every 16 bytes of the copy.

#include <cuda_bf16.h>  // Config::T may be a type of this header or the next
#include <cuda_fp16.h>

#include "common/fp8.cuh"
#include "common/types.cuh"

namespace gnnc {

struct PackRowsArgs {
  const void* x;
  uint4* out;
  int64_t rows;
};

// Compile-time configuration of pack_rows. kFrom, kTo: elements from one row to the next of x and of the copy;
// kHeadStride: elements from one head to the next of the copy, a multiple of 16 bytes if there are several heads.
template <class T, int kHeads_, int kHeadWidth_, int kHeadStride_, int64_t kFrom_, int kTo_>
struct PackRowsConfig {
  using Type = T;
  static constexpr int kHeads = kHeads_, kHeadWidth = kHeadWidth_, kHeadStride = kHeadStride_, kTo = kTo_;
  static constexpr int64_t kFrom = kFrom_;
};

template <class Config>
__global__ void __launch_bounds__(256) pack_rows(PackRowsArgs args) {
  begin_kernel();
  using T = typename Config::Type;
  constexpr int kColumns = 16 / static_cast<int>(sizeof(T)), kPieces = Config::kTo / kColumns;
  static_assert(Config::kTo % kColumns == 0, "rows of the copy must start on 16 bytes");
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (index >= args.rows * kPieces) return;
  const T* row = static_cast<const T*>(args.x) + index / kPieces * Config::kFrom;
  const int first = static_cast<int>(index % kPieces) * kColumns;
  union {
    uint4 piece;
    T v[kColumns];
  };
  piece = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int head = (first + i) / Config::kHeadStride, column = (first + i) % Config::kHeadStride;
    if (head < Config::kHeads && column < Config::kHeadWidth) v[i] = row[head * Config::kHeadWidth + column];
  }
  args.out[index] = piece;
}

}  // namespace gnnc
