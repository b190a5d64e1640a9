// See include/gnnc/row_program.h for layout, traffic and floor.

#include "gnnc/row_program.h"

#include <algorithm>
#include <limits>

#include "gnnc/quantize.h"
#include "gnnc/simd.h"
#include "gnnc/simd_math.h"
#include "heads.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int kGroup = 16;  // rows that share a vector of row results

struct Tile {
  const RowProgram& program;
  float* acc;
  int64_t ld, first;
  int rows;
  int64_t width;

  float* row(int64_t r) const { return acc + r * ld; }
};

const float* floats(const RowView& v) { return static_cast<const float*>(v.data); }

template <typename T>
T* row_of(const RowView& v, int64_t r) {
  return static_cast<T*>(v.data) + r * v.stride;
}

// acc = f(acc), whole vectors: what lies past the width is not read later. Rows that touch are one long row.
template <typename Function>
void map_values(const Tile& t, const Function& f) {
  const bool touch = t.ld - t.width < kLanes;
  const int rows = touch ? 1 : t.rows;
  const int64_t width = touch ? t.rows * t.ld : t.width;
  for (int r = 0; r < rows; ++r) {
    float* row = t.row(r);
#pragma GCC unroll 4
    for (int64_t c = 0; c < width; c += kLanes) store(row + c, f(load(row + c)));
  }
}

template <typename Function>
void map_rows(const Tile& t, const RowView& v, const Function& f) {
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    const Floats value = splat(floats(v)[t.first + r]);
    for (int64_t c = 0; c < t.width; c += kLanes) store(row + c, f(load(row + c), value));
  }
}

template <typename Function>
void map_columns(const Tile& t, const RowView& v, const Function& f) {
  for_columns(t.width, [&](int64_t c, auto n) {
    const Floats value = load(floats(v) + c, n);
    float* at = t.acc + c;
#pragma GCC unroll 4
    for (int r = 0; r < t.rows; ++r, at += t.ld) store(at, f(load(at), value));
  });
}

template <typename T, typename Function>
void map_matrix(const Tile& t, const RowView& v, const Function& f) {
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    const T* values = row_of<const T>(v, t.first + r);
    for_columns(t.width, [&](int64_t c, auto n) { store(row + c, f(load(row + c), load(values + c, n))); });
  }
}

template <typename Function>
void map_full(const Tile& t, const RowView& v, const Function& f) {
  v.type == Scalar::bf16 ? map_matrix<Bf16>(t, v, f) : map_matrix<float>(t, v, f);
}

void add_codes(const Tile& t, const RowView& codes, const RowView& scales) {
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    const int8_t* q = row_of<const int8_t>(codes, t.first + r);
    const Floats scale = splat(floats(scales)[t.first + r]);
    for_columns(t.width, [&](int64_t c, auto n) { store(row + c, load(row + c) + load(q + c, n) * scale); });
  }
}

// Gives the lanes past the width a value that leaves the reduction to come alone.
void fill_tail(float* row, int64_t width, float value) {
  const int64_t end = (width + kLanes - 1) / kLanes * kLanes;
  for (int64_t c = width; c < end; ++c) row[c] = value;
}

template <typename Function>
float sum_row(const float* row, int64_t width, const Function& f) {
  Floats total{};
  for (int64_t c = 0; c < width; c += kLanes) total += f(load(row + c));
  return sum(total);
}

void layer_norm(const Tile& t, const RowView& weight, const RowView& bias, float eps) {
  const float count = static_cast<float>(t.width);
  const bool has_weight = weight.cols > 0, has_bias = bias.cols > 0;
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    fill_tail(row, t.width, 0.0f);
    const float mean = sum_row(row, t.width, [](Floats v) { return v; }) / count;
    fill_tail(row, t.width, mean);
    const Floats center = splat(mean);
    const float var = sum_row(row, t.width, [&](Floats v) { return (v - center) * (v - center); }) / count;
    const Floats factor = splat(1.0f / std::sqrt(var + eps));
    for_columns(t.width, [&](int64_t c, auto n) {
      Floats v = (load(row + c) - center) * factor;
      if (has_weight) v *= load(floats(weight) + c, n);
      if (has_bias) v += load(floats(bias) + c, n);
      store(row + c, v);
    });
  }
}

