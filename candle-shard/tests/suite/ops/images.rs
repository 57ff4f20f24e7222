use crate::ops::sweep::{Case, Input, Kind::Float, sweep};
use candle_core::{DType, Device::Cpu, Tensor};
use candle_shard::kernels::{self, Pool};
use candle_shard::{Conv, DTensor, Result};

/// A convolution by its definition: for each element of the kernel the elements that it meets, times its matrix.
fn plain_conv(x: &[Tensor], conv: Conv) -> candle_core::Result<Tensor> {
    if x[0].rank() == 3 {
        let flat = [x[0].unsqueeze(2)?, x[1].unsqueeze(2)?];
        let flat = flat.into_iter().chain(x.get(2).cloned()).collect::<Vec<_>>();
        return plain_conv_in([0, conv.padding], &flat, conv)?.squeeze(2);
    }
    plain_conv_in([conv.padding; 2], x, conv)
}

fn plain_conv_in(padding: [usize; 2], x: &[Tensor], conv: Conv) -> candle_core::Result<Tensor> {
    let Conv { stride, dilation, groups, .. } = conv;
    let (batch, channels, ..) = x[0].dims4()?;
    let (outs, ins, kh, kw) = x[1].dims4()?;
    let padded = x[0].pad_with_zeros(2, padding[0], padding[0])?.pad_with_zeros(3, padding[1], padding[1])?;
    let places = |dim: usize, k: usize| (padded.dims()[dim] - dilation * (k - 1) - 1) / stride + 1;
    let (oh, ow) = (places(2, kh), places(3, kw));
    let at = |i: usize, n: usize| Tensor::from_iter((0..n).map(|o| (o * stride + i * dilation) as u32), &Cpu);
    let mut groups_out = Vec::new();
    for g in 0..groups {
        let input = padded.narrow(1, g * channels / groups, ins)?.contiguous()?;
        let kernel = x[1].narrow(0, g * outs / groups, outs / groups)?;
        let mut sum: Option<Tensor> = None;
        for (i, j) in (0..kh).flat_map(|i| (0..kw).map(move |j| (i, j))) {
            let met = input.index_select(&at(i, oh)?, 2)?.index_select(&at(j, ow)?, 3)?;
            let matrix = kernel.narrow(2, i, 1)?.narrow(3, j, 1)?.reshape((outs / groups, ins))?;
            let term = matrix.broadcast_matmul(&met.reshape((batch, ins, oh * ow))?)?;
            sum = Some(match sum {
                Some(sum) => (sum + term)?,
                None => term,
            });
        }
        groups_out.push(sum.unwrap().reshape((batch, outs / groups, oh, ow))?);
    }
    let y = Tensor::cat(&groups_out, 1)?;
    x.get(2).map_or(Ok(y.clone()), |bias| y.broadcast_add(&bias.reshape((outs, 1, 1))?))
}

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
        cases.push(Case::new(&format!("{conv:?}"), &inputs, with_bias, move |x| plain_conv(x, conv)));
        let without = move |x: &[DTensor]| x[0].conv1d(&x[1], None, conv);
        cases.push(Case::new(&format!("{conv:?}"), &inputs[..2], without, move |x| plain_conv(x, conv)));
    }
    sweep("conv1d", cases);
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
        cases.push(Case::new(&format!("{conv:?}"), &inputs, with_bias, move |x| plain_conv(x, conv)));
    }
    sweep("conv2d", cases);
}

