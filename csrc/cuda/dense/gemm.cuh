#pragma once

// gemm: x @ w^T for tall and narrow x, for one weight or several, then the epilogue of each product on whole rows. x is
// quantized or rounded while it is loaded, so that x is read once, in the type that it has in memory.
//
// A block processes Config::kRows rows of x, Config::kChunk columns at a time. Its warps load the rows into shared
// memory as int8 or 8-bit floats (quantized with one scale a row, or already quantized), fp16 or bf16; the products run
// on the tensor cores (mma.sync, sums in int32 or FP32) with a weight that pack_weights has packed in the fragment
// layout of the threads. The warps of a block divide the rows, the columns of the result and, where rows are long, the
// columns of x (split-K): such partial sums, like all results, pass through shared memory into row tiles, which add
// them up in a fixed order.
//
// A row that is quantized with its own scale stays in the registers of kRowWarps warps until its maximum is known, in
// one chunk. If a row is too long for that, a first pass finds its maximum, and the chunks are then read again from L2.
//
// Several weights: the rows stay in shared memory while the block computes one product after the other, each into a
// region behind the rows. A row must then be one chunk.
//
// Traffic: x once, the epilogues' outputs; the weights once a block from L2, as much again as x where a block has 16
// rows, kOut is 64 and x is FP32 multiplied as int8. Floor: x, weights and outputs once at copy bandwidth.
//
// Launch: pack_weights with blocks of 256 threads, Config::kWarps warps an output column (of kOut8) of each weight;
// then gemm with one block of Config::kThreads threads for every kRows rows and SharedOf<Parts...>::kBytes bytes of
// dynamic shared memory.

#include "common/copies.cuh"
#include "common/row_steps.cuh"
#include "common/tensor_cores.cuh"

namespace gnnc {

// The type of the operands of the tensor-core products. e5m2: of x, which is a gradient; the weight is e4m3.
enum class Product { i8, f16, bf16, e4m3, e5m2 };

// Returns whether operands are quantized: x with a scale for each row, the weight with one for each output.
__host__ __device__ constexpr bool is_quantized(Product product) {
  return product != Product::f16 && product != Product::bf16;
}

// The types of the quantized values of x and of the weight.
template <Product kProduct>
struct QuantizedTypes {
  using X = int8_t;
  using Weight = int8_t;
};
template <>
struct QuantizedTypes<Product::e4m3> {
  using X = E4m3;
  using Weight = E4m3;
};
template <>
struct QuantizedTypes<Product::e5m2> {
  using X = E5m2;
  using Weight = E4m3;
};

__host__ __device__ constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }
__host__ __device__ constexpr int divide_up(int n, int by) { return (n + by - 1) / by; }

// Compile-time configuration of gemm.
//
// X: the type of x in memory, of one byte if x is quantized already and comes with scales; kInner, kOut: widths of x
// and of the result; kStride: elements from one row of x to the next; kTogether: neighboring columns that a thread
// loads at once.
//
// kRows: rows of a block; kChunk: columns in shared memory at a time, a multiple of 128, or all; kRowWarps: warps that
// load a row; kRowsOnce: rows that these warps have in flight; kDown, kSplit: number of warps that divide the rows and
// kChunk, the other warps divide kOut; kBlocks: least blocks of a multiprocessor that registers must allow, 0: the
// compiler decides.
template <Product kProduct_, class X_, int kInner_, int64_t kStride_, int kOut_, int kTogether_, int kRows_,
          int kChunk_, int kRowWarps_, int kRowsOnce_, int kDown_, int kSplit_, int kThreads_, int kBlocks_>
struct GemmConfig {
  static constexpr Product kProduct = kProduct_;
  using X = X_;
  static constexpr int kInner = kInner_, kOut = kOut_, kTogether = kTogether_, kRows = kRows_, kChunk = kChunk_;
  static constexpr int kRowWarps = kRowWarps_, kRowsOnce = kRowsOnce_, kDown = kDown_, kSplit = kSplit_;
  static constexpr int kThreads = kThreads_, kBlocks = kBlocks_;
  static constexpr int64_t kStride = kStride_;
};

struct GemmArgs {
  const void* x;
  const float* x_scale;  // [rows], scales of x, if x is quantized already
  int64_t rows;
};

// A product of x: its weight, the number of threads that run the row program of a row, and the row program. The
// configurations of all parts of a launch differ in kOut alone.
template <class Config_, int kLanes_, class Epilogue>
struct Part {
  using Config = Config_;
  static constexpr int kLanes = kLanes_;
  const uint4* weight;   // packed by pack_weights
  const float* w_scale;  // [kOut], quantized products only
  Epilogue epilogue;
};

