//! Convolutions. Batch, channels or the length of lines may be sharded; images are whole.
use super::halo::Halo;
use super::{neutral, neutral_of};
use crate::kernels::Conv;
use crate::layout::{Placement, Replicate, Shard, Spec};
use crate::rules::{self, OpSpec, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use candle_core::Tensor;
use smallvec::smallvec;

const SUM: Placement = Placement::PARTIAL_SUM;

/// The dim of the length of lines `[b, c, l]`.
const LENGTH: usize = 2;

/// How a kernel lies over lines.
#[derive(Clone, Copy)]
struct LineConv {
    conv: Conv,
    /// The result at a place depends on no later one, and there are as many places as elements.
    causal: bool,
}

impl LineConv {
    /// The distance from the first to the last element under a kernel of `size` elements.
    const fn reach(self, size: usize) -> usize {
        self.conv.dilation * size.saturating_sub(1)
    }

    /// The zeros before a line.
    const fn before(self, size: usize) -> usize {
        if self.causal { self.reach(size) } else { self.conv.padding }
    }

    /// The number of results; `None` if the kernel does not fit.
    fn places(self, len: usize, size: usize) -> Option<usize> {
        if !self.causal {
            return self.conv.places(len, size).map(|(places, _)| places);
        }
        let reach = size.checked_sub(1)?.checked_mul(self.conv.dilation)?;
        (self.conv.dilation > 0 && reach.checked_add(len)? <= isize::MAX as usize).then_some(len)
    }

    /// The results of this rank, from its elements and the neighboring ones of others.
    fn run(self, x: &[DTensor], out: &Spec) -> Result<Tensor> {
        let (input, kernel) = (x[0].to_local(), x[1].to_local());
        let size = kernel.dims()[2];
        let (before, reach, stride) =
            (self.before(size) as isize, self.reach(size) as isize, self.conv.stride as isize);
        let halo = Halo::of(&x[0], LENGTH)?;
        let (input, padding) = match &halo {
            Some(halo) => {
                let window = |places: std::ops::Range<isize>| {
                    places.start * stride - before..(places.end - 1) * stride - before + reach + 1
                };
                (halo.window(input, out, window)?, 0)
            }
            None => (input.clone(), self.conv.padding),
        };
        let shape = out.local_shape();
        if input.elem_count() * kernel.elem_count() == 0 || shape.contains(&0) {
            return neutral_of(&[&input, kernel], &shape, out.dtype());
        }
        let is_padded = halo.is_none() && self.causal;
        let input = if is_padded { input.pad_with_zeros(LENGTH, self.before(size), 0)? } else { input };
        let conv = Conv { padding, groups: groups(self.conv, &input), ..self.conv };
        Ok(conv.line(&input.contiguous()?, &kernel.contiguous()?)?)
    }
}

/// The groups of the channels that a rank has. With several groups, only groups of a single channel are ever cut.
fn groups(conv: Conv, input: &Tensor) -> usize {
    if conv.groups == 1 { 1 } else { conv.groups.min(input.dims()[1]) }
}

impl DTensor {
    /// The convolution of `[b, c, l]` with a kernel `[o, c / groups, k]` and a bias `[o]`: `[b, o, l']`.
    ///
    /// The batch or the output channels (through the kernel) may be sharded. If the input channels of both are sharded,
    /// the result is partial. With groups, channels stay sharded only if each channel is its own group. A sharded length
    /// stays sharded: each rank gets the elements next to its own that its results need, in one all_to_all in each pass.
    ///
    /// # Errors
    /// If shapes or dtypes do not agree, or the kernel does not fit into the padded input.
    #[track_caller]
    pub fn conv1d(&self, kernel: &Self, bias: Option<&Self>, conv: Conv) -> Result<Self> {
        self.line("conv1d", kernel, LineConv { conv, causal: false })?.with_bias("conv1d", bias)
    }

    /// The causal convolution of `[b, c, l]` with a kernel `[o, c / groups, k]` and a bias `[o]`: `[b, o, l]`.
    ///
    /// It is [`conv1d`](Self::conv1d) with `(k - 1) · dilation` zeros before the input and none behind it, so the result
    /// at a place depends on no later one. A length that is sharded along the sequence stays so: each rank gets as many
    /// elements of the ranks before it.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{Conv, DTensor, Replicate, Result, Shard};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("cp", 2)])?;
    ///     let x = Tensor::new(&[[[1f32, 2., 3., 4., 5.]]], &Device::Cpu)?;
    ///     let x = DTensor::distribute(&x, &mesh, &[Shard(2)])?;
    ///     let kernel = DTensor::ones((1, 1, 3), DType::F32, &Device::Cpu, &mesh, &[Replicate])?;
    ///     let sums = x.causal_conv1d(&kernel, None, Conv::default())?;
    ///     assert_eq!(sums.placements(), [Shard(2)]);
    ///     assert_eq!(sums.to_vec3::<f32>()?, [[[1., 3., 6., 9., 12.]]]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If shapes or dtypes do not agree, or `conv` has a padding or a stride.
    #[track_caller]
    pub fn causal_conv1d(&self, kernel: &Self, bias: Option<&Self>, conv: Conv) -> Result<Self> {
        self.line("causal_conv1d", kernel, LineConv { conv, causal: true })?.with_bias("causal_conv1d", bias)
    }

    #[track_caller]
    fn line(&self, op: &'static str, kernel: &Self, line: LineConv) -> Result<Self> {
        let inputs = [self, kernel];
        let op_spec = || {
            let mut made = OpSpec::new(op, &inputs, self.line_signature(op, kernel, line)?)?;
            let sharded = |axis: usize| {
                made.outs[0].placements()[axis] == Shard(LENGTH) && self.mesh().shape()[axis] > 1
            };
            // A rank without results may have elements for others.
            if (0..self.mesh().ndim()).any(sharded) {
                made.nothing = false;
            }
            Ok(made)
        };
        let run = |x: &[DTensor], outs: &[std::sync::Arc<Spec>]| Ok(smallvec![line.run(x, &outs[0])?]);
        Ok(rules::run_with(op, &line.conv.attributes(), &inputs, &op_spec, &run)?.remove(0))
    }

    #[track_caller]
    fn line_signature(&self, op: &'static str, kernel: &Self, line: LineConv) -> Result<Signature> {
        let LineConv { conv, causal } = line;
        if causal && (conv.padding, conv.stride) != (0, 1) {
            let what = format!("{} with a kernel {}, {conv:?}", self.spec(), kernel.spec());
            return Error::op(op, format!("{what}: expected no padding and a stride of 1"));
        }
        let mut signature = self.conv_signature(op, 1, kernel, conv, |len, size| line.places(len, size))?;
        signature.rows.push(ShardingRule::new(Shard(LENGTH), &[Shard(LENGTH), Replicate]));
        let keeps = line.places(self.dims()[LENGTH], kernel.dims()[LENGTH]) == Some(self.dims()[LENGTH]);
        Ok(if keeps { signature } else { signature.resized(LENGTH) })
    }

    /// The convolution of `[b, c, h, w]` with a kernel `[o, c / groups, kh, kw]` and a bias `[o]`: `[b, o, h', w']`.
    ///
    /// See [`conv1d`](Self::conv1d) for the dims that may be sharded.
    ///
    /// # Errors
    /// If shapes or dtypes do not agree, or the kernel does not fit into the padded input.
    #[track_caller]
    pub fn conv2d(&self, kernel: &Self, bias: Option<&Self>, conv: Conv) -> Result<Self> {
        let places = |len, size| conv.places(len, size).map(|(places, _)| places);
        let signature = || self.conv_signature("conv2d", 2, kernel, conv, places);
        let made = rules::run("conv2d", &conv.attributes(), &[self, kernel], signature, |x, out| {
            let (input, kernel) = (x[0].to_local(), x[1].to_local());
            if input.elem_count() * kernel.elem_count() == 0 {
                return neutral(x, &out.local_shape(), out.dtype());
            }
            let conv = Conv { groups: groups(conv, input), ..conv };
            Ok(conv.image(&input.contiguous()?, &kernel.contiguous()?)?)
        })?;
        made.with_bias("conv2d", bias)
    }

    #[track_caller]
    fn conv_signature(
        &self,
        op: &'static str,
        spatial: usize,
        kernel: &Self,
        conv: Conv,
        places: impl Fn(usize, usize) -> Option<usize>,
    ) -> Result<Signature> {
        self.check_float(op)?;
        let refuse = |why: &str| {
            Error::op(op, format!("{} with a kernel {}, {conv:?}: {why}", self.spec(), kernel.spec()))
        };
        let (x, k) = (self.dims(), kernel.dims());
        if x.len() != spatial + 2 || k.len() != spatial + 2 || kernel.dtype() != self.dtype() {
            return refuse("expected [batch, in, ..] and [out, in / groups, ..] of one dtype");
        }
        let groups = conv.groups;
        if groups == 0 || k[1].checked_mul(groups) != Some(x[1]) || !k[0].is_multiple_of(groups) {
            return refuse("expected kernels for in / groups channels, and groups that divide in and out");
        }
        let mut shape = vec![x[0], k[0]];
        for (&len, &size) in x[2..].iter().zip(&k[2..]) {
            let Some(places) = places(len, size) else {
                return refuse("the kernel does not fit into the padded input, or stride or dilation is 0");
            };
            shape.push(places);
        }
        let mut rows: ShardingRules =
            ShardingRules::from_iter([ShardingRule::new(Shard(0), &[Shard(0), Replicate])]);
        if groups == 1 {
            rows.push(ShardingRule::new(Shard(1), &[Replicate, Shard(0)]));
            rows.push(ShardingRule::new(SUM, &[Shard(1), Shard(1)]));
        } else if groups == x[1] && x[1] == k[0] {
            rows.push(ShardingRule::new(Shard(1), &[Shard(1), Shard(0)]));
        }
        rows.extend([ShardingRule::new(SUM, &[SUM, Replicate]), ShardingRule::new(SUM, &[Replicate, SUM])]);
        Ok(Signature::new(rows, &shape, self.dtype()))
    }

    /// The transposed convolution of `[b, c, h, w]` with a kernel `[c, o, kh, kw]` and a bias `[o]`: `[b, o, h', w']`.
    ///
    /// `output_padding` rows and columns are added at the end. The batch or the output channels may be sharded. If the
    /// input channels of both are sharded, the result is partial.
    ///
    /// # Errors
    /// If shapes or dtypes do not agree, `groups` is not 1, or the output is empty.
    #[track_caller]
    pub fn conv_transpose2d(
        &self,
        kernel: &Self,
        bias: Option<&Self>,
        output_padding: usize,
        conv: Conv,
    ) -> Result<Self> {
        let op = "conv_transpose2d";
        let Conv { padding, stride, dilation, .. } = conv;
        let attributes: Vec<usize> = conv.attributes().into_iter().chain([output_padding]).collect();
        let signature = || self.conv_transpose_signature(kernel, output_padding, conv);
        let y = rules::run(op, &attributes, &[self, kernel], signature, |x, out| {
            let (input, kernel) = (x[0].to_local(), x[1].to_local());
            if input.elem_count() * kernel.elem_count() == 0 {
                return neutral(x, &out.local_shape(), out.dtype());
            }
            let (input, kernel) = (input.contiguous()?, kernel.contiguous()?);
            Ok(input.conv_transpose2d(&kernel, padding, output_padding, stride, dilation)?)
        })?;
        y.with_bias(op, bias)
    }

    /// The transposed convolution of `[b, c, l]` with a kernel `[c, o, k]` and a bias `[o]`: `[b, o, l']`.
    ///
    /// See [`conv_transpose2d`](Self::conv_transpose2d).
    ///
    /// # Errors
    /// Those of [`conv_transpose2d`](Self::conv_transpose2d).
    #[track_caller]
    pub fn conv_transpose1d(
        &self,
        kernel: &Self,
        bias: Option<&Self>,
        output_padding: usize,
        conv: Conv,
    ) -> Result<Self> {
        let op = "conv_transpose1d";
        if self.rank() != 3 || kernel.rank() != 3 || output_padding >= conv.stride.max(conv.dilation) {
            let what = format!("{} with a kernel {}, {conv:?}", self.spec(), kernel.spec());
            let want =
                "expected [batch, in, l] and [in, out, k], and less output padding than stride or dilation";
            return Error::op(op, format!("{what}, output padding {output_padding}: {want}"));
        }
        let Some(len) = conv.transposed(self.dims()[2], kernel.dims()[2], output_padding) else {
            let what = format!("{} with a kernel {}, {conv:?}", self.spec(), kernel.spec());
            return Error::op(
                op,
                format!("{what}: the output has no element or too many, or stride or dilation is 0"),
            );
        };
        // A line is an image of one row without padding.
        let whole = Conv { padding: 0, ..conv };
        let y = self.unsqueeze(2)?.conv_transpose2d(&kernel.unsqueeze(2)?, None, 0, whole)?.squeeze(2)?;
        let y = y.pad_with_zeros(2, 0, output_padding)?;
        y.narrow(2, conv.padding, len)?.with_bias(op, bias)
    }

    #[track_caller]
    fn conv_transpose_signature(
        &self,
        kernel: &Self,
        output_padding: usize,
        conv: Conv,
    ) -> Result<Signature> {
        let op = "conv_transpose2d";
        self.check_float(op)?;
        let refuse = |why: &str| {
            let what = format!("{} with a kernel {}, {conv:?}", self.spec(), kernel.spec());
            Error::op(op, format!("{what}, output padding {output_padding}: {why}"))
        };
        let (&[b, c, h, w], &[kc, out, kh, kw]) = (self.dims(), kernel.dims()) else {
            return refuse("expected [batch, in, h, w] and [in, out, kh, kw]");
        };
        if c != kc || conv.groups != 1 || kernel.dtype() != self.dtype() {
            return refuse("expected one group, a kernel for each input channel, and one dtype");
        }
        if output_padding >= conv.stride.max(conv.dilation) {
            return refuse("expected an output padding less than the stride or the dilation");
        }
        let size = |len, k| conv.transposed(len, k, output_padding);
        let (Some(h), Some(w)) = (size(h, kh), size(w, kw)) else {
            return refuse("the output has no element or too many, or stride or dilation is 0");
        };
        let rows = ShardingRules::from_iter([
            ShardingRule::new(Shard(0), &[Shard(0), Replicate]),
            ShardingRule::new(Shard(1), &[Replicate, Shard(1)]),
            ShardingRule::new(SUM, &[Shard(1), Shard(0)]),
            ShardingRule::new(SUM, &[SUM, Replicate]),
            ShardingRule::new(SUM, &[Replicate, SUM]),
        ]);
        Ok(Signature::new(rows, &[b, out, h, w], self.dtype()))
    }

    /// `[b, c, ..]` plus a bias `[c]`.
    #[track_caller]
    pub(crate) fn with_bias(self, op: &'static str, bias: Option<&Self>) -> Result<Self> {
        let Some(bias) = bias else { return Ok(self) };
        if bias.dims() != &self.dims()[1..2] || bias.dtype() != self.dtype() {
            let reason =
                format!("bias {} for an output {}: expected [{}]", bias.spec(), self.spec(), self.dims()[1]);
            return Error::op(op, format!("{reason} of its dtype"));
        }
        let per_channel: Vec<usize> =
            self.dims()[1..].iter().enumerate().map(|(i, &n)| if i == 0 { n } else { 1 }).collect();
        self.add(&bias.reshape(&per_channel[..])?)
    }
}
