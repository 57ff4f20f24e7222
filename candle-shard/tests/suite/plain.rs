//! Ops on one device by their definition, composed of candle's ops that have a gradient.
use candle_core::{D, Device::Cpu, Result, Tensor};
use candle_shard::Conv;
use candle_shard::kernels::Pool;
use itertools::Itertools;

/// A convolution of lines or images, with a bias if there is a third input: for each element of the kernel the elements
/// that it meets, times its matrix.
/// Element `i` of a dim is element `i - by`, or zero.
pub(crate) fn shift(x: &Tensor, dim: usize, by: isize) -> Result<Tensor> {
    let len = x.dim(dim)?;
    let padded = x.pad_with_zeros(dim, len, len)?;
    padded.narrow(dim, (len as isize - by.clamp(-(len as isize), len as isize)) as usize, len)
}

/// A convolution with zeros before the input alone.
pub(crate) fn causal_conv1d(x: &[Tensor], conv: Conv) -> Result<Tensor> {
    let zeros = (x[1].dim(2)? - 1) * conv.dilation;
    let padded = x[0].pad_with_zeros(2, zeros, 0)?;
    self::conv(&[&[padded], &x[1..]].concat(), conv)
}

pub(crate) fn conv(x: &[Tensor], conv: Conv) -> Result<Tensor> {
    if x[0].rank() == 3 {
        let flat = [x[0].unsqueeze(2)?, x[1].unsqueeze(2)?];
        let flat = flat.into_iter().chain(x.get(2).cloned()).collect_vec();
        return conv_in([0, conv.padding], &flat, conv)?.squeeze(2);
    }
    conv_in([conv.padding; 2], x, conv)
}

