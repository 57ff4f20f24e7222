//! What rank 0 tells all ranks before each pass.

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use candle_dist::ProcessGroup;

use crate::pass::PassBasis;
use crate::step::DecodeStep;

/// What all ranks do next.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RankOrder {
    /// A pass of the model: the step of each replica, which may have nothing to do, and what is read of its logits.
    Compute(Vec<DecodeStep>, PassBasis),
    /// To read all logits of the last pass.
    ReadAll,
    /// The embeddings of texts, by an encoder.
    Embed(Vec<Vec<u32>>),
    /// Nothing, and to wait on: no call of a group lasts longer than its timeout.
    Wait,
    /// To end.
    End,
}

/// The words of the first message of an order: enough for the next tokens of forty texts. A longer order has
/// a second one.
const WORDS: usize = 256;

const WAIT: u32 = 0;
const END: u32 = 1;
const COMPUTE: u32 = 2;
const EMBED: u32 = 3;
const READ_ALL: u32 = 4;

impl RankOrder {
    /// Brings the order of rank 0 to all ranks; others give `None`. Every rank calls it.
    ///
    /// # Errors
    /// Those of the group.
    pub(super) fn broadcast(self_or_none: Option<Self>, group: &ProcessGroup) -> Result<Self> {
        if group.size() == 1 {
            return self_or_none.context("rank 0 has no order");
        }
        let own = self_or_none.map(|order| order.words());
        let head = |words: &Vec<u32>| {
            let mut head = words.clone();
            head.resize(WORDS, 0);
            head
        };
        let sent = own.as_ref().map_or_else(|| vec![0; WORDS], head);
        let mut words = exchanged(sent, group)?;
        let all = words.first().copied().unwrap_or(0) as usize;
        if all > WORDS {
            let rest = match &own {
                Some(own) => own[WORDS..].to_vec(),
                None => vec![0; all - WORDS],
            };
            words.extend(exchanged(rest, group)?);
        }
        words.truncate(all);
        Self::of_words(&words).context("an order of rank 0 that is none: do all ranks run the same program?")
    }

    /// The order as numbers: how many there are, what it is, and each step or text with how many it has.
    fn words(&self) -> Vec<u32> {
        let counted = |words: &[u32]| [&[words.len() as u32], words].concat();
        let (kind, rest) = match self {
            Self::Wait => (WAIT, Vec::new()),
            Self::End => (END, Vec::new()),
            Self::ReadAll => (READ_ALL, Vec::new()),
            Self::Compute(steps, basis) => {
                let steps = steps.iter().flat_map(|step| counted(&step.words()));
                (COMPUTE, counted(&words_of(basis)).into_iter().chain(steps).collect())
            }
            Self::Embed(texts) => (EMBED, texts.iter().flat_map(|text| counted(text)).collect()),
        };
        [&[2 + rest.len() as u32, kind], &rest[..]].concat()
    }

    fn of_words(words: &[u32]) -> Option<Self> {
        let parts = |mut rest: &[u32]| {
            let mut parts = Vec::new();
            while let Some((&count, more)) = rest.split_first() {
                let (part, others) = more.split_at_checked(count as usize)?;
                parts.push(part.to_vec());
                rest = others;
            }
            Some(parts)
        };
        match words.split_at_checked(2)? {
            ([_, COMPUTE], rest) => {
                let parts = parts(rest)?;
                let (basis, steps) = parts.split_first()?;
                let steps = steps.iter().map(|step| DecodeStep::of_words(step)).collect::<Option<_>>()?;
                Some(Self::Compute(steps, basis_of(basis)?))
            }
            ([_, EMBED], rest) => parts(rest).map(Self::Embed),
            ([_, WAIT], []) => Some(Self::Wait),
            ([_, END], []) => Some(Self::End),
            ([_, READ_ALL], []) => Some(Self::ReadAll),
            _ => None,
        }
    }
}

const LARGEST: u32 = 0;
const CANDIDATES: u32 = 1;
const ALL: u32 = 2;

/// What is read as numbers: what it is, and the halves of each temperature.
fn words_of(basis: &PassBasis) -> Vec<u32> {
    match basis {
        PassBasis::Largest => vec![LARGEST],
        PassBasis::All => vec![ALL],
        PassBasis::Candidates(temperatures) => {
            let bits = temperatures.iter().map(|temperature| temperature.to_bits());
            let halves = bits.flat_map(|bits| [(bits >> 32) as u32, bits as u32]);
            std::iter::once(CANDIDATES).chain(halves).collect()
        }
    }
}

fn basis_of(words: &[u32]) -> Option<PassBasis> {
    match words.split_first()? {
        (&LARGEST, []) => Some(PassBasis::Largest),
        (&ALL, []) => Some(PassBasis::All),
        (&CANDIDATES, rest) => {
            let (halves, rest) = rest.as_chunks::<2>();
            let temperature =
                |&[high, low]: &[u32; 2]| f64::from_bits(u64::from(high) << 32 | u64::from(low));
            rest.is_empty().then(|| PassBasis::Candidates(halves.iter().map(temperature).collect()))
        }
        _ => None,
    }
}

fn exchanged(words: Vec<u32>, group: &ProcessGroup) -> Result<Vec<u32>> {
    let count = words.len();
    Ok(group.broadcast(&Tensor::from_vec(words, count, &Device::Cpu)?, 0)?.to_vec1()?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{RankOrder, WORDS};
    use crate::pass::PassBasis;
    use crate::step::{DecodeStep, SlotPast};
    use candle_dist::World;
    use candle_shard::nn::RowAdapters;

    #[test]
    fn all_ranks_get_orders_of_any_length() {
        let mut orders = vec![RankOrder::Wait, RankOrder::End, RankOrder::ReadAll];
        for tokens in [1, WORDS - 13, WORDS - 12, WORDS - 11, 1000] {
            let mut step = DecodeStep::default();
            step.push_behind(3, SlotPast::Nothing, &vec![u32::MAX; tokens], 1, RowAdapters::One(7));
            orders.push(RankOrder::Compute(vec![step.clone()], PassBasis::Largest));
            orders.push(RankOrder::Compute(vec![step.clone()], PassBasis::Candidates(vec![0.7, 0.0])));
            orders.push(RankOrder::Compute(vec![step.clone(), DecodeStep::default(), step], PassBasis::All));
            orders.push(RankOrder::Embed(vec![vec![u32::MAX; tokens], Vec::new(), vec![1]]));
        }
        let got = World::threads(2).run(|ctx| -> anyhow::Result<Vec<RankOrder>> {
            orders
                .iter()
                .map(|order| RankOrder::broadcast((ctx.rank() == 0).then(|| order.clone()), ctx.group()))
                .collect()
        });
        assert!(got.unwrap().iter().all(|got| *got == orders));
    }
}
