#pragma once

// The steps of a row program (csrc/include/gnnc/row_program.h), each a function on a row that lies in registers. An
// epilogue is a list of calls of these functions; runtime/cuda/kernels/epilogue.py generates it.
//
// Quantized values are computed by the same sequence of FP32 operations as in the reference: no operations are
// contracted to fused multiply-adds (the sources are compiled without contraction), q = rint(x * inv), inv = 1 / scale
// computed once.
//
// Traffic: operands and results once; the row never leaves the registers.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/fp8.cuh"
#include "common/philox.cuh"
#include "common/row_tile.cuh"

namespace gnnc::step {

// A flag in host memory that the device sets when it finds a value that is not finite. The host reads the flag later;
// the device writes nothing otherwise.
struct NanFlag {
  int64_t* flag;
  int64_t number;  // identifies the checked tensor to the host, from 1 on

  __device__ void raise() const { *reinterpret_cast<volatile int64_t*>(flag) = number; }
};

__device__ inline float as_float(float x) { return x; }
__device__ inline float as_float(__half x) { return __half2float(x); }
__device__ inline float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float as_float(int8_t x) { return static_cast<float>(x); }
__device__ inline float as_float(uint8_t x) { return static_cast<float>(x); }
__device__ inline float as_float(bool x) { return x ? 1.0f : 0.0f; }
template <class T>
__device__ inline float float_of(T x) {
  const uint32_t halves = halves_of<T>(x.bits);
  return __low2float(*reinterpret_cast<const __half2*>(&halves));
}
__device__ inline float as_float(E4m3 x) { return float_of(x); }
__device__ inline float as_float(E5m2 x) { return float_of(x); }

// Return the larger or smaller value; a NaN in `a` propagates.
__device__ inline float larger(float a, float b) { return a > b || a != a ? a : b; }
__device__ inline float smaller(float a, float b) { return a < b || a != a ? a : b; }

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline bool from_float<bool>(float x) {
  return x != 0.0f;
}

// Returns the number of neighboring columns of T that a thread loads or stores at once: its whole run, up to 16 bytes,
// if rows `stride` elements apart keep the access aligned; otherwise 1.
template <class Tile, class T>
__host__ __device__ constexpr int at_once(int stride) {
  for (int count = Tile::kRun; count >= 4; count /= 2) {
    if (count * static_cast<int>(sizeof(T)) <= 16 && stride % count == 0) return count;
  }
  return 1;
}

// Loads a row of T, from a matrix with rows kStride elements apart, and calls f(i, value) for each value of the tile.
template <int kStride, class Tile, class T, class F>
__device__ void with_row(const Tile& tile, const T* row, const F& f) {
  constexpr int kCount = at_once<Tile, T>(kStride);
#pragma unroll
  for (int i = 0; i < Tile::kPer; i += kCount) {
    const int column = tile.column(i);
    if (column + kCount <= Tile::kWidth) {
      const auto read = *reinterpret_cast<const Vector<T, kCount>*>(row + column);
#pragma unroll
      for (int k = 0; k < kCount; ++k) f(i + k, as_float(read.v[k]));
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (tile.valid(i + k)) f(i + k, as_float(row[column + k]));
      }
    }
  }
}

// Transposes a 4 x 4 matrix across four neighboring threads: v[i] of thread t becomes v[t] of thread i. `members` is
// the shuffle mask.
__device__ inline void change_over(float (&v)[4], uint32_t members) {
#pragma unroll
  for (int apart = 1; apart < 4; apart *= 2) {
    const bool upper = (threadIdx.x & apart) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & apart) continue;
      const float got = __shfl_xor_sync(members, upper ? v[i] : v[i + apart], apart);
      if (upper) {
        v[i] = got;
      } else {
        v[i + apart] = got;
      }
    }
  }
}

// Transposes groups of four across four neighboring threads: fours[j] of thread i becomes fours[i] of thread j.
// `members` is the shuffle mask.
__device__ __forceinline__ void turn_over(float (*fours)[4], uint32_t members) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float turned[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) turned[j] = fours[j][k];
    change_over(turned, members);
#pragma unroll
    for (int j = 0; j < 4; ++j) fours[j][k] = turned[j];
  }
}

