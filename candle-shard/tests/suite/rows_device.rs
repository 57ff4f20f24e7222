//! The kernels that read and write rows of tables on CUDA devices. Their text is run on the host, so all but NVIDIA's compiler
//! and the launch is covered without a GPU. The tests of lookups and row gradients launch them on simulated GPUs.
use candle_dist_kernels::parts::{NOWHERE, ROWS_SOURCE, RowsLaunch};
use device_text::{DeviceText, LaunchShape, PlainNumber, TextArgument};
use proptest::prelude::*;

/// Rows of tables whose elements are 1, 2 and so on. Values are 1001, 1002 and so on.
fn check(program: &DeviceText, dtype: &str, rows: &[u32], height: usize, width: usize, launch: RowsLaunch) {
    match dtype {
        "f64" => check_as::<u64>(program, dtype, rows, [height, width], launch, |x| x),
        "f32" => check_as::<u32>(program, dtype, rows, [height, width], launch, |x| x as u32),
        _ => check_as::<u16>(program, dtype, rows, [height, width], launch, |x| x as u16),
    }
}

/// The same for elements that are whole numbers of the size of the dtype.
fn check_as<T: PlainNumber + PartialEq + std::fmt::Debug>(
    program: &DeviceText,
    dtype: &str,
    rows: &[u32],
    [height, width]: [usize; 2],
    launch: RowsLaunch,
    of: fn(u64) -> T,
) {
    let table: Vec<T> = (1..).take(height * width).map(of).collect();
    let values: Vec<T> = (1001..).take(rows.len() * width).map(of).collect();
    let RowsLaunch { block: [x, y], blocks } = launch;
    let run = |name: &str, arguments: &mut [TextArgument<'_>]| {
        let shape = LaunchShape { grid: [blocks, 1, 1], block: [x, y, 1], shared: 0 };
        let done = program.run(&format!("{name}_{dtype}"), shape, arguments);
        done.unwrap_or_else(|fault| panic!("{fault}"));
    };
    let sizes = || [rows.len(), width].map(|n| TextArgument::value(n as u64)).into_iter();
    let row_of = |row: u32| (0..width).map(move |column| (row as usize, column));
    let element = |(row, column)| if row == NOWHERE as usize { of(7) } else { table[row * width + column] };
    let want: Vec<T> = rows.iter().flat_map(|&row| row_of(row)).map(element).collect();
    let mut out = vec![of(99); want.len()];
    let list = [TextArgument::read(rows), TextArgument::read(&table), TextArgument::written(&mut out)];
    run("take_rows", &mut sizes().chain(list).chain([TextArgument::value(of(7))]).collect::<Vec<_>>());
    assert_eq!(out, want, "{dtype}, rows {rows:?} of [{height}, {width}], {launch:?}");
    if rows.contains(&NOWHERE) || (1..rows.len()).any(|at| rows[..at].contains(&rows[at])) {
        return; // such rows are only read
    }
    let (mut after, mut written) = (table.clone(), table.clone());
    for ((row, column), &value) in rows.iter().flat_map(|&row| row_of(row)).zip(&values) {
        after[row * width + column] = value;
    }
    let list = [TextArgument::read(rows), TextArgument::read(&values), TextArgument::written(&mut written)];
    run("put_rows", &mut sizes().chain(list).collect::<Vec<_>>());
    assert_eq!(written, after, "{dtype}, rows {rows:?} of [{height}, {width}], {launch:?}");
}

const DTYPES: [&str; 4] = ["f16", "bf16", "f32", "f64"];

#[test]
fn the_kernels_take_and_put_rows() {
    let Some(program) = DeviceText::for_test(ROWS_SOURCE) else { return };
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
    let Some(program) = DeviceText::for_test(ROWS_SOURCE) else { return };
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
