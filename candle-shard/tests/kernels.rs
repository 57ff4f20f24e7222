//! Every fused kernel against its composed form in f64: value and all gradients, over dtypes, strides and shapes.

#![allow(clippy::unwrap_used)]

use candle_core::{D, DType, Device::Cpu, Result, Tensor, Var};
use candle_shard::kernels::*;
use proptest::prelude::*;

/// Exact in f32, so that both forms add the same number.
const EPS: f64 = 1.0 / 131072.0;

type Op<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

/// How an input lies in the memory of its variable.
#[derive(Clone, Copy, Debug)]
enum View {
    Plain,
    /// The last two dims are swapped.
    Transposed,
    /// Elements of the last dim are skipped at both ends.
    Columns,
    /// Elements of the first dim are skipped at both ends: contiguous, with an offset.
    Rows,
}

const VIEWS: [View; 4] = [View::Plain, View::Transposed, View::Columns, View::Rows];

impl View {
    /// A tensor whose `apply` is `t`.
    fn stored(self, t: &Tensor) -> Result<Tensor> {
        let padded = |dim: usize| {
            let pad = |n| {
                let mut dims = t.dims().to_vec();
                dims[dim] = n;
                Tensor::full(7f32, dims, &Cpu)?.to_dtype(t.dtype())
            };
            Tensor::cat(&[pad(3)?, t.clone(), pad(2)?], dim)?.contiguous()
        };
        match self {
            Self::Transposed if t.rank() > 1 => t.transpose(D::Minus1, D::Minus2)?.contiguous(),
            Self::Columns => padded(t.rank() - 1),
            Self::Rows => padded(0),
            _ => Ok(t.clone()),
        }
    }

    fn apply(self, t: &Tensor) -> Result<Tensor> {
        match self {
            Self::Transposed if t.rank() > 1 => t.transpose(D::Minus1, D::Minus2),
            Self::Columns => t.narrow(D::Minus1, 3, t.dim(D::Minus1)? - 5),
            Self::Rows => t.narrow(0, 3, t.dim(0)? - 5),
            _ => Ok(t.clone()),
        }
    }
}

fn randn(dims: &[usize]) -> Tensor {
    Tensor::randn(0f64, 1.0, dims, &Cpu).unwrap()
}

/// The value of `op` and the gradient of every input, for a fixed weighting of the outputs.
fn run(op: Op<'_>, inputs: &[Tensor], view: View) -> Result<Vec<Tensor>> {
    let vars = inputs
        .iter()
        .map(|t| Var::from_tensor(&view.stored(t)?))
        .collect::<Result<Vec<_>>>()?;
    let views = vars
        .iter()
        .map(|v| view.apply(v))
        .collect::<Result<Vec<_>>>()?;
    let y = op(&views)?;
    assert!(y.track_op(), "the result has left the graph");
    assert_eq!(y.dtype(), inputs[0].dtype());
    let count = y.elem_count();
    let weights = Tensor::from_iter((0..count).map(|i| (i as f64 * 0.7).sin()), &Cpu)?;
    let loss = (&y * weights.reshape(y.shape())?.to_dtype(y.dtype())?)?.sum_all()?;
    let grads = loss.backward()?;
    let mut results = vec![y.detach()];
    for var in &vars {
        let grad = grads.get(var).expect("every variable has a gradient");
        assert_eq!((grad.dims(), grad.dtype()), (var.dims(), var.dtype()));
        results.push(grad.clone());
    }
    Ok(results)
}

/// The largest difference, relative to the largest element of `want` (or to 1).
fn distance(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.dims(), want.dims());
    if want.elem_count() == 0 {
        return 0.0;
    }
    let scalar = |t: Tensor| {
        t.abs()
            .unwrap()
            .flatten_all()
            .unwrap()
            .max(0)
            .unwrap()
            .to_scalar::<f64>()
            .unwrap()
    };
    scalar((got.to_dtype(DType::F64).unwrap() - want).unwrap()) / scalar(want.clone()).max(1.0)
}

