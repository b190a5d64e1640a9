#pragma once

// gemm_tn_fp32: a^T @ b of two tall matrices in FP32, summed over their rows: the gradient of a weight. Products are
// fused multiply-adds, which lose nothing that FP32 holds. A block multiplies a tile of columns of a by a tile of
// columns of b, over its share of the rows; it stores the sums of its share, which sum_parts adds up: no atomics, the
// same bits in every call.
//
// The rows of both tiles pass through shared memory, kNodes at a time. The next rows are loaded into registers while
// the present ones are multiplied. A thread adds up four by four results; where the tiles have fewer than 16 times as
// many results as the block has threads, several threads share them: each takes a part of the rows (kSplit), and their
// sums are added up in shared memory in a fixed order.
//
// Layout: rows of a and b kAStride and kBStride elements apart, of any width.
// Traffic: each tile of a once for every tile of b, and the reverse (from L2 but for the first), 4 kA kB B a share out.
// Floor: a and b once at copy bandwidth, or rows * kA * kB multiply-adds.
//
// Launch: blocks of 256 threads, `shares` for each pair of tiles.

#include "common/types.cuh"

namespace gnnc {

// Compile-time configuration of gemm_tn_fp32: the columns of a and of b, their strides, and the neighboring columns
// that a thread loads at once.
template <int kA_, int kB_, int64_t kAStride_, int64_t kBStride_, int kATogether_, int kBTogether_>
struct GemmTnFp32Config {
  static constexpr int kA = kA_, kB = kB_, kATogether = kATogether_, kBTogether = kBTogether_;
  static constexpr int64_t kAStride = kAStride_, kBStride = kBStride_;
};

struct GemmTnFp32Args {
  const float* a;
  const float* b;
  float* part;  // [shares, kA, kB]
  int64_t rows;
  int64_t shares;
};

namespace tn_fp32 {

constexpr int kThreads = 256, kNodes = 32, kMostColumns = 64;

// Columns of a tile: all of a narrow matrix, in whole steps of four, or 64.
__host__ __device__ constexpr int tile_of(int width) {
  return width >= kMostColumns ? kMostColumns : (width + 3) / 4 * 4;
}
__host__ __device__ constexpr int tiles_of(int width) { return (width + tile_of(width) - 1) / tile_of(width); }

// Loader of one matrix: reads kNodes rows of a tile of its columns into registers, and stores them in shared memory.
template <int kWidth, int64_t kStride, int kTogether>
struct Side {
  static constexpr int kTile = tile_of(kWidth), kPitch = kTile + 4;
  static constexpr int kRowLoads = (kTile + kTogether - 1) / kTogether, kAll = kNodes * kRowLoads;
  static constexpr int kLoads = (kAll + kThreads - 1) / kThreads;
  static_assert(kWidth % kTogether == 0 && kStride % kTogether == 0, "loads must be aligned");
  Vector<float, kTogether> v[kLoads];

  __device__ void read(const float* from, int tile, int64_t first, int64_t end) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      const int64_t row = first + index / kRowLoads;
      const int column = tile * kTile + index % kRowLoads * kTogether;
      const bool is_there = (kAll % kThreads == 0 || index < kAll) && row < end && column < kWidth;
      v[i] = Vector<float, kTogether>{};
      if (is_there) v[i] = *reinterpret_cast<const Vector<float, kTogether>*>(from + row * kStride + column);
    }
  }

  __device__ void put(float* shared) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      if (kAll % kThreads != 0 && index >= kAll) continue;
      float* to = shared + index / kRowLoads * kPitch + index % kRowLoads * kTogether;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) to[k] = v[i].v[k];
    }
  }
};

}  // namespace tn_fp32

template <class Config>
__global__ void __launch_bounds__(tn_fp32::kThreads) gemm_tn_fp32(GemmTnFp32Args args) {
  begin_kernel();
  using tn_fp32::kNodes, tn_fp32::kThreads;
  using A = tn_fp32::Side<Config::kA, Config::kAStride, Config::kATogether>;
  using B = tn_fp32::Side<Config::kB, Config::kBStride, Config::kBTogether>;
  constexpr int kAcross = B::kTile / 4, kSquares = A::kTile / 4 * kAcross;  // of 4 x 4 results
  constexpr int kFit = kThreads / kSquares, kSplit = kFit < kNodes ? kFit : kNodes;
  constexpr int kTilesA = tn_fp32::tiles_of(Config::kA), kTilesB = tn_fp32::tiles_of(Config::kB);
  constexpr int kRows = kNodes * (A::kPitch + B::kPitch), kSums = kSplit * kSquares * 16;
  __shared__ alignas(16) float shared[kRows > kSums ? kRows : kSums];
  float* const a_rows = shared;
  float* const b_rows = shared + kNodes * A::kPitch;
  const int square = static_cast<int>(threadIdx.x) % kSquares, own = static_cast<int>(threadIdx.x) / kSquares;
  const int tile = static_cast<int>(blockIdx.x % (kTilesA * kTilesB));
  const int64_t share = blockIdx.x / (kTilesA * kTilesB);
  const int64_t chunks = (args.rows + kNodes - 1) / kNodes;
  const int64_t begin = chunks * share / args.shares * kNodes;
  const int64_t end = min(chunks * (share + 1) / args.shares * kNodes, args.rows);
  float sums[4][4] = {};
  A a_next;
  B b_next;
  if (begin < end) {
    a_next.read(args.a, tile / kTilesB, begin, end);
    b_next.read(args.b, tile % kTilesB, begin, end);
  }
#pragma unroll 1
  for (int64_t first = begin; first < end; first += kNodes) {
    __syncthreads();
    a_next.put(a_rows);
    b_next.put(b_rows);
    __syncthreads();
    if (first + kNodes < end) {
      a_next.read(args.a, tile / kTilesB, first + kNodes, end);
      b_next.read(args.b, tile % kTilesB, first + kNodes, end);
    }
    if (own >= kSplit) continue;
    const float* left = a_rows + square / kAcross * 4;
    const float* right = b_rows + square % kAcross * 4;
#pragma unroll 8
    for (int node = own; node < kNodes; node += kSplit) {
      const float4 x = *reinterpret_cast<const float4*>(left + node * A::kPitch);
      const float4 y = *reinterpret_cast<const float4*>(right + node * B::kPitch);
      const float down[4] = {x.x, x.y, x.z, x.w}, across[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = __fmaf_rn(down[i], across[j], sums[i][j]);
      }
    }
  }
  __syncthreads();
  if (own < kSplit) {
#pragma unroll
    for (int i = 0; i < 16; ++i) shared[(own * 16 + i) * kSquares + square] = sums[i / 4][i % 4];
  }
  __syncthreads();
  float* const part = args.part + share * Config::kA * Config::kB;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < kSquares * 16; index += kThreads) {
    const int column = index % B::kTile, row = index / B::kTile;
    const int from = row % 4 * 4 * kSquares + column % 4 * kSquares + row / 4 * kAcross + column / 4;
    const int down = tile / kTilesB * A::kTile + row, across = tile % kTilesB * B::kTile + column;
    if (down >= Config::kA || across >= Config::kB) continue;
    float total = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kSplit; ++i) total += shared[i * 16 * kSquares + from];
    part[down * Config::kB + across] = total;
  }
}

}  // namespace gnnc
