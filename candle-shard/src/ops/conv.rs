//! Convolutions. Batch or channels may be sharded; images are whole.
use super::neutral;
use crate::kernels::Conv;
use crate::layout::{Placement, Replicate, Shard};
use crate::rules::{self, Row, Rows, Signature};
use crate::{DTensor, Error, Result};

const SUM: Placement = Placement::PARTIAL_SUM;

impl DTensor {
    /// The convolution of `[b, c, l]` with a kernel `[o, c / groups, k]` and a bias `[o]`: `[b, o, l']`.
    ///
    /// The batch or the output channels (through the kernel) may be sharded. If the input channels of both are sharded,
    /// the result is partial. With groups, channels stay sharded only if each channel is its own group.
    ///
    /// # Errors
    /// If shapes or dtypes do not agree, or the kernel does not fit into the padded input.
    #[track_caller]
    pub fn conv1d(&self, kernel: &Self, bias: Option<&Self>, conv: Conv) -> Result<Self> {
        self.convolved("conv1d", 1, kernel, conv)?.with_bias("conv1d", bias)
    }

    /// The convolution of `[b, c, h, w]` with a kernel `[o, c / groups, kh, kw]` and a bias `[o]`: `[b, o, h', w']`.
    ///
    /// See [`conv1d`](Self::conv1d) for the dims that may be sharded.
    ///
    /// # Errors
    /// If shapes or dtypes do not agree, or the kernel does not fit into the padded input.
    #[track_caller]
    pub fn conv2d(&self, kernel: &Self, bias: Option<&Self>, conv: Conv) -> Result<Self> {
        self.convolved("conv2d", 2, kernel, conv)?.with_bias("conv2d", bias)
    }

    #[track_caller]
    fn convolved(&self, op: &'static str, spatial: usize, kernel: &Self, conv: Conv) -> Result<Self> {
        let signature = || self.conv_signature(op, spatial, kernel, conv);
        rules::run(op, &conv.attributes(), &[self, kernel], signature, |x, out| {
            let (input, kernel) = (x[0].to_local(), x[1].to_local());
            if input.elem_count() * kernel.elem_count() == 0 {
                return neutral(x, &out.local_shape(), out.dtype());
            }
            // With several groups, only groups of a single channel are ever cut.
            let groups = if conv.groups == 1 { 1 } else { conv.groups.min(input.dims()[1]) };
            let (input, kernel, conv) = (input.contiguous()?, kernel.contiguous()?, Conv { groups, ..conv });
            Ok(if spatial == 1 { conv.line(&input, &kernel)? } else { conv.image(&input, &kernel)? })
        })
    }

    #[track_caller]
    fn conv_signature(&self, op: &'static str, spatial: usize, kernel: &Self, conv: Conv) -> Result<Signature> {
        self.check_float(op)?;
        let refuse =
            |why: &str| Error::op(op, format!("{} with a kernel {}, {conv:?}: {why}", self.spec(), kernel.spec()));
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
            let Some((places, _)) = conv.places(len, size) else {
                return refuse("the kernel does not fit into the padded input, or stride or dilation is 0");
            };
            shape.push(places);
        }
        let mut rows: Rows = Rows::from_iter([Row::new(Shard(0), &[Shard(0), Replicate])]);
        if groups == 1 {
            rows.push(Row::new(Shard(1), &[Replicate, Shard(0)]));
            rows.push(Row::new(SUM, &[Shard(1), Shard(1)]));
        } else if groups == x[1] && x[1] == k[0] {
            rows.push(Row::new(Shard(1), &[Shard(1), Shard(0)]));
        }
        rows.extend([Row::new(SUM, &[SUM, Replicate]), Row::new(SUM, &[Replicate, SUM])]);
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
            let want = "expected [batch, in, l] and [in, out, k], and less output padding than stride or dilation";
            return Error::op(op, format!("{what}, output padding {output_padding}: {want}"));
        }
        let Some(len) = conv.transposed(self.dims()[2], kernel.dims()[2], output_padding) else {
            let what = format!("{} with a kernel {}, {conv:?}", self.spec(), kernel.spec());
            return Error::op(op, format!("{what}: the output has no element or too many, or stride or dilation is 0"));
        };
        // A line is an image of one row without padding.
        let whole = Conv { padding: 0, ..conv };
        let y = self.unsqueeze(2)?.conv_transpose2d(&kernel.unsqueeze(2)?, None, 0, whole)?.squeeze(2)?;
        let y = y.pad_with_zeros(2, 0, output_padding)?;
        y.narrow(2, conv.padding, len)?.with_bias(op, bias)
    }

    #[track_caller]
    fn conv_transpose_signature(&self, kernel: &Self, output_padding: usize, conv: Conv) -> Result<Signature> {
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
        let rows = Rows::from_iter([
            Row::new(Shard(0), &[Shard(0), Replicate]),
            Row::new(Shard(1), &[Replicate, Shard(1)]),
            Row::new(SUM, &[Shard(1), Shard(0)]),
            Row::new(SUM, &[SUM, Replicate]),
            Row::new(SUM, &[Replicate, SUM]),
        ]);
        Ok(Signature::new(rows, &[b, out, h, w], self.dtype()))
    }

    /// `[b, c, ..]` plus a bias `[c]`.
    #[track_caller]
    pub(crate) fn with_bias(self, op: &'static str, bias: Option<&Self>) -> Result<Self> {
        let Some(bias) = bias else { return Ok(self) };
        if bias.dims() != &self.dims()[1..2] || bias.dtype() != self.dtype() {
            let reason = format!("bias {} for an output {}: expected [{}]", bias.spec(), self.spec(), self.dims()[1]);
            return Error::op(op, format!("{reason} of its dtype"));
        }
        let per_channel: Vec<usize> =
            self.dims()[1..].iter().enumerate().map(|(i, &n)| if i == 0 { n } else { 1 }).collect();
        self.add(&bias.reshape(&per_channel[..])?)
    }
}
