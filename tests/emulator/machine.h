// Runs translated kernels (ptx.py) on the CPU, each thread of a grid as a fiber.
//
// Threads run one at a time, each until it waits for others; who is next, and where a thread is interrupted between two
// accesses of memory, is drawn at random from a seed. Copies that nobody has waited for happen as late as they may, and
// memory of a block is garbage when it begins. So a wait that is missing shows up as a wrong result in some order of
// events. Memory that is no tensor's, no block's and no thread's is not to be had. What this machine does not have:
// caches, and stores that others see out of order.

#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace machine {

constexpr int kWarp = 32;

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

// Bits of registers.

template <size_t kBytes>
using Bits =
    std::conditional_t<kBytes == 1, uint8_t,
                       std::conditional_t<kBytes == 2, uint16_t, std::conditional_t<kBytes == 4, uint32_t, uint64_t>>>;

// The low bits of a register as a T.
template <class T, class R>
inline T as(R from) {
  static_assert(sizeof(T) <= sizeof(R), "a register has the bits of its operand");
  if constexpr (std::is_same_v<T, bool> || std::is_same_v<R, bool>) {
    return static_cast<T>(from);
  } else {
    Bits<sizeof(R)> all;
    std::memcpy(&all, &from, sizeof(all));
    const auto low = static_cast<Bits<sizeof(T)>>(all);
    T to;
    std::memcpy(&to, &low, sizeof(to));
    return to;
  }
}

// Writes a register: what is narrower is extended, by its sign where it has one.
template <class R, class T>
inline void put(R& to, T value) {
  if constexpr (sizeof(R) == sizeof(T)) {
    to = as<R>(value);
  } else {
    static_assert(sizeof(T) < sizeof(R) && std::is_integral_v<R>, "a register has room for its value");
    to = static_cast<R>(value);
  }
}

// Floats of 16 bits.

struct half_t {
  uint16_t bits;
};
struct bfloat_t {
  uint16_t bits;
};

inline float wide(bfloat_t v) { return as<float>(static_cast<uint32_t>(v.bits) << 16); }
inline float wide(half_t v) {
  const uint32_t sign = (v.bits & 0x8000u) << 16, rest = v.bits & 0x7fffu;
  if (rest >= 0x7c00u) return as<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  return std::copysign(std::ldexp(as<float>(rest << 13), 112), as<float>(sign | 0x3f800000u));
}

template <class T>
inline T narrow(float v);
template <>
inline bfloat_t narrow<bfloat_t>(float v) {
  const auto bits = as<uint32_t>(v);
  if (std::isnan(v)) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}
template <>
inline half_t narrow<half_t>(float v) {
  const auto sign = static_cast<uint16_t>(as<uint32_t>(v) >> 16 & 0x8000u);
  const float size = std::fabs(v);
  if (std::isnan(v)) return {0x7fff};
  if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00u)};
  // Of what a half is a multiple here: 2^-24 at least.
  const int exponent = std::max(size > 0 ? std::ilogb(size) : -100, -14) - 10;
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, -exponent)));
  return {static_cast<uint16_t>(sign | (units + (static_cast<uint32_t>(exponent + 24) << 10)))};
}

// Floats of 8 bits. kFractions: bits of the fraction; kBias: of the exponent.

template <int kFractions, int kBias>
struct byte_float {
  uint8_t bits;
};
using e4m3_t = byte_float<3, 7>;
using e5m2_t = byte_float<2, 15>;

