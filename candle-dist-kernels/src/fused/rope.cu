// Rotary positions of one or two tensors: a thread rotates one pair of elements of one row.

// Rows [batch, heads, tokens] of a tensor, in any strides, and of its result, whose rows are dense. `count` is their number of pairs.
struct Rows {
  u64 count, heads, of_batch, of_head, of_token, of_element, to_head, to_token;
};
// The tables of the angles, whose rows have any stride, and the distance of the elements of a pair.
struct Angles {
  u64 tokens, half, of_batch, of_token, step;
};

// The gradient is the rotation back: `sign` is -1.
template <typename R, typename T>
__device__ void turn(const T* x, const T* cosines, const T* sines, T* out, u64 at, const Rows& rows, const Angles& angles,
                     R sign) {
  const u64 pair = at % angles.half, row = at / angles.half;
  const u64 token = row % angles.tokens, head = row / angles.tokens % rows.heads;
  const u64 batch = row / angles.tokens / rows.heads;
  const u64 angle = batch * angles.of_batch + token * angles.of_token + pair;
  const R cosine = get(cosines[angle]), sine = sign * get(sines[angle]);
  // Neighbors are a pair if the step is 1; else elements a half apart.
  const u64 first = angles.step == 1 ? 2 * pair : pair;
  const T* from = x + batch * rows.of_batch + head * rows.of_head + token * rows.of_token;
  const R a = get(from[first * rows.of_element]), b = get(from[(first + angles.step) * rows.of_element]);
  T* to = out + batch * rows.heads * angles.tokens * 2 * angles.half + head * rows.to_head + token * rows.to_token + first;
  set(to[0], a * cosine - b * sine);
  set(to[angles.step], a * sine + b * cosine);
}

// One of the tensors may have no rows.
template <typename R, typename T>
__device__ void rope(const T* x, const T* y, const T* cosines, const T* sines, T* of_x, T* of_y, Rows first, Rows second,
                     Angles angles, R sign) {
  const u64 count = first.count + second.count;
  for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += (u64)gridDim.x * blockDim.x) {
    if (at < first.count) {
      turn(x, cosines, sines, of_x, at, first, angles, sign);
    } else {
      turn(y, cosines, sines, of_y, at - first.count, second, angles, sign);
    }
  }
}

#define KERNELS(DTYPE, T, R)                                                                                             \
  extern "C" __global__ void rope_##DTYPE(                                                                               \
      const T* x, const T* y, const T* cosines, const T* sines, T* of_x, T* of_y, u64 count_x, u64 heads_x,              \
      u64 of_batch_x, u64 of_head_x, u64 of_token_x, u64 of_element_x, u64 to_head_x, u64 to_token_x, u64 count_y,       \
      u64 heads_y, u64 of_batch_y, u64 of_head_y, u64 of_token_y, u64 of_element_y, u64 to_head_y, u64 to_token_y,       \
      u64 tokens, u64 half, u64 table_of_batch, u64 table_of_token, u64 step, R sign) {                                  \
    const Rows first = {count_x, heads_x, of_batch_x, of_head_x, of_token_x, of_element_x, to_head_x, to_token_x};       \
    const Rows second = {count_y, heads_y, of_batch_y, of_head_y, of_token_y, of_element_y, to_head_y, to_token_y};      \
    const Angles angles = {tokens, half, table_of_batch, table_of_token, step};                                          \
    rope(x, y, cosines, sines, of_x, of_y, first, second, angles, sign);                                                 \
  }

KERNELS(f16, f16, float)
KERNELS(bf16, bf16, float)
KERNELS(f32, float, float)
KERNELS(f64, double, double)
