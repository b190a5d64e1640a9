#pragma once

// gemm_tn: out = a^T b, summed over the rows of both: the gradient of a weight.
//
// Rows are cut into chunks whose number depends on the shapes only; every chunk has its own sum, and the sums are added
// in order, so that results have the same bits at any thread count. Within a chunk, blocks of 64 rows are packed as
// floats, int8 rows times their scale; fp32 rows of whole vectors are read where they are. A tile of 6 x 4 (AVX2: 6 x
// 2) vectors of the result stays in registers. Traffic: a and b once; a chunk's sum is in L2. Floor: rows K O fused
// multiply-adds.
//
// With vdpbf16ps, products of rows in bf16 are those of pairs (`dots`), at half of the instructions. With VNNI, int8
// rows are multiplied as integers (`integers`): scales of int8 rows are factors of b, whose columns are rounded to 16
// bits, so that a value of b is off by at most 2^-16 of the largest in its column and block of 128 rows. A block with a
// value that is not finite is multiplied as floats. The launcher exchanges a and b where b alone is int8, or both and b
// is wider.
//
// With AMX (`tiles`), where the rows of a are bf16 or int8, which bf16 holds exactly, the products are those of tiles.
// Scales of int8 rows are factors of b; b is then the sum of two bf16 values, as it is if it is fp32, and is off by at
// most 2^-17 of each value. If b alone is narrow, the launcher exchanges a and b. Floor: the bytes of both matrices.

#include <cstdint>

#include "gnnc/isa.h"

namespace gnnc {

constexpr int64_t kGradColumns = 16;  // columns of a chunk's sum are padded to a multiple of this

enum class GradElement { f32, rounded, bf16, i8 };  // rounded: fp32, multiplied as bf16

struct GradMatrix {
  const void* data;
  const float* scale;  // [rows] of int8 rows, else null
  GradElement element;
  int64_t stride;
};

enum class GradProducts { floats, dots, integers, tiles };

struct GemmTnArgs {
  GradMatrix a;  // [rows, inner]
  GradMatrix b;  // [rows, outer]
  int64_t inner, outer, padded;
  GradProducts products;
};

// Writes the sum over rows [begin, end) to out, fp32 [inner, padded to whole tiles of 16 rows; padded].
GNNC_EACH_ISA(void gemm_tn(const GemmTnArgs& args, int64_t begin, int64_t end, float* out);)

}  // namespace gnnc