template <int kFractions, int kBias>
inline float wide(byte_float<kFractions, kBias> v) {
  const int exponent = (v.bits & 0x7f) >> kFractions, fraction = v.bits & ((1 << kFractions) - 1);
  const float sign = v.bits & 0x80 ? -1.0f : 1.0f;
  if ((v.bits & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  if (kFractions == 2 && exponent == 31) {
    return fraction ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  const int whole = exponent ? fraction + (1 << kFractions) : fraction;
  return sign * std::ldexp(static_cast<float>(whole), std::max(exponent, 1) - kBias - kFractions);
}

// The nearest, half to even; beyond the largest number that number (satfinite).
template <class T>
inline T nearest_byte(float v, float largest, int fractions, int bias) {
  const auto sign = static_cast<uint8_t>(as<uint32_t>(v) >> 24 & 0x80u);
  if (std::isnan(v)) return {0x7f};
  const float size = std::min(std::fabs(v), largest);
  // The unit that every float is a multiple of here.
  const int exponent = std::max(size > 0 ? std::ilogb(size) : -100, 1 - bias) - fractions;
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(size, -exponent)));
  return {static_cast<uint8_t>(sign | (units + ((exponent + fractions + bias - 1) << fractions)))};
}
template <>
inline e4m3_t narrow<e4m3_t>(float v) {
  return nearest_byte<e4m3_t>(v, 448.0f, 3, 7);
}
template <>
inline e5m2_t narrow<e5m2_t>(float v) {
  return nearest_byte<e5m2_t>(v, 57344.0f, 2, 15);
}

// Arithmetic that C++ has no name for.

// The same by another rule of rounding.
template <class F>
[[gnu::noinline]] float rounded(int rule, const F& f) {
  const int before = std::fegetround();
  std::fesetround(rule);
  const float result = f();
  std::fesetround(before);
  return result;
}

inline float sum_toward_zero(volatile float a, volatile float b) {
  return rounded(FE_TOWARDZERO, [&] {
    const volatile float sum = a + b;
    return sum;
  });
}
inline float product_toward_zero(volatile float a, volatile float b) {
  return rounded(FE_TOWARDZERO, [&] {
    const volatile float product = a * b;
    return product;
  });
}
inline float fused_downward(volatile float a, volatile float b, volatile float c) {
  return rounded(FE_DOWNWARD, [&] {
    const volatile float sum = std::fma(a, b, c);
    return sum;
  });
}

template <class T>
inline T high_product(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>(static_cast<Wide>(a) * b >> 64);
  } else {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return static_cast<T>(static_cast<Wide>(a) * b >> 32);
  }
}

template <class T>
inline T divided(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    if (b == 0) fail("an integer is divided by 0");
  }
  return a / b;
}

template <class T>
inline T shifted_right(T v, uint32_t by) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  return by < kBits ? static_cast<T>(v >> by) : static_cast<T>(v < 0 ? -1 : 0);
}
template <class T>
inline T shifted_left(T v, uint32_t by) {
  return by < 8 * sizeof(T) ? static_cast<T>(v << by) : T{0};
}

// The smaller or larger: a number where the other is NaN, or NaN where one is.
template <class T>
inline T smaller(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return std::signbit(a) == std::signbit(b) || a != b ? std::fmin(a, b) : -0.0f;
  else
    return std::min(a, b);
}
template <class T>
inline T larger(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return std::signbit(a) == std::signbit(b) || a != b ? std::fmax(a, b) : 0.0f;
  else
    return std::max(a, b);
}
inline float smaller_or_nan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? as<float>(0x7fffffffu) : smaller(a, b);
}
inline float larger_or_nan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? as<float>(0x7fffffffu) : larger(a, b);
}

// Without the smallest numbers.
inline float flushed(float v) { return std::fpclassify(v) == FP_SUBNORMAL ? std::copysign(0.0f, v) : v; }

// A float as an integer, rounded by the current rule before, and clamped; NaN is 0.
template <class To, class From>
inline To clamped(From v) {
  if (std::isnan(v)) return 0;
  constexpr To kLeast = std::numeric_limits<To>::min(), kMost = std::numeric_limits<To>::max();
  if (static_cast<long double>(v) <= static_cast<long double>(kLeast)) return kLeast;
  if (static_cast<long double>(v) >= static_cast<long double>(kMost)) return kMost;
  return static_cast<To>(v);
}
template <class To, class From>
inline To saturated(From v) {
  const __int128 least = std::numeric_limits<To>::min(), most = std::numeric_limits<To>::max(), all = v;
  return static_cast<To>(all < least ? least : all > most ? most : all);
}

