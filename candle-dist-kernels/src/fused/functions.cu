// Functions of one number with their slopes, and gates: the formulas of function/formulas.rs, which has their reasons.

// From here on all functions have their limits.
#define FAR 1000

__device__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ double hyperbolic_tangent(double x) { return tanh(x); }
__device__ float error_function(float x) { return erff(x); }
__device__ double error_function(double x) { return erf(x); }
// The distribution function of the standard normal: the tail does not cancel.
__device__ float distribution(float x) { return 0.5f * erfcf(-0.70710678118654752440f * x); }
__device__ double distribution(double x) { return 0.5 * erfc(-0.70710678118654752440 * x); }
__device__ float exponential_less_1(float x) { return expm1f(x); }
__device__ double exponential_less_1(double x) { return expm1(x); }
__device__ float power(float x, float e) { return powf(x, e); }
__device__ double power(double x, double e) { return pow(x, e); }

template <typename R> __device__ R at_most(R x, R limit) { return x > limit ? limit : x; }
template <typename R> __device__ R at_least(R x, R limit) { return x < limit ? limit : x; }
template <typename R> __device__ R near(R x) { return at_most(at_least(x, (R)-FAR), (R)FAR); }

// x · weight for a weight that vanishes far below 0, also there.
template <typename R> __device__ R weighted(R x, R weight) { return at_least(x, (R)-FAR) * weight; }

template <typename R> struct Pair { R value, rest; };

// sigmoid(x) and 1 - sigmoid(x), both without cancellation.
template <typename R> __device__ Pair<R> logistic(R x) {
  const R e = exponential(x > 0 ? -x : x), near = (R)1 / ((R)1 + e);
  return x > 0 ? Pair<R>{near, e * near} : Pair<R>{e * near, near};
}

enum Function { GELU, GELU_ERF, SILU, MISH, SIGMOID, TANH, ERF, HARD_SWISH, ELU, LEAKY_RELU, POWER, RECIP, RSQRT };

// The value and the slope.
template <typename R> __device__ Pair<R> function(u64 which, R x, R a) {
  const R one = 1;
  switch (which) {
    case GELU: {
      const R t = near(x), square = t * t, scale = (R)(2 * 0.7978845608028654);
      const Pair<R> s = logistic(scale * t * (one + (R)0.044715 * square));
      const R inner = scale * (one + (R)(3 * 0.044715) * square);
      return {weighted(x, s.value), s.value + t * s.value * s.rest * inner};
    }
    case GELU_ERF: {
      const R t = near(x), below = distribution(t), density = exponential((R)-0.5 * t * t) * (R)0.3989422804014327;
      return {weighted(x, below), below + t * density};
    }
    case SILU: {
      const Pair<R> s = logistic(x);
      return {weighted(x, s.value), s.value * (one + near(x) * s.rest)};
    }
    case MISH: {
      const R e = exponential(x > 0 ? -x : x);
      const R below = x > 0 ? one + 2 * e + 2 * e * e : e * (e + 2) + 2;
      const R weight = (x > 0 ? one + 2 * e : e * (e + 2)) / below, rest = (x > 0 ? 2 * e * e : (R)2) / below;
      return {weighted(x, weight), weight + near(x) * rest * (one + weight) * logistic(x).value};
    }
    case SIGMOID: {
      const Pair<R> s = logistic(x);
      return {s.value, s.value * s.rest};
    }
    case TANH: {
      const Pair<R> s = logistic(x + x);
      return {hyperbolic_tangent(x), 4 * s.value * s.rest};
    }
    case ERF: {
      const R t = near(x);
      return {error_function(x), (R)1.1283791670955126 * exponential(-t * t)};
    }
    case HARD_SWISH: {
      const R sixth = (R)(1.0 / 6.0), weight = at_most(at_least((near(x) + 3) * sixth, (R)0), one);
      const R size = x < 0 ? -x : x, share = size < 3 ? one : size > 3 ? (R)0 : (R)0.5;
      return {weighted(x, weight), x != x ? x : weight + near(x) * sixth * share};
    }
    case ELU: return x > 0 ? Pair<R>{x, one} : Pair<R>{a * exponential_less_1(x), a * exponential(x)};
    case LEAKY_RELU:
      if (x > 0) return {x, one};
      if (x < 0) return {a == 0 ? (R)0 : a * x, a};
      return {x, (one + a) * (R)0.5};
    case POWER: return {power(x, a), a == 0 ? (R)0 : a * power(x, a - 1)};
    case RECIP: {
      const R value = one / x;
      return {value, -value * value};
    }
    default: {
      const R value = one / root(x);
      return {value, (R)-0.5 * value * (value * value)};
    }
  }
}

#define EACH(i, count) \
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x)

// x · sigmoid(x) · gate. With a limit it is x · sigmoid(alpha · x) · (gate + 1), of x at most the limit and of gate within it.
template <typename R> __device__ R gated(R x, R gate, R alpha, R limit) {
  if (limit == 0) return weighted(x, logistic(x).value) * gate;
  x = at_most(x, limit), gate = at_least(at_most(gate, limit), -limit);
  return weighted(x, logistic(alpha * x).value) * (gate + (R)1);
}

template <typename R> __device__ void gated_inputs(R x, R gate, R grad, R alpha, R limit, R& dx, R& dgate) {
  if (limit == 0) {
    const Pair<R> s = logistic(x);
    // First the slope: the product of the other two may be infinite.
    dx = s.value * ((R)1 + near(x) * s.rest) * grad * gate;
    dgate = grad * weighted(x, s.value);
    return;
  }
  const R inside = at_least(at_most(gate, limit), -limit), most = at_most(x, limit);
  const Pair<R> s = logistic(alpha * x);
  dx = x > limit ? (R)0 : (s.value + weighted(alpha * x, s.value) * s.rest) * (inside + (R)1) * grad;
  dgate = gate > limit || gate < -limit ? (R)0 : grad * weighted(most, logistic(alpha * most).value);
}

#define KERNELS(DTYPE, T, R)                                                                                              \
  extern "C" __global__ void function_##DTYPE(const T* x, T* out, u64 count, u64 which, R a) {                          \
    EACH(i, count) set(out[i], function(which, (R)get(x[i]), a).value);                                                   \
  }                                                                                                                       \
  extern "C" __global__ void function_input_##DTYPE(const T* x, const T* grad, T* dx, u64 count, u64 which, R a) {      \
    EACH(i, count) set(dx[i], get(grad[i]) * function(which, (R)get(x[i]), a).rest);                                      \
  }                                                                                                                       \
  extern "C" __global__ void gate_##DTYPE(const T* x, const T* gate, T* out, u64 count, R alpha, R limit) {              \
    EACH(i, count) set(out[i], gated((R)get(x[i]), (R)get(gate[i]), alpha, limit));                                       \
  }                                                                                                                       \
  extern "C" __global__ void gate_inputs_##DTYPE(const T* x, const T* gate, const T* grad, T* dx, T* dgate, u64 count,   \
                                                 R alpha, R limit) {                                                      \
    EACH(i, count) {                                                                                                      \
      R of_x, of_gate;                                                                                                    \
      gated_inputs((R)get(x[i]), (R)get(gate[i]), (R)get(grad[i]), alpha, limit, of_x, of_gate);                          \
      set(dx[i], of_x);                                                                                                   \
      set(dgate[i], of_gate);                                                                                             \
    }                                                                                                                     \
  }

KERNELS(f16, f16, float)
KERNELS(bf16, bf16, float)
KERNELS(f32, float, float)
KERNELS(f64, double, double)