void l2_normalize(const Tile& t, float eps) {
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    fill_tail(row, t.width, 0.0f);
    const float norm = std::sqrt(sum_row(row, t.width, [](Floats v) { return v * v; }));
    const Floats factor = splat(1.0f / (norm < eps ? eps : norm));
    for (int64_t c = 0; c < t.width; c += kLanes) store(row + c, load(row + c) * factor);
  }
}

float largest_of_row(const float* row, int64_t width) {
  Floats top = load(row);
  for (int64_t c = kLanes; c < width; c += kLanes) top = larger(load(row + c), top);
  return largest(top);
}

void softmax(const Tile& t, bool logarithm) {
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    fill_tail(row, t.width, -std::numeric_limits<float>::infinity());
    const Floats top = splat(largest_of_row(row, t.width));
    if (logarithm) {
      const float total = sum_row(row, t.width, [&](Floats v) { return exp(v - top); });
      const Floats rest = log(splat(total));
      for (int64_t c = 0; c < t.width; c += kLanes) store(row + c, (load(row + c) - top) - rest);
    } else {
      for (int64_t c = 0; c < t.width; c += kLanes) store(row + c, exp(load(row + c) - top));
      const Floats share = splat(1.0f / sum_row(row, t.width, [](Floats v) { return v; }));
      for (int64_t c = 0; c < t.width; c += kLanes) store(row + c, load(row + c) * share);
    }
  }
}

void head_mean(Tile& t, int64_t heads) {
  t.width /= heads;
  const Floats count = splat(static_cast<float>(heads));
  for (int r = 0; r < t.rows; ++r) {
    float* row = t.row(r);
    for_columns(t.width, [&](int64_t c, auto n) {
      Floats total = load(row + c, n);
      for (int64_t h = 1; h < heads; ++h) total += load(row + h * t.width + c, n);
      store(row + c, total / count, n);
    });
  }
}

template <typename T>
void store_rows(const Tile& t, const RowView& out) {
  for (int r = 0; r < t.rows; ++r) {
    const float* row = t.row(r);
    T* to = row_of<T>(out, t.first + r);
    for_columns(t.width, [&](int64_t c, auto n) { store(to + c, load(row + c), n); });
  }
}

#ifdef __AVX512F__
constexpr int64_t kStreamBytes = int64_t{16} << 20;  // an output of this size leaves the caches before it is read
constexpr int64_t kStreamTile = 4096;                // elements

// Rows of a large output that touch each other are written a whole cache line at a time and past the caches, which
// saves reading the lines first.
template <typename T>
bool streams(const Tile& t, const RowView& out) {
  const bool touch = out.stride == t.width && t.rows * t.width <= kStreamTile;
  return touch && out.rows * out.stride * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
}

template <typename T>
void stream_rows(const Tile& t, const RowView& out) {
  constexpr int64_t kLine = 64 / sizeof(T);
  alignas(64) T lines[kStreamTile + 2 * kLine];
  T* to = row_of<T>(out, t.first);
  const auto before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) / sizeof(T) % kLine);
  T* at = lines + before;
  for (int r = 0; r < t.rows; ++r, at += t.width) {
    const float* row = t.row(r);
    for (int64_t c = 0; c < t.width; c += kLanes) store(at + c, load(row + c));
  }
  const int64_t end = before + t.rows * t.width;
  to -= before;
  int64_t i = 0;
  if (before > 0) {
    const int64_t stop = std::min<int64_t>(end, kLine);
    std::copy(lines + before, lines + stop, to + before);
    i = kLine;
  }
  for (; i + kLine <= end; i += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(lines + i));
  }
  if (i < end) std::copy(lines + i, lines + end, to + i);
  _mm_sfence();
}
#endif

template <typename T>
void store_values(const Tile& t, const RowView& out) {
#ifdef __AVX512F__
  if (streams<T>(t, out)) return stream_rows<T>(t, out);
#endif
  store_rows<T>(t, out);
}

