#pragma once

// edge_sum_values and edge_sum_products: sums over all edges of the values of a body, or of products a^T b of two
// values (the sides) of a body. They are the gradients of biases and weights inside the body. No value of an edge is
// stored. The kernel of products also adds up the rows of the sides where that is asked for: threads have them in
// registers as factors of the product.
//
// Layout: the sides are rows in the shared memory of a tile (edge_stages.cuh): the edges of a tile are the terms of a
// product on the tensor cores, whose fragments threads read from different banks, as kPitch is an odd multiple of 8.
// FP32 values are multiplied as two TF32 values each. The warps of a block lie on the fragments of the product as a
// grid of kDown by kAcross. Where that is one warp, every warp adds up the products of its own edges. Otherwise all
// warps take the edges of all of them: the sums of a large product are spread over the registers of a block. Traffic:
// operands of the body once; 4 B an element of a partial result for every block or warp, which sum_parts adds up in a
// fixed order: no atomics, the same bits in every call. Floor: the operands at copy bandwidth, or the products; shared
// memory gives six words a fragment and 8 edges, fewer where a warp has several fragments.
//
// Launch: any number of blocks of Body::kWarps warps and EdgeTile<Body>::kBytes of dynamic shared memory. The part
// buffer holds a result for every block, or for every warp where these sum apart.

#include "common/tensor_cores.cuh"
#include "sparse/edge.cuh"

namespace gnnc {

struct EdgeSumArgs {
  const int32_t* rows;  // [E], destination of every edge
  const int32_t* col;   // [E]
  float* part;          // [parts, width]
  int64_t edges;
};

struct EdgeProductArgs : EdgeSumArgs {
  float* a_part;  // [parts, kA], where the rows of a are added up
  float* b_part;  // [parts, kB], where those of b are
};

// Calls visit(count) for every tile of a warp with its number of edges, which may be 0: the warps of a block make
// the same number of calls.
template <class Body, class Visit>
__device__ __forceinline__ void each_tile(const EdgeSumArgs& args, EdgeTile<Body>& tile, const Visit& visit) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t apart = static_cast<int64_t>(gridDim.x) * Body::kWarps * kTile;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * Body::kWarps * kTile;
  const int64_t own = static_cast<int64_t>(threadIdx.x / 32) * kTile;
  if (begin >= args.edges) return;
  const auto edge_of = [&](int64_t first) { return min(first + own + lane % kTile, args.edges - 1); };
  int32_t row = args.rows[edge_of(begin)], source = args.col[edge_of(begin)];
#pragma unroll 1
  for (int64_t first = begin; first < args.edges; first += apart) {
    __syncwarp();  // the edges of the last tile have been read
    if (lane < kTile) note_edge(tile.edges, lane, edge_of(first), row, source);
    tile.fetch();
    row = args.rows[edge_of(first + apart)];
    source = args.col[edge_of(first + apart)];
    tile.compute();
    const int64_t left = args.edges - first - own;
    visit(static_cast<int>(left < 0 ? 0 : left < kTile ? left : kTile));
  }
}

// Returns the threads of a warp that lie side by side along the columns.
__host__ __device__ constexpr int lanes_of(int width) {
  int lanes = 1;
  while (lanes < width && lanes < 32) lanes *= 2;
  return lanes;
}

template <int kWidth, class Body>
__global__ void __launch_bounds__(256, 2) edge_sum_values(EdgeSumArgs args, Body body) {
  begin_kernel();
  extern __shared__ int4 memory[];
  EdgeTile<Body> tile(body, memory);
  constexpr int kLanes = lanes_of(kWidth), kGroups = 32 / kLanes, kEach = (kWidth + kLanes - 1) / kLanes;
  const int lane = static_cast<int>(threadIdx.x % 32), group = lane / kLanes;
  float total[kEach] = {};
  each_tile(args, tile, [&](int count) {
#pragma unroll
    for (int t = 0; t < kEach; ++t) {
      const int column = lane % kLanes + kLanes * t;
      if (column >= kWidth) continue;
      float run = 0.0f;
#pragma unroll 4
      for (int e = group; e < count; e += kGroups) {
        float value[1];
        tile.values(e, column, value);
        run += value[0];
      }
      total[t] += run;
    }
  });
  const int64_t part = static_cast<int64_t>(blockIdx.x) * Body::kWarps + threadIdx.x / 32;
#pragma unroll
  for (int t = 0; t < kEach; ++t) {
#pragma unroll
    for (int apart = kLanes; apart < 32; apart *= 2) total[t] += __shfl_xor_sync(0xffffffffu, total[t], apart);
    const int column = lane % kLanes + kLanes * t;
    if (group == 0 && column < kWidth) args.part[part * kWidth + column] = total[t];
  }
}

// A side of a product: kColumns values of T, from the word kAt of an edge's row on.
template <class T, int kColumns_, int kAt>
struct ProductSide {
  static constexpr int kColumns = kColumns_;
  static constexpr bool kExact = sizeof(T) == 2;  // one TF32 value holds a value

  __device__ static float value(const float* row, int column) {
    return step::as_float(reinterpret_cast<const T*>(row + kAt)[column]);
  }
  __device__ static void clear(float* row, int column) {
    reinterpret_cast<T*>(row + kAt)[column] = step::from_float<T>(0.0f);
  }
};

