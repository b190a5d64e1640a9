#pragma once

// Compile-time configuration of the SpMM kernels: arguments, the weighting of edges, threads a block and registers a
// thread by element type and width, and the cut of wide rows into slices. See spmm.cuh for layout, traffic and floor.

#include "common/row_tile.cuh"
#include "sparse/lane_reduce.cuh"
#include "sparse/product_sum.cuh"
#include "sparse/split_rows.cuh"
#include "sparse/staged.cuh"
#include "sparse/stream.cuh"

namespace gnnc {

// The arguments of the SpMM kernels; Runs is the type of the run table (Runs or StagedRuns).
template <class Runs>
struct SpmmArgsOn {
  Runs runs;
  const void* x;
  int64_t x_stride;      // bytes, a multiple of 16, below 2^32
  const void* value;     // [E] float on 16 bytes, [E, heads] float, or [E] int8; null where Config::kValue is none
  const float* x_scale;  // [num_src], where Config::kScale is row
  const uint8_t* shift;  // [num_src], where Config::kScale is power: row weight 2^(7 - shift)
  Staging staging;       // staging buffer for the parts of split rows
};
using SpmmArgs = SpmmArgsOn<Runs>;
using StagedSpmmArgs = SpmmArgsOn<StagedRuns>;

// The value of an edge: none, a float, or an int8.
enum class Value { none, real, integer };
// The scale of a source row: none, a float, or a power of two.
enum class Scale { none, row, power, in_row };  // in_row: as power, and each row holds its weight itself (weight_place)

// Returns whether every edge has one float weight, shared by all columns.
__host__ __device__ constexpr bool is_valued(Value value, int heads) { return value == Value::real && heads == 1; }

__host__ __device__ constexpr Weight weight_of(Value value, Scale scale) {
  if (value == Value::real || scale == Scale::row) return Weight::real;
  if (value == Value::integer) return Weight::signed8;
  return scale == Scale::none ? Weight::none : Weight::power8;
}

// Returns whether elements are compared two at a time in their stored type, which requires that no weight is multiplied
// in.
__host__ __device__ constexpr bool is_extreme_of_pairs(Element element, Reduce reduce, Weight weight, int heads) {
  const bool narrow = element != Element::f32 && !is_fp8(element);
  return narrow && reduce >= Reduce::max && weight == Weight::none && heads == 1;
}

__host__ __device__ constexpr bool is_sum_of_quantized(Element element, Reduce reduce) {
  return element == Element::i8 && reduce <= Reduce::mean;
}

// Returns the number of columns of a row of x from one head to the next. Padding between heads is only needed for int8
// sums; where elements are converted to FP32, a piece may span several heads.
__host__ __device__ constexpr int spmm_head_stride(Element element, int width, Reduce reduce, int heads) {
  return is_sum_of_quantized(element, reduce) ? head_stride(element, width, heads) : width / heads;
}

__host__ __device__ constexpr Residency spmm_registers(Element element, int width, Reduce reduce, Value value,
                                                       Scale scale) {
  const Weight weight = weight_of(value, scale);
  const bool bytes = element == Element::i8;
  const bool extreme = reduce >= Reduce::max && !is_extreme_of_pairs(element, reduce, weight, 1);
  if (!is_one_pass(element, width) || kArchitecture < 900) return {512, bytes || extreme ? 4 : 8};
  const int pieces = pieces_of(element, width);
  if (is_fp8(element)) return {kArchitecture < 1000 ? 768 : 640, 4};
  if (bytes && weight == Weight::none && !extreme) return {pieces == 1 ? 896 : 768, 8};
  if (bytes && value == Value::real && !extreme) {
    if (kArchitecture >= 1000) return {scale != Scale::row ? 640 : 512, 8};
    return {pieces >= 8 || scale != Scale::row ? 768 : 640, 8};
  }
  if (scale == Scale::row && pieces >= 4 && !extreme && kArchitecture < 1000) return {768, 8};
  if (bytes) return {weight == Weight::power8 && kArchitecture < 1000 ? 896 : 768, 4};
  const bool plain = weight == Weight::none && !extreme && pieces <= 16 && width * bytes_of(element) % 16 == 0;
  return {plain && (element == Element::f32 || kArchitecture < 1000) ? 896 : 768, 8};
}

// Returns spmm_registers for one weight per head; `gathered` is the number of columns of a row of x.
__host__ __device__ constexpr Residency spmm_registers_by_head(Element element, int width, int gathered,
                                                               Reduce reduce) {
  if (kArchitecture < 900 || !is_sum_of_quantized(element, reduce) || !is_one_pass(element, gathered)) return {512, 4};
  return {kArchitecture < 1000 && gathered == width ? 640 : 512, 8};
}

__host__ __device__ constexpr Residency spmm_residency(Element element, int width, Reduce reduce, Value value,
                                                       Scale scale, int heads) {
  const int gathered = heads * spmm_head_stride(element, width, reduce, heads);
  Residency r = heads > 1 ? spmm_registers_by_head(element, width, gathered, reduce)
                          : spmm_registers(element, width, reduce, value, scale);
  const int pieces = pieces_of(element, gathered);
  if (pieces == 1) r.step = 4;  // a team of four slots takes sixteen edges
  const bool one_pass = is_one_pass(element, gathered);
  const int held = one_pass && gathered == width ? 4 : padded_width(element, gathered);
  return fitting(r, pieces, held, is_valued(value, heads), one_pass);
}

// The template parameters of an SpMM kernel. kValue::integer and kScale other than none and row need int8 rows.
template <Element kElement_, int kWidth_, Reduce kReduce_, Value kValue_ = Value::none, Scale kScale_ = Scale::none,
          int kHeads_ = 1,
          int kThreads_ = spmm_residency(kElement_, kWidth_, kReduce_, kValue_, kScale_, kHeads_).threads,
          int kStep_ = spmm_residency(kElement_, kWidth_, kReduce_, kValue_, kScale_, kHeads_).step>
struct SpmmConfig {
  static constexpr Element kElement = kElement_;
  static constexpr int kWidth = kWidth_;
  static constexpr Reduce kReduce = kReduce_;
  static constexpr Value kValue = kValue_;
  static constexpr Scale kScale = kScale_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kStep = kStep_;
  // Width of the full row and number of its slices; kWidth columns are one slice.
  static constexpr int kRowWidth = kWidth, kSlices = 1;
};

// Types and constants of an SpMM kernel, derived from a configuration.
template <class Config>
struct Spmm {
  static constexpr Element kElement = Config::kElement;
  static constexpr int kWidth = Config::kWidth, kHeads = Config::kHeads;
  static constexpr bool kAdds = Config::kReduce == Reduce::sum || Config::kReduce == Reduce::mean;
  static constexpr Weight kWeight = weight_of(Config::kValue, Config::kScale);
  static constexpr bool kBytes = is_sum_of_quantized(kElement, Config::kReduce);
  static constexpr int kHeadWidth = kWidth / kHeads;
  static constexpr int kHeadStride = spmm_head_stride(kElement, kWidth, Config::kReduce, kHeads);
  static constexpr int kStride = kHeads * kHeadStride;  // columns of a row of x
  using Layout = RowLayout<kElement, kStride>;
  // kHalves: use HalfSum. Four threads share a row of the matrix product, and a non-finite value spreads among the
  // columns of these four threads, so that a row must have at least four pieces.
  static constexpr bool kHalves = (kElement == Element::f16 || kElement == Element::bf16) && kAdds &&
                                  kWeight == Weight::none && Layout::kPieces >= 4;
  static constexpr bool kExact = kBytes && kWeight != Weight::real;
  static_assert(kElement == Element::i8 || (Config::kValue != Value::integer && Config::kScale == Scale::none) ||
                    (is_fp8(kElement) && Config::kValue != Value::integer && Config::kScale <= Scale::row),
                "integer values and powers of two require int8 rows, scales of rows elements of one byte");
  static_assert(Config::kValue != Value::integer || Config::kScale == Scale::none, "an int8 value takes no scale");
  static_assert(Config::kScale != Scale::in_row || (kExact && Config::kValue == Value::none &&
                                                    is_one_pass(kElement, kWidth) && weight_place(kWidth) >= 0),
                "Scale::in_row is the only weight, and needs an exact int8 sum of rows that one pass reads and that "
                "have room for it");
  static_assert(kWidth % kHeads == 0, "the number of heads must divide the width");
  static_assert(kHeads == 1 || Config::kValue == Value::real, "weights by head must be floats");

