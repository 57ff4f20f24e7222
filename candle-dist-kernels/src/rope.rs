use candle_core::{D, Result, Shape, Tensor, bail};
use candle_dist_base::edges;

use super::float_op::{FloatNode, FloatOp};
use super::{TensorReader, check_dtype, compute_dtype, fused, real::Real, rows::new_by_blocks};

/// The pairs of elements that a rotary embedding rotates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// Element `i` with element `i + d/2`, as in GPT-NeoX and in Llama's Hugging Face layout.
    Halves,
    /// Element `2i` with element `2i + 1`, as in the paper.
    Neighbors,
}

/// The rotary position embedding: rotates pair `i` of the row at position `p` by an angle that depends on `p` and `i`.
///
/// `x` is `[.., s, d]`; `cos` and `sin` are `[t, d/2]` of its dtype, for the angles of positions `0..t`; the first row
/// of `x` is at position `offset`. Tables `[b, t, d/2]` have the angles of each element of the batch, for `x` of shape
/// `[b, .., s, d]`. The result has the shape of `x`. Fails if shapes or dtypes do not match, if the
/// tables end before the last position, and if they are tracked, because they get no gradient. Source: Su et al.,
/// <https://arxiv.org/abs/2104.09864>.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// use candle_dist_kernels::{RopePairs, rope};
/// let x = Tensor::new(&[[1f64, 2., 3., 4.]], &Cpu)?;
/// let (cos, sin) = (Tensor::new(&[[1f64, 0.]], &Cpu)?, Tensor::new(&[[0f64, 1.]], &Cpu)?);
/// assert_eq!(rope(&x, &cos, &sin, 0, RopePairs::Halves)?.to_vec2::<f64>()?, [[1., -4., 3., 2.]]);
/// assert_eq!(rope(&x, &cos, &sin, 0, RopePairs::Neighbors)?.to_vec2::<f64>()?, [[1., 2., -4., 3.]]);
/// # Ok(())
/// # }
/// ```
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, offset: usize, pairs: RopePairs) -> Result<Tensor> {
    let dtype = compute_dtype("rope", x)?;
    let [cos, sin] = angles(x, [cos, sin], offset)?;
    let half = cos.dim(2)?;
    if half > 0 && fused::computes(&[x]) {
        return fused::rope::rope(x, [&cos, &sin], pairs == RopePairs::Neighbors);
    }
    if !x.device().is_cpu() {
        return composed(x, &cos, &sin, half, pairs);
    }
    let [cos, sin] = [cos, sin].map(|t| t.to_dtype(dtype)?.contiguous());
    edges::apply1(&edges::contiguous(x)?, FloatNode(RopeOp { cos: cos?, sin: sin?, pairs }))
}

/// The [rotary position embedding](rope()) of queries and keys, which differ at most in their heads: on a CUDA device in one launch, and
/// in one for their gradients.
///
/// The results are those of two calls of `rope`, and the errors too.
pub fn rope_both(
    [q, k]: [&Tensor; 2],
    cos: &Tensor,
    sin: &Tensor,
    offset: usize,
    pairs: RopePairs,
) -> Result<[Tensor; 2]> {
    let batch = |x: &Tensor| if x.rank() > 2 { x.dims()[0] } else { 1 };
    let are_alike = batch(q) == batch(k) && q.dims().last_chunk::<2>() == k.dims().last_chunk::<2>();
    if are_alike && q.device().same_device(k.device()) && fused::computes(&[q, k]) {
        let [cos, sin] = angles(q, [cos, sin], offset)?;
        if cos.dim(2)? > 0 {
            return fused::rope::rope_both([q, k], [&cos, &sin], pairs == RopePairs::Neighbors);
        }
    }
    Ok([rope(q, cos, sin, offset, pairs)?, rope(k, cos, sin, offset, pairs)?])
}

