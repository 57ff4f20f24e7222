// New rows of two tensors, written to one memory: a thread copies one element.

// Runs of `len` of the `count` elements, `step` apart in the memory. The first begins at `start`.
struct Runs {
  u64 count, len, start, step;
};

template <typename T> __device__ void put(const T* x, const T* y, T* to, Runs first, Runs second) {
  const u64 count = first.count + second.count;
  for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += (u64)gridDim.x * blockDim.x) {
    const bool is_first = at < first.count;
    const Runs runs = is_first ? first : second;
    const u64 from = is_first ? at : at - first.count;
    to[runs.start + from / runs.len * runs.step + from % runs.len] = is_first ? x[from] : y[from];
  }
}

#define KERNELS(DTYPE, T)                                                                                                \
  extern "C" __global__ void put_##DTYPE(const T* x, const T* y, T* to, u64 count_x, u64 len_x, u64 start_x, u64 step_x, \
                                         u64 count_y, u64 len_y, u64 start_y, u64 step_y) {                             \
    const Runs first = {count_x, len_x, start_x, step_x}, second = {count_y, len_y, start_y, step_y};                    \
    put(x, y, to, first, second);                                                                                        \
  }

KERNELS(f16, f16)
KERNELS(bf16, bf16)
KERNELS(f32, float)
KERNELS(f64, double)
