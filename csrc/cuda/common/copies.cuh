#pragma once

// Copies from global to shared memory that nobody waits for until wait_for_copies.

#include "common/types.cuh"

namespace gnnc {

// Starts to copy 16 bytes, past L1 or through it.
template <bool kThroughL1 = false, class T>
__device__ inline void start_copy(T* to, const T* from) {
  static_assert(sizeof(T) == 16, "a record is 16 bytes");
  const auto where = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kThroughL1) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(where), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(where), "l"(from) : "memory");
  }
}

// Starts to copy a word, through L1, as words are.
template <class T>
__device__ inline void start_copy_word(T* to, const T* from) {
  static_assert(sizeof(T) == 4, "words");
  const auto where = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(where), "l"(from) : "memory");
}

// Starts to copy 16 bytes, or to write 16 bytes of zeros.
template <class T>
__device__ inline void start_copy_if(bool there, T* to, const T* from) {
  static_assert(sizeof(T) == 16, "a record is 16 bytes");
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(there ? 16 : 0)
      : "memory");
}

// Starts to copy four floats that lie on 16 bytes, or all `count` that there are, through L1. (A copy of 16 bytes with
// a size that is less reads no more than that, but compute-sanitizer says it does.)
__device__ inline void start_copy_floats(int64_t count, float* to, const float* from) {
  if (count >= 4) return start_copy<true>(reinterpret_cast<int4*>(to), reinterpret_cast<const int4*>(from));
#pragma unroll 1
  for (int i = 0; i < count; ++i) start_copy_word(to + i, from + i);
}

// Waits for all that this thread has started.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace gnnc