// The size of one operand element.
template <Product kProduct>
struct OperandSize {
  static constexpr int kBytes = is_quantized(kProduct) ? 1 : 2;
};

// Sizes of a row of x in tensor-core steps. One step takes 32 bytes of a row: 32 quantized values or 16 of 16 bits. A
// thread loads the weight of two steps at once: a pair.
template <int kInner, int kBytes>
struct Inner {
  static constexpr int kRowBytes = round_up(kInner * kBytes, 64);
  static constexpr int kPairs = kRowBytes / 64;
  static constexpr int kPlaces = kRowBytes / kBytes;
};

// The order of columns of a row in shared memory, and in the packed weight. A warp loads runs of 128 columns (the last
// run has fewer threads), kTogether neighboring columns a thread at a time, which is the fastest way to read rows of
// any alignment. The four columns of a thread are then stored side by side: the sum over columns does not depend on
// their order.
template <int kPlaces, int kTogether>
struct Order {
  __device__ static constexpr int threads(int run) {
    return kPlaces - run * 128 < 128 ? (kPlaces - run * 128) / 4 : 32;
  }
  // Returns the column of one of the four elements at position run * 128 + thread * 4.
  __device__ static constexpr int column(int run, int thread, int element) {
    return run * 128 + element / kTogether * kTogether * threads(run) + thread * kTogether + element % kTogether;
  }
};

// Sizes of a gemm kernel: tiles by warp, and the layout of its shared memory.
template <class Config>
struct Gemm {
  static constexpr int kBytes = OperandSize<Config::kProduct>::kBytes;
  using K = Inner<Config::kInner, kBytes>;
  static constexpr int kChunk = Config::kChunk < K::kPlaces ? Config::kChunk : K::kPlaces;
  static constexpr int kChunks = divide_up(K::kPlaces, kChunk);
  static constexpr int kLast = (kChunks - 1) * kChunk;  // first column of the last chunk
  // Bytes of a row in shared memory; the padding puts eight rows into different banks.
  static constexpr int kPitch = kChunk * kBytes + 16;
  static constexpr int kOut8 = round_up(Config::kOut, 8);
  static constexpr int kOutPitch = kOut8 + 4;
  static constexpr int kWarps = Config::kThreads / 32;
  static constexpr int kAcross = kWarps / (Config::kDown * Config::kSplit);
  static constexpr int kTilesDown = Config::kRows / 16 / Config::kDown;  // tiles of sixteen rows that a warp has
  static constexpr int kTiles = kOut8 / 8;                               // tiles of eight columns of the result
  static constexpr int kTilesWarp = divide_up(kTiles, kAcross);          // tiles of columns that a warp has
  static constexpr int kMostOnce = kTilesDown > 1 || kChunks > 1 ? 16 / kTilesDown : 8;
  // Tiles of columns that a warp holds in registers at once.
  static constexpr int kTilesOnce = kTilesWarp < kMostOnce ? kTilesWarp : kMostOnce;
  static constexpr bool kHoldsSums = kTilesWarp == kTilesOnce;  // registers hold the sums of a whole row of the result
  // Pairs whose weights are loaded at once: the weights of eight tiles in flight are enough.
  static constexpr int kUnroll = kTilesDown * kTilesOnce >= 8 || Config::kSplit > 1 ? 1 : 2;
  static constexpr int kRowsBytes = Config::kRows * kPitch;
  static constexpr int kPart = Config::kRows * kOutPitch;  // words of one partial sum
  static constexpr int kOutBytes = Config::kSplit * kPart * 4;
  static_assert(Config::kRows % (16 * Config::kDown) == 0 && kWarps % (Config::kDown * Config::kSplit) == 0,
                "warps must divide the rows into tiles of sixteen");
  static_assert(kChunk == K::kPlaces || kChunk % 128 == 0, "chunks must consist of whole runs of 128 columns");
  static_assert(kChunks == 1 || kHoldsSums, "with several chunks, registers must hold all accumulators");
};

__host__ __device__ constexpr int largest(int a) { return a; }
template <class... Ints>
__host__ __device__ constexpr int largest(int a, int b, Ints... others) {
  return largest(a > b ? a : b, others...);
}

