#pragma once

// The stages of a body: the values that a warp computes once for an edge and keeps in shared memory, where later stages
// and the body's results read them. A stage is a product with a weight, a sum over columns, or a value that many
// columns read.
//
// Layout: a warp works on a tile of kTile edges. Its shared memory holds the ids of these edges, a row for each
// (Body::kPitch words), and the operand of one product at a time, where that is read more than once. In an edge's row
// lie the rows of operands of sources and of edges (Fetched), which are copied asynchronously, all at once, and the
// results of the stages, which take the place of what no later stage reads. The weights lie before, once a block: in
// FP32 transposed, so that threads of neighboring columns read neighboring words, in 16 bits as rows for ldmatrix,
// both padded against bank conflicts. Weights that find no room (kWeightsAt < 0) are read where they lie. Order: every
// sum is made in an order that depends on the stage alone, not on the kernel, the tile or the edge's place in it: the
// gradient of a maximum compares its values again. A body declares Rows, base<number>() of each of these operands,
// kReadsEdges (the ids of edges), Stages, kWarps, kWeightBytes, kPitch and kOperandBytes, and for each of its stages
//   column<stage>(row, source, edge, results, column): a column of a product's operand, or of a stored value,
//   term<stage>(row, source, edge, results, column, k): a term of a column of a sum,
//   weight<stage>(k, column), bias<stage>(column).
// The last product need not be stored if the body's value follows from it column by column (kInFragments):
//   fragment(row, source, edge, results, column, product, vectors, values) gives the value for a product in a register,
//   vector<number>(column) an element of the kVectors vectors of kVectorWidth constants that it takes. They lie behind
//   the weights, at kVectorsAt, and of that product's weights kHeld pairs of fragments stay in registers.
// Floor: FP32 multiply-adds, of which an operand of four columns, read by a whole warp, serves 4 * kTogether; with 16
// bits the bandwidth of L1: copied rows twice and read once, weights once a tile, results twice in FP32.

#include "common/copies.cuh"
#include "common/row_steps.cuh"
#include "common/tensor_cores.cuh"
#include "common/types.cuh"

namespace gnnc {

constexpr int kTile = 16;  // edges

// The edges of a tile.
struct TileEdges {
  int64_t edge[kTile];
  int32_t row[kTile], source[kTile];
  int32_t count[kTile];  // number of edges of the entry that an edge is part of (message)
};

template <class... Each>
struct Stages {};
template <class... Each>
struct Rows {};
template <class T, int kIn, int kOut, int kTo, int kWeightsAt>
struct HalfProduct;

// Rows of kBytes bytes, kStride bytes apart, of the edges or of their sources, copied in pieces of kPiece bytes.
template <bool kOfSources, int kBytes, int kStride, int kPiece, int kTo>
struct Fetched {
  static constexpr int kPieces = kBytes / kPiece, kAll = kTile * kPieces;
  static_assert(kBytes % kPiece == 0 && kStride % kPiece == 0, "pieces are aligned");
  template <int kNumber, class Tile>
  __device__ __forceinline__ static void fetch(const Tile& tile) {
    const char* const base = tile.body.template base<kNumber>();
#pragma unroll 4
    for (int i = Tile::lane(); i < kAll; i += 32) {
      const int which = i / kPieces, piece = i % kPieces;
      const int64_t at = kOfSources ? tile.edges->source[which] : tile.edges->edge[which];
      const char* const from = base + at * kStride + piece * kPiece;
      char* const to = reinterpret_cast<char*>(tile.results + which * Tile::kPitch + kTo) + piece * kPiece;
      if constexpr (kPiece == 16) {
        start_copy<kOfSources>(reinterpret_cast<int4*>(to), reinterpret_cast<const int4*>(from));
      } else {
        start_copy_word(reinterpret_cast<int32_t*>(to), reinterpret_cast<const int32_t*>(from));
      }
    }
  }
};

// Words from the columns of one thread of four to those of the next, in a vector of constants: their vectors of four
// lie in different banks. A thread has the columns 8n + 2t and 8n + 2t + 1.
constexpr int kVectorPitch = 20;

// The first kCount pairs of fragments of the last stage's weights, which stay in registers.
template <class Stages, int kCount, int kStage = 0>
struct Held {
  template <class Tile>
  __device__ void load(const Tile& tile) {}
  __device__ static bool get(uint32_t (&b)[4], int number) { return false; }
};
template <class First, class Second, class... Rest, int kCount, int kStage>
struct Held<Stages<First, Second, Rest...>, kCount, kStage> : Held<Stages<Second, Rest...>, kCount, kStage + 1> {};
template <class T, int kIn, int kOut, int kTo, int kWeightsAt, int kCount, int kStage>
struct Held<Stages<HalfProduct<T, kIn, kOut, kTo, kWeightsAt>>, kCount, kStage> {
  using Product = HalfProduct<T, kIn, kOut, kTo, kWeightsAt>;
  static constexpr int kMost = Product::kShared && Product::kUnrolled ? Product::kPairs : 0;
  static constexpr int kHeld = kCount < kMost ? kCount : kMost;
  uint32_t words[kHeld > 0 ? kHeld : 1][4];
  template <class Tile>
  __device__ __forceinline__ void load(const Tile& tile) {
    if constexpr (kHeld > 0) Product::template hold<kStage>(tile, words);
  }
  // Returns whether the pair is held.
  __device__ __forceinline__ bool get(uint32_t (&b)[4], int number) const {
    if (number >= kHeld) return false;
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = words[number][i];
    return true;
  }
};

// A tile of a warp.
template <class Body>
struct EdgeTile {
  static constexpr int kPitch = Body::kPitch;
  static constexpr int kResultBytes = 4 * kTile * Body::kPitch, kOperandBytes = kTile * Body::kOperandBytes;
  static constexpr int kWarpBytes = static_cast<int>(sizeof(TileEdges)) + kResultBytes + kOperandBytes;
  static constexpr int kBytes = Body::kWeightBytes + Body::kWarps * kWarpBytes;
  static_assert(Body::kWeightBytes % 16 == 0 && kWarpBytes % 16 == 0, "vectors are aligned");