fn assert_close(got: &[Tensor], want: &[Tensor], tolerance: f64, what: &str) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let distance = distance(got, want);
        // Written so that NaN fails.
        assert!(
            distance <= tolerance,
            "{what}: result {i} is off by {distance:e}"
        );
    }
}

/// Compares `fused` with `composed` in every float type and view.
fn compare(fused: Op<'_>, composed: Op<'_>, inputs: &[Tensor]) {
    for (dtype, tolerance) in [
        (DType::F64, 1e-12),
        (DType::F32, 1e-5),
        (DType::F16, 2e-2),
        (DType::BF16, 1e-1),
    ] {
        // Rounded first, so that both forms see the same numbers.
        let cast = inputs
            .iter()
            .map(|t| t.to_dtype(dtype).unwrap())
            .collect::<Vec<_>>();
        let exact = cast
            .iter()
            .map(|t| t.to_dtype(DType::F64).unwrap())
            .collect::<Vec<_>>();
        for view in VIEWS {
            let what = format!(
                "{dtype:?} {view:?} {:?}",
                inputs.iter().map(Tensor::dims).collect::<Vec<_>>()
            );
            let got = run(fused, &cast, view).unwrap_or_else(|e| panic!("{what}: {e}"));
            let want = run(composed, &exact, view).unwrap();
            assert_close(&got, &want, tolerance, &what);
        }
    }
}

/// Compares the gradients of `op` in f64 with central differences.
fn differences(op: Op<'_>, inputs: &[Tensor]) {
    const STEP: f64 = 1e-5;
    let results = run(op, inputs, View::Plain).unwrap();
    let loss = |inputs: &[Tensor]| {
        let y = op(inputs)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f64>()
            .unwrap();
        y.iter()
            .enumerate()
            .map(|(i, y)| y * (i as f64 * 0.7).sin())
            .sum::<f64>()
    };
    for (which, input) in inputs.iter().enumerate() {
        let grad = results[1 + which]
            .flatten_all()
            .unwrap()
            .to_vec1::<f64>()
            .unwrap();
        let values = input.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        for i in 0..values.len() {
            let moved = |by: f64| {
                let mut values = values.clone();
                values[i] += by;
                let mut inputs = inputs.to_vec();
                inputs[which] = Tensor::from_vec(values, input.dims(), &Cpu).unwrap();
                loss(&inputs)
            };
            let want = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            assert!(
                (grad[i] - want).abs() < 1e-7,
                "input {which}, element {i}: {} for {want}",
                grad[i]
            );
        }
    }
}

fn fused_layer_norm(t: &[Tensor]) -> Result<Tensor> {
    layer_norm(&t[0], &t[1], &t[2], EPS)
}

fn composed_layer_norm(t: &[Tensor]) -> Result<Tensor> {
    candle_nn::ops::layer_norm_slow(&t[0], &t[1], &t[2], EPS as f32)
}

fn fused_rms_norm(t: &[Tensor]) -> Result<Tensor> {
    rms_norm(&t[0], &t[1], EPS)
}

fn composed_rms_norm(t: &[Tensor]) -> Result<Tensor> {
    candle_nn::ops::rms_norm_slow(&t[0], &t[1], EPS as f32)
}

fn fused_softmax(t: &[Tensor]) -> Result<Tensor> {
    softmax(&t[0])
}

fn composed_softmax(t: &[Tensor]) -> Result<Tensor> {
    candle_nn::ops::softmax(&t[0], D::Minus1)
}

const SCALE: f64 = 0.375;

fn fused_causal(t: &[Tensor]) -> Result<Tensor> {
    causal_softmax(&t[0], SCALE)
}

fn composed_causal(t: &[Tensor]) -> Result<Tensor> {
    let (q, k) = (t[0].dim(D::Minus2)?, t[0].dim(D::Minus1)?);
    let hidden = |i: usize, j: usize| {
        if j + q > i + k {
            f64::NEG_INFINITY
        } else {
            0.0
        }
    };
    let mask = Tensor::from_iter((0..q).flat_map(|i| (0..k).map(move |j| hidden(i, j))), &Cpu)?;
    candle_nn::ops::softmax(
        &(&t[0] * SCALE)?.broadcast_add(&mask.reshape((q, k))?)?,
        D::Minus1,
    )
}