fn conv_in(padding: [usize; 2], x: &[Tensor], conv: Conv) -> Result<Tensor> {
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
        for (i, j) in (0..kh).cartesian_product(0..kw) {
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

/// A transposed convolution of images in one group: the convolution of the input with zeros between its elements and the
/// kernel turned over.
pub(crate) fn conv_transpose2d(x: &[Tensor], output_padding: usize, conv: Conv) -> Result<Tensor> {
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
    let kernel =
        x[1].contiguous()?.index_select(&back(kh)?, 2)?.index_select(&back(kw)?, 3)?.transpose(0, 1)?;
    conv_in([0; 2], &[wide, kernel.contiguous()?], Conv { dilation: conv.dilation, ..Conv::default() })
}

/// A transposed convolution of lines with a bias: element i of the input, times element j of the kernel, goes to place
/// i·s + j·d - p.
pub(crate) fn conv_transpose1d(x: &[Tensor], output_padding: usize, conv: Conv) -> Result<Tensor> {
    let ((b, _, l), (_, o, k)) = (x[0].dims3()?, x[1].dims3()?);
    let Conv { padding, stride, dilation, .. } = conv;
    let len = (l - 1) * stride + dilation * (k - 1) + 1 + output_padding;
    let mut sum = Tensor::zeros((b, o, len), x[0].dtype(), &Cpu)?;
    for (i, j) in (0..l).cartesian_product(0..k) {
        let term = x[0].narrow(2, i, 1)?.squeeze(2)?.matmul(&x[1].narrow(2, j, 1)?.squeeze(2)?)?;
        let at = i * stride + j * dilation;
        sum = (sum + term.unsqueeze(2)?.pad_with_zeros(2, at, len - at - 1)?)?;
    }
    sum.narrow(2, padding, len - 2 * padding)?.broadcast_add(&x[2].reshape((o, 1))?)
}

/// Every window of a pool over images, stacked in a last dim.
pub(crate) fn windows(x: &Tensor, pool: Pool) -> Result<Tensor> {
    let (_, _, h, w) = x.dims4()?;
    let places = |len: usize, i: usize| (len - pool.size[i]) / pool.stride[i] + 1;
    let at = |from: usize, i: usize, len: usize| {
        Tensor::from_iter((0..places(len, i)).map(|o| (o * pool.stride[i] + from) as u32), &Cpu)
    };
    let all = (0..pool.size[0]).cartesian_product(0..pool.size[1]);
    let parts = all.map(|(i, j)| x.index_select(&at(i, 0, h)?, 2)?.index_select(&at(j, 1, w)?, 3));
    Tensor::stack(&parts.collect::<Result<Vec<_>>>()?, 4)
}

/// A linear change of size, whose own form in candle has no gradient: its matrix is what it makes of single pixels.
pub(crate) fn resized(x: &Tensor, resize: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let (b, c, h, w) = x.dims4()?;
    let images = resize(&Tensor::eye(h * w, x.dtype(), &Cpu)?.reshape((h * w, 1, h, w))?)?;
    let (_, _, oh, ow) = images.dims4()?;
    x.reshape((b * c, h * w))?.matmul(&images.reshape((h * w, oh * ow))?)?.reshape((b, c, oh, ow))
}

pub(crate) fn bilinear(x: &Tensor, size: [usize; 2], align: bool) -> Result<Tensor> {
    resized(x, |pixels| pixels.upsample_bilinear2d(size[0], size[1], align))
}

/// Element `i * n / size` of a dim of size `n`, for each `i` of its new size.
pub(crate) fn nearest(x: &Tensor, dim: usize, size: usize) -> Result<Tensor> {
    let n = x.dim(dim)?;
    x.index_select(&Tensor::from_iter((0..size).map(|i| (i * n / size) as u32), &Cpu)?, dim)
}

pub(crate) fn group_norm(x: &[Tensor], groups: usize, eps: f64) -> Result<Tensor> {
    let shape = x[0].dims().to_vec();
    let rows = x[0].reshape((shape[0], groups, ()))?;
    let centered = rows.broadcast_sub(&rows.mean_keepdim(2)?)?;
    let stdev = (centered.sqr()?.mean_keepdim(2)? + eps)?.sqrt()?;
    let per_channel = [&shape[1..2], &vec![1; shape.len() - 2]].concat();
    let normal = centered.broadcast_div(&stdev)?.reshape(&shape[..])?;
    normal.broadcast_mul(&x[1].reshape(&per_channel[..])?)?.broadcast_add(&x[2].reshape(&per_channel[..])?)
}

pub(crate) fn layer_norm(x: &[Tensor], eps: f64) -> Result<Tensor> {
    let centered = x[0].broadcast_sub(&x[0].mean_keepdim(D::Minus1)?)?;
    let stdev = (centered.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    centered.broadcast_div(&stdev)?.broadcast_mul(&x[1])?.broadcast_add(&x[2])
}

pub(crate) fn rms_norm(x: &[Tensor], eps: f64) -> Result<Tensor> {
    let size = (x[0].sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    x[0].broadcast_div(&size)?.broadcast_mul(&x[1])
}

/// Attention of `[batch, heads, rows, dim]` with the default scale, every key head copied for its group; `softmax` takes
/// the scores.
pub(crate) fn attention(x: &[Tensor], softmax: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let (heads, dim) = (x[0].dim(1)?, x[0].dim(3)?);
    let copies = |t: &Tensor| {
        let (b, h, s, d) = t.dims4()?;
        t.unsqueeze(2)?.broadcast_as((b, h, heads / h, s, d))?.contiguous()?.reshape((b, heads, s, d))
    };
    let scores = (x[0].matmul(&copies(&x[1])?.t()?.contiguous()?)? / (dim as f64).sqrt())?;
    softmax(&scores)?.matmul(&copies(&x[2])?)
}

/// A linear layer, with a bias if there is a third input.
pub(crate) fn linear(x: &[Tensor]) -> Result<Tensor> {
    let y = x[0].broadcast_matmul(&x[1].t()?)?;
    x.get(2).map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
}

pub(crate) fn embedding(x: &[Tensor]) -> Result<Tensor> {
    let shape = [x[1].dims(), &x[0].dims()[1..]].concat();
    x[0].index_select(&x[1].flatten_all()?, 0)?.reshape(shape)
}

/// The mean loss of logits over the last dim.
pub(crate) fn cross_entropy(x: &[Tensor]) -> Result<Tensor> {
    let classes = x[0].dim(D::Minus1)?;
    let (logits, targets) = (x[0].reshape(((), classes))?, x[1].flatten_all()?.unsqueeze(1)?);
    (logits.exp()?.sum_keepdim(1)?.log()? - logits.gather(&targets, 1)?)?.mean_all()
}

/// Without indexing: each slice of the source added where its index is that of the place.
pub(crate) fn scatter_add(x: &[Tensor], dim: usize) -> Result<Tensor> {
    let mut shape = vec![1; x[0].rank()];
    shape[dim] = x[0].dim(dim)?;
    let places =
        Tensor::arange(0, shape[dim] as u32, x[0].device())?.reshape(shape)?.broadcast_as(x[0].shape())?;
    (0..x[1].dim(dim)?).try_fold(x[0].clone(), |sum, i| {
        let slice = |x: &Tensor| x.narrow(dim, i, 1)?.broadcast_as(sum.shape());
        let hit = places.eq(&slice(&x[1])?)?.to_dtype(sum.dtype())?;
        &sum + hit.mul(&slice(&x[2])?)?
    })
}

/// candle's `scatter` with a gradient for the tensor and for the source.
pub(crate) fn scatter(x: &[Tensor], dim: usize) -> Result<Tensor> {
    let kept = x[0].ones_like()?.scatter(&x[1], &x[2].zeros_like()?, dim)?;
    (&x[0] * kept)? + x[0].zeros_like()?.scatter(&x[1], &x[2], dim)?
}

/// The running sum; candle's own takes a product with a triangle.
pub(crate) fn cumsum(x: &Tensor, dim: usize) -> Result<Tensor> {
    let upto = |i| x.narrow(dim, 0, i + 1)?.sum_keepdim(dim);
    let sums = (0..x.dim(dim)?).map(upto).collect::<Result<Vec<_>>>()?;
    Tensor::cat(&sums, dim)
}

/// The logarithm of the running sum of the exponentials.
pub(crate) fn logcumsumexp(x: &Tensor, dim: usize) -> Result<Tensor> {
    let upto = |i| x.narrow(dim, 0, i + 1)?.log_sum_exp(dim)?.unsqueeze(dim);
    let sums = (0..x.dim(dim)?).map(upto).collect::<Result<Vec<_>>>()?;
    Tensor::cat(&sums, dim)
}

/// The windows of a dim, in a last dim.
pub(crate) fn unfold(x: &Tensor, dim: usize, size: usize, step: usize) -> Result<Tensor> {
    let order = (0..x.rank()).filter(|&d| d != dim).chain([dim]).collect_vec();
    let window = |start| x.narrow(dim, start, size)?.permute(&order[..]);
    let windows = (0..=x.dim(dim)? - size).step_by(step).map(window);
    Tensor::stack(&windows.collect::<Result<Vec<_>>>()?, dim)
}

/// The largest elements of the last dim and their places.
pub(crate) fn topk(x: &Tensor, k: usize) -> Result<(Tensor, Tensor)> {
    let (values, places) = x.contiguous()?.sort_last_dim(false)?;
    Ok((values.narrow(D::Minus1, 0, k)?, places.narrow(D::Minus1, 0, k)?))
}

/// The convolution of tokens `[batch, tokens + taps - 1, channels]` with taps `[channels, taps]`.
pub(crate) fn short_conv(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let taps = weight.dim(1)?;
    let tokens = x.dim(1)? + 1 - taps;
    let term = |tap: usize| x.narrow(1, tap, tokens)?.broadcast_mul(&weight.narrow(1, tap, 1)?.t()?);
    let terms: Vec<Tensor> = (0..taps).map(term).try_collect()?;
    Tensor::stack(&terms, 0)?.sum(0)
}

/// The gated delta rule of `[q, k, v, beta, g]`, token by token: the results, and the last states `[batch, heads, values, key, width]`.
pub(crate) fn gated_delta_rule(x: &[Tensor], first: Option<&Tensor>) -> Result<[Tensor; 2]> {
    let ((batch, tokens, heads, key), (_, _, _, values)) = (x[0].dims4()?, x[3].dims4()?);
    let width = x[2].dim(3)? / values;
    let mut state = match first {
        Some(first) => first.clone(),
        None => Tensor::zeros((batch, heads, values, key, width), x[0].dtype(), &Cpu)?,
    };
    let mut made = Vec::new();
    for token in 0..tokens {
        let at = |x: &Tensor| x.narrow(1, token, 1)?.squeeze(1);
        let column = |x: &Tensor| at(x)?.reshape((batch, heads, 1, key, 1));
        let number = |x: &Tensor| at(x)?.reshape((batch, heads, values, 1, 1));
        let (q, k) = (column(&x[0])?, column(&x[1])?);
        let v = at(&x[2])?.reshape((batch, heads, values, 1, width))?;
        let kept = state.broadcast_mul(&number(&x[4])?.exp()?)?;
        let seen = kept.broadcast_mul(&k)?.sum_keepdim(3)?;
        state = (&kept + k.broadcast_mul(&(v - seen)?.broadcast_mul(&number(&x[3])?)?)?)?;
        made.push(state.broadcast_mul(&q)?.sum(3)?.reshape((batch, heads, values * width))?);
    }
    Ok([Tensor::stack(&made, 1)?, state])
}

/// The scan of Mamba 2 of `[c, b, x, g]`, token by token: the results, and the last states `[batch, groups, heads, state, width]`.
pub(crate) fn state_space_scan(x: &[Tensor], first: Option<&Tensor>) -> Result<[Tensor; 2]> {
    let ((batch, tokens, groups, size), (.., heads, width)) = (x[0].dims4()?, x[2].dims5()?);
    let mut state = match first {
        Some(first) => first.clone(),
        None => Tensor::zeros((batch, groups, heads, size, width), x[0].dtype(), &Cpu)?,
    };
    let mut made = Vec::new();
    for token in 0..tokens {
        let at = |x: &Tensor| x.narrow(1, token, 1)?.squeeze(1);
        let column = |x: &Tensor| at(x)?.reshape((batch, groups, 1, size, 1));
        let decay = at(&x[3])?.reshape((batch, groups, heads, 1, 1))?.exp()?;
        let written = column(&x[1])?.broadcast_mul(&at(&x[2])?.unsqueeze(3)?)?;
        state = (state.broadcast_mul(&decay)? + written)?;
        made.push(state.broadcast_mul(&column(&x[0])?)?.sum(3)?);
    }
    Ok([Tensor::stack(&made, 1)?, state])
}
