#pragma once

// gemm: x @ w^T for tall and narrow x, then the epilogue on whole rows. x is quantized or rounded while it is loaded,
// so that it is read once, as it is.
//
// A block takes Config::kRows rows of x. Its warps bring them into shared memory as int8 (each row with its own scale,
// or codes as they are), fp16 or bf16; the products run on the tensor cores (mma.sync, sums in int32 or FP32) against a
// weight that pack_weight has laid out as the threads hold it; results pass through shared memory into row tiles.
//
// Traffic: x once, the weight once a block from L2, the epilogue's outputs. Floor: these bytes at copy bandwidth.
//
// Launch: pack_weight with blocks of 256 threads, a warp an output column (of kOut8); then gemm with one block of
// Config::kThreads threads for every kRows rows and Gemm<Config>::kShared bytes of dynamic shared memory.

#include "row_steps.cuh"

namespace gnnc {

enum class Product { i8, f16, bf16 };

__host__ __device__ constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// kX: the type of x in memory; kStride: elements from one of its rows to the next; kInner, kOut: widths of x and of the
// result; kScaled: x is given as codes, with its scales.
template <Product kProduct_, class X_, int kInner_, int64_t kStride_, int kOut_, int kRows_, int kThreads_ = 128>
struct GemmConfig {
  static constexpr Product kProduct = kProduct_;
  using X = X_;
  static constexpr int kInner = kInner_, kOut = kOut_, kRows = kRows_, kThreads = kThreads_;
  static constexpr int64_t kStride = kStride_;
};

struct GemmArgs {
  const void* x;
  const float* x_scale;  // [rows], where x is given as codes
  const uint4* weight;   // as pack_weight lays it out
  const float* w_scale;  // [kOut], int8 only
  int64_t rows;
};

// One step of the tensor cores takes 32 bytes of a row: 32 int8 or 16 numbers of 16 bits.
template <int kInner, int kBytes>
struct Inner {
  static constexpr int kSteps = round_up(round_up(kInner * kBytes, 32) / 32, 2);  // even: a thread loads two at once
  static constexpr int kRowBytes = kSteps * 32;
};

template <Product kProduct>
struct Codes {
  static constexpr int kBytes = kProduct == Product::i8 ? 1 : 2;
};

template <class Config>
struct Gemm {
  static constexpr int kBytes = Codes<Config::kProduct>::kBytes;
  using K = Inner<Config::kInner, kBytes>;
  static constexpr int kPitch = K::kRowBytes + 16;  // so that eight rows lie in different banks
  static constexpr int kOut8 = round_up(Config::kOut, 8);
  static constexpr int kOutPitch = kOut8 + 4;
  static constexpr int kWarps = Config::kThreads / 32;
  static constexpr int kWarpsDown = Config::kRows / 16, kWarpsAcross = kWarps / kWarpsDown;
  static constexpr int kTiles = kOut8 / 8;                                       // columns of tiles
  static constexpr int kTilesWarp = (kTiles + kWarpsAcross - 1) / kWarpsAcross;  // of one warp
  static constexpr int kTilesOnce = kTilesWarp < 8 ? kTilesWarp : 8;             // that it holds in registers
  static constexpr int kRowsBytes = Config::kRows * kPitch;
  static constexpr int kShared = kRowsBytes + Config::kRows * 4 + Config::kRows * kOutPitch * 4;
  static_assert(Config::kRows % 16 == 0 && kWarps % kWarpsDown == 0, "warps cover the rows, sixteen each");
};

__device__ inline uint32_t two_halves(float a, float b, Product product) {
  if (product == Product::f16) {
    const __half2 v = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
  const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// Codes of four values: rint(v * inverse), held to +-127, as bytes.
__device__ inline uint32_t four_codes(float4 v, float inverse) {
  const auto code = [=](float x) {
    return static_cast<uint32_t>(static_cast<int>(step::code_of(__fmul_rn(x, inverse))));
  };
  const uint32_t low = __byte_perm(code(v.x), code(v.y), 0x0040), high = __byte_perm(code(v.z), code(v.w), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

// Loading: a warp reads rows in runs of four columns a thread.

template <class Config>
struct Load {
  using G = Gemm<Config>;
  using X = typename Config::X;
  static constexpr int kRuns = (Config::kInner + 127) / 128;  // runs of four of one thread
  static constexpr bool kHold = kRuns <= 16;                  // does a row fit into the registers of a warp?
  static constexpr int kMost = Config::kRows / G::kWarps;     // rows of a warp
  static constexpr int kRowsOnce = kRuns > 4 ? 1 : 8 / kRuns < kMost ? 8 / kRuns : kMost;

  struct alignas(2 * sizeof(X)) Two {
    X v[2];
  };

  // Columns 4 * (32 * run + lane) and on; zeros where there are none.
  __device__ static float4 run(const X* row, int run, int lane, bool exists) {
    const int column = (run * 32 + lane) * 4;
    const X* from = row + column;
    if (!exists || column >= Config::kInner) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if constexpr (Config::kStride % 4 == 0 && Config::kInner % 4 == 0) {
      const auto v = *reinterpret_cast<const step::Vector<X, 4>*>(from);
      return make_float4(step::as_float(v.v[0]), step::as_float(v.v[1]), step::as_float(v.v[2]),
                         step::as_float(v.v[3]));
    } else if constexpr (Config::kStride % 2 == 0 && Config::kInner % 2 == 0) {
      const auto a = *reinterpret_cast<const Two*>(from);
      float4 v = make_float4(step::as_float(a.v[0]), step::as_float(a.v[1]), 0.0f, 0.0f);
      if (column + 2 < Config::kInner) {
        const auto b = *reinterpret_cast<const Two*>(from + 2);
        v.z = step::as_float(b.v[0]);
        v.w = step::as_float(b.v[1]);
      }
      return v;
    } else {
      return make_float4(step::as_float(from[0]), column + 1 < Config::kInner ? step::as_float(from[1]) : 0.0f,
                         column + 2 < Config::kInner ? step::as_float(from[2]) : 0.0f,
                         column + 3 < Config::kInner ? step::as_float(from[3]) : 0.0f);
    }
  }

  __device__ static void put(char* row, int run, int lane, float4 v, float inverse) {
    const int column = (run * 32 + lane) * 4;
    if (column * G::kBytes >= G::K::kRowBytes) return;
    if constexpr (Config::kProduct == Product::i8) {
      *reinterpret_cast<uint32_t*>(row + column) = four_codes(v, inverse);
    } else {
      *reinterpret_cast<uint2*>(row + 2 * column) =
          make_uint2(two_halves(v.x, v.y, Config::kProduct), two_halves(v.z, v.w, Config::kProduct));
    }
  }

  __device__ static float scale_of_row(uint32_t top, float* scale, int lane) {
    top = __reduce_max_sync(0xffffffffu, top);
    const float value = step::scale_of(__uint_as_float(top));
    if (lane == 0) *scale = value;
    return step::inverse_of(value);
  }

  __device__ static uint32_t larger(uint32_t top, float4 v) {
    const uint32_t mask = 0x7fffffffu;
    const uint32_t a = max(__float_as_uint(v.x) & mask, __float_as_uint(v.y) & mask);
    const uint32_t b = max(__float_as_uint(v.z) & mask, __float_as_uint(v.w) & mask);
    return max(top, max(a, b));
  }

  // Bytes between the last run and the end of the row in shared memory.
  __device__ static void clear_rest(char* row, int lane) {
#pragma unroll
    for (int byte = kRuns * 128 * G::kBytes; byte < G::K::kRowBytes; byte += 128) {
      if (byte + lane * 4 < G::K::kRowBytes) *reinterpret_cast<uint32_t*>(row + byte + lane * 4) = 0;
    }
  }

  // Rows first, first + kWarps, ...: kRowsOnce at a time, so that enough loads are under way.
  __device__ static void held_rows(const GemmArgs& args, int64_t begin, char* rows, float* scales, int warp, int lane) {
    static_assert(Config::kRows % (G::kWarps * kRowsOnce) == 0, "every turn has all of its rows");
#pragma unroll 1
    for (int r0 = warp; r0 < Config::kRows; r0 += G::kWarps * kRowsOnce) {
      float4 v[kRowsOnce][kRuns];
#pragma unroll
      for (int r = 0; r < kRowsOnce; ++r) {
        const int64_t row = begin + r0 + r * G::kWarps;
        const bool exists = row < args.rows;
        const X* from = static_cast<const X*>(args.x) + (exists ? row : 0) * Config::kStride;
#pragma unroll
        for (int i = 0; i < kRuns; ++i) v[r][i] = run(from, i, lane, exists);
      }
#pragma unroll
      for (int r = 0; r < kRowsOnce; ++r) {
        const int place = r0 + r * G::kWarps;
        char* row = rows + place * G::kPitch;
        float inverse = 1.0f;
        if constexpr (Config::kProduct == Product::i8) {
          uint32_t top = 0;
#pragma unroll
          for (int i = 0; i < kRuns; ++i) top = larger(top, v[r][i]);
          inverse = scale_of_row(top, scales + place, lane);
        }
#pragma unroll
        for (int i = 0; i < kRuns; ++i) put(row, i, lane, v[r][i], inverse);
        clear_rest(row, lane);
      }
    }
  }

  // Rows that do not fit into registers are read twice, the second time from L2.
  __device__ static void long_rows(const GemmArgs& args, int64_t begin, char* rows, float* scales, int warp, int lane) {
#pragma unroll 1
    for (int place = warp; place < Config::kRows; place += G::kWarps) {
      const int64_t row = begin + place;
      const bool exists = row < args.rows;
      const X* from = static_cast<const X*>(args.x) + (exists ? row : 0) * Config::kStride;
      float inverse = 1.0f;
      if constexpr (Config::kProduct == Product::i8) {
        uint32_t top = 0;
#pragma unroll 8
        for (int i = 0; i < kRuns; ++i) top = larger(top, run(from, i, lane, exists));
        inverse = scale_of_row(top, scales + place, lane);
      }
#pragma unroll 8
      for (int i = 0; i < kRuns; ++i) put(rows + place * G::kPitch, i, lane, run(from, i, lane, exists), inverse);
      clear_rest(rows + place * G::kPitch, lane);
    }
  }

  // Codes are taken as they are; what is past the width counts as zero, for the weight is zero there.
  __device__ static void codes(const GemmArgs& args, int64_t begin, char* rows, float* scales, int warp, int lane) {
    static_assert(Config::kStride % 16 == 0 || !(sizeof(X) == 1), "rows of codes start on 16 bytes");
    constexpr int kPieces = G::K::kRowBytes / 16;
    const int thread = warp * 32 + lane;
#pragma unroll 4
    for (int index = thread; index < Config::kRows * kPieces; index += Config::kThreads) {
      const int place = index / kPieces, byte = index % kPieces * 16;
      const int64_t row = begin + place;
      uint4 piece = make_uint4(0, 0, 0, 0);
      if (row < args.rows && byte < Config::kInner) {
        piece = __ldg(reinterpret_cast<const uint4*>(static_cast<const char*>(args.x) + row * Config::kStride + byte));
      }
      *reinterpret_cast<uint4*>(rows + place * G::kPitch + byte) = piece;
    }
    for (int place = thread; place < Config::kRows; place += Config::kThreads) {
      scales[place] = begin + place < args.rows ? __ldg(args.x_scale + begin + place) : 0.0f;
    }
  }

  __device__ static void rows(const GemmArgs& args, int64_t begin, char* to, float* scales, int warp, int lane) {
    if constexpr (sizeof(X) == 1) {
      codes(args, begin, to, scales, warp, lane);
    } else if constexpr (kHold) {
      held_rows(args, begin, to, scales, warp, lane);
    } else {
      long_rows(args, begin, to, scales, warp, lane);
    }
  }
};

// Multiplying: sixteen rows by eight columns a step.

template <Product kProduct>
struct Sums {
  using Word = float;
};
template <>
struct Sums<Product::i8> {
  using Word = int32_t;
};

__device__ inline void multiply(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Product) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Product product) {
  if (product == Product::f16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ inline void load_rows(uint32_t (&a)[4], const char* shared) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

// kTiles tiles of eight columns, from tile `first` on, into the block's result.
template <class Config, int kTiles>
__device__ void multiply_tiles(const uint4* weight, const char* rows, float* out, int first, int down, int lane) {
  using G = Gemm<Config>;
  using Word = typename Sums<Config::kProduct>::Word;
  Word c[kTiles][4] = {};
  const char* from = rows + (down * 16 + lane % 16) * G::kPitch + lane / 16 * 16;
#pragma unroll 2
  for (int k = 0; k < G::K::kSteps; k += 2) {
    uint32_t a[2][4];
    load_rows(a[0], from + k * 32);
    load_rows(a[1], from + k * 32 + 32);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int tile = first + t < G::kTiles ? first + t : G::kTiles - 1;  // what is past the last is not stored
      const uint4 b = __ldg(weight + (tile * (G::K::kSteps / 2) + k / 2) * 32 + lane);
      multiply(c[t], a[0], b.x, b.y, Config::kProduct);
      multiply(c[t], a[1], b.z, b.w, Config::kProduct);
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (first + t >= G::kTiles) continue;
    float* to = out + (down * 16 + lane / 4) * G::kOutPitch + (first + t) * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(to) = make_float2(static_cast<float>(c[t][0]), static_cast<float>(c[t][1]));
    *reinterpret_cast<float2*>(to + 8 * G::kOutPitch) =
        make_float2(static_cast<float>(c[t][2]), static_cast<float>(c[t][3]));
  }
}

template <class Config, int kLanes, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads) gemm(GemmArgs args, Epilogue epilogue) {
  using G = Gemm<Config>;
  extern __shared__ __align__(16) char shared[];
  float* scales = reinterpret_cast<float*>(shared + G::kRowsBytes);
  float* out = scales + Config::kRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * Config::kRows;
  Load<Config>::rows(args, begin, shared, scales, warp, lane);
  __syncthreads();
  const int down = warp % G::kWarpsDown, across = warp / G::kWarpsDown;
  const int last = (across + 1) * G::kTilesWarp;
  for (int first = across * G::kTilesWarp; first < last; first += G::kTilesOnce) {
    multiply_tiles<Config, G::kTilesOnce>(args.weight, shared, out, first, down, lane);
  }
  __syncthreads();
  constexpr int kGroups = Config::kThreads / kLanes;
  static_assert(Config::kRows % kGroups == 0 || kGroups % Config::kRows == 0, "groups share the rows evenly");
  const auto finish = [&](int place) {
    RowTile<Config::kOut, kLanes> tile;
    step::with_row<G::kOutPitch>(tile, out + place * G::kOutPitch, [&](int i, float x) { tile.v[i] = x; });
    if constexpr (Config::kProduct == Product::i8) {
      step::with_scalar(tile, scales[place], step::Multiply{});
      step::with_columns(tile, args.w_scale, step::Multiply{});
    }
    epilogue(tile, begin + place);
  };
  const int first = threadIdx.x / kLanes;
  if (begin + Config::kRows <= args.rows) {
#pragma unroll 4
    for (int place = first; place < Config::kRows; place += kGroups) finish(place);
  } else {
#pragma unroll 1
    for (int place = first; place < Config::kRows && begin + place < args.rows; place += kGroups) finish(place);
  }
}

// The weight as the threads of a warp hold it, its columns filled up with zeros to eight, its rows to whole steps.

struct PackArgs {
  const float* weight;
  uint4* packed;
  float* scale;  // [kOut], int8 only
};

// kInnerStride and kOutStride: elements of the weight from one place of a row of x, and from one output, to the next.
template <Product kProduct_, int kInner_, int kOut_, int kInnerStride_, int kOutStride_>
struct PackConfig {
  static constexpr Product kProduct = kProduct_;
  static constexpr int kInner = kInner_, kOut = kOut_, kInnerStride = kInnerStride_, kOutStride = kOutStride_;
};

template <class Config>
__global__ void __launch_bounds__(256) pack_weight(PackArgs args) {
  constexpr int kBytes = Codes<Config::kProduct>::kBytes, kPerWord = 4 / kBytes;
  using K = Inner<Config::kInner, kBytes>;
  const int output = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (output >= round_up(Config::kOut, 8)) return;
  const bool exists = output < Config::kOut;
  const float* from = args.weight + static_cast<int64_t>(output) * Config::kOutStride;
  const auto at = [&](int k) {
    return exists && k < Config::kInner ? __ldg(from + static_cast<int64_t>(k) * Config::kInnerStride) : 0.0f;
  };
  float inverse = 1.0f;
  if constexpr (Config::kProduct == Product::i8) {
    uint32_t top = 0;
    for (int k = lane; k < Config::kInner; k += 32) {
      const uint32_t bits = __float_as_uint(at(k)) & 0x7fffffffu;
      top = bits > top ? bits : top;
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, top, apart);
      top = other > top ? other : top;
    }
    const float scale = step::scale_of(__uint_as_float(top));
    inverse = step::inverse_of(scale);
    if (lane == 0 && exists) args.scale[output] = scale;
  }
  uint32_t* words = reinterpret_cast<uint32_t*>(args.packed);
  for (int word = lane; word < K::kRowBytes / 4; word += 32) {
    uint32_t value;
    if constexpr (Config::kProduct == Product::i8) {
      const float4 v = make_float4(at(word * 4), at(word * 4 + 1), at(word * 4 + 2), at(word * 4 + 3));
      value = four_codes(v, inverse);
    } else {
      value = two_halves(at(word * kPerWord), at(word * kPerWord + 1), Config::kProduct);
    }
    const int step = word / 8, half = word % 8 / 4, thread = output % 8 * 4 + word % 4;
    words[(((output / 8) * (K::kSteps / 2) + step / 2) * 32 + thread) * 4 + step % 2 * 2 + half] = value;
  }
}

}  // namespace gnnc
