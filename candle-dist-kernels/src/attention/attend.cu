// Attention and its gradients over tiles of keys, in f32, without a matrix of scores in memory. ELEMENT is the type of the inputs.
//
// A block has 256 threads, 16 by 16. A thread computes the scores of some queries with some keys of a tile, and some columns of
// the same queries' results. Scores are kept as products before the factor, unless there is a cap: then as capped scores. They
// are summed in one order everywhere, so the backward passes see the forward pass's weights, up to roundings of f32 where that was by
// tensor cores. Tiles begin at multiples of their length, so a row has the same bits whatever the other queries are.
//
// A pair of a query and a key that it does not see has a weight of zero. Times NaN or infinity that is NaN, so tiles that have
// such elements leave these pairs out.

struct Strides {
  long long batch, row, head; // columns follow each other
};

struct Attention {
  Strides q, k, v;
  int queries, keys, heads, kv_heads, dim, width;
  int lists, blocks;    // of `bounds`: [lists, queries, blocks, 2], the first key that a query sees of a block and the end of them
  int start_by, end_by; // without bounds, query i sees the keys from i + start_by up to i + end_by
  int is_wide, log_sums; // whether the result is f32, and whether a row has the logarithm of its sum behind it
  float factor, cap; // a cap of 0 is none
};

const int TILE = 16;

// Distances of rows in shared memory are odd: neighbors in a column lie in different banks.
__device__ __forceinline__ int odd(int columns) { return columns | 1; }

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// The range of keys that a query sees of a block.
__device__ __forceinline__ int2 seen(const Attention& a, const u32* bounds, int batch, int query, int block) {
  if (query >= a.queries) return make_int2(0, 0);
  if (bounds) {
    const long long at = ((long long)(a.lists == 1 ? 0 : batch) * a.queries + query) * a.blocks + block;
    return make_int2((int)bounds[2 * at], (int)bounds[2 * at + 1]);
  }
  return make_int2(max(query + a.start_by, 0), min(max(query + a.end_by, 0), a.keys));
}

// Copies rows, times a factor, and zeros behind the last one. Returns whether all elements are finite.
template <typename T>
__device__ bool load(const T* from, long long stride, int first, int end, int rows, int columns, float times, float* to) {
  bool finite = true;
  for (int row = threadIdx.x / 32; row < rows; row += 8)
    for (int column = threadIdx.x % 32; column < columns; column += 32) {
      const float x = first + row < end ? times * wide(from[(first + row) * stride + column]) : 0.0f;
      finite = finite && is_finite(x);
      to[row * odd(columns) + column] = x;
    }
  return finite;
}

// Adds to `sums` the products of ROWS rows and KEYS rows: rows from ty * ROWS on, keys tx, tx + 16 and so on.
template <int ROWS, int KEYS>
__device__ __forceinline__ void products(const float* rows, const float* keys, int columns, float (&sums)[ROWS][KEYS]) {
  const int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE, stride = odd(columns);
  for (int column = 0; column < columns; column++) {
    float of_row[ROWS], of_key[KEYS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) of_row[r] = rows[(ty * ROWS + r) * stride + column];
#pragma unroll
    for (int k = 0; k < KEYS; k++) of_key[k] = keys[(tx + TILE * k) * stride + column];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int k = 0; k < KEYS; k++) sums[r][k] += of_row[r] * of_key[k];
  }
}

// Adds to `sums` the rows from ty * ROWS on of a product of weights, [inner, ..] if `turned` and else [.., inner], with `from`
// [inner, columns]: columns tx, tx + 16 and so on. `sees(row, i)` says which weights count, where that is asked for.
template <int ROWS, int COLUMNS, bool TURNED, typename Sees>
__device__ __forceinline__ void mix(const float* weights, int stride, const float* from, int inner, int columns, bool all,
                                    Sees sees, float (&sums)[ROWS][COLUMNS]) {
  const int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE, of_from = odd(columns);
  for (int i = 0; i < inner; i++) {
    float weight[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) weight[r] = weights[TURNED ? i * stride + ty * ROWS + r : (ty * ROWS + r) * stride + i];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int column = tx + TILE * c;
      if (column >= columns) break;
      const float x = from[i * of_from + column];
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        if (all || sees(ty * ROWS + r, i)) sums[r][c] += weight[r] * x;
    }
  }
}