inline uint32_t permuted_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> (4 * i) & 15;
    auto byte = static_cast<uint32_t>(both >> (8 * (which & 7)) & 255);
    if (which & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

template <class T>
inline T inserted_bits(T a, T b, uint32_t place, uint32_t count) {
  const T mask = (count >= 8 * sizeof(T) ? ~T{0} : (T{1} << count) - 1) << place;
  return (b & ~mask) | (a << place & mask);
}
template <class T>
inline uint32_t leading_zeros(T v) {
  static_assert(std::is_unsigned_v<T>, "bits");
  return v == 0 ? 8 * sizeof(T) : static_cast<uint32_t>(__builtin_clzll(v)) - (64 - 8 * sizeof(T));
}

inline uint32_t packed(uint16_t low, uint16_t high) { return static_cast<uint32_t>(high) << 16 | low; }

inline uint32_t reversed_bits(uint32_t v) {
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i) result |= (v >> i & 1) << (31 - i);
  return result;
}

// A[i] * B[first + i] over the halves of a and two bytes of b; over four bytes.
template <class A, class B>
inline int32_t dot_two(uint32_t a, uint32_t b, int32_t c, int first) {
  using Half = std::conditional_t<std::is_signed_v<A>, int16_t, uint16_t>;
  using Byte = std::conditional_t<std::is_signed_v<B>, int8_t, uint8_t>;
  for (int i = 0; i < 2; ++i) {
    c += static_cast<int32_t>(static_cast<Half>(a >> (16 * i))) * static_cast<Byte>(b >> (8 * (first + i)));
  }
  return c;
}
template <class A, class B>
inline int32_t dot_four(uint32_t a, uint32_t b, int32_t c) {
  using ByteA = std::conditional_t<std::is_signed_v<A>, int8_t, uint8_t>;
  using ByteB = std::conditional_t<std::is_signed_v<B>, int8_t, uint8_t>;
  for (int i = 0; i < 4; ++i) {
    c += static_cast<int32_t>(static_cast<ByteA>(a >> (8 * i))) * static_cast<ByteB>(b >> (8 * i));
  }
  return c;
}

// Threads.

struct Thread;
struct Block;
struct Grid;
using Kernel = void (*)(Thread&, const char*);

struct Warp {
  Thread* thread[kWarp] = {};
  uint32_t waiting = 0;  // threads at a statement of several
  uint32_t exited = 0;
};

struct Copy {
  char* to;
  const char* from;
  int size, read;
  int group;  // number of groups of its thread that had ended before it
};

struct Thread {
  jmp_buf context;
  Block* block;
  Warp* warp;
  int index;
  bool started = false, done = false;
  char* stack;
  std::vector<Copy> copies;
  int groups = 0;  // groups of copies that have ended
  int left = 0;    // accesses of memory before it is interrupted
  // What it waits at.
  uint32_t members = 0;
  const void* in = nullptr;
  void* out = nullptr;
  void (*finish)(Warp&, uint32_t) = nullptr;

  int lane() const { return index % kWarp; }
};

struct Block {
  Grid* grid;
  int index;
  std::vector<char> memory;  // shared
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  int alive, at_barrier = 0;

  char* shared() { return memory.data(); }
};

// Memory that kernels may access.
struct Range {
  uint64_t from, past;

  bool has(uint64_t at, size_t size) const { return at >= from && at + size <= past; }
};

// Of how many bytes a thread's own memory is; what is not touched costs nothing.
constexpr size_t kStack = 256 * 1024;

struct Grid {
  Kernel kernel;
  const char* parameters;
  int blocks, threads;
  const Range* tensors;  // in order
  int tensor_count;
  uint64_t seed;
  const Range* last = nullptr;  // that was accessed
  std::vector<Thread*> ready;
  jmp_buf scheduler;
  Thread* current = nullptr;
  std::string error;

  uint64_t random() {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
  }
};

inline Grid*& running() {
  static Grid* grid = nullptr;
  return grid;
}

