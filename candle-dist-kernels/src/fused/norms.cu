// RMS norm and layer norm of rows, and their gradients. A block has a row.

// The sums that a row needs: its mean, if it is taken away, and 1 / sqrt(mean of the squares + eps).
template <typename R> struct Moments { R mean, scale; };

template <bool CENTERED, typename R, typename T>
__device__ Moments<R> moments(const T* x, u64 width, R eps, R* room) {
  R mean = 0, squares = 0;
  if (CENTERED) {
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) mean += get(x[i]);
    mean = sum_of_block(mean, room) / (R)width;
  }
  for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
    const R off = get(x[i]) - mean;
    squares += off * off;
  }
  return {mean, (R)1 / root(sum_of_block(squares, room) / (R)width + eps)};
}

// out = (x - mean) scale weight + bias. `kept` keeps the mean and the scale of each row for the gradients. With `more`, the rows
// are those of x + more, rounded, which `sum` gets.
template <bool CENTERED, typename R, typename T>
__device__ void norm(const T* x, const T* more, const T* weight, const T* bias, T* out, T* sum, R* kept, u64 width, R eps, R* room) {
  const u64 row = blockIdx.x;
  x += row * width, out += row * width;
  if (more) {
    more += row * width, sum += row * width;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) set(sum[i], get(x[i]) + get(more[i]));
    x = sum;  // each thread reads what it has written
  }
  const Moments<R> of = moments<CENTERED>(x, width, eps, room);
  if (threadIdx.x == 0) kept[2 * row] = of.mean, kept[2 * row + 1] = of.scale;
  for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
    R y = (get(x[i]) - of.mean) * of.scale * get(weight[i]);
    if (CENTERED) y += get(bias[i]);
    set(out[i], y);
  }
}

// The gradient of x.
template <bool CENTERED, typename R, typename T>
__device__ void norm_input(const T* x, const T* weight, const T* grad, const R* kept, T* dx, u64 width, R* room) {
  const u64 row = blockIdx.x;
  x += row * width, grad += row * width, dx += row * width;
  const R mean = kept[2 * row], scale = kept[2 * row + 1];
  R shift = 0, slope = 0;
  for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
    const R d = get(grad[i]) * get(weight[i]);
    if (CENTERED) shift += d;
    slope += d * (get(x[i]) - mean);
  }
  if (CENTERED) shift = sum_of_block(shift, room) / (R)width;
  slope = sum_of_block(slope, room) * scale * scale / (R)width;
  for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
    const R d = get(grad[i]) * get(weight[i]);
    set(dx[i], (d - shift - (get(x[i]) - mean) * slope) * scale);
  }
}

// Sums for the gradients of weight and bias. A block has 32 columns, and `each` rows from blockIdx.y * each on, of which a thread has
// each eighth. `parts` gets the sums of each such part: those for weights `[parts, width]`, then those for biases. If there is one
// part, `dw` and `db` get them.
template <bool CENTERED, typename R, typename T>
__device__ void norm_parts(const T* x, const T* grad, const R* kept, R* parts, T* dw, T* db, u64 rows, u64 width, u64 each,
                           R* room) {
  const u64 column = (u64)blockIdx.x * 32 + threadIdx.x;
  const u64 first = (u64)blockIdx.y * each, end = first + each < rows ? first + each : rows;
  R of_weight = 0, of_bias = 0;
  for (u64 row = first + threadIdx.y; column < width && row < end; row += 8) {
    const R g = get(grad[row * width + column]);
    of_weight += g * ((get(x[row * width + column]) - kept[2 * row]) * kept[2 * row + 1]);
    of_bias += g;
  }
  R* places = room + 32 * threadIdx.y + threadIdx.x;
  places[0] = of_weight;
  if (CENTERED) places[256] = of_bias;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  for (int i = 1; i < 8; i++) {
    of_weight += places[32 * i];
    if (CENTERED) of_bias += places[256 + 32 * i];
  }
  if (!parts) {
    set(dw[column], of_weight);
    if (CENTERED) set(db[column], of_bias);
    return;
  }
  parts[blockIdx.y * width + column] = of_weight;
  if (CENTERED) parts[(gridDim.y + (u64)blockIdx.y) * width + column] = of_bias;
}

// The sum of rows [parts, width].
template <typename R, typename T> __device__ void sum_of_parts(const R* rows, T* out, u64 parts, u64 width) {
  const u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= width) return;
  R sum = rows[column];
  for (u64 i = 1; i < parts; i++) sum += rows[i * width + column];
  set(out[column], sum);
}

#define KERNELS(DTYPE, T, R)                                                                                              \
  extern "C" __global__ void rms_norm_##DTYPE(const T* x, const T* more, const T* weight, T* out, T* sum, R* kept,        \
                                              u64 width, R eps) {                                                        \
    __shared__ R room[32];                                                                                                \
    norm<false>(x, more, weight, (const T*)0, out, sum, kept, width, eps, room);                                          \
  }                                                                                                                       \
  extern "C" __global__ void layer_norm_##DTYPE(const T* x, const T* more, const T* weight, const T* bias, T* out,        \
                                                T* sum, R* kept, u64 width, R eps) {                                     \
    __shared__ R room[32];                                                                                                \
    norm<true>(x, more, weight, bias, out, sum, kept, width, eps, room);                                                  \
  }                                                                                                                       \
  extern "C" __global__ void rms_norm_input_##DTYPE(const T* x, const T* weight, const T* grad, const R* kept, T* dx,     \
                                                    u64 width) {                                                          \
    __shared__ R room[32];                                                                                                \
    norm_input<false>(x, weight, grad, kept, dx, width, room);                                                            \
  }                                                                                                                       \
  extern "C" __global__ void layer_norm_input_##DTYPE(const T* x, const T* weight, const T* grad, const R* kept, T* dx,   \
                                                      u64 width) {                                                        \
    __shared__ R room[32];                                                                                                \
    norm_input<true>(x, weight, grad, kept, dx, width, room);                                                             \
  }                                                                                                                       \
  extern "C" __global__ void rms_norm_parts_##DTYPE(const T* x, const T* grad, const R* kept, R* parts, T* dw, u64 rows, \
                                                    u64 width, u64 each) {                                              \
    __shared__ R room[256];                                                                                               \
    norm_parts<false>(x, grad, kept, parts, dw, (T*)0, rows, width, each, room);                                          \
  }                                                                                                                       \
  extern "C" __global__ void layer_norm_parts_##DTYPE(const T* x, const T* grad, const R* kept, R* parts, T* dw, T* db,   \
                                                      u64 rows, u64 width, u64 each) {                                 \
    __shared__ R room[512];                                                                                               \
    norm_parts<true>(x, grad, kept, parts, dw, db, rows, width, each, room);                                              \
  }                                                                                                                       \
  extern "C" __global__ void sum_of_parts_##DTYPE(const R* rows, T* out, u64 parts, u64 width) {                        \
    sum_of_parts(rows, out, parts, width);                                                                                \
  }

KERNELS(f16, f16, float)
KERNELS(bf16, bf16, float)
KERNELS(f32, float, float)
KERNELS(f64, double, double)
