// Rotary positions: a thread rotates one pair of elements of one row.

// Rows [batch, heads, tokens] of x, in any strides, and the tables of their angles, whose rows have any stride.
struct Rows {
  u64 heads, tokens, half;
  u64 of_batch, of_head, of_token, of_element;
  // The places of the tables of the next element of the batch, and of the next token.
  u64 table_of_batch, table_of_token;
};

// The gradient is the rotation back: `sign` is -1.
template <typename R, typename T>
__device__ void rope(const T* x, const T* cosines, const T* sines, T* out, u64 count, Rows rows, u64 step, R sign) {
  for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += (u64)gridDim.x * blockDim.x) {
    const u64 pair = at % rows.half, row = at / rows.half;
    const u64 token = row % rows.tokens, head = row / rows.tokens % rows.heads, batch = row / rows.tokens / rows.heads;
    const u64 angle = batch * rows.table_of_batch + token * rows.table_of_token + pair;
    const R cosine = get(cosines[angle]), sine = sign * get(sines[angle]);
    // Neighbors are a pair if the step is 1; else elements a half apart.
    const u64 first = step == 1 ? 2 * pair : pair;
    const T* from = x + batch * rows.of_batch + head * rows.of_head + token * rows.of_token;
    const R a = get(from[first * rows.of_element]), b = get(from[(first + step) * rows.of_element]);
    T* to = out + row * 2 * rows.half + first;
    set(to[0], a * cosine - b * sine);
    set(to[step], a * sine + b * cosine);
  }
}

#define KERNELS(DTYPE, T, R)                                                                                              \
  extern "C" __global__ void rope_##DTYPE(const T* x, const T* cosines, const T* sines, T* out, u64 count, u64 heads,   \
                                          u64 tokens, u64 half, u64 of_batch, u64 of_head, u64 of_token,             \
                                          u64 of_element, u64 table_of_batch, u64 table_of_token, u64 step, R sign) { \
    const Rows rows = {heads, tokens, half, of_batch, of_head, of_token, of_element, table_of_batch, table_of_token};     \
    rope(x, cosines, sines, out, count, rows, step, sign);                                                                \
  }

KERNELS(f16, f16, float)
KERNELS(bf16, bf16, float)
KERNELS(f32, float, float)
KERNELS(f64, double, double)