// Leaves a thread until somebody makes it ready.
inline void leave(Thread& t) {
  if (_setjmp(t.context) == 0) _longjmp(t.block->grid->scheduler, 1);
}

inline void wake(Thread& t) { t.block->grid->ready.push_back(&t); }

// Before every access of memory.
inline void access(Thread& t) {
  if (--t.left > 0) return;
  Grid& grid = *t.block->grid;
  t.left = 1 + static_cast<int>(grid.random() % 2000);
  wake(t);
  leave(t);
}

// Lets those go on who have all come to one statement.
inline void try_finish(Warp& warp, uint32_t members) {
  const uint32_t wanted = members & ~warp.exited;
  if (wanted == 0 || (warp.waiting & wanted) != wanted) return;
  Thread* first = nullptr;
  for (int i = 0; i < kWarp; ++i) {
    if (!(wanted >> i & 1)) continue;
    Thread& t = *warp.thread[i];
    if (first == nullptr) first = &t;
    if (t.finish != first->finish || t.members != first->members) return;
  }
  first->finish(warp, wanted);
  warp.waiting &= ~wanted;
  for (int i = 0; i < kWarp; ++i) {
    if (wanted >> i & 1) wake(*warp.thread[i]);
  }
}

// A statement of several threads of a warp: Op::run(in, out, members), of lanes.
template <class Op>
inline typename Op::Out together(Thread& t, uint32_t members, const typename Op::In& in) {
  if (!(members >> t.lane() & 1)) fail("a thread is no member of the group that it waits for");
  typename Op::Out out{};
  t.members = members, t.in = &in, t.out = &out;
  t.finish = [](Warp& warp, uint32_t those) {
    const typename Op::In* ins[kWarp] = {};
    typename Op::Out* outs[kWarp] = {};
    for (int i = 0; i < kWarp; ++i) {
      if (!(those >> i & 1)) continue;
      ins[i] = static_cast<const typename Op::In*>(warp.thread[i]->in);
      outs[i] = static_cast<typename Op::Out*>(warp.thread[i]->out);
    }
    Op::run(ins, outs, those);
  };
  t.warp->waiting |= 1u << t.lane();
  try_finish(*t.warp, members);
  leave(t);
  return out;
}

struct Nothing {};

struct SyncWarp {
  using In = Nothing;
  using Out = Nothing;
  static void run(const In* const*, Out* const*, uint32_t) {}
};

enum class Shuffle { idx, up, down, bfly };

template <Shuffle kMode>
struct Shfl {
  struct In {
    uint32_t value, b, c;
  };
  struct Out {
    uint32_t value;
    bool there;
  };
  static void run(const In* const* in, Out* const* out, uint32_t members) {
    for (int lane = 0; lane < kWarp; ++lane) {
      if (!(members >> lane & 1)) continue;
      const int by = static_cast<int>(in[lane]->b & 31), segment = static_cast<int>(in[lane]->c >> 8 & 31);
      const int clamp = static_cast<int>(in[lane]->c & 31);
      const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
      int from = 0;
      bool there = false;
      if (kMode == Shuffle::up) from = lane - by, there = from >= most;
      if (kMode == Shuffle::down) from = lane + by, there = from <= most;
      if (kMode == Shuffle::bfly) from = lane ^ by, there = from <= most;
      if (kMode == Shuffle::idx) from = least | (by & ~segment), there = from <= most;
      if (!there) from = lane;
      if (!(members >> from & 1)) fail("a thread reads a register of one that does not take part");
      *out[lane] = {in[from]->value, there};
    }
  }
};

enum class Vote { all, any, uni, ballot };

template <Vote kVote>
struct Voting {
  using In = bool;
  using Out = uint32_t;
  static void run(const In* const* in, Out* const* out, uint32_t members) {
    uint32_t those = 0;
    for (int i = 0; i < kWarp; ++i) those |= (members >> i & 1) && *in[i] ? 1u << i : 0u;
    uint32_t result = those;
    if (kVote == Vote::all) result = those == members;
    if (kVote == Vote::any) result = those != 0;
    if (kVote == Vote::uni) result = those == members || those == 0;
    for (int i = 0; i < kWarp; ++i) {
      if (members >> i & 1) *out[i] = result;
    }
  }
};

