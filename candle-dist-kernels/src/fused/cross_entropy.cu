// The cross entropy of rows of logits, of which a rank may have some of the classes. A block has a row.
//
// The ranks join the largest logit of a row and its sum of exponentials between the kernels.

template <typename R> __device__ R lowest();
template <> __device__ float lowest<float>() { return __uint_as_float(0xff800000u); }
template <> __device__ double lowest<double>() { return __longlong_as_double((long long)0xfff0000000000000ull); }

// The largest logit of each row, and the sum of the exponentials of the differences to it: 0 for a row without a finite logit.
template <typename R, typename T> __device__ void normalizer(const T* x, R* tops, R* sums, u64 classes, R* room) {
  x += blockIdx.x * classes;
  R top = lowest<R>(), sum = 0;
  for (u64 i = threadIdx.x; i < classes; i += blockDim.x) top = Largest()(top, (R)get(x[i]));
  top = of_block(top, room, Largest());
  if (top != lowest<R>())
    for (u64 i = threadIdx.x; i < classes; i += blockDim.x) sum += exponential(get(x[i]) - top);
  sum = sum_of_block(sum, room);
  if (threadIdx.x == 0) tops[blockIdx.x] = top, sums[blockIdx.x] = sum;
}

// The weight of the target of a row, and of all classes.
template <typename R> struct Weights {
  // The target among these classes, or a larger number.
  const u32* targets;
  const R* peaks;
  // The factors of `spread`, which has a weight for each class; null without.
  const R* shares;
  const R* spread;
};

// out = peak · (log sum - (logit of the target - top)) + share · sum of spread · (log sum - (logit - top)).
template <typename R, typename T>
__device__ void loss(const T* x, const R* tops, const R* sums, Weights<R> weights, R* out, u64 classes, R* room) {
  const u64 row = blockIdx.x;
  x += row * classes;
  const R top = tops[row], log_sum = natural_log(sums[row]), share = weights.shares ? weights.shares[row] : (R)0;
  R terms = 0;
  if (share != 0) {
    for (u64 i = threadIdx.x; i < classes; i += blockDim.x) {
      // A weight of 0 hides its term, which may be infinite.
      const R weight = weights.spread[i];
      if (weight != 0) terms += weight * (log_sum - (get(x[i]) - top));
    }
    terms = sum_of_block(terms, room);
  }
  if (threadIdx.x != 0) return;
  const u32 target = weights.targets[row];
  R made = 0;
  if (target < classes && weights.peaks[row] != 0) made = weights.peaks[row] * (log_sum - (get(x[target]) - top));
  if (share != 0) made += share * terms;
  out[row] = made;
}

// The gradient of the logits, from that of the sum of the losses over all ranks. `total` is the sum of the spread over all classes.
template <typename R, typename T>
__device__ void loss_input(const T* x, const R* tops, const R* sums, Weights<R> weights, const R* grads, T* dx, u64 classes,
                           R total) {
  const u64 row = blockIdx.x;
  x += row * classes, dx += row * classes;
  const R grad = grads[row], top = tops[row], peak = weights.peaks[row], share = weights.shares ? weights.shares[row] : (R)0;
  const u32 target = weights.targets[row];
  const R all = peak + share * total;
  // A row without weights is ignored, whatever its logits are.
  const R scale = all == 0 ? (R)0 : grad * all / sums[row];
  for (u64 i = threadIdx.x; i < classes; i += blockDim.x) {
    R made = 0;
    if (all != 0) {
      made = exponential(get(x[i]) - top) * scale;
      if (share != 0) made -= grad * share * weights.spread[i];
      if (i == target) made -= grad * peak;
    }
    set(dx[i], made);
  }
}

#define KERNELS(DTYPE, T, R)                                                                                              \
  extern "C" __global__ void cross_entropy_normalizer_##DTYPE(const T* x, R* tops, R* sums, u64 classes) {               \
    __shared__ R room[32];                                                                                                \
    normalizer(x, tops, sums, classes, room);                                                                             \
  }                                                                                                                       \
  extern "C" __global__ void cross_entropy_##DTYPE(const T* x, const R* tops, const R* sums, const u32* targets,         \
                                                   const R* peaks, const R* shares, const R* spread, R* out,              \
                                                   u64 classes) {                                                        \
    __shared__ R room[32];                                                                                                \
    loss(x, tops, sums, Weights<R>{targets, peaks, shares, spread}, out, classes, room);                                  \
  }                                                                                                                       \
  extern "C" __global__ void cross_entropy_input_##DTYPE(const T* x, const R* tops, const R* sums, const u32* targets,   \
                                                         const R* peaks, const R* shares, const R* spread,                \
                                                         const R* grads, T* dx, u64 classes, R total) {                  \
    loss_input(x, tops, sums, Weights<R>{targets, peaks, shares, spread}, grads, dx, classes, total);                     \
  }

KERNELS(f16, f16, float)
KERNELS(bf16, bf16, float)
KERNELS(f32, float, float)
KERNELS(f64, double, double)
