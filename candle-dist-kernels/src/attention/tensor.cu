// The kernels of `attend.cu` for 16-bit inputs by tensor cores: scores, weights and gradients of scores are f32, and weights and
// gradients of scores are rounded to 16 bits as operands. A block has 128 threads; a warp has 16 rows of the result.

#ifdef IS_SHORT // the elements have 16 bits

// Elements between rows of shared memory, of which each begins at 16 bytes in other banks than its neighbors.
#define STRIDE (COLUMNS + 8)

__device__ __forceinline__ bool is_finite(f16 x) { return (x.bits & 0x7c00) != 0x7c00; }
__device__ __forceinline__ bool is_finite(bf16 x) { return (x.bits & 0x7f80) != 0x7f80; }

// Whether both halves of a word are finite.
template <typename E> __device__ __forceinline__ bool are_finite(u32 pair) {
  return is_finite(E{(unsigned short)pair}) && is_finite(E{(unsigned short)(pair >> 16)});
}

// Copies rows and zeros behind the last row and column. Returns whether all elements are finite.
template <typename E, int COLUMNS>
__device__ __forceinline__ bool load_pairs(const E* from, long long stride, int first, int end, int rows, int columns, E* to) {
  const int CHUNKS = COLUMNS / 8;
  const bool is_aligned = columns % 8 == 0 && stride % 8 == 0 && (u64)from % 16 == 0;
  bool finite = true;
  for (int at = threadIdx.x; at < rows * CHUNKS; at += 128) {
    const int row = at / CHUNKS, column = at % CHUNKS * 8;
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (first + row < end && column < columns) {
      const E* const here = from + (first + row) * stride + column;
      if (is_aligned) {
        eight = *(const uint4*)here;
      } else {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 low = column + 2 * i < columns ? here[2 * i].bits : 0, high = column + 2 * i + 1 < columns ? here[2 * i + 1].bits : 0;
          pairs[i] = low | high << 16;
        }
        eight = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
    finite = finite && are_finite<E>(eight.x) && are_finite<E>(eight.y) && are_finite<E>(eight.z) && are_finite<E>(eight.w);
    *(uint4*)(to + row * STRIDE + column) = eight;
  }
  return finite;
}

// Replaces what is not finite by zeros: in a product it would reach rows that do not see it.
template <typename E, int COLUMNS> __device__ void clear(E* rows, int count) {
  for (int at = threadIdx.x; at < count * COLUMNS; at += 128) {
    E& x = rows[at / COLUMNS * STRIDE + at % COLUMNS];
    if (!is_finite(x)) x = E{0};
  }
}

// Adds what `clear` took, for rows g and g + 8 of a warp, whose first is `row`: elements of `from` that `sees` says they see.
template <typename E, int COLUMNS, typename Sees>
__device__ void restore(const E* from, long long stride, int first, int end, int count, int columns, int row, Sees sees,
                        float (&sums)[COLUMNS / 8][4]) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < count && first + i < end; i++)
    for (int n = 0; n < COLUMNS / 8; n++)
      for (int j = 0; j < 4; j++) {
        const int column = 8 * n + 2 * (lane % 4) + j % 2;
        if (column >= columns) continue;
        const E x = from[(first + i) * stride + column];
        if (!is_finite(x) && sees(row + lane / 4 + 8 * (j / 2), i)) sums[n][j] += wide(x);
      }
}

// Adds to `sums` the products of 16 rows with 8 * KEYS other rows.
template <typename E, int COLUMNS, int KEYS>
__device__ __forceinline__ void pair_products(const E* rows, const E* keys, int columns, float (&sums)[KEYS][4]) {
  const int lane = threadIdx.x % 32;
  for (int column = 0; column < columns; column += 16) {
    u32 left[4];
    matrices<false>(left, rows + lane % 16 * STRIDE + column + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < KEYS / 2; n++) {
      u32 right[4];
      matrices<false>(right, keys + (16 * n + lane % 8 + lane / 16 * 8) * STRIDE + column + lane / 8 % 2 * 8);
      TensorCore<E>::product(sums[2 * n], left, right);
      TensorCore<E>::product(sums[2 * n + 1], left, right + 2);
    }
  }
}

