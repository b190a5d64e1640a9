#pragma once

// Defines the integer types of fixed size: NVRTC has no <cstdint>, and where nvcc has that header, its types are
// identical.

using int64_t = long;
using uint64_t = unsigned long;
using int32_t = int;
using uint32_t = unsigned int;
using int16_t = short;
using uint16_t = unsigned short;
using int8_t = signed char;
using uint8_t = unsigned char;

static_assert(sizeof(int64_t) == 8, "long is 64 bits wide wherever these kernels are compiled");

namespace gnnc {

#if defined(__CUDA_ARCH__)
// The compute capability times 100. Register budgets depend on the architecture, because the same code takes more
// registers on some architectures.
constexpr int kArchitecture = __CUDA_ARCH__;
#else
constexpr int kArchitecture = 0;
#endif

// The first statement of every kernel: waits until the preceding kernels of the CUDA graph are complete (programmatic
// dependent launch). In a graph, a kernel is launched as soon as the preceding kernel has no block left, before the
// memory operations of that kernel are visible (cuda_graph.py); outside graphs there is nothing to wait for. No load
// may be moved before this statement, although the compiler considers most loads to be loads of constants: cubin.py
// checks the machine code, and a kernel with such a load is launched in full order.
__device__ __forceinline__ void begin_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Select<c, A, B>::Type is A if c, otherwise B (std::conditional, which NVRTC does not have).
template <bool kFirst, class A, class B>
struct Select {
  using Type = A;
};
template <class A, class B>
struct Select<false, A, B> {
  using Type = B;
};

// Returns the bit mask of this thread's group of kLanes neighboring threads (a power of two), for __shfl_*_sync and
// __syncwarp.
template <int kLanes>
__device__ __forceinline__ uint32_t group_members() {
  if constexpr (kLanes == 32) {
    return 0xffffffffu;
  } else {
    return ((1u << kLanes) - 1u) << (threadIdx.x % 32 / kLanes * kLanes);
  }
}

// kCount elements that are loaded or stored by one instruction.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Vector {
  T v[kCount];
};

// Returns an element of rows that begin on 16 bytes, from the four neighbors that it lies in: four calls for these are
// one load.
__device__ __forceinline__ float one_of_four(const float* row, int column) {
  const float4 all = __ldca(reinterpret_cast<const float4*>(row + (column & ~3)));
  const int k = column & 3;
  return k == 0 ? all.x : k == 1 ? all.y : k == 2 ? all.z : all.w;
}
template <class T>
__device__ __forceinline__ T one_of_four(const T* row, int column) {
  static_assert(sizeof(T) == 2, "four elements are two words");
  const uint2 all = __ldca(reinterpret_cast<const uint2*>(row + (column & ~3)));
  const uint32_t pair = column & 2 ? all.y : all.x;
  const auto bits = static_cast<uint16_t>(column & 1 ? pair >> 16 : pair);
  return *reinterpret_cast<const T*>(&bits);
}

// Returns the four elements of a row that begins on 16 bytes, from `column`, a multiple of four, on; zeros if not
// kLoads.
template <bool kLoads, class T>
__device__ __forceinline__ Vector<T, 4> four_if(const T* row, int column) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "four elements are two or four words");
  using Words = typename Select<sizeof(T) == 4, uint4, uint2>::Type;
  Words words = {};
  if constexpr (kLoads) words = __ldca(reinterpret_cast<const Words*>(row + column));
  return *reinterpret_cast<const Vector<T, 4>*>(&words);
}

// Stores 4, 8 or 16 bytes at once. kStreams: no kernel gathers these bytes, and 16-byte stores are marked to be evicted
// from L2 first.
template <bool kStreams, class T, int kCount>
__device__ __forceinline__ void store_vector(T* to, const Vector<T, kCount>& vector) {
  if constexpr (kStreams && sizeof(vector) == 16) {
    __stcs(reinterpret_cast<float4*>(to), *reinterpret_cast<const float4*>(&vector));
  } else {
    *reinterpret_cast<Vector<T, kCount>*>(to) = vector;
  }
}

// Stores a vector at once, like store_vector, also where the compiler would split the store into elements and merge
// these with neighboring stores of single elements.
template <bool kStreams, class T, int kCount>
__device__ __forceinline__ void store_together(T* to, const Vector<T, kCount>& vector) {
  constexpr int kWords = sizeof(vector) / 4;
  static_assert(sizeof(vector) % 4 == 0, "the vector must consist of 4-byte words");
  const auto* w = reinterpret_cast<const uint32_t*>(&vector);
  if constexpr (kStreams && kWords == 4) {
    store_vector<true>(to, vector);
  } else if constexpr (kWords == 1) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(w[0]) : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(w[0]), "r"(w[1]) : "memory");
  } else {
    static_assert(kWords == 4, "the vector has at most 16 bytes");
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  }
}

// Returns the index of the byte of a quantized row of scale base / 2^shift that holds the row's weight 2^(7 - shift):
// the last byte of its last 16, if that lies past the width. An SpMM then loads the weight with the row. -1: the row
// has no such byte.
__host__ __device__ constexpr int weight_place(int width) { return width % 16 == 0 ? -1 : width / 16 * 16 + 15; }

// Return the larger or smaller value, or NaN if either is NaN, as in torch.
__device__ inline float larger_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ inline float smaller_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Returns the pointer, but hides its origin from the compiler: otherwise the compiler would recompute the pointer for
// each row, in three instructions, instead of adding the row's offset to a register in one.
template <class T>
__device__ __forceinline__ T* opaque(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// Returns the number, but hides its value from the compiler, so that nothing derived from it is reused.
__device__ __forceinline__ int32_t opaque(int32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

}  // namespace gnnc
