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
