//! candle's kernels on a GPU against its operations on the host: on a simulated GPU, this checks the simulator.
use super::sizes;
use candle_core::{DType, Device, Result, Tensor, Var};
use std::time::Duration;
use test_utils::Ranks;

/// An op of some tensors.
type Of = fn(&[Tensor]) -> Result<Tensor>;

/// Numbers of both signs whose squares a 16-bit float holds, and none of which is 0; without a sign for unsigned integers.
fn numbers(shape: &[usize], seed: usize, dtype: DType) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    let of = |i: usize| ((i * 7 + seed * 5) % 23) as f64 * 0.5 + if dtype.is_float() { -5.25 } else { 1.0 };
    Tensor::from_iter((0..count).map(of), &Device::Cpu)?.to_dtype(dtype)?.reshape(shape)
}

/// A tensor of this shape with strides and an offset.
fn strided(shape: &[usize], seed: usize, dtype: DType) -> Result<Tensor> {
    let mut turned = shape.to_vec();
    turned.reverse();
    turned[0] += 2;
    let order: Vec<usize> = (0..shape.len()).rev().collect();
    numbers(&turned, seed, dtype)?.narrow(0, 1, turned[0] - 2)?.permute(order)
}

fn list(x: &Tensor) -> Result<Vec<f64>> {
    x.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Compares `f` on the GPU and on the host: equal integers, and floats that differ by some roundings.
fn compare(what: &str, gpu: &Device, inputs: &[Tensor], f: Of) -> Result<()> {
    let there = inputs.iter().map(|x| x.to_device(gpu)).collect::<Result<Vec<_>>>()?;
    let (got, want) = (f(&there)?, f(inputs)?);
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()), "{what}");
    let allowed = match got.dtype() {
        DType::BF16 => 0.02,
        DType::F16 => 0.003,
        DType::F32 => 1e-5,
        DType::F64 => 1e-11,
        _ => 0.0,
    };
    for (at, (got, want)) in list(&got)?.into_iter().zip(list(&want)?).enumerate() {
        let is_equal = (got - want).abs() <= allowed * want.abs().max(1.0) || (got.is_nan() && want.is_nan());
        assert!(is_equal, "{what} at {at}: {got} instead of {want}");
    }
    Ok(())
}

/// Runs a test on one GPU.
fn on_gpu(label: &'static str, test: fn(&Device) -> Result<()>) {
    for n in sizes(1).into_iter().take(1) {
        let ranks = Ranks::new(n, label).deadline(Duration::from_secs(300));
        ranks.run(move |ctx| if ctx.rank() == 0 { test(ctx.device()) } else { Ok(()) }).unwrap();
    }
}

const FLOATS: [DType; 4] = [DType::BF16, DType::F16, DType::F32, DType::F64];
const ALL: [DType; 7] = [DType::U8, DType::U32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64];
const SHAPE: [usize; 3] = [3, 4, 5];

