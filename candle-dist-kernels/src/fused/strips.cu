// Strips: runs of equal length at equal distances, copied from many tensors to many in one launch. A block has a part of one strip.

#define STRIPS 64
#define WORDS 4096

// What the words of a strip are: so many bytes, or 16-bit floats that become wide.
#define WIDENS_F16 32
#define WIDENS_BF16 33

struct Strips {
  // The first runs.
  const void* from[STRIPS];
  void* to[STRIPS];
  // In words: all that are copied, the length of a run, and the distances of runs.
  u64 count[STRIPS], len[STRIPS], from_step[STRIPS], to_step[STRIPS];
  // The block that begins each strip, in their order, and its words.
  u32 start[STRIPS], words[STRIPS];
  // `unused` ends it at a multiple of 8 bytes.
  u32 strips, unused;
};

struct Same {
  template <typename T> __device__ __forceinline__ T operator()(T word) const { return word; }
};
struct Widened {
  template <typename T> __device__ __forceinline__ float operator()(T x) const { return wide(x); }
};

template <typename From, typename To, typename Turn>
__device__ __forceinline__ void copy(const Strips& all, u32 strip, Turn turn) {
  const From* from = (const From*)all.from[strip];
  To* to = (To*)all.to[strip];
  const u64 begin = (u64)(blockIdx.x - all.start[strip]) * WORDS, left = all.count[strip] - begin;
  const u64 len = all.len[strip], from_step = all.from_step[strip], to_step = all.to_step[strip];
  const u64 row = begin / len, rest = begin % len;
  const u32 words = left < WORDS ? (u32)left : WORDS;
  for (u32 i = threadIdx.x; i < words; i += blockDim.x) {
    const u64 at = rest + i;
    // Quotients of 32 bits are fast. Of longer runs, a part has at most one end.
    const u64 runs = len < (1u << 31) ? (u32)at / (u32)len : at >= len;
    const u64 column = at - runs * len;
    to[(row + runs) * to_step + column] = turn(from[(row + runs) * from_step + column]);
  }
}

extern "C" __global__ void copy_strips(const Strips all) {
  u32 strip = 0;
  while (strip + 1 < all.strips && all.start[strip + 1] <= blockIdx.x) strip++;
  switch (all.words[strip]) {
    case 1: return copy<u8, u8>(all, strip, Same());
    case 2: return copy<unsigned short, unsigned short>(all, strip, Same());
    case 4: return copy<u32, u32>(all, strip, Same());
    case 8: return copy<u64, u64>(all, strip, Same());
    case 16: return copy<uint4, uint4>(all, strip, Same());
    case WIDENS_F16: return copy<f16, float>(all, strip, Widened());
    case WIDENS_BF16: return copy<bf16, float>(all, strip, Widened());
  }
}