// The layout of shared memory: rows of x, results, scales of the rows, their largest values by warp. The results of a
// single product overwrite the rows, if registers hold its sums.
template <class First, class... Others>
struct SharedOf {
  using Config = typename First::Config;
  using G = Gemm<Config>;
  static constexpr bool kInPlace = sizeof...(Others) == 0 && G::kHoldsSums;
  static constexpr int kOutBytes = largest(G::kOutBytes, Gemm<typename Others::Config>::kOutBytes...);
  static constexpr int kOutAt = kInPlace ? 0 : G::kRowsBytes;
  static constexpr int kScalesAt = largest(kOutAt + kOutBytes, G::kRowsBytes);
  static constexpr int kTopsAt = kScalesAt + Config::kRows * 4;
  static constexpr int kBytes = kTopsAt + Config::kRows * Config::kRowWarps * 4;
  static_assert(sizeof...(Others) == 0 || G::kChunks == 1, "rows of several chunks must be those of a single product");
};

__device__ inline uint32_t two_halves(float a, float b, Product product) {
  return product == Product::f16 ? two_halves(a, b, __half{}) : two_halves(a, b, __nv_bfloat16{});
}

// Returns the quantized values of four columns as bytes; the largest |value| of the row is that of T / inverse.
template <class T>
__device__ inline uint32_t four_quantized(float4 v, float inverse) {
  const auto scaled = [=](float x) { return __fmul_rn(x, inverse); };
  uint32_t low, high;
  if constexpr (Quantized<T>::kIsInteger) {
    const auto code = [=](float x) { return step::rounded(scaled(x)); };
    low = __byte_perm(code(v.x), code(v.y), 0x0040), high = __byte_perm(code(v.z), code(v.w), 0x0040);
  } else {
    low = narrowed<T>(scaled(v.x), scaled(v.y)), high = narrowed<T>(scaled(v.z), scaled(v.w));
  }
  return __byte_perm(low, high, 0x5410);
}

__device__ inline float larger_abs(float top, float4 v) {
  return larger_abs(larger_abs(larger_abs(larger_abs(top, v.x), v.y), v.z), v.w);
}

// Returns the maximum of `top` over the warp.
__device__ inline float largest_of_warp(float top) {
  // No value is negative, so that bits compare like values.
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(top)));
}

// Load: loads rows of x and stores them in shared memory, as quantized or 16-bit values. This version loads floats.

template <class Config, bool kIsQuantized = sizeof(typename Config::X) == 1>
struct Load {
  using X = typename Config::X;
  using T = typename QuantizedTypes<Config::kProduct>::X;
  using G = Gemm<Config>;
  static constexpr bool kQuantizes = is_quantized(Config::kProduct);
  static constexpr int kTeams = G::kWarps / Config::kRowWarps;
  static constexpr int kTurn = kTeams * Config::kRowsOnce;  // rows that a block has in flight
  static_assert(Config::kStride % Config::kTogether == 0 && Config::kInner % Config::kTogether == 0,
                "loads must be aligned");
  static_assert(Config::kRows % kTurn == 0, "every turn must have all of its rows");
  static_assert(G::kChunks == 1 || Config::kRowWarps == 1, "a row of several chunks must be loaded by one warp");

  // The values that a warp loads from the kRowsOnce rows of one turn, in one chunk.
  template <bool kLast>
  struct Turn {
    static constexpr int kColumns = kLast ? Config::kInner - G::kLast : G::kChunk;
    using O = Order<kLast ? G::K::kPlaces - G::kLast : G::kChunk, Config::kTogether>;
    static constexpr int kRuns = divide_up(kColumns, 128 * Config::kRowWarps);
    float4 v[Config::kRowsOnce][kRuns];

    // Loads the values. Rows past the last are read as the last row, and their results are discarded.
    __device__ void read(const GemmArgs& args, int64_t begin, int place, int chunk, int part, int lane) {
      const X* first = static_cast<const X*>(args.x) + begin * Config::kStride + chunk * G::kChunk;
      const auto last = static_cast<int>(min(args.rows - begin, static_cast<int64_t>(Config::kRows))) - 1;
#pragma unroll
      for (int r = 0; r < Config::kRowsOnce; ++r) {
        const X* from = first + min(place + r * kTeams, last) * Config::kStride;
#pragma unroll
        for (int i = 0; i < kRuns; ++i) v[r][i] = run(from, i, part, lane);
      }
    }

