use crate::common::mesh;
use crate::ops::sweep::{Case, Input, Kind::Float, sweep};
use crate::plain;
use candle_core::{DType, Device::Cpu, Tensor};
use candle_shard::kernels::{self, Pool};
use candle_shard::{Conv, DTensor, Replicate, Result};
use test_utils::on_ranks;

const DENSE: Conv = Conv { padding: 0, stride: 1, dilation: 1, groups: 1 };

#[test]
fn conv1d() {
    let shapes: [(&[usize], &[usize], Conv); 7] = [
        (&[4, 2, 6], &[4, 2, 3], DENSE),
        (&[3, 3, 7], &[5, 3, 3], Conv { padding: 1, stride: 2, ..DENSE }),
        (&[1, 5, 7], &[2, 5, 2], Conv { padding: 2, dilation: 3, ..DENSE }),
        (&[2, 4, 5], &[4, 1, 3], Conv { padding: 1, groups: 4, ..DENSE }),
        (&[2, 5, 4], &[5, 1, 2], Conv { groups: 5, stride: 3, ..DENSE }),
        (&[2, 4, 5], &[6, 2, 2], Conv { groups: 2, ..DENSE }),
        (&[2, 1, 3], &[1, 1, 1], Conv { stride: 2, padding: 1, ..DENSE }),
    ];
    let mut cases = Vec::new();
    for (x, w, conv) in shapes {
        let inputs: [Input; 3] = [(x, Float), (w, Float), (&w[..1], Float)];
        let with_bias = move |x: &[DTensor]| x[0].conv1d(&x[1], Some(&x[2]), conv);
        cases.push(Case::new(&format!("{conv:?}"), &inputs, with_bias, move |x| plain::conv(x, conv)));
        let without = move |x: &[DTensor]| x[0].conv1d(&x[1], None, conv);
        cases.push(Case::new(&format!("{conv:?}"), &inputs[..2], without, move |x| plain::conv(x, conv)));
    }
    sweep("conv1d", cases);
}

#[test]
fn causal_conv1d() {
    let shapes: [(&[usize], &[usize], Conv); 6] = [
        (&[4, 2, 6], &[4, 2, 3], DENSE),
        (&[2, 4, 5], &[4, 1, 4], Conv { groups: 4, ..DENSE }),
        (&[1, 3, 7], &[3, 1, 3], Conv { groups: 3, dilation: 3, ..DENSE }),
        (&[2, 4, 3], &[2, 2, 2], Conv { groups: 2, ..DENSE }),
        (&[3, 1, 2], &[1, 1, 5], DENSE),
        (&[2, 2, 4], &[3, 2, 1], DENSE),
    ];
    let case = |(x, w, conv): (&'static [usize], &'static [usize], Conv)| {
        let inputs: [Input; 3] = [(x, Float), (w, Float), (&w[..1], Float)];
        let distributed = move |x: &[DTensor]| x[0].causal_conv1d(&x[1], Some(&x[2]), conv);
        Case::new(&format!("{conv:?}"), &inputs, distributed, move |x| plain::causal_conv1d(x, conv))
    };
    sweep("causal_conv1d", shapes.map(case).to_vec());
}

#[test]
fn conv2d() {
    let shapes: [(&[usize], &[usize], Conv); 9] = [
        (&[2, 2, 4, 3], &[4, 2, 3, 2], DENSE),
        (&[2, 2, 5, 6], &[2, 2, 3, 3], Conv { padding: 1, stride: 2, ..DENSE }),
        (&[2, 2, 6, 5], &[2, 2, 3, 3], Conv { stride: 3, ..DENSE }),
        (&[2, 1, 1, 3], &[3, 1, 2, 1], Conv { padding: 1, stride: 3, dilation: 2, ..DENSE }),
        (&[3, 3, 5, 4], &[5, 3, 2, 3], Conv { padding: 1, stride: 2, ..DENSE }),
        (&[1, 2, 5, 5], &[3, 2, 2, 2], Conv { dilation: 2, ..DENSE }),
        (&[2, 3, 3, 4], &[3, 1, 2, 2], Conv { groups: 3, padding: 1, ..DENSE }),
        (&[2, 4, 3, 3], &[2, 2, 2, 2], Conv { groups: 2, ..DENSE }),
        (&[0, 2, 3, 3], &[2, 2, 2, 2], DENSE),
    ];
    let mut cases = Vec::new();
    for (x, w, conv) in shapes {
        let inputs: [Input; 3] = [(x, Float), (w, Float), (&w[..1], Float)];
        let with_bias = move |x: &[DTensor]| x[0].conv2d(&x[1], Some(&x[2]), conv);
        cases.push(Case::new(&format!("{conv:?}"), &inputs, with_bias, move |x| plain::conv(x, conv)));
    }
    sweep("conv2d", cases);
}