// Returns the columns of a row that a thread holds, from column i on, as one vector to store.
template <class T, int kCount, class F>
__device__ Vector<T, kCount> vector_of(int i, const F& f) {
  Vector<T, kCount> vector;
#pragma unroll
  for (int k = 0; k < kCount; ++k) vector.v[k] = f(i + k);
  return vector;
}

// Returns whether four neighboring threads transpose their 16 columns each before a store, so that together they store
// 64 contiguous bytes at a time, instead of 16 of every 64 bytes each. (Two threads that store whole sectors in this
// way, of 16 or 8 columns each, are no faster.)
template <class Tile>
__host__ __device__ constexpr bool turns() {
  return Tile::kRun == 16 && Tile::kLanes >= 4;
}

// Stores the row; a last vector that the row only partly fills is stored whole if the stride leaves room for it.
// kStreams: no kernel gathers these rows, so that they may be evicted from L2 first.
template <int kStride, bool kStreams = false, class T, class Tile, class F>
__device__ void store_row(const Tile& tile, T* row, const F& f) {
  constexpr int kCount = at_once<Tile, T>(kStride), kRounded = (Tile::kWidth + kCount - 1) / kCount * kCount;
  constexpr bool kEnds = kRounded != Tile::kWidth && kStride < kRounded;   // the row ends within a vector
  constexpr bool kAll = !kEnds && Tile::kFull && Tile::kHeld <= kRounded;  // all columns that threads hold are stored
  constexpr bool kTurns = kCount == 4 && sizeof(T) == 4 && turns<Tile>();
  const int own = kTurns ? tile.lane % 4 : 0;
  const int first = tile.column_of(tile.lane - own, kCount * own);
  T* const from = row + first;  // the base address: all stores are at constant offsets from this pointer
  const auto put = [&](int offset, const Vector<T, kCount>& vector) {
    if (kAll || first + offset + kCount <= (kEnds ? Tile::kWidth : kRounded)) {
      if constexpr (kEnds && !Tile::kWhole) {
        store_together<kStreams>(from + offset, vector);
      } else {
        store_vector<kStreams && !kEnds>(from + offset, vector);  // a store that the compiler may move is faster
      }
    } else if constexpr (kEnds) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (first + offset + k < Tile::kWidth) from[offset + k] = vector.v[k];
      }
    }
  };
  if constexpr (kTurns) {
#pragma unroll
    for (int i = 0; i < Tile::kPer; i += 16) {
      float fours[4][4];
#pragma unroll
      for (int k = 0; k < 16; ++k) fours[k / 4][k % 4] = f(i + k);
      turn_over(fours, Tile::members());
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        put(Tile::offset_of(j, i), Vector<T, kCount>{{fours[j][0], fours[j][1], fours[j][2], fours[j][3]}});
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < Tile::kPer; i += kCount) put(Tile::offset_of(0, i), vector_of<T, kCount>(i, f));
  }
}

template <class Tile, class F>
__device__ void each(Tile& tile, const F& f) {
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) tile.v[i] = f(tile.v[i]);
}

// Combine the row with a second operand: one value for the row (with_scalar), one value a column (with_columns), or one
// value an element (with_full).

template <class Tile, class F>
__device__ void with_scalar(Tile& tile, float value, const F& f) {
  each(tile, [&](float x) { return f(x, value); });
}
template <class Tile, class F>
__device__ void with_columns(Tile& tile, const float* values, const F& f) {
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    if (tile.valid(i)) tile.v[i] = f(tile.v[i], __ldg(values + tile.column(i)));
  }
}
template <int kStride, class Tile, class T, class F>
__device__ void with_full(Tile& tile, const T* row, const F& f) {
  with_row<kStride>(tile, row, [&](int i, float value) { tile.v[i] = f(tile.v[i], value); });
}

// Multiplies the operand of a functor by a scale, that of a row of quantized values.
template <class F>
struct Scaled {
  F f;
  float scale;
  __device__ float operator()(float x, float v) const { return f(x, __fmul_rn(v, scale)); }
};
template <class F>
__device__ Scaled<F> scaled(const F& f, float scale) {
  return {f, scale};
}

struct Add {
  __device__ float operator()(float x, float v) const { return __fadd_rn(x, v); }
};
struct Multiply {
  __device__ float operator()(float x, float v) const { return __fmul_rn(x, v); }
};
struct AddScaled {
  float factor;
  __device__ float operator()(float x, float v) const { return __fadd_rn(x, __fmul_rn(factor, v)); }
};
struct Divide {
  __device__ float operator()(float x, float v) const { return __fdiv_rn(x, v); }
};
struct SubtractFrom {
  __device__ float operator()(float x, float v) const { return __fsub_rn(v, x); }
};

