//! Which token comes next.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Error, Result, anyhow};
use candle_core::{DType, Tensor};
use candle_shard::kernels::{LargestNumber, RowCandidates};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::error::{InputResult, require};
use crate::pass::{RowBasis, TokenBasis};

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// What logits are divided by; 0 takes the most likely token.
    pub temperature: f64,
    /// The share of the probability that tokens are drawn from: the fewest tokens that have it together.
    pub top_p: f64,
    /// How many of the most likely tokens are drawn from, and those as likely as the last of them; 0 for all.
    pub top_k: usize,
    /// Tokens that are less likely than this share of the likeliest one are not drawn.
    pub min_p: f64,
    /// What positive logits of tokens that were there before are divided by, and negative ones multiplied with.
    pub repetition_penalty: f64,
    /// What is subtracted from the logit of a token that was written before; 0 for nothing.
    pub presence_penalty: f64,
    /// What is subtracted from the logit of a token for each time that it was written; 0 for nothing.
    pub frequency_penalty: f64,
    /// The seed of the draws.
    pub seed: u64,
}

impl Default for Sampling {
    /// The most likely token.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Checks that tokens can be chosen like this.
    ///
    /// # Errors
    /// If a number is none, or out of its range.
    pub fn check(&self) -> InputResult {
        let Self { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        let is_from = |value: f64, least: f64, most: f64| (least..=most).contains(&value);
        require!(is_from(temperature, 0.0, f64::MAX), "the temperature {temperature} is not 0 or more");
        require!(is_from(top_p, 0.0, 1.0), "top_p {top_p} is not from 0 to 1");
        require!(is_from(min_p, 0.0, 1.0), "min_p {min_p} is not from 0 to 1");
        require!(
            is_from(repetition_penalty, 0.01, 100.0),
            "the repetition penalty {repetition_penalty} is not from 0.01 to 100"
        );
        for (name, penalty) in [("presence", self.presence_penalty), ("frequency", self.frequency_penalty)] {
            require!(is_from(penalty, -100.0, 100.0), "the {name} penalty {penalty} is not from -100 to 100");
        }
        Ok(())
    }
}

/// Chooses tokens: the same ones on all ranks, which have the same logits.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
    /// The tokens that were there before, if that matters.
    seen: BTreeSet<u32>,
    /// How often tokens were written, if that matters.
    written: BTreeMap<u32, u32>,
}

impl Sampler {
    /// A sampler at the start of its draws.
    pub fn new(sampling: Sampling) -> Self {
        Self {
            sampling,
            rng: ChaCha8Rng::seed_from_u64(sampling.seed),
            seen: BTreeSet::new(),
            written: BTreeMap::new(),
        }
    }

    /// A sampler of one of several texts, by its place among them. Each has a random stream of its own; the first has that
    /// of [`new`](Self::new).
    pub fn of_place(sampling: Sampling, place: usize) -> Self {
        let mut sampler = Self::new(sampling);
        sampler.rng.set_stream(place as u64);
        sampler
    }

    /// What the next token is chosen by, whatever was there before.
    pub(crate) fn basis(&self) -> TokenBasis {
        let Sampling { temperature, top_p, top_k, min_p, .. } = self.sampling;
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = self.sampling;
        if (repetition_penalty, presence_penalty, frequency_penalty) != (1.0, 0.0, 0.0) {
            return TokenBasis::All;
        }
        match top_k {
            _ if temperature <= 0.0 => TokenBasis::Largest,
            // More are mostly there, too: so many are told of each part of the vocabulary.
            1.. if top_k <= 8 * RowCandidates::LEAST => TokenBasis::Candidates(0.0),
            0 if top_p < 1.0 => TokenBasis::Candidates(temperature),
            0 if min_p > 0.0 => TokenBasis::Candidates(0.0),
            _ => TokenBasis::All,
        }
    }

    /// Takes note of tokens that were there before.
    pub fn see(&mut self, tokens: &[u32]) {
        if self.sampling.repetition_penalty != 1.0 {
            self.seen.extend(tokens);
        }
    }

    /// Takes note of a token that was written.
    pub fn wrote(&mut self, token: u32) {
        self.see(&[token]);
        if (self.sampling.presence_penalty, self.sampling.frequency_penalty) != (0.0, 0.0) {
            *self.written.entry(token).or_default() += 1;
        }
    }

    /// A token by its logits `[vocabulary]`.
    ///
    /// # Errors
    /// If a logit is no number or infinitely large, or all are infinitely small: a model that computes so has no next token.
    pub fn next(&mut self, logits: &Tensor) -> Result<u32> {
        self.choose(logits.to_dtype(DType::F32)?.to_vec1::<f32>()?)
    }