#[test]
fn ops_of_single_elements_are_those_of_the_host() {
    on_gpu("elements", |gpu| {
        let unary: [(&str, Of); 20] = [
            ("neg", |x| x[0].neg()),
            ("exp", |x| x[0].exp()),
            ("log", |x| x[0].abs()?.log()),
            ("sin", |x| x[0].sin()),
            ("cos", |x| x[0].cos()),
            ("tanh", |x| x[0].tanh()),
            ("recip", |x| x[0].recip()),
            ("sqr", |x| x[0].sqr()),
            ("sqrt", |x| x[0].abs()?.sqrt()),
            ("gelu", |x| x[0].gelu()),
            ("gelu_erf", |x| x[0].gelu_erf()),
            ("erf", |x| x[0].erf()),
            ("silu", |x| x[0].silu()),
            ("ceil", |x| x[0].ceil()),
            ("floor", |x| x[0].floor()),
            ("relu", |x| x[0].relu()),
            ("sign", |x| x[0].sign()),
            ("elu", |x| x[0].elu(0.7)),
            ("powf", |x| x[0].abs()?.powf(1.5)),
            ("sigmoid", |x| candle_nn::ops::sigmoid(&x[0])),
        ];
        for dtype in FLOATS {
            for (name, f) in unary {
                for x in [numbers(&SHAPE, 1, dtype)?, strided(&SHAPE, 2, dtype)?] {
                    compare(&format!("{name} of {dtype:?}"), gpu, &[x], f)?;
                }
            }
        }
        let binary: [(&str, Of); 12] = [
            ("add", |x| &x[0] + &x[1]),
            ("sub", |x| x[0].maximum(&x[1])? - x[0].minimum(&x[1])?),
            ("mul", |x| &x[0] * &x[1]),
            ("div", |x| &x[0] / &x[1]),
            ("maximum", |x| x[0].maximum(&x[1])),
            ("minimum", |x| x[0].minimum(&x[1])),
            ("eq", |x| x[0].eq(&x[1])),
            ("ne", |x| x[0].ne(&x[1])),
            ("lt", |x| x[0].lt(&x[1])),
            ("ge", |x| x[0].ge(&x[1])),
            ("affine", |x| x[0].affine(2.0, 1.0)),
            ("where", |x| x[0].lt(&x[1])?.where_cond(&x[0], &x[1])),
        ];
        for dtype in ALL {
            for (name, f) in binary {
                let inputs =
                    [strided(&SHAPE, 1, dtype)?, numbers(&[1, 1, 5], 2, dtype)?.broadcast_as(&SHAPE)?];
                compare(&format!("{name} of {dtype:?}"), gpu, &inputs, f)?;
            }
        }
        for from in ALL {
            for to in ALL {
                let half = |dtype| matches!(dtype, DType::BF16 | DType::F16);
                // candle has no kernels for these.
                if (from == DType::I64 && half(to)) || (half(from) && to == DType::I64) {
                    continue;
                }
                let x = strided(&SHAPE, 1, from)?.to_dtype(DType::F64)?.abs()?.to_dtype(from)?;
                let there = x.to_device(gpu)?.to_dtype(to)?;
                assert_eq!(list(&there)?, list(&x.to_dtype(to)?)?, "{from:?} to {to:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn reductions_and_products_are_those_of_the_host() {
    on_gpu("reductions", |gpu| {
        let all: [(&str, Of); 8] = [
            ("sum of the last dim", |x| x[0].sum(2)),
            ("sum of the first dim", |x| x[0].sum_keepdim(0)),
            ("sum of two dims", |x| x[0].sum((0, 2))),
            ("sum of all", |x| x[0].sum_all()),
            ("max", |x| x[0].max(1)),
            ("min", |x| x[0].min_keepdim(2)),
            ("argmax", |x| x[0].argmax(1)),
            ("argmin", |x| x[0].argmin_keepdim(2)),
        ];
        for dtype in ALL {
            // On the host, a sum of bytes above 255 may panic.
            for (name, f) in
                all.into_iter().filter(|(name, _)| dtype != DType::U8 || !name.starts_with("sum"))
            {
                compare(&format!("{name} of {dtype:?}"), gpu, &[strided(&SHAPE, 1, dtype)?], f)?;
            }
        }
        let products: [(&str, Of, [&[usize]; 2]); 4] = [
            ("matmul", |x| x[0].matmul(&x[1]), [&[4, 3], &[3, 5]]),
            ("batches", |x| x[0].matmul(&x[1]), [&[2, 3, 4, 3], &[2, 3, 3, 5]]),
            ("a turned left side", |x| x[0].t()?.matmul(&x[1]), [&[2, 3, 4], &[2, 3, 5]]),
            ("a turned right side", |x| x[0].matmul(&x[1].t()?), [&[2, 4, 3], &[2, 5, 3]]),
        ];
        for dtype in FLOATS {
            for (name, f, [a, b]) in products {
                compare(
                    &format!("{name} of {dtype:?}"),
                    gpu,
                    &[numbers(a, 1, dtype)?, numbers(b, 2, dtype)?],
                    f,
                )?;
            }
        }
        Ok(())
    });
}

#[test]
fn ops_by_index_are_those_of_the_host() {
    on_gpu("indexes", |gpu| {
        for dtype in [DType::U32, DType::I64, DType::BF16, DType::F32, DType::F64] {
            for ids in [DType::U8, DType::U32, DType::I64] {
                let x = numbers(&SHAPE, 1, dtype)?;
                let at = |list: &[u32], shape: &[usize]| {
                    Tensor::new(list, &Device::Cpu)?.reshape(shape)?.to_dtype(ids)
                };
                let rows = at(&[2, 0, 2, 1], &[4])?;
                let places = at(&[0, 2, 1, 2, 2, 0, 1, 1, 0, 2, 2, 2, 0, 0, 1], &[3, 1, 5])?;
                let unique = at(&[0, 2, 1, 3, 2, 3, 1, 2, 0, 1], &[1, 2, 5])?;
                let what = |name: &str| format!("{name} of {dtype:?} by {ids:?}");
                compare(
                    &what("index_select"),
                    gpu,
                    &[strided(&SHAPE, 1, dtype)?.contiguous()?, rows.clone()],
                    |x| x[0].index_select(&x[1], 1),
                )?;
                compare(&what("gather"), gpu, &[x.clone(), places.clone()], |x| x[0].gather(&x[1], 1))?;
                let more = numbers(&[3, 4, 5], 3, dtype)?;
                compare(&what("index_add"), gpu, &[x.clone(), rows, more], |x| {
                    x[0].index_add(&x[1], &x[2], 1)
                })?;
                let few = numbers(&[3, 1, 5], 4, dtype)?;
                compare(&what("scatter_add"), gpu, &[x.clone(), places, few], |x| {
                    x[0].scatter_add(&x[1], &x[2], 1)
                })?;
                let one = x.narrow(0, 0, 1)?.contiguous()?;
                let few = numbers(&[1, 2, 5], 4, dtype)?;
                compare(&what("scatter"), gpu, &[one, unique, few], |x| x[0].scatter(&x[1], &x[2], 1))?;
            }
        }
        Ok(())
    });
}

/// The value of a convolution, and the gradients of both inputs, one after another.
fn with_gradients(x: &[Tensor], f: impl Fn(&Tensor, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let [a, b] = [Var::from_tensor(&x[0])?, Var::from_tensor(&x[1])?];
    let y = f(&a, &b)?;
    let grads = y.sqr()?.sum_all()?.backward()?;
    let all =
        [Some(&y), grads.get(&a), grads.get(&b)].into_iter().flatten().map(|x| x.detach().flatten_all());
    Tensor::cat(&all.collect::<Result<Vec<_>>>()?, 0)
}

#[test]
fn convolutions_and_their_gradients_are_those_of_the_host() {
    on_gpu("convolutions", |gpu| {
        for dtype in [DType::F32, DType::F64] {
            let put = |shape: &[usize], seed| numbers(shape, seed, dtype)? * 0.1;
            let image = [put(&[2, 4, 7, 7], 1)?, put(&[6, 4, 3, 2], 2)?];
            compare("conv2d", gpu, &image, |x| with_gradients(x, |x, w| x.conv2d(w, 0, 1, 1, 1)))?;
            compare("conv2d with padding", gpu, &image, |x| {
                with_gradients(x, |x, w| x.conv2d(w, 1, 1, 2, 1))
            })?;
            let groups = [put(&[2, 4, 7, 7], 1)?, put(&[6, 2, 3, 3], 2)?];
            compare("conv2d with steps", gpu, &groups, |x| {
                with_gradients(x, |x, w| x.conv2d(w, 1, 2, 1, 2))
            })?;
            let line = [put(&[2, 4, 9], 1)?, put(&[6, 4, 3], 2)?];
            compare("conv1d", gpu, &line, |x| x[0].conv1d(&x[1], 1, 2, 2, 1))?;
            // Without padding, candle computes only the first line of a batch right on the host.
            let one = [put(&[1, 4, 5], 1)?, put(&[4, 3, 3], 2)?];
            compare("conv_transpose1d", gpu, &one, |x| x[0].conv_transpose1d(&x[1], 0, 0, 2, 1, 1))?;
            let turned = [put(&[2, 4, 5], 1)?, put(&[4, 3, 3], 2)?];
            compare("conv_transpose1d, padded", gpu, &turned, |x| {
                x[0].conv_transpose1d(&x[1], 1, 1, 2, 2, 1)
            })?;
            let turned = [put(&[2, 4, 5, 4], 1)?, put(&[4, 3, 3, 2], 2)?];
            compare("conv_transpose2d", gpu, &turned, |x| x[0].conv_transpose2d(&x[1], 1, 1, 2, 2))?;
        }
        Ok(())
    });
}
