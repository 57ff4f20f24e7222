//! candle's names mean candle's functions: every op whose name candle has gives on one device what candle's gives.
use super::candle_methods::{package_of, source_of};
use crate::common::*;
use candle_core::op::CmpOp;
use candle_core::{DType, Device, Tensor};
use candle_nn::ops;
use candle_shard::kernels::Pool;
use candle_shard::{Conv, DTensor, Replicate, Result};
use std::collections::BTreeSet;
use std::path::Path;
use test_utils::on_ranks;

type Here = fn(&[DTensor]) -> Result<DTensor>;
type There = fn(&[Tensor]) -> candle_core::Result<Tensor>;

/// An op in both forms. Inputs: `[4, 6]` twice, positive numbers `[4, 6]`, a vector `[6]`, an image `[2, 4, 6, 6]`,
/// ids `[4, 6]` below 4, and filters `[3, 4, 2, 2]`.
macro_rules! same {
    ($($name:ident: |$x:ident| $made:expr;)*) => {
        &[$((stringify!($name), |$x: &[DTensor]| Ok($made?), |$x: &[Tensor]| Ok($made?))),*]
    };
}

const SAME: &[(&str, Here, There)] = same! {
    abs: |x| x[0].abs(); affine: |x| x[0].affine(1.5, -0.3); argmax: |x| x[0].argmax(1); argmin: |x| x[0].argmin(0);
    argmax_keepdim: |x| x[0].argmax_keepdim(1); argmin_keepdim: |x| x[0].argmin_keepdim(0); max: |x| x[0].max(1);
    arg_sort_last_dim: |x| x[0].arg_sort_last_dim(false); sort_last_dim: |x| x[0].sort_last_dim(true).map(|x| x.0);
    min: |x| x[0].min(0); max_keepdim: |x| x[0].max_keepdim(1); min_keepdim: |x| x[0].min_keepdim(0); ceil: |x| x[0].ceil();
    max_all: |x| x[0].max_all(); min_all: |x| x[0].min_all(); clamp: |x| x[0].clamp(-0.5, 0.7); cos: |x| x[0].cos();
    broadcast_as: |x| x[3].broadcast_as((4, 6)); broadcast_left: |x| x[3].broadcast_left(4); exp: |x| x[0].exp();
    cumsum: |x| x[0].cumsum(1);
    chunk: |x| x[0].chunk(4, 1).map(|x| x[3].clone()); contiguous: |x| x[0].contiguous();
    dot: |x| x[3].dot(&x[3]); elu: |x| x[0].elu(0.7); eq: |x| x[0].eq(&x[0]); erf: |x| x[0].erf(); expand: |x| x[3].expand((2, 6));
    flatten: |x| x[4].flatten(1, 2); flatten_all: |x| x[4].flatten_all(); flatten_from: |x| x[4].flatten_from(2);
    flatten_to: |x| x[4].flatten_to(1); flip: |x| x[0].flip(&[0, 1]); floor: |x| x[0].floor(); gather: |x| x[0].gather(&x[5], 0);
    ge: |x| x[0].ge(&x[1]); gt: |x| x[0].gt(&x[1]); le: |x| x[0].le(&x[1]); lt: |x| x[0].lt(&x[1]); ne: |x| x[0].ne(&x[1]);
    gelu: |x| x[0].gelu(); gelu_erf: |x| x[0].gelu_erf(); get: |x| x[0].get(2); get_on_dim: |x| x[0].get_on_dim(1, 2);
    index_select: |x| x[0].index_select(&x[5].get(0)?, 0); index_add: |x| x[0].index_add(&x[5].narrow(1, 0, 1)?.flatten_all()?, &x[1], 0);
    log: |x| x[2].log(); log_sum_exp: |x| x[0].log_sum_exp(1); matmul: |x| x[0].matmul(&x[1].t()?);
    maximum: |x| x[0].maximum(&x[1]); minimum: |x| x[0].minimum(&x[1]); mean: |x| x[0].mean(1); mean_all: |x| x[0].mean_all();
    mean_keepdim: |x| x[0].mean_keepdim(0); mv: |x| x[0].mv(&x[3]); narrow: |x| x[0].narrow(1, 2, 3); neg: |x| x[0].neg();
    norm: |x| x[0].norm(); pad_with_same: |x| x[0].pad_with_same(1, 2, 1); pad_with_zeros: |x| x[0].pad_with_zeros(0, 2, 1);
    permute: |x| x[4].permute((3, 1, 0, 2)); pow: |x| x[2].pow(&x[1]); powf: |x| x[2].powf(1.7); recip: |x| x[2].recip();
    relu: |x| x[0].relu(); repeat: |x| x[0].repeat((2, 3)); reshape: |x| x[0].reshape((8, ())); roll: |x| x[0].roll(2, 1);
    round: |x| x[0].affine(3.0, 0.5)?.round(); round_to: |x| x[0].round_to(1); sign: |x| x[0].sign(); silu: |x| x[0].silu();
    scatter: |x| x[0].scatter(&x[5], &x[1], 0); scatter_add: |x| x[0].scatter_add(&x[5], &x[1], 0); sin: |x| x[0].sin();
    slice_assign: |x| x[0].slice_assign(&[1..3, 2..6], &x[1].narrow(0, 0, 2)?.narrow(1, 0, 4)?); sqr: |x| x[0].sqr();
    slice_scatter: |x| x[0].slice_scatter(&x[1].narrow(1, 0, 2)?, 1, 3); sqrt: |x| x[2].sqrt(); squeeze: |x| x[0].narrow(0, 1, 1)?.squeeze(0);
    sum: |x| x[0].sum(0); sum_all: |x| x[0].sum_all(); sum_keepdim: |x| x[0].sum_keepdim(1); t: |x| x[0].t(); tanh: |x| x[0].tanh();
    to_dtype: |x| x[0].to_dtype(DType::F32); transpose: |x| x[4].transpose(1, 3); unfold: |x| x[0].unfold(1, 3, 2);
    unsqueeze: |x| x[0].unsqueeze(1); upsample_nearest1d: |x| x[4].flatten(0, 1)?.upsample_nearest1d(11); var: |x| x[0].var(1);
    var_keepdim: |x| x[0].var_keepdim(0);
    where_cond: |x| x[0].gt(&x[1])?.where_cond(&x[0], &x[1]); ones_like: |x| x[0].ones_like(); zeros_like: |x| x[0].zeros_like();
    broadcast_add: |x| x[0].broadcast_add(&x[3]); broadcast_sub: |x| x[0].broadcast_sub(&x[3]); broadcast_mul: |x| x[0].broadcast_mul(&x[3]);
    broadcast_div: |x| x[0].broadcast_div(&x[2]); broadcast_maximum: |x| x[0].broadcast_maximum(&x[3]);
    broadcast_minimum: |x| x[0].broadcast_minimum(&x[3]); broadcast_pow: |x| x[2].broadcast_pow(&x[3]);
    broadcast_matmul: |x| x[0].broadcast_matmul(&x[1].t()?);
    broadcast_eq: |x| x[0].broadcast_eq(&x[3]); broadcast_ne: |x| x[0].broadcast_ne(&x[3]); broadcast_lt: |x| x[0].broadcast_lt(&x[3]);
    broadcast_le: |x| x[0].broadcast_le(&x[3]); broadcast_gt: |x| x[0].broadcast_gt(&x[3]); broadcast_ge: |x| x[0].broadcast_ge(&x[3]);
    cmp: |x| x[0].cmp(&x[1], CmpOp::Le); copy: |x| x[0].t()?.copy(); force_contiguous: |x| x[0].t()?.force_contiguous();
    to_device: |x| x[0].to_device(&Device::Cpu); slice_scatter0: |x| x[0].slice_scatter0(&x[1].narrow(0, 0, 2)?, 1);
    interpolate1d: |x| x[4].flatten(0, 1)?.interpolate1d(11); interpolate2d: |x| x[4].interpolate2d(9, 13);
    avg_pool2d_with_stride: |x| x[4].avg_pool2d_with_stride((2, 3), (1, 1)); max_pool2d_with_stride: |x| x[4].max_pool2d_with_stride(3, 2);
    upsample_bilinear2d_with_scale: |x| x[4].upsample_bilinear2d_with_scale(1.3, 0.7, false);
    add: |x| x[0].add(&x[1]); sub: |x| x[0].sub(&x[1]); mul: |x| x[0].mul(&x[1]); div: |x| x[0].div(&x[2]);
};

