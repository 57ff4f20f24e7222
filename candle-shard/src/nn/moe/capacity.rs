//! Experts with a limit: which choices are dropped, the same on all meshes.
use super::NO_EXPERT;
use super::load::{Places, TokenRanks};
use crate::Result;
use candle_core::{Device, Tensor};
use candle_dist::{Collective, Cut};

/// Replaces this rank's choices of experts that are full by [`NO_EXPERT`].
///
/// An expert takes at most `factor` times the mean number of its choices, over all tokens of the mesh, rounded up. First
/// choices go before second ones, and tokens in their order in the whole tensor. So the result does not depend on how
/// tokens are cut. All ranks learn all choices, `4 · top_k` bytes for each token.
pub(super) fn drop_choices(
    chosen: &mut [u32],
    (experts, top_k): (usize, usize),
    factor: f64,
    ranks: &TokenRanks,
) -> Result<()> {
    let counts: Vec<usize> = ranks.places.iter().map(|places| places.len() * top_k).collect();
    let mine = Tensor::from_slice(chosen, chosen.len(), &Device::Cpu)?;
    let all = match &ranks.group {
        Some(group) => group.call(Collective::all_gather(Cut::new(0, &counts))).run(&mine)?,
        None => mine,
    };
    let all = all.to_vec1::<u32>()?;
    let tokens: usize = ranks.places.iter().map(Places::len).sum();
    let room = (factor * (tokens * top_k) as f64 / experts as f64).ceil() as usize;
    // The token of the whole tensor, and the place of its choices in `all`.
    let mut order: Vec<(usize, usize)> = Vec::with_capacity(tokens);
    for places in &ranks.places {
        let first = order.len();
        order.extend(places.iter().enumerate().map(|(i, token)| (token, first + i)));
    }
    order.sort_unstable();
    let mut taken = vec![0usize; experts];
    let before: usize = counts[..ranks.me].iter().sum();
    for choice in 0..top_k {
        for &(_, at) in &order {
            let (at, expert) = (at * top_k + choice, all[at * top_k + choice] as usize);
            taken[expert] += 1;
            let mine = at.checked_sub(before).and_then(|at| chosen.get_mut(at));
            if let Some(mine) = mine.filter(|_| taken[expert] > room) {
                *mine = NO_EXPERT;
            }
        }
    }
    Ok(())
}
