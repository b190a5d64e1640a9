#pragma once

// Products of edge values with weights, inside of a body: x_e W^T + b for kEdges edges at a time, by one warp.
//
// Layout: a block holds the weights in shared memory, transposed, so that the threads of a warp read the weights of
// neighbouring columns; weights that find no room are read where they lie. A warp holds there the operands of kEdges
// edges, one product at a time, and the results of all products, which later products and the body's values read. Every
// product is added up in one order, whatever kernel it is part of: the gradient of a maximum compares its values again.
// A body declares kProducts, and for each of them
//   inputs(product), outputs(product): the columns of its operand and of its result,
//   input<product>(row, source, edge, products, column): a column of its operand,
//   weight<product>(k, column), bias<product>(column).
// Floor: FP32 multiply-adds; an operand of four columns, read by a whole warp, serves 4 * kTogether of them.

#include "common/types.cuh"

namespace gnnc {

template <class Body>
struct EdgeProducts {
  static constexpr int kEdges = 8;                // edges that share each weight that is read
  static constexpr int kMostWeights = 12 * 1024;  // words
  static constexpr int kMostBytes = 96 * 1024;

  __host__ __device__ static constexpr int padded(int columns) { return (columns + 3) / 4 * 4; }
  // Weights of neighbouring rows k lie an odd number of words apart: they are stored without bank conflicts.
  __host__ __device__ static constexpr int apart(int product) { return Body::outputs(product) | 1; }
  __host__ __device__ static constexpr int weights(int product) {
    return padded(Body::inputs(product)) * apart(product);
  }
  // Returns the words of the weights in shared memory before those of a product.
  __host__ __device__ static constexpr int weights_before(int product) {
    int words = 0;
    for (int p = 0; p < product; ++p) words += words + weights(p) <= kMostWeights ? weights(p) : 0;
    return words;
  }
  __host__ __device__ static constexpr bool is_shared(int product) {
    return weights_before(product) + weights(product) <= kMostWeights;
  }
  __host__ __device__ static constexpr int outputs_before(int product) {
    int words = 0;
    for (int p = 0; p < product; ++p) words += Body::outputs(p);
    return words;
  }
  __host__ __device__ static constexpr int widest_input() {
    int widest = 0;
    for (int p = 0; p < Body::kProducts; ++p)
      widest = padded(Body::inputs(p)) > widest ? padded(Body::inputs(p)) : widest;
    return widest;
  }
  static constexpr int kWeights = weights_before(Body::kProducts);
  static constexpr int kInput = widest_input();                    // words of an edge's operand
  static constexpr int kOutput = outputs_before(Body::kProducts);  // words of an edge's results
  static constexpr int kWarpWords = kEdges * (kInput + kOutput);
  __host__ __device__ static constexpr int warps() {
    int warps = 8;
    while (warps > 1 && 4 * (kWeights + warps * padded(kWarpWords)) > kMostBytes) warps /= 2;
    return warps;
  }
  static constexpr int kWarps = warps();  // of a block: as many as there is room for
  static constexpr int kBytes = 4 * (kWeights + kWarps * padded(kWarpWords));

  float* shared;
  float* input;
  float* output;

  // Called by the whole block.
  __device__ EdgeProducts(const Body& body, int4* memory) : shared(reinterpret_cast<float*>(memory)) {
    load_weights<0>(body);
    __syncthreads();
    input = shared + kWeights + static_cast<int>(threadIdx.x / 32) * padded(kWarpWords);
    output = input + kEdges * kInput;
  }

  // Computes all products of kEdges edges. Called by the whole warp.
  __device__ __forceinline__ void compute(const Body& body, const int64_t (&row)[kEdges],
                                          const int64_t (&source)[kEdges], const int64_t (&edge)[kEdges]) {
    __syncwarp();  // the results of the last edges have been read
    compute_from<0>(body, row, source, edge);
  }

  // Returns the results of all products for one of the edges.
  __device__ const float* of(int which) const { return output + which * kOutput; }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }

