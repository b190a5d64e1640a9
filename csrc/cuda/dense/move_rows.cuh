#pragma once

// copy_rows: rows of a tensor into rows of another, one below the other. fill: a tensor of one number.
//
// A thread moves Config::kTogether neighboring columns. Traffic: the rows that are read and written, once. Floor:
// these bytes at copy bandwidth.
//
// Launch: blocks of 256 threads, one for every 256 * kTogether elements of the result.

#include "common/row_steps.cuh"

namespace gnnc {

// Compile-time configuration of copy_rows. kStride, kPitch: elements from one row of x, and of the
// result, to the next.
template <class X_, int kWidth_, int64_t kStride_, int64_t kPitch_, int kTogether_>
struct MoveRowsConfig {
  using X = X_;
  static constexpr int kWidth = kWidth_, kTogether = kTogether_;
  static constexpr int64_t kStride = kStride_, kPitch = kPitch_;
};

struct CopyRowsArgs {
  const void* x;
  void* out;
  int64_t rows;
};

template <class Config>
__global__ void __launch_bounds__(256) copy_rows(CopyRowsArgs args) {
  begin_kernel();
  constexpr int kPieces = Config::kWidth / Config::kTogether;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x, row = number / kPieces;
  if (row >= args.rows) return;
  using Piece = Vector<typename Config::X, Config::kTogether>;
  const int64_t column = number % kPieces * Config::kTogether;
  const auto* from = static_cast<const typename Config::X*>(args.x) + row * Config::kStride + column;
  auto* to = static_cast<typename Config::X*>(args.out) + row * Config::kPitch + column;
  *reinterpret_cast<Piece*>(to) = *reinterpret_cast<const Piece*>(from);
}

struct FillArgs {
  void* out;
  int64_t count;
};

// Constant::value(): the number.
template <class T, class Constant>
__global__ void __launch_bounds__(256) fill(FillArgs args) {
  begin_kernel();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (index < args.count) static_cast<T*>(args.out)[index] = step::from_float<T>(Constant::value());
}

}  // namespace gnnc