// Gradients of activations, of the row's gradient and an operand of the forward pass.

template <bool kOfResult>
struct EluBackward {
  float alpha;
  __device__ float operator()(float grad, float v) const {
    if (v > 0.0f) return grad;
    return grad * (kOfResult ? v + alpha : alpha * expf(v));
  }
};
struct LeakyReluBackward {
  float slope;
  __device__ float operator()(float grad, float v) const { return v > 0.0f ? grad : __fmul_rn(grad, slope); }
};
struct ThresholdBackward {
  __device__ float operator()(float grad, float v) const { return v <= 0.0f ? 0.0f : grad; }
};

// Sets values to 0 whose bit is not set; bit c % 8 of byte c / 8 belongs to column c.
template <class Tile>
__device__ void mask_bits(Tile& tile, const uint8_t* row) {
#pragma unroll
  for (int i = 0; i < Tile::kPer; i += 4) {
    const int column = tile.column(i);
    const int bits = column < Tile::kWidth ? __ldg(row + column / 8) >> (column & 4) : 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) tile.v[i + k] = (bits >> k & 1) != 0 ? tile.v[i + k] : 0.0f;
  }
}

// Activations. Comparisons are written so that a NaN propagates, as in torch.

template <class Tile>
__device__ void relu(Tile& tile) {
  each(tile, [](float x) { return larger_or_nan(x, 0.0f); });
}
template <class Tile>
__device__ void leaky_relu(Tile& tile, float slope) {
  each(tile, [=](float x) { return x > 0.0f ? x : __fmul_rn(x, slope); });
}
template <class Tile>
__device__ void elu(Tile& tile, float alpha) {
  each(tile, [=](float x) { return x > 0.0f ? x : alpha * expm1f(x); });
}
template <class Tile>
__device__ void sigmoid(Tile& tile) {
  each(tile, [](float x) { return 1.0f / (1.0f + expf(-x)); });
}
template <class Tile>
__device__ void tanh(Tile& tile) {
  each(tile, [](float x) { return tanhf(x); });
}
template <class Tile>
__device__ void gelu(Tile& tile) {
  each(tile, [](float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); });
}
template <class Tile>
__device__ void gelu_tanh(Tile& tile) {
  each(tile, [](float x) { return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x))); });
}
template <class Tile>
__device__ void silu(Tile& tile) {
  each(tile, [](float x) { return x / (1.0f + expf(-x)); });
}
template <class Tile>
__device__ void exp(Tile& tile) {
  each(tile, [](float x) { return expf(x); });
}
template <class Tile>
__device__ void log(Tile& tile) {
  each(tile, [](float x) { return logf(x); });
}
template <class Tile>
__device__ void softplus(Tile& tile) {
  each(tile, [](float x) { return x > 20.0f ? x : log1pf(expf(x)); });
}
template <class Tile>
__device__ void neg(Tile& tile) {
  each(tile, [](float x) { return -x; });
}
template <class Tile>
__device__ void abs(Tile& tile) {
  each(tile, [](float x) { return fabsf(x); });
}
template <class Tile>
__device__ void square(Tile& tile) {
  each(tile, [](float x) { return __fmul_rn(x, x); });
}
template <class Tile>
__device__ void sqrt(Tile& tile) {
  each(tile, [](float x) { return __fsqrt_rn(x); });
}
template <class Tile>
__device__ void rsqrt(Tile& tile) {
  each(tile, [](float x) { return __fdiv_rn(1.0f, __fsqrt_rn(x)); });
}
template <class Tile>
__device__ void recip(Tile& tile) {
  each(tile, [](float x) { return __fdiv_rn(1.0f, x); });
}
template <class Tile>
__device__ void clamp_min(Tile& tile, float low) {
  each(tile, [=](float x) { return x < low ? low : x; });
}
template <class Tile>
__device__ void clamp_max(Tile& tile, float high) {
  each(tile, [=](float x) { return x > high ? high : x; });
}

// Normalizations. `weight` and `bias` may be null.

