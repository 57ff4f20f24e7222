#![allow(clippy::unwrap_used)] // a panic is how a test fails

use super::format::tests::ALL;
use super::inputs;
use super::tiles::{Processor, Tiles};
use crate::{QuantizedMatrix, dequantized_linear, quantized_linear};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor, Var};

const CPU: Device = Device::Cpu;

/// Numbers that repeat nowhere.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + seed * 13) as f32 * 0.731).sin() * (1.0 + (i % 5) as f32)).collect()
}

fn quantized(rows: usize, columns: usize, dtype: GgmlDType) -> QTensor {
    let values = Tensor::from_vec(numbers(rows * columns, 1), (rows, columns), &CPU).unwrap();
    QTensor::quantize(&values, dtype).unwrap()
}

fn product(processor: Processor, weight: &Tiles, x: &[f32], m: usize) -> Vec<f32> {
    let mut out = vec![0.0; m * weight.rows];
    weight.product(processor, &inputs::round(x), m, &mut out, 0);
    out
}

/// Codes and scales of every value, whatever a quantizer would choose.
fn any_bytes(rows: usize, columns: usize, dtype: GgmlDType) -> Vec<u8> {
    let count = rows * columns / dtype.block_size();
    let mut bytes: Vec<u8> = (0..count * dtype.type_size())
        .map(|i| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0])
        .collect();
    // All scales of blocks are finite: exponents of f16 below 16.
    let scales: &[usize] = match dtype {
        GgmlDType::Q4_0 | GgmlDType::Q5_0 | GgmlDType::Q8_0 => &[1],
        GgmlDType::Q4_1 | GgmlDType::Q5_1 | GgmlDType::Q4K | GgmlDType::Q5K => &[1, 3],
        GgmlDType::Q2K => &[81, 83],
        GgmlDType::Q3K => &[109],
        _ => &[209],
    };
    for block in bytes.chunks_exact_mut(dtype.type_size()) {
        scales.iter().for_each(|&at| block[at] &= 0xbf);
    }
    bytes
}

#[test]
fn tiles_stand_for_the_floats_of_the_blocks() {
    for dtype in ALL {
        for (rows, columns) in [(1, 256), (16, 512), (19, 768)] {
            let weight = quantized(rows, columns, dtype);
            let want = weight.dequantize(&CPU).unwrap().to_vec2::<f32>().unwrap();
            let matrix = QuantizedMatrix::new(weight).unwrap();
            assert_eq!(matrix.dequantize().unwrap().to_vec2::<f32>().unwrap(), want, "{dtype:?}");
            assert_eq!((matrix.dims(), matrix.dtype()), ([rows, columns], Some(dtype)));
            let last = matrix.rows(&[rows as u32 - 1, 0]).unwrap();
            assert_eq!(last, [&want[rows - 1][..], &want[0]].concat(), "{dtype:?}");
            assert!(matrix.rows(&[rows as u32]).unwrap_err().to_string().contains("outside"));
        }
    }
}

#[test]
fn products_are_those_of_rounded_inputs_with_the_floats_of_the_blocks() {
    for dtype in ALL {
        for (rows, blocks, m) in
            [(1, 1, 1), (15, 3, 2), (16, 2, 3), (33, 5, 4), (7, 1, 5), (64, 2, 8), (20, 3, 17), (5, 2, 70)]
        {
            let columns = blocks * dtype.block_size();
            let bytes = any_bytes(rows, columns, dtype);
            let weight = Tiles::new(dtype, [rows, columns], &bytes).unwrap();
            let mut dense = vec![0.0; rows * columns];
            for (row, dense) in dense.chunks_exact_mut(columns).enumerate() {
                weight.dequantize_row(row, dense);
            }
            let x = numbers(m * columns, m);
            let rounded: Vec<f64> = inputs::round(&x)
                .iter()
                .flat_map(|block| {
                    block.words.into_iter().flat_map(move |word| word.to_le_bytes().map(|q| (q, block.scale)))
                })
                .map(|(q, scale)| f64::from(q.cast_signed()) * f64::from(scale))
                .collect();
            let got: Vec<Vec<f32>> =
                Processor::all().map(|processor| product(processor, &weight, &x, m)).collect();
            for (i, got) in got[0].iter().enumerate() {
                let (x, w) =
                    (&rounded[i / rows * columns..][..columns], &dense[i % rows * columns..][..columns]);
                let terms = || x.iter().zip(w).map(|(x, &w)| x * f64::from(w));
                let (want, size): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
                assert!(
                    (f64::from(*got) - want).abs() <= 2e-6 * size,
                    "{dtype:?} {rows} {m}: {got} for {want}"
                );
            }
            // All instructions give the same bits.
            assert!(got.iter().all(|of_one| *of_one == got[0]), "{dtype:?}, {rows} rows, {m} inputs");
        }
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        assert!(Processor::all().count() >= 2);
    }
}

