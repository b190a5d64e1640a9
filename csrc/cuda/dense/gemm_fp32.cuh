#pragma once

// gemm_fp32: x @ w^T in FP32 for tall and narrow x, then the epilogue on whole rows. Products are fused multiply-adds,
// which lose nothing that FP32 holds; the sum over columns of x is added up in one order, the same in every call.
//
// A block processes Config::kRows rows of x. Its warps load Config::kChunk columns at a time into shared memory, the
// next chunk while the present one is multiplied. A warp has 32 rows; a thread has kTall rows, kRowLanes apart, by four
// columns. The warps of a block divide the rows, the columns of the result and, where that is narrow, the columns of a
// chunk (split-K): such partial sums, like all results, pass through shared memory into row tiles, which add them up in
// a fixed order.
//
// Traffic: x once, the epilogue's outputs; the weight once a block from L2. Floor: x, weight and outputs once at copy
// bandwidth, or rows * kInner * kOut multiply-adds.
//
// Launch: pack_fp32 with blocks of 256 threads, one for every 256 elements of the packed weight; then gemm_fp32 with
// one block of Config::kThreads threads for every kRows rows, or `shares` of gemm_fp32_sums, and
// GemmFp32<Config>::kShared bytes of dynamic shared memory.

#include "common/copies.cuh"
#include "common/row_steps.cuh"

namespace gnnc {

// Compile-time configuration of gemm_fp32.
//
// X: the type of x in memory; kInner, kOut: widths of x and of the result; kStride: elements from one row of x to the
// next; kTogether: neighboring columns that a thread loads at once; kChunk: columns in shared memory at a time;
// kColumnLanes: threads of a warp side by side; kDown, kAcross, kSplit: number of warps that divide the rows, the
// columns of the result and the columns of a chunk.
template <class X_, int kInner_, int64_t kStride_, int kOut_, int kTogether_, int kChunk_, int kColumnLanes_,
          int kDown_, int kAcross_, int kSplit_>
struct GemmFp32Config {
  using X = X_;
  static constexpr int kInner = kInner_, kOut = kOut_, kTogether = kTogether_, kChunk = kChunk_;
  static constexpr int kColumnLanes = kColumnLanes_, kDown = kDown_, kAcross = kAcross_, kSplit = kSplit_;
  static constexpr int64_t kStride = kStride_;
  static constexpr int kRows = 32 * kDown, kThreads = 32 * kDown * kAcross * kSplit;
  static constexpr int kBlocks = kThreads < 512 ? 512 / kThreads : 1;  // of a multiprocessor: 128 registers a thread
};

struct GemmFp32Args {
  const void* x;
  const float* weight;  // packed by pack_fp32
  int64_t rows;
};

// Sizes of a gemm_fp32 kernel, and the layout of its shared memory in floats.
template <class Config>
struct GemmFp32 {
  static constexpr int kRowLanes = 32 / Config::kColumnLanes;
  static constexpr int kTall = 32 / kRowLanes;                                 // rows of a thread
  static constexpr int kColumns = 4 * Config::kColumnLanes * Config::kAcross;  // kOut, padded
  static constexpr int kChunks = (Config::kInner + Config::kChunk - 1) / Config::kChunk;
  static constexpr int kPlaces = kChunks * Config::kChunk;  // kInner, padded
  static constexpr int kPitch = Config::kChunk + 4;         // the padding puts neighboring rows into different banks
  static constexpr int kOutPitch = kColumns + 4;
  static constexpr int kWeightAt = Config::kRows * kPitch;
  static constexpr int kStage = kWeightAt + Config::kChunk * kColumns;  // x and weight of one chunk
  static constexpr int kStages = kChunks > 1 ? 2 : 1;
  static constexpr int kPart = Config::kRows * kOutPitch;  // one partial sum
  static constexpr int kFloats = kStages * kStage > Config::kSplit* kPart ? kStages * kStage : Config::kSplit * kPart;
  static constexpr int kShared = kFloats * 4;
  static_assert(Config::kChunk % (4 * Config::kSplit) == 0, "warps must divide a chunk into fours of columns");
};

// Starts the copies of one chunk of x and of the weight into shared memory. Rows past the last are read as the last
// row, and their results are discarded; columns past the width are zeros.
template <class Config>
__device__ void load_chunk(const GemmFp32Args& args, int64_t begin, int chunk, float* stage) {
  using G = GemmFp32<Config>;
  using X = typename Config::X;
  constexpr int kPieces = Config::kChunk / Config::kTogether, kAll = Config::kRows * kPieces;
  constexpr int kTurns = (kAll + Config::kThreads - 1) / Config::kThreads;
  const auto last = static_cast<int>(min(args.rows - begin, static_cast<int64_t>(Config::kRows))) - 1;
  const X* first = static_cast<const X*>(args.x) + begin * Config::kStride + chunk * Config::kChunk;
#pragma unroll 4
  for (int i = 0; i < kTurns; ++i) {
    const int index = i * Config::kThreads + static_cast<int>(threadIdx.x);
    if (kAll % Config::kThreads != 0 && index >= kAll) break;
    const int row = index / kPieces, column = index % kPieces * Config::kTogether;
    const bool exists = chunk * Config::kChunk + column < Config::kInner;
    const X* from = first + min(row, last) * Config::kStride + (exists ? column : 0);
    float* to = stage + row * G::kPitch + column;
    if constexpr (sizeof(X) == 4 && Config::kTogether == 4) {
      start_copy_if(exists, reinterpret_cast<int4*>(to), reinterpret_cast<const int4*>(from));
    } else {
      Vector<X, Config::kTogether> read = {};
      if (exists) read = *reinterpret_cast<const Vector<X, Config::kTogether>*>(from);
#pragma unroll
      for (int k = 0; k < Config::kTogether; ++k) to[k] = step::as_float(read.v[k]);
    }
  }
  constexpr int kFours = Config::kChunk * G::kColumns / 4;
  const auto* from = reinterpret_cast<const int4*>(args.weight + chunk * Config::kChunk * G::kColumns);
  auto* to = reinterpret_cast<int4*>(stage + G::kWeightAt);
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kFours; i += Config::kThreads) start_copy(to + i, from + i);
  commit_copies();
}