/// Where the arguments differ, or candle has a function instead of a method.
const APART: &[(&str, Here, There)] = &[
    ("cat", |x| DTensor::cat(&x[..2], 1), |x| Tensor::cat(&x[..2], 1)),
    (
        "meshgrid",
        |x| Ok(DTensor::meshgrid(&[x[3].clone(), x[3].sqr()?], true)?.remove(1)),
        |x| Ok(Tensor::meshgrid(&[x[3].clone(), x[3].sqr()?], true)?.remove(1)),
    ),
    ("stack", |x| DTensor::stack(&x[..2], 1), |x| Tensor::stack(&x[..2], 1)),
    ("detach", |x| Ok(x[0].detach()), |x| Ok(x[0].detach())),
    ("embedding", |x| x[0].embedding(&x[5]), |x| x[0].embedding(&x[5].flatten_all()?)?.reshape((4, 6, 6))),
    ("max_pool2d", |x| x[4].max_pool2d(Pool::tiles([2, 3])), |x| x[4].max_pool2d((2, 3))),
    ("avg_pool2d", |x| x[4].avg_pool2d(Pool::tiles([2, 3])), |x| x[4].avg_pool2d((2, 3))),
    ("upsample_nearest2d", |x| x[4].upsample_nearest2d([9, 13]), |x| x[4].upsample_nearest2d(9, 13)),
    (
        "upsample_bilinear2d",
        |x| x[4].upsample_bilinear2d([9, 13], true),
        |x| x[4].upsample_bilinear2d(9, 13, true),
    ),
    (
        "conv1d",
        |x| x[4].get_on_dim(2, 0)?.conv1d(&x[6].get_on_dim(2, 0)?, None, WALK),
        |x| x[4].get_on_dim(2, 0)?.contiguous()?.conv1d(&x[6].get_on_dim(2, 0)?.contiguous()?, 1, 2, 1, 1),
    ),
    ("conv2d", |x| x[4].conv2d(&x[6], None, WALK), |x| x[4].conv2d(&x[6], 1, 2, 1, 1)),
    (
        "conv_transpose1d",
        |x| x[4].get_on_dim(2, 0)?.conv_transpose1d(&x[6].get_on_dim(2, 0)?.transpose(0, 1)?, None, 1, WALK),
        |x| {
            let kernel = x[6].get_on_dim(2, 0)?.transpose(0, 1)?.contiguous()?;
            x[4].get_on_dim(2, 0)?.contiguous()?.conv_transpose1d(&kernel, 1, 1, 2, 1, 1)
        },
    ),
    (
        "conv_transpose2d",
        |x| x[4].conv_transpose2d(&x[6].transpose(0, 1)?, None, 1, WALK),
        |x| x[4].conv_transpose2d(&x[6].transpose(0, 1)?.contiguous()?, 1, 1, 2, 1),
    ),
    ("softmax", |x| x[0].softmax(0), |x| ops::softmax(&x[0], 0)),
    ("log_softmax", |x| x[0].log_softmax(1), |x| ops::log_softmax(&x[0], 1)),
    ("softmax_last_dim", |x| x[0].softmax_last_dim(), |x| ops::softmax_last_dim(&x[0])),
    ("sigmoid", |x| x[0].sigmoid(), |x| ops::sigmoid(&x[0])),
    ("hard_sigmoid", |x| x[0].hard_sigmoid(), |x| ops::hard_sigmoid(&x[0])),
    ("mish", |x| x[0].mish(), |x| ops::mish(&x[0])),
    ("leaky_relu", |x| x[0].leaky_relu(0.1), |x| ops::leaky_relu(&x[0], 0.1)),
    // candle's is for single precision alone.
    (
        "selu",
        |x| x[0].to_dtype(DType::F32)?.selu(1.5, 1.25),
        |x| ops::selu(&x[0].to_dtype(DType::F32)?, 1.5, 1.25),
    ),
    ("swiglu", |x| x[0].swiglu(), |x| ops::swiglu(&x[0])),
    (
        "layer_norm",
        |x| x[0].layer_norm(&x[3], &x[3], 1e-5),
        |x| ops::layer_norm_slow(&x[0], &x[3], &x[3], 1e-5),
    ),
    ("rms_norm", |x| x[0].rms_norm(&x[3], 1e-5), |x| ops::rms_norm_slow(&x[0], &x[3], 1e-5)),
    ("pixel_shuffle", |x| x[4].pixel_shuffle(2), |x| ops::pixel_shuffle(&x[4], 2)),
    ("pixel_unshuffle", |x| x[4].pixel_unshuffle(2), |x| ops::pixel_unshuffle(&x[4], 2)),
    ("replication_pad2d", |x| x[4].replication_pad2d(1), |x| ops::replication_pad2d(&x[4], 1)),
    (
        "cross_entropy",
        |x| x[0].cross_entropy(&x[5].get_on_dim(1, 0)?),
        |x| candle_nn::loss::cross_entropy(&x[0], &x[5].get_on_dim(1, 0)?.contiguous()?),
    ),
];

