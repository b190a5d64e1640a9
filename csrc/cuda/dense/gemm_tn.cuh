#pragma once

// gemm_tn: a^T @ b of two tall matrices, summed over their rows: the gradient of a weight. The products are of 16 bits.
// A block multiplies a tile of columns of a by a tile of columns of b, over its share of the rows; it stores the FP32
// sums of its share, which sum_parts adds up, so that no atomics are needed and results have the same bits in every
// call.
//
// The rows of both tiles pass through shared memory, kNodes at a time, as they are in memory: ldmatrix transposes them
// into the fragments of the tensor cores. The next rows are loaded into registers while the present ones are
// multiplied.
//
// Layout: rows of a and b kAStride and kBStride elements apart, of any width; FP32 rows are rounded as they are loaded,
// or with kSplit stand as a sum of two bfloat16 parts, whose error is 2^-17. Rows of int8 and of 8-bit floats have a
// scale each, and all their values are exact in bfloat16: the product of both scales of a row multiplies one side, that
// of FP32 if there is one, which is split then. Products of the lower parts of both sides are left out.
// Traffic: each tile of a once for every tile of b, and the reverse (from L2 but for the first), 4 kA kB B a share out.
// Floor: a and b once at copy bandwidth.
//
// Launch: blocks of 256 threads, `shares` for each pair of tiles.

#include "common/row_steps.cuh"
#include "common/tensor_cores.cuh"

namespace gnnc {

// Compile-time configuration of gemm_tn: the type of the products, of a and of b in memory, their columns, strides, and
// the neighboring columns that a thread loads at once; whether values that T rounds are split; whether rows of a and
// of b have scales.
template <class T, class A_, class B_, int kA_, int kB_, int64_t kAStride_, int64_t kBStride_, int kATogether_,
          int kBTogether_, bool kSplit_, bool kAScaled_, bool kBScaled_>
struct GemmTnConfig {
  using Type = T;
  using A = A_;
  using B = B_;
  static constexpr int kA = kA_, kB = kB_, kATogether = kATogether_, kBTogether = kBTogether_;
  static constexpr int64_t kAStride = kAStride_, kBStride = kBStride_;
  static constexpr bool kSplit = kSplit_, kAScaled = kAScaled_, kBScaled = kBScaled_;
};

struct GemmTnArgs {
  const void* a;
  const void* b;
  const float* a_scale;  // [rows], where kAScaled
  const float* b_scale;  // [rows], where kBScaled
  float* part;           // [shares, kA, kB]
  int64_t rows;
  int64_t shares;
};

namespace tn {

constexpr int kThreads = 256, kNodes = 64, kMostColumns = 64;

// Columns of a tile: all of a narrow matrix, in whole steps of 16, or 64.
__host__ __device__ constexpr int tile_of(int width) {
  return width >= kMostColumns ? kMostColumns : (width + 15) / 16 * 16;
}
__host__ __device__ constexpr int tiles_of(int width) { return (width + tile_of(width) - 1) / tile_of(width); }

// Whether T holds every value of type X.
template <class T, class X>
struct Holds {
  static constexpr bool kAll = sizeof(X) == 1;
};
template <class T>
struct Holds<T, T> {
  static constexpr bool kAll = true;
};

// Number of parts of a value of type X, times a factor or not, in a sum of values of type T.
template <bool kSplit, class T, class X, class Factor>
__host__ __device__ constexpr int parts_of() {
  return kSplit && !(Factor::kIsOne && Holds<T, X>::kAll) ? 2 : 1;
}

// The factor of a row: the scales of both matrices, or one.
template <bool kAScaled, bool kBScaled>
struct Factors {
  static constexpr bool kIsOne = !kAScaled && !kBScaled;
  const float* a;
  const float* b;
  __device__ float operator()(int64_t row) const {
    float factor = 1.0f;
    if constexpr (kAScaled) factor *= a[row];
    if constexpr (kBScaled) factor *= b[row];
    return factor;
  }
};

// Loader of one matrix: reads kNodes rows of a tile of its columns into registers, and stores them in shared memory.
template <class T, class X, int kWidth, int64_t kStride, int kTogether, class Factor, int kParts_>
struct Side {
  static constexpr int kTile = tile_of(kWidth), kParts = kParts_;
  static constexpr int kPitch = kTile + 8;       // elements; the padding puts eight rows into different banks
  static constexpr int kPart = kNodes * kPitch;  // elements of the rows of a part
  static constexpr int kRowLoads = kTile / kTogether;
  static constexpr int kAll = kNodes * kRowLoads, kLoads = (kAll + kThreads - 1) / kThreads;
  static constexpr int kStored = kTogether * sizeof(T) > 16 ? 16 / sizeof(T) : kTogether;  // columns in one store
  static_assert(kWidth % kTogether == 0 && kStride % kTogether == 0, "loads must be aligned");
  Vector<X, kTogether> v[kLoads];
  float factor[kLoads];