fn fused_gelu(t: &[Tensor]) -> Result<Tensor> {
    gelu(&t[0])
}

fn composed_gelu(t: &[Tensor]) -> Result<Tensor> {
    // The backward of candle's `gelu_erf` knows 1/√(2π) to six digits only; that of `erf` is exact.
    (&t[0] * ((&t[0] / 2f64.sqrt())?.erf()? + 1.0)?)? * 0.5
}

fn targets(n: usize, classes: usize) -> Tensor {
    Tensor::from_iter((0..n).map(|i| (i * 7 % classes) as u32), &Cpu).unwrap()
}

fn fused_cross_entropy(t: &[Tensor]) -> Result<Tensor> {
    let (n, c) = t[0].dims2()?;
    let targets = targets(n, c);
    // Both index types, told apart by the parity of the shape.
    cross_entropy(
        &t[0],
        &if c % 2 == 0 {
            targets
        } else {
            targets.to_dtype(DType::I64)?
        },
    )
}

fn composed_cross_entropy(t: &[Tensor]) -> Result<Tensor> {
    let (n, c) = t[0].dims2()?;
    candle_nn::ops::log_softmax(&t[0], 1)?
        .gather(&targets(n, c).unsqueeze(1)?, 1)?
        .squeeze(1)?
        .neg()
}

fn fused_linear(t: &[Tensor]) -> Result<Tensor> {
    linear(&t[0], &t[1], t.get(2))
}