void quant_row(const Tile& t, const RowView& codes, const RowView& scales) {
  alignas(64) float scale[kGroup], inverse[kGroup];
  for (int begin = 0; begin < t.rows; begin += kGroup) {
    const int count = std::min(kGroup, t.rows - begin);
    row_scales(t.row(begin), t.ld, count, t.width, scale, inverse);
    std::memcpy(static_cast<float*>(scales.data) + t.first + begin, scale, static_cast<size_t>(count) * sizeof(float));
    for (int i = 0; i < count; ++i) {
      const float* row = t.row(begin + i);
      const Floats factor = splat(inverse[i]);
      const auto value = [&](int64_t c, auto) { return load(row + c) * factor; };
      store_codes<Codes::bounded>(t.width, value, 0, row_of<int8_t>(codes, t.first + begin + i));
    }
  }
}

// Values that rint takes beyond +-127.
int64_t count_saturated(const float* row, const float* inverse, int64_t width) {
  const Floats limit = splat(127.5f);
  Ints total{};
  for_columns(width,
              [&](int64_t c, auto n) { total -= (absolute(keep(load(row + c) * load(inverse + c), n)) >= limit); });
  int64_t count = 0;
  for (int i = 0; i < kLanes; ++i) count += total[i];
  return count;
}

void quant_static(const Tile& t, const RowView& codes, const float* inverse, int64_t* saturated) {
  int64_t count = 0;
  for (int r = 0; r < t.rows; ++r) {
    const float* row = t.row(r);
    const auto value = [&](int64_t c, auto) { return load(row + c) * load(inverse + c); };
    store_codes<Codes::held>(t.width, value, 0, row_of<int8_t>(codes, t.first + r));
    if (saturated != nullptr) count += count_saturated(row, inverse, t.width);
  }
  if (count > 0) __atomic_fetch_add(saturated, count, __ATOMIC_RELAXED);
}

// The largest k in 0..7 with top * 2^k <= 127. The bits of a float that is not negative count powers of two from bit 23
// on; a NaN or an infinity gives 0.
GNNC_INLINE Ints shifts_of(Floats tops) {
  const Ints room = (splat(to_bits(127.0f)) - as_ints(tops)) >> 23;
  return room > 7 ? splat(7) : larger(room, Ints{});
}
GNNC_INLINE Floats powers_of(Ints shifts) { return as_floats((shifts + 127) << 23); }

void quant_pow2(const Tile& t, const RowView& codes, const RowView& shifts, const float* inverse) {
  alignas(64) float tops[kGroup], powers[kGroup];
  for (int begin = 0; begin < t.rows; begin += kGroup) {
    const int count = std::min(kGroup, t.rows - begin);
    Group group;
    for (int i = 0; i < count; ++i) {
      const float* row = t.row(begin + i);
      Ints top{};
      for_columns(t.width,
                  [&](int64_t c, auto n) { top = larger(top, magnitude(keep(load(row + c) * load(inverse + c), n))); });
      group.set(i, as_floats(top));
    }
    group.largest(tops);
    for (int i = 0; i < count; i += kLanes) {
      const Ints k = shifts_of(load(tops + i));
      store(powers + i, powers_of(k));
      auto* to = static_cast<uint8_t*>(shifts.data) + t.first + begin + i;
      for (int j = 0; j < std::min(kLanes, count - i); ++j) to[j] = static_cast<uint8_t>(k[j]);
    }
    for (int i = 0; i < count; ++i) {
      const float* row = t.row(begin + i);
      const Floats power = splat(powers[i]);
      const auto value = [&](int64_t c, auto) { return load(row + c) * load(inverse + c) * power; };
      store_codes<Codes::held>(t.width, value, 0, row_of<int8_t>(codes, t.first + begin + i));
    }
  }
}