/// Returns the tables of the rows of `x`, `[1 or b, s, d/2]`.
fn angles(x: &Tensor, [cos, sin]: [&Tensor; 2], offset: usize) -> Result<[Tensor; 2]> {
    let fits = |s: usize, d: usize, t: usize, half: usize| {
        cos.dims() == sin.dims() && d == 2 * half && s <= t.saturating_sub(offset)
    };
    let (rows, [batch, table, half]) = match (x.dims(), cos.dims()) {
        (&[.., s, d], &[t, half]) if fits(s, d, t, half) => (s, [1, t, half]),
        (&[b, .., s, d], &[tables, t, half]) if x.rank() > 2 && b == tables && fits(s, d, t, half) => {
            (s, [b, t, half])
        }
        _ => bail!(
            "rope: input {:?} at position {offset} with tables {:?} and {:?}: expected [.., s, d] and two [t, d/2], or \
             [b, .., s, d] and two [b, t, d/2], with t at least {offset} + s",
            x.shape(),
            cos.shape(),
            sin.shape()
        ),
    };
    check_dtype("rope", x, cos)?;
    check_dtype("rope", x, sin)?;
    if cos.track_op() || sin.track_op() {
        bail!("rope: the tables carry a gradient, but get none; detach them");
    }
    let first = offset.min(table.saturating_sub(rows));
    let [cos, sin] = [cos, sin].map(|t| t.reshape((batch, table, half))?.narrow(1, first, rows));
    Ok([cos?, sin?])
}