  const Body& body;
  char* weights;
  TileEdges* edges;
  float* results;
  char* operand;
  Held<typename Body::Stages, Body::kHeld> held;

  // Called by the whole block, which then shares the weights.
  __device__ __forceinline__ EdgeTile(const Body& body, int4* memory)
      : body(body), weights(reinterpret_cast<char*>(memory)) {
    char* own = weights + Body::kWeightBytes + static_cast<int>(threadIdx.x / 32) * kWarpBytes;
    edges = reinterpret_cast<TileEdges*>(own);
    results = reinterpret_cast<float*>(own + sizeof(TileEdges));
    operand = own + sizeof(TileEdges) + kResultBytes;
    load<0>(typename Body::Stages{});
    if constexpr (Body::kVectors > 0) load_vectors<0>();
    __syncthreads();
    held.load(*this);
  }

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }

  // Starts to copy rows of the edges in `edges`. Called by the whole warp.
  __device__ __forceinline__ void fetch() {
    __syncwarp();
    fetch<0>(typename Body::Rows{});
  }
  // Computes all stages of the edges in `edges`, whose rows are being copied. Called by the whole warp. take(sums) is
  // asked first whether it takes the fragments of the last product, which are stored otherwise.
  template <class... Take>
  __device__ __forceinline__ void compute(const Take&... take) {
    wait_for_copies();
    __syncwarp();
    run<0>(typename Body::Stages{}, take...);
  }

  // Returns the results of all stages of one of the edges.
  __device__ const float* of(int which) const { return results + which * Body::kPitch; }

  template <int kStage>
  __device__ __forceinline__ float column(int which, int column) const {
    return body.template column<kStage>(edges->row[which], edges->source[which], edges->edge[which], of(which), column);
  }
  template <int kStage>
  __device__ __forceinline__ float term(int which, int column, int k) const {
    return body.template term<kStage>(edges->row[which], edges->source[which], edges->edge[which], of(which), column,
                                      k);
  }
  __device__ __forceinline__ void values(int which, int column, float* values) const {
    body(edges->row[which], edges->source[which], edges->edge[which], of(which), column, values);
  }
  // The value of a column whose product is known.
  __device__ __forceinline__ void value(int which, int column, float product, const float* vectors,
                                        float* values) const {
    body.fragment(edges->row[which], edges->source[which], edges->edge[which], of(which), column, product, vectors,
                  values);
  }
  // Loads the elements of a vector of constants in this thread's columns of the fragments `n` and `n` + 1.
  __device__ __forceinline__ Vector<float, 4> of_vector(int number, int n) const {
    const auto* const words = reinterpret_cast<const float*>(weights + Body::kVectorsAt);
    return *reinterpret_cast<const Vector<float, 4>*>(words + (4 * number + lane() % 4) * kVectorPitch + 2 * n);
  }

