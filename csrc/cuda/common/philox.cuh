#pragma once

// Random bits of stochastic rounding, as gnnc/ir/philox.py defines them: Philox4x32-10 with the seed as its key. The
// counter of eight columns of a row is row * ceil(width / 8) + column / 8, and the stream; each of its four words has
// the 16 bits of two columns, the lower half first.

#include "common/types.cuh"

namespace gnnc {

struct PhiloxWords {
  uint32_t v[4];
};

__device__ inline PhiloxWords philox(uint64_t seed, uint32_t stream, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = stream, c3 = 0;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The random fractions of kCount neighboring columns, of which the first is a multiple of kCount: 4, 8 or 16.
template <int kCount>
struct Fractions {
  static_assert(kCount == 4 || kCount % 8 == 0, "columns of one counter or of several");
  uint32_t words[kCount / 2];

  __device__ Fractions(uint64_t seed, uint32_t stream, int64_t row, int width, int column) {
    const uint64_t first = static_cast<uint64_t>(row) * static_cast<uint64_t>((width + 7) / 8) + column / 8;
    if constexpr (kCount == 4) {
      const PhiloxWords all = philox(seed, stream, first);
      words[0] = column & 4 ? all.v[2] : all.v[0];
      words[1] = column & 4 ? all.v[3] : all.v[1];
    } else {
#pragma unroll
      for (int block = 0; block < kCount / 8; ++block) {
        const PhiloxWords all = philox(seed, stream, first + static_cast<uint64_t>(block));
#pragma unroll
        for (int i = 0; i < 4; ++i) words[4 * block + i] = all.v[i];
      }
    }
  }

  // Returns (bits + 1/2) / 2^16 of column k: the bits are the fraction of a float between 1 and 2.
  __device__ float operator()(int k) const {
    const uint32_t bits = words[k / 2] >> (k % 2 * 16) & 0xffffu;
    return __fsub_rn(__uint_as_float(bits << 7 | 0x3f800040u), 1.0f);
  }
};

}  // namespace gnnc