// Threads race here, but a maximum does not depend on who comes first. Non-negative floats order like their bits.
void raise_to(float* out, int32_t bits) {
  auto* shared = reinterpret_cast<int32_t*>(out);
  int32_t now = __atomic_load_n(shared, __ATOMIC_RELAXED);
  while (now < bits && !__atomic_compare_exchange_n(shared, &now, bits, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

void amax(const Tile& t, const RowView& out) {
  auto* tops = static_cast<float*>(out.data);
  const bool single = out.rows * out.cols == 1;
  Ints all{};
  for_columns(t.width, [&](int64_t c, auto n) {
    Ints top{};
    for (int r = 0; r < t.rows; ++r) top = larger(top, magnitude(load(t.row(r) + c, n)));
    all = larger(all, top);
    if (single || !any(top > as_ints(load(tops + c, n)))) return;
    const int lanes = lanes_of(n);
    for (int i = 0; i < lanes; ++i) raise_to(tops + c + i, top[i]);
  });
  if (single) raise_to(tops, largest(all));
}

#ifdef __AVX512F__
// The dots of kGroup / H rows at a time, in registers. Rows past the last are that one again.
template <int H>
void dots_of_rows(const Tile& t, const float* att, float* out) {
  const int64_t depth = t.width / H;
  for (int r = 0; r < t.rows; r += kGroup / H) {
    const float* rows[kGroup / H];
    each<kGroup / H>([&](auto i) __attribute__((always_inline)) { rows[i] = t.row(std::min(r + i, t.rows - 1)); });
    Floats dots[kGroup] = {};
    for_columns(depth, [&](int64_t c, auto n) __attribute__((always_inline)) {
      each<kGroup>([&](auto i) __attribute__((always_inline)) {
        const int64_t at = i % H * depth + c;
        dots[i] = fused(load(rows[i / H] + at, n), load(att + at, n), dots[i]);
      });
    });
    const Floats sums = fold_all(dots, [](__m512 a, __m512 b) { return a + b; });
    store(out + r * H, sums, Tail{std::min((t.rows - r) * H, kGroup)});
  }
}
#endif

GNNC_INLINE Floats products(const float* a, const float* b, int64_t count) {
  Floats total{};
  for_columns(count, [&](int64_t c, auto n) { total = fused(load(a + c, n), load(b + c, n), total); });
  return total;
}

// Sums are combined for 16 pairs of row and head at once.
void row_dot(const Tile& t, const RowView& att, const RowView& out, int64_t heads) {
#ifdef __AVX512F__
  const auto whole = [&]<int H>() { dots_of_rows<H>(t, floats(att), row_of<float>(out, t.first)); };
  if (out.stride == heads && with_heads(heads, whole)) return;
#endif
  const int64_t depth = t.width / heads;
  Group group;
  alignas(64) float sums[kGroup];
  int64_t count = 0, from_row = 0, from_head = 0;
  const auto flush = [&] {
    float* first = row_of<float>(out, t.first + from_row) + from_head;
    if (out.stride == heads && count == kGroup) {
      group.sums(first);
    } else {
      group.sums(sums);
      int64_t r = from_row, h = from_head;
      for (int64_t i = 0; i < count; ++i) {
        row_of<float>(out, t.first + r)[h] = sums[i];
        if (++h == heads) h = 0, ++r;
      }
    }
    count = 0;
  };
  for (int r = 0; r < t.rows; ++r) {
    const float* row = t.row(r);
    for (int64_t h = 0; h < heads; ++h) {
      if (count == 0) from_row = r, from_head = h;
      group.set(count, products(row + h * depth, floats(att) + h * depth, depth));
      if (++count == kGroup) flush();
    }
  }
  if (count > 0) flush();
}

void apply_arithmetic(const Tile& t, const RowInstruction& in) {
  const auto operand = [&](int32_t i) -> const RowView& { return t.program.operands[i]; };
  const auto divide = [](Floats x, Floats v) { return x / v; };
  switch (in.op) {
    case RowOp::div_row:
      return map_rows(t, operand(in.a), divide);
    case RowOp::div_col:
      return map_columns(t, operand(in.a), divide);
    case RowOp::div_full:
      return map_full(t, operand(in.a), divide);
    case RowOp::rsub_full:
      return map_full(t, operand(in.a), [](Floats x, Floats v) { return v - x; });
    default:
      return add_codes(t, operand(in.a), operand(in.b));
  }
}

// Most of a program is a chain of cheap instructions. It runs on blocks of the tile that stay in registers, so that
// each instruction costs its arithmetic and not a pass over the tile.
#ifdef __AVX512F__
constexpr int kBlockVectors = 2;
#else
constexpr int kBlockVectors = 1;
#endif
constexpr int kBlockRows = 8;

bool chains(RowOp op) {
  switch (op) {
    case RowOp::mul_row:
    case RowOp::add_row:
    case RowOp::mul_col:
    case RowOp::add_col:
    case RowOp::mul_full:
    case RowOp::add_full:
    case RowOp::mul_const:
    case RowOp::add_const:
    case RowOp::mul_tensor:
    case RowOp::add_tensor:
    case RowOp::relu:
    case RowOp::leaky_relu:
    case RowOp::elu:
    case RowOp::batch_norm:
      return true;
    default:
      return false;
  }
}

// The lanes of vector v of a block whose last vector has n.
template <int kVectors>
GNNC_INLINE Whole lanes_at(int, Whole n) {
  return n;
}
template <int kVectors>
GNNC_INLINE Tail lanes_at(int v, Tail n) {
  return v + 1 < kVectors ? Tail{kLanes} : n;
}

template <int kRows, int kVectors>
struct Block {
  Floats x[kRows][kVectors];

  GNNC_INLINE void read(const float* at, int64_t ld) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[r][v] = load(at + r * ld + v * kLanes);
    }
  }
  GNNC_INLINE void write(float* at, int64_t ld) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(at + r * ld + v * kLanes, x[r][v]);
    }
  }
  template <typename Function>
  GNNC_INLINE void each(const Function& f) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[r][v] = f(x[r][v]);
    }
  }
  template <typename Function>
  GNNC_INLINE void rows(const float* value, const Function& f) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Floats k = splat(value[r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[r][v] = f(x[r][v], k);
    }
  }
  template <typename N, typename Function>
  GNNC_INLINE void columns(const float* value, N n, const Function& f) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Floats k = load(value + v * kLanes, lanes_at<kVectors>(v, n));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) x[r][v] = f(x[r][v], k);
    }
  }
  template <typename T, typename N, typename Function>
  GNNC_INLINE void elements(const T* value, int64_t stride, N n, const Function& f) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        x[r][v] = f(x[r][v], load(value + r * stride + v * kLanes, lanes_at<kVectors>(v, n)));
      }
    }
  }
};