// Adds to `sums` the product of weights, which are rounded, with the rows `from`.
template <typename E, int COLUMNS, int KEYS>
__device__ __forceinline__ void pair_mix(const float (&weights)[KEYS][4], const E* from, int columns, float (&sums)[COLUMNS / 8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < KEYS / 2; k++) {
    const float(&low)[4] = weights[2 * k], (&high)[4] = weights[2 * k + 1];
    const u32 left[4] = {narrow_pair<E>(low[0], low[1]), narrow_pair<E>(low[2], low[3]), narrow_pair<E>(high[0], high[1]),
                         narrow_pair<E>(high[2], high[3])};
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; n++) {
      if (16 * n >= columns) break;
      u32 right[4];
      matrices<true>(right, from + (16 * k + lane % 16) * STRIDE + 16 * n + lane / 16 * 8);
      TensorCore<E>::product(sums[2 * n], left, right);
      TensorCore<E>::product(sums[2 * n + 1], left, right + 2);
    }
  }
}

// Writes rows g and g + 8 of a warp, whose first is `row`.
template <typename T, int COLUMNS>
__device__ __forceinline__ void store_pairs(const float (&sums)[COLUMNS / 8][4], int row, int end, int columns, long long stride, T* to) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int at = row + lane / 4 + 8 * (j / 2), column = 8 * n + 2 * (lane % 4) + j % 2;
      if (at < end && column < columns) to[at * stride + column] = narrow<T>(sums[n][j]);
    }
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// As `forward`, with KEYS * 8 keys in a tile.
template <typename E, int COLUMNS, int KEYS>
__device__ __forceinline__ void tensor_forward(const Attention& a, const E* q, const E* k, const E* v, const u32* bounds, u8* out, float* norms) {
  const int QUERIES = 64, TILE_KEYS = 8 * KEYS;
  DYNAMIC_SHARED(E, shared);
  E* const query_rows = shared;
  E* const key_rows = query_rows + QUERIES * STRIDE;
  E* const value_rows = key_rows + TILE_KEYS * STRIDE;
  int2* const ranges = (int2*)(value_rows + TILE_KEYS * STRIDE);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
  const int first = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES, head = blockIdx.y, batch = blockIdx.z;
  const int kv_head = head / (a.heads / a.kv_heads);
  q += batch * a.q.batch + head * a.q.head;
  k += batch * a.k.batch + kv_head * a.k.head;
  v += batch * a.v.batch + kv_head * a.v.head;
  const Scores scores(a);
  const float sign = sign_of(a.factor);
  load_pairs<E, COLUMNS>(q, a.q.row, first, a.queries, QUERIES, a.dim, query_rows);
  float top[2] = {-infinity(), -infinity()}, sum[2] = {}, mixed[COLUMNS / 8][4] = {};
  for (int block = 0; block < a.blocks; block++) {
    const int2 all = share_ranges(a, bounds, batch, first, block, QUERIES, ranges);
    for (int start = all.x / TILE_KEYS * TILE_KEYS; start < all.y; start += TILE_KEYS) {
      __syncthreads();
      load_pairs<E, COLUMNS>(k, a.k.row, start, a.keys, TILE_KEYS, a.dim, key_rows);
      const bool finite = load_pairs<E, COLUMNS>(v, a.v.row, start, a.keys, TILE_KEYS, a.width, value_rows);
      const bool is_whole = !__syncthreads_or(!finite);
      if (!is_whole) {
        clear<E, COLUMNS>(value_rows, TILE_KEYS);
        __syncthreads();
      }
      float score[KEYS][4] = {};
      pair_products<E, COLUMNS, KEYS>(query_rows + row * STRIDE, key_rows, a.dim, score);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int2 range = ranges[row + lane / 4 + 8 * half];
        float most = -infinity();
#pragma unroll
        for (int n = 0; n < KEYS; n++)
#pragma unroll
          for (int j = 2 * half; j < 2 * half + 2; j++) {
            const int key = start + 8 * n + 2 * (lane % 4) + j % 2;
            score[n][j] = scores.of(sign * score[n][j]);
            if (key >= range.x && key < range.y) most = fmaxf(most, score[n][j]);
          }
        most = fmaxf(top[half], quad_max(most));
        const float part = top[half] == most ? 1.0f : top[half] == -infinity() ? 0.0f : expf((top[half] - most) * scores.rest());
        top[half] = most;
        float here = 0.0f;
#pragma unroll
        for (int n = 0; n < KEYS; n++)
#pragma unroll
          for (int j = 2 * half; j < 2 * half + 2; j++) {
            const int key = start + 8 * n + 2 * (lane % 4) + j % 2;
            score[n][j] = key >= range.x && key < range.y ? expf((score[n][j] - most) * scores.rest()) : 0.0f;
            here += score[n][j];
          }
        sum[half] = sum[half] * part + quad_sum(here);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) mixed[n][2 * half] *= part, mixed[n][2 * half + 1] *= part;
      }
      pair_mix<E, COLUMNS, KEYS>(score, value_rows, a.width, mixed);
      if (!is_whole) {
        const auto sees = [&](int query, int key) { return start + key >= ranges[query].x && start + key < ranges[query].y; };
        restore<E, COLUMNS>(v, a.v.row, start, a.keys, TILE_KEYS, a.width, row, sees, mixed);
      }
    }
  }
  const int columns = a.width + a.log_sums;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int query = first + row + lane / 4 + 8 * half;
    const float norm = sum[half] == 0.0f ? 0.0f : 1.0f / sum[half];
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) mixed[n][2 * half] *= norm, mixed[n][2 * half + 1] *= norm;
    if (lane % 4 || query >= a.queries) continue;
    const long long at = ((long long)batch * a.queries + query) * a.heads + head;
    store_norms(a, scores, at, top[half], sum[half], out, norms);
  }
  const long long at = ((long long)batch * a.queries * a.heads + head) * columns, stride = (long long)a.heads * columns;
  if (a.is_wide) store_pairs<float, COLUMNS>(mixed, first + row, a.queries, a.width, stride, (float*)out + at);
  else store_pairs<E, COLUMNS>(mixed, first + row, a.queries, a.width, stride, (E*)out + at);
}