    __device__ static float4 run(const X* from, int i, int part, int lane) {
      const bool whole = (i + 1) * Config::kRowWarps * 128 <= kColumns;
      const int run = i * Config::kRowWarps + part;
      float v[4];
#pragma unroll
      for (int k = 0; k < 4; k += Config::kTogether) {
        const int column = whole ? run * 128 + k * 32 + lane * Config::kTogether : O::column(run, lane, k);
        Vector<X, Config::kTogether> read = {};
        if (whole || (lane < O::threads(run) && column < kColumns)) {
          read = *reinterpret_cast<const Vector<X, Config::kTogether>*>(from + column);
        }
#pragma unroll
        for (int n = 0; n < Config::kTogether; ++n) v[k + n] = step::as_float(read.v[n]);
      }
      return make_float4(v[0], v[1], v[2], v[3]);
    }

    // Raises top[r] to the largest |v| of each row.
    __device__ void tops(float (&top)[Config::kRowsOnce]) const {
#pragma unroll
      for (int r = 0; r < Config::kRowsOnce; ++r) {
#pragma unroll
        for (int i = 0; i < kRuns; ++i) top[r] = larger_abs(top[r], v[r][i]);
      }
    }

    __device__ void put(int r, char* row, float inverse, int part, int lane) const {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        const int run = i * Config::kRowWarps + part;
        if (lane >= O::threads(run)) continue;
        const float4 x = v[r][i];
        char* to = row + (run * 128 + lane * 4) * G::kBytes;
        if constexpr (kQuantizes) {
          *reinterpret_cast<uint32_t*>(to) = four_quantized<T>(x, inverse);
        } else {
          *reinterpret_cast<uint2*>(to) =
              make_uint2(two_halves(x.x, x.y, Config::kProduct), two_halves(x.z, x.w, Config::kProduct));
        }
      }
    }
  };

  // Computes the scales of the rows, if they have several chunks; the chunks are then read again.
  __device__ static void scales(const GemmArgs& args, int64_t begin, float* scales) {
    if constexpr (kQuantizes && G::kChunks > 1) {
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
      for (int place = warp; place < Config::kRows; place += kTurn) {
        float top[Config::kRowsOnce] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < G::kChunks - 1; ++chunk) {
          Turn<false> turn;
          turn.read(args, begin, place, chunk, 0, lane);
          turn.tops(top);
        }
        Turn<true> turn;
        turn.read(args, begin, place, G::kChunks - 1, 0, lane);
        turn.tops(top);
#pragma unroll
        for (int r = 0; r < Config::kRowsOnce; ++r) {
          const float scale = step::scale_of<T>(largest_of_warp(top[r]));
          if (lane == 0) scales[place + r * kTeams] = scale;
        }
      }
      __syncthreads();
    }
  }

  template <bool kLast>
  __device__ static void chunk(const GemmArgs& args, int64_t begin, int chunk, char* rows, float* scales, float* tops) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = warp % Config::kRowWarps;
#pragma unroll 1
    for (int place = warp / Config::kRowWarps; place < Config::kRows; place += kTurn) {
      Turn<kLast> turn;
      turn.read(args, begin, place, chunk, part, lane);
      float inverse[Config::kRowsOnce] = {};
      if constexpr (kQuantizes && G::kChunks > 1) {
#pragma unroll
        for (int r = 0; r < Config::kRowsOnce; ++r) inverse[r] = step::inverse_of(scales[place + r * kTeams]);
      } else if constexpr (kQuantizes) {
        measure(turn, inverse, place, part, lane, scales, tops);
      }
#pragma unroll
      for (int r = 0; r < Config::kRowsOnce; ++r) {
        turn.put(r, rows + (place + r * kTeams) * G::kPitch, inverse[r], part, lane);
      }
    }
  }

  // Computes the scales of the rows of a turn, whose values are all in registers, and the inverses of the scales.
  // Called by all warps of the block together.
  template <class TurnOf>
  __device__ static void measure(const TurnOf& turn, float (&inverse)[Config::kRowsOnce], int place, int part, int lane,
                                 float* scales, float* tops) {
    float top[Config::kRowsOnce] = {};
    turn.tops(top);
#pragma unroll
    for (int r = 0; r < Config::kRowsOnce; ++r) top[r] = largest_of_warp(top[r]);
    if constexpr (Config::kRowWarps > 1) {
#pragma unroll
      for (int r = 0; r < Config::kRowsOnce; ++r) {
        if (lane == 0) tops[(place + r * kTeams) * Config::kRowWarps + part] = top[r];
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < Config::kRowsOnce; ++r) {
#pragma unroll
        for (int i = 0; i < Config::kRowWarps; ++i) {
          top[r] = larger_abs(top[r], tops[(place + r * kTeams) * Config::kRowWarps + i]);
        }
      }
    }
    // Each thread computes the division for one row.
    float own = top[0];
#pragma unroll
    for (int r = 1; r < Config::kRowsOnce; ++r) own = lane == r ? top[r] : own;
    const float scale = step::scale_of<T>(own), own_inverse = step::inverse_of(scale);
    if (part == 0 && lane < Config::kRowsOnce) scales[place + lane * kTeams] = scale;
#pragma unroll
    for (int r = 0; r < Config::kRowsOnce; ++r) inverse[r] = __shfl_sync(0xffffffffu, own_inverse, r);
  }
};