/// A transposed convolution: the convolution of the input with zeros between its elements and the kernel turned over.
fn plain_transposed(x: &[Tensor], output_padding: usize, conv: Conv) -> candle_core::Result<Tensor> {
    let (b, c, h, w) = x[0].dims4()?;
    let (_, _, kh, kw) = x[1].dims4()?;
    let spread = |t: Tensor, dim: usize| {
        let n = t.dim(dim)?;
        let apart = t.unsqueeze(dim + 1)?.pad_with_zeros(dim + 1, 0, conv.stride - 1)?;
        let mut shape = t.dims().to_vec();
        shape[dim] *= conv.stride;
        apart.reshape(shape)?.narrow(dim, 0, (n - 1) * conv.stride + 1)
    };
    let wide = spread(spread(x[0].reshape((b, c, h, w))?, 2)?, 3)?;
    let around = |t: Tensor, dim: usize, k: usize| {
        let before = conv.dilation * (k - 1) - conv.padding;
        t.pad_with_zeros(dim, before, before + output_padding)
    };
    let wide = around(around(wide, 2, kh)?, 3, kw)?;
    let back = |n: usize| Tensor::from_iter((0..n as u32).rev(), &Cpu);
    let kernel = x[1].contiguous()?.index_select(&back(kh)?, 2)?.index_select(&back(kw)?, 3)?.transpose(0, 1)?;
    plain_conv_in([0; 2], &[wide, kernel.contiguous()?], Conv { dilation: conv.dilation, ..DENSE })
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
        Case::new(&format!("{conv:?}"), &inputs, transposed, move |x| plain_transposed(x, output_padding, conv))
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
        let distributed = move |x: &[DTensor]| x[0].conv_transpose1d(&x[1], Some(&x[2]), output_padding, conv);
        Case::new(&format!("{output_padding} {conv:?}"), &inputs, distributed, move |x| {
            // By definition: element i of the input, times element j of the kernel, goes to place i·s + j·d - p.
            let (&[b, _, l], &[_, o, k]) = (x[0].dims(), x[1].dims()) else { unreachable!("lines") };
            let Conv { padding, stride, dilation, .. } = conv;
            let len = (l - 1) * stride + dilation * (k - 1) + 1 + output_padding;
            let mut sum = Tensor::zeros((b, o, len), x[0].dtype(), &Cpu)?;
            for (i, j) in (0..l).flat_map(|i| (0..k).map(move |j| (i, j))) {
                let term = x[0].narrow(2, i, 1)?.squeeze(2)?.matmul(&x[1].narrow(2, j, 1)?.squeeze(2)?)?;
                let at = i * stride + j * dilation;
                sum = (sum + term.unsqueeze(2)?.pad_with_zeros(2, at, len - at - 1)?)?;
            }
            sum.narrow(2, padding, len - 2 * padding)?.broadcast_add(&x[2].reshape((o, 1))?)
        })
    };
    sweep("conv_transpose1d", shapes.map(case).to_vec());
}

/// Every window of a pool, stacked in a last dim.
fn windows(x: &Tensor, pool: Pool) -> candle_core::Result<Tensor> {
    let (_, _, h, w) = x.dims4()?;
    let places = |len: usize, i: usize| (len - pool.size[i]) / pool.stride[i] + 1;
    let at = |from: usize, i: usize, len: usize| {
        Tensor::from_iter((0..places(len, i)).map(|o| (o * pool.stride[i] + from) as u32), &Cpu)
    };
    let all = (0..pool.size[0]).flat_map(|i| (0..pool.size[1]).map(move |j| (i, j)));
    let parts = all.map(|(i, j)| x.index_select(&at(i, 0, h)?, 2)?.index_select(&at(j, 1, w)?, 3));
    Tensor::stack(&parts.collect::<candle_core::Result<Vec<_>>>()?, 4)
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
            cases
                .push(Case::new(&format!("mean of {pool:?}"), &x, distributed, move |x| windows(&x[0], pool)?.mean(4)));
            let distributed = move |x: &[DTensor]| x[0].max_pool2d(pool);
            cases.push(Case::new(&format!("max of {pool:?}"), &x, distributed, move |x| windows(&x[0], pool)?.max(4)));
        }
        for size in [[8, 6], [2, 7]] {
            let nearest = move |x: &[Tensor]| {
                let at = |n: usize, to: usize| Tensor::from_iter((0..to).map(|i| (i * n / to) as u32), &Cpu);
                x[0].index_select(&at(x[0].dim(2)?, size[0])?, 2)?.index_select(&at(x[0].dim(3)?, size[1])?, 3)
            };
            cases.push(Case::new(&format!("to {size:?}"), &x, move |x| x[0].upsample_nearest2d(size), nearest));
        }
    }
    cases.push(Case::new(
        "none",
        &[(&[0, 2, 3, 3], Float)],
        |x| x[0].avg_pool2d(POOLS[0]),
        |x| windows(&x[0], POOLS[0])?.mean(4),
    ));
    sweep("images", cases);
}

