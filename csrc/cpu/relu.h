#pragma once

// relu_mask: bit c % 8 of out[r, c / 8] says whether x[r, c] is above 0 or NaN. relu_backward: out = grad where the bit
// is set, else 0.
//
// Layout: x and grad fp32 with rows any stride apart; masks [rows, ceil(width / 8)] and out dense. Traffic: every
// operand once.

#include <cstdint>

#include "gnnc/isa.h"

namespace gnnc {

struct ReluArgs {
  const float* values;
  int64_t width, stride;
  uint8_t* mask;
  float* out;  // null for relu_mask
};

GNNC_EACH_ISA(void relu_mask(const ReluArgs& args, int64_t row_begin, int64_t row_end);
              void relu_backward(const ReluArgs& args, int64_t row_begin, int64_t row_end);)

}  // namespace gnnc