#[test]
fn conv_transpose2d() {
    let shapes: [(&[usize], &[usize], usize, Conv); 4] = [
        (&[2, 2, 3, 2], &[2, 4, 2, 3], 0, DENSE),
        (&[3, 3, 2, 3], &[3, 5, 3, 3], 1, Conv { padding: 1, stride: 2, ..DENSE }),
        (&[1, 2, 3, 3], &[2, 3, 2, 2], 0, Conv { dilation: 2, ..DENSE }),
        (&[1, 5, 2, 2], &[5, 1, 2, 2], 0, Conv { stride: 3, ..DENSE }),
    ];
    let case = |(x, w, output_padding, conv): (&'static [usize], &'static [usize], usize, Conv)| {
        let inputs: [Input; 2] = [(x, Float), (w, Float)];
        let transposed = move |x: &[DTensor]| x[0].conv_transpose2d(&x[1], None, output_padding, conv);
        Case::new(&format!("{conv:?}"), &inputs, transposed, move |x| {
            plain::conv_transpose2d(x, output_padding, conv)
        })
    };
    sweep("conv_transpose2d", shapes.map(case).to_vec());
}

#[test]
fn conv_transpose1d() {
    let shapes: [(&[usize], &[usize], usize, Conv); 5] = [
        (&[4, 2, 3], &[2, 4, 2], 0, DENSE),
        (&[3, 3, 4], &[3, 5, 3], 1, Conv { padding: 1, stride: 2, ..DENSE }),
        (&[1, 2, 3], &[2, 3, 2], 0, Conv { dilation: 2, ..DENSE }),
        (&[2, 5, 2], &[5, 1, 2], 2, Conv { stride: 3, padding: 1, ..DENSE }),
        (&[2, 3, 2], &[3, 2, 1], 1, Conv { stride: 2, ..DENSE }),
    ];
    let case = |(x, w, output_padding, conv): (&'static [usize], &'static [usize], usize, Conv)| {
        let inputs: [Input; 3] = [(x, Float), (w, Float), (&w[1..2], Float)];
        let distributed =
            move |x: &[DTensor]| x[0].conv_transpose1d(&x[1], Some(&x[2]), output_padding, conv);
        Case::new(&format!("{output_padding} {conv:?}"), &inputs, distributed, move |x| {
            plain::conv_transpose1d(x, output_padding, conv)
        })
    };
    sweep("conv_transpose1d", shapes.map(case).to_vec());
}

const POOLS: [Pool; 3] =
    [Pool::tiles([2, 2]), Pool { size: [3, 2], stride: [1, 2] }, Pool { size: [1, 3], stride: [2, 1] }];

#[test]
fn pools_and_sizes_of_images() {
    let shapes: [&[usize]; 3] = [&[2, 4, 4, 4], &[3, 5, 5, 3], &[1, 3, 3, 5]];
    let mut cases = Vec::new();
    for shape in shapes {
        let x: [Input; 1] = [(shape, Float)];
        for pool in POOLS {
            let distributed = move |x: &[DTensor]| x[0].avg_pool2d(pool);
            cases.push(Case::new(&format!("mean of {pool:?}"), &x, distributed, move |x| {
                plain::windows(&x[0], pool)?.mean(4)
            }));
            let distributed = move |x: &[DTensor]| x[0].max_pool2d(pool);
            cases.push(Case::new(&format!("max of {pool:?}"), &x, distributed, move |x| {
                plain::windows(&x[0], pool)?.max(4)
            }));
        }
        for size in [[8, 6], [2, 7]] {
            let nearest = move |x: &[Tensor]| {
                let at = |n: usize, to: usize| Tensor::from_iter((0..to).map(|i| (i * n / to) as u32), &Cpu);
                x[0].index_select(&at(x[0].dim(2)?, size[0])?, 2)?
                    .index_select(&at(x[0].dim(3)?, size[1])?, 3)
            };
            cases.push(Case::new(
                &format!("to {size:?}"),
                &x,
                move |x| x[0].upsample_nearest2d(size),
                nearest,
            ));
        }
    }
    cases.push(Case::new(
        "none",
        &[(&[0, 2, 3, 3], Float)],
        |x| x[0].avg_pool2d(POOLS[0]),
        |x| plain::windows(&x[0], POOLS[0])?.mean(4),
    ));
    sweep("images", cases);
}