// The mean of a row, and the reciprocal of its standard deviation.
struct Moments {
  float mean, factor;
};
template <class Tile>
__device__ Moments moments(const Tile& tile, float eps) {
  constexpr float count = static_cast<float>(Tile::kWidth);
  const float mean = tile.sum([](float x, int) { return x; }) / count;
  const float var = tile.sum([=](float x, int) { return (x - mean) * (x - mean); }) / count;
  return {mean, 1.0f / sqrtf(var + eps)};
}
template <class Tile>
__device__ void normalize(Tile& tile, const Moments& row, const float* weight, const float* bias) {
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    if (!tile.valid(i)) continue;
    float x = (tile.v[i] - row.mean) * row.factor;
    if (weight != nullptr) x *= __ldg(weight + tile.column(i));
    if (bias != nullptr) x += __ldg(bias + tile.column(i));
    tile.v[i] = x;
  }
}
template <class Tile>
__device__ void layer_norm(Tile& tile, const float* weight, const float* bias, float eps) {
  normalize(tile, moments(tile, eps), weight, bias);
}

// Layer norm that stores what its gradient reads; `mean` and `factor` may be null.
template <class Tile>
__device__ void layer_norm(Tile& tile, const float* weight, const float* bias, float eps, float* mean, float* factor) {
  const Moments row = moments(tile, eps);
  if (tile.lane == 0 && mean != nullptr) *mean = row.mean;
  if (tile.lane == 0 && factor != nullptr) *factor = row.factor;
  normalize(tile, row, weight, bias);
}

// Makes the gradient of a row before its layer norm, of its moments, from that of the result.
template <int kStride, class Tile, class T>
__device__ void layer_norm_backward(Tile& tile, const T* row, const float* weight, const Moments& of) {
  constexpr float count = static_cast<float>(Tile::kWidth);
  float x[Tile::kPer] = {};
  with_row<kStride>(tile, row, [&](int i, float value) { x[i] = (value - of.mean) * of.factor; });
  if (weight != nullptr) with_columns(tile, weight, Multiply{});
  const float mean = tile.sum([](float v, int) { return v; }) / count;
  const float slope = tile.sum([&](float v, int i) { return v * x[i]; }) / count;
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    if (tile.valid(i)) tile.v[i] = of.factor * (tile.v[i] - mean - x[i] * slope);
  }
}

// Batch norm with the moments of each column. Its gradient: of a row, from the sums over all rows of the gradient of
// the result (`of_bias`) and of that times the normalized value (`of_weight`).
template <class Tile>
__device__ void batch_norm(Tile& tile, const float* mean, const float* factor, const float* weight, const float* bias) {
  with_columns(tile, mean, [](float v, float of) { return v - of; });
  with_columns(tile, factor, Multiply{});
  if (weight != nullptr) with_columns(tile, weight, Multiply{});
  if (bias != nullptr) with_columns(tile, bias, Add{});
}
template <int kStride, class Tile, class T>
__device__ void batch_norm_backward(Tile& tile, const T* row, const float* mean, const float* factor,
                                    const float* weight, const float* of_weight, const float* of_bias, float share) {
  float x[Tile::kPer] = {};
  with_row<kStride>(tile, row, [&](int i, float value) { x[i] = value; });
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    if (!tile.valid(i)) continue;
    const int column = tile.column(i);
    const float normalized = (x[i] - __ldg(mean + column)) * __ldg(factor + column);
    const float rest = (__ldg(of_bias + column) + normalized * __ldg(of_weight + column)) * share;
    tile.v[i] = (tile.v[i] - rest) * __ldg(factor + column);
  }
  if (weight != nullptr) with_columns(tile, weight, Multiply{});
}

template <class Tile>
__device__ void l2_normalize(Tile& tile, float eps) {
  const float norm = sqrtf(tile.sum([](float x, int) { return x * x; }));
  const float factor = 1.0f / (norm < eps ? eps : norm);
  each(tile, [=](float x) { return x * factor; });
}
template <class Tile>
__device__ void softmax(Tile& tile) {
  const float top = tile.max([](float x, int) { return x; });
  each(tile, [=](float x) { return expf(x - top); });
  const float share = 1.0f / tile.sum([](float x, int) { return x; });
  each(tile, [=](float x) { return x * share; });
}
template <class Tile>
__device__ void log_softmax(Tile& tile) {
  const float top = tile.max([](float x, int) { return x; });
  const float rest = logf(tile.sum([=](float x, int) { return expf(x - top); }));
  each(tile, [=](float x) { return (x - top) - rest; });
}