// This version of Load copies quantized values unchanged. Columns past the width may hold any number, because the
// weight is zero there; those of 8-bit floats must not be NaN.

template <class Config>
struct Load<Config, true> {
  using G = Gemm<Config>;
  static_assert(Config::kStride % 16 == 0, "quantized rows must start on 16 bytes");

  __device__ static void scales(const GemmArgs& args, int64_t begin, float* scales) {
    for (int place = threadIdx.x; place < Config::kRows; place += Config::kThreads) {
      scales[place] = __ldg(args.x_scale + min(begin + place, args.rows - 1));
    }
  }

  template <bool kLast>
  __device__ static void chunk(const GemmArgs& args, int64_t begin, int chunk, char* rows, float*, float*) {
    constexpr int kPieces = (kLast ? G::K::kPlaces - G::kLast : G::kChunk) / 16;
    constexpr int kAll = Config::kRows * kPieces;
#pragma unroll 2
    for (int i = 0; i < divide_up(kAll, Config::kThreads); ++i) {
      const int index = i * Config::kThreads + threadIdx.x;
      if (kAll % Config::kThreads != 0 && index >= kAll) break;
      const int place = index / kPieces, byte = index % kPieces * 16, column = chunk * G::kChunk + byte;
      const int64_t row = min(begin + place, args.rows - 1);
      const int8_t* from = static_cast<const int8_t*>(args.x) + row * Config::kStride;
      const bool exists = column < Config::kInner;
      start_copy_if(exists, reinterpret_cast<int4*>(rows + place * G::kPitch + byte),
                    reinterpret_cast<const int4*>(from + (exists ? column : 0)));
    }
    wait_for_copies();
  }
};

// Tensor-core products: sixteen rows by eight columns a step.

// The type of the accumulators: FP32, or int32 for int8 products.
template <Product kProduct>
struct Sums {
  using Word = float;
};
template <>
struct Sums<Product::i8> {
  using Word = int32_t;
};

template <Product kProduct>
__device__ inline void multiply(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <Product kProduct>
__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kProduct == Product::e4m3) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (kProduct == Product::e5m2) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (kProduct == Product::f16) {
    multiply_halves(c, a, b0, b1, __half{});
  } else {
    multiply_halves(c, a, b0, b1, __nv_bfloat16{});
  }
}

__device__ inline void load_rows(uint32_t (&a)[4], const char* shared) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

// The accumulators of a warp: tiles of sixteen rows by tiles of eight columns, from tile `first` on.
template <class Config>
struct WarpSums {
  using G = Gemm<Config>;
  using Word = typename Sums<Config::kProduct>::Word;
  // The stored type: partial sums in the type of the accumulator, complete sums in FP32.
  using Out = typename Sums<(Config::kSplit > 1 ? Config::kProduct : Product::f16)>::Word;
  Word c[G::kTilesDown][G::kTilesOnce][4];
  int lane, down, split;