/// candle's own have no gradient: the matrices that they are, found by asking for the images of single pixels.
fn plain_resized(
    x: &Tensor,
    resize: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Tensor> {
    let (b, c, h, w) = x.dims4()?;
    let images = resize(&Tensor::eye(h * w, x.dtype(), &Cpu)?.reshape((h * w, 1, h, w))?)?;
    let (_, _, oh, ow) = images.dims4()?;
    x.reshape((b * c, h * w))?.matmul(&images.reshape((h * w, oh * ow))?)?.reshape((b, c, oh, ow))
}

fn plain_bilinear(x: &Tensor, size: [usize; 2], align: bool) -> candle_core::Result<Tensor> {
    plain_resized(x, |pixels| pixels.upsample_bilinear2d(size[0], size[1], align))
}

#[test]
fn images_of_other_sizes_and_borders() {
    let shapes: [&[usize]; 3] = [&[2, 4, 4, 4], &[3, 5, 4, 2], &[1, 9, 2, 6]];
    let mut cases = Vec::new();
    for shape in shapes {
        let x: [Input; 1] = [(shape, Float)];
        for (size, align) in [([8, 6], false), ([3, 1], false), ([5, 7], true), ([1, 3], true), ([4, 4], false)] {
            cases.push(Case::new(
                &format!("bilinear {size:?} {align}"),
                &x,
                move |x| x[0].upsample_bilinear2d(size, align),
                move |x| plain_bilinear(&x[0], size, align),
            ));
        }
        for (scales, align) in [([1.6, 0.7], false), ([0.6, 2.0], true), ([1.1, 1.9], false), ([1.1, 1.1], false)] {
            cases.push(Case::new(
                &format!("bilinear by {scales:?} {align}"),
                &x,
                move |x| x[0].upsample_bilinear2d_with_scale(scales[0], scales[1], align),
                move |x| {
                    plain_resized(&x[0], |pixels| pixels.upsample_bilinear2d_with_scale(scales[0], scales[1], align))
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
    let grad =
        kernels::max_pool2d(&x, Pool { size: [2, 2], stride: [1, 1] })?.sum_all()?.backward()?.remove(&x).unwrap();
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
        let distributed = move |x: &[DTensor]| -> Result<DTensor> { x[0].group_norm(groups, &x[1], &x[2], 1e-3) };
        Case::new(&format!("{groups} groups"), &inputs, distributed, move |x| {
            let rows = x[0].reshape((shape[0], groups, ()))?;
            let centred = rows.broadcast_sub(&rows.mean_keepdim(2)?)?;
            let stdev = (centred.sqr()?.mean_keepdim(2)? + 1e-3)?.sqrt()?;
            let per_channel = [&shape[1..2], &vec![1; shape.len() - 2]].concat();
            let normal = centred.broadcast_div(&stdev)?.reshape(shape)?;
            normal.broadcast_mul(&x[1].reshape(&per_channel[..])?)?.broadcast_add(&x[2].reshape(&per_channel[..])?)
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
            let got =
                kernels::upsample_nearest2d(&image, size).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
            let exact = |i: usize| (i * from / to) as u32;
            let want = |i: usize| differs.iter().find(|(at, _)| *at == i).map_or(exact(i), |(_, value)| *value);
            assert_eq!(got, (0..to).map(|i| f64::from(want(i))).collect::<Vec<_>>(), "{from} to {to}");
        }
    }
}
