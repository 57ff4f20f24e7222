// The largest number of each row and its place, as one integer: a block has a part of a row. Integers of the parts of a row, and of
// its pieces on ranks, are compared as they are.

// The upper half orders f32 numbers as they are ordered; a NaN or +infinity stands above all. The lower half is larger for an earlier
// place, and odd for a NaN.
template <typename T> __device__ long long key_of(T x, u64 place) {
  const float number = (float)get(x) + 0.0f;  // no -0
  const int bits = __float_as_int(number);
  const bool is_nan = number != number, is_odd = is_nan || number == infinity();
  const int order = is_odd ? 0x7fffffff : bits < 0 ? bits ^ 0x7fffffff : bits;
  const u32 rest = (u32)(0x7fffffffull - place) << 1 | is_nan;
  return (long long)((u64)(u32)order << 32 | rest);
}

// Rows of `width` numbers, whose first has the place `first`.
template <typename T> __device__ void largest(const T* x, long long* keys, u64 width, u64 first) {
  __shared__ long long room[32];
  const u64 part = (width + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * part;
  const u64 end = begin + part < width ? begin + part : width;
  const T* row = x + blockIdx.y * width;
  long long most = (long long)(1ull << 63);
  for (u64 i = begin + threadIdx.x; i < end; i += blockDim.x) most = Largest()(key_of(row[i], first + i), most);
  most = of_block(most, room, Largest());
  if (threadIdx.x == 0) keys[blockIdx.y * gridDim.x + blockIdx.x] = most;
}

#define KERNEL(DTYPE, T) \
  extern "C" __global__ void largest_##DTYPE(const T* x, long long* keys, u64 width, u64 first) { largest(x, keys, width, first); }

KERNEL(f16, f16)
KERNEL(bf16, bf16)
KERNEL(f32, float)
KERNEL(f64, double)

// What a thread has of a part of a row: the part has 256 times as many.
#define EACH 16

// The number that has this key; NaN for one that stands above all.
__device__ float number_of(long long key) {
  const int order = (int)(key >> 32);
  return __int_as_float(order < 0 ? order ^ 0x7fffffff : order);
}

// For each part of a row of `width` numbers, whose first has the place `first`: the sum of e^((number - largest) / temperature) as the
// bits of an f64, and the keys of the `count` largest numbers, the largest first, and the least integer where there are fewer. Blocks before
// `before` and behind the row's last number have a part without numbers. Without a temperature the sum is 0.
template <typename T>
__device__ void candidates(const T* x, const double* temperatures, long long* made, u64 width, u64 first, u64 before, u64 count) {
  __shared__ long long room[32];
  __shared__ double sums[32];
  const long long least = (long long)(1ull << 63);
  long long* to = made + (blockIdx.y * gridDim.x + blockIdx.x) * (count + 1);
  const u64 begin = blockIdx.x < before ? width : (blockIdx.x - before) * (EACH * blockDim.x);
  long long own[EACH];
  for (int i = 0; i < EACH; i++) {
    const u64 at = begin + i * blockDim.x + threadIdx.x;
    own[i] = at < width ? key_of(x[blockIdx.y * width + at], first + at) : least;
  }
  double sum = 0;
  u64 found = 0;
  for (bool is_any = true; is_any && found < count; found++) {
    long long most = least;
    for (int i = 0; i < EACH; i++) most = Largest()(own[i], most);
    most = of_block(most, room, Largest());
    is_any = most != least;
    const float number = number_of(most);
    if (found == 0 && temperatures && number - number == 0) {
      const double temperature = temperatures[blockIdx.y];
      for (int i = 0; i < EACH && temperature > 0; i++)
        if (own[i] != least) sum += exponential(((double)number_of(own[i]) - number) / temperature);
      sum = sum_of_block(sum, sums);
    }
    for (int i = 0; i < EACH; i++) own[i] = own[i] == most ? least : own[i];
    if (threadIdx.x == 0) to[found + 1] = most;
  }
  // What is left has no number.
  for (u64 at = found + threadIdx.x; at < count; at += blockDim.x) to[at + 1] = least;
  if (threadIdx.x == 0) to[0] = __double_as_longlong(sum);
}

#define CANDIDATES(DTYPE, T)                                                                                                           \
  extern "C" __global__ void candidates_##DTYPE(const T* x, const double* temperatures, long long* made, u64 width, u64 first, u64 before, \
                                                u64 count) {                                                                           \
    candidates(x, temperatures, made, width, first, before, count);                                                                    \
  }

CANDIDATES(f16, f16)
CANDIDATES(bf16, bf16)
CANDIDATES(f32, float)
CANDIDATES(f64, double)