// The sums of a thread: kTall rows by four columns.
template <class Config>
struct ThreadSums {
  using G = GemmFp32<Config>;
  float c[G::kTall][4] = {};
  int row, column, split;

  __device__ ThreadSums() {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    row = warp % Config::kDown * 32 + lane / Config::kColumnLanes;
    split = warp / Config::kDown % Config::kSplit;
    column = (warp / (Config::kDown * Config::kSplit) * Config::kColumnLanes + lane % Config::kColumnLanes) * 4;
  }

  // Adds the products of one chunk.
  __device__ void add(const float* stage) {
    constexpr int kOwn = Config::kChunk / Config::kSplit;
    const float* rows = stage + row * G::kPitch + split * kOwn;
    const float* weight = stage + G::kWeightAt + split * kOwn * G::kColumns + column;
#pragma unroll 2
    for (int k = 0; k < kOwn; k += 4) {
      float4 x[G::kTall];
#pragma unroll
      for (int i = 0; i < G::kTall; ++i) {
        x[i] = *reinterpret_cast<const float4*>(rows + i * G::kRowLanes * G::kPitch + k);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 w = *reinterpret_cast<const float4*>(weight + (k + j) * G::kColumns);
#pragma unroll
        for (int i = 0; i < G::kTall; ++i) {
          const float v = j == 0 ? x[i].x : j == 1 ? x[i].y : j == 2 ? x[i].z : x[i].w;
          c[i][0] = __fmaf_rn(v, w.x, c[i][0]);
          c[i][1] = __fmaf_rn(v, w.y, c[i][1]);
          c[i][2] = __fmaf_rn(v, w.z, c[i][2]);
          c[i][3] = __fmaf_rn(v, w.w, c[i][3]);
        }
      }
    }
  }

  __device__ void store(float* out) const {
    float* to = out + split * G::kPart + row * G::kOutPitch + column;
#pragma unroll
    for (int i = 0; i < G::kTall; ++i) {
      *reinterpret_cast<float4*>(to + i * G::kRowLanes * G::kOutPitch) =
          make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
    }
  }
};

// Loads a row of the result from shared memory into a tile, and adds up its partial sums.
template <class Config, class Tile>
__device__ void read_parts(Tile& tile, const float* row) {
#pragma unroll
  for (int i = 0; i < Tile::kPer; i += 4) {
    const int column = tile.column(i);
    if (column >= Config::kOut) continue;
    float4 sum = *reinterpret_cast<const float4*>(row + column);
#pragma unroll
    for (int part = 1; part < Config::kSplit; ++part) {
      const float4 other = *reinterpret_cast<const float4*>(row + part * GemmFp32<Config>::kPart + column);
      sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
    }
    const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (tile.valid(i + k)) tile.v[i + k] = v[k];
    }
  }
}

