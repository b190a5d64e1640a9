#pragma once

// Layout of gathered rows of x over the threads of a warp. A warp reads rows in pieces of 16 bytes: thread (slot,
// piece) reads one piece of a row, and neighboring threads read neighboring pieces, so that eight threads touch as
// few cache lines as possible. A slot is the group of threads that reads one row; each slot processes different edges.
// Rows wider than a warp reads at once take several passes over the edges, or are cut into slices of columns, each of
// which is processed as a matrix by itself.

#include "common/types.cuh"

namespace gnnc {

enum class Element { f32, f16, bf16, i8, e4m3, e5m2 };

__host__ __device__ constexpr int bytes_of(Element e) { return e == Element::f32 ? 4 : e >= Element::i8 ? 1 : 2; }

// Returns whether elements are 8-bit floats, whose rows have a scale each and are summed in FP32.
__host__ __device__ constexpr bool is_fp8(Element e) { return e >= Element::e4m3; }

__host__ __device__ constexpr int power_of_two_from(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Returns log2 of a power of two.
__host__ __device__ constexpr int bits_of(int power) { return power > 1 ? 1 + bits_of(power / 2) : 0; }

// Returns the number of pieces of a row that a warp reads at once (kPieces): the whole row, or a power of two such that
// at most an eighth more is read than the row has.
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

// Returns the number of columns that all passes read, the padding past the width included.
__host__ __device__ constexpr int padded_width(Element element, int width) {
  const int at_once = pieces_of(element, width) * 16 / bytes_of(element);
  return (width + at_once - 1) / at_once * at_once;
}

// Returns the number of columns from one head to the next. If there are several heads, each begins on a 16-byte
// boundary (pack_rows.cuh), so that a piece never spans two heads.
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

// Layout of rows of kWidth columns over a warp: a row has kTotal pieces; a warp reads kPieces of them at once, for
// kSlots rows; a row takes kPasses passes.
template <Element kElement_, int kWidth_>
struct RowLayout {
  static constexpr Element kElement = kElement_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kColumns = 16 / bytes_of(kElement);           // columns of a piece
  static constexpr int kTotal = (kWidth + kColumns - 1) / kColumns;  // pieces of a row
  static constexpr int kPieces = pieces_at_once(kTotal);
  static constexpr int kPasses = (kTotal + kPieces - 1) / kPieces;
  static constexpr int kSlots = 32 / kPieces;
  static constexpr int kSlotBits = bits_of(kSlots);
  // A team: neighboring slots that share a row (unless all slots of the warp share it), so that at least four threads
  // work on a row: they request 64 bytes of a source row at once, and store as many at once.
  static constexpr int kTeam = kPieces < 4 ? 4 / kPieces : 1;
  static constexpr int kTeams = kSlots / kTeam;
  static constexpr int kPassColumns = kPieces * kColumns;
  static constexpr int kPadded = kPasses * kPassColumns;  // columns of all passes, padding included
  // Bits of the last piece that lie within the width.
  static constexpr int kLastBits = (kWidth - (kTotal - 1) * kColumns) * 8 * bytes_of(kElement);

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int piece() { return lane() % kPieces; }
  __device__ static int slot() { return lane() / kPieces; }
  __device__ static int team() { return slot() / kTeam; }
  // Return the index of this slot among the slots that share a row, and log2 of the number of those slots: all slots of
  // the warp, or a team.
  __device__ static int sharer(bool all) { return all ? slot() : slot() % kTeam; }
  __device__ static int sharer_bits(bool all) { return all ? kSlotBits : bits_of(kTeam); }
  // Returns a piece with the columns past the width of the row set to zero; a piece index past the last piece is
  // treated as the last piece.
  __device__ static uint4 within(const uint4& v, int piece) {
    // Each word is masked with a value that the assembler cannot predict: the assembler would turn a predictable mask
    // into a select and place this select after each row's load, which serializes the loads.
    int past;  // 0 before the last piece, at least 1 from the last piece on
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

// The rows that edges gather: the rows of a matrix, or of a slice of its columns.
struct Gathered {
  const char* first;  // address of row 0
  uint32_t stride;    // bytes from one row to the next
  int pieces;         // pieces of a row
};

template <class Layout>
__device__ __forceinline__ Gathered whole_rows(const void* x, int64_t stride) {
  return Gathered{static_cast<const char*>(x), static_cast<uint32_t>(stride), Layout::kTotal};
}

// Cut of a row into slices of kBytes, a power of two; the last slice may be narrower.
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

// Returns the address of a row, `stride` bytes apart. (In plain C++, the compiler emits an additional addition of zero
// for the product.)
__device__ __forceinline__ const char* row_at(const char* first, int32_t row, uint32_t stride) {
  uint64_t bytes;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(bytes) : "r"(row), "r"(stride));
  return first + bytes;
}

// Defines functions that load a value if `there`, and otherwise return `otherwise`, by a predicated load: without a
// branch and without a select on the result, because both would wait for the load. If !there, the address may be
// invalid.
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
GNNC_LOAD_IF(load_if, uint16_t, uint32_t, "r", "mov.u32", "ld.global.nc.u16")
GNNC_LOAD_IF(load_if, int8_t, uint32_t, "r", "mov.u32", "ld.global.nc.s8")
#undef GNNC_LOAD_IF

// Returns 16 bytes of a row, or zeros if !there; a predicated load as above.
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