  template <int kProduct>
  __device__ __forceinline__ void load_weights(const Body& body) {
    if constexpr (kProduct < Body::kProducts) {
      constexpr int kIn = Body::inputs(kProduct), kOut = Body::outputs(kProduct), kRows = padded(kIn);
      float* to = shared + weights_before(kProduct);
      for (int i = static_cast<int>(threadIdx.x); is_shared(kProduct) && i < kRows * kOut; i += 32 * kWarps) {
        const int column = i / kRows, k = i % kRows;
        to[k * apart(kProduct) + column] = k < kIn ? body.template weight<kProduct>(k, column) : 0.0f;
      }
      load_weights<kProduct + 1>(body);
    }
  }

  template <int kProduct>
  __device__ __forceinline__ void compute_from(const Body& body, const int64_t (&row)[kEdges],
                                               const int64_t (&source)[kEdges], const int64_t (&edge)[kEdges]) {
    if constexpr (kProduct < Body::kProducts) {
      constexpr int kIn = Body::inputs(kProduct), kOut = Body::outputs(kProduct), kRows = padded(kIn);
#pragma unroll 1
      for (int column = lane(); column < kRows; column += 32) {
#pragma unroll
        for (int e = 0; e < kEdges; ++e) {
          input[e * kInput + column] =
              column < kIn ? body.template input<kProduct>(row[e], source[e], edge[e], of(e), column) : 0.0f;
        }
      }
      __syncwarp();
      constexpr int kTogether = kOut > 32 ? 2 : 1;
#pragma unroll 1
      for (int column = lane(); column < kOut; column += 32 * kTogether) columns<kProduct, kTogether>(body, column);
      __syncwarp();
      compute_from<kProduct + 1>(body, row, source, edge);
    }
  }

  // Computes the columns `first`, first + 32, .. of a product for all edges.
  template <int kProduct, int kTogether>
  __device__ __forceinline__ void columns(const Body& body, int first) {
    constexpr int kIn = Body::inputs(kProduct), kOut = Body::outputs(kProduct), kRows = padded(kIn);
    const auto weight = [&](int k, int column) {
      if constexpr (is_shared(kProduct)) {
        return shared[weights_before(kProduct) + k * apart(kProduct) + column];
      } else {
        return k < kIn ? body.template weight<kProduct>(k, column) : 0.0f;
      }
    };
    int column[kTogether];
    float sum[kTogether][kEdges];
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      column[t] = min(first + 32 * t, kOut - 1);
      const float bias = body.template bias<kProduct>(column[t]);
#pragma unroll
      for (int e = 0; e < kEdges; ++e) sum[t][e] = bias;
    }
#pragma unroll 1
    for (int k = 0; k < kRows; k += 4) {
      float w[kTogether][4];
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) w[t][i] = weight(k + i, column[t]);
      }
#pragma unroll
      for (int e = 0; e < kEdges; ++e) {
        const float4 x = *reinterpret_cast<const float4*>(input + e * kInput + k);
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          sum[t][e] += x.x * w[t][0];
          sum[t][e] += x.y * w[t][1];
          sum[t][e] += x.z * w[t][2];
          sum[t][e] += x.w * w[t][3];
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      if (first + 32 * t >= kOut) continue;
#pragma unroll
      for (int e = 0; e < kEdges; ++e) {
        output[e * kOutput + outputs_before(kProduct) + column[t]] = sum[t][e];
      }
    }
  }
};

// The operands of a body without products.
template <class Body>
struct NoProducts {
  static constexpr int kEdges = 4;  // edges whose rows are loaded at once
  static constexpr int kWarps = 8;
  static constexpr int kBytes = 0;

  __device__ NoProducts(const Body& body, int4* memory) {}
  __device__ __forceinline__ void compute(const Body& body, const int64_t (&row)[kEdges],
                                          const int64_t (&source)[kEdges], const int64_t (&edge)[kEdges]) {}
  __device__ const float* of(int which) const { return nullptr; }
};

template <class Body>
using ProductsOf = typename Select<(Body::kProducts > 0), EdgeProducts<Body>, NoProducts<Body>>::Type;

}  // namespace gnnc
