// Dropout: each number with the number that the host's mask has there. It stands behind words.cu.

template <typename T, typename R> struct Dropped {
  const T* x;
  T* y;
  R p, factor;
  __device__ void operator()(u64 i, const word* words) const { set(y[i], get(x[i]) * (even(words, R()) < p ? factor : R(0))); }
};

// An element is kept with probability p. A part of a tensor has up to four dims; see words.cu.
#define KERNEL(DTYPE, T, R, WORDS)                                                                                                         \
  extern "C" __global__ void dropout_##DTYPE(const T* x, T* y, u64 count, u64 base, u64 rank, u64 a, u64 b, u64 c, u64 d, u64 e, u64 f,       \
                                             u64 g, u64 h, u64 seed, u64 stream, u64 first, R p, R factor) {                               \
    const u64 dims[8] = {a, b, c, d, e, f, g, h};                                                                                          \
    for_words<WORDS>(count, base, rank, dims, seed, stream, first, Dropped<T, R>{x, y, p, factor});                                        \
  }

KERNEL(f16, f16, float, 1)
KERNEL(bf16, bf16, float, 1)
KERNEL(f32, float, float, 1)
KERNEL(f64, double, double, 2)