enum class Fold { add, min, max, bits_and, bits_or, bits_xor };

template <Fold kFold, class T>
struct Redux {
  using In = T;
  using Out = T;
  static void run(const In* const* in, Out* const* out, uint32_t members) {
    bool is_first = true;
    T result{};
    for (int i = 0; i < kWarp; ++i) {
      if (!(members >> i & 1)) continue;
      result = is_first ? *in[i] : joined(result, *in[i]);
      is_first = false;
    }
    for (int i = 0; i < kWarp; ++i) {
      if (members >> i & 1) *out[i] = result;
    }
  }
  static T joined(T a, T b) {
    if (kFold == Fold::add) return a + b;
    if (kFold == Fold::min) return std::min(a, b);
    if (kFold == Fold::max) return std::max(a, b);
    if (kFold == Fold::bits_and) return a & b;
    if (kFold == Fold::bits_or) return a | b;
    return a ^ b;
  }
};

struct MatchAny {
  using In = uint64_t;
  using Out = uint32_t;
  static void run(const In* const* in, Out* const* out, uint32_t members) {
    for (int i = 0; i < kWarp; ++i) {
      if (!(members >> i & 1)) continue;
      *out[i] = 0;
      for (int j = 0; j < kWarp; ++j) *out[i] |= (members >> j & 1) && *in[j] == *in[i] ? 1u << j : 0u;
    }
  }
};

inline float number(int8_t v) { return v; }
inline float number(half_t v) { return wide(v); }
inline float number(bfloat_t v) { return wide(v); }
inline float number(e4m3_t v) { return wide(v); }
inline float number(e5m2_t v) { return wide(v); }

// FP32 of which a product of matrices reads the upper 19 bits.
struct tf32_t {
  uint32_t bits;
};
inline uint32_t nearest_tf32(float v) {
  const auto bits = as<uint32_t>(v);
  return std::isfinite(v) ? (bits + 0x1000u) & 0xffffe000u : bits;
}
inline float number(tf32_t v) { return as<float>(v.bits & 0xffffe000u); }

// D = A B + C of 16 x kDepth and kDepth x 8, A of T and B of Other; registers as PTX lays them out: those of A are
// pairs of eight rows.
template <class T, class Sum, int kDepth, class Other>
struct Mma {
  static_assert(sizeof(T) == sizeof(Other), "both matrices have one layout");
  static constexpr int kEach = 4 / static_cast<int>(sizeof(T)), kTimes = kDepth / (4 * kEach);
  struct In {
    uint32_t a[2 * kTimes], b[kTimes];
    Sum c[4];
  };
  struct Out {
    Sum d[4];
  };
  template <class Of>
  static Of part(uint32_t word, int i) {
    return as<Of>(word >> (8 * static_cast<int>(sizeof(Of)) * i));
  }
  static void run(const In* const* in, Out* const* out, uint32_t members) {
    if (members != ~0u) fail("a product of matrices is a statement of the whole warp");
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int which = 0; which < 4; ++which) {
        const int row = lane / 4, column = lane % 4 * 2 + which % 2;
        using Exact = std::conditional_t<std::is_integral_v<Sum>, int64_t, double>;
        Exact sum = in[lane]->c[which];
        for (int times = 0; times < kTimes; ++times) {
          for (int k = 0; k < 4 * kEach; ++k) {
            const T a = part<T>(in[row * 4 + k / kEach]->a[2 * times + which / 2], k % kEach);
            const auto b = part<Other>(in[column * 4 + k / kEach]->b[times], k % kEach);
            sum += static_cast<Exact>(number(a)) * static_cast<Exact>(number(b));
          }
        }
        out[lane]->d[which] = static_cast<Sum>(sum);
      }
    }
  }
};

