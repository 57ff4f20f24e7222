//! Scans from candle's operations, for other devices than the CPU.

use candle_core::{Result, Tensor};

use super::inputs::ScanInputs;
use super::sizes::ScanSizes;
use crate::compute_dtype;

/// The tokens of which products are in memory at once.
const CHUNK: usize = 64;

/// The gated delta rule, one token after the other.
pub(super) fn delta_rule(
    inputs: &ScanInputs<'_>,
    state: Option<&Tensor>,
    sizes: ScanSizes,
) -> Result<(Tensor, Tensor)> {
    let &[beta, g] = inputs.gates else { return inputs.of_nothing(state, sizes) };
    if sizes.is_empty() {
        return inputs.of_nothing(state, sizes);
    }
    let ScanSizes { batch, tokens, heads, key, values, width } = sizes;
    let &ScanInputs { q, k, v, .. } = inputs;
    let (dtype, wide) = (v.dtype(), compute_dtype("gated_delta_rule", v)?);
    let mut s = first(inputs, state, sizes)?;
    let at = |x: &Tensor, token: usize| x.narrow(1, token, 1)?.squeeze(1)?.to_dtype(wide);
    let mut made = Vec::with_capacity(tokens);
    for token in 0..tokens {
        if let Some(history) = &inputs.history {
            let begins = (0..batch).map(|element| u8::from(history[element * tokens + token] == 0));
            let begins = Tensor::from_iter(begins, s.device())?.reshape((batch, 1, 1, 1, 1))?;
            s = begins.broadcast_as(s.shape())?.where_cond(&s.zeros_like()?, &s)?;
        }
        let column = |x: &Tensor| at(x, token)?.reshape((batch, heads, 1, key, 1));
        let number = |x: &Tensor| at(x, token)?.reshape((batch, heads, values, 1, 1));
        let (q, k) = (column(q)?, column(k)?);
        let value = at(v, token)?.reshape((batch, heads, values, 1, width))?;
        s = s.broadcast_mul(&number(g)?.exp()?)?;
        let seen = s.broadcast_mul(&k)?.sum_keepdim(3)?;
        let delta = (value - seen)?.broadcast_mul(&number(beta)?)?;
        s = (s + k.broadcast_mul(&delta)?)?;
        made.push(s.broadcast_mul(&q)?.sum(3)?.reshape((batch, 1, heads, values * width))?);
    }
    Ok((Tensor::cat(&made, 1)?.to_dtype(dtype)?, last(&s, sizes)?))
}