#[test]
fn images_of_other_sizes_and_borders() {
    let shapes: [&[usize]; 3] = [&[2, 4, 4, 4], &[3, 5, 4, 2], &[1, 9, 2, 6]];
    let mut cases = Vec::new();
    for shape in shapes {
        let x: [Input; 1] = [(shape, Float)];
        for (size, align) in
            [([8, 6], false), ([3, 1], false), ([5, 7], true), ([1, 3], true), ([4, 4], false)]
        {
            cases.push(Case::new(
                &format!("bilinear {size:?} {align}"),
                &x,
                move |x| x[0].upsample_bilinear2d(size, align),
                move |x| plain::bilinear(&x[0], size, align),
            ));
        }
        for (scales, align) in
            [([1.6, 0.7], false), ([0.6, 2.0], true), ([1.1, 1.9], false), ([1.1, 1.1], false)]
        {
            cases.push(Case::new(
                &format!("bilinear by {scales:?} {align}"),
                &x,
                move |x| x[0].upsample_bilinear2d_with_scale(scales[0], scales[1], align),
                move |x| {
                    plain::resized(&x[0], |pixels| {
                        pixels.upsample_bilinear2d_with_scale(scales[0], scales[1], align)
                    })
                },
            ));
        }
        cases.push(Case::new(
            "border",
            &x,
            |x| x[0].replication_pad2d(1),
            |x| candle_nn::ops::replication_pad2d(&x[0], 1),
        ));
        cases.push(Case::new(
            "pixel_unshuffle",
            &x,
            |x| x[0].pixel_unshuffle(2),
            |x| candle_nn::ops::pixel_unshuffle(&x[0], 2),
        ));
        cases.push(Case::new(
            "nearest of lines",
            &x,
            |x| x[0].flatten(1, 2)?.upsample_nearest1d(9),
            |x| {
                let lines = x[0].flatten(1, 2)?.contiguous()?;
                let n = lines.dim(2)?;
                lines.index_select(&Tensor::from_iter((0..9).map(|i| (i * n / 9) as u32), &Cpu)?, 2)
            },
        ));
    }
    for (shape, factor) in [(&[2, 4, 2, 3][..], 2), (&[3, 9, 1, 2], 3), (&[1, 12, 1, 1], 2)] {
        cases.push(Case::new(
            "pixel_shuffle",
            &[(shape, Float)],
            move |x| x[0].pixel_shuffle(factor),
            move |x| candle_nn::ops::pixel_shuffle(&x[0], factor),
        ));
    }
    sweep("resized images", cases);
}

