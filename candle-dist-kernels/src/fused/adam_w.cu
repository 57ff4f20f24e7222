// AdamW for many tensors: the formulas of rules.rs, in their order of operations. A block has a part of one tensor.

#define TENSORS 48
#define ELEMENTS 8192

// The tensors of a launch: variables, their 32-bit copies or null, both moments, and gradients.
template <typename R> struct Tensors {
  void* x[TENSORS];
  void* master[TENSORS];
  void* first[TENSORS];
  void* second[TENSORS];
  const void* grad[TENSORS];
  u64 count[TENSORS];
  // The factors of the bias correction.
  R scale_first[TENSORS], scale_second[TENSORS];
  // The block that begins each tensor, in their order.
  u32 start[TENSORS];
  u32 tensors;
};

// `unused` ends it at a multiple of 8 bytes.
template <typename R> struct Rule { R keep_first, part_first, keep_second, part_second, lr, eps, keep, unused; };

// X is the type of variables, S that of moments, and G that of gradients. A variable is its rounded copy; where it is not, it was
// written from outside, and the copy follows.
template <typename X, typename S, typename G, typename R>
__device__ __forceinline__ void adam_w(const Tensors<R>& all, const Rule<R>& rule) {
  u32 tensor = 0;
  while (tensor + 1 < all.tensors && all.start[tensor + 1] <= blockIdx.x) tensor++;
  X* x = (X*)all.x[tensor];
  R* master = (R*)all.master[tensor];
  S *first = (S*)all.first[tensor], *second = (S*)all.second[tensor];
  const G* grad = (const G*)all.grad[tensor];
  const R scale_first = all.scale_first[tensor], scale_second = all.scale_second[tensor];
  const u64 begin = (u64)(blockIdx.x - all.start[tensor]) * ELEMENTS, count = all.count[tensor];
  const u64 end = begin + ELEMENTS < count ? begin + ELEMENTS : count;
  for (u64 i = begin + threadIdx.x; i < end; i += blockDim.x) {
    R value = get(x[i]);
    if (master) {
      X rounded;
      set(rounded, master[i]);
      if (get(rounded) == value) value = master[i];
    }
    const R slope = get(grad[i]);
    const R mean = get(first[i]) * rule.keep_first + slope * rule.part_first;
    const R square = get(second[i]) * rule.keep_second + slope * slope * rule.part_second;
    const R change = mean * scale_first / (root(square * scale_second) + rule.eps);
    value = value * rule.keep - change * rule.lr;
    if (master) master[i] = value;
    set(x[i], value);
    set(first[i], mean);
    set(second[i], square);
  }
}

#define KERNEL(NAME, X, S, G, R) \
  extern "C" __global__ void NAME(const Tensors<R> all, const Rule<R> rule) { adam_w<X, S, G>(all, rule); }
#define KERNELS(DTYPE, X)                              \
  KERNEL(adam_w_##DTYPE, X, X, X, float)               \
  KERNEL(adam_w_##DTYPE##_wide_grads, X, X, float, float) \
  KERNEL(adam_w_##DTYPE##_wide_states, X, float, X, float) \
  KERNEL(adam_w_##DTYPE##_all_wide, X, float, float, float)

KERNELS(f16, f16)
KERNELS(bf16, bf16)
KERNEL(adam_w_f32, float, float, float, float)
KERNEL(adam_w_f64, double, double, double, double)
