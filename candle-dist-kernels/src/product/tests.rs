use super::{Matrix, is_faster, panels, product, product_with_weight, rounded_product};
use crate::element::Element;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Shape};
use half::{bf16, f16};

/// A matrix of this shape that begins at `start` and is stored by columns if `is_turned`.
fn matrix(rows: usize, columns: usize, start: usize, is_turned: bool) -> (CpuStorage, Layout) {
    let data = (0..rows * columns + start).map(|i| ((i * 37 + rows) % 101) as f32 * 0.13 - 5.0).collect();
    let stride = if is_turned { vec![1, rows] } else { vec![columns, 1] };
    (CpuStorage::F32(data), Layout::new(Shape::from((rows, columns)), stride, start))
}

fn wide(s: &CpuStorage) -> CpuStorage {
    CpuStorage::F64(s.as_slice::<f32>().unwrap().iter().map(|&x| f64::from(x)).collect())
}

#[test]
fn products_have_the_bits_of_candle() {
    let sizes = [1, 2, 3, 8, 17, 65, 130];
    for (m, k, n) in itertools::iproduct!(sizes, [1, 2, 3, 64, 300], sizes) {
        for (a_turned, b_turned, start) in itertools::iproduct!([false, true], [false, true], [0, 5]) {
            let ((a, a_l), (b, b_l)) = (matrix(m, k, start, a_turned), matrix(k, n, 2 * start, b_turned));
            for (a, b) in [(wide(&a), wide(&b)), (a, b)] {
                let got = product(&a, &a_l, &b, &b_l).unwrap();
                let want = a.matmul(&b, (1, m, n, k), &a_l, &b_l).unwrap();
                let same = match (&got, &want) {
                    (CpuStorage::F32(got), CpuStorage::F32(want)) => got == want,
                    (CpuStorage::F64(got), CpuStorage::F64(want)) => got == want,
                    _ => false,
                };
                assert!(same, "[{m}, {k}] {a_turned} and [{k}, {n}] {b_turned} from {start}");
            }
        }
    }
}

#[test]
fn a_matrix_outside_of_its_memory_is_an_error() {
    let ((a, a_l), (b, _)) = (matrix(3, 4, 0, false), matrix(4, 2, 0, false));
    let sixteen =
        |s: &CpuStorage| s.to_dtype(&Layout::contiguous(s.as_slice::<f32>().unwrap().len()), DType::BF16);
    for (a, b) in [(sixteen(&a).unwrap(), sixteen(&b).unwrap()), (a, b)] {
        for outside in [Layout::contiguous((4, 3)), Layout::new(Shape::from((4, 2)), vec![2, 1], 1)] {
            assert!(product(&a, &a_l, &b, &outside).is_err());
        }
        assert!(product(&a, &a_l, &b, &Layout::contiguous((2, 4))).is_err());
    }
}

/// A way to multiply 16-bit matrices, with a bound for the columns of a panel.
type Way<E, O> = fn(Matrix<'_, E>, Matrix<'_, E>, Option<usize>) -> candle_core::Result<Vec<O>>;

fn numbers<E: Element<Real = f32>>(s: &CpuStorage) -> Vec<E> {
    s.as_slice::<f32>().unwrap().iter().map(|&x| E::store(x)).collect()
}

fn check<E: Element<Real = f32>>(wide: Way<E, f32>, rounded: Way<E, E>) {
    let sizes = [1, 2, 7, 17, 40];
    for (m, k, n) in itertools::iproduct!(sizes, [1, 2, 5, 64, 301], sizes) {
        for (a_turned, b_turned, start) in itertools::iproduct!([false, true], [false, true], [0, 5]) {
            let ((a, a_l), (b, b_l)) = (matrix(m, k, start, a_turned), matrix(k, n, 2 * start, b_turned));
            let (a, b) = (numbers::<E>(&a), numbers::<E>(&b));
            let exact = |x: &[E]| CpuStorage::F64(x.iter().map(|x| f64::from(x.load())).collect());
            let want = product(&exact(&a), &a_l, &exact(&b), &b_l).unwrap();
            let (a, b) = (Matrix::of(&a, &a_l).unwrap(), Matrix::of(&b, &b_l).unwrap());
            for most in [None, Some(1), Some(3), Some(16)] {
                let what = format!("[{m}, {k}, {n}] {a_turned} {b_turned} {start} {most:?}");
                let got = wide(a, b, most).unwrap();
                let want = want.as_slice::<f64>().unwrap();
                assert_eq!(got.len(), want.len(), "{what}");
                for (&got, &want) in got.iter().zip(want) {
                    assert!((f64::from(got) - want).abs() <= 25e-6 * k as f64, "{what}: {got} for {want}");
                }
                let rounded = rounded(a, b, most).unwrap();
                assert!(rounded.iter().zip(&got).all(|(&rounded, &got)| rounded == E::store(got)), "{what}");
            }
        }
    }
    // Any strides.
    let data: Vec<E> = (0..400).map(|i| E::store((i % 13) as f32 - 6.0)).collect();
    let a = Matrix::new(&data, [5, 7], [40, 3]).unwrap();
    let b = Matrix::new(&data, [7, 6], [2, 50]).unwrap();
    for (i, got) in wide(a, b, None).unwrap().into_iter().enumerate() {
        let term = |k: usize| data[i / 6 * 40 + k * 3].load() * data[k * 2 + i % 6 * 50].load();
        assert_eq!(got, (0..7).map(term).sum::<f32>());
    }
}

