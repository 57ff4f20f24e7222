// Random words on a CUDA device, bit for bit those of the host, and even numbers of them: random.rs says what they are.

typedef unsigned int word;
typedef unsigned long long count64;

// One block of ChaCha with 8 rounds: the seed is the key, the stream is the nonce.
__device__ word turn_left(word x, int bits) { return (x << bits) | (x >> (32 - bits)); }

__device__ void quarter_round(word* x, int a, int b, int c, int d) {
  x[a] += x[b], x[d] = turn_left(x[d] ^ x[a], 16);
  x[c] += x[d], x[b] = turn_left(x[b] ^ x[c], 12);
  x[a] += x[b], x[d] = turn_left(x[d] ^ x[a], 8);
  x[c] += x[d], x[b] = turn_left(x[b] ^ x[c], 7);
}

__device__ void chacha8(count64 seed, count64 stream, count64 counter, word* out) {
  const word start[16] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u, (word)seed, (word)(seed >> 32), 0, 0,
                          0, 0, 0, 0, (word)counter, (word)(counter >> 32), (word)stream, (word)(stream >> 32)};
  for (int i = 0; i < 16; i++) out[i] = start[i];
  for (int pair = 0; pair < 4; pair++) {
    for (int i = 0; i < 4; i++) quarter_round(out, i, 4 + i, 8 + i, 12 + i);
    for (int i = 0; i < 4; i++) quarter_round(out, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4);
  }
  for (int i = 0; i < 16; i++) out[i] += start[i];
}

// Even numbers on [0, 1).
__device__ float even(const word* x, float) { return (float)(x[0] >> 8) * (1.0f / 16777216.0f); }

__device__ double even(const word* x, double) {
  return (double)((((count64)x[1] << 32) | x[0]) >> 11) * (1.0 / 9007199254740992.0);
}

// Calls `each(i, words)` for the elements of a part of a tensor with numbers `i` from 0 to `count`, and their random words. The part begins at
// element `base` of the tensor; `dims` holds the sizes of its `rank` dims, then their strides in the tensor. An element takes WORDS words. A
// thread has as many neighbors as one block of words has, so a row of neighbors needs two blocks at most.
template <int WORDS, typename Each>
__device__ void for_words(count64 count, count64 base, count64 rank, const count64* dims, count64 seed, count64 stream, count64 first,
                          Each each) {
  const count64 in_block = 16 / WORDS;
  const count64 begin = ((count64)blockIdx.x * blockDim.x + threadIdx.x) * in_block;
  word words[16];
  count64 held = 0;
  bool holds = false;
  for (count64 i = begin; i < count && i < begin + in_block; i++) {
    count64 at = base, rest = i;
    for (count64 dim = rank; dim-- > 1;) {
      at += rest % dims[dim] * dims[rank + dim];
      rest /= dims[dim];
    }
    at += rest * dims[rank];
    // `first + at` may have more than 64 bits; its number of whole blocks does not.
    const count64 inside = first % in_block + at % in_block;
    const count64 counter = first / in_block + at / in_block + inside / in_block;
    if (!holds || counter != held) chacha8(seed, stream, counter, words);
    holds = true;
    held = counter;
    each(i, words + inside % in_block * WORDS);
  }
}
