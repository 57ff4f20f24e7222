//! Every fused kernel against its composed form in f64: value and all gradients, over dtypes, strides and shapes.

#![allow(clippy::unwrap_used)]

mod adam_w;
mod cross_entropy;
mod flash_attn;
mod gelu_erf;
mod harness;
mod linear;
mod norms;
mod rope;
mod silu_gate;
mod softmax;

use candle_core::{DType, Device::Cpu, Result, Tensor};
use candle_shard::kernels;
use proptest::prelude::*;

use cross_entropy::*;
use flash_attn::*;
use gelu_erf::*;
use harness::*;
use linear::*;
use norms::*;
use silu_gate::*;
use softmax::*;

#[test]
fn tensors_without_elements_stay_in_the_graph() {
    for dims in [&[0, 8][..], &[2, 0, 8], &[3, 0]] {
        let k = *dims.last().unwrap();
        let (x, row) = (randn(dims), randn(&[k]));
        let cases: [(Op<'_>, Vec<Tensor>); 9] = [
            (&fused_layer_norm, vec![x.clone(), row.clone(), row.clone()]),
            (&fused_rms_norm, vec![x.clone(), row]),
            (&fused_softmax, vec![x.clone()]),
            (&fused_causal, vec![x.clone()]),
            (&fused_gelu_erf, vec![x.clone()]),
            (&fused_silu_gate, vec![x.clone(), x.clone()]),
            (&fused_masked, vec![x.clone(), randn(&[k])]),
            (&fused_linear, vec![x.clone(), randn(&[3, k]), randn(&[3])]),
            (&fused_linear, vec![x.clone(), randn(&[0, k])]),
        ];
        for (i, (op, inputs)) in cases.iter().enumerate() {
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                let inputs = inputs.iter().map(|t| t.to_dtype(dtype).unwrap()).collect::<Vec<_>>();
                let results = run(*op, &inputs, View::Plain).unwrap();
                let last = if i < 7 { k } else { inputs[1].dims()[0] };
                assert_eq!(results[0].dims(), [&dims[..dims.len() - 1], &[last]].concat());
                // The bias of [3, 0] · [0, 3] is all that can have a gradient.
                let gradients = if k == 0 { &results[1..results.len().min(3)] } else { &results[1..] };
                for gradient in gradients {
                    let zeros = gradient.to_dtype(DType::F64).unwrap().zeros_like().unwrap();
                    assert_eq!(distance(gradient, &zeros), 0.0, "case {i}, {dims:?}");
                }
            }
        }
    }
    for [b, q, k, h, d] in
        [[0, 2, 2, 2, 2], [1, 0, 2, 2, 2], [1, 2, 0, 2, 2], [1, 2, 2, 0, 2], [1, 2, 2, 2, 0]]
    {
        let inputs = [randn(&[b, q, h, d]), randn(&[b, k, h, d]), randn(&[b, k, h, 3])];
        let results = run(&fused_flash, &inputs, View::Plain).unwrap();
        assert_eq!(results[0].dims(), [b, q, h, 3]);
    }
    let logits = randn(&[0, 5]);
    let results = run(&fused_cross_entropy, &[logits], View::Plain).unwrap();
    assert_eq!((results[0].dims(), results[1].dims()), (&[0][..], &[0, 5][..]));
    // Without inputs only the bias is left.
    let y =
        kernels::linear(&randn(&[2, 0]), &randn(&[3, 0]), Some(&Tensor::ones(3, DType::F64, &Cpu).unwrap()))
            .unwrap();
    assert_eq!(y.to_vec2::<f64>().unwrap(), [[1.0; 3]; 2]);
}

