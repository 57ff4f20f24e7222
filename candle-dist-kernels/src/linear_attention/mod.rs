//! States of sequences that each token decays, writes and reads: linear attention with decays.

mod backward;
mod composed;
mod inputs;
mod scan;
mod sizes;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::{Result, Tensor};

use inputs::ScanInputs;

/// The gated delta rule: a state that each token decays, corrects towards its value, and reads.
///
/// `q` and `k` are `[batch, tokens, heads, key]`, `v` is `[batch, tokens, heads, values · width]`, and `beta` and `g` are
/// `[batch, tokens, heads, values]`, all of one dtype: each key head has so many value heads. The state of a value head is a matrix
/// `S` `[key, width]`. Per token
///
/// `S ← e^g · S`, then `S ← S + k · (beta · (v - Sᵀ k))ᵀ`, and the result is `Sᵀ q`.
///
/// Returns the results, in the shape of `v`, and the states behind the last token, `[batch, key, heads, values · width]`, in f32 for
/// 16-bit floats. They begin as `state`, which gets no gradient, as the states that are returned have none; without it, with zeros.
/// With `history`, a number for each token of each element of the batch, states are zeros before the tokens whose number is 0.
///
/// The backward pass computes states again, from each of about √tokens of them, which it keeps for one head at a time. Fails if shapes,
/// dtypes or devices do not match. Source: Yang et al., <https://arxiv.org/abs/2412.06464>.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let row = |values: [f32; 2]| Tensor::from_slice(&values, (1, 2, 1, 1), &Cpu);
/// // The second token keeps half of what the first one has written, 3, and corrects half of what lacks to 2.5.
/// let (q, k, v) = (row([1., 1.])?, row([1., 1.])?, row([3., 2.5])?);
/// let (beta, g) = (row([1., 0.5])?, row([0., 0.5f32.ln()])?);
/// let (y, state) = candle_dist_kernels::gated_delta_rule([&q, &k, &v], [&beta, &g], None, None)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [3., 2.]);
/// assert_eq!(state.flatten_all()?.to_vec1::<f32>()?, [2.]);
/// # Ok(())
/// # }
/// ```
pub fn gated_delta_rule(
    [q, k, v]: [&Tensor; 3],
    [beta, g]: [&Tensor; 2],
    state: Option<&Tensor>,
    history: Option<Arc<[u32]>>,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "gated_delta_rule";
    let inputs = ScanInputs { q, k, v, gates: &[beta, g], state, history };
    let (sizes, state) = inputs.checked(OP)?;
    if inputs.is_composed(sizes) {
        return composed::delta_rule(&inputs, state.as_ref(), sizes);
    }
    inputs.scan::<true>(OP, state, sizes)
}

/// The scan of Mamba 2: a state that each token decays, writes, and reads.
///
/// `c` and `b` are `[batch, tokens, groups, state]`, `x` is `[batch, tokens, groups, heads · width]`, and `g` is `[batch, tokens, groups,
/// heads]`, all of one dtype: each group has so many heads. The state of a head is a matrix `S` `[state, width]`. Per token
///
/// `S ← e^g · S + b · xᵀ`, and the result is `Sᵀ c`.
///
/// Mamba 2 gives inputs times the step, and steps times a rate as `g`. Returns the results, in the shape of `x`, and the states behind the
/// last token, `[batch, state, groups, heads · width]`, in f32 for 16-bit floats. They begin as `state`, which gets no gradient, as the
/// states that are returned have none; without it, with zeros. With `history`, a number for each token of each element of the batch,
/// states are zeros before the tokens whose number is 0.
///
/// The backward pass computes states again, from each of about √tokens of them, which it keeps for some heads at a time. On other devices
/// than the CPU the scan is matrix products over chunks of tokens. Fails if shapes, dtypes or devices do not match. Source: Dao and Gu,
/// <https://arxiv.org/abs/2405.21060>.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let row = |values: [f32; 2]| Tensor::from_slice(&values, (1, 2, 1, 1), &Cpu);
/// // The second token keeps half of what the first one has written, 2 · 3.
/// let (c, b, x, g) = (row([1., 10.])?, row([2., 1.])?, row([3., 4.])?, row([0., 0.5f32.ln()])?);
/// let (y, state) = candle_dist_kernels::state_space_scan([&c, &b, &x], &g, None, None)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [6., 70.]);
/// assert_eq!(state.flatten_all()?.to_vec1::<f32>()?, [7.]);
/// # Ok(())
/// # }
/// ```
pub fn state_space_scan(
    [c, b, x]: [&Tensor; 3],
    g: &Tensor,
    state: Option<&Tensor>,
    history: Option<Arc<[u32]>>,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "state_space_scan";
    let inputs = ScanInputs { q: c, k: b, v: x, gates: &[g], state, history };
    let (sizes, state) = inputs.checked(OP)?;
    if inputs.is_composed(sizes) {
        return composed::state_space(&inputs, state.as_ref(), sizes);
    }
    inputs.scan::<false>(OP, state, sizes)
}