#[test]
fn all_instructions_make_the_same_floats() {
    for dtype in ALL {
        let (rows, columns) = (45, 2 * 256);
        let weight = Tiles::new(dtype, [rows, columns], &any_bytes(rows, columns, dtype)).unwrap();
        let mut want = vec![0.0; rows * columns];
        want.chunks_exact_mut(columns).enumerate().for_each(|(row, want)| weight.dequantize_row(row, want));
        assert_eq!(weight.dequantize(), want, "{dtype:?}");
        // Of the last two rows of tiles, some columns, with room between them.
        let (tiles, stride) = (3..13, 40);
        for processor in Processor::all() {
            let mut floats = vec![f32::NAN; 10 * 32 * stride];
            weight.floats(processor, [1..3, tiles.clone()], &mut floats, stride);
            for (column, floats) in (3 * 32..).zip(floats.chunks_exact(stride)) {
                for (row, &float) in (16..rows).zip(floats) {
                    assert_eq!(float, want[row * columns + column], "{dtype:?}, {processor:?}");
                }
            }
        }
    }
}

#[test]
fn products_with_floats_and_their_gradients_round_nothing_else() {
    let cases = [(1, 1, 1), (17, 33, 2), (300, 600, 1), (300, 65, 5), (33, 40, 70), (530, 290, 3)];
    for (dtype, (rows, least, m)) in ALL.into_iter().flat_map(|dtype| cases.map(|case| (dtype, case))) {
        let columns = usize::next_multiple_of(least, dtype.block_size());
        let weight = quantized(rows, columns, dtype);
        let dense = weight.dequantize(&CPU).unwrap().to_dtype(DType::F64).unwrap();
        let weight = QuantizedMatrix::new(weight).unwrap();
        let x = Tensor::from_vec(numbers(m * columns, 3), (m, columns), &CPU).unwrap();
        let x = Var::from_tensor(&x).unwrap();
        let probe = Tensor::from_vec(numbers(m * rows, 4), (m, rows), &CPU).unwrap();
        let y = dequantized_linear(&x, &weight).unwrap();
        let gradient = y.mul(&probe).unwrap().sum_all().unwrap().backward().unwrap().remove(&x).unwrap();
        let wide = |x: &Tensor| x.to_dtype(DType::F64).unwrap();
        let (wide_x, wide_probe) = (wide(x.as_tensor()), wide(&probe));
        let want = [wide_x.detach().matmul(&dense.t().unwrap()).unwrap(), wide_probe.matmul(&dense).unwrap()];
        let sizes = [
            wide_x.detach().abs().unwrap().matmul(&dense.abs().unwrap().t().unwrap()).unwrap(),
            wide_probe.abs().unwrap().matmul(&dense.abs().unwrap()).unwrap(),
        ];
        for ((got, want), size) in [y.detach(), gradient].iter().zip(want).zip(sizes) {
            let list = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f64>().unwrap();
            for ((got, want), size) in list(&wide(got)).iter().zip(list(&want)).zip(list(&size)) {
                let what = format!("{dtype:?} [{rows}, {columns}] with {m}: {got} for {want}");
                assert!((got - want).abs() <= 5e-6 * size, "{what}");
            }
        }
    }
}

#[test]
fn codes_and_inputs_of_the_largest_size_do_not_saturate() {
    for dtype in ALL {
        let columns = 2 * dtype.block_size();
        let mut bytes = vec![0xff; 16 * 2 * dtype.type_size()];
        for block in bytes.chunks_exact_mut(dtype.type_size()) {
            let one = half::f16::ONE.to_le_bytes();
            let scales: &[usize] = match dtype {
                GgmlDType::Q4_0 | GgmlDType::Q5_0 | GgmlDType::Q8_0 => &[0],
                GgmlDType::Q4_1 | GgmlDType::Q5_1 | GgmlDType::Q4K | GgmlDType::Q5K => &[0, 2],
                GgmlDType::Q2K => &[80, 82],
                GgmlDType::Q3K => &[108],
                _ => &[208],
            };
            scales.iter().for_each(|&at| block[at..at + 2].copy_from_slice(&one));
        }
        let weight = Tiles::new(dtype, [16, columns], &bytes).unwrap();
        let mut row = vec![0.0; columns];
        weight.dequantize_row(3, &mut row);
        for sign in [1.0, -1.0] {
            let x = vec![127.0 * sign; columns];
            let want: f64 = row.iter().map(|&w| f64::from(w) * 127.0 * f64::from(sign)).sum();
            for processor in Processor::all() {
                let got = f64::from(product(processor, &weight, &x, 1)[3]);
                assert!((got - want).abs() <= 1e-6 * want.abs(), "{dtype:?} {processor:?}: {got} for {want}");
            }
        }
    }
}

