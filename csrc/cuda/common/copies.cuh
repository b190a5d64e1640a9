#pragma once

// Asynchronous copies (cp.async) from global to shared memory, which complete at wait_for_copies.

#include "common/types.cuh"

namespace gnnc {

// Starts the copy of 16 bytes, bypassing L1 or through L1.
template <bool kThroughL1 = false, class T>
__device__ inline void start_copy(T* to, const T* from) {
  static_assert(sizeof(T) == 16, "the copy is 16 bytes");
  const auto where = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kThroughL1) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(where), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(where), "l"(from) : "memory");
  }
}

// Starts the copy of a 4-byte word; cp.async copies words through L1 only.
template <class T>
__device__ inline void start_copy_word(T* to, const T* from) {
  static_assert(sizeof(T) == 4, "the copy is a 4-byte word");
  const auto where = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(where), "l"(from) : "memory");
}

// Starts the copy of 16 bytes if `there`, and otherwise writes 16 bytes of zeros.
template <class T>
__device__ inline void start_copy_if(bool there, T* to, const T* from) {
  static_assert(sizeof(T) == 16, "the copy is 16 bytes");
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(there ? 16 : 0)
      : "memory");
}

// Starts the copy of four floats on 16 bytes, or of the `count` floats that exist if fewer, through L1. (A 16-byte
// cp.async with a smaller source size reads no more than that size, but compute-sanitizer reports an out-of-bounds
// read.)
__device__ inline void start_copy_floats(int64_t count, float* to, const float* from) {
  if (count >= 4) return start_copy<true>(reinterpret_cast<int4*>(to), reinterpret_cast<const int4*>(from));
#pragma unroll 1
  for (int i = 0; i < count; ++i) start_copy_word(to + i, from + i);
}

// Waits for all copies that this thread has started.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Ends a group: the copies that this thread has started since the group before.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread but the last kCount.
template <int kCount>
__device__ inline void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kCount) : "memory");
}

}  // namespace gnnc