// Returns the mean over kHeads equal parts of a row, as a row by itself. Each thread fetches the columns that it needs
// from other threads by shuffles.
template <int kHeads, class Tile>
__device__ auto head_mean(const Tile& tile) {
  using Out = RowTile<Tile::kWidth / kHeads, Tile::kLanes, Tile::kRun, Tile::kTogether>;
  constexpr int kDepth = Out::kWidth;
  Out out;
#pragma unroll
  for (int i = 0; i < Out::kPer; ++i) {
    const int to = out.valid(i) ? out.column(i) : 0;
    float total = 0.0f;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int from = h * kDepth + to;
      const int thread = from % Tile::kBlock / Tile::kRun;
      const int place = from / Tile::kBlock * Tile::kRun + from % Tile::kRun;
#pragma unroll
      for (int r = 0; r < Tile::kPer; ++r) {
        if (kDepth % Tile::kRun == 0 && r % Tile::kRun != i % Tile::kRun) continue;
        const float value = __shfl_sync(Tile::members(), tile.v[r], thread, Tile::kLanes);
        if (r == place) total = __fadd_rn(total, value);
      }
    }
    out.v[i] = __fdiv_rn(total, static_cast<float>(kHeads));
  }
  return out;
}

// Stores.

// Returns whether threads can cheaply hold every kLanes-th group of four columns of a whole row: the tile has this
// layout already, or four threads hold 16 columns each and transpose them.
template <class Tile>
__host__ __device__ constexpr bool has_fours() {
  const bool whole = Tile::kBlock == Tile::kRun * Tile::kLanes;
  return whole && Tile::kLanes >= 4 && (Tile::kRun == 4 || (Tile::kRun == 16 && Tile::kLanes == 4));
}

// Stores a row at an unaligned address: except for its ends, in groups of four that are aligned to 16 bytes,
// neighboring threads side by side. For this, each thread shifts its columns by the number of columns before the first
// aligned group.
template <bool kStreams, class Tile>
__device__ void store_anywhere(const Tile& tile, float* row) {
  constexpr int kLanes = Tile::kLanes, kFours = Tile::kPer / 4;
  float v[kFours][4];
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) v[i / 4][i % 4] = tile.v[i];
  if constexpr (Tile::kRun == 16) {
#pragma unroll
    for (int i = 0; i < kFours; i += 4) turn_over(v + i, Tile::members());
  }
  const int before = static_cast<int>(-(reinterpret_cast<uint64_t>(row) / 4) % 4);
#pragma unroll
  for (int j = 0; j < kFours; ++j) {
    float w[7] = {v[j][0], v[j][1], v[j][2], v[j][3]};
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      const float given = tile.lane == 0 && j + 1 < kFours ? v[(j + 1) % kFours][k] : v[j][k];
      w[4 + k] = __shfl_sync(Tile::members(), given, (tile.lane + 1) % kLanes, kLanes);
    }
#pragma unroll
    for (int k = 0; k < 6; ++k) w[k] = before & 1 ? w[k + 1] : w[k];
#pragma unroll
    for (int k = 0; k < 4; ++k) w[k] = before & 2 ? w[k + 2] : w[k];
    const int column = (j * kLanes + tile.lane) * 4 + before;
    if (column + 4 <= Tile::kWidth) {
      store_vector<kStreams>(row + column, Vector<float, 4>{{w[0], w[1], w[2], w[3]}});
    } else if ((j + 1) * kLanes * 4 + 3 > Tile::kWidth) {
#pragma unroll
      for (int k = 0; k < 3; ++k) {
        if (column + k < Tile::kWidth) row[column + k] = w[k];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    if (tile.lane == 0 && k < before && k < Tile::kWidth) row[k] = v[0][k];
  }
}