/// Checks that what is not finite reaches its own row and column only.
fn check_not_finite<E: Element<Real = f32>>(wide: Way<E, f32>) {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut a = vec![E::store(1.0); 13 * 9];
        a[2 * 9 + 8] = E::store(bad);
        let b = vec![E::store(1.0); 9 * 33];
        let (a, b) = (Matrix::new(&a, [13, 9], [9, 1]).unwrap(), Matrix::new(&b, [9, 33], [33, 1]).unwrap());
        for (i, x) in wide(a, b, None).unwrap().into_iter().enumerate() {
            let want = if i / 33 == 2 { bad } else { 9.0 };
            assert!(x == want || x.is_nan() && want.is_nan(), "{i}: {x} for {want}");
        }
    }
}

#[test]
fn panels_of_16_bits_are_summed_in_f32() {
    check::<bf16>(panels::product, panels::product);
    check::<f16>(panels::product, panels::product);
    check_not_finite::<bf16>(panels::product);
    check_not_finite::<f16>(panels::product);
}

#[cfg(all(target_arch = "x86_64", feature = "avx512"))]
#[test]
fn pairs_of_bf16_are_summed_in_f32() {
    use super::pairs::Pairs;
    if Pairs::new().is_none() {
        return; // the processor has no such instruction
    }
    fn of<O: Element<Real = f32>>(
        a: Matrix<'_, bf16>,
        b: Matrix<'_, bf16>,
        most: Option<usize>,
    ) -> candle_core::Result<Vec<O>> {
        Pairs::new().unwrap().product(a, b, most)
    }
    check::<bf16>(of, of);
    check_not_finite::<bf16>(of);
}

#[test]
fn panels_of_the_usual_size_join_to_the_whole() {
    for (m, n) in [(3, 2500), (2500, 3), (1100, 1100)] {
        let ((a, a_l), (b, b_l)) = (matrix(m, 70, 0, false), matrix(70, n, 0, true));
        let (a, b) = (numbers::<bf16>(&a), numbers::<bf16>(&b));
        let wide = |x: &[bf16]| CpuStorage::F32(x.iter().map(|x| x.to_f32()).collect());
        let want = product(&wide(&a), &a_l, &wide(&b), &b_l).unwrap();
        let panels =
            panels::product(Matrix::of(&a, &a_l).unwrap(), Matrix::of(&b, &b_l).unwrap(), None).unwrap();
        let got = product(&CpuStorage::BF16(a), &a_l, &CpuStorage::BF16(b), &b_l).unwrap();
        for got in [got.as_slice::<f32>().unwrap(), &panels] {
            let pairs = got.iter().zip(want.as_slice::<f32>().unwrap());
            assert!(pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs())) < 1e-2, "[{m}, {n}]");
        }
    }
}

#[test]
fn products_with_a_weight_have_the_bits_of_each_row_alone() {
    let shapes = [(1, 3, 2), (33, 256, 48), (40, 300, 100), (65, 1030, 131), (320, 40, 7), (321, 40, 7)];
    // The last ones have rows that lie 2 KiB apart, as f32 and as f64.
    for (m, k, n) in shapes.into_iter().chain([(513, 512, 50), (768, 512, 5), (769, 512, 5)]) {
        let ((x, x_l), (weight, weight_l)) = (matrix(m, k, 5, false), matrix(n, k, 3, false));
        let turned = weight_l.transpose(0, 1).unwrap();
        for (x, weight) in [(wide(&x), wide(&weight)), (x, weight)] {
            let f64s = |s: &CpuStorage| {
                let wide = s.to_dtype(&Layout::contiguous(m * n), DType::F64).unwrap();
                wide.as_slice::<f64>().unwrap().to_vec()
            };
            let made = product_with_weight(&x, &x_l, &weight, &weight_l).unwrap();
            assert_eq!(made.dtype(), x.dtype());
            let (got, want) = (f64s(&made), f64s(&product(&x, &x_l, &weight, &turned).unwrap()));
            let most = if x.dtype() == DType::F64 { 1e-14 } else { 4e-6 } * k as f64;
            for (got, want) in got.iter().zip(&want) {
                assert!((got - want).abs() <= most * 25.0, "[{m}, {k}, {n}]: {got} for {want}");
            }
            if if x.dtype() == DType::F64 { is_faster::<f64>(m, k) } else { is_faster::<f32>(m, k) } {
                let last = Layout::new(Shape::from((1, k)), vec![k, 1], 5 + (m - 1) * k);
                let alone = product_with_weight(&x, &last, &weight, &weight_l).unwrap();
                let alone = alone.to_dtype(&Layout::contiguous(n), DType::F64).unwrap();
                assert_eq!(alone.as_slice::<f64>().unwrap(), &got[(m - 1) * n..], "[{m}, {k}, {n}]");
            }
        }
    }
}

#[test]
fn empty_products_have_the_dtype_of_a_full_one() {
    for (m, k, n) in [(0, 2, 3), (2, 0, 3), (2, 3, 0)] {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let ones = |len: usize| {
                CpuStorage::F32(vec![1.0; len]).to_dtype(&Layout::contiguous(len), dtype).unwrap()
            };
            let (a, b) = (ones(m * k), ones(k * n));
            let (a_l, b_l) = (Layout::contiguous((m, k)), Layout::contiguous((k, n)));
            let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
            assert_eq!(product(&a, &a_l, &b, &b_l).unwrap().dtype(), wide);
            let rounded = rounded_product(&a, &a_l, &b, &b_l).unwrap();
            assert_eq!(rounded.dtype(), dtype);
            let rounded = rounded.to_dtype(&Layout::contiguous(m * n), DType::F32).unwrap();
            assert_eq!(rounded.as_slice::<f32>().unwrap(), vec![0.0; m * n]);
        }
    }
}