template <int kRows, int kVectors, typename N>
GNNC_INLINE void step(Block<kRows, kVectors>& block, const Tile& t, const RowInstruction& in, int64_t r, int64_t c,
                      N n) {
  const auto add = [](Floats x, Floats v) { return x + v; };
  const auto multiply = [](Floats x, Floats v) { return x * v; };
  const auto values = [&] { return floats(t.program.operands[in.a]); };
  const auto constant = [&] { return splat(t.program.consts[in.b]); };
  const auto elements = [&](const auto& f) {
    const RowView& full = t.program.operands[in.a];
    if (full.type == Scalar::bf16) {
      block.elements(row_of<const Bf16>(full, t.first + r) + c, full.stride, n, f);
    } else {
      block.elements(row_of<const float>(full, t.first + r) + c, full.stride, n, f);
    }
  };
  switch (in.op) {
    case RowOp::mul_full:
      return elements(multiply);
    case RowOp::add_full:
      return elements(add);
    case RowOp::mul_row:
      return block.rows(values() + t.first + r, multiply);
    case RowOp::add_row:
      return block.rows(values() + t.first + r, add);
    case RowOp::mul_col:
      return block.columns(values() + c, n, multiply);
    case RowOp::add_col:
      return block.columns(values() + c, n, add);
    case RowOp::mul_const:
      return block.each([k = constant()](Floats x) { return x * k; });
    case RowOp::add_const:
      return block.each([k = constant()](Floats x) { return x + k; });
    case RowOp::mul_tensor:
      return block.each([k = splat(values()[0])](Floats x) { return x * k; });
    case RowOp::add_tensor:
      return block.each([k = splat(values()[0])](Floats x) { return x + k; });
    case RowOp::relu:
      return block.each([zero = splat(0.0f)](Floats x) { return larger(zero, x); });
    case RowOp::leaky_relu:
      return block.each([k = constant(), zero = splat(0.0f)](Floats x) { return x > zero ? x : x * k; });
    case RowOp::elu:
      return block.each([k = t.program.consts[in.b]](Floats x) { return elu(x, k); });
    default: {  // batch_norm
      const float* factor = t.program.prepared + in.c + c;
      block.columns(factor, Whole{}, multiply);
      return block.columns(factor + (t.width + 15) / 16 * 16, Whole{}, add);
    }
  }
}