// Writes the rows of a result, contiguous in [batch, rows, heads, columns].
template <typename T, int ROWS, int COLUMNS>
__device__ __forceinline__ void store(const float (&sums)[ROWS][COLUMNS], int first, int end, int columns, long long stride, T* to) {
  const int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int row = first + ty * ROWS + r, column = tx + TILE * c;
      if (row < end && column < columns) to[row * stride + column] = narrow<T>(sums[r][c]);
    }
}

// The largest number and the sum over the 16 threads that have the same rows.
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int lanes = 8; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int lanes = 8; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

// What makes scores of products with a query that has the factor's sign.
struct Scores {
  float size, cap;

  __device__ explicit Scores(const Attention& a) : size(fabsf(a.factor)), cap(a.cap) {}
  // What differences of scores are multiplied by.
  __device__ float rest() const { return cap > 0.0f ? 1.0f : size; }
  __device__ float of(float product) const { return cap > 0.0f ? cap * tanhf(product * size / cap) : product; }
  // The derivative of a capped score. It follows from the product: few digits of a score near the cap tell how near it is.
  __device__ float slope(float product) const {
    if (!(cap > 0.0f)) return 1.0f;
    const float e = expf(-2.0f * fabsf(product * size / cap));
    return 4.0f * e / ((1.0f + e) * (1.0f + e));
  }
};

__device__ __forceinline__ float sign_of(float factor) { return factor < 0.0f ? -1.0f : 1.0f; }

// Puts the ranges of `rows` queries of a block into shared memory, and returns the keys from the first to the last that some of them
// see. All threads call it.
__device__ __forceinline__ int2 share_ranges(const Attention& a, const u32* bounds, int batch, int first, int block, int rows, int2* ranges) {
  __syncthreads();
  if (threadIdx.x < rows) ranges[threadIdx.x] = seen(a, bounds, batch, first + threadIdx.x, block);
  __syncthreads();
  int2 all = make_int2(0x7fffffff, 0);
  for (int row = 0; row < rows; row++) {
    const int2 range = ranges[row];
    if (range.x < range.y) all = make_int2(min(all.x, range.x), max(all.y, range.y));
  }
  return all;
}

// As above for the queries from `start` on; returns whether one of them sees one of `count` keys from `first` on.
__device__ __forceinline__ bool share_ranges_over(const Attention& a, const u32* bounds, int batch, int start, int block, int rows, int first,
                                                  int count, int2* ranges) {
  __syncthreads();
  bool any = false;
  if (threadIdx.x < rows) {
    const int2 range = seen(a, bounds, batch, start + threadIdx.x, block);
    ranges[threadIdx.x] = range;
    any = range.x < range.y && range.x < first + count && range.y > first;
  }
  return __syncthreads_or(any);
}

// Writes the norms of a row, and the logarithm of its sum where rows have one.
__device__ __forceinline__ void store_norms(const Attention& a, const Scores& scores, long long row, float top, float sum, u8* out, float* norms) {
  norms[2 * row] = top;
  norms[2 * row + 1] = sum;
  if (a.log_sums) ((float*)out)[row * (a.width + 1) + a.width] = sum == 0.0f ? -infinity() : top * scores.rest() + logf(sum);
}