// Computes the products of the rows of a block, and leaves them in shared memory, in kSplit parts.
template <class Config>
__device__ void multiply_rows(const GemmFp32Args& args, int64_t begin, float* stages) {
  using G = GemmFp32<Config>;
  ThreadSums<Config> sums;
  load_chunk<Config>(args, begin, 0, stages);
#pragma unroll 1
  for (int chunk = 0; chunk < G::kChunks; ++chunk) {
    if (chunk + 1 < G::kChunks) {
      load_chunk<Config>(args, begin, chunk + 1, stages + (chunk + 1) % G::kStages * G::kStage);
      wait_for_copies_but<1>();
    } else {
      wait_for_copies_but<0>();
    }
    __syncthreads();
    sums.add(stages + chunk % G::kStages * G::kStage);
    __syncthreads();
  }
  sums.store(stages);
  __syncthreads();
}

template <class Config, int kLanes, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks) gemm_fp32(GemmFp32Args args, Epilogue epilogue) {
  begin_kernel();
  extern __shared__ __align__(16) float stages[];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * Config::kRows;
  multiply_rows<Config>(args, begin, stages);
  constexpr int kGroups = Config::kThreads / kLanes;
#pragma unroll 1
  for (int place = static_cast<int>(threadIdx.x) / kLanes; place < Config::kRows && begin + place < args.rows;
       place += kGroups) {
    RowTile<Config::kOut, kLanes> tile;
    read_parts<Config>(tile, stages + place * GemmFp32<Config>::kOutPitch);
    epilogue(tile, begin + place);
  }
}

// gemm_fp32_sums: gemm_fp32 for epilogues with a sum over all rows (step::col_sum). A block processes every `shares`-th
// block of rows, and stores the sums of its rows, which sum_parts adds up.

struct GemmFp32SumsArgs {
  GemmFp32Args product;
  float* part;  // [shares, kOut]
  int64_t shares;
};

template <class Config, int kLanes, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    gemm_fp32_sums(GemmFp32SumsArgs args, Epilogue epilogue) {
  begin_kernel();
  using G = GemmFp32<Config>;
  extern __shared__ __align__(16) float stages[];
  constexpr int kGroups = Config::kThreads / kLanes;
  static_assert(kGroups * Config::kOut <= G::kFloats, "the sums of all groups fit where the rows were");
  const int64_t rows = args.product.rows;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  SummedTile<RowTile<Config::kOut, kLanes>> tile;
#pragma unroll 1
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * Config::kRows; begin < rows;
       begin += args.shares * Config::kRows) {
    multiply_rows<Config>(args.product, begin, stages);
#pragma unroll 1
    for (int place = group; place < Config::kRows && begin + place < rows; place += kGroups) {
      tile.clear();
      read_parts<Config>(tile, stages + place * G::kOutPitch);
      epilogue(tile, begin + place);
    }
    __syncthreads();
  }
  store_sums<kGroups>(tile, group, stages, args.part + static_cast<int64_t>(blockIdx.x) * Config::kOut);
}

// pack_fp32: copies a weight to [kPlaces, kColumns], columns of the result side by side, and pads it with zeros.

struct PackFp32Args {
  const float* weight;
  float* packed;
  float* zero;  // set to 0 for the epilogue of the product (step::scale_tensor), or null
};

// Compile-time configuration of pack_fp32. kInnerStride and kOutStride: elements of the weight from one column of x,
// and from one output, to the next.
template <int kInner_, int kOut_, int kInnerStride_, int kOutStride_, int kPlaces_, int kColumns_>
struct PackFp32Config {
  static constexpr int kInner = kInner_, kOut = kOut_, kInnerStride = kInnerStride_, kOutStride = kOutStride_;
  static constexpr int kPlaces = kPlaces_, kColumns = kColumns_;
};

template <class Config>
__global__ void __launch_bounds__(256) pack_fp32(PackFp32Args args) {
  begin_kernel();
  const int index = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (args.zero != nullptr && index == 0) *args.zero = 0.0f;
  if (index >= Config::kPlaces * Config::kColumns) return;
  // Neighboring threads read neighboring elements of the weight, and the writes of a block meet in L2.
  constexpr bool kByColumn = Config::kInnerStride == 1;
  const int column = kByColumn ? index / Config::kPlaces : index % Config::kColumns;
  const int place = kByColumn ? index % Config::kPlaces : index / Config::kColumns;
  const bool exists = place < Config::kInner && column < Config::kOut;
  const int64_t from =
      static_cast<int64_t>(place) * Config::kInnerStride + static_cast<int64_t>(column) * Config::kOutStride;
  args.packed[static_cast<int64_t>(place) * Config::kColumns + column] = exists ? __ldg(args.weight + from) : 0.0f;
}

}  // namespace gnnc