template <int kRows, int kVectors, typename N>
GNNC_INLINE void chain_block(const Tile& t, const RowInstruction* code, int64_t count, int64_t r, int64_t c, N n) {
  Block<kRows, kVectors> block;
  float* at = t.row(r) + c;
  block.read(at, t.ld);
  for (int64_t i = 0; i < count; ++i) step(block, t, code[i], r, c, n);
  block.write(at, t.ld);
}

template <int kRows>
void chain_rows(const Tile& t, const RowInstruction* code, int64_t count, int64_t r) {
  constexpr int64_t kBlock = kBlockVectors * kLanes;
  int64_t c = 0;
  for (; c + kBlock <= t.width; c += kBlock) chain_block<kRows, kBlockVectors>(t, code, count, r, c, Whole{});
  for (; c + kLanes <= t.width; c += kLanes) chain_block<kRows, 1>(t, code, count, r, c, Whole{});
  if (c < t.width) chain_block<kRows, 1>(t, code, count, r, c, Tail{static_cast<int>(t.width - c)});
}

void apply_chain(const Tile& t, const RowInstruction* code, int64_t count) {
  int64_t r = 0;
  for (; r + kBlockRows <= t.rows; r += kBlockRows) chain_rows<kBlockRows>(t, code, count, r);
  for (; r < t.rows; ++r) chain_rows<1>(t, code, count, r);
}

#ifdef __AVX512F__
// Rows of up to four vectors go from a chain to their codes without leaving the registers, four rows at a time.
constexpr int kCodedRows = 4;

// The largest lane of each row, as signed integers, repeated over the vector.
GNNC_INLINE Floats largest_of_rows(const Floats (&rows)[kCodedRows]) {
  const auto combine = [](__m512 a, __m512 b)
                           __attribute__((always_inline)) { return as_floats(larger(as_ints(a), as_ints(b))); };
  __m512 tops = fold_all(rows, combine);
  tops = combine(tops, _mm512_shuffle_f32x4(tops, tops, 0x4e));
  return combine(tops, _mm512_shuffle_f32x4(tops, tops, 0xb1));
}

template <Codes kCodes, int kVectors>
GNNC_INLINE void store_block_codes(const Block<kCodedRows, kVectors>& block, Floats factors, int8_t* to,
                                   int64_t stride) {
  each<kCodedRows>([&](auto r) __attribute__((always_inline)) {
    const Floats factor = _mm512_permute_ps(factors, 0x55 * r);
    Floats v[4] = {};
    each<kVectors>([&](auto i) __attribute__((always_inline)) { v[i] = block.x[r][i] * factor; });
    _mm512_storeu_si512(to + r * stride, pack_codes<kCodes>(v[0], v[1], v[2], v[3]));
  });
}

// quant_row or quant_pow2 of the rows r .. r + kCodedRows; n lanes of the last vector count.
template <int kVectors>
GNNC_INLINE void quantize_block(Block<kCodedRows, kVectors>& block, const Tile& t, const RowInstruction& in, int64_t r,
                                Tail n) {
  const bool pow2 = in.op == RowOp::quant_pow2;
  if (pow2) block.columns(t.program.prepared + in.c, Whole{}, [](Floats x, Floats v) { return x * v; });
  Floats rows[kCodedRows];
  each<kCodedRows>([&](auto i) __attribute__((always_inline)) {
    Ints top{};
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      if (v + 1 == kVectors) block.x[i][v] = keep(block.x[i][v], n);
      top = larger(top, magnitude(block.x[i][v]));
    });
    rows[i] = as_floats(top);
  });
  const Floats tops = largest_of_rows(rows);
  const RowView &codes = t.program.outs[in.a], &scales = t.program.outs[in.b];
  auto* to = row_of<int8_t>(codes, t.first + r);
  if (pow2) {
    const Ints shifts = shifts_of(tops);
    _mm_storeu_si32(static_cast<uint8_t*>(scales.data) + t.first + r, _mm512_cvtepi32_epi8((__m512i)shifts));
    store_block_codes<Codes::held>(block, powers_of(shifts), to, codes.stride);
  } else {
    const Floats scale = scale_of(tops);
    _mm_storeu_ps(static_cast<float*>(scales.data) + t.first + r, _mm512_castps512_ps128(scale));
    store_block_codes<Codes::bounded>(block, inverse_of(scale), to, codes.stride);
  }
}