// The result, and the norms of each row: its largest score, and the sum of the exponentials relative to it.
template <typename E, int COLUMNS>
__device__ __forceinline__ void forward(const Attention& a, const E* q, const E* k, const E* v, const u32* bounds, u8* out, float* norms) {
  const int ROWS = 4, KEYS = 2, QUERIES = TILE * ROWS, TILE_KEYS = TILE * KEYS;
  DYNAMIC_SHARED(float, shared);
  float* const query_rows = shared;
  float* const key_rows = query_rows + QUERIES * odd(a.dim);
  float* const weights = key_rows + TILE_KEYS * odd(max(a.dim, a.width));
  // An even number of floats stands before.
  int2* const ranges = (int2*)(weights + QUERIES * odd(TILE_KEYS));
  const int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
  // The last queries first: under a causal mask they see most.
  const int first = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES, head = blockIdx.y, batch = blockIdx.z;
  const int kv_head = head / (a.heads / a.kv_heads);
  q += batch * a.q.batch + head * a.q.head;
  k += batch * a.k.batch + kv_head * a.k.head;
  v += batch * a.v.batch + kv_head * a.v.head;
  const Scores scores(a);
  load(q, a.q.row, first, a.queries, QUERIES, a.dim, sign_of(a.factor), query_rows);
  float top[ROWS], sum[ROWS] = {}, mixed[ROWS][COLUMNS] = {};
#pragma unroll
  for (int r = 0; r < ROWS; r++) top[r] = -infinity();
  for (int block = 0; block < a.blocks; block++) {
    const int2 all = share_ranges(a, bounds, batch, first, block, QUERIES, ranges);
    for (int start = all.x / TILE_KEYS * TILE_KEYS; start < all.y; start += TILE_KEYS) {
      __syncthreads();
      load(k, a.k.row, start, a.keys, TILE_KEYS, a.dim, 1.0f, key_rows);
      __syncthreads();
      float score[ROWS][KEYS] = {};
      products<ROWS, KEYS>(query_rows, key_rows, a.dim, score);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const int2 range = ranges[ty * ROWS + r];
        float most = -infinity();
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
          const int key = start + tx + TILE * i;
          score[r][i] = scores.of(score[r][i]);
          if (key >= range.x && key < range.y) most = fmaxf(most, score[r][i]);
        }
        most = fmaxf(top[r], row_max(most));
        // Without scores so far there is nothing to follow.
        const float part = top[r] == most ? 1.0f : top[r] == -infinity() ? 0.0f : expf((top[r] - most) * scores.rest());
        top[r] = most;
        float here = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
          const int key = start + tx + TILE * i;
          const float weight = key >= range.x && key < range.y ? expf((score[r][i] - most) * scores.rest()) : 0.0f;
          weights[(ty * ROWS + r) * odd(TILE_KEYS) + tx + TILE * i] = weight;
          here += weight;
        }
        sum[r] = sum[r] * part + row_sum(here);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) mixed[r][c] *= part;
      }
      __syncthreads();
      const bool finite = load(v, a.v.row, start, a.keys, TILE_KEYS, a.width, 1.0f, key_rows);
      const bool all_count = !__syncthreads_or(!finite);
      const auto sees = [&](int row, int key) { return start + key >= ranges[row].x && start + key < ranges[row].y; };
      mix<ROWS, COLUMNS, false>(weights, odd(TILE_KEYS), key_rows, TILE_KEYS, a.width, all_count, sees, mixed);
    }
  }
  const int columns = a.width + a.log_sums;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int query = first + ty * ROWS + r;
    const float norm = sum[r] == 0.0f ? 0.0f : 1.0f / sum[r];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) mixed[r][c] *= norm;
    if (tx || query >= a.queries) continue;
    const long long row = ((long long)batch * a.queries + query) * a.heads + head;
    store_norms(a, scores, row, top[r], sum[r], out, norms);
  }
  const long long at = ((long long)batch * a.queries * a.heads + head) * columns, stride = (long long)a.heads * columns;
  if (a.is_wide) store(mixed, first, a.queries, a.width, stride, (float*)out + at);
  else store(mixed, first, a.queries, a.width, stride, (E*)out + at);
}

// The product of each row of the result with its gradient, less the gradient of the logarithm: a score moves the logarithm by its
// weight, as it moves the product. A warp has a row.
template <typename T> __device__ __forceinline__ void inner_of(const Attention& a, long long rows, const T* out, const T* grad, float* inner) {
  const long long row = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const int columns = a.width + a.log_sums;
  float sum = 0.0f;
  for (int column = threadIdx.x % 32; column < a.width; column += 32)
    sum += wide(out[row * columns + column]) * wide(grad[row * columns + column]);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) inner[row] = sum - (a.log_sums ? wide(grad[row * columns + a.width]) : 0.0f);
}

