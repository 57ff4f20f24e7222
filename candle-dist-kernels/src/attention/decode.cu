// Attention of single queries, each over the keys and values of its own text, which are read where they lie. ELEMENT is their type.
//
// A block has 256 keys of a text, and up to 8 query heads of one of its key heads. Results over more keys are joined by a second
// kernel in the order of the keys. What a text gets does not depend on the other texts.

struct TextCache {
  const void* keys;
  const void* values;
  long long key_head, key_token, value_head, value_token; // columns follow each other
  long long tokens;
};

const int TEXTS = 16, GROUP = 8, PART = 256, TILE_KEYS = 64, THREADS = 128;

struct Caches {
  TextCache of[TEXTS];
};

struct Decode {
  long long query_text, query_head; // columns follow each other
  int texts, heads, kv_heads, dim, width, parts;
  int kind, out_kind, log_sums; // of the query and the result: 0 is f32, 1 f16, 2 bf16
  float factor, cap; // a cap of 0 is none
};

__device__ __forceinline__ float read_as(const u8* from, int kind, long long at) {
  if (kind == 0) return ((const float*)from)[at];
  return kind == 1 ? wide(((const f16*)from)[at]) : wide(((const bf16*)from)[at]);
}
__device__ __forceinline__ void write_as(u8* to, int kind, long long at, float x) {
  if (kind == 0) ((float*)to)[at] = x;
  else if (kind == 1) ((f16*)to)[at] = narrow<f16>(x);
  else ((bf16*)to)[at] = narrow<bf16>(x);
}

// Scores are products before the factor, with its sign, unless there is a cap.
__device__ __forceinline__ float rest_of(const Decode& d) { return d.cap > 0.0f ? 1.0f : fabsf(d.factor); }
__device__ __forceinline__ float score_of(const Decode& d, float product) {
  return d.cap > 0.0f ? d.cap * tanhf(product * fabsf(d.factor) / d.cap) : product;
}

__device__ __forceinline__ float log_sum(const Decode& d, float top, float sum) {
  return sum == 0.0f ? -infinity() : top * rest_of(d) + logf(sum);
}