  __device__ WarpSums() : lane(threadIdx.x % 32) {
    const int warp = threadIdx.x / 32;
    down = warp % Config::kDown * G::kTilesDown * 16;
    split = warp / Config::kDown % Config::kSplit;
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < G::kTilesDown * G::kTilesOnce * 4; ++i)
      c[i / 4 / G::kTilesOnce][i / 4 % G::kTilesOnce][i % 4] = 0;
  }

  // The weight of one pair of steps for every tile that the warp holds.
  struct Weight {
    uint4 tile[G::kTilesOnce];

    __device__ Weight(const uint4* weight, int first, int pair) {
#pragma unroll
      for (int t = 0; t < G::kTilesOnce; ++t) {
        // Tiles past the last repeat the last tile, and are not stored.
        const int number = first + t < G::kTiles ? first + t : G::kTiles - 1;
        tile[t] = __ldg(weight + (number * G::K::kPairs + pair) * 32);
      }
    }
  };

  // Adds the products of kPairs pairs of steps, from the beginning of `chunk` on.
  template <int kPairs>
  __device__ void add(const uint4* weight, const char* rows, int first, int chunk) {
    const char* from = rows + (down + lane % 16) * G::kPitch + lane / 16 * 16;
    weight += chunk * (G::kChunk * G::kBytes / 64) * 32 + lane;
    if constexpr (Config::kSplit > 1) {
      // With split-K a warp has few pairs, and the multiprocessor has too few other warps to hide latency: the next
      // weight is requested before the current weight is waited for.
      Weight next(weight, first, min(split, kPairs - 1));
#pragma unroll 1
      for (int pair = split; pair < kPairs; pair += Config::kSplit) {
        const Weight now = next;
        next = Weight(weight, first, min(pair + Config::kSplit, kPairs - 1));
        multiply_pair(now, from, pair);
      }
    } else {
#pragma unroll G::kUnroll
      for (int pair = split; pair < kPairs; pair += Config::kSplit) {
        multiply_pair(Weight(weight, first, pair), from, pair);
      }
    }
  }

  __device__ void multiply_pair(const Weight& weight, const char* from, int pair) {
    uint32_t a[G::kTilesDown][2][4];
#pragma unroll
    for (int i = 0; i < G::kTilesDown * 2; ++i) {
      load_rows(a[i / 2][i % 2], from + i / 2 * 16 * G::kPitch + pair * 64 + i % 2 * 32);
    }
#pragma unroll
    for (int t = 0; t < G::kTilesOnce; ++t) {
      const uint4 b = weight.tile[t];
#pragma unroll
      for (int i = 0; i < G::kTilesDown; ++i) {
        multiply<Config::kProduct>(c[i][t], a[i][0], b.x, b.y);
        multiply<Config::kProduct>(c[i][t], a[i][1], b.z, b.w);
      }
    }
  }

  __device__ void store(Out* out, int first) const {
    using Two = Vector<Out, 2>;
    const auto word = [](Word x) { return static_cast<Out>(x); };
#pragma unroll
    for (int i = 0; i < G::kTilesDown; ++i) {
      Out* row = out + split * G::kPart + (down + i * 16 + lane / 4) * G::kOutPitch + lane % 4 * 2;
#pragma unroll
      for (int t = 0; t < G::kTilesOnce; ++t) {
        if (first + t >= G::kTiles) continue;
        *reinterpret_cast<Two*>(row + (first + t) * 8) = {word(c[i][t][0]), word(c[i][t][1])};
        *reinterpret_cast<Two*>(row + (first + t) * 8 + 8 * G::kOutPitch) = {word(c[i][t][2]), word(c[i][t][3])};
      }
    }
  }
};

// Loads a row of the result from shared memory into a tile, and adds up its partial sums.
template <class Config, class Tile, class Out>
__device__ void read_sums(Tile& tile, const Out* row) {
  using G = Gemm<Config>;
  using Four = Vector<Out, 4>;
#pragma unroll
  for (int i = 0; i < Tile::kPer; i += 4) {
    const int column = tile.column(i);
    if (column >= Config::kOut) continue;
    Four sum = *reinterpret_cast<const Four*>(row + column);
#pragma unroll
    for (int part = 1; part < Config::kSplit; ++part) {
      const Four other = *reinterpret_cast<const Four*>(row + part * G::kPart + column);
#pragma unroll
      for (int k = 0; k < 4; ++k) sum.v[k] += other.v[k];
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (tile.valid(i + k)) tile.v[i + k] = static_cast<float>(sum.v[k]);
    }
  }
}