// Stores the row as T, by the fastest way that alignment allows. kStreams: no kernel gathers these rows.
template <int kStride, bool kStreams = false, class T, class Tile>
__device__ void store(const Tile& tile, T* row) {
  if constexpr (at_once<Tile, T>(kStride) == 1 && sizeof(T) == 4 && has_fours<Tile>()) {
    store_anywhere<kStreams>(tile, row);
  } else if constexpr (at_once<Tile, T>(kStride) == 1 && Tile::kLanes >= 4) {
    // Each thread stores one element at a time; four neighboring threads store side by side after a transpose.
    const int first = tile.lane & ~3;
    int own = tile.lane & 3;
#pragma unroll
    for (int i = 0; i < Tile::kPer; i += 4) {
      own = opaque(own);  // opaque: compute addresses one at a time, for all at once would take too many registers
      float v[4] = {tile.v[i], tile.v[i + 1], tile.v[i + 2], tile.v[i + 3]};
      change_over(v, Tile::members());
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int column = tile.column_of(first + k, i + own);
        if (column < Tile::kWidth) row[column] = from_float<T>(v[k]);
      }
    }
  } else {
    store_row<kStride, kStreams>(tile, row, [&](int i) { return from_float<T>(tile.v[i]); });
  }
}

// Stores one bit for each value that is not at most 0 (NaN counts as above 0), in the order of mask_bits. Where a
// thread holds only four neighboring columns, the next thread holds the other half of its byte.
template <class Tile>
__device__ void store_bits(const Tile& tile, uint8_t* row) {
  constexpr int kFours = Tile::kPer / 4;
  int halves[kFours];
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    const int bit = tile.valid(i) && !(tile.v[i] <= 0.0f) ? 1 << i % 4 : 0;
    halves[i / 4] = i % 4 == 0 ? bit : halves[i / 4] | bit;
  }
  constexpr bool kOwn = Tile::kRun % 8 == 0 || Tile::kLanes == 1;
#pragma unroll
  for (int j = 0; j < kFours; j += kOwn ? 2 : 1) {
    const int column = tile.column(4 * j);
    int byte = halves[j];
    if constexpr (kOwn) {
      if (j + 1 < kFours) byte |= halves[(j + 1) % kFours] << 4;
    } else {
      byte |= __shfl_xor_sync(Tile::members(), halves[j], 1, Tile::kLanes) << 4;
    }
    if (column % 8 == 0 && column < Tile::kWidth) row[column / 8] = static_cast<uint8_t>(byte);
  }
}

// Adds the row to the sums of all rows (rowmap_sums).
template <class Tile>
__device__ void col_sum(Tile& tile) {
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) tile.sums[i] = __fadd_rn(tile.sums[i], tile.v[i]);
}

// Returns the power of two that brings a magnitude to at least 2^14 and below 2^15, at most 2^126.
__device__ inline float power_for(float amax) {
  const int exponent = __float_as_int(amax) >> 23 & 255;
  return __int_as_float(exponent < 15 ? 253 << 23 : (268 - exponent) << 23);
}

// Lowers the power of two of a whole tensor (initially 2^126, by begin_fp16_scale) to that of this row by an atomic
// minimum. Positive floats are ordered like their bits. The value in L1 may be stale, and is then larger: the atomic
// operation is redundant in that case.
__device__ inline void lower_power(float* power, float amax) {
  const int bits = __float_as_int(power_for(amax));
  if (bits < __ldca(reinterpret_cast<const int*>(power))) atomicMin(reinterpret_cast<int*>(power), bits);
}
template <class Tile>
__device__ void fp16_scale(const Tile& tile, float* power) {
  const float top = max_abs(tile);
  if (tile.lane == 0) lower_power(power, top);
}

__device__ inline bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }

// Raises the flag if the current values of the row include NaN or infinity.
template <class Tile>
__device__ void watch(const Tile& tile, const NanFlag& watch) {
  bool fine = true;
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) fine = fine && (!tile.valid(i) || is_finite(tile.v[i]));
  if (!fine) watch.raise();
}

// Returns the scale of values of type T, amax / the largest value, or 0 if that is below the least normal float, so
// that the inverse of the scale is finite.
template <class T = int8_t>
__device__ inline float scale_of(float amax) {
  const float scale = __fdiv_rn(amax, Quantized<T>::kLargest);
  return scale < 1.17549435e-38f ? 0.0f : scale;
}
__device__ inline float inverse_of(float scale) { return scale > 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f; }

// Returns the bits of x + 1.5 * 2^23, whose low bits are x rounded to the nearest integer, half to even, because a
// float of this size has no fraction bits. Conversion instructions run at a quarter of the rate.
__device__ inline uint32_t rounded(float x) { return __float_as_uint(__fadd_rn(x, 12582912.0f)); }
__device__ inline int8_t quantized_of(float x) {
  return static_cast<int8_t>(rounded(fminf(fmaxf(x, -127.0f), 127.0f)));
}

