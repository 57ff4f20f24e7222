//! How many tokens each expert and each rank gets. All ranks with different tokens learn it at once.
use super::config::MoEAxes;
use super::{NO_EXPERT, OP};
use crate::layout::{Spec, axes_of};
use crate::{DTensor, Error, Result};
use candle_core::{Device, Tensor};
use candle_dist::ProcessGroup;
use itertools::Itertools;
use std::ops::Range;

/// The work of one forward pass of a [`MoE`](crate::nn::MoE) layer, over all tokens of the mesh and equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Load {
    /// The number of tokens that chose each expert, dropped ones included.
    pub experts: Vec<usize>,
    /// The number of tokens that each rank of the expert axis computes.
    pub ranks: Vec<usize>,
    /// The number of tokens that travel from one rank to another, and back.
    pub sent: usize,
}

/// The tokens of one rank among those of the whole tensor.
pub(super) struct Places {
    dims: Vec<usize>,
    ranges: Vec<Range<usize>>,
}

impl Places {
    pub(super) fn len(&self) -> usize {
        self.ranges.iter().map(Range::len).product()
    }

    fn indexes(&self) -> impl Iterator<Item = Vec<usize>> + '_ {
        self.ranges.iter().cloned().multi_cartesian_product()
    }

    /// Returns the number of each token in the whole tensor.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.indexes().map(|index| index.iter().zip(&self.dims).fold(0, |at, (i, dim)| at * dim + i))
    }
}

/// The ranks that have different tokens of a tensor.
pub(super) struct TokenRanks {
    /// Their group, if there are several.
    pub(super) group: Option<ProcessGroup>,
    /// The number of this rank in the group.
    pub(super) me: usize,
    /// The coordinates of each rank on the mesh.
    coordinates: Vec<Vec<usize>>,
    /// The tokens of each rank.
    pub(super) places: Vec<Places>,
}

impl TokenRanks {
    /// Finds the ranks for tokens `[.., width]`. The calls of their group carry the name of the parameter `of`.
    pub(super) fn of(tokens: &Spec, of: &DTensor) -> Result<Self> {
        let mesh = tokens.mesh();
        let is_cut =
            |axis: &usize| mesh.shape()[*axis] > 1 && tokens.placements()[*axis].shard_dim().is_some();
        let axes: Vec<usize> = (0..mesh.ndim()).filter(is_cut).collect();
        let here = mesh.coordinate().to_vec();
        let at = |place: &[usize]| {
            let mut coordinate = here.clone();
            axes.iter().zip(place).for_each(|(&axis, &i)| coordinate[axis] = i);
            coordinate
        };
        let coordinates: Vec<Vec<usize>> = match axes.is_empty() {
            true => vec![here.clone()],
            false => axes
                .iter()
                .map(|&axis| 0..mesh.shape()[axis])
                .multi_cartesian_product()
                .map(|p| at(&p))
                .collect(),
        };
        let names: Vec<&str> = axes.iter().map(|&axis| mesh.names()[axis].as_str()).collect();
        let group = match &axes[..] {
            [] => None,
            &[axis] => Some(mesh.axis_group(axis)?.clone()),
            _ => Some(mesh.axes(&names)?.group()?.clone()),
        };
        let group = group.map(|group| of.described(group, axes_of(&axes)));
        let leading = tokens.dims().len() - 1;
        let places = |coordinate: &Vec<usize>| {
            let ranges = tokens.block_at(coordinate)[..leading].to_vec();
            Places { dims: tokens.dims()[..leading].to_vec(), ranges }
        };
        let me = coordinates.iter().position(|coordinate| *coordinate == here).unwrap_or(0);
        Ok(Self { group, me, places: coordinates.iter().map(places).collect(), coordinates })
    }
}

/// The rows that ranks of the expert axis send each other.
pub(super) struct LoadTable {
    /// `counts[s][r]`: the rows from rank `s` to rank `r`, if tokens are sharded on the expert axis.
    pub(super) counts: Option<Vec<Vec<usize>>>,
    pub(super) load: Load,
}

/// Returns the ranks, without repetition, that carry out the choices of a token.
pub(super) fn targets(choices: &[u32], rank_of: &[usize]) -> impl Iterator<Item = usize> {
    let ranks = choices.iter().filter(|&&expert| expert != NO_EXPERT).map(|&expert| rank_of[expert as usize]);
    ranks.sorted_unstable().dedup()
}

/// Exchanges what all ranks need to know, in one all_gather of `1 + ranks + experts` numbers.
///
/// `chosen` are all choices of this rank's tokens, `kept` those that are carried out.
///
/// # Errors
/// The same one on all ranks, if the scores of a token are not numbers.
pub(super) fn exchange(
    (chosen, kept, top_k): (&[u32], &[u32], usize),
    invalid: Option<usize>,
    ranks: &TokenRanks,
    (axes, tokens): (&MoEAxes, &Spec),
) -> Result<LoadTable> {
    let (experts, peers, rank_of) = (axes.sizes.iter().sum::<usize>(), axes.sizes.len(), axes.ranks());
    let mut mine = vec![0u32; 1 + peers + experts];
    mine[0] = invalid.map_or(0, |token| token as u32 + 1);
    for choices in kept.chunks_exact(top_k) {
        targets(choices, &rank_of).for_each(|rank| mine[1 + rank] += 1);
    }
    chosen.iter().for_each(|&expert| mine[1 + peers + expert as usize] += 1);
    let all: Vec<Vec<u32>> = match &ranks.group {
        Some(group) => {
            let mine = Tensor::from_vec(mine, (1, 1 + peers + experts), &Device::Cpu)?;
            group.all_gather(&mine, 0)?.to_vec2()?
        }
        None => vec![mine],
    };
    let bad = all.iter().zip(&ranks.places).filter(|(told, _)| told[0] > 0);
    let first = bad.filter_map(|(told, places)| places.indexes().nth(told[0] as usize - 1)).min();
    if let Some(token) = first {
        let reason = format!(
            "the router's scores of token {token:?} of {tokens} are not numbers; look for NaN or infinity in its row of the \
             input, or in the router's weight"
        );
        return Error::op(OP, reason);
    }
    let sum = |at: usize| all.iter().map(|told| told[at] as usize).sum::<usize>();
    let axis = axes.experts.filter(|&axis| peers > 1 && tokens.placements()[axis].shard_dim().is_some());
    let own = |told: &[u32], coordinate: &[usize]| axis.map_or(0, |axis| told[1 + coordinate[axis]] as usize);
    let of_rank = |told: &[u32]| told[1..=peers].iter().map(|&rows| rows as usize).collect::<Vec<_>>();
    let pairs = || all.iter().zip(&ranks.coordinates);
    let sent = axis
        .map_or(0, |_| pairs().map(|(told, at)| of_rank(told).iter().sum::<usize>() - own(told, at)).sum());
    let load = Load {
        experts: (0..experts).map(|expert| sum(1 + peers + expert)).collect(),
        ranks: (0..peers).map(|rank| sum(1 + rank)).collect(),
        sent,
    };
    // The ranks that differ from this one only on the expert axis, in its order.
    let here = &ranks.coordinates[ranks.me];
    let is_peer =
        |axis: usize, at: &[usize]| (0..at.len()).all(|other| other == axis || at[other] == here[other]);
    let counts =
        axis.map(|axis| pairs().filter(|(_, at)| is_peer(axis, at)).map(|(told, _)| of_rank(told)).collect());
    Ok(LoadTable { counts, load })
}