// The weight of a pair, and the gradient of its score by `product_with_value`, the product of the result's gradient and the value.
struct Pair {
  float weight, of_score;
};
__device__ __forceinline__ Pair pair_of(const Scores& scores, float product, float product_with_value, float top, float sum, float inner) {
  const float norm = sum == 0.0f ? 0.0f : 1.0f / sum;
  const float weight = norm * expf((scores.of(product) - top) * scores.rest());
  return Pair{weight, weight * (product_with_value - inner) * scores.slope(product)};
}

// The gradients of keys and values. A block has some keys of a head, and meets all queries that see them.
template <typename E, int KEYS, int COLUMNS>
__device__ __forceinline__ void of_keys(const Attention& a, const E* q, const E* k, const E* v, const u32* bounds, const u8* grad,
                                        const float* norms, const float* inner, E* of_key, E* of_value) {
  const int QUERIES = 2, TILE_KEYS = TILE * KEYS, TILE_QUERIES = TILE * QUERIES;
  DYNAMIC_SHARED(float, shared);
  float* const key_rows = shared;
  float* const value_rows = key_rows + TILE_KEYS * odd(a.dim);
  float* const query_rows = value_rows + TILE_KEYS * odd(a.width);
  float* const grad_rows = query_rows + TILE_QUERIES * odd(a.dim);
  float* const weights = grad_rows + TILE_QUERIES * odd(a.width);
  float* const of_scores = weights + TILE_QUERIES * odd(TILE_KEYS);
  // An even number of floats stands before.
  int2* const ranges = (int2*)(of_scores + TILE_QUERIES * odd(TILE_KEYS));
  const int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
  const int first = blockIdx.x * TILE_KEYS, kv_head = blockIdx.y, batch = blockIdx.z, group = a.heads / a.kv_heads;
  const int columns = a.width + a.log_sums;
  const Scores scores(a);
  load(k + batch * a.k.batch + kv_head * a.k.head, a.k.row, first, a.keys, TILE_KEYS, a.dim, 1.0f, key_rows);
  load(v + batch * a.v.batch + kv_head * a.v.head, a.v.row, first, a.keys, TILE_KEYS, a.width, 1.0f, value_rows);
  float dk[KEYS][COLUMNS] = {}, dv[KEYS][COLUMNS] = {};
  for (int head = kv_head * group; head < (kv_head + 1) * group; head++)
    for (int block = 0; block < a.blocks; block++)
      for (int start = 0; start < a.queries; start += TILE_QUERIES) {
        if (!share_ranges_over(a, bounds, batch, start, block, TILE_QUERIES, first, TILE_KEYS, ranges)) continue;
        bool finite = load(q + batch * a.q.batch + head * a.q.head, a.q.row, start, a.queries, TILE_QUERIES, a.dim,
                           sign_of(a.factor), query_rows);
        const long long at = ((long long)batch * a.queries * a.heads + head) * columns, stride = (long long)a.heads * columns;
        const bool of_grad = a.is_wide ? load((const float*)grad + at, stride, start, a.queries, TILE_QUERIES, a.width, 1.0f, grad_rows)
                                       : load((const E*)grad + at, stride, start, a.queries, TILE_QUERIES, a.width, 1.0f, grad_rows);
        const bool all_count = !__syncthreads_or(!finite || !of_grad);
        float product[KEYS][QUERIES] = {}, with_value[KEYS][QUERIES] = {};
        products<KEYS, QUERIES>(key_rows, query_rows, a.dim, product);
        products<KEYS, QUERIES>(value_rows, grad_rows, a.width, with_value);
#pragma unroll
        for (int i = 0; i < QUERIES; i++) {
          const int query = start + tx + TILE * i;
          const int2 range = ranges[tx + TILE * i];
          const long long row = ((long long)batch * a.queries + min(query, a.queries - 1)) * a.heads + head;
          const float top = norms[2 * row], sum = norms[2 * row + 1], of_row = inner[row];
#pragma unroll
          for (int r = 0; r < KEYS; r++) {
            const int key = first + ty * KEYS + r;
            const bool sees = key >= range.x && key < range.y;
            const Pair pair = pair_of(scores, product[r][i], with_value[r][i], top, sum, of_row);
            const int place = (tx + TILE * i) * odd(TILE_KEYS) + ty * KEYS + r;
            weights[place] = sees ? pair.weight : 0.0f;
            of_scores[place] = sees ? pair.of_score * scores.size : 0.0f;
          }
        }
        __syncthreads();
        const auto sees = [&](int key, int query) { return first + key >= ranges[query].x && first + key < ranges[query].y; };
        mix<KEYS, COLUMNS, true>(weights, odd(TILE_KEYS), grad_rows, TILE_QUERIES, a.width, all_count, sees, dv);
        mix<KEYS, COLUMNS, true>(of_scores, odd(TILE_KEYS), query_rows, TILE_QUERIES, a.dim, all_count, sees, dk);
      }
  store(dk, first, a.keys, a.dim, (long long)a.kv_heads * a.dim, of_key + ((long long)batch * a.keys * a.kv_heads + kv_head) * a.dim);
  store(dv, first, a.keys, a.width, (long long)a.kv_heads * a.width,
        of_value + ((long long)batch * a.keys * a.kv_heads + kv_head) * a.width);
}