// The chain code[0 .. count) and the quantization code[count], for whole groups of kCodedRows rows.
template <int kVectors>
__attribute__((noinline)) void chain_to_codes(const Tile& t, const RowInstruction* code, int64_t count, bool again) {
  const Tail n{static_cast<int>(t.width) - (kVectors - 1) * kLanes};
  for (int64_t r = 0; r < t.rows; r += kCodedRows) {
    Block<kCodedRows, kVectors> block;
    block.read(t.row(r), t.ld);
    for (int64_t i = 0; i < count; ++i) step(block, t, code[i], r, 0, n);
    if (again) block.write(t.row(r), t.ld);
    quantize_block(block, t, code[count], r, n);
  }
}
#endif

// Comparisons are written so that a NaN stays one, as in torch.
void apply_activation(const Tile& t, const RowInstruction& in) {
  const bool has_constant = in.op == RowOp::clamp_min || in.op == RowOp::clamp_max;
  const float constant = has_constant ? t.program.consts[in.b] : 0.0f;
  const Floats k = splat(constant), one = splat(1.0f);
  switch (in.op) {
    case RowOp::sigmoid:
      return map_values(t, [](Floats x) { return sigmoid(x); });
    case RowOp::tanh:
      return map_values(t, [](Floats x) { return tanh(x); });
    case RowOp::gelu:
      return map_values(t, [](Floats x) { return gelu(x); });
    case RowOp::gelu_tanh:
      return map_values(t, [](Floats x) { return gelu_tanh(x); });
    case RowOp::silu:
      return map_values(t, [](Floats x) { return silu(x); });
    case RowOp::exp:
      return map_values(t, [](Floats x) { return exp(x); });
    case RowOp::neg:
      return map_values(t, [](Floats x) { return -x; });
    case RowOp::abs:
      return map_values(t, [](Floats x) { return absolute(x); });
    case RowOp::square:
      return map_values(t, [](Floats x) { return x * x; });
    case RowOp::sqrt:
      return map_values(t, [](Floats x) { return square_root(x); });
    case RowOp::recip:
      return map_values(t, [&](Floats x) { return one / x; });
    case RowOp::clamp_min:
      return map_values(t, [&](Floats x) { return larger(k, x); });
    case RowOp::clamp_max:
      return map_values(t, [&](Floats x) { return smaller(k, x); });
    case RowOp::log:
      return map_values(t, [](Floats x) { return log(x); });
    case RowOp::softplus:
      return map_values(t, [](Floats x) { return softplus(x); });
    default:
      return map_values(t, [&](Floats x) { return one / square_root(x); });
  }
}

void apply_row_wise(Tile& t, float* acc, const RowInstruction& in) {
  const RowProgram& p = t.program;
  switch (in.op) {
    case RowOp::window:
      t.acc = acc + in.a;
      t.width = in.b;
      return;
    case RowOp::layer_norm:
      return layer_norm(t, p.operands[in.a], p.operands[in.a + 1], p.consts[in.b]);
    case RowOp::l2_normalize:
      return l2_normalize(t, p.consts[in.b]);
    case RowOp::softmax:
      return softmax(t, false);
    case RowOp::log_softmax:
      return softmax(t, true);
    default:
      return head_mean(t, in.b);
  }
}