 private:
  template <int kNumber>
  __device__ void fetch(Rows<>) {}
  template <int kNumber, class First, class... Rest>
  __device__ __forceinline__ void fetch(Rows<First, Rest...>) {
    First::template fetch<kNumber>(*this);
    fetch<kNumber + 1>(Rows<Rest...>{});
  }
  template <int kStage>
  __device__ void load(Stages<>) {}
  template <int kStage, class First, class... Rest>
  __device__ __forceinline__ void load(Stages<First, Rest...>) {
    First::template load<kStage>(*this);
    load<kStage + 1>(Stages<Rest...>{});
  }
  template <int kNumber>
  __device__ __forceinline__ void load_vectors() {
    auto* const words = reinterpret_cast<float*>(weights + Body::kVectorsAt) + 4 * kNumber * kVectorPitch;
    for (int i = static_cast<int>(threadIdx.x); i < Body::kVectorWidth; i += static_cast<int>(blockDim.x)) {
      words[i % 8 / 2 * kVectorPitch + i / 8 * 2 + i % 2] = body.template vector<kNumber>(i);
    }
    if constexpr (kNumber + 1 < Body::kVectors) load_vectors<kNumber + 1>();
  }
  template <int kStage, class... Take>
  __device__ void run(Stages<>, const Take&... take) {}
  template <int kStage, class First, class... Rest, class... Take>
  __device__ __forceinline__ void run(Stages<First, Rest...>, const Take&... take) {
    if constexpr (sizeof...(Rest) == 0) {
      First::template run<kStage>(*this, take...);
    } else {
      First::template run<kStage>(*this);
    }
    __syncwarp();
    run<kStage + 1>(Stages<Rest...>{}, take...);
  }
};

// Stores values of neighboring columns at once, rounded to T.
template <class T, int kCount>
__device__ __forceinline__ void store_columns(T* to, const float (&values)[kCount]) {
  Vector<uint32_t, kCount* static_cast<int>(sizeof(T)) / 4> words;
#pragma unroll
  for (int k = 0; k < kCount * static_cast<int>(sizeof(T)) / 4; ++k) {
    if constexpr (sizeof(T) == 2) {
      words.v[k] = two_halves(values[2 * k], values[2 * k + 1], T{});
    } else {
      words.v[k] = __float_as_uint(values[k]);
    }
  }
  *reinterpret_cast<decltype(words)*>(to) = words;
}

// Computes the columns of a stage of every edge, kVector neighboring ones a thread, and calls store(which, column,
// values). Values are stored when those of two turns are there: behind a store, a load waits for the one before it.
template <int kStage, int kVector, int kColumns, class Tile, class Store>
__device__ __forceinline__ void each_column(const Tile& tile, int count, const Store& store) {
  constexpr uint32_t kEach = kColumns / kVector, kAll = kTile * kEach, kTurns = 2;
  static_assert(kColumns % kVector == 0, "vectors fill the columns");
#pragma unroll 1
  for (uint32_t first = Tile::lane(); first < kAll; first += 32 * kTurns) {
    float values[kTurns][kVector];
#pragma unroll
    for (uint32_t t = 0; t < kTurns; ++t) {
      const uint32_t i = kAll % (32 * kTurns) == 0 ? first + 32 * t : min(first + 32 * t, kAll - 1);
      const int column = static_cast<int>(i % kEach) * kVector;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const bool is_there = kColumns == count || column + k < count;
        values[t][k] = is_there ? tile.template column<kStage>(static_cast<int>(i / kEach), column + k) : 0.0f;
      }
    }
#pragma unroll
    for (uint32_t t = 0; t < kTurns; ++t) {
      const uint32_t i = first + 32 * t;
      if (kAll % (32 * kTurns) != 0 && i >= kAll) continue;
      store(static_cast<int>(i / kEach), static_cast<int>(i % kEach) * kVector, values[t]);
    }
  }
}

