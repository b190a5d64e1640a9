#pragma once

// A warp reads gathered rows of x in pieces of 16 bytes. Thread (slot, piece) reads one piece of a row,
// neighbouring threads neighbouring pieces, so that eight threads touch as few cache lines as there are; each slot has
// edges of its own. Rows wider than what a warp reads at once take several passes over the edges, or are cut into
// slices of columns, of which each is a matrix of its own.

#include "common/types.cuh"

namespace gnnc {

enum class Element { f32, f16, bf16, i8 };

__host__ __device__ constexpr int bytes_of(Element e) { return e == Element::f32 ? 4 : e == Element::i8 ? 1 : 2; }

__host__ __device__ constexpr int power_of_two_from(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// The logarithm of a power of two.
__host__ __device__ constexpr int bits_of(int power) { return power > 1 ? 1 + bits_of(power / 2) : 0; }

// Pieces that a warp reads at once: whole rows, or so many that at most an eighth more is read than there is.
__host__ __device__ constexpr int pieces_at_once(int total) {
  if (total <= 32) return power_of_two_from(total);
  for (int pieces = 32; pieces > 8; pieces /= 2) {
    if ((total + pieces - 1) / pieces * pieces * 8 <= total * 9) return pieces;
  }
  return 8;
}

__host__ __device__ constexpr int pieces_of(Element element, int width) {
  return pieces_at_once((width * bytes_of(element) + 15) / 16);
}

// Returns whether a warp reads whole rows, in one pass over the edges.
__host__ __device__ constexpr bool is_one_pass(Element element, int width) { return width * bytes_of(element) <= 512; }

// Columns of all passes, with what is past the width.
__host__ __device__ constexpr int padded_width(Element element, int width) {
  const int at_once = pieces_of(element, width) * 16 / bytes_of(element);
  return (width + at_once - 1) / at_once * at_once;
}

// Columns from one head to the next, where each of several begins on 16 bytes (pack_rows.cuh), so that a piece lies in
// one.
__host__ __device__ constexpr int head_stride(Element element, int width, int heads) {
  const int piece = 16 / bytes_of(element);
  return heads == 1 ? width : (width / heads + piece - 1) / piece * piece;
}

// Returns the position, in a row whose heads are padded, of a column of the result.
template <int kHeadWidth, int kHeadStride>
__device__ __forceinline__ int place_of(int column) {
  if constexpr (kHeadStride == kHeadWidth) return column;
  return column / kHeadWidth * kHeadStride + column % kHeadWidth;
}

template <Element kElement_, int kWidth_>
struct RowLayout {
  static constexpr Element kElement = kElement_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kColumns = 16 / bytes_of(kElement);           // of a piece
  static constexpr int kTotal = (kWidth + kColumns - 1) / kColumns;  // pieces of a row
  static constexpr int kPieces = pieces_at_once(kTotal);
  static constexpr int kPasses = (kTotal + kPieces - 1) / kPieces;
  static constexpr int kSlots = 32 / kPieces;
  static constexpr int kSlotBits = bits_of(kSlots);
  // Neighbouring slots that share a row where all slots do not, so that it has four threads at least: they ask for 64
  // bytes of its sources at once, and store as much at once.
  static constexpr int kTeam = kPieces < 4 ? 4 / kPieces : 1;
  static constexpr int kTeams = kSlots / kTeam;
  static constexpr int kPassColumns = kPieces * kColumns;
  static constexpr int kPadded = kPasses * kPassColumns;  // columns, with what is past the width
  static constexpr int kLastBits = (kWidth - (kTotal - 1) * kColumns) * 8 * bytes_of(kElement);  // of the last piece

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int piece() { return lane() % kPieces; }
  __device__ static int slot() { return lane() / kPieces; }
  __device__ static int team() { return slot() / kTeam; }
  // Return the number of this slot among the slots that share a row, and log2 of how many share it: all slots of the
  // warp or a team.
  __device__ static int sharer(bool all) { return all ? slot() : slot() % kTeam; }
  __device__ static int sharer_bits(bool all) { return all ? kSlotBits : bits_of(kTeam); }
  // A piece with zeros past the width of the row; pieces behind the last one count as that one.
  __device__ static uint4 within(const uint4& v, int piece) {
    // Every word by a mask that the assembler cannot foresee: what it can make a choice, it makes as each row comes,
    // before it asks for the next.
    int past;  // 0 before the last piece
    asm("max.s32 %0, %1, 0;" : "=r"(past) : "r"(piece - (kTotal - 2)));
    const auto kept = [&](uint32_t word, int j) {
      const int bits = kLastBits - 32 * j;
      uint32_t mask;
      asm("shr.u32 %0, %1, %2;"
          : "=r"(mask)
          : "r"(~0u), "r"(bits >= 32 ? past >> 5 : past * (32 - (bits > 0 ? bits : 0))));
      return word & mask;
    };
    return make_uint4(kept(v.x, 0), kept(v.y, 1), kept(v.z, 2), kept(v.w, 3));
  }
};

// The rows that edges gather: a matrix, or a slice of its columns.
struct Gathered {
  const char* first;  // of row 0
  uint32_t stride;    // bytes from one row to the next
  int pieces;         // of a row
};

template <class Layout>
__device__ __forceinline__ Gathered whole_rows(const void* x, int64_t stride) {
  return Gathered{static_cast<const char*>(x), static_cast<uint32_t>(stride), Layout::kTotal};
}

// Slices of kBytes, a power of two, of which the last may have less.
template <Element kElement, int kRowWidth, int kBytes>
struct Slices {
  static constexpr int kWidth = kBytes / bytes_of(kElement), kCount = (kRowWidth + kWidth - 1) / kWidth;

  __device__ static Gathered of(const void* x, int64_t stride, int slice) {
    constexpr int kPieces = kBytes / 16, kTotal = RowLayout<kElement, kRowWidth>::kTotal;
    const int left = kTotal - slice * kPieces;
    const int pieces = kCount == 1 ? kTotal : kTotal % kPieces == 0 ? kPieces : min(kPieces, left);
    return Gathered{static_cast<const char*>(x) + slice * kBytes, static_cast<uint32_t>(stride), pieces};
  }
};

// The row so many from the first, `stride` bytes each. (Written in C++, the product costs an addition of nothing more.)
__device__ __forceinline__ const char* row_at(const char* first, int32_t row, uint32_t stride) {
  uint64_t bytes;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(bytes) : "r"(row), "r"(stride));
  return first + bytes;
}

// Functions that load where `there`, without a branch or a look at the result: both would be waited for. The address
// may be any elsewhere.
#define GNNC_LOAD_IF(name, T, Value, constraint, move, load)                                                  \
  __device__ __forceinline__ Value name(bool there, const T* p, Value otherwise) {                            \
    Value v;                                                                                                  \
    asm("{\n .reg .pred there;\n setp.ne.u32 there, %3, 0;\n " move " %0, %2;\n @there " load " %0, [%1];\n}" \
        : "=" constraint(v)                                                                                   \
        : "l"(p), constraint(otherwise), "r"(static_cast<uint32_t>(there)));                                  \
    return v;                                                                                                 \
  }
GNNC_LOAD_IF(load_if, float, float, "f", "mov.f32", "ld.global.nc.f32")
GNNC_LOAD_IF(load_if, uint8_t, uint32_t, "r", "mov.u32", "ld.global.nc.u8")
GNNC_LOAD_IF(load_if, int8_t, uint32_t, "r", "mov.u32", "ld.global.nc.s8")
#undef GNNC_LOAD_IF

// 16 bytes of a row, zeros where it is not there.
__device__ __forceinline__ uint4 gather_if(bool there, const char* from) {
  uint4 v;
  asm("{\n .reg .pred there;\n setp.ne.u32 there, %5, 0;\n mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n"
      " mov.b32 %3, 0;\n @there ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from), "r"(static_cast<uint32_t>(there)));
  return v;
}

__device__ inline uint32_t word_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

}  // namespace gnnc