const WALK: Conv = Conv { padding: 1, stride: 2, dilation: 1, groups: 1 };

/// Shared names of what is no function of elements, and where it is tested.
const ELSEWHERE: &[&str] = &[
    "backward",
    "device",
    "dim",
    "dims",
    "dtype",
    "elem_count",
    "rank",
    "shape",
    "to_scalar", // what a tensor is
    "to_vec0",
    "to_vec1",
    "to_vec2",
    "to_vec3", // elements, below
    "apply",
    "apply_t", // modules: tests/suite/layers
    "is_contiguous",
    "const_set",
    "zero_set",
    "one_set",
    "slice_set",
    "scatter_set",
    "scatter_add_set", // changes in place: in_place.rs
    "arange",
    "arange_step",
    "eye",
    "full",
    "ones",
    "tril2",
    "triu2",
    "zeros", // made in place: tests/factory.rs
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "dropout", // candle has no seeds: tests/random.rs
];

#[test]
fn candles_names_mean_candles_functions() {
    on_ranks(1, "names", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[1])?;
        let ids = Tensor::from_iter((0..24u32).map(|i| (i * 7 + 3) % 4), &Device::Cpu)?.reshape((4, 6))?;
        let plain = [
            values(&[4, 6], 1, DType::F64),
            values(&[4, 6], 2, DType::F64),
            (values(&[4, 6], 3, DType::F64) + 2.0)?,
            values(&[6], 4, DType::F64),
            values(&[2, 4, 6, 6], 5, DType::F64),
            ids,
            values(&[3, 4, 2, 2], 6, DType::F64),
        ];
        let here: Vec<DTensor> =
            plain.iter().map(|x| DTensor::distribute(x, &mesh, &[Replicate])).collect::<Result<_>>()?;
        for (name, op, of_candle) in SAME.iter().chain(APART) {
            let want =
                of_candle(&plain).map_err(|e| candle_core::Error::Msg(format!("candle's {name}: {e}")))?;
            let got = op(&here)?.full_tensor()?;
            // candle holds some constants in single precision.
            assert!(distance(&got, &want) < 1e-6, "{name}: {got} where candle has {want}");
        }
        Ok(())
    });
}