// A value that is stored as it is computed.
template <int kOut, int kTo>
struct Stored {
  static constexpr int kVector = kOut % 4 == 0 ? 4 : 1;
  template <int kStage, class Tile>
  __device__ static void load(const Tile& tile) {}
  template <int kStage, class Tile>
  __device__ __forceinline__ static void run(const Tile& tile) {
    each_column<kStage, kVector, kOut>(tile, kOut, [&](int which, int column, const float (&values)[kVector]) {
      store_columns(const_cast<float*>(tile.of(which)) + kTo + column, values);
    });
  }
};

// A sum over columns, divided by kDivisor: kLanes neighboring threads add up every kLanes-th term, and then their
// sums.
template <int kTerms, int kOut, int kTo, int kDivisor>
struct ColumnSum {
  static constexpr int kLanes = kTerms >= 32 ? 8 : kTerms >= 8 ? 4 : 1;
  template <int kStage, class Tile>
  __device__ static void load(const Tile& tile) {}
  template <int kStage, class Tile>
  __device__ __forceinline__ static void run(const Tile& tile) {
    const int first = Tile::lane() % kLanes;
#pragma unroll 1
    for (int i = Tile::lane() / kLanes; i < kTile * kOut; i += 32 / kLanes) {
      float total = 0.0f;
#pragma unroll 8
      for (int k = first; k < kTerms; k += kLanes) total += tile.template term<kStage>(i / kOut, i % kOut, k);
#pragma unroll
      for (int apart = 1; apart < kLanes; apart *= 2) total += __shfl_xor_sync(0xffffffffu, total, apart);
      if (kDivisor != 1) total /= static_cast<float>(kDivisor);
      if (first == 0) const_cast<float*>(tile.of(i / kOut))[kTo + i % kOut] = total;
    }
  }
};

// A product in FP32.
template <int kIn, int kOut, int kTo, int kWeightsAt>
struct FullProduct {
  static constexpr int kRows = (kIn + 3) / 4 * 4;
  static constexpr int kPitch = kRows % 8 == 4 ? kRows : kRows + 4;  // words: threads of several edges read vectors
  static constexpr int kApart = kOut | 1;                            // words from a row of weights to the next
  static constexpr bool kShared = kWeightsAt >= 0;
  // Threads that share an edge: one for every column, or for several.
  __host__ __device__ static constexpr int lanes() {
    int lanes = 2;
    while (lanes < kOut && lanes < 32) lanes *= 2;
    return lanes;
  }
  static constexpr int kLanes = lanes(), kGroups = 32 / kLanes, kEdges = kTile / kGroups;
  static constexpr int kTogether = kOut > 32 ? 2 : 1;  // columns of a thread

  template <class Tile>
  __device__ static float* weights(const Tile& tile) {
    return reinterpret_cast<float*>(tile.weights + (kShared ? kWeightsAt : 0));
  }

  template <int kStage, class Tile>
  __device__ __forceinline__ static void load(const Tile& tile) {
    if constexpr (kShared) {
      for (int i = static_cast<int>(threadIdx.x); i < kRows * kOut; i += static_cast<int>(blockDim.x)) {
        const int column = i / kRows, k = i % kRows;
        weights(tile)[k * kApart + column] = k < kIn ? tile.body.template weight<kStage>(k, column) : 0.0f;
      }
    }
  }

  template <int kStage, class Tile>
  __device__ __forceinline__ static void run(const Tile& tile) {
    auto* const operand = reinterpret_cast<float*>(tile.operand);
    each_column<kStage, 4, kRows>(tile, kIn, [&](int which, int column, const float (&values)[4]) {
      store_columns(operand + which * kPitch + column, values);
    });
    __syncwarp();
#pragma unroll 1
    for (int column = Tile::lane() % kLanes; column < kOut; column += kLanes * kTogether) {
      columns<kStage>(tile, operand, column);
    }
  }