// As `of_keys`, with 64 keys in a block and 32 queries in a tile. The gradient of the result has the inputs' type.
template <typename E, int COLUMNS>
__device__ __forceinline__ void tensor_of_keys(const Attention& a, const E* q, const E* k, const E* v, const u32* bounds, const E* grad,
                                               const float* norms, const float* inner, E* of_key, E* of_value) {
  const int KEYS = 64, QUERIES = 32;
  DYNAMIC_SHARED(E, shared);
  E* const key_rows = shared;
  E* const value_rows = key_rows + KEYS * STRIDE;
  E* const query_rows = value_rows + KEYS * STRIDE;
  E* const grad_rows = query_rows + QUERIES * STRIDE;
  int2* const ranges = (int2*)(grad_rows + QUERIES * STRIDE);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
  const int first = blockIdx.x * KEYS, kv_head = blockIdx.y, batch = blockIdx.z, group = a.heads / a.kv_heads;
  const Scores scores(a);
  const float sign = sign_of(a.factor);
  load_pairs<E, COLUMNS>(k + batch * a.k.batch + kv_head * a.k.head, a.k.row, first, a.keys, KEYS, a.dim, key_rows);
  load_pairs<E, COLUMNS>(v + batch * a.v.batch + kv_head * a.v.head, a.v.row, first, a.keys, KEYS, a.width, value_rows);
  float dk[COLUMNS / 8][4] = {}, dv[COLUMNS / 8][4] = {};
  for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
    const E* const of_q = q + batch * a.q.batch + head * a.q.head;
    const long long stride = (long long)a.heads * a.width;
    const E* const of_grad = grad + ((long long)batch * a.queries * a.heads + head) * a.width;
    for (int block = 0; block < a.blocks; block++)
      for (int start = 0; start < a.queries; start += QUERIES) {
        if (!share_ranges_over(a, bounds, batch, start, block, QUERIES, first, KEYS, ranges)) continue;
        const bool finite = load_pairs<E, COLUMNS>(of_q, a.q.row, start, a.queries, QUERIES, a.dim, query_rows);
        const bool grads = load_pairs<E, COLUMNS>(of_grad, stride, start, a.queries, QUERIES, a.width, grad_rows);
        const bool is_whole = !__syncthreads_or(!finite || !grads);
        float weight[QUERIES / 8][4] = {}, of_score[QUERIES / 8][4] = {};
        pair_products<E, COLUMNS, QUERIES / 8>(key_rows + row * STRIDE, query_rows, a.dim, weight);
        pair_products<E, COLUMNS, QUERIES / 8>(value_rows + row * STRIDE, grad_rows, a.width, of_score);
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const int query = 8 * n + 2 * (lane % 4) + j % 2, key = first + row + lane / 4 + 8 * (j / 2);
            const int2 range = ranges[query];
            const long long at = ((long long)batch * a.queries + min(start + query, a.queries - 1)) * a.heads + head;
            const Pair pair = pair_of(scores, sign * weight[n][j], of_score[n][j], norms[2 * at], norms[2 * at + 1], inner[at]);
            const bool sees = key >= range.x && key < range.y;
            weight[n][j] = sees ? pair.weight : 0.0f;
            of_score[n][j] = sees ? pair.of_score * a.factor : 0.0f;
          }
        if (!is_whole) {
          __syncthreads();
          clear<E, COLUMNS>(query_rows, QUERIES);
          clear<E, COLUMNS>(grad_rows, QUERIES);
          __syncthreads();
        }
        pair_mix<E, COLUMNS, QUERIES / 8>(weight, grad_rows, a.width, dv);
        pair_mix<E, COLUMNS, QUERIES / 8>(of_score, query_rows, a.dim, dk);
        if (!is_whole) {
          const auto sees = [&](int key, int query) { return first + key >= ranges[query].x && first + key < ranges[query].y; };
          restore<E, COLUMNS>(of_grad, stride, start, a.queries, QUERIES, a.width, row, sees, dv);
          restore<E, COLUMNS>(of_q, a.q.row, start, a.queries, QUERIES, a.dim, row, sees, dk);
        }
      }
  }
  store_pairs<E, COLUMNS>(dk, first + row, a.keys, a.dim, (long long)a.kv_heads * a.dim,
                          of_key + ((long long)batch * a.keys * a.kv_heads + kv_head) * a.dim);
  store_pairs<E, COLUMNS>(dv, first + row, a.keys, a.width, (long long)a.kv_heads * a.width,
                          of_value + ((long long)batch * a.keys * a.kv_heads + kv_head) * a.width);
}