// The gradient of queries. A block has some queries of a head, and meets all keys that they see.
template <typename E, int ROWS, int COLUMNS>
__device__ __forceinline__ void of_queries(const Attention& a, const E* q, const E* k, const E* v, const u32* bounds, const u8* grad,
                                           const float* norms, const float* inner, E* of_query) {
  const int KEYS = 2, QUERIES = TILE * ROWS, TILE_KEYS = TILE * KEYS;
  DYNAMIC_SHARED(float, shared);
  float* const query_rows = shared;
  float* const grad_rows = query_rows + QUERIES * odd(a.dim);
  float* const key_rows = grad_rows + QUERIES * odd(a.width);
  float* const value_rows = key_rows + TILE_KEYS * odd(a.dim);
  float* const of_scores = value_rows + TILE_KEYS * odd(a.width);
  // An even number of floats stands before.
  int2* const ranges = (int2*)(of_scores + QUERIES * odd(TILE_KEYS));
  const int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
  const int first = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES, head = blockIdx.y, batch = blockIdx.z;
  const int kv_head = head / (a.heads / a.kv_heads), columns = a.width + a.log_sums;
  k += batch * a.k.batch + kv_head * a.k.head;
  v += batch * a.v.batch + kv_head * a.v.head;
  const Scores scores(a);
  load(q + batch * a.q.batch + head * a.q.head, a.q.row, first, a.queries, QUERIES, a.dim, sign_of(a.factor), query_rows);
  const long long at = ((long long)batch * a.queries * a.heads + head) * columns, stride = (long long)a.heads * columns;
  if (a.is_wide) load((const float*)grad + at, stride, first, a.queries, QUERIES, a.width, 1.0f, grad_rows);
  else load((const E*)grad + at, stride, first, a.queries, QUERIES, a.width, 1.0f, grad_rows);
  float top[ROWS], sum[ROWS], of_row[ROWS], dq[ROWS][COLUMNS] = {};
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int query = min(first + ty * ROWS + r, a.queries - 1);
    const long long row = ((long long)batch * a.queries + query) * a.heads + head;
    top[r] = norms[2 * row], sum[r] = norms[2 * row + 1], of_row[r] = inner[row];
  }
  for (int block = 0; block < a.blocks; block++) {
    const int2 all = share_ranges(a, bounds, batch, first, block, QUERIES, ranges);
    for (int start = all.x / TILE_KEYS * TILE_KEYS; start < all.y; start += TILE_KEYS) {
      __syncthreads();
      const bool finite = load(k, a.k.row, start, a.keys, TILE_KEYS, a.dim, 1.0f, key_rows);
      load(v, a.v.row, start, a.keys, TILE_KEYS, a.width, 1.0f, value_rows);
      const bool all_count = !__syncthreads_or(!finite);
      float product[ROWS][KEYS] = {}, with_value[ROWS][KEYS] = {};
      products<ROWS, KEYS>(query_rows, key_rows, a.dim, product);
      products<ROWS, KEYS>(grad_rows, value_rows, a.width, with_value);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const int2 range = ranges[ty * ROWS + r];
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
          const int key = start + tx + TILE * i;
          const Pair pair = pair_of(scores, product[r][i], with_value[r][i], top[r], sum[r], of_row[r]);
          const bool sees = key >= range.x && key < range.y;
          of_scores[(ty * ROWS + r) * odd(TILE_KEYS) + tx + TILE * i] = sees ? pair.of_score * a.factor : 0.0f;
        }
      }
      __syncthreads();
      const auto sees = [&](int row, int key) { return start + key >= ranges[row].x && start + key < ranges[row].y; };
      mix<ROWS, COLUMNS, false>(of_scores, odd(TILE_KEYS), key_rows, TILE_KEYS, a.dim, all_count, sees, dq);
    }
  }
  store(dq, first, a.queries, a.dim, (long long)a.heads * a.dim, of_query + ((long long)batch * a.queries * a.heads + head) * a.dim);
}

