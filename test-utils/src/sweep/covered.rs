//! The layouts that are tested, and their coverage.
use super::{Case, Kind};
use crate::{Lay, lays, on_axes};
use candle_shard::{DTensor, Replicate, Shard};
use itertools::Itertools;

/// The number of cases with an input in even, uneven or empty pieces, or in strided memory.
#[derive(Clone, Copy, Default)]
#[cfg_attr(feature = "mpi", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct Covered {
    pub(super) even: usize,
    pub(super) uneven: usize,
    pub(super) empty: usize,
    pub(super) strided: usize,
}

impl Covered {
    pub(super) fn count(&mut self, inputs: &[DTensor], strided: bool) {
        let of_input = |x: &DTensor| {
            let mesh = x.mesh();
            let block = |rank: usize| x.spec().block_at(&mesh.coordinate_of(rank).unwrap_or_default());
            let sizes =
                (0..mesh.size()).map(|rank| block(rank).iter().map(|range| range.len()).collect_vec());
            let (sizes, cut) = (sizes.collect_vec(), x.placements().iter().any(|p| p.shard_dim().is_some()));
            let empty = x.elem_count() > 0 && sizes.iter().any(|size| size.contains(&0));
            (cut, sizes.iter().all_equal(), empty)
        };
        let pieces = inputs.iter().map(of_input).filter(|(cut, ..)| *cut).collect_vec();
        self.even += usize::from(pieces.iter().any(|(_, equal, _)| *equal));
        self.uneven += usize::from(pieces.iter().any(|(_, equal, empty)| !equal && !empty));
        self.empty += usize::from(pieces.iter().any(|(.., empty)| *empty));
        self.strided += usize::from(strided);
    }

    pub(super) fn add(&mut self, other: Self) {
        self.even += other.even;
        self.uneven += other.uneven;
        self.empty += other.empty;
        self.strided += other.strided;
    }
}

/// Returns all layouts of all inputs, or a fixed selection of `most` of them if there are more.
pub(super) fn layouts(case: &Case, axes: usize, most: usize) -> Vec<Vec<Vec<Lay>>> {
    let of_input = |(shape, kind): &(Vec<usize>, Kind)| match kind {
        Kind::Ids(_) => {
            let shards = (0..shape.len()).map(|d| Lay::At(Shard(d)));
            on_axes(&shards.chain([Lay::At(Replicate)]).collect_vec(), axes)
        }
        _ => on_axes(&lays(shape.len()), axes),
    };
    let choices = case.inputs.iter().map(of_input).collect_vec();
    let count: usize = choices.iter().map(Vec::len).product();
    // A stride that is coprime to the count visits all layouts of every input equally.
    let step = (count.div_ceil(most)..).find(|&step| gcd(step, count) == 1).unwrap_or(1);
    let pick = |mut index: usize| {
        choices
            .iter()
            .map(|of_input| (of_input[index % of_input.len()].clone(), index /= of_input.len()).0)
            .collect()
    };
    (0..count).step_by(step).map(pick).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