template <int kCount, bool kTransposed>
struct LoadMatrix {
  using In = const char*;
  struct Out {
    uint32_t word[kCount];
  };
  static void run(const In* const* in, Out* const* out, uint32_t) {
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < kCount; ++i) {
        auto* const word = reinterpret_cast<char*>(&out[lane]->word[i]);
        for (int half = 0; half < 2; ++half) {
          const int row = kTransposed ? lane % 4 * 2 + half : lane / 4;
          const int column = kTransposed ? lane / 4 : lane % 4 * 2 + half;
          std::memcpy(word + 2 * half, *in[i * 8 + row] + column * 2, 2);
        }
      }
    }
  }
};

inline void try_release(Block& block) {
  if (block.alive == 0 || block.at_barrier < block.alive) return;
  block.at_barrier = 0;
  for (Thread& t : block.threads) {
    if (!t.done) wake(t);
  }
}

inline void barrier(Thread& t) {
  ++t.block->at_barrier;
  try_release(*t.block);
  leave(t);
}

// Memory.

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T v[kCount];
};

inline void check(Thread& t, const char* where, size_t size) {
  const auto at = reinterpret_cast<uint64_t>(where);
  if (at % size != 0) fail("an access of memory is not aligned");
  Grid& grid = *t.block->grid;
  if (grid.last != nullptr && grid.last->has(at, size)) return;
  const auto shared = reinterpret_cast<uint64_t>(t.block->shared()), own = reinterpret_cast<uint64_t>(t.stack);
  if (Range{shared, shared + t.block->memory.size()}.has(at, size) || Range{own, own + kStack}.has(at, size)) return;
  const Range* end = grid.tensors + grid.tensor_count;
  const Range* next = std::upper_bound(grid.tensors, end, at, [](uint64_t a, const Range& r) { return a < r.from; });
  if (next == grid.tensors || !next[-1].has(at, size)) fail("memory is accessed that is no tensor's");
  grid.last = next - 1;
}

// A parameter, or a variable of the module.
template <class T>
inline T load_known(const char* from) {
  T v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

template <class T>
inline T load(Thread& t, const char* from) {
  access(t);
  check(t, from, sizeof(T));
  T v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
template <class T>
inline void store(Thread& t, char* to, T v) {
  access(t);
  check(t, to, sizeof(T));
  std::memcpy(to, &v, sizeof(v));
}

// Replaces a word by f of it; its value before.
template <class T, class F>
inline T replaced(Thread& t, char* at, const F& f) {
  const T before = load<T>(t, at);
  const T after = f(before);
  std::memcpy(at, &after, sizeof(after));
  return before;
}

inline void make(const Copy& copy) {
  std::memset(copy.to, 0, static_cast<size_t>(copy.size));
  if (copy.read > 0) std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.read));
}
inline void start_copy(Thread& t, char* to, const char* from, int size, int read) {
  access(t);
  check(t, to, static_cast<size_t>(size));
  if (read > 0) check(t, from, static_cast<size_t>(read));
  t.copies.push_back({to, from, size, std::min(read, size), t.groups});
  if (t.block->grid->random() % 4 == 0) {  // or it is made while nobody waits for it
    make(t.copies.back());
    t.copies.pop_back();
  }
}
inline void wait_for_copies(Thread& t) {
  for (const Copy& copy : t.copies) make(copy);
  t.copies.clear();
}
// Waits for all groups that have ended, but the last `but`.
inline void wait_for_groups(Thread& t, int but) {
  const auto late = std::stable_partition(t.copies.begin(), t.copies.end(),
                                          [&](const Copy& copy) { return copy.group < t.groups - but; });
  std::for_each(t.copies.begin(), late, make);
  t.copies.erase(t.copies.begin(), late);
}

// A launch.

inline void finish(Thread& t) {
  wait_for_copies(t);
  t.done = true;
  t.warp->exited |= 1u << t.lane();
  --t.block->alive;
  for (Thread* other : t.warp->thread) {
    if (other != nullptr && (t.warp->waiting >> other->lane() & 1)) try_finish(*t.warp, other->members);
  }
  try_release(*t.block);
}