// Stores the sums of a product, adds the rest of its columns, and runs its row program on the rows of the block.
template <bool kInPlace, class P>
__device__ void finish(WarpSums<typename P::Config>& sums, const GemmArgs& args, const P& part, const char* rows,
                       typename WarpSums<typename P::Config>::Out* out, const float* scales, int64_t begin) {
  using Config = typename P::Config;
  using G = Gemm<Config>;
  int first = threadIdx.x / 32 / (Config::kDown * Config::kSplit) * G::kTilesWarp;
  for (const int end = first + G::kTilesWarp; first < end; first += G::kTilesOnce) {
    sums.template add<G::K::kPairs - G::kLast * G::kBytes / 64>(part.weight, rows, first, G::kChunks - 1);
    if constexpr (kInPlace) __syncthreads();
    sums.store(out, first);
    sums.clear();
  }
  __syncthreads();
  constexpr int kGroups = Config::kThreads / P::kLanes;
  static_assert(Config::kRows % kGroups == 0 || kGroups % Config::kRows == 0,
                "the groups of threads must divide the rows evenly");
  const auto finish_row = [&](int place) {
    RowTile<Config::kOut, P::kLanes> tile;
    read_sums<Config>(tile, out + place * G::kOutPitch);
    if constexpr (is_quantized(Config::kProduct)) {
      step::with_scalar(tile, scales[place], step::Multiply{});
      step::with_columns(tile, part.w_scale, step::Multiply{});
    }
    part.epilogue(tile, begin + place);
  };
  constexpr int kTurns = divide_up(Config::kRows, kGroups);
  // Two turns are not unrolled, because both rows would need registers at the same time.
  constexpr int kUnroll = kTurns > 2 ? 4 : 1;
  const int group = threadIdx.x / P::kLanes;
  if (begin + Config::kRows <= args.rows) {
#pragma unroll kUnroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int place = group + turn * kGroups;
      if (Config::kRows % kGroups == 0 || place < Config::kRows) finish_row(place);
    }
  } else {
#pragma unroll 1
    for (int place = group; place < Config::kRows && begin + place < args.rows; place += kGroups) finish_row(place);
  }
}

// Computes one more product of the rows in shared memory.
template <class P>
__device__ void multiply_rows(const GemmArgs& args, const P& part, const char* rows,
                              typename WarpSums<typename P::Config>::Out* out, const float* scales, int64_t begin) {
  __syncthreads();  // the results before were read
  WarpSums<typename P::Config> sums;
  sums.clear();
  finish<false>(sums, args, part, rows, out, scales, begin);
}

template <class First, class... Others>
__global__ void __launch_bounds__(First::Config::kThreads, First::Config::kBlocks)
    gemm(GemmArgs args, First first, Others... others) {
  begin_kernel();
  using Config = typename First::Config;
  using G = Gemm<Config>;
  using From = Load<Config>;
  using Layout = SharedOf<First, Others...>;
  extern __shared__ __align__(16) char shared[];
  auto* out = reinterpret_cast<typename WarpSums<Config>::Out*>(shared + Layout::kOutAt);
  float* scales = reinterpret_cast<float*>(shared + Layout::kScalesAt);
  float* tops = reinterpret_cast<float*>(shared + Layout::kTopsAt);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * Config::kRows;
  From::scales(args, begin, scales);
  WarpSums<Config> sums;
  sums.clear();
  if constexpr (G::kChunks > 1) {
    const int tile = threadIdx.x / 32 / (Config::kDown * Config::kSplit) * G::kTilesWarp;
#pragma unroll 1
    for (int chunk = 0; chunk < G::kChunks - 1; ++chunk) {
      From::template chunk<false>(args, begin, chunk, shared, scales, tops);
      __syncthreads();
      sums.template add<G::kChunk * G::kBytes / 64>(first.weight, shared, tile, chunk);
      __syncthreads();
    }
  }
  From::template chunk<true>(args, begin, G::kChunks - 1, shared, scales, tops);
  __syncthreads();
  finish<Layout::kInPlace>(sums, args, first, shared, out, scales, begin);
  (multiply_rows(args, others, shared, out, scales, begin), ...);
}

// pack_weights: packs weights in the fragment layout of the threads of a warp; outputs are padded with zeros to a
// multiple of eight, the columns of each output to whole pairs.

// A weight of a PackConfig.
template <class Config>
struct PackArgs {
  const float* weight;
  uint4* packed;
  float* scale;  // [kOut], quantized products only
  float* zero;   // set to 0 for the epilogue of the gemm (step::scale_tensor), or null
};

// Compile-time configuration of a weight. kInnerStride and kOutStride: elements of the weight from one column of x,
// and from one output, to the next; kTogether: as in GemmConfig; kWarps: warps an output, of the eight warps of a
// block.
template <Product kProduct_, int kInner_, int kOut_, int kInnerStride_, int kOutStride_, int kTogether_, int kWarps_>
struct PackConfig {
  static constexpr Product kProduct = kProduct_;
  static constexpr int kInner = kInner_, kOut = kOut_, kInnerStride = kInnerStride_, kOutStride = kOutStride_;
  static constexpr int kTogether = kTogether_, kWarps = kWarps_;
};