/// The scan of Mamba 2, chunk by chunk.
///
/// Within a chunk, what token `j` writes reaches token `i` with the decays of the tokens between them, so the results are products of
/// matrices of tokens by tokens.
pub(super) fn state_space(
    inputs: &ScanInputs<'_>,
    state: Option<&Tensor>,
    sizes: ScanSizes,
) -> Result<(Tensor, Tensor)> {
    if sizes.is_empty() {
        return inputs.of_nothing(state, sizes);
    }
    let ScanSizes { batch, tokens, heads, key, values, width } = sizes;
    let &ScanInputs { q: c, k: b, v: x, gates, .. } = inputs;
    let (dtype, wide) = (x.dtype(), compute_dtype("state_space_scan", x)?);
    let mut s = first(inputs, state, sizes)?;
    let mut made = Vec::with_capacity(tokens.div_ceil(CHUNK));
    for start in (0..tokens).step_by(CHUNK) {
        let len = CHUNK.min(tokens - start);
        // [batch, heads, 1 or values, len, ..]
        let part = |x: &Tensor, [of_head, size]: [usize; 2]| {
            let x = x.narrow(1, start, len)?.to_dtype(wide)?;
            x.reshape((batch, len, heads, of_head, size))?.permute((0, 2, 3, 1, 4))?.contiguous()
        };
        let (c, b) = (part(c, [1, key])?, part(b, [1, key])?);
        let x = part(x, [values, width])?;
        let sums = part(gates[0], [values, 1])?.cumsum(3)?;
        let total = sums.narrow(3, len - 1, 1)?;
        let reach = Reach::of(inputs.history.as_deref(), [batch, tokens], [start, len]);
        let mask = |values: Vec<u8>, shape: (usize, usize, usize, usize, usize)| {
            Tensor::from_vec(values, shape, c.device())
        };
        let sees = mask(reach.sees, (batch, 1, 1, len, len))?;
        let begins = mask(reach.begins, (batch, 1, 1, len, 1))?.to_dtype(wide)?;
        let stays = mask(reach.stays, (batch, 1, 1, len, 1))?.to_dtype(wide)?;
        let between = sums.broadcast_sub(&sums.transpose(3, 4)?)?;
        let never =
            Tensor::new(f32::NEG_INFINITY, c.device())?.to_dtype(wide)?.broadcast_as(between.shape())?;
        let decays = sees.broadcast_as(between.shape())?.where_cond(&between, &never)?.exp()?;
        let scores = product(&c, &b.transpose(3, 4)?)?.broadcast_mul(&decays)?;
        let of_state = product(&c.broadcast_as((batch, heads, values, len, key))?, &s)?
            .broadcast_mul(&sums.exp()?.broadcast_mul(&begins)?)?;
        let y = (product(&scores, &x)? + of_state)?;
        made.push(y.permute((0, 3, 1, 2, 4))?.reshape((batch, len, heads, values * width))?);
        let left = total.broadcast_sub(&sums)?.exp()?.broadcast_mul(&stays)?;
        let written = product(&b.broadcast_mul(&left)?.transpose(3, 4)?, &x)?;
        let kept = total.exp()?.broadcast_mul(&begins.narrow(3, len - 1, 1)?)?;
        s = (s.broadcast_mul(&kept)? + written)?;
    }
    Ok((Tensor::cat(&made, 1)?.to_dtype(dtype)?, last(&s, sizes)?))
}

/// The products of the last two dims. candle's own take no five dims.
fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let ((first, second, third, rows, _), columns) = (a.dims5()?, b.dim(4)?);
    let [a, b] = [a, b].map(|x| x.contiguous()?.flatten_to(2));
    a?.matmul(&b?)?.reshape((first, second, third, rows, columns))
}

/// What tokens of a chunk see, 1 or 0.
struct Reach {
    /// Token by token, for each token: not those behind it, and none of other documents.
    sees: Vec<u8>,
    /// Whether a token sees the state before the chunk.
    begins: Vec<u8>,
    /// Whether the state behind the chunk has what a token writes.
    stays: Vec<u8>,
}

impl Reach {
    fn of(history: Option<&[u32]>, [batch, tokens]: [usize; 2], [start, len]: [usize; 2]) -> Self {
        let (mut sees, mut begins, mut stays) = (Vec::new(), Vec::new(), Vec::new());
        for element in 0..batch {
            // The documents that have begun in the chunk.
            let mut begun = 0;
            let document = |token: usize| {
                begun += usize::from(history.is_some_and(|h| h[element * tokens + start + token] == 0));
                begun
            };
            let documents: Vec<usize> = (0..len).map(document).collect();
            for (i, one) in documents.iter().enumerate() {
                sees.extend(documents.iter().enumerate().map(|(j, other)| u8::from(j <= i && one == other)));
                begins.push(u8::from(*one == 0));
                stays.push(u8::from(Some(one) == documents.last()));
            }
        }
        Self { sees, begins, stays }
    }
}

/// The first states `[batch, heads, values, key, width]`.
fn first(inputs: &ScanInputs<'_>, state: Option<&Tensor>, sizes: ScanSizes) -> Result<Tensor> {
    let ScanSizes { batch, heads, key, values, width, .. } = sizes;
    let zeros = || Tensor::zeros(sizes.state(), compute_dtype("scan", inputs.v)?, inputs.v.device());
    let state = state.map_or_else(zeros, |state| Ok(state.clone()))?;
    state.reshape((batch, key, heads, values, width))?.permute((0, 2, 3, 1, 4))?.contiguous()
}

/// The last states, as they are returned.
fn last(s: &Tensor, sizes: ScanSizes) -> Result<Tensor> {
    s.detach().permute((0, 3, 1, 2, 4))?.contiguous()?.reshape(sizes.state())
}
