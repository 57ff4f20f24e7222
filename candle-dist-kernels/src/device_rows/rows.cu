// Rows of a table [.., width]. A block of threads has `blockDim.y` rows at a time, and `blockDim.x` threads for the columns of
// each: nothing is divided, and neighbors read neighbors. Places are counted in 64 bits, so tables may be of any size.

typedef unsigned short half_bits;
typedef unsigned int word;
typedef unsigned long long wide;

// The row of no place in the table.
__device__ bool is_nowhere(word row) { return row == 0xffffffffu; }

template <typename Move> __device__ void each_element(wide count, wide width, const word* rows, Move move) {
  for (wide at = (wide)blockIdx.x * blockDim.y + threadIdx.y; at < count; at += (wide)gridDim.x * blockDim.y) {
    const word row = rows[at];
    for (wide column = threadIdx.x; column < width; column += blockDim.x)
      move(at * width + column, row, (wide)row * width + column);
  }
}

// out[at] = table[rows[at]], or `fill` for a row of no place.
template <typename T> struct Take {
  const T* table;
  T* out;
  T fill;
  __device__ void operator()(wide here, word row, wide there) const { out[here] = is_nowhere(row) ? fill : table[there]; }
};

// table[rows[at]] = values[at]. The rows are distinct.
template <typename T> struct Put {
  const T* values;
  T* table;
  __device__ void operator()(wide here, word, wide there) const { table[there] = values[here]; }
};

#define KERNELS(DTYPE, T)                                                                                            \
  extern "C" __global__ void take_rows_##DTYPE(wide count, wide width, const word* rows, const T* table, T* out,     \
                                               T fill) {                                                             \
    each_element(count, width, rows, Take<T>{table, out, fill});                                                     \
  }                                                                                                                  \
  extern "C" __global__ void put_rows_##DTYPE(wide count, wide width, const word* rows, const T* values, T* table) { \
    each_element(count, width, rows, Put<T>{values, table});                                                         \
  }

KERNELS(f16, half_bits)
KERNELS(bf16, half_bits)
KERNELS(f32, word)
KERNELS(f64, wide)
