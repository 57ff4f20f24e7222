//! Who sends which rows where: tokens to the ranks of their experts, and results back.
use super::NO_EXPERT;
use super::config::MoEAxes;
use super::load::targets;
use crate::Result;
use crate::kernels::{self, BagMode, Bags};
use candle_core::{DType, Device, Tensor};
use candle_dist::functional::Step;
use candle_dist::{ProcessGroup, empty};

/// The way of this rank's tokens to their experts. A token goes once to a rank, whatever it chose there.
pub(super) struct Dispatch {
    /// The group of the expert axis and its table of rows, if tokens are sharded there. If not, each rank has all tokens
    /// and uses those that chose one of its experts.
    exchange: Option<(ProcessGroup, Vec<Vec<usize>>)>,
    /// The tokens of the rows that this rank sends, in the order of the receiving ranks.
    sent: Vec<u32>,
    /// For each of these rows the choices that the receiver carries out, as numbers of its experts.
    slips: Vec<u32>,
    /// The rows of each token, and their bounds.
    home: Bags,
    top_k: usize,
}

/// The rows that this rank computes.
pub(super) struct ExpertRows {
    /// `[n, width]`.
    pub(super) rows: Tensor,
    /// `[n, top_k]`.
    pub(super) weights: Tensor,
    /// The expert of this rank for each choice of each row, or [`NO_EXPERT`].
    pub(super) experts: Vec<u32>,
}

impl Dispatch {
    /// Plans the way of tokens with these choices, `top_k` for each. `me` is this rank's place on the expert axis.
    pub(super) fn new(
        (chosen, top_k): (&[u32], usize),
        axes: &MoEAxes,
        me: usize,
        exchange: Option<(ProcessGroup, Vec<Vec<usize>>)>,
    ) -> Result<Self> {
        let rank_of = axes.ranks();
        let firsts: Vec<u32> =
            (0..axes.sizes.len()).map(|rank| axes.sizes[..rank].iter().sum::<usize>() as u32).collect();
        let mut rows: Vec<Vec<u32>> = vec![Vec::new(); axes.sizes.len()];
        for (token, choices) in chosen.chunks_exact(top_k).enumerate() {
            targets(choices, &rank_of)
                .filter(|&rank| exchange.is_some() || rank == me)
                .for_each(|rank| rows[rank].push(token as u32));
        }
        let mut slips = Vec::with_capacity(rows.iter().map(Vec::len).sum::<usize>() * top_k);
        let mut of_token: Vec<Vec<u32>> = vec![Vec::new(); chosen.len() / top_k];
        let mut row = 0;
        for (rank, tokens) in rows.iter().enumerate() {
            let number = |&expert: &u32| match expert {
                NO_EXPERT => NO_EXPERT,
                expert if rank_of[expert as usize] == rank => expert - firsts[rank],
                _ => NO_EXPERT,
            };
            for &token in tokens {
                slips.extend(chosen[token as usize * top_k..][..top_k].iter().map(number));
                of_token[token as usize].push(row);
                row += 1;
            }
        }
        let home = bags(&of_token)?;
        Ok(Self { exchange, sent: rows.concat(), slips, home, top_k })
    }

    /// Sends the tokens `[tokens, width]` and the weights of their choices `[tokens, top_k]` to the ranks of the experts.
    pub(super) fn send(&self, tokens: &Tensor, weights: &Tensor) -> Result<ExpertRows> {
        let rows = kernels::embedding(tokens, &self.sent[..], None)?;
        let weights = kernels::embedding(weights, &self.sent[..], None)?;
        let Some((group, counts)) = &self.exchange else {
            return Ok(ExpertRows { rows, weights, experts: self.slips.clone() });
        };
        let rows = Step::all_to_all_single(counts).apply(&rows, group)?;
        // Weights and numbers of experts travel together.
        let (k, n) = (self.top_k, rows.dim(0)?);
        let own = empty::to_host(&weights.detach())?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        let number = |&expert: &u32| if expert == NO_EXPERT { -1.0 } else { f64::from(expert) };
        let pairs = own.chunks_exact(k).zip(self.slips.chunks_exact(k));
        let packed: Vec<f64> =
            pairs.flat_map(|(w, slip)| w.iter().copied().chain(slip.iter().map(number))).collect();
        let there = |list: Vec<f64>, shape: (usize, usize)| {
            Tensor::from_vec(list, shape, &Device::Cpu)?
                .to_dtype(weights.dtype())?
                .to_device(weights.device())
        };
        let packed = there(packed, (self.sent.len(), 2 * k))?;
        let packed = group.to_host(&group.all_to_all_single(&packed, counts)?)?;
        let packed = packed.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        let halves = || packed.chunks_exact(2 * k).map(|row| row.split_at(k));
        let experts = halves()
            .flat_map(|(_, slip)| slip)
            .map(|&i| if i < 0.0 { NO_EXPERT } else { i as u32 })
            .collect();
        let got: Vec<f64> = halves().flat_map(|(weights, _)| weights).copied().collect();
        let got = there(got, (n, k))?;
        let weights = Step::all_to_all_single(counts).with_known_result(&weights, &got, group)?;
        Ok(ExpertRows { rows, weights, experts })
    }

    /// Sends results `[n, width]` for the rows that arrived back, and adds those of each token: `[tokens, width]`.
    pub(super) fn bring_back(&self, made: &Tensor) -> Result<Tensor> {
        let made = match &self.exchange {
            None => made.clone(),
            Some((group, counts)) => {
                let back: Vec<Vec<usize>> =
                    (0..counts.len()).map(|r| counts.iter().map(|row| row[r]).collect()).collect();
                Step::all_to_all_single(&back).apply(made, group)?
            }
        };
        Ok(kernels::embedding_bag(&made, &self.home, BagMode::Sum, None)?)
    }
}

/// Makes bags of these lists.
pub(super) fn bags(lists: &[Vec<u32>]) -> Result<Bags> {
    let mut bounds = vec![0];
    bounds.extend(lists.iter().scan(0, |end, list| {
        *end += list.len();
        Some(*end)
    }));
    Ok(Bags::new(lists.concat(), bounds)?)
}
