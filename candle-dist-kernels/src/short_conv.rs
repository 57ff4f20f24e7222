use std::sync::Arc;

use candle_core::{Result, Shape, Tensor, bail};
use candle_dist_base::{edges, empty};

use super::{
    check_dtype, compute_dtype,
    float_op::{FloatNode, FloatOp},
    parallel,
    real::Real,
    rows::{add_assign, new_by_blocks, vectorised},
};

/// The causal convolution of each channel with a few taps of its own, over tokens that lie one behind another.
///
/// `x` is `[batch, tokens + taps - 1, channels]`: the inputs before the first token, then those of the tokens. `weight` is
/// `[channels, taps]` of the same dtype, and the last tap is that of the token itself. The result is `[batch, tokens, channels]`:
/// `y[t] = Σ weight[j] · x[t + j]`. With `history`, a number for each token of each element of the batch, a token sees so many
/// inputs before its own, at most. Fails if shapes, dtypes or devices do not match.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let x = Tensor::new(&[[[0f32], [1.], [2.], [3.]]], &Cpu)?; // nothing before the first of three tokens
/// let y = candle_dist_kernels::short_conv(&x, &Tensor::new(&[[10f32, 1.]], &Cpu)?, None)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1., 12., 23.]);
/// # Ok(())
/// # }
/// ```
pub fn short_conv(x: &Tensor, weight: &Tensor, history: Option<Arc<[u32]>>) -> Result<Tensor> {
    compute_dtype("short_conv", x)?;
    check_dtype("short_conv", x, weight)?;
    let ((batch, inputs, channels), (rows, taps)) = (x.dims3()?, weight.dims2()?);
    let tokens = (inputs + 1).checked_sub(taps).filter(|_| rows == channels && taps > 0);
    let fits = |tokens: &usize| history.as_ref().is_none_or(|history| history.len() == batch * tokens);
    let Some(tokens) = tokens.filter(fits) else {
        bail!(
            "short_conv: {:?} with taps {:?}: expected [batch, tokens + taps - 1, channels], [channels, taps], and a history of \
             each token",
            x.shape(),
            weight.shape()
        );
    };
    if !x.device().is_cpu() || x.elem_count() == 0 || tokens == 0 {
        return composed(x, weight, history.as_deref());
    }
    let by_taps = weight.t()?.contiguous()?;
    edges::apply2(&edges::contiguous(x)?, &by_taps, FloatNode(ShortConvOp { tokens, history }))
}

/// The same from candle's operations.
pub(super) fn composed(x: &Tensor, weight: &Tensor, history: Option<&[u32]>) -> Result<Tensor> {
    let ((batch, inputs, channels), taps) = (x.dims3()?, weight.dim(1)?);
    let tokens = inputs + 1 - taps;
    if x.elem_count() == 0 || tokens == 0 {
        return empty::zeros_of(&[x, weight], (batch, tokens, channels), x.dtype());
    }
    let (dtype, wide) = (x.dtype(), compute_dtype("short_conv", x)?);
    let (x, weight) = (x.to_dtype(wide)?, weight.to_dtype(wide)?);
    let mut sum: Option<Tensor> = None;
    for tap in 0..taps {
        let mut term =
            x.narrow(1, tap, tokens)?.broadcast_mul(&weight.narrow(1, tap, 1)?.reshape((1, 1, channels))?)?;
        if let Some(history) = history {
            let sees = history.iter().map(|&before| u8::from(before as usize + tap + 1 >= taps));
            let sees = Tensor::from_iter(sees, x.device())?.reshape((batch, tokens, 1))?;
            term = sees.broadcast_as(term.shape())?.where_cond(&term, &term.zeros_like()?)?;
        }
        sum = Some(sum.map_or(Ok(term.clone()), |sum| sum + term)?);
    }
    match sum {
        Some(sum) => sum.to_dtype(dtype),
        None => bail!("short_conv: no taps"),
    }
}

/// The op on `[taps, channels]`, the transpose of the weight.
struct ShortConvOp {
    tokens: usize,
    history: Option<Arc<[u32]>>,
}

/// The parts of the tokens that gradients of weights are summed over, whatever the number of threads.
const PARTS: usize = 16;

/// The products from which several threads compute.
const WORTH_IT: usize = 128 * 1024;

impl ShortConvOp {
    /// The first tap that counts for a token of all elements of the batch.
    #[inline(always)]
    fn first_tap(&self, token: usize, taps: usize) -> usize {
        self.history.as_ref().map_or(0, |history| taps.saturating_sub(history[token] as usize + 1))
    }
}

impl FloatOp<2> for ShortConvOp {
    const NAME: &'static str = "short_conv";