// Returns zeros for the bytes past the width of a quantized row.
struct Zeros {
  __device__ int8_t operator()(int) const { return 0; }
};

// Rounding to the nearest integer, half to even.
struct Nearest {
  template <int kCount>
  __device__ int at(int, int) const {
    return 0;
  }
  template <bool kWithin>
  __device__ static int8_t code(float x, int, int) {
    return kWithin ? static_cast<int8_t>(rounded(x)) : quantized_of(x);
  }
};

// Stochastic rounding: down, after adding a random fraction.
struct Stochastic {
  uint64_t seed;
  uint32_t stream;
  int64_t row;

  template <int kCount>
  __device__ Fractions<kCount> at(int width, int column) const {
    return {seed, stream, row, width, column};
  }
  template <bool kWithin, class F>
  __device__ static int8_t code(float x, const F& fractions, int k) {
    return quantized_of(floorf(__fadd_rn(x, fractions(k))));
  }
};

// Stores the quantized values of a row; rows are kPadded (a multiple of 4) bytes apart. kWithin: the scaled values lie
// within +-127 and need no clamp; past: returns the bytes past the width.
template <int kPadded, bool kWithin = false, class Tile, class F, class Past = Zeros, class Rounding = Nearest>
__device__ void store_quantized(const Tile& tile, int8_t* row, const F& scaled, const Past& past = {},
                                const Rounding& rounding = {}) {
  constexpr int kCount = at_once<Tile, int8_t>(kPadded);
  static_assert(kCount >= 4, "rows of quantized values are padded to a multiple of 4");
#pragma unroll
  for (int i = 0; i < Tile::kPer; i += kCount) {
    const int column = tile.column(i);
    if (column >= kPadded) continue;
    Vector<int8_t, kCount> quantized;
    const auto fractions = rounding.template at<kCount>(Tile::kWidth, column);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float x = tile.valid(i + k) ? scaled(i + k) : 0.0f;
      const int8_t code = Rounding::template code<kWithin>(x, fractions, k);
      quantized.v[k] = tile.valid(i + k) ? code : past(column + k);
    }
    *reinterpret_cast<Vector<int8_t, kCount>*>(row + column) = quantized;
  }
  // Padding past the last block of columns of the tile.
  if constexpr (Tile::kHeld < kPadded) {
    for (int column = Tile::kHeld + tile.lane * 4; column < kPadded; column += 4 * Tile::kLanes) {
      *reinterpret_cast<Vector<int8_t, 4>*>(row + column) = {past(column), past(column + 1), past(column + 2),
                                                             past(column + 3)};
    }
  }
}

// Stores the 8-bit floats of a row, like store_quantized.
template <int kPadded, class Tile, class T, class F>
__device__ void store_floats(const Tile& tile, T* row, const F& scaled) {
  constexpr int kCount = at_once<Tile, T>(kPadded);
  static_assert(kCount >= 4, "rows of quantized values are padded to a multiple of 4");
#pragma unroll
  for (int i = 0; i < Tile::kPer; i += kCount) {
    const int column = tile.column(i);
    if (column >= kPadded) continue;
    const auto value = [&](int k) { return tile.valid(i + k) ? scaled(i + k) : 0.0f; };
    Vector<uint16_t, kCount / 2> pairs;
#pragma unroll
    for (int k = 0; k < kCount; k += 2) pairs.v[k / 2] = narrowed<T>(value(k), value(k + 1));
    *reinterpret_cast<Vector<uint16_t, kCount / 2>*>(row + column) = pairs;
  }
  // Padding past the last block of columns of the tile.
  if constexpr (Tile::kHeld < kPadded) {
    for (int column = Tile::kHeld + tile.lane * 4; column < kPadded; column += 4 * Tile::kLanes) {
      *reinterpret_cast<uint32_t*>(row + column) = 0;
    }
  }
}
template <int kPadded, class Tile, class T>
__device__ float quant_row(const Tile& tile, T* row, float* scale_out) {
  const float scale = scale_of<T>(max_abs(tile));
  const float inverse = inverse_of(scale);
  if (tile.lane == 0) *scale_out = scale;
  store_floats<kPadded>(tile, row, [&](int i) { return __fmul_rn(tile.v[i], inverse); });
  return scale;
}

