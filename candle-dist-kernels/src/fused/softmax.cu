// The softmax of rows, and its gradient. A block has a row.

// Which entries a row of scores sees, and what is added to them.
template <typename T> struct Seen {
  // Rows of one score matrix if later keys are hidden, else 0.
  u64 queries;
  // Numbers that are added, or null. Row (i, j, k, l) of the scores, of `dims`, has the row i * steps[0] + .. of the mask.
  const T* mask;
  u64 dims[4], steps[4];

  __device__ u64 count(u64 row, u64 keys) const {
    if (queries == 0) return keys;
    const u64 most = row % queries + 1 + keys;
    return most < queries ? 0 : most - queries;
  }
  __device__ const T* added(u64 row, u64 keys) const {
    if (!mask) return mask;
    u64 of = 0;
    for (int dim = 3; dim >= 0; dim--) {
      of += row % dims[dim] * steps[dim];
      row /= dims[dim];
    }
    return mask + of * keys;
  }
};

template <typename R> __device__ R lowest();
template <> __device__ float lowest<float>() { return __uint_as_float(0xff800000u); }
template <> __device__ double lowest<double>() { return __longlong_as_double((long long)0xfff0000000000000ull); }

// out = softmax(x · scale + mask) over the entries that a row sees, 0 for others. A row that sees nothing is 0. The largest score is
// taken off before the scale, where that is possible: it keeps small differences of large scores.
template <typename R, typename T>
__device__ void softmax(const T* x, T* out, u64 keys, R scale, Seen<T> seen, R* room) {
  const u64 row = blockIdx.x, count = seen.count(row, keys);
  const T* added = seen.added(row, keys);
  x += row * keys, out += row * keys;
  // With a mask the scale is part of the scores; without one it comes after the difference, and turns their order if it is negative.
  const R sign = !added && scale < 0 ? (R)-1 : (R)1, inner = added ? scale : sign, outer = added ? (R)1 : scale * sign;
  R top = lowest<R>();
  for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
    R score = get(x[i]) * inner;
    if (added) score += get(added[i]);
    top = Largest()(top, score);
  }
  top = of_block(top, room, Largest());
  const bool sees = count > 0 && !(added && top == lowest<R>());
  R sum = 0;
  for (u64 i = threadIdx.x; sees && i < count; i += blockDim.x) {
    R score = get(x[i]) * inner;
    if (added) score += get(added[i]);
    sum += exponential((score - top) * outer);
  }
  const R part = (R)1 / sum_of_block(sum, room);
  for (u64 i = threadIdx.x; i < keys; i += blockDim.x) {
    R y = 0;
    if (sees && i < count) {
      R score = get(x[i]) * inner;
      if (added) score += get(added[i]);
      y = exponential((score - top) * outer) * part;
    }
    set(out[i], y);
  }
}

// dx = scale · y · (grad - sum of y · grad). Where y is 0 because it is hidden, so is dx.
template <typename R, typename T>
__device__ void softmax_input(const T* y, const T* grad, T* dx, u64 keys, u64 queries, R scale, R* room) {
  const u64 row = blockIdx.x;
  y += row * keys, grad += row * keys, dx += row * keys;
  const u64 most = row % (queries ? queries : 1) + 1 + keys;
  const u64 count = queries == 0 ? keys : most < queries ? 0 : most - queries;
  R mean = 0;
  for (u64 i = threadIdx.x; i < count; i += blockDim.x) mean += get(y[i]) * get(grad[i]);
  mean = sum_of_block(mean, room);
  for (u64 i = threadIdx.x; i < keys; i += blockDim.x)
    set(dx[i], i < count ? scale * get(y[i]) * (get(grad[i]) - mean) : (R)0);
}

#define KERNELS(DTYPE, T, R)                                                                                              \
  extern "C" __global__ void softmax_##DTYPE(const T* x, const T* mask, T* out, u64 keys, u64 queries, u64 a, u64 b,  \
                                             u64 c, u64 d, u64 of_a, u64 of_b, u64 of_c, u64 of_d, R scale) {       \
    __shared__ R room[32];                                                                                                \
    softmax(x, out, keys, scale, Seen<T>{queries, mask, {a, b, c, d}, {of_a, of_b, of_c, of_d}}, room);                   \
  }                                                                                                                       \
  extern "C" __global__ void softmax_input_##DTYPE(const T* y, const T* grad, T* dx, u64 keys, u64 queries, R scale) {  \
    __shared__ R room[32];                                                                                                \
    softmax_input(y, grad, dx, keys, queries, scale, room);                                                               \
  }

KERNELS(f16, f16, float)
KERNELS(bf16, bf16, float)
KERNELS(f32, float, float)
KERNELS(f64, double, double)