// The device functions of pack_weights.
template <class Config>
struct Pack {
  static constexpr bool kQuantizes = is_quantized(Config::kProduct);
  using T = typename QuantizedTypes<Config::kProduct>::Weight;
  using K = Inner<Config::kInner, OperandSize<Config::kProduct>::kBytes>;
  using O = Order<K::kPlaces, Config::kTogether>;
  static constexpr int kThreads = Config::kWarps * 32;
  static constexpr int kTurns = divide_up(K::kPlaces / 4, kThreads);
  // Groups of four columns that a thread keeps in registers; all other groups are read twice.
  static constexpr int kHeld = kTurns < 6 ? kTurns : 6;

  // Returns the four columns at place 4 * four (see Order), zeros past the width.
  __device__ static float4 read(const float* from, bool exists, int four) {
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int column = O::column(four / 32, four % 32, k);
      const bool there = exists && four < K::kPlaces / 4 && column < Config::kInner;
      v[k] = there ? __ldg(from + static_cast<int64_t>(column) * Config::kInnerStride) : 0.0f;
    }
    return make_float4(v[0], v[1], v[2], v[3]);
  }

  __device__ static void put(uint4* packed, int output, int four, float4 v, float inverse) {
    if (four >= K::kPlaces / 4) return;
    const auto word = [&](int number) -> uint32_t& {
      const int step = number / 8, half = number % 8 / 4, thread = output % 8 * 4 + number % 4;
      uint4* pair = packed + (output / 8 * K::kPairs + step / 2) * 32 + thread;
      return reinterpret_cast<uint32_t*>(pair)[step % 2 * 2 + half];
    };
    if constexpr (kQuantizes) {
      word(four) = four_quantized<T>(v, inverse);
    } else {
      word(four * 2) = two_halves(v.x, v.y, Config::kProduct);
      word(four * 2 + 1) = two_halves(v.z, v.w, Config::kProduct);
    }
  }
};

// Packs the outputs of one block of a weight.
template <class Config>
__device__ void pack_weight(const PackArgs<Config>& args, int block, float (&tops)[8]) {
  using P = Pack<Config>;
  if (args.zero != nullptr && block == 0 && threadIdx.x == 0) *args.zero = 0.0f;
  const int warp = threadIdx.x / 32, team = warp / Config::kWarps, thread = threadIdx.x % P::kThreads;
  const int output = block * (8 / Config::kWarps) + team;
  const bool exists = output < Config::kOut, is_packed = output < round_up(Config::kOut, 8);
  const float* from = args.weight + static_cast<int64_t>(output) * Config::kOutStride;
  float4 held[P::kHeld];
#pragma unroll
  for (int i = 0; i < P::kHeld; ++i) held[i] = P::read(from, exists, i * P::kThreads + thread);
  float inverse = 1.0f;
  if constexpr (P::kQuantizes) {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < P::kHeld; ++i) top = larger_abs(top, held[i]);
#pragma unroll 2
    for (int i = P::kHeld; i < P::kTurns; ++i) top = larger_abs(top, P::read(from, exists, i * P::kThreads + thread));
    tops[warp] = largest_of_warp(top);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Config::kWarps; ++i) top = larger_abs(top, tops[team * Config::kWarps + i]);
    const float scale = step::scale_of<typename P::T>(top);
    inverse = step::inverse_of(scale);
    if (thread == 0 && exists) args.scale[output] = scale;
  }
  if (!is_packed) return;
#pragma unroll
  for (int i = 0; i < P::kHeld; ++i) P::put(args.packed, output, i * P::kThreads + thread, held[i], inverse);
#pragma unroll 2
  for (int i = P::kHeld; i < P::kTurns; ++i) {
    const int four = i * P::kThreads + thread;
    P::put(args.packed, output, four, P::read(from, exists, four), inverse);
  }
}

// Packs the outputs of a block if it is one of this weight's; returns the number of the block behind them.
template <class Config>
__device__ int pack_if_own(const PackArgs<Config>& args, int block, float (&tops)[8]) {
  constexpr int kBlocks = round_up(Config::kOut, 8) * Config::kWarps / 8;
  if (block >= 0 && block < kBlocks) pack_weight(args, block, tops);
  return block - kBlocks;
}

template <class First, class... Others>
__global__ void __launch_bounds__(256) pack_weights(PackArgs<First> first, PackArgs<Others>... others) {
  begin_kernel();
  __shared__ float tops[8];
  int block = pack_if_own(first, blockIdx.x, tops);
  ((block = pack_if_own(others, block, tops)), ...);
}

}  // namespace gnnc