template <int kPadded, class Tile, class Rounding = Nearest>
__device__ float quant_row(const Tile& tile, int8_t* row, float* scale_out, const Rounding& rounding = {}) {
  const float scale = scale_of(max_abs(tile));
  const float inverse = inverse_of(scale);
  if (tile.lane == 0) *scale_out = scale;
  store_quantized<kPadded, true>(tile, row, [&](int i) { return __fmul_rn(tile.v[i], inverse); }, Zeros{}, rounding);
  return scale;
}

// Raises the scale of a whole tensor (initially 0) to the scale of this row by an atomic maximum. Non-negative floats
// are ordered like their bits, and NaN is above all. The value in L1 may be stale, and is then smaller: the atomic
// operation is redundant in that case.
template <class Tile>
__device__ void scale_tensor(const Tile& tile, float* scale) {
  const int bits = __float_as_int(scale_of(max_abs(tile))) & 0x7fffffff;
  if (tile.lane == 0 && bits > __ldca(reinterpret_cast<const int*>(scale))) {
    atomicMax(reinterpret_cast<int*>(scale), bits);
  }
}

template <class Tile>
__device__ void watch_scale(const Tile& tile, float scale, const NanFlag& watch) {
  if (tile.lane == 0 && !is_finite(scale)) watch.raise();
}

// Returns the inverse of a given scale: one scale for all columns, or one a column.
template <bool kColumns, class Tile>
__device__ float inverse_at(const Tile& tile, const float* base, int i) {
  return inverse_of(__ldg(base + (kColumns && tile.valid(i) ? tile.column(i) : 0)));
}

template <int kPadded, bool kColumns, class Tile, class Rounding = Nearest>
__device__ void quant_static(const Tile& tile, int8_t* row, const float* base, const Rounding& rounding = {}) {
  if constexpr (kColumns) {
    const auto scaled = [&](int i) { return __fmul_rn(tile.v[i], inverse_at<true>(tile, base, i)); };
    store_quantized<kPadded>(tile, row, scaled, Zeros{}, rounding);
  } else {
    const float inverse = inverse_of(__ldg(base));
    store_quantized<kPadded>(tile, row, [&](int i) { return __fmul_rn(tile.v[i], inverse); }, Zeros{}, rounding);
  }
}

// Quantizes a row with the scale base / 2^k, k the largest in 0..7 for which no value saturates. If the padding has
// room, the row also stores its weight (weight_place).
template <int kPadded, bool kColumns, class Tile, class Rounding = Nearest>
__device__ void quant_pow2(const Tile& tile, int8_t* row, uint8_t* shift_out, const float* base,
                           const Rounding& rounding = {}) {
  Tile scaled = tile;
  if constexpr (kColumns) {
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) scaled.v[i] = __fmul_rn(tile.v[i], inverse_at<true>(tile, base, i));
  } else {
    const float inverse = inverse_of(__ldg(base));
    each(scaled, [=](float x) { return __fmul_rn(x, inverse); });
  }
  // The difference of the bits of 127 and of the maximum, whose exponent field is the difference of the exponents, one
  // less if the fraction of the maximum is larger.
  const int32_t left = __float_as_int(127.0f) - __float_as_int(max_abs(scaled));
  const int shift = min(max(left >> 23, 0), 7);
  if (left < 0) each(scaled, [](float x) { return fminf(fmaxf(x, -127.0f), 127.0f); });
  const float power = static_cast<float>(1 << shift);
  if (tile.lane == 0) *shift_out = static_cast<uint8_t>(shift);
  const auto weight = [=](int column) {
    return static_cast<int8_t>(column == weight_place(Tile::kWidth) ? 128u >> shift : 0u);
  };
  store_quantized<kPadded, true>(tile, row, [&](int i) { return __fmul_rn(scaled.v[i], power); }, weight, rounding);
}

// Computes out[h], the dot product of the h-th of kHeads equal parts of the row with the same part of `columns`.
template <int kHeads, class Tile>
__device__ void row_dot(const Tile& tile, const float* columns, float* out) {
  constexpr int kDepth = Tile::kWidth / kHeads;
  Tile product = tile;
  with_columns(product, columns, [](float x, float v) { return x * v; });
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const float total = product.sum([&](float x, int i) { return product.column(i) / kDepth == h ? x : 0.0f; });
    if (tile.lane == h % Tile::kLanes) out[h] = total;
  }
}

}  // namespace gnnc::step