fn composed_linear(t: &[Tensor]) -> Result<Tensor> {
    let y = t[0].broadcast_matmul(&t[1].t()?)?;
    match t.get(2) {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// Odd sizes, one element, rows longer and shorter than a vector, several leading dims, enough for two threads.
const SHAPES: [&[usize]; 8] = [
    &[5],
    &[1, 1],
    &[3, 7],
    &[4, 16],
    &[2, 3, 33],
    &[2, 2, 3, 5],
    &[9, 100],
    &[601, 257],
];

#[test]
fn layer_norm_equals_its_composed_form() {
    for dims in SHAPES {
        let k = *dims.last().unwrap();
        compare(
            &fused_layer_norm,
            &composed_layer_norm,
            &[randn(dims), randn(&[k]), randn(&[k])],
        );
    }
    differences(
        &fused_layer_norm,
        &[randn(&[3, 5]), randn(&[5]), randn(&[5])],
    );
}

#[test]
fn layer_norm_keeps_its_accuracy_far_from_zero() {
    let x = (randn(&[6, 64]) + 300.0)
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap();
    let ones = Tensor::ones(64, DType::F32, &Cpu).unwrap();
    let zeros = Tensor::zeros(64, DType::F32, &Cpu).unwrap();
    let exact = [&x, &ones, &zeros].map(|t| t.to_dtype(DType::F64).unwrap());
    let want = run(&composed_layer_norm, &exact, View::Plain).unwrap();
    // The mean itself is rounded to 300 · 2⁻²⁴ ≈ 2e-5.
    assert_close(
        &run(&fused_layer_norm, &[x, ones, zeros], View::Plain).unwrap(),
        &want,
        1e-4,
        "far",
    );
}

#[test]
fn rms_norm_equals_its_composed_form() {
    for dims in SHAPES {
        compare(
            &fused_rms_norm,
            &composed_rms_norm,
            &[randn(dims), randn(&[*dims.last().unwrap()])],
        );
    }
    differences(&fused_rms_norm, &[randn(&[3, 5]), randn(&[5])]);
}

#[test]
fn softmax_equals_its_composed_form() {
    for dims in SHAPES {
        compare(&fused_softmax, &composed_softmax, &[randn(dims)]);
        compare(
            &fused_softmax,
            &composed_softmax,
            &[(randn(dims) * 1e4).unwrap()],
        );
    }
    differences(&fused_softmax, &[randn(&[3, 5])]);
}

#[test]
fn causal_softmax_equals_its_composed_form() {
    for dims in [
        &[1, 1][..],
        &[7, 7],
        &[3, 8],
        &[2, 3, 17, 17],
        &[2, 1, 40],
        &[8, 150, 150],
    ] {
        compare(&fused_causal, &composed_causal, &[randn(dims)]);
        compare(
            &fused_causal,
            &composed_causal,
            &[(randn(dims) * 1e4).unwrap()],
        );
    }
    differences(&fused_causal, &[randn(&[2, 3, 5])]);
}

#[test]
fn hidden_keys_are_exactly_zero_and_never_read() -> Result<()> {
    let hidden = Tensor::from_iter(
        (0..9).map(|i| if i % 3 > i / 3 { f32::NAN } else { 1.0 }),
        &Cpu,
    )?;
    let scores = Var::from_tensor(&hidden.reshape((3, 3))?)?;
    let y = causal_softmax(&scores, -2.0)?;
    let third = 1.0 / 3.0;
    assert_eq!(
        y.to_vec2::<f32>()?,
        [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [third, third, third]]
    );
    let grad = y.sqr()?.sum_all()?.backward()?.remove(&scores).unwrap();
    assert!(grad.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
    Ok(())
}

#[test]
fn a_query_without_a_visible_key_gives_zeros() -> Result<()> {
    let scores = Var::from_tensor(&randn(&[4, 2]))?;
    let y = causal_softmax(&scores, 1.0)?;
    assert_eq!(
        y.narrow(0, 0, 3)?.to_vec2::<f64>()?,
        [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
    );
    let grad = y
        .narrow(1, 0, 1)?
        .sum_all()?
        .backward()?
        .remove(&scores)
        .unwrap()
        .to_vec2::<f64>()?;
    assert_eq!(grad[..3], [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]);
    assert!(grad[3][0] > 0.0 && (grad[3][0] + grad[3][1]).abs() < 1e-15);
    Ok(())
}

#[test]
fn gelu_equals_its_composed_form() {
    for dims in SHAPES {
        compare(&fused_gelu, &composed_gelu, &[(randn(dims) * 3.0).unwrap()]);
    }
    differences(&fused_gelu, &[(randn(&[31]) * 3.0).unwrap()]);
}

#[test]
fn gelu_keeps_relative_accuracy_in_the_tail() -> Result<()> {
    let x = Tensor::arange(-12f32, 12.0, &Cpu)?;
    let exact = gelu(&x.to_dtype(DType::F64)?)?.to_vec1::<f64>()?;
    for (got, want) in gelu(&x)?.to_vec1::<f32>()?.into_iter().zip(exact) {
        assert!(
            (got as f64 - want).abs() <= 1e-6 * want.abs(),
            "{got} for {want}"
        );
    }
    Ok(())
}

#[test]
fn cross_entropy_equals_its_composed_form() {
    for dims in [[1, 1], [3, 7], [5, 10], [17, 65], [601, 256]] {
        compare(
            &fused_cross_entropy,
            &composed_cross_entropy,
            &[randn(&dims)],
        );
        // f16 cannot hold such a loss, f32 can.
        let large = (randn(&dims) * 1e3).unwrap();
        compare(&fused_cross_entropy, &composed_cross_entropy, &[large]);
    }
    differences(&fused_cross_entropy, &[randn(&[4, 5])]);
}

#[test]
fn linear_equals_its_composed_form() {
    for (lead, k, n) in [
        (&[][..], 3, 2),
        (&[1], 1, 1),
        (&[5], 7, 3),
        (&[2, 3], 5, 9),
        (&[2, 1, 4], 16, 8),
        (&[70], 40, 2000),
    ] {
        let x = randn(&[lead, &[k]].concat());
        let (weight, bias) = (randn(&[n, k]), randn(&[n]));
        if !lead.is_empty() {
            compare(
                &fused_linear,
                &composed_linear,
                &[x.clone(), weight.clone()],
            );
            compare(&fused_linear, &composed_linear, &[x, weight, bias]);
        } else {
            let row = x.unsqueeze(0).unwrap();
            let want = composed_linear(&[row, weight.clone(), bias.clone()])
                .unwrap()
                .squeeze(0)
                .unwrap();
            assert!(distance(&fused_linear(&[x, weight, bias]).unwrap(), &want) < 1e-14);
        }
    }
    differences(
        &fused_linear,
        &[randn(&[3, 5]), randn(&[4, 5]), randn(&[4])],
    );
}

#[test]
fn linear_takes_untracked_and_repeated_operands() -> Result<()> {
    let (x, weight) = (Var::from_tensor(&randn(&[4, 4]))?, randn(&[4, 4]));
    let grads = linear(&x, &weight, None)?.sum_all()?.backward()?;
    let want = Tensor::ones((4, 4), DType::F64, &Cpu)?.matmul(&weight)?;
    assert!(distance(grads.get(&x).unwrap(), &want) < 1e-14);
    let square = |t: &[Tensor]| linear(&t[0], &t[0], None);
    compare(&square, &|t| t[0].matmul(&t[0].t()?), &[randn(&[4, 4])]);
    Ok(())
}

#[test]
fn tensors_without_elements_stay_in_the_graph() {
    for dims in [&[0, 8][..], &[2, 0, 8], &[3, 0]] {
        let k = *dims.last().unwrap();
        let (x, row) = (randn(dims), randn(&[k]));
        let cases: [(Op<'_>, Vec<Tensor>); 7] = [
            (&fused_layer_norm, vec![x.clone(), row.clone(), row.clone()]),
            (&fused_rms_norm, vec![x.clone(), row]),
            (&fused_softmax, vec![x.clone()]),
            (&fused_causal, vec![x.clone()]),
            (&fused_gelu, vec![x.clone()]),
            (&fused_linear, vec![x.clone(), randn(&[3, k]), randn(&[3])]),
            (&fused_linear, vec![x.clone(), randn(&[0, k])]),
        ];
        for (i, (op, inputs)) in cases.iter().enumerate() {
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                let inputs = inputs
                    .iter()
                    .map(|t| t.to_dtype(dtype).unwrap())
                    .collect::<Vec<_>>();
                let results = run(*op, &inputs, View::Plain).unwrap();
                let last = if i < 5 { k } else { inputs[1].dims()[0] };
                assert_eq!(
                    results[0].dims(),
                    [&dims[..dims.len() - 1], &[last]].concat()
                );
                // The bias of [3, 0] · [0, 3] is all that can have a gradient.
                let gradients = if k == 0 {
                    &results[1..results.len().min(3)]
                } else {
                    &results[1..]
                };
                for gradient in gradients {
                    let zeros = gradient.to_dtype(DType::F64).unwrap().zeros_like().unwrap();
                    assert_eq!(distance(gradient, &zeros), 0.0, "case {i}, {dims:?}");
                }
            }
        }
    }
    let logits = randn(&[0, 5]);
    let results = run(&fused_cross_entropy, &[logits], View::Plain).unwrap();
    assert_eq!(
        (results[0].dims(), results[1].dims()),
        (&[0][..], &[0, 5][..])
    );
    // Without inputs only the bias is left.
    let y = linear(
        &randn(&[2, 0]),
        &randn(&[3, 0]),
        Some(&Tensor::ones(3, DType::F64, &Cpu).unwrap()),
    )
    .unwrap();
    assert_eq!(y.to_vec2::<f64>().unwrap(), [[1.0; 3]; 2]);
}

#[test]
fn not_a_number_is_not_hidden() -> Result<()> {
    let x = Tensor::new(&[[f32::NAN, 1.0, 2.0]], &Cpu)?;
    for y in [
        softmax(&x)?,
        causal_softmax(&x, 1.0)?,
        cross_entropy(&x, &Tensor::new(&[2u32], &Cpu)?)?.unsqueeze(0)?,
    ] {
        assert!(y.to_vec2::<f32>()?[0].iter().all(|v| v.is_nan()));
    }
    let y = gelu(&x)?.to_vec2::<f32>()?;
    assert!(y[0][0].is_nan() && !y[0][1].is_nan());
    // A caller's own mask: -∞ has the weight 0.
    let y = softmax(&Tensor::new(&[0f32, f32::NEG_INFINITY], &Cpu)?)?;
    assert_eq!(y.to_vec1::<f32>()?, [1.0, 0.0]);
    Ok(())
}

#[test]
fn misuse_is_an_error_that_names_it() {
    let x = Tensor::zeros((2, 3), DType::F32, &Cpu).unwrap();
    let vector = |n: usize| Tensor::zeros(n, DType::F32, &Cpu).unwrap();
    let f64_3 = Tensor::zeros(3, DType::F64, &Cpu).unwrap();
    let ints = Tensor::zeros((2, 3), DType::U32, &Cpu).unwrap();
    let scalar = Tensor::new(1f32, &Cpu).unwrap();
    let target = |v: Vec<i64>| Tensor::new(v, &Cpu).unwrap();
    let cases: Vec<(Result<Tensor>, &[&str])> = vec![
        (
            layer_norm(&x, &vector(2), &vector(3), 0.0),
            &["layer_norm", "weight", "[2]", "[3]"],
        ),
        (
            layer_norm(&x, &vector(3), &vector(4), 0.0),
            &["layer_norm", "bias", "[4]"],
        ),
        (
            layer_norm(&x, &f64_3, &vector(3), 0.0),
            &["layer_norm", "dtype", "F64"],
        ),
        (
            rms_norm(&x, &vector(2), 0.0),
            &["rms_norm", "weight", "[2]"],
        ),
        (rms_norm(&scalar, &vector(1), 0.0), &["dim"]),
        (softmax(&ints), &["softmax", "U32"]),
        (softmax(&scalar), &["dim"]),
        (causal_softmax(&vector(3), 1.0), &["causal_softmax", "[3]"]),
        (gelu(&ints), &["gelu", "U32"]),
        (
            cross_entropy(&vector(3), &target(vec![0])),
            &["cross_entropy", "[3]"],
        ),
        (
            cross_entropy(&x, &target(vec![0])),
            &["cross_entropy", "[2]", "[1]"],
        ),
        (cross_entropy(&x, &vector(2)), &["cross_entropy", "F32"]),
        (
            cross_entropy(&x, &target(vec![0, 17])),
            &["row 1", "17", "3 classes"],
        ),
        (
            cross_entropy(&x, &target(vec![-1, 0])),
            &["row 0", "-1", "3 classes"],
        ),
        (
            cross_entropy(&x, &Tensor::new(&[3u32, 0], &Cpu).unwrap()),
            &["row 0", "target 3", "3 classes"],
        ),
        (linear(&x, &vector(3), None), &["linear", "[3]"]),
        (
            linear(&x, &x.t().unwrap(), None),
            &["linear", "[2, 3]", "[3, 2]"],
        ),
        (
            linear(&x, &x, Some(&vector(3))),
            &["linear", "bias", "[3]", "[2]"],
        ),
        (linear(&scalar, &x, None), &["dim"]),
        (
            linear(&x, &x.to_dtype(DType::F64).unwrap(), None),
            &["linear", "dtype"],
        ),
    ];
    for (i, (result, words)) in cases.into_iter().enumerate() {
        let message = result.expect_err(&format!("case {i} fails")).to_string();
        for word in words {
            assert!(
                message.contains(word),
                "case {i}: {word:?} is not in {message:?}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_shape(lead in prop::collection::vec(1usize..5, 1..3), k in 1usize..70, n in 1usize..20) {
        let x = randn(&[&lead[..], &[k]].concat());
        let row = randn(&[k]);
        compare(&fused_layer_norm, &composed_layer_norm, &[x.clone(), row.clone(), row.clone()]);
        compare(&fused_rms_norm, &composed_rms_norm, &[x.clone(), row]);
        compare(&fused_softmax, &composed_softmax, std::slice::from_ref(&x));
        compare(&fused_gelu, &composed_gelu, std::slice::from_ref(&x));
        compare(&fused_linear, &composed_linear, &[x, randn(&[n, k]), randn(&[n])]);
        let queries = n.min(k);
        compare(&fused_causal, &composed_causal, &[randn(&[lead[0], queries, k])]);
        compare(&fused_cross_entropy, &composed_cross_entropy, &[randn(&[lead[0], k])]);
    }
}