void apply_store(const Tile& t, const RowInstruction& in) {
  const RowProgram& p = t.program;
  const auto out = [&](int32_t i) -> const RowView& { return p.outs[i]; };
  switch (in.op) {
    case RowOp::store_f32:
      return store_values<float>(t, out(in.a));
    case RowOp::store_bf16:
      return store_values<Bf16>(t, out(in.a));
    case RowOp::quant_row:
      return quant_row(t, out(in.a), out(in.b));
    case RowOp::quant_static: {
      auto* count = in.c < 0 ? nullptr : static_cast<int64_t*>(out(in.c).data);
      return quant_static(t, out(in.a), p.prepared + in.b, count);
    }
    case RowOp::quant_pow2:
      return quant_pow2(t, out(in.a), out(in.b), p.prepared + in.c);
    case RowOp::amax:
      return amax(t, out(in.a));
    default:
      return row_dot(t, p.operands[in.a], out(in.b), in.c);
  }
}

#ifdef __AVX512F__
bool quantizes_in_registers(const Tile& t, int64_t at) {
  if (at == t.program.length || t.width == 0 || t.width > 4 * kLanes) return false;
  return t.program.code[at].op == RowOp::quant_row || t.program.code[at].op == RowOp::quant_pow2;
}

// A chain and the quantization behind it. The tile keeps its values if they are read again.
void apply_chain_and_quantize(const Tile& t, const RowInstruction* code, int64_t count, bool again) {
  const int rows = t.rows / kCodedRows * kCodedRows;
  const Tile whole{t.program, t.acc, t.ld, t.first, rows, t.width};
  const Tile rest{t.program, t.row(rows), t.ld, t.first + rows, t.rows - rows, t.width};
  switch ((t.width + kLanes - 1) / kLanes) {
    case 4:
      chain_to_codes<4>(whole, code, count, again);
      break;
    case 3:
      chain_to_codes<3>(whole, code, count, again);
      break;
    case 2:
      chain_to_codes<2>(whole, code, count, again);
      break;
    default:
      chain_to_codes<1>(whole, code, count, again);
  }
  if (rest.rows == 0) return;
  apply_chain(rest, code, count);
  apply_store(rest, code[count]);
}
#endif

bool reads_matrix(RowOp op) {
  return op == RowOp::mul_full || op == RowOp::add_full || op == RowOp::div_full || op == RowOp::rsub_full ||
         op == RowOp::add_qrow;
}

int64_t bytes_of(Scalar type) { return type == Scalar::f32 ? 4 : type == Scalar::bf16 ? 2 : 1; }

}  // namespace

void fetch(const RowProgram& program, int64_t r0, int rows) {
  for (int64_t i = 0; i < program.length; ++i) {
    if (!reads_matrix(program.code[i].op)) continue;
    const RowView& v = program.operands[program.code[i].a];
    const char* row = static_cast<const char*>(v.data) + r0 * v.stride * bytes_of(v.type);
    for (int64_t b = 0; b < rows * v.stride * bytes_of(v.type); b += 64) __builtin_prefetch(row + b);
  }
}

void run(const RowProgram& program, float* acc, int64_t ld, int64_t r0, int rows, int64_t width) {
  Tile tile{program, acc, ld, r0, rows, width};
  for (int64_t i = 0; i < program.length; ++i) {
    const RowInstruction& in = program.code[i];
    int64_t chain = 0;
    while (i + chain < program.length && chains(program.code[i + chain].op)) ++chain;
#ifdef __AVX512F__
    if (quantizes_in_registers(tile, i + chain)) {
      apply_chain_and_quantize(tile, &in, chain, i + chain + 1 < program.length);
      i += chain;
      continue;
    }
#endif
    if (chain > 0) {
      apply_chain(tile, &in, chain);
      i += chain - 1;
    } else if (in.op >= RowOp::store_f32) {
      apply_store(tile, in);
    } else if (in.op >= RowOp::batch_norm) {
      apply_row_wise(tile, acc, in);
    } else if (in.op >= RowOp::relu) {
      apply_activation(tile, in);
    } else {
      apply_arithmetic(tile, in);
    }
  }
}

}  // namespace gnnc::GNNC_ISA