    fn forward<T: Real>(&self, [x, weight]: [&[T]; 2], shapes: [&Shape; 2]) -> Result<(Vec<T>, Shape)> {
        let ((batch, _, channels), (taps, _)) = (shapes[0].dims3()?, shapes[1].dims2()?);
        let tokens = self.tokens;
        let (out, _) = new_by_blocks(
            batch * tokens * channels,
            channels,
            taps * channels,
            #[inline(always)]
            |first, out| {
                for (i, out) in out.chunks_exact_mut(channels).enumerate() {
                    let token = first + i;
                    let at = token / tokens * (tokens + taps - 1) + token % tokens;
                    for tap in self.first_tap(token, taps)..taps {
                        add_product(out, &x[(at + tap) * channels..], &weight[tap * channels..]);
                    }
                }
            },
        );
        Ok((out, Shape::from((batch, tokens, channels))))
    }

    fn backward<T: Real>(
        &self,
        [xs, ws]: [&[T]; 2],
        shapes: [&Shape; 2],
        _: [bool; 2],
        gs: &[T],
    ) -> Result<[Option<Vec<T>>; 2]> {
        let ((batch, inputs, channels), (taps, _)) = (shapes[0].dims3()?, shapes[1].dims2()?);
        let tokens = self.tokens;
        let (dx, _) = new_by_blocks(
            xs.len(),
            channels,
            taps * channels,
            #[inline(always)]
            |first, dx| {
                for (i, dx) in dx.chunks_exact_mut(channels).enumerate() {
                    let (element, input) = ((first + i) / inputs, (first + i) % inputs);
                    for tap in 0..taps.min(input + 1) {
                        let token = element * tokens + input - tap;
                        if input - tap < tokens && tap >= self.first_tap(token, taps) {
                            add_product(dx, &gs[token * channels..], &ws[tap * channels..]);
                        }
                    }
                }
            },
        );
        let all = batch * tokens;
        let each = all.div_ceil(PARTS).max(1);
        let starts = (0..all).step_by(each);
        let sums = parallel::map(all * taps * channels >= WORTH_IT, starts, |_, start| {
            vectorised(
                #[inline(always)]
                || {
                    let mut dw = vec![T::zero(); taps * channels];
                    for token in start..all.min(start + each) {
                        let at = token / tokens * inputs + token % tokens;
                        for tap in self.first_tap(token, taps)..taps {
                            let dw = &mut dw[tap * channels..][..channels];
                            add_product(dw, &gs[token * channels..], &xs[(at + tap) * channels..]);
                        }
                    }
                    dw
                },
            )
        });
        let mut dw = vec![T::zero(); taps * channels];
        sums.iter().for_each(|sum| add_assign(&mut dw, sum));
        Ok([Some(dx), Some(dw)])
    }
}

/// Adds the products of two rows, which may go on behind the sums.
#[inline(always)]
fn add_product<T: Real>(sums: &mut [T], a: &[T], b: &[T]) {
    for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
        *sum += a * b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::waves::waves;
    use candle_core::DType;
    use candle_core::Var;

    #[test]
    fn the_composed_form_equals_the_fused_one() -> Result<()> {
        // Of two elements, the second begins anew at the third and the fourth of five tokens.
        let history: Arc<[u32]> = [0, 1, 2, 3, 4, 0, 1, 0, 0, 1].into();
        for history in [None, Some(history)] {
            let x = Var::from_tensor(waves(&[2, 7, 3], DType::F64).as_tensor())?;
            let weight = Var::from_tensor(waves(&[3, 3], DType::F64).as_tensor())?;
            let made =
                [short_conv(&x, &weight, history.clone())?, composed(&x, &weight, history.as_deref())?];
            let diff = (&made[0] - &made[1])?.abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(diff < 1e-14, "{diff}");
            let grads = made.map(|y| (&y * &y)?.sum_all()?.backward());
            let [fused, composed] = grads;
            let (fused, composed) = (fused?, composed?);
            for var in [&x, &weight] {
                let (Some(got), Some(want)) = (fused.get(var), composed.get(var)) else {
                    bail!("no gradient");
                };
                let diff = (got - want)?.abs()?.max_all()?.to_scalar::<f64>()?;
                assert!(diff < 1e-13, "{diff}");
            }
        }
        Ok(())
    }

    #[test]
    fn inputs_that_do_not_fit_are_refused() -> Result<()> {
        let (x, weight) = (waves(&[2, 4, 3], DType::F32), waves(&[3, 2], DType::F32));
        assert!(short_conv(&x, &waves(&[2, 2], DType::F32), None).is_err());
        assert!(short_conv(&x, &waves(&[3, 6], DType::F32), None).is_err());
        assert!(short_conv(&x, &weight, Some([0; 5].into())).is_err());
        assert!(short_conv(&x, &weight.to_dtype(DType::F64)?, None).is_err());
        assert_eq!(short_conv(&x, &weight, Some([0; 6].into()))?.dims(), [2, 3, 3]);
        Ok(())
    }
}
