//! The kernels that read and write rows of tables on CUDA devices. Their text is compiled as C++ and run here, so all but NVIDIA's
//! compiler and the launch is covered without a GPU. The tests of lookups and row gradients launch them on simulated GPUs.
use crate::device_program::Program;
use candle_dist_kernels::parts::{NOWHERE, ROWS_SOURCE, RowsLaunch};
use proptest::prelude::*;
use std::fmt::Write as _;

/// A program that reads a launch, rows, a table and values, all as whole numbers, and answers with what `take_rows` returns
/// and then with the table after `put_rows`, in bytes of the type's size.
const MAIN: &str = r#"
template <typename T> std::vector<T> numbers(size_t count) {
  std::vector<T> all(count);
  unsigned long long x;
  for (T& to : all) if (scanf("%llu", &x) == 1) to = (T)x;
  return all;
}

template <typename Kernel> void launch(unsigned x, unsigned y, unsigned blocks, Kernel kernel) {
  blockDim.x = x, blockDim.y = y, gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
    for (threadIdx.y = 0; threadIdx.y < y; threadIdx.y++)
      for (threadIdx.x = 0; threadIdx.x < x; threadIdx.x++) kernel();
}

#define RUN(DTYPE, T)                                                                                       \
  if (is == #DTYPE) {                                                                                       \
    const auto rows = numbers<word>(count);                                                                 \
    auto table = numbers<T>(height * width);                                                                \
    const auto values = numbers<T>(count * width);                                                          \
    std::vector<T> out(count * width, T(99));                                                               \
    launch(x, y, blocks, [&] { take_rows_##DTYPE(count, width, rows.data(), table.data(), out.data(), T(7)); }); \
    fwrite(out.data(), sizeof(T), out.size(), stdout);                                                      \
    if (puts_too)                                                                                           \
      launch(x, y, blocks, [&] { put_rows_##DTYPE(count, width, rows.data(), values.data(), table.data()); }); \
    fwrite(table.data(), sizeof(T), table.size(), stdout);                                                  \
  }

int main() {
  char name[64];
  wide count, width, height;
  unsigned x, y, blocks, puts_too;
  if (scanf("%63s %llu %llu %llu %u %u %u %u", name, &count, &width, &height, &x, &y, &blocks, &puts_too) != 8) return 2;
  const std::string is = name;
  RUN(f16, half_bits) RUN(bf16, half_bits) RUN(f32, word) RUN(f64, wide)
}
"#;

/// Rows of tables whose elements are 1, 2 and so on. Values are 1001, 1002 and so on.
fn check(program: &Program, dtype: &str, rows: &[u32], height: usize, width: usize, launch: RowsLaunch) {
    let is_put = !rows.contains(&NOWHERE);
    let table: Vec<u64> = (1..=height * width).map(|x| x as u64).collect();
    let values: Vec<u64> = (1001..).take(rows.len() * width).collect();
    let RowsLaunch { block: [x, y], blocks } = launch;
    let mut input =
        format!("{dtype} {} {width} {height} {x} {y} {blocks} {}\n", rows.len(), u8::from(is_put));
    let numbers = rows.iter().map(|&row| u64::from(row)).chain(table.clone()).chain(values.clone());
    numbers.for_each(|number| write!(input, "{number} ").unwrap());

    let row_of = |row: u32| (0..width).map(move |column| (row as usize, column));
    let element = |(row, column)| if row == NOWHERE as usize { 7 } else { table[row * width + column] };
    let mut want: Vec<u64> = rows.iter().flat_map(|&row| row_of(row)).map(element).collect();
    let mut after = table.clone();
    if is_put {
        rows.iter().flat_map(|&row| row_of(row)).zip(&values).for_each(|((row, column), &value)| {
            after[row * width + column] = value;
        });
    }
    want.extend(after);
    let size = match dtype {
        "f64" => 8,
        "f32" => 4,
        _ => 2,
    };
    let got: Vec<u64> = program.answer(&input).chunks(size).map(number).collect();
    assert_eq!(got, want, "{dtype}, rows {rows:?} of [{height}, {width}], {launch:?}");
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

const DTYPES: [&str; 4] = ["f16", "bf16", "f32", "f64"];

#[test]
fn the_kernels_take_and_put_rows() {
    let Some(program) = Program::compiled(ROWS_SOURCE, MAIN) else { return };
    let all = |rows: &[u32], height: usize, width: usize| {
        DTYPES.iter().for_each(|dtype| {
            check(&program, dtype, rows, height, width, RowsLaunch::over(rows.len(), width));
        });
    };
    all(&[2, 0, 4], 5, 3);
    all(&[NOWHERE, 1, 1, NOWHERE], 2, 1); // repeated rows are only read
    all(&[0], 1, 500); // more columns than threads
    all(&(0..300).rev().collect::<Vec<_>>(), 300, 3);
    // Fewer blocks than rows: each has some in turn.
    check(
        &program,
        "f32",
        &(0..300).rev().collect::<Vec<_>>(),
        300,
        3,
        RowsLaunch { block: [4, 2], blocks: 3 },
    );
}

#[test]
fn the_kernels_take_and_put_any_rows() {
    let Some(program) = Program::compiled(ROWS_SOURCE, MAIN) else { return };
    let rows = Just((0..70u32).collect::<Vec<_>>()).prop_shuffle();
    let cases = (prop::sample::select(&DTYPES), rows, 1..70usize, 1..200usize, any::<bool>());
    let config = ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |((dtype, mut rows, count, width, has_gap) in cases)| {
        rows.truncate(count);
        if has_gap {
            rows[count / 2] = NOWHERE;
        }
        check(&program, dtype, &rows, 70, width, RowsLaunch::over(count, width));
    });
}

#[test]
fn a_launch_covers_all_rows_with_full_blocks() {
    for (rows, width) in [(1, 1), (20_000, 16), (8192, 4096), (3, 100), (usize::MAX, 1)] {
        let RowsLaunch { block: [x, y], blocks } = RowsLaunch::over(rows, width);
        assert_eq!((x * y) as usize, RowsLaunch::THREADS, "{rows} rows of {width}");
        assert!((1..=i32::MAX as u32).contains(&blocks));
        assert!(blocks as usize * y as usize >= rows || blocks == i32::MAX as u32);
    }
}