extern "C" __global__ void __launch_bounds__(128, 4) decode_attention(Decode d, Caches caches, const u8* q, u8* out, float* parts) {
  DYNAMIC_SHARED(float, shared);
  const int stride = d.dim | 1;
  float* const query_rows = shared;
  float* const key_rows = query_rows + GROUP * stride;
  float* const weights = key_rows + TILE_KEYS * stride;
  float* const norms = weights + GROUP * TILE_KEYS; // of each head: the largest score, the sum, what follows it
  const int group = d.heads / d.kv_heads, chunks = (group + GROUP - 1) / GROUP;
  const int text = blockIdx.z, kv_head = blockIdx.y / chunks, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int first_head = kv_head * group + (int)(blockIdx.y % chunks) * GROUP;
  const int heads = min(GROUP, (kv_head + 1) * group - first_head);
  const TextCache& cache = caches.of[text];
  const long long first = (long long)blockIdx.x * PART, end = min(first + PART, cache.tokens);
  if (first >= end && blockIdx.x > 0) return;
  const ELEMENT* const keys = (const ELEMENT*)cache.keys + kv_head * cache.key_head;
  const ELEMENT* const values = (const ELEMENT*)cache.values + kv_head * cache.value_head;
  const float sign = d.factor < 0.0f ? -1.0f : 1.0f;
  for (int head = warp; head < heads; head += THREADS / 32)
    for (int column = lane; column < d.dim; column += 32)
      query_rows[head * stride + column] =
          sign * read_as(q, d.kind, text * d.query_text + (first_head + head) * d.query_head + column);
  if (thread < GROUP) norms[3 * thread] = -infinity(), norms[3 * thread + 1] = 0.0f;
  float mixed[GROUP][2] = {};
  for (long long start = first; start < end; start += TILE_KEYS) {
    const int count = (int)min((long long)TILE_KEYS, end - start);
    __syncthreads();
    for (int key = warp; key < count; key += THREADS / 32)
      for (int column = lane; column < d.dim; column += 32)
        key_rows[key * stride + column] = wide(keys[(start + key) * cache.key_token + column]);
    __syncthreads();
    const int key = thread % TILE_KEYS;
    if (key < count)
      for (int head = thread / TILE_KEYS; head < heads; head += THREADS / TILE_KEYS) {
        float product = 0.0f;
        for (int column = 0; column < d.dim; column++) product += query_rows[head * stride + column] * key_rows[key * stride + column];
        weights[head * TILE_KEYS + key] = score_of(d, product);
      }
    __syncthreads();
    for (int head = warp; head < heads; head += THREADS / 32) {
      float* const of_head = weights + head * TILE_KEYS;
      float most = -infinity(), sum = 0.0f;
      for (int i = lane; i < count; i += 32) most = fmaxf(most, of_head[i]);
      const float before = norms[3 * head];
      most = fmaxf(before, warp_max(most));
      for (int i = lane; i < count; i += 32) {
        const float weight = expf((of_head[i] - most) * rest_of(d));
        of_head[i] = weight;
        sum += weight;
      }
      sum = warp_sum(sum);
      // Without scores so far there is nothing to follow.
      const float part = before == most ? 1.0f : before == -infinity() ? 0.0f : expf((before - most) * rest_of(d));
      __syncwarp();
      if (lane == 0) norms[3 * head] = most, norms[3 * head + 1] = norms[3 * head + 1] * part + sum, norms[3 * head + 2] = part;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int column = thread + THREADS * c;
      if (column >= d.width) break;
#pragma unroll
      for (int head = 0; head < GROUP; head++)
        if (head < heads) mixed[head][c] *= norms[3 * head + 2];
      for (int i = 0; i < count; i++) {
        const float x = wide(values[(start + i) * cache.value_token + column]);
#pragma unroll
        for (int head = 0; head < GROUP; head++)
          if (head < heads) mixed[head][c] += weights[head * TILE_KEYS + i] * x;
      }
    }
  }
  __syncthreads();
  const bool is_whole = cache.tokens <= PART;
  const int columns = d.width + (is_whole ? d.log_sums : 2);
#pragma unroll
  for (int head = 0; head < GROUP; head++) {
    if (head >= heads) break;
    const long long row = is_whole ? (long long)text * d.heads + first_head + head
                                   : ((long long)text * d.parts + blockIdx.x) * d.heads + first_head + head;
    const float top = norms[3 * head], sum = norms[3 * head + 1];
    const float norm = !is_whole ? 1.0f : sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int column = thread + THREADS * c;
      if (column >= d.width) break;
      if (is_whole) write_as(out, d.out_kind, row * columns + column, norm * mixed[head][c]);
      else parts[row * columns + column] = mixed[head][c];
    }
    if (thread) continue;
    if (!is_whole) parts[row * columns + d.width] = top, parts[row * columns + d.width + 1] = sum;
    else if (d.log_sums) write_as(out, d.out_kind, row * columns + d.width, log_sum(d, top, sum));
  }
}

// Joins the parts of the texts that have several. A block has a head of a text.
extern "C" __global__ void __launch_bounds__(128, 4) decode_joined(Decode d, Caches caches, const float* parts, u8* out) {
  const int head = blockIdx.x, text = blockIdx.y, of_part = d.width + 2, columns = d.width + d.log_sums;
  const long long tokens = caches.of[text].tokens;
  if (tokens <= PART) return;
  const int count = (int)((tokens + PART - 1) / PART);
  const float* const first = parts + ((long long)text * d.parts * d.heads + head) * of_part;
  const long long stride = (long long)d.heads * of_part, row = (long long)text * d.heads + head;
  float top = -infinity(), sum = 0.0f;
  for (int part = 0; part < count; part++) top = fmaxf(top, first[part * stride + d.width]);
  for (int part = 0; part < count; part++) {
    const float here = first[part * stride + d.width];
    sum += first[part * stride + d.width + 1] * (here == top ? 1.0f : expf((here - top) * rest_of(d)));
  }
  for (int column = threadIdx.x; column < d.width; column += blockDim.x) {
    float mixed = 0.0f;
    for (int part = 0; part < count; part++) {
      const float here = first[part * stride + d.width];
      mixed += first[part * stride + column] * (here == top ? 1.0f : expf((here - top) * rest_of(d)));
    }
    write_as(out, d.out_kind, row * columns + column, mixed / sum);
  }
  if (threadIdx.x == 0 && d.log_sums) write_as(out, d.out_kind, row * columns + d.width, log_sum(d, top, sum));
}