  __device__ void read(const X* from, const Factor& factor_of, int tile, int64_t first, int64_t end) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      const int64_t row = first + index / kRowLoads;
      const int column = tile * kTile + index % kRowLoads * kTogether;
      const bool is_there = (kAll % kThreads == 0 || index < kAll) && row < end && column < kWidth;
      if (is_there) {
        v[i] = *reinterpret_cast<const Vector<X, kTogether>*>(from + row * kStride + column);
        if constexpr (!Factor::kIsOne) factor[i] = factor_of(row);
      } else {
        v[i] = Vector<X, kTogether>{};
        if constexpr (!Factor::kIsOne) factor[i] = 0.0f;
      }
    }
  }

  __device__ void put(T* shared) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      if (kAll % kThreads != 0 && index >= kAll) continue;
      T* to = shared + index / kRowLoads * kPitch + index % kRowLoads * kTogether;
#pragma unroll
      for (int k = 0; k < kTogether; k += kStored) {
        float left[kStored];
#pragma unroll
        for (int j = 0; j < kStored; ++j) left[j] = scaled(i, k + j);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          Vector<T, kStored> rounded;
#pragma unroll
          for (int j = 0; j < kStored; ++j) {
            rounded.v[j] = step::from_float<T>(left[j]);
            left[j] = __fsub_rn(left[j], step::as_float(rounded.v[j]));
          }
          *reinterpret_cast<Vector<T, kStored>*>(to + part * kPart + k) = rounded;
        }
      }
    }
  }

 private:
  __device__ float scaled(int i, int k) const {
    const float value = step::as_float(v[i].v[k]);
    if constexpr (Factor::kIsOne) {
      return value;
    } else {
      return value * factor[i];
    }
  }
};

// Loads four 8 x 8 matrices from shared memory, each transposed; every thread gives the address of a row.
template <class T>
__device__ inline void load_turned(uint32_t (&to)[4], const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

}  // namespace tn