    /// A token by its logits.
    ///
    /// # Errors
    /// Those of [`next`](Self::next).
    pub(crate) fn choose(&mut self, mut logits: Vec<f32>) -> Result<u32> {
        let mut most = largest(&logits)?;
        let penalty = self.sampling.repetition_penalty as f32;
        for &token in &self.seen {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
            }
        }
        let Sampling { presence_penalty, frequency_penalty, .. } = self.sampling;
        for (&token, &times) in &self.written {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= (presence_penalty + frequency_penalty * f64::from(times)) as f32;
            }
        }
        if !(self.seen.is_empty() && self.written.is_empty()) {
            most = largest(&logits)?;
        }
        let best = logits.iter().position(|logit| *logit == most).filter(|_| most.is_finite());
        let Some(best) = best else { return Err(not_finite()) };
        if self.sampling.temperature <= 0.0 {
            return Ok(best as u32);
        }
        let weights = (0..).zip(logits.iter().map(|&logit| self.weight(logit, most)));
        // What a grammar forbids, or is far too unlikely, has no weight.
        let weights: Vec<(u32, f64)> = weights.filter(|&(_, weight)| weight > 0.0).collect();
        let total = weights.iter().map(|(_, weight)| weight).sum();
        let kept = self.kept(weights, total);
        Ok(self.draw(&kept))
    }

    /// A token by what was read of its logits.
    ///
    /// # Errors
    /// Those of [`next`](Self::next); if it is not [decided](Self::is_decided_by).
    pub(crate) fn choose_by(&mut self, read: RowBasis<'_>) -> Result<u32> {
        let row = match read {
            RowBasis::All(logits) => return self.choose(logits.to_vec()),
            RowBasis::Largest(largest) => return checked(largest),
            RowBasis::Candidates(row) => row,
        };
        let likeliest = checked(*row.numbers.first().context("no logits")?)?;
        if self.sampling.temperature <= 0.0 {
            return Ok(likeliest);
        }
        let kept = self.kept_of(row).context("too few of the logits were read")?;
        Ok(self.draw(&kept))
    }

    /// Whether what was read of the logits decides the next token, or that there is none.
    pub(crate) fn is_decided_by(&self, read: RowBasis<'_>) -> bool {
        match read {
            RowBasis::Candidates(row) => {
                let is_wrong = row.numbers.first().is_none_or(|&largest| checked(largest).is_err());
                is_wrong || self.sampling.temperature <= 0.0 || self.kept_of(row).is_some()
            }
            RowBasis::Largest(_) | RowBasis::All(_) => true,
        }
    }

    /// The weight of a token, if that of the likeliest is 1.
    fn weight(&self, logit: f32, most: f32) -> f64 {
        ((f64::from(logit) - f64::from(most)) / self.sampling.temperature).exp()
    }

    /// The tokens that one is drawn from, as [`kept`](Self::kept) has them of all tokens; `None` if the candidates do not tell.
    fn kept_of(&self, row: &RowCandidates) -> Option<Vec<(u32, f64)>> {
        /// How far the sum of all weights may be off, with the host's own sums.
        const OFF: f64 = 1e-9;
        let most = row.numbers.first()?.value;
        let weights = row.numbers.iter().map(|number| (number.place, self.weight(number.value, most)));
        let mut weights: Vec<(u32, f64)> = weights.filter(|&(_, weight)| weight > 0.0).collect();
        // No other token has more.
        let rest = row.rest.map_or(0.0, |rest| self.weight(rest, most));
        let Sampling { top_p, top_k, min_p, .. } = self.sampling;
        let mut total = row.sum;
        sort(&mut weights);
        // The last one that is kept, and those as likely, must be before all others.
        let is_before = |last: Option<&(u32, f64)>| last.is_some_and(|&(_, weight)| weight > rest);
        let is_known = match top_k {
            _ if rest == 0.0 => {
                weights.sort_unstable_by_key(|&(token, _)| token);
                total = weights.iter().map(|(_, weight)| weight).sum();
                true
            }
            1.. => is_before(weights.get(top_k - 1)),
            0 if top_p < 1.0 => {
                let [low, high] = [1.0 - OFF, 1.0 + OFF].map(|off| within(&weights, top_p * total * off));
                total > 0.0 && low == high && is_before(weights.get(low))
            }
            0 => {
                weights.retain(|&(_, weight)| weight >= min_p);
                weights.sort_unstable_by_key(|&(token, _)| token);
                min_p > rest
            }
        };
        is_known.then(|| self.kept(weights, total))
    }

    /// The tokens that one is drawn from, of those with a weight, the first token first, whose sum is `total`.
    fn kept(&self, mut weights: Vec<(u32, f64)>, mut total: f64) -> Vec<(u32, f64)> {
        let Sampling { top_p, top_k, min_p, .. } = self.sampling;
        let top_k = if top_k < weights.len() { top_k } else { 0 };
        if top_p < 1.0 || top_k > 0 {
            sort_most(&mut weights, |most| match top_k {
                0 => most.iter().map(|(_, weight)| weight).sum::<f64>() >= top_p * total,
                count => most.len() >= count,
            });
        }
        if let Some(&(_, last)) = top_k.checked_sub(1).and_then(|last| weights.get(last)) {
            weights.truncate(weights.partition_point(|&(_, weight)| weight >= last));
            total = weights.iter().map(|(_, weight)| weight).sum();
        }
        if top_p < 1.0 {
            weights.truncate(1 + within(&weights, top_p * total));
        }
        // The weight of the likeliest token is 1.
        weights.retain(|&(_, weight)| weight >= min_p);
        weights
    }

    /// One of the tokens, as often as it is likely.
    fn draw(&mut self, weights: &[(u32, f64)]) -> u32 {
        let kept: f64 = weights.iter().map(|(_, weight)| weight).sum();
        // 53 random bits: a number in [0, 1).
        let draw = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * kept;
        weights.get(within(weights, draw)).or(weights.last()).map_or(0, |&(token, _)| token)
    }
}