#[test]
fn not_a_number_is_not_hidden() -> Result<()> {
    let x = Tensor::new(&[[f32::NAN, 1.0, 2.0]], &Cpu)?;
    for y in [
        kernels::softmax(&x)?,
        kernels::causal_softmax(&x, 1.0)?,
        kernels::cross_entropy(&x, &Tensor::new(&[2u32], &Cpu)?)?.unsqueeze(0)?,
    ] {
        assert!(y.to_vec2::<f32>()?[0].iter().all(|v| v.is_nan()));
    }
    let y = kernels::gelu_erf(&x)?.to_vec2::<f32>()?;
    assert!(y[0][0].is_nan() && !y[0][1].is_nan());
    // A caller's own mask: -∞ has the weight 0.
    let y = kernels::softmax(&Tensor::new(&[0f32, f32::NEG_INFINITY], &Cpu)?)?;
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
        (kernels::layer_norm(&x, &vector(2), &vector(3), 0.0), &["layer_norm", "weight", "[2]", "[3]"]),
        (kernels::layer_norm(&x, &vector(3), &vector(4), 0.0), &["layer_norm", "bias", "[4]"]),
        (kernels::layer_norm(&x, &f64_3, &vector(3), 0.0), &["layer_norm", "dtype", "F64"]),
        (kernels::rms_norm(&x, &vector(2), 0.0), &["rms_norm", "weight", "[2]"]),
        (kernels::rms_norm(&scalar, &vector(1), 0.0), &["dim"]),
        (kernels::softmax(&ints), &["softmax", "U32"]),
        (kernels::softmax(&scalar), &["dim"]),
        (kernels::causal_softmax(&vector(3), 1.0), &["causal_softmax", "[3]"]),
        (kernels::gelu_erf(&ints), &["gelu_erf", "U32"]),
        (kernels::silu_gate(&x, &vector(3)), &["silu_gate", "[2, 3]", "[3]"]),
        (kernels::silu_gate(&ints, &ints), &["silu_gate", "U32"]),
        (kernels::silu_gate(&vector(3), &f64_3), &["silu_gate", "dtype"]),
        (kernels::masked_softmax(&x, &vector(2), 1.0), &["masked_softmax", "[2]", "[2, 3]"]),
        (kernels::masked_softmax(&x, &f64_3, 1.0), &["masked_softmax", "dtype"]),
        (kernels::masked_softmax(&scalar, &scalar, 1.0), &["masked_softmax", "[]"]),
        (kernels::rope(&x, &x, &x, 0, kernels::RopePairs::Halves), &["rope", "[2, 3]", "position 0"]),
        (kernels::rope(&scalar, &x, &x, 0, kernels::RopePairs::Halves), &["rope", "[]"]),
        (kernels::cross_entropy(&vector(3), &target(vec![0])), &["cross_entropy", "[3]"]),
        (kernels::cross_entropy(&x, &target(vec![0])), &["cross_entropy", "[2]", "[1]"]),
        (kernels::cross_entropy(&x, &vector(2)), &["cross_entropy", "F32"]),
        (kernels::cross_entropy(&x, &target(vec![0, 17])), &["row 1", "17", "3 classes"]),
        (kernels::cross_entropy(&x, &target(vec![-1, 0])), &["row 0", "-1", "3 classes"]),
        (
            kernels::cross_entropy(&x, &Tensor::new(&[3u32, 0], &Cpu).unwrap()),
            &["row 0", "target 3", "3 classes"],
        ),
        (kernels::flash_attn(&x, &x, &x, 1.0, true), &["flash_attn", "[2, 3]", "g | h"]),
        (kernels::linear(&x, &vector(3), None), &["linear", "[3]"]),
        (kernels::linear(&x, &x.t().unwrap(), None), &["linear", "[2, 3]", "[3, 2]"]),
        (kernels::linear(&x, &x, Some(&vector(3))), &["linear", "bias", "[3]", "[2]"]),
        (kernels::linear(&scalar, &x, None), &["dim"]),
        (kernels::linear(&x, &x.to_dtype(DType::F64).unwrap(), None), &["linear", "f32[2, 3]", "f64[2, 3]"]),
    ];
    for (i, (result, words)) in cases.into_iter().enumerate() {
        let message = result.expect_err(&format!("case {i} fails")).to_string();
        for word in words {
            assert!(message.contains(word), "case {i}: {word:?} is not in {message:?}");
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
        compare(&fused_gelu_erf, &composed_gelu_erf, std::slice::from_ref(&x));
        compare(&fused_silu_gate, &composed_silu_gate, &[x.clone(), x.clone()]);
        compare(&fused_masked, &composed_masked, &[x.clone(), randn(&[k])]);
        compare(&fused_linear, &composed_linear, &[x, randn(&[n, k]), randn(&[n])]);
        let queries = n.min(k);
        compare(&fused_causal, &composed_causal, &[randn(&[lead[0], queries, k])]);
        compare(&fused_cross_entropy, &composed_cross_entropy, &[randn(&[lead[0], k])]);
    }
}
