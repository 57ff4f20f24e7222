// What CUDA C gives to a kernel, as C++ on the host: the words of the language, the places of threads, shared memory, barriers,
// exchanges between the lanes of a warp, and the functions that texts of this repository use. `runtime.cpp` runs the threads.
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tuple>
#include <utility>

#define EMULATED 1
#define HOOKED __attribute__((no_sanitize_thread))
#define __global__
// Inlined, because the compiler leaves out the hook where a call writes its result to memory.
#define __device__ inline __attribute__((always_inline))
#define __host__
#define __forceinline__
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("shared_memory"), aligned(16)))
// Shared memory whose size the launch says.
#define DYNAMIC_SHARED(T, name) T* const name = (T*)emulated_dynamic_shared()

struct Index3 {
  unsigned x, y, z;
};

#pragma GCC visibility push(hidden)
extern Index3 threadIdx, blockIdx, blockDim, gridDim;
extern "C" {
void* emulated_dynamic_shared();
void emulated_block_barrier(int line);
// Whether the value of some thread is not 0.
int emulated_block_or(int value, int line);
void emulated_warp_barrier(unsigned mask, int line, bool orders_memory);
// Gives `size` bytes to the other lanes of the mask, waits for them, and returns where their bytes are: 32 for each lane.
const unsigned char* emulated_exchange(unsigned mask, const void* mine, size_t size, int line);
void emulated_atomic(void* at, size_t size);
unsigned emulated_lane();
}
#pragma GCC visibility pop

const int warpSize = 32;

struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct __align__(8) int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

template <typename To, typename From> HOOKED inline To same_bits(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "");
  memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return same_bits<double>(x); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
template <typename T> inline T __ldg(const T* at) { return *at; }
template <typename A, typename B> inline auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <typename A, typename B> inline auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
  return y;
}

#define __syncthreads() emulated_block_barrier(__LINE__)
#define __syncthreads_or(value) emulated_block_or(value, __LINE__)
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  emulated_warp_barrier(mask, line, true);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <typename T> HOOKED inline T emulated_of_lane(unsigned mask, T value, unsigned from, int line) {
  static_assert(sizeof(T) <= 32, "");
  const unsigned char* all = emulated_exchange(mask, &value, sizeof value, line);
  T to;
  memcpy(&to, all + 32 * (from & 31), sizeof to);
  return to;
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, int line = __builtin_LINE()) {
  const unsigned self = emulated_lane();
  return emulated_of_lane(mask, value, (self & ~(unsigned)(width - 1)) | ((unsigned)lane & (unsigned)(width - 1)), line);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, int line = __builtin_LINE()) {
  const unsigned self = emulated_lane(), from = self ^ (unsigned)lanes;
  return emulated_of_lane(mask, value, (from & ~(unsigned)(width - 1)) > (self & ~(unsigned)(width - 1)) ? self : from, line);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, int line = __builtin_LINE()) {
  const unsigned self = emulated_lane(), inside = self & (unsigned)(width - 1);
  return emulated_of_lane(mask, value, inside + by < (unsigned)width ? self + by : self, line);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, int line = __builtin_LINE()) {
  const unsigned self = emulated_lane(), inside = self & (unsigned)(width - 1);
  return emulated_of_lane(mask, value, inside >= by ? self - by : self, line);
}
// The lanes of the mask whose predicate holds. Lanes that have returned have none.
HOOKED inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  const unsigned mine = predicate != 0;
  const unsigned char* all = emulated_exchange(mask, &mine, sizeof mine, line);
  unsigned lanes = 0, of_lane;
  for (unsigned lane = 0; lane < 32; lane++) {
    memcpy(&of_lane, all + 32 * lane, sizeof of_lane);
    if (mask >> lane & 1 && of_lane == 1) lanes |= 1u << lane;
  }
  return lanes;
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, !predicate, line) == 0;
}

template <typename T> HOOKED inline T emulated_add(T* at, T by) {
  emulated_atomic(at, sizeof *at);
  const T before = *at;
  *at = before + by;
  return before;
}
template <typename T, typename By> inline T atomicAdd(T* at, By by) { return emulated_add<T>(at, (T)by); }
template <typename T, typename By> HOOKED inline T atomicMax(T* at, By by) {
  emulated_atomic(at, sizeof *at);
  const T before = *at;
  if ((T)by > before) *at = (T)by;
  return before;
}
template <typename T, typename By> HOOKED inline T atomicMin(T* at, By by) {
  emulated_atomic(at, sizeof *at);
  const T before = *at;
  if ((T)by < before) *at = (T)by;
  return before;
}

// The kernels of a text by name, with what their parameters are.
enum EmulatedParameterKind { EMULATED_VALUE = 0, EMULATED_READ = 1, EMULATED_WRITTEN = 2 };
struct EmulatedParameter {
  unsigned size, kind;
};
struct EmulatedKernel {
  const char* name;
  unsigned count;
  EmulatedParameter parameters[64];
  void (*call)(const EmulatedKernel*, void* const*);
  void (*function)();
};

template <typename T> struct EmulatedKind { static const unsigned value = EMULATED_VALUE; };
template <typename T> struct EmulatedKind<const T*> { static const unsigned value = EMULATED_READ; };
template <typename T> struct EmulatedKind<T*> { static const unsigned value = EMULATED_WRITTEN; };

template <typename... A, size_t... I>
HOOKED void emulated_apply(void (*function)(A...), void* const* parameters, std::index_sequence<I...>) {
  function(*(const A*)parameters[I]...);
}
template <typename... A> HOOKED void emulated_call(const EmulatedKernel* kernel, void* const* parameters) {
  emulated_apply((void (*)(A...))kernel->function, parameters, std::index_sequence_for<A...>());
}
template <typename... A> EmulatedKernel emulated_kernel(const char* name, void (*function)(A...)) {
  static_assert(sizeof...(A) <= 64, "a kernel has more than 64 parameters");
  return {name, sizeof...(A), {{sizeof(A), EmulatedKind<A>::value}...}, emulated_call<A...>, (void (*)())function};
}