/// `cos` and `sin` are `[b, s, d/2]`, with `b` that of `x` or 1.
fn composed(x: &Tensor, cos: &Tensor, sin: &Tensor, half: usize, pairs: RopePairs) -> Result<Tensor> {
    let lead = &x.dims()[..x.rank() - 1];
    let (split, dim) = match pairs {
        RopePairs::Halves => ([lead, &[2, half]].concat(), lead.len()),
        RopePairs::Neighbors => ([lead, &[half, 2]].concat(), lead.len() + 1),
    };
    let (batch, rows) = (cos.dim(0)?, cos.dim(1)?);
    // The dims of `x` between the batch and the rows, if it has a batch.
    let between = vec![1; lead.len().saturating_sub(2)];
    let table = match lead.len() {
        1 => vec![rows, half],
        _ => [&[batch], &between[..], &[rows, half]].concat(),
    };
    let (cos, sin) = (&cos.reshape(table.as_slice())?, &sin.reshape(table)?);
    let parts = x.reshape(split)?;
    let [a, b] = [0, 1].map(|i| parts.narrow(dim, i, 1)?.squeeze(dim));
    let (a, b) = (a?, b?);
    let turned =
        [(a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?, (a.broadcast_mul(sin)? + b.broadcast_mul(cos)?)?];
    Tensor::stack(&turned, dim)?.flatten_from(D::Minus2)
}

struct RopeOp {
    /// The tables of the rows of one sequence, `[1, s, d/2]`, or of each element of the batch, `[b, s, d/2]`.
    cos: Tensor,
    sin: Tensor,
    pairs: RopePairs,
}

impl RopeOp {
    /// Rotates the rows of `x`, or rotates them back.
    fn turn<T: Real>(&self, x: &[T], back: bool) -> Result<Vec<T>> {
        let (cos, sin) = (TensorReader::new(&self.cos), TensorReader::new(&self.sin));
        let (cos, sin) = (cos.elements::<T>()?, sin.elements::<T>()?);
        let (batch, positions, half) = self.cos.dims3()?;
        // The rows of `x` that an element of the batch has.
        let each = (x.len() / (2 * half).max(1) / batch.max(1)).max(1);
        let sign = if back { T::zero() - T::one() } else { T::one() };
        let (out, _) = new_by_blocks(
            x.len(),
            2 * half,
            2 * half,
            #[inline(always)]
            |first, out| {
                let rows = out.chunks_exact_mut(2 * half).zip(x[first * 2 * half..].chunks_exact(2 * half));
                for (i, (out, x)) in rows.enumerate() {
                    let row = first + i;
                    let at = (row / each * positions + row % positions) * half;
                    let angles = cos[at..at + half].iter().zip(&sin[at..at + half]);
                    match self.pairs {
                        RopePairs::Halves => {
                            let ((a, b), (x, y)) = (out.split_at_mut(half), x.split_at(half));
                            let values = x.iter().zip(y).zip(angles);
                            for ((a, b), ((&x, &y), (&cos, &sin))) in a.iter_mut().zip(b).zip(values) {
                                *a = x * cos - y * (sign * sin);
                                *b = x * (sign * sin) + y * cos;
                            }
                        }
                        RopePairs::Neighbors => {
                            let (outs, xs) = (out.as_chunks_mut::<2>().0, x.as_chunks::<2>().0);
                            for (([a, b], &[x, y]), (&cos, &sin)) in outs.iter_mut().zip(xs).zip(angles) {
                                *a = x * cos - y * (sign * sin);
                                *b = x * (sign * sin) + y * cos;
                            }
                        }
                    }
                }
            },
        );
        Ok(out)
    }
}

impl FloatOp<1> for RopeOp {
    const NAME: &'static str = "rope";

    fn forward<T: Real>(&self, [x]: [&[T]; 1], [shape]: [&Shape; 1]) -> Result<(Vec<T>, Shape)> {
        Ok((self.turn(x, false)?, shape.clone()))
    }

    fn backward<T: Real>(
        &self,
        _: [&[T]; 1],
        _: [&Shape; 1],
        _: [bool; 1],
        grad: &[T],
    ) -> Result<[Option<Vec<T>>; 1]> {
        Ok([Some(self.turn(grad, true)?)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device::Cpu;

    #[test]
    fn the_composed_form_equals_the_fused_one() -> Result<()> {
        let [x, cos, sin] =
            [&[2, 3, 6][..], &[3, 3], &[3, 3]].map(|shape| Tensor::randn(0f64, 1.0, shape, &Cpu));
        let (x, cos, sin) = (x?, cos?, sin?);
        let (one_cos, one_sin) = (cos.unsqueeze(0)?, sin.unsqueeze(0)?);
        for pairs in [RopePairs::Halves, RopePairs::Neighbors] {
            let diff = (composed(&x, &one_cos, &one_sin, 3, pairs)? - rope(&x, &cos, &sin, 0, pairs)?)?;
            assert!(diff.abs()?.max_all()?.to_scalar::<f64>()? < 1e-14, "{pairs:?}");
        }
        Ok(())
    }

    #[test]
    fn tables_of_each_element_turn_it_as_a_call_of_its_own_does() -> Result<()> {
        let [x, cos, sin] =
            [&[2, 4, 3, 6][..], &[2, 5, 3], &[2, 5, 3]].map(|shape| Tensor::randn(0f64, 1.0, shape, &Cpu));
        let (x, cos, sin) = (candle_core::Var::from_tensor(&x?)?, cos?, sin?);
        for pairs in [RopePairs::Halves, RopePairs::Neighbors] {
            let alone = |i| rope(&x.get(i)?.unsqueeze(0)?, &cos.get(i)?, &sin.get(i)?, 2, pairs);
            let want = Tensor::cat(&[alone(0)?, alone(1)?], 0)?;
            let got = rope(&x, &cos, &sin, 2, pairs)?;
            let [cos, sin] = [&cos, &sin].map(|table| table.narrow(1, 2, 3));
            let composed = composed(&x, &cos?, &sin?, 3, pairs)?;
            let grad = |y: &Tensor| -> Result<Tensor> {
                let grads = (y * y.detach().exp()?)?.sum_all()?.backward()?;
                grads.get(&x).cloned().ok_or_else(|| candle_core::Error::Msg("no gradient".into()))
            };
            for (got, want) in [
                (&got, &want),
                (&composed, &want),
                (&grad(&got)?, &grad(&want)?),
                (&grad(&composed)?, &grad(&want)?),
            ] {
                assert!((got - want)?.abs()?.max_all()?.to_scalar::<f64>()? < 1e-12, "{pairs:?}");
            }
        }
        assert!(rope(&x.get(0)?, &cos, &sin, 0, RopePairs::Halves).is_err());
        assert!(rope(&x, &cos, &sin, 3, RopePairs::Halves).is_err());
        Ok(())
    }
}
