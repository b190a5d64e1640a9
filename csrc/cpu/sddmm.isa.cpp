// See sddmm.h for layout, traffic and floor.

#include "sddmm.h"

#include "dot.isa.h"
#include "gather.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

template <EdgeOp op>
GNNC_INLINE Floats combine(Floats a, Floats b) {
  if constexpr (op == EdgeOp::add) return a + b;
  if constexpr (op == EdgeOp::sub) return a - b;
  if constexpr (op == EdgeOp::mul) return a * b;
  return op == EdgeOp::copy_src ? b : a;
}

template <typename T>
struct Pair {
  const T* a;
  const T* b;
  float a_scale;
  float b_scale;
};

template <typename T, EdgeOp op>
void edge_row(const SddmmArgs& args, const Pair<T>& p, int64_t e) {
  float* out = args.out + e * args.width;
  const Floats a_scale = splat(p.a_scale), b_scale = splat(p.b_scale);
  for_columns(args.width, [&](int64_t c, auto lanes) {
    store(out + c, combine<op>(load(p.a + c, lanes) * a_scale, load(p.b + c, lanes) * b_scale), lanes);
  });
}

#ifdef __AVX512BW__
// Stores the dot products of four heads of 16 bytes each. Sums are integers, so that any order gives the same bits.
GNNC_INLINE void dot_four_heads(const int8_t* a, const int8_t* b, float a_scale, float b_scale, float* out) {
  const auto products = [&](int64_t c) __attribute__((always_inline)) {
    const auto words = [&](const int8_t* row) __attribute__((always_inline)) {
      return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + c)));
    };
    return _mm512_madd_epi16(words(a), words(b));
  };
  const __m512i first = products(0), last = products(32);  // eight sums of each head: 0 and 1, 2 and 3
  __m512i sums = _mm512_add_epi32(_mm512_unpacklo_epi32(first, last), _mm512_unpackhi_epi32(first, last));
  sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
  sums = _mm512_add_epi32(sums, _mm512_shuffle_i32x4(sums, sums, 0xb1));
  const __m128i low = _mm512_castsi512_si128(sums), high = _mm512_extracti32x4_epi32(sums, 2);
  const __m128 dots = _mm_cvtepi32_ps(_mm_unpacklo_epi32(low, high));
  _mm_storeu_ps(out, _mm_mul_ps(_mm_mul_ps(dots, _mm_set1_ps(a_scale)), _mm_set1_ps(b_scale)));
}
#endif

template <typename T>
void edge_dots(const SddmmArgs& args, const Pair<T>& p, int64_t e) {
  const int64_t width = args.width / args.heads;
  int64_t h = 0;
#ifdef __AVX512BW__
  if constexpr (sizeof(T) == 1) {
    for (; width == 16 && h + 4 <= args.heads; h += 4) {
      dot_four_heads(p.a + h * 16, p.b + h * 16, p.a_scale, p.b_scale, args.out + e * args.heads + h);
    }
  }
#endif
  for (; h < args.heads; ++h) {
    args.out[e * args.heads + h] = dot(p.a + h * width, p.b + h * width, width) * p.a_scale * p.b_scale;
  }
}

template <typename T, typename Edge>
void for_edges(const SddmmArgs& args, int64_t row_begin, int64_t row_end, const Edge& edge) {
  const auto* a = static_cast<const T*>(args.a);
  const auto* b = static_cast<const T*>(args.b);
  const int64_t row_bytes = args.width * static_cast<int64_t>(sizeof(T)), ahead = edges_ahead(row_bytes);
  for (int64_t i = row_begin; i < row_end; ++i) {
    const float a_scale = args.a_scale == nullptr ? 1.0f : args.a_scale[i];
    for (int64_t e = args.csr.rowptr[i]; e < args.csr.rowptr[i + 1]; ++e) {
      const int64_t j = args.csr.col[e];
      const int64_t later = args.csr.col[std::min(e + ahead, args.csr.num_edges - 1)];
      prefetch_row(b + later * args.b_stride, std::min<int64_t>(row_bytes, 1024));
      edge(Pair<T>{a + i * args.a_stride, b + j * args.b_stride, a_scale,
                   args.b_scale == nullptr ? 1.0f : args.b_scale[j]},
           e);
    }
  }
}

template <typename T>
void sddmm_of(const SddmmArgs& args, int64_t row_begin, int64_t row_end) {
  const auto rows = [&]<EdgeOp op>() {
    for_edges<T>(args, row_begin, row_end, [&](const Pair<T>& p, int64_t e) { edge_row<T, op>(args, p, e); });
  };
  switch (args.op) {
    case EdgeOp::dot:
      return for_edges<T>(args, row_begin, row_end, [&](const Pair<T>& p, int64_t e) { edge_dots(args, p, e); });
    case EdgeOp::add:
      return rows.template operator()<EdgeOp::add>();
    case EdgeOp::sub:
      return rows.template operator()<EdgeOp::sub>();
    case EdgeOp::mul:
      return rows.template operator()<EdgeOp::mul>();
    case EdgeOp::copy_src:
      return rows.template operator()<EdgeOp::copy_src>();
    case EdgeOp::copy_dst:
      return rows.template operator()<EdgeOp::copy_dst>();
  }
}

}  // namespace

void sddmm(const SddmmArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.element == Element::i8) {
    sddmm_of<int8_t>(args, row_begin, row_end);
  } else if (args.element == Element::bf16) {
    sddmm_of<Bf16>(args, row_begin, row_end);
  } else {
    sddmm_of<float>(args, row_begin, row_end);
  }
}

}  // namespace gnnc::GNNC_ISA