/// Leaves the largest weights, the largest first, as soon as they are `enough`, and all otherwise. The largest is 1. Few
/// tokens are likely, and to sort the others would take as long as a small model.
fn sort_most(weights: &mut Vec<(u32, f64)>, enough: impl Fn(&[(u32, f64)]) -> bool) {
    let mut least = 1.0 / 1024.0;
    while least > f64::MIN_POSITIVE {
        let most: Vec<(u32, f64)> = weights.iter().copied().filter(|(_, weight)| *weight >= least).collect();
        if enough(&most) {
            *weights = most;
            break;
        }
        least /= 1024.0;
    }
    sort(weights);
}

/// Puts the likeliest token first, and of equally likely ones the one with the least number.
fn sort(weights: &mut [(u32, f64)]) {
    weights.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
}

/// The largest logit.
///
/// # Errors
/// If a logit is no number or infinitely large.
fn largest(logits: &[f32]) -> Result<f32> {
    // Sixteen at a time, as the processor's vectors have them.
    let (chunks, rest) = logits.as_chunks::<16>();
    let (mut most, mut odd) = ([f32::NEG_INFINITY; 16], [false; 16]);
    for chunk in chunks {
        for ((most, odd), &logit) in most.iter_mut().zip(&mut odd).zip(chunk) {
            *most = if logit > *most { logit } else { *most };
            *odd |= logit.is_nan() | (logit == f32::INFINITY);
        }
    }
    let is_odd = |logit: f32| logit.is_nan() || logit == f32::INFINITY;
    if (odd.contains(&true) || rest.iter().copied().any(is_odd))
        && let Some(token) = logits.iter().copied().position(is_odd)
    {
        return Err(not_a_logit(token, logits[token]));
    }
    Ok(most.iter().chain(rest).fold(f32::NEG_INFINITY, |most, &logit| most.max(logit)))
}

fn not_a_logit(token: usize, logit: f32) -> Error {
    anyhow!("the logit of token {token} is {logit}; check the weights, or compute in a wider --dtype")
}

fn not_finite() -> Error {
    anyhow!("none of the logits is finite; check the weights, or compute in a wider --dtype")
}

/// The token with the largest logit.
///
/// # Errors
/// If it is no number or infinitely large, or all are infinitely small.
pub(crate) fn checked(largest: LargestNumber) -> Result<u32> {
    match largest {
        LargestNumber { place, value } if value.is_finite() => Ok(place),
        LargestNumber { value: f32::NEG_INFINITY, .. } => Err(not_finite()),
        LargestNumber { place, value } => Err(not_a_logit(place as usize, value)),
    }
}

/// The place of the weight within which the sum of them passes `sum`.
fn within(weights: &[(u32, f64)], sum: f64) -> usize {
    let sums = weights.iter().scan(0.0, |so_far, (_, weight)| {
        *so_far += weight;
        Some(*so_far)
    });
    sums.take_while(|&so_far| so_far <= sum).count()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests;