// COLUMNS_USED and PASS_USED (0 forward, 1 backward), where they are defined, leave out all other kernels.
#ifndef COLUMNS_USED
#define USES_COLUMNS(N) true
#else
#define USES_COLUMNS(N) COLUMNS_USED == N
#endif
#ifndef PASS_USED
#define USES_PASS(N) true
#else
#define USES_PASS(N) PASS_USED == N
#endif

#define FORWARD(COLUMNS)                                                                                                \
  extern "C" __global__ void __launch_bounds__(256, 2) attention_forward_##COLUMNS(                                        \
      Attention a, const ELEMENT* q, const ELEMENT* k, const ELEMENT* v, const u32* bounds, u8* out, float* norms) {    \
    forward<ELEMENT, COLUMNS / TILE>(a, q, k, v, bounds, out, norms);                                                   \
  }
#define BACKWARD(COLUMNS, ROWS)                                                                                         \
  extern "C" __global__ void __launch_bounds__(256, 1) attention_of_keys_##COLUMNS(                                        \
      Attention a, const ELEMENT* q, const ELEMENT* k, const ELEMENT* v, const u32* bounds, const u8* grad,             \
      const float* norms, const float* inner, ELEMENT* of_key, ELEMENT* of_value) {                                     \
    of_keys<ELEMENT, ROWS, COLUMNS / TILE>(a, q, k, v, bounds, grad, norms, inner, of_key, of_value);                   \
  }                                                                                                                     \
  extern "C" __global__ void __launch_bounds__(256, 1) attention_of_queries_##COLUMNS(                                     \
      Attention a, const ELEMENT* q, const ELEMENT* k, const ELEMENT* v, const u32* bounds, const u8* grad,             \
      const float* norms, const float* inner, ELEMENT* of_query) {                                                      \
    of_queries<ELEMENT, ROWS, COLUMNS / TILE>(a, q, k, v, bounds, grad, norms, inner, of_query);                        \
  }

#if USES_PASS(0) && USES_COLUMNS(64)
FORWARD(64)
#endif
#if USES_PASS(0) && USES_COLUMNS(128)
FORWARD(128)
#endif
#if USES_PASS(0) && USES_COLUMNS(256)
FORWARD(256)
#endif
#if USES_PASS(1) && USES_COLUMNS(64)
BACKWARD(64, 4)
#endif
#if USES_PASS(1) && USES_COLUMNS(128)
BACKWARD(128, 4)
#endif
#if USES_PASS(1) && USES_COLUMNS(256)
BACKWARD(256, 2)
#endif

extern "C" __global__ void __launch_bounds__(128) attention_inner(Attention a, long long rows, const u8* out, const u8* grad,
                                                                  float* inner) {
  if (a.is_wide) inner_of(a, rows, (const float*)out, (const float*)grad, inner);
  else inner_of(a, rows, (const ELEMENT*)out, (const ELEMENT*)grad, inner);
}