  using Bytes = typename Select<kWeight == Weight::none, ByteSum<Layout>, ByteProducts<Layout, kWeight>>::Type;
  using Halves = HalfSum<Layout>;
  using Lanes = typename Select<is_extreme_of_pairs(kElement, Config::kReduce, kWeight, kHeads),
                                PairExtremes<Layout, Config::kReduce>, LaneReduce<Layout, Config::kReduce>>::Type;
  using Sum = typename Select<kBytes, Bytes, typename Select<kHalves, Halves, Lanes>::Type>::Type;
  using Word = typename Sum::Word;

  // Tile is the register layout of a finished row: with kBundle, a row lies in the threads of one slot, each thread
  // holding the columns that it gathers; otherwise (several passes, or padding between heads) a row is spread over the
  // whole warp.
  static constexpr bool kBundle = Layout::kPasses == 1 && kStride == kWidth;
  using Tile = RowTile<kWidth, kBundle ? Layout::kPieces : 32, kBundle ? Layout::kColumns : 4, true>;
  // kSpread: a row that all slots share is spread over all threads of the warp before it is stored, because each thread
  // of one slot would hold more columns than one store should write.
  static constexpr bool kSpread = kBundle && spread_run<Layout>() < Layout::kColumns;
  static constexpr int kWarps = Config::kThreads / 32;
  static constexpr int kHeld = kBundle ? 4 : Layout::kPadded;  // words of shared memory for the row of a warp
  // The type of one column in a slot of the staging buffer.
  using Total = typename Select<kExact, int64_t, float>::Type;
  static constexpr int kStaged = ((kHeads == 1 ? Config::kRowWidth : kStride) + 3) / 4 * 4;
  static constexpr int kStagedBytes = kStaged * sizeof(Total);
};

// Most bytes of a row that is summed whole; wider rows are summed in slices where possible.
constexpr int kMostWhole = 256;

// Returns the bytes of a row that spmm_sliced gathers at a time. The slice that all blocks work on fits into L2
// although rows are wide, and each warp still reads whole cache lines.
__host__ __device__ constexpr int slice_bytes(Element element) { return bytes_of(element) == 1 ? 128 : 256; }

// Returns the most threads of a block of spmm_sliced: the slice index occupies registers too, so fewer threads fit.
__host__ __device__ constexpr int most_threads_of_slices(Element element, int step) {
  if (is_fp8(element)) return 640;
  return element != Element::i8 || step == 4 || kArchitecture < 1000 ? 768 : 640;
}

// Configuration of spmm_sliced, with the SpmmConfig of one slice of columns.
template <class Config_>
struct Sliced {
  using Slices = gnnc::Slices<Config_::kElement, Config_::kWidth, slice_bytes(Config_::kElement)>;
  using Whole = SpmmConfig<Config_::kElement, Slices::kWidth, Config_::kReduce, Config_::kValue, Config_::kScale>;
  static constexpr int kMost = most_threads_of_slices(Config_::kElement, Whole::kStep);
  static constexpr int kThreads = Whole::kThreads < kMost ? Whole::kThreads : kMost;
  struct Config : SpmmConfig<Config_::kElement, Slices::kWidth, Config_::kReduce, Config_::kValue, Config_::kScale, 1,
                             kThreads, Whole::kStep> {
    static constexpr int kRowWidth = Config_::kWidth, kSlices = Slices::kCount;
  };
  static_assert(Config_::kHeads == 1 && Config_::kScale != Scale::in_row,
                "in slices, all columns must have the same weight");
  static_assert(Config_::kWidth > Slices::kWidth, "a row must have several slices");
};

// Returns the threads of a block of spmm_staged for rows of more than 64 bytes, which have a step of four edges.
__host__ __device__ constexpr int staged_threads_of_slices(Element element, int row, Weight weight) {
  if (kArchitecture < 900 || weight == Weight::real) return 512;
  if (element != Element::i8) return element == Element::f32 && kArchitecture >= 1000 ? 640 : 768;
  if (row <= 128 && weight == Weight::none) return 768;
  return kArchitecture >= 1000 ? 512 : 640;
}

__host__ __device__ constexpr Residency staged_registers(Element element, int width, Weight weight) {
  const bool bytes = element == Element::i8;
  const int row = width * bytes_of(element), step = bytes_of(element) == 1 || row <= 32 ? 4 : 8;
  if (row > 64) return {staged_threads_of_slices(element, row, weight), 4};
  if (kArchitecture < 900 || !bytes) return {512, step};
  const bool few = row % 16 == 0;
  if (weight == Weight::none) return {few ? 768 : 640, step};
  if (kArchitecture >= 1000) return {512, step};
  return {few && weight == Weight::power8 ? 768 : 640, step};
}

__host__ __device__ constexpr Residency staged_residency(Element element, int width, Weight weight) {
  const int row = width * bytes_of(element);
  const Residency r = staged_registers(element, width, weight);
  return fitting_warps(r, staged_feed_bytes(row > 128 ? 8 : pieces_of(element, width), r.step / 4));
}

// Configuration of spmm_staged: a row of x is cut into slices so narrow that the shared-memory window of a block of ids
// holds many rows.
template <class Config_>
struct Staged {
  using Slices = gnnc::Slices<Config_::kElement, Config_::kWidth, 128>;
  static constexpr int kWidth = Slices::kCount == 1 ? Config_::kWidth : Slices::kWidth;
  static constexpr Residency kResidency =
      staged_residency(Config_::kElement, Config_::kWidth, weight_of(Value::none, Config_::kScale));
  static constexpr int kThreads = kResidency.threads;
  struct Config : SpmmConfig<Config_::kElement, kWidth, Config_::kReduce, Value::none, Config_::kScale, 1, kThreads,
                             kResidency.step> {
    static constexpr int kRowWidth = Config_::kWidth, kSlices = Slices::kCount;
  };
  using Layout = typename Spmm<Config>::Layout;
  using Window = gnnc::Window<Layout, Config::kScale == Scale::row ? 4 : Config::kScale == Scale::power ? 1 : 0>;
  using Feed = StagedFeed<Layout, kResidency.step / 4>;
  static constexpr int kEntries = entries_within(Window::kRows);
  static_assert(sizeof(Feed) == staged_feed_bytes(Layout::kPieces, kResidency.step / 4),
                "staged_feed_bytes, from which the number of threads follows, must be the size of the feed");
  static_assert(Spmm<Config>::kAdds && Config_::kValue == Value::none && Config_::kHeads == 1,
                "spmm_staged computes sums and means of rows, with one head and without edge values");
  static_assert(Config_::kScale != Scale::in_row || Slices::kCount == 1,
                "the weight in a row lies in its last slice, so that a row must be one slice");
  static_assert(Window::kBytes + kThreads / 32 * sizeof(Feed) + sizeof(StagedShare) <= 227 * 1024,
                "a multiprocessor has 227 KiB of shared memory for a block");
};

}  // namespace gnnc