 private:
  // Computes the columns `first`, first + 32, .. of every kGroups-th edge.
  template <int kStage, class Tile>
  __device__ __forceinline__ static void columns(const Tile& tile, const float* operand, int first) {
    const int group = Tile::lane() / kLanes;
    const auto weight = [&](int k, int column) {
      if constexpr (kShared) {
        return weights(tile)[k * kApart + column];
      } else {
        return k < kIn ? tile.body.template weight<kStage>(k, column) : 0.0f;
      }
    };
    int column[kTogether];
    float sum[kTogether][kEdges];
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      column[t] = min(first + 32 * t, kOut - 1);
      const float bias = tile.body.template bias<kStage>(column[t]);
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
        const float4 x = *reinterpret_cast<const float4*>(operand + (group + kGroups * e) * kPitch + k);
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          sum[t][e] = fmaf(x.x, w[t][0], sum[t][e]);
          sum[t][e] = fmaf(x.y, w[t][1], sum[t][e]);
          sum[t][e] = fmaf(x.z, w[t][2], sum[t][e]);
          sum[t][e] = fmaf(x.w, w[t][3], sum[t][e]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      if (first + 32 * t >= kOut) continue;
#pragma unroll
      for (int e = 0; e < kEdges; ++e) const_cast<float*>(tile.of(group + kGroups * e))[kTo + column[t]] = sum[t][e];
    }
  }
};

// A product of 16 bits with FP32 sums, on the tensor cores: a tile has the rows of one fragment. Of every sixteen rows
// k of the weights, thread t of four multiplies 4t, .., 4t + 3: it computes these columns of an operand's row at once.
template <class T, int kIn, int kOut, int kTo, int kWeightsAt>
struct HalfProduct {
  static constexpr int kRows = (kIn + 15) / 16 * 16, kColumns = (kOut + 15) / 16 * 16;
  static constexpr int kPitch = kRows + 8;  // elements: ldmatrix reads eight rows from different banks
  static constexpr bool kShared = kWeightsAt >= 0;
  static constexpr int kTogether = kColumns < 64 ? kColumns : 64;  // columns whose sums a warp holds
  static constexpr bool kStreams = kColumns == kTogether;          // the operand is read once: it is never stored

  static constexpr bool kUnrolled = kRows <= 64;
  static constexpr int kPairs = kRows / 16 * (kColumns / 16);  // pairs of fragments of the weights

  template <class Tile>
  __device__ static T* weights(const Tile& tile) {
    return reinterpret_cast<T*>(tile.weights + (kShared ? kWeightsAt : 0));
  }
  template <int kStage, class Tile>
  __device__ __forceinline__ static T weight(const Tile& tile, int k, int column) {
    const bool is_there = k < kIn && column < kOut;
    return step::from_float<T>(is_there ? tile.body.template weight<kStage>(k, column) : 0.0f);
  }
  // Returns the row of the weights at a place of a fragment, where thread t has 2t, 2t + 1, 2t + 8 and 2t + 9.
  __device__ static int row_at(int place) {
    return place / 16 * 16 + place % 8 / 2 * 4 + place / 8 % 2 * 2 + place % 2;
  }

  template <int kStage, class Tile>
  __device__ __forceinline__ static void load(const Tile& tile) {
    if constexpr (kShared) {
      for (int i = static_cast<int>(threadIdx.x); i < kColumns * kRows; i += static_cast<int>(blockDim.x)) {
        weights(tile)[i / kRows * kPitch + i % kRows] = weight<kStage>(tile, row_at(i % kRows), i / kRows);
      }
    }
  }

  template <int kStage, class Tile, class... Take>
  __device__ __forceinline__ static void run(const Tile& tile, const Take&... take) {
    static_assert(kStreams || sizeof...(Take) == 0, "all columns are there at once");
    if constexpr (kStreams) {
      columns<kStage>(tile, 0, [&](uint32_t (&a)[4], int k) { operand<kStage>(a, tile, k); }, take...);
    } else {
      auto* const stored = reinterpret_cast<uint4*>(tile.operand) + Tile::lane();
#pragma unroll 2
      for (int k = 0; k < kRows; k += 16) {
        uint32_t a[4];
        operand<kStage>(a, tile, k);
        stored[2 * k] = make_uint4(a[0], a[1], a[2], a[3]);
      }
      __syncwarp();
#pragma unroll 1
      for (int first = 0; first < kColumns; first += kTogether) {
        columns<kStage>(tile, first, [&](uint32_t (&a)[4], int k) {
          const uint4 words = stored[2 * k];
          a[0] = words.x, a[1] = words.y, a[2] = words.z, a[3] = words.w;
        });
      }
    }
  }