// As `of_queries`, with 64 queries in a block and 32 keys in a tile.
template <typename E, int COLUMNS>
__device__ __forceinline__ void tensor_of_queries(const Attention& a, const E* q, const E* k, const E* v, const u32* bounds, const E* grad,
                                                  const float* norms, const float* inner, E* of_query) {
  const int QUERIES = 64, KEYS = 4, TILE_KEYS = 8 * KEYS;
  DYNAMIC_SHARED(E, shared);
  E* const query_rows = shared;
  E* const grad_rows = query_rows + QUERIES * STRIDE;
  E* const key_rows = grad_rows + QUERIES * STRIDE;
  E* const value_rows = key_rows + TILE_KEYS * STRIDE;
  int2* const ranges = (int2*)(value_rows + TILE_KEYS * STRIDE);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
  const int first = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES, head = blockIdx.y, batch = blockIdx.z;
  const int kv_head = head / (a.heads / a.kv_heads);
  k += batch * a.k.batch + kv_head * a.k.head;
  v += batch * a.v.batch + kv_head * a.v.head;
  const Scores scores(a);
  const float sign = sign_of(a.factor);
  load_pairs<E, COLUMNS>(q + batch * a.q.batch + head * a.q.head, a.q.row, first, a.queries, QUERIES, a.dim, query_rows);
  load_pairs<E, COLUMNS>(grad + ((long long)batch * a.queries * a.heads + head) * a.width, (long long)a.heads * a.width, first, a.queries,
                         QUERIES, a.width, grad_rows);
  float top[2], sum[2], of_row[2], dq[COLUMNS / 8][4] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int query = min(first + row + lane / 4 + 8 * half, a.queries - 1);
    const long long at = ((long long)batch * a.queries + query) * a.heads + head;
    top[half] = norms[2 * at], sum[half] = norms[2 * at + 1], of_row[half] = inner[at];
  }
  for (int block = 0; block < a.blocks; block++) {
    const int2 all = share_ranges(a, bounds, batch, first, block, QUERIES, ranges);
    for (int start = all.x / TILE_KEYS * TILE_KEYS; start < all.y; start += TILE_KEYS) {
      __syncthreads();
      const bool finite = load_pairs<E, COLUMNS>(k, a.k.row, start, a.keys, TILE_KEYS, a.dim, key_rows);
      load_pairs<E, COLUMNS>(v, a.v.row, start, a.keys, TILE_KEYS, a.width, value_rows);
      const bool is_whole = !__syncthreads_or(!finite);
      float product[KEYS][4] = {}, of_score[KEYS][4] = {};
      pair_products<E, COLUMNS, KEYS>(query_rows + row * STRIDE, key_rows, a.dim, product);
      pair_products<E, COLUMNS, KEYS>(grad_rows + row * STRIDE, value_rows, a.width, of_score);
#pragma unroll
      for (int n = 0; n < KEYS; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int key = start + 8 * n + 2 * (lane % 4) + j % 2;
          const int2 range = ranges[row + lane / 4 + 8 * (j / 2)];
          const Pair pair = pair_of(scores, sign * product[n][j], of_score[n][j], top[j / 2], sum[j / 2], of_row[j / 2]);
          of_score[n][j] = key >= range.x && key < range.y ? pair.of_score * a.factor : 0.0f;
        }
      if (!is_whole) {
        __syncthreads();
        clear<E, COLUMNS>(key_rows, TILE_KEYS);
        __syncthreads();
      }
      pair_mix<E, COLUMNS, KEYS>(of_score, key_rows, a.dim, dq);
      if (!is_whole) {
        const auto sees = [&](int query, int key) { return start + key >= ranges[query].x && start + key < ranges[query].y; };
        restore<E, COLUMNS>(k, a.k.row, start, a.keys, TILE_KEYS, a.dim, row, sees, dq);
      }
    }
  }
  store_pairs<E, COLUMNS>(dq, first + row, a.queries, a.dim, (long long)a.heads * a.dim,
                          of_query + ((long long)batch * a.queries * a.heads + head) * a.dim);
}