#[test]
fn elements_leave_the_mesh_as_lists() {
    on_ranks(3, "lists", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let plain = values(&[4, 3, 2], 1, DType::F64);
        let x = DTensor::distribute(&plain, &mesh, &[candle_shard::Shard(0)])?;
        assert_eq!(x.to_vec3::<f64>()?, plain.to_vec3::<f64>()?);
        assert_eq!(x.flatten(1, 2)?.to_vec2::<f64>()?, plain.flatten(1, 2)?.to_vec2::<f64>()?);
        assert_eq!(x.flatten_all()?.to_vec1::<f64>()?, plain.flatten_all()?.to_vec1::<f64>()?);
        assert!((x.sum_all()?.to_vec0::<f64>()? - plain.sum_all()?.to_vec0::<f64>()?).abs() < 1e-12);
        assert!(x.to_vec1::<f64>().is_err() && x.flatten_all()?.to_vec1::<f32>().is_err());
        Ok(())
    });
}

/// The words behind `pub fn ` and in the first place of macros, in lines that begin with this.
fn functions(source: &Path, indent: &str) -> BTreeSet<String> {
    let text = std::fs::read_to_string(source).unwrap();
    let name = |line: &str| {
        let line = line.strip_prefix(indent)?;
        let rest = ["pub fn ", "unary_op!(", "binary_op!(", "broadcast_binary_op!("]
            .iter()
            .find_map(|p| line.strip_prefix(p))?;
        rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().map(str::to_string)
    };
    text.lines().filter_map(name).collect()
}

#[test]
fn every_name_that_candle_has_is_compared_with_it() {
    let source = |package| source_of(&package_of(package)).unwrap_or_else(|why| panic!("{why}"));
    let (core, nn) = (source("candle-core"), source("candle-nn"));
    let mut candles = functions(&core.join("tensor.rs"), "    ");
    candles.extend(functions(&core.join("conv.rs"), "    "));
    candles.extend(functions(&nn.join("ops.rs"), ""));
    candles.extend(functions(&nn.join("loss.rs"), ""));
    assert!(
        ["gelu", "softmax", "cross_entropy", "narrow", "conv1d"].iter().all(|name| candles.contains(*name))
    );
    let known: BTreeSet<&str> =
        SAME.iter().chain(APART).map(|(name, ..)| *name).chain(ELSEWHERE.iter().copied()).collect();
    let ours = crate::ops::complete::ops();
    let missing: Vec<&String> =
        ours.iter().filter(|op| candles.contains(*op) && !known.contains(op.as_str())).collect();
    assert!(missing.is_empty(), "names of candle that no test compares: {missing:?}");
}
