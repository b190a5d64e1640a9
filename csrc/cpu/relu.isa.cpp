// See relu.h for layout and traffic.

#include "relu.h"

#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {
namespace {

// Eight columns of a row, or fewer at its end.
uint8_t bits_of(const float* x, int64_t columns) {
  uint8_t bits = 0;
  for (int64_t c = 0; c < columns; ++c) bits = static_cast<uint8_t>(bits | (!(x[c] <= 0.0f) << c));
  return bits;
}

void keep_bits(const float* grad, uint8_t bits, int64_t columns, float* out) {
  for (int64_t c = 0; c < columns; ++c) out[c] = (bits >> c) & 1 ? grad[c] : 0.0f;
}

int64_t bytes_of(int64_t width) { return (width + 7) / 8; }

}  // namespace

void relu_mask(const ReluArgs& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = a.values + row * a.stride;
    uint8_t* mask = a.mask + row * bytes_of(a.width);
    int64_t c = 0;
#ifdef __AVX512F__
    for (; c + 16 <= a.width; c += 16) {
      const __mmask16 bits = _mm512_cmp_ps_mask(_mm512_loadu_ps(x + c), _mm512_setzero_ps(), _CMP_NLE_UQ);
      std::memcpy(mask + c / 8, &bits, 2);
    }
#endif
    for (; c < a.width; c += 8) mask[c / 8] = bits_of(x + c, a.width - c < 8 ? a.width - c : 8);
  }
}

void relu_backward(const ReluArgs& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* grad = a.values + row * a.stride;
    const uint8_t* mask = a.mask + row * bytes_of(a.width);
    float* out = a.out + row * a.width;
    int64_t c = 0;
#ifdef __AVX512F__
    for (; c + 16 <= a.width; c += 16) {
      __mmask16 bits;
      std::memcpy(&bits, mask + c / 8, 2);
      _mm512_storeu_ps(out + c, _mm512_maskz_loadu_ps(bits, grad + c));
    }
#endif
    for (; c < a.width; c += 8) keep_bits(grad + c, mask[c / 8], a.width - c < 8 ? a.width - c : 8, out + c);
  }
}

}  // namespace gnnc::GNNC_ISA