#[test]
fn results_depend_on_their_own_rows_alone() {
    for dtype in ALL {
        let (rows, columns) = (45, 512);
        let stored = any_bytes(rows, columns, dtype);
        let weight = Tiles::new(dtype, [rows, columns], &stored).unwrap();
        let row_bytes = stored.len() / rows;
        let x = numbers(15 * columns, 2);
        for processor in Processor::all() {
            let whole = product(processor, &weight, &x, 15);
            for (from, to) in [(0, 7), (7, 20), (20, 45)] {
                let part = Tiles::new(dtype, [to - from, columns], &stored[from * row_bytes..to * row_bytes])
                    .unwrap();
                for m in [1, 6, 15] {
                    let got = product(processor, &part, &x[..m * columns], m);
                    for (i, got) in got.chunks_exact(to - from).enumerate() {
                        assert_eq!(got, &whole[i * rows + from..i * rows + to], "{dtype:?} {processor:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn several_weights_of_unlike_types_are_side_by_side() {
    let weights: Vec<QuantizedMatrix> = [(5, GgmlDType::Q4K), (16, GgmlDType::Q8_0), (3, GgmlDType::Q6K)]
        .map(|(rows, dtype)| QuantizedMatrix::new(quantized(rows, 256, dtype)).unwrap())
        .into();
    let all: Vec<&QuantizedMatrix> = weights.iter().collect();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let x = Tensor::from_vec(numbers(6 * 256, 4), (2, 3, 256), &CPU).unwrap().to_dtype(dtype).unwrap();
        let x = Var::from_tensor(&x).unwrap();
        let together = quantized_linear(&x, &all).unwrap();
        assert_eq!((together.dims(), together.dtype()), (&[2, 3, 24][..], dtype));
        let apart: Vec<Tensor> = all.iter().map(|&weight| quantized_linear(&x, &[weight]).unwrap()).collect();
        let list =
            |x: &Tensor| x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(list(&together), list(&Tensor::cat(&apart, 2).unwrap()));
        let gradient = together.sum_all().unwrap().backward().unwrap().remove(&x).unwrap();
        let dense: Vec<Tensor> = all.iter().map(|weight| weight.dequantize().unwrap()).collect();
        let want = list(&Tensor::cat(&dense, 0).unwrap().sum(0).unwrap());
        for (got, want) in list(&gradient).chunks_exact(256).flatten().zip(want.iter().cycle()) {
            let near = if dtype == DType::F32 { 1e-4 } else { 0.4 };
            assert!((got - want).abs() < near, "{dtype:?}: {got} for {want}");
        }
    }
}

#[test]
fn what_is_not_finite_or_empty_goes_through() {
    let weight = QuantizedMatrix::new(quantized(3, 64, GgmlDType::Q4_1)).unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = numbers(128, 3);
        x[70] = bad;
        let y = quantized_linear(&Tensor::from_vec(x, (2, 64), &CPU).unwrap(), &[&weight]).unwrap();
        let y = y.to_vec2::<f32>().unwrap();
        assert!(y[0].iter().all(|y| y.is_finite()) && y[1].iter().all(|y| y.is_nan()), "{bad}: {y:?}");
    }
    let none = Tensor::zeros((0, 64), DType::F32, &CPU).unwrap();
    assert_eq!(quantized_linear(&none, &[&weight, &weight]).unwrap().dims(), [0, 6]);
}

#[test]
fn operands_that_do_not_fit_are_errors() {
    let weight = QuantizedMatrix::new(quantized(3, 64, GgmlDType::Q8_0)).unwrap();
    let said =
        |x: Tensor, weights: &[&QuantizedMatrix]| quantized_linear(&x, weights).unwrap_err().to_string();
    let ones = |dims: &[usize], dtype| Tensor::ones(dims, dtype, &CPU).unwrap();
    assert!(said(ones(&[1, 32], DType::F32), &[&weight]).contains("does not fit a weight [3, 64]"));
    assert!(said(ones(&[64], DType::F32), &[&weight]).contains("two dims or more"));
    assert!(said(ones(&[1, 64], DType::F64), &[&weight]).contains("f32, f16 or bf16"));
    assert!(said(ones(&[1, 64], DType::F32), &[]).contains("no weights"));
    let floats = QTensor::quantize(&ones(&[2, 32], DType::F32), GgmlDType::F32).unwrap();
    assert!(QuantizedMatrix::new(floats).unwrap_err().to_string().contains("no type of quantized weights"));
    assert!(Tiles::new(GgmlDType::Q8_0, [1, 64], &[0; 67]).unwrap_err().to_string().contains("67 bytes"));
}

/// A function of the standard library is compiled without the instructions. Where it is not inlined, each of them is a call:
/// a model decoded at a twelfth of the speed.
#[test]
fn instructions_stay_out_of_functions_of_the_standard_library() {
    for source in [include_str!("avx2.rs"), include_str!("avx512.rs")] {
        for name in [".map(", "from_fn(", ".iter()", ".zip(", ".fold("] {
            assert!(!source.contains(name), "{name}");
        }
    }
}