#[test]
fn equal_largest_elements_share_no_gradient() -> candle_core::Result<()> {
    let x = candle_core::Var::from_tensor(&Tensor::zeros((1, 1, 2, 3), DType::F64, &Cpu)?)?;
    let grad = kernels::max_pool2d(&x, Pool { size: [2, 2], stride: [1, 1] })?
        .sum_all()?
        .backward()?
        .remove(&x)
        .unwrap();
    assert_eq!(grad.flatten_all()?.to_vec1::<f64>()?, [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
    let nan = Tensor::new(&[[[[1.0, f64::NAN], [3.0, 2.0]]]], &Cpu)?;
    assert!(kernels::max_pool2d(&nan, Pool::tiles([2, 2]))?.flatten_all()?.to_vec1::<f64>()?[0].is_nan());
    Ok(())
}

#[test]
fn group_norm() {
    let shapes: [(&[usize], usize); 5] =
        [(&[2, 4, 3], 2), (&[3, 6, 2, 2], 3), (&[1, 5, 3], 5), (&[4, 6], 1), (&[2, 9, 1], 3)];
    let case = |(shape, groups): (&'static [usize], usize)| {
        let inputs: [Input; 3] = [(shape, Float), (&shape[1..2], Float), (&shape[1..2], Float)];
        let distributed =
            move |x: &[DTensor]| -> Result<DTensor> { x[0].group_norm(groups, &x[1], &x[2], 1e-3) };
        Case::new(&format!("{groups} groups"), &inputs, distributed, move |x| {
            plain::group_norm(x, groups, 1e-3)
        })
    };
    sweep("group_norm", shapes.map(case).to_vec());
}

/// Places of elements, and the elements.
type Differing = &'static [(usize, u32)];

/// What PyTorch 2.15 gives for `interpolate(arange(from), size=to, mode="nearest")` where single precision, double
/// precision and whole numbers differ: the places that differ from `i * from / to`, with their values.
const NEAREST: [(usize, usize, Differing); 7] = [
    (14, 46, &[(23, 6)]),
    (26, 22, &[(11, 12)]),
    (26, 44, &[(22, 12)]),
    (28, 46, &[(23, 13)]),
    (30, 58, &[(29, 14)]),
    (39, 33, &[(11, 12), (22, 25)]),
    (30, 22, &[]),
];

#[test]
fn nearest_elements_are_those_of_pytorch() {
    for (from, to, differs) in NEAREST {
        let line = Tensor::arange(0u32, from as u32, &Cpu).unwrap().to_dtype(DType::F64).unwrap();
        for (shape, size) in [((1, 1, 1, from), [1, to]), ((1, 1, from, 1), [to, 1])] {
            let image = line.reshape(shape).unwrap();
            let got = kernels::upsample_nearest2d(&image, size)
                .unwrap()
                .flatten_all()
                .unwrap()
                .to_vec1::<f64>()
                .unwrap();
            let exact = |i: usize| (i * from / to) as u32;
            let want =
                |i: usize| differs.iter().find(|(at, _)| *at == i).map_or(exact(i), |(_, value)| *value);
            assert_eq!(got, (0..to).map(|i| f64::from(want(i))).collect::<Vec<_>>(), "{from} to {to}");
        }
    }
}

#[test]
fn no_dilation_and_sizes_beyond_memory_are_refused() {
    on_ranks(2, "refused", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let ones = |shape: &[usize]| DTensor::ones(shape, DType::F32, &Cpu, &mesh, &[Replicate]);
        let (x, kernel) = (ones(&[1, 2, 5, 5])?, ones(&[2, 2, 3, 3])?);
        let (line, of_line) = (x.sum(3)?, kernel.sum(3)?);
        let still = Conv { dilation: 0, ..DENSE };
        let far = Conv { padding: usize::MAX / 2 - 2, ..DENSE };
        let huge = "more than memory holds";
        for (made, why) in [
            (x.conv2d(&kernel, None, still), "dilation"),
            (x.conv_transpose2d(&kernel, None, 0, still), "dilation"),
            (line.conv_transpose1d(&of_line, None, 0, still), "dilation"),
            (x.conv2d(&kernel, None, far), huge),
            (line.conv1d(&of_line, None, far), huge),
            (line.causal_conv1d(&of_line, None, Conv { padding: 1, ..DENSE }), "no padding"),
            (line.causal_conv1d(&of_line, None, Conv { stride: 2, ..DENSE }), "a stride of 1"),
            (line.causal_conv1d(&of_line, None, still), "dilation"),
            (line.causal_conv1d(&of_line, None, Conv { dilation: usize::MAX / 2, ..DENSE }), "does not fit"),
            (x.upsample_bilinear2d_with_scale(1e30, 1e30, false), huge),
            (x.upsample_nearest2d([usize::MAX, 2]), huge),
            (line.upsample_nearest1d(usize::MAX), huge),
            (DTensor::arange(0f64, 1e300, &Cpu, &mesh, &[Replicate]), huge),
            (ones(&[usize::MAX, usize::MAX]), huge),
            (ones(&[usize::MAX / 4]), huge),
        ] {
            let error = made.unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert_eq!(ones(&[usize::MAX, 0])?.elem_count(), 0);
        Ok(())
    });
}
