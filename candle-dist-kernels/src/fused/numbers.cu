// What the fused kernels share, behind the prelude. 16-bit floats are computed in f32, others in themselves: in the type R. A sum over
// threads has one order, so each run gives the same bits.

__device__ double get(double x) { return x; }
template <typename T> __device__ float get(T x) { return wide(x); }

// The nearest number, of two the even one.
__device__ void set(double& to, double x) { to = x; }
template <typename T> __device__ void set(T& to, float x) { to = narrow<T>(x); }

__device__ float root(float x) { return sqrtf(x); }
__device__ double root(double x) { return sqrt(x); }
__device__ float exponential(float x) { return expf(x); }
__device__ double exponential(double x) { return exp(x); }
__device__ float natural_log(float x) { return logf(x); }
__device__ double natural_log(double x) { return log(x); }

struct Sum {
  template <typename R> __device__ R operator()(R a, R b) const { return a + b; }
};
// The larger number, and NaN if one is NaN.
struct Largest {
  template <typename R> __device__ R operator()(R a, R b) const { return a > b || a != a ? a : b; }
};

// Joins a number of each thread of a block of whole warps, in one dim. All threads get the result. `room` has a place for each warp.
template <typename R, typename Join> __device__ R of_block(R x, R* room, Join join) {
  for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(0xffffffffu, x, step));
  if (blockDim.x <= 32) return x;
  __syncthreads();  // the room may still be read
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  x = room[0];
  for (u32 warp = 1; warp < blockDim.x / 32; warp++) x = join(x, room[warp]);
  return x;
}
template <typename R> __device__ R sum_of_block(R x, R* room) { return of_block(x, room, Sum()); }
