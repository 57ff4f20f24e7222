// What stands before the texts of fused kernels: 16-bit floats, sums over warps, and products by tensor cores.
// A text that is compiled for the host defines EMULATED, see the crate device-text.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(16) u8 bytes_of_dynamic_shared[]; \
  T* const name = (T*)bytes_of_dynamic_shared
#endif

// 16-bit floats as they lie in memory. Computation is in f32.
struct f16 {
  unsigned short bits;
};
struct bf16 {
  unsigned short bits;
};

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float wide(f16 x) {
#ifdef EMULATED
  const u32 sign = (u32)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  // A number without a leading one is its digits times 2^-24.
  if (rest < 0x400) return __uint_as_float(sign | __float_as_uint((float)rest * (1.0f / 16777216.0f)));
  return __uint_as_float(sign | ((rest << 13) + (112u << 23)));
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#endif
}

// Rounds to the nearest, ties to even.
template <typename T> struct Narrow;
template <> struct Narrow<float> {
  static __device__ __forceinline__ float of(float x) { return x; }
};
template <> struct Narrow<bf16> {
  static __device__ __forceinline__ bf16 of(float x) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{(unsigned short)(bits >> 16 | 0x40)};
    return bf16{(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  }
};
template <> struct Narrow<f16> {
  static __device__ __forceinline__ f16 of(float x) {
#ifdef EMULATED
    const u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return f16{(unsigned short)(sign | 0x7e00)};
    if (rest >= 0x477ff000u) return f16{(unsigned short)(sign | 0x7c00)};
    if (rest < 0x38800000u) {
      // Below 2^-14: the sum with 0.5 has its digits at 2^-24, and is rounded as a sum.
      const u32 digits = __float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000u;
      return f16{(unsigned short)(sign | digits)};
    }
    return f16{(unsigned short)(sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13)};
#else
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
#endif
  }
};
template <typename T> __device__ __forceinline__ T narrow(float x) { return Narrow<T>::of(x); }

// Two 16-bit floats in a word, the first in its low half.
template <typename T> __device__ __forceinline__ u32 narrow_pair(float low, float high) {
  return narrow<T>(low).bits | (u32)narrow<T>(high).bits << 16;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ u32 narrow_pair<bf16>(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <> __device__ __forceinline__ u32 narrow_pair<f16>(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

// Sums and largest numbers over the lanes of a warp; each lane gets them, with the same bits.
__device__ __forceinline__ float warp_sum(float x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}

// Tensor cores: products of 16 x 16 and 16 x 8 matrices of 16-bit floats with sums of f32, and matrices of 8 x 8 from shared
// memory as their operands. Which lane holds what is in the PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix". GPUs before
// generation 8.0 have none.
template <typename E> struct TensorCore;

#ifdef EMULATED
template <typename E> __device__ void emulated_product(float (&sums)[4], const u32 (&left)[4], const u32* right) {
  struct Held {
    u32 left[4], right[2];
  } mine = {{left[0], left[1], left[2], left[3]}, {right[0], right[1]}};
  const u8* all = emulated_exchange(0xffffffffu, &mine, sizeof mine, __LINE__);
  const int lane = emulated_lane();
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 16; k++) {
      const Held& of_row = *(const Held*)(all + 32 * (row % 8 * 4 + k % 8 / 2));
      const Held& of_column = *(const Held*)(all + 32 * (column * 4 + k % 8 / 2));
      const u32 a = of_row.left[row / 8 + 2 * (k / 8)] >> 16 * (k % 2), b = of_column.right[k / 8] >> 16 * (k % 2);
      sums[i] += wide(E{(unsigned short)a}) * wide(E{(unsigned short)b});
    }
  }
}
template <> struct TensorCore<f16> {
  static __device__ void product(float (&sums)[4], const u32 (&a)[4], const u32* b) { emulated_product<f16>(sums, a, b); }
};
template <> struct TensorCore<bf16> {
  static __device__ void product(float (&sums)[4], const u32 (&a)[4], const u32* b) { emulated_product<bf16>(sums, a, b); }
};
template <bool TURNED> __device__ void matrices(u32 (&to)[4], const void* row) {
  const u8* all = emulated_exchange(0xffffffffu, &row, sizeof row, __LINE__);
  const int lane = emulated_lane();
  for (int i = 0; i < 4; i++) {
    u32 pair[2];
    for (int half = 0; half < 2; half++) {
      const int at = TURNED ? 2 * (lane % 4) + half : lane / 4, column = TURNED ? lane / 4 : 2 * (lane % 4) + half;
      pair[half] = (*(const unsigned short* const*)(all + 32 * (8 * i + at)))[column];
    }
    to[i] = pair[0] | pair[1] << 16;
  }
}
#elif __CUDA_ARCH__ >= 800
#define TENSOR_CORE(E, TYPE)                                                                                          \
  template <> struct TensorCore<E> {                                                                                  \
    static __device__ __forceinline__ void product(float (&d)[4], const u32 (&a)[4], const u32* b) {                  \
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
                   "{%8, %9}, {%0, %1, %2, %3};"                                                                      \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                               \
    }                                                                                                                 \
  };
TENSOR_CORE(f16, "f16")
TENSOR_CORE(bf16, "bf16")
template <bool TURNED> __device__ __forceinline__ void matrices(u32 (&to)[4], const void* row) {
  const u32 place = (u32)__cvta_generic_to_shared(row);
  if (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(place));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(place));
}
#endif
