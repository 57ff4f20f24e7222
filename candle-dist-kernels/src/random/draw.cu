// Random numbers on a CUDA device, bit for bit those of the host: random.rs says what they are.
//
// Additions and products must be rounded one by one, so this text is compiled without fused multiply-add. Logarithm and
// cosine are those of the crate libm on the few numbers that occur: (0, 1] and [0, 2 pi]. There they consist of operations
// that IEEE 754 rounds alike everywhere. A test compiles the same text for the host and compares all of it with the host's.
// It stands behind words.cu.

typedef count64 wide;

// The logarithm of x on (0, 1]: x = 2^k (1 + f) with 1 + f near 1, and s = f / (2 + f).
__device__ float logarithm(float x) {
  const word bits = __float_as_uint(x) + (0x3f800000u - 0x3f3504f3u);
  const float k = (float)((int)(bits >> 23) - 127);
  const float f = __uint_as_float((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
  const float s = f / (2.0f + f), z = s * s, w = z * z, half = 0.5f * f * f;
  const float odd = z * (__uint_as_float(0x3f2aaaaau) + w * __uint_as_float(0x3e91e9eeu));
  const float rest = odd + w * (__uint_as_float(0x3eccce13u) + w * __uint_as_float(0x3e789e26u));
  const float high = __uint_as_float(0x3f317180u), low = __uint_as_float(0x3717f7d1u);
  return s * (half + rest) + k * low - half + f + k * high;
}

__device__ double from_bits(wide bits) { return __longlong_as_double((long long)bits); }

__device__ double logarithm(double x) {
  const wide bits = (wide)__double_as_longlong(x);
  const word top = (word)(bits >> 32) + (0x3ff00000u - 0x3fe6a09eu);
  const double k = (double)((int)(top >> 20) - 1023);
  const double f = from_bits(((wide)((top & 0xfffffu) + 0x3fe6a09eu) << 32) | (bits & 0xffffffffull)) - 1.0;
  const double half = 0.5 * f * f, s = f / (2.0 + f), z = s * s, w = z * z;
  const double even_terms = w * (from_bits(0x3fd999999997fa04ull) +
                                 w * (from_bits(0x3fcc71c51d8e78afull) + w * from_bits(0x3fc39a09d078c69full)));
  const double odd_terms = z * (from_bits(0x3fe5555555555593ull) +
                                w * (from_bits(0x3fd2492494229359ull) +
                                     w * (from_bits(0x3fc7466496cb03deull) + w * from_bits(0x3fc2f112df3e5244ull))));
  const double rest = odd_terms + even_terms;
  const double high = from_bits(0x3fe62e42fee00000ull), low = from_bits(0x3dea39ef35793c76ull);
  return s * (half + rest) + k * low - half + f + k * high;
}

// Cosine and sine of a small x, in double precision and rounded once.
__device__ float small_cosine(double x) {
  const double z = x * x, w = z * z, tail = -0.00138867637746099294692 + z * 0.0000243904487962774090654;
  return (float)(((1.0 + z * -0.499999997251031003120) + w * 0.0416666233237390631894) + (w * z) * tail);
}

__device__ float small_sine(double x) {
  const double z = x * x, w = z * z, cube = z * x;
  const double tail = -0.000198393348360966317347 + z * 0.0000027183114939898219064;
  return (float)((x + cube * (-0.166666666416265235595 + z * 0.0083333293858894631756)) + cube * w * tail);
}

// The cosine of x on [0, 2 pi], by the nearest multiple of pi/2.
__device__ float cosine(float x) {
  const double quarter = 1.57079632679489661923;
  const word bits = __float_as_uint(x);
  if (bits <= 0x3f490fdau) return small_cosine(x);
  if (bits <= 0x4016cbe3u) return small_sine(quarter - x);
  if (bits <= 0x407b53d1u) return -small_cosine(x - 2.0 * quarter);
  if (bits <= 0x40afeddfu) return small_sine(x - 3.0 * quarter);
  return small_cosine(x - 4.0 * quarter);
}

// Cosine and sine of x + y, where y is what x lacks.
__device__ double small_cosine(double x, double y) {
  const double z = x * x, w = z * z;
  const double near = z * (from_bits(0x3fa555555555554cull) +
                           z * (from_bits(0xbf56c16c16c15177ull) + z * from_bits(0x3efa01a019cb1590ull)));
  const double far = w * w * (from_bits(0xbe927e4f809c52adull) +
                              z * (from_bits(0x3e21ee9ebdb4b1c4ull) + z * from_bits(0xbda8fae9be8838d4ull)));
  const double tail = near + far, half = 0.5 * z, most = 1.0 - half;
  return most + (((1.0 - most) - half) + (z * tail - x * y));
}

__device__ double small_sine(double x, double y) {
  const double z = x * x, w = z * z, cube = z * x;
  const double near = from_bits(0x3f8111111110f8a6ull) +
                      z * (from_bits(0xbf2a01a019c161d5ull) + z * from_bits(0x3ec71de357b1fe7dull));
  const double tail = near + z * w * (from_bits(0xbe5ae5e68a2b9cebull) + z * from_bits(0x3de5d93a5acfd57cull));
  return x - ((z * (0.5 * y - cube * tail) - y) - cube * from_bits(0xbfc5555555555549ull));
}

__device__ int exponent(double x) { return (int)(((wide)__double_as_longlong(x) >> 52) & 0x7ff); }

__device__ double cosine(double x) {
  const word top = (word)((wide)__double_as_longlong(x) >> 32);
  if (top <= 0x3fe921fbu) return small_cosine(x, 0.0);
  const int n = top <= 0x4002d97cu ? 1 : top <= 0x400f6a7au ? 2 : top <= 0x4015fdbcu ? 3 : 4;
  // pi/2 in three parts of 33 bits, and what each leaves out.
  const double part[3] = {from_bits(0x3ff921fb54400000ull), from_bits(0x3dd0b4611a600000ull), from_bits(0x3ba3198a2e000000ull)};
  const double left[3] = {from_bits(0x3dd0b4611a626331ull), from_bits(0x3ba3198a2e037073ull), from_bits(0x397b839a252049c1ull)};
  // Next to a multiple of pi/2 the difference has few digits, so more parts are taken off.
  const bool near = top == 0x3ff921fbu || top == 0x400921fbu || top == 0x4012d97cu || top == 0x401921fbu;
  const int lost[2] = {16, 49};
  double rest = x - n * part[0], off = n * left[0], high = rest - off;
  for (int i = 0; near && i < 2 && exponent(x) - exponent(high) > lost[i]; i++) {
    const double before = rest;
    off = n * part[i + 1];
    rest = before - off;
    off = n * left[i + 1] - ((before - rest) - off);
    high = rest - off;
  }
  const double low = (rest - high) - off;
  if (n == 1) return -small_sine(high, low);
  if (n == 2) return -small_cosine(high, low);
  if (n == 3) return small_sine(high, low);
  return small_cosine(high, low);
}

__device__ float root(float x) { return sqrtf(x); }
__device__ double root(double x) { return sqrt(x); }

// Normal numbers by the transform of Box and Muller.
__device__ float normal(const word* x, float) {
  const double radius = ((double)x[0] + 1.0) / 4294967296.0;
  const float angle = 6.28318530717958647692f * even(x + 1, 0.0f);
  return root(-2.0f * logarithm((float)radius)) * cosine(angle);
}

__device__ double normal(const word* x, double) {
  const double radius = 1.0 - even(x, 0.0);
  const double angle = 6.28318530717958647692 * even(x + 2, 0.0);
  return root(-2.0 * logarithm(radius)) * cosine(angle);
}

template <typename T> struct Uniform {
  T lo, span;
  __device__ T operator()(const word* x) const { return lo + span * even(x, T()); }
};
template <typename T> struct Normal {
  T mean, stdev;
  __device__ T operator()(const word* x) const { return mean + stdev * normal(x, T()); }
};
template <typename T> struct Bernoulli {
  T p, unused;
  __device__ T operator()(const word* x) const { return even(x, T()) < p ? T(1) : T(0); }
};

template <typename T, typename Draw> struct Drawn {
  T* out;
  Draw draw;
  __device__ void operator()(wide i, const word* words) const { out[i] = draw(words); }
};

#define KERNEL(NAME, DRAW, WORDS, T)                                                                                  \
  extern "C" __global__ void NAME(wide count, wide base, wide rank, const wide* dims, T* out, wide seed,         \
                                  wide stream, wide first, T a, T b) {                                              \
    for_words<WORDS>(count, base, rank, dims, seed, stream, first, Drawn<T, DRAW<T>>{out, DRAW<T>{a, b}});            \
  }

KERNEL(draw_uniform_f32, Uniform, 1, float)
KERNEL(draw_uniform_f64, Uniform, 2, double)
KERNEL(draw_normal_f32, Normal, 2, float)
KERNEL(draw_normal_f64, Normal, 4, double)
KERNEL(draw_bernoulli_f32, Bernoulli, 1, float)
KERNEL(draw_bernoulli_f64, Bernoulli, 2, double)