  // Loads the first pairs of fragments of the weights.
  template <int kStage, class Tile, int kCount>
  __device__ __forceinline__ static void hold(const Tile& tile, uint32_t (&words)[kCount][4]) {
#pragma unroll
    for (int h = 0; h < kCount; ++h) {
      load_weights<kStage, false>(words[h], tile, h / (kTogether / 16) * 16, h % (kTogether / 16) * 16);
    }
  }

 private:
  // Computes sixteen columns of the operand, from k on: a fragment.
  template <int kStage, class Tile>
  __device__ __forceinline__ static void operand(uint32_t (&a)[4], const Tile& tile, int k) {
    const int lane = Tile::lane(), first = k | lane % 4 * 4;  // so that four loads are seen to be one
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_there = kRows == kIn || first + i < kIn;
        values[i] = is_there ? tile.template column<kStage>(lane / 4 + 8 * half, first + i) : 0.0f;
      }
      a[half] = two_halves(values[0], values[1], T{});
      a[half + 2] = two_halves(values[2], values[3], T{});
    }
  }

  __device__ static void load_matrices(uint32_t (&words)[4], const T* from) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(from));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  }

  // Loads the weights of sixteen columns and sixteen rows k: two fragments. kHolds: the tile holds the first of them.
  template <int kStage, bool kHolds, class Tile>
  __device__ __forceinline__ static void load_weights(uint32_t (&b)[4], const Tile& tile, int k, int column) {
    const int lane = Tile::lane();
    if constexpr (kHolds) {
      if (tile.held.get(b, k / 16 * (kTogether / 16) + column / 16)) return;
    }
    if constexpr (kShared) {
      load_matrices(b, weights(tile) + (column + lane / 16 * 8 + lane % 8) * kPitch + k + lane / 8 % 2 * 8);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = k + lane % 4 * 4 + i % 2 * 2, of = column + i / 2 * 8 + lane / 4;
        const Vector<T, 2> pair{{weight<kStage>(tile, at, of), weight<kStage>(tile, at + 1, of)}};
        b[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
  }

  // Computes the columns from `first` on; fragment(a, k) gives that of the operand. Stores them unless take(sums) does
  // something else.
  template <int kStage, class Tile, class Fragment, class... Take>
  __device__ __forceinline__ static void columns(const Tile& tile, int first, const Fragment& fragment,
                                                 const Take&... take) {
    constexpr int kFragments = kTogether / 8;
    const int lane = Tile::lane(), row = lane / 4, pair = lane % 4 * 2;
    float sum[kFragments][4];
#pragma unroll
    for (int n = 0; n < kFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = first + 8 * n + pair + i % 2;
        sum[n][i] = column < kOut ? tile.body.template bias<kStage>(column) : 0.0f;
      }
    }
#pragma unroll(kUnrolled ? 4 : 2)
    for (int k = 0; k < kRows; k += 16) {
      uint32_t a[4];
      fragment(a, k);
#pragma unroll
      for (int n = 0; n < kFragments; n += 2) {
        if (kColumns % kTogether != 0 && first + 8 * n >= kColumns) continue;
        uint32_t b[4];
        load_weights<kStage, (sizeof...(Take) > 0)>(b, tile, k, first + 8 * n);
        multiply_halves(sum[n], a, b[0], b[1], T{});
        multiply_halves(sum[n + 1], a, b[2], b[3], T{});
      }
    }
    if ((take(sum) || ...)) return;
    if constexpr (kStreams) __syncwarp();  // results take the place of what the operand is computed from
#pragma unroll
    for (int n = 0; n < kFragments; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = first + 8 * n + pair;
        float* const to = const_cast<float*>(tile.of(row + 8 * half)) + kTo + column;
        if constexpr (kOut % 2 == 0) {
          if (column < kOut) *reinterpret_cast<float2*>(to) = make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
        } else {
          if (column < kOut) to[0] = sum[n][2 * half];
          if (column + 1 < kOut) to[1] = sum[n][2 * half + 1];
        }
      }
    }
  }
};

}  // namespace gnnc