template <class Config>
__global__ void __launch_bounds__(tn::kThreads) gemm_tn(GemmTnArgs args) {
  begin_kernel();
  using T = typename Config::Type;
  using Scales = tn::Factors<Config::kAScaled, Config::kBScaled>;
  using One = tn::Factors<false, false>;
  constexpr bool kOfB = sizeof(typename Config::A) == 1 && sizeof(typename Config::B) > 1;  // b is to be split anyway
  using FactorsA = typename Select<kOfB, One, Scales>::Type;
  using FactorsB = typename Select<kOfB, Scales, One>::Type;
  using A = tn::Side<T, typename Config::A, Config::kA, Config::kAStride, Config::kATogether, FactorsA,
                     tn::parts_of<Config::kSplit, T, typename Config::A, FactorsA>()>;
  using B = tn::Side<T, typename Config::B, Config::kB, Config::kBStride, Config::kBTogether, FactorsB,
                     tn::parts_of<Config::kSplit, T, typename Config::B, FactorsB>()>;
  constexpr int kDown = A::kTile / 16, kAcross = B::kTile / 16, kSquares = kDown * kAcross;  // of 16 x 16 results
  constexpr int kWarps = tn::kThreads / 32, kOwn = (kSquares + kWarps - 1) / kWarps;
  constexpr int kTilesA = tn::tiles_of(Config::kA), kTilesB = tn::tiles_of(Config::kB);
  __shared__ alignas(16) T a_rows[A::kParts * A::kPart];
  __shared__ alignas(16) T b_rows[B::kParts * B::kPart];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int tile = static_cast<int>(blockIdx.x % (kTilesA * kTilesB));
  const int64_t share = blockIdx.x / (kTilesA * kTilesB);
  const int64_t chunks = (args.rows + tn::kNodes - 1) / tn::kNodes;
  const int64_t begin = chunks * share / args.shares * tn::kNodes;
  const int64_t end = min(chunks * (share + 1) / args.shares * tn::kNodes, args.rows);
  const auto* a = static_cast<const typename Config::A*>(args.a);
  const auto* b = static_cast<const typename Config::B*>(args.b);
  const FactorsA a_factors{args.a_scale, args.b_scale};
  const FactorsB b_factors{args.a_scale, args.b_scale};
  float sums[kOwn][2][4] = {};
  A a_next;
  B b_next;
  if (begin < end) {
    a_next.read(a, a_factors, tile / kTilesB, begin, end);
    b_next.read(b, b_factors, tile % kTilesB, begin, end);
  }
#pragma unroll 1
  for (int64_t first = begin; first < end; first += tn::kNodes) {
    __syncthreads();
    a_next.put(a_rows);
    b_next.put(b_rows);
    __syncthreads();
    if (first + tn::kNodes < end) {
      a_next.read(a, a_factors, tile / kTilesB, first + tn::kNodes, end);
      b_next.read(b, b_factors, tile % kTilesB, first + tn::kNodes, end);
    }
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int square = own * kWarps + warp;
      if (kSquares % kWarps != 0 && square >= kSquares) continue;
      // The four matrices of a fragment: of a by pairs of columns within rows, of b by rows within columns.
      const T* a_row = a_rows + (lane / 16 * 8 + lane % 8) * A::kPitch + square / kAcross * 16 + lane / 8 % 2 * 8;
      const T* b_row = b_rows + (lane / 8 % 2 * 8 + lane % 8) * B::kPitch + square % kAcross * 16 + lane / 16 * 8;
#pragma unroll
      for (int node = 0; node < tn::kNodes; node += 16) {
        uint32_t right[B::kParts][4];
#pragma unroll
        for (int q = 0; q < B::kParts; ++q) tn::load_turned(right[q], b_row + q * B::kPart + node * B::kPitch);
#pragma unroll
        for (int p = 0; p < A::kParts; ++p) {
          uint32_t left[4];
          tn::load_turned(left, a_row + p * A::kPart + node * A::kPitch);
#pragma unroll
          for (int q = 0; q < B::kParts; ++q) {
            if (p + q > 1) continue;
            multiply_halves(sums[own][0], left, right[q][0], right[q][1], T{});
            multiply_halves(sums[own][1], left, right[q][2], right[q][3], T{});
          }
        }
      }
    }
  }
  float* const part = args.part + share * Config::kA * Config::kB;
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const int square = own * kWarps + warp;
    if (kSquares % kWarps != 0 && square >= kSquares) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int down = tile / kTilesB * A::kTile + square / kAcross * 16 + lane / 4 + i / 2 % 2 * 8;
      const int across = tile % kTilesB * B::kTile + square % kAcross * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (down < Config::kA && across < Config::kB) part[down * Config::kB + across] = sums[own][i / 4][i % 4];
    }
  }
}

}  // namespace gnnc
