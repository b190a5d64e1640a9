#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace gnnc {

// A 64-byte aligned buffer that only grows. Kernels have one buffer a thread (thread_local), so that a small call
// allocates nothing. The contents are lost when the buffer grows. Under AddressSanitizer the buffer has exactly the
// size last requested, so that every access past its end is detected.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  template <typename T>
  T* get(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > capacity_ || (kExact && bytes != capacity_)) grow(bytes);
    return static_cast<T*>(data_);
  }

 private:
#ifdef __SANITIZE_ADDRESS__
  static constexpr bool kExact = true;
#else
  static constexpr bool kExact = false;
#endif

  void grow(size_t bytes) {
    std::free(data_);
    data_ = nullptr;
    capacity_ = 0;
    data_ = std::aligned_alloc(64, bytes);
    if (data_ == nullptr) throw std::bad_alloc();
    capacity_ = bytes;
  }

  void* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace gnnc