inline void run_current() {
  Grid& grid = *running();
  Thread& t = *grid.current;
  try {
    grid.kernel(t, grid.parameters);
    finish(t);
  } catch (const std::exception& error) {
    grid.error = error.what();
  }
  _longjmp(grid.scheduler, 1);
}

inline void start(Grid& grid, Thread& t) {
  t.started = true;
  ucontext_t here, there;
  getcontext(&there);
  there.uc_stack.ss_sp = t.stack;
  there.uc_stack.ss_size = kStack;
  there.uc_link = nullptr;
  makecontext(&there, run_current, 0);
  swapcontext(&here, &there);
}

inline std::unique_ptr<Block> make_block(Grid& grid, int index, size_t shared, char* stacks) {
  auto block = std::make_unique<Block>();
  block->grid = &grid, block->index = index, block->alive = grid.threads;
  block->memory.resize(shared);
  for (size_t i = 0; i < block->memory.size(); ++i) block->memory[i] = static_cast<char>(i % 4 == 3 ? 0x7f : 0xc5);
  block->threads.resize(static_cast<size_t>(grid.threads));
  block->warps.resize(static_cast<size_t>((grid.threads + kWarp - 1) / kWarp));
  for (int i = 0; i < grid.threads; ++i) {
    Thread& t = block->threads[static_cast<size_t>(i)];
    t.block = block.get(), t.index = i, t.warp = &block->warps[static_cast<size_t>(i / kWarp)];
    t.warp->thread[i % kWarp] = &t;
    t.stack = stacks + static_cast<size_t>(i) * kStack;
    t.left = 1 + static_cast<int>(grid.random() % 2000);
    grid.ready.push_back(&t);
  }
  for (Warp& warp : block->warps) {
    for (int i = 0; i < kWarp; ++i) warp.exited |= warp.thread[i] == nullptr ? 1u << i : 0u;
  }
  return block;
}

// Runs a grid, some blocks at a time; returns what went wrong, or nothing.
inline std::string launch(Kernel kernel, const char* parameters, int blocks, int threads, size_t shared, uint64_t seed,
                          const Range* tensors, int tensor_count) {
  constexpr int kBeside = 8;
  Grid grid{kernel, parameters, blocks, threads, tensors, tensor_count};
  grid.seed = seed * 2654435761u + 88172645463325252u;
  const size_t bytes = static_cast<size_t>(std::min(blocks, kBeside)) * threads * kStack;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return "there is no memory for the stacks of threads";
  running() = &grid;
  std::unique_ptr<Block> place[kBeside];
  volatile int next = 0;
  bool some = true;
  while (some && grid.error.empty()) {
    some = false;
    for (int i = 0; i < kBeside; ++i) {
      if (place[i] && place[i]->alive == 0) place[i].reset();
      if (!place[i] && next < blocks) {
        char* stacks = static_cast<char*>(memory) + static_cast<size_t>(i) * threads * kStack;
        place[i] = make_block(grid, next, shared, stacks);
        next = next + 1;
      }
      some = some || place[i];
    }
    while (!grid.ready.empty() && grid.error.empty()) {
      const size_t which = grid.random() % grid.ready.size();
      grid.current = grid.ready[which];
      grid.ready[which] = grid.ready.back();
      grid.ready.pop_back();
      Block& block = *grid.current->block;
      if (_setjmp(grid.scheduler) == 0) {
        if (grid.current->started) _longjmp(grid.current->context, 1);
        start(grid, *grid.current);
      }
      if (block.alive == 0 && next < blocks) break;
    }
    if (grid.ready.empty() && grid.error.empty()) {
      for (const auto& block : place) {
        if (block && block->alive > 0) grid.error = "threads wait for threads that do not come";
      }
    }
  }
  munmap(memory, bytes);
  running() = nullptr;
  return grid.error;
}

}  // namespace machine