#define TENSOR_FORWARD(COLUMNS, KEYS)                                                                                 \
  extern "C" __global__ void __launch_bounds__(128, 2) tensor_forward_##COLUMNS(                                         \
      Attention a, const ELEMENT* q, const ELEMENT* k, const ELEMENT* v, const u32* bounds, u8* out, float* norms) {  \
    tensor_forward<ELEMENT, COLUMNS, KEYS>(a, q, k, v, bounds, out, norms);                                           \
  }
#define TENSOR_BACKWARD(COLUMNS)                                                                                      \
  extern "C" __global__ void __launch_bounds__(128, 2) tensor_of_keys_##COLUMNS(                                         \
      Attention a, const ELEMENT* q, const ELEMENT* k, const ELEMENT* v, const u32* bounds, const u8* grad,           \
      const float* norms, const float* inner, ELEMENT* of_key, ELEMENT* of_value) {                                   \
    tensor_of_keys<ELEMENT, COLUMNS>(a, q, k, v, bounds, (const ELEMENT*)grad, norms, inner, of_key, of_value);       \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(128, 2) tensor_of_queries_##COLUMNS(                                      \
      Attention a, const ELEMENT* q, const ELEMENT* k, const ELEMENT* v, const u32* bounds, const u8* grad,           \
      const float* norms, const float* inner, ELEMENT* of_query) {                                                    \
    tensor_of_queries<ELEMENT, COLUMNS>(a, q, k, v, bounds, (const ELEMENT*)grad, norms, inner, of_query);            \
  }

#if defined(EMULATED) || __CUDA_ARCH__ >= 800
#if USES_PASS(0) && USES_COLUMNS(64)
TENSOR_FORWARD(64, 8)
#endif
#if USES_PASS(0) && USES_COLUMNS(128)
TENSOR_FORWARD(128, 8)
#endif
#if USES_PASS(0) && USES_COLUMNS(256)
TENSOR_FORWARD(256, 4)
#endif
#if USES_PASS(1) && USES_COLUMNS(64)
TENSOR_BACKWARD(64)
#endif
#if USES_PASS(1) && USES_COLUMNS(128)
TENSOR_BACKWARD(128)
#endif
#endif
#endif