// The sums of a warp of a product of two sides, and of the rows of a side, where kSumA or kSumB is set. A thread adds
// up those of every fourth edge.
template <class A, class B, int kPitch, int kDown, int kAcross, bool kSumA, bool kSumB>
struct ProductSums {
  static constexpr int kA = A::kColumns, kB = B::kColumns;
  static constexpr int kFragmentsDown = ((kA + 15) / 16 + kDown - 1) / kDown;
  static constexpr int kFragmentsAcross = ((kB + 7) / 8 + kAcross - 1) / kAcross;
  float sum[kFragmentsDown][kFragmentsAcross][4];
  float a_sum[kFragmentsDown][2], b_sum[kFragmentsAcross];
  int down, across;  // first row and column of this warp's fragments

  __device__ __forceinline__ ProductSums() : sum{}, a_sum{}, b_sum{} {
    const int warp = static_cast<int>(threadIdx.x / 32) % (kDown * kAcross);
    down = warp / kAcross * kFragmentsDown * 16, across = warp % kAcross * kFragmentsAcross * 8;
  }

  // Clears the sides of the edges from `count` on. Called by the warp of the tile.
  __device__ static void clear(float* results, int count) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x % 32); i < (kTile - count) * (kA + kB); i += 32) {
      float* const row = results + (count + i / (kA + kB)) * kPitch;
      const int column = i % (kA + kB);
      if (column < kA) A::clear(row, column);
      if (column >= kA) B::clear(row, column - kA);
    }
  }

  // Adds the products of the edges of a tile.
  __device__ __forceinline__ void take(const float* results) {
    const int lane = static_cast<int>(threadIdx.x % 32), group = lane / 4;
    const auto a_of = [&](int m, int half) { return min(down + 16 * m + group + 8 * half, kA - 1); };
#pragma unroll(kFragmentsDown* kFragmentsAcross <= 8 ? 2 : 1)
    for (int k = 0; k < kTile; k += 8) {
      const float* const near = results + (k + lane % 4) * kPitch;
      const float* const far = near + 4 * kPitch;
      Tf32Parts<2, B::kExact> b[kFragmentsAcross];
#pragma unroll
      for (int n = 0; n < kFragmentsAcross; ++n) {
        const int column = min(across + 8 * n + group, kB - 1);
        const float values[2] = {B::value(near, column), B::value(far, column)};
        b[n].set(0, values[0]);
        b[n].set(1, values[1]);
        if constexpr (kSumB) b_sum[n] += values[0] + values[1];
      }
#pragma unroll
      for (int m = 0; m < kFragmentsDown; ++m) {
        Tf32Parts<4, A::kExact> a;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float values[2] = {A::value(near, a_of(m, half)), A::value(far, a_of(m, half))};
          a.set(half, values[0]);
          a.set(half + 2, values[1]);
          if constexpr (kSumA) a_sum[m][half] += values[0] + values[1];
        }
#pragma unroll
        for (int n = 0; n < kFragmentsAcross; ++n) multiply_floats(sum[m][n], a, b[n]);
      }
    }
  }

  // Stores the sums of the rows of both sides: [kA] and [kB]. Every column is of one warp's first fragments.
  __device__ __forceinline__ void store_sides(float* a_row, float* b_row) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if constexpr (kSumA) {
#pragma unroll
      for (int m = 0; m < kFragmentsDown; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float total = over_edges(a_sum[m][half]);
          const int column = down + 16 * m + lane / 4 + 8 * half;
          if (lane % 4 == 0 && across == 0 && column < kA) a_row[column] = total;
        }
      }
    }
    if constexpr (kSumB) {
#pragma unroll
      for (int n = 0; n < kFragmentsAcross; ++n) {
        const float total = over_edges(b_sum[n]);
        const int column = across + 8 * n + lane / 4;
        if (lane % 4 == 0 && down == 0 && column < kB) b_row[column] = total;
      }
    }
  }

  // Returns the sum over the four threads that add up the edges of one column.
  __device__ static float over_edges(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
  }

  // Stores the sums as part of a matrix [kA, kB].
  __device__ __forceinline__ void store(float* matrix) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int m = 0; m < kFragmentsDown; ++m) {
#pragma unroll
      for (int n = 0; n < kFragmentsAcross; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = down + 16 * m + lane / 4 + i / 2 * 8, column = across + 8 * n + lane % 4 * 2 + i % 2;
          if (row < kA && column < kB) matrix[row * kB + column] = sum[m][n][i];
        }
      }
    }
  }
};

template <class A, class B, int kDown, int kAcross, bool kSumA, bool kSumB, class Body>
__global__ void __launch_bounds__(256, 2) edge_sum_products(EdgeProductArgs args, Body body) {
  begin_kernel();
  constexpr bool kAlone = kDown * kAcross == 1;
  static_assert(kAlone || kDown * kAcross == Body::kWarps, "every warp has fragments of its own");
  extern __shared__ int4 memory[];
  EdgeTile<Body> tile(body, memory);
  ProductSums<A, B, Body::kPitch, kDown, kAcross, kSumA, kSumB> sums;
  const int own = static_cast<int>(threadIdx.x / 32);
  each_tile(args, tile, [&](int count) {
    sums.clear(tile.results, count);
    if (kAlone) {
      __syncwarp();
      sums.take(tile.results);
      return;
    }
    __syncthreads();
#pragma unroll 1
    for (int warp = 0; warp < Body::kWarps; ++warp) {
      sums.take(tile.results + (warp - own) * (EdgeTile<Body>::kWarpBytes / 4));
    }
    __syncthreads();
  });
  const int64_t part = kAlone ? static_cast<int64_t>(blockIdx.x) * Body::kWarps + own : blockIdx.x;
  sums.store(args.part + part * (A::kColumns * B::kColumns));
  sums.store_sides(args.a_part + part * A::kColumns, args.b_part + part * B::kColumns);
}

}  // namespace gnnc
