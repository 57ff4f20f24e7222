//! Which token comes next.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Error, Result, anyhow};
use candle_core::{DType, Tensor};
use candle_shard::kernels::LargestNumber;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::error::{InputResult, require};

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

    /// Whether the next token is the one with the largest logit, whatever was there before.
    pub(crate) fn takes_largest(&self) -> bool {
        let Sampling { temperature, repetition_penalty, presence_penalty, frequency_penalty, .. } =
            self.sampling;
        temperature <= 0.0 && (repetition_penalty, presence_penalty, frequency_penalty) == (1.0, 0.0, 0.0)
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
        let most = f64::from(most);
        let weight = |&logit: &f32| ((f64::from(logit) - most) / self.sampling.temperature).exp();
        let weights = (0..).zip(logits.iter().map(weight));
        // What a grammar forbids, or is far too unlikely, has no weight.
        let mut weights: Vec<(u32, f64)> = weights.filter(|&(_, weight)| weight > 0.0).collect();
        let Sampling { top_p, top_k, min_p, .. } = self.sampling;
        let top_k = if top_k < weights.len() { top_k } else { 0 };
        let mut total: f64 = weights.iter().map(|(_, weight)| weight).sum();
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
        let kept: f64 = weights.iter().map(|(_, weight)| weight).sum();
        // 53 random bits: a number in [0, 1).
        let draw = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * kept;
        Ok(weights.get(within(&weights, draw)).or(weights.last()).map_or(0, |&(token, _)| token))
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
mod tests {
    use super::{LargestNumber, Sampler, Sampling, checked, sort_most};
    use candle_core::{Device, Tensor};
    use std::collections::BTreeSet;

    fn drawn(temperature: f64, top_p: f64) -> Vec<u32> {
        let logits = Tensor::new(&[0f32, 2.0, 1.0, f32::NEG_INFINITY], &Device::Cpu).unwrap();
        let mut sampler = Sampler::new(Sampling { temperature, top_p, seed: 1, ..Sampling::default() });
        (0..2000).map(|_| sampler.next(&logits).unwrap()).collect()
    }

    #[test]
    fn logits_that_are_no_numbers_are_an_error_and_no_token() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let cases = [
            ([0.0, nan, 1.0], "the logit of token 1 is NaN"),
            ([0.0, 1.0, inf], "the logit of token 2 is inf"),
            ([-inf; 3], "none of the logits"),
        ];
        for temperature in [0.0, 1.0] {
            for (logits, want) in &cases {
                let logits = Tensor::new(logits, &Device::Cpu).unwrap();
                let mut sampler =
                    Sampler::new(Sampling { temperature, top_p: 0.9, seed: 1, ..Sampling::default() });
                let said = sampler.next(&logits).unwrap_err().to_string();
                assert!(said.contains(want), "{said}");
                let keys = LargestNumber::keys(&logits.unsqueeze(0).unwrap()).unwrap();
                let largest = LargestNumber::of_keys(&keys).unwrap()[0];
                assert_eq!(checked(largest).unwrap_err().to_string(), said);
            }
        }
    }

    #[test]
    fn few_tokens_likely_ones_and_new_ones_are_drawn() {
        let drawn = |sampling: Sampling, seen: &[u32]| {
            let logits = Tensor::new(&[0f32, 2.0, 1.0, 1.0, -1.0], &Device::Cpu).unwrap();
            let mut sampler = Sampler::new(Sampling { temperature: 1.0, seed: 3, ..sampling });
            sampler.see(seen);
            (0..500).map(|_| sampler.next(&logits).unwrap()).collect::<BTreeSet<u32>>()
        };
        let base = Sampling::default();
        assert_eq!(drawn(base, &[]).len(), 5);
        assert_eq!(drawn(Sampling { top_k: 1, ..base }, &[]), [1].into());
        // The third is as likely as the second.
        assert_eq!(drawn(Sampling { top_k: 2, ..base }, &[]), [1, 2, 3].into());
        assert_eq!(drawn(Sampling { top_k: 9, ..base }, &[]).len(), 5);
        // e⁻¹ is 0.37 of the likeliest, and e⁻² 0.14.
        assert_eq!(drawn(Sampling { min_p: 0.3, ..base }, &[]), [1, 2, 3].into());
        assert_eq!(drawn(Sampling { min_p: 0.1, ..base }, &[]), [0, 1, 2, 3].into());
        let penalty = Sampling { repetition_penalty: 1000.0, top_k: 1, ..base };
        assert_eq!(drawn(penalty, &[1]), [2, 3].into());
        // A negative logit becomes smaller.
        assert_eq!(drawn(Sampling { top_k: 4, ..penalty }, &[4]), [0, 1, 2, 3].into());
    }

    #[test]
    fn tokens_that_were_written_lose_by_their_number() {
        let logits = Tensor::new(&[0f32, 2.0, 1.4, 1.0], &Device::Cpu).unwrap();
        let base = Sampling { presence_penalty: 0.5, ..Sampling::default() };
        let written = |sampling: Sampling| {
            let mut sampler = Sampler::new(sampling);
            sampler.see(&[1, 2]); // a prompt does not count
            let mut next = || {
                let token = sampler.next(&logits).unwrap();
                sampler.wrote(token);
                token
            };
            [next(), next(), next(), next()]
        };
        assert_eq!(written(Sampling::default()), [1, 1, 1, 1]);
        assert_eq!(written(base), [1, 1, 1, 1]);
        assert_eq!(written(Sampling { presence_penalty: 0.8, ..base }), [1, 2, 1, 1]);
        let frequency = Sampling { presence_penalty: 0.0, frequency_penalty: 0.5, ..base };
        // 2, 1.5, then 1.4 and 1, then 0.9.
        assert_eq!(written(frequency), [1, 1, 2, 1]);
        assert_eq!(written(Sampling { frequency_penalty: -1.0, ..frequency }), [1, 1, 1, 1]);
    }

    #[test]
    fn the_likeliest_tokens_are_found_among_very_many() {
        let of = |i: usize| -((i * 7919 % 5003) as f64) / 50.0;
        let weights: Vec<(u32, f64)> = (0..5003).map(|i| (i as u32, of(i).exp())).collect();
        let mut sorted = weights.clone();
        sorted.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
        for count in [1, 10, 400, 4000, 5003, 6000] {
            let mut most = weights.clone();
            sort_most(&mut most, |most| most.len() >= count);
            assert!(most.len() >= count.min(5003) && most[..] == sorted[..most.len()], "{count}");
            assert!(count > 10 || most.len() < 1000, "{count}: {}", most.len());
        }
    }

    #[test]
    fn a_top_k_above_the_tokens_that_may_follow_takes_all_of_them_and_no_other() {
        let mut logits = vec![f32::NEG_INFINITY; 300_000];
        (0..3).for_each(|i| logits[i * 100_000] = i as f32);
        let logits = Tensor::new(logits, &Device::Cpu).unwrap();
        for top_k in [3, 50, 300_000, usize::MAX] {
            let sampling = Sampling { temperature: 1.0, top_k, seed: 1, ..Sampling::default() };
            let mut sampler = Sampler::new(sampling);
            let drawn: BTreeSet<u32> = (0..50).map(|_| sampler.next(&logits).unwrap()).collect();
            assert_eq!(drawn, [0, 100_000, 200_000].into(), "{top_k}");
        }
    }

    #[test]
    fn without_temperature_the_most_likely_token_is_taken() {
        assert!(drawn(0.0, 1.0).iter().all(|&token| token == 1));
        assert!(drawn(1.0, 0.0).iter().all(|&token| token == 1));
    }

    #[test]
    fn tokens_come_as_often_as_they_are_likely() {
        let share =
            |tokens: &[u32], of: u32| tokens.iter().filter(|&&token| token == of).count() as f64 / 2000.0;
        let all = drawn(1.0, 1.0);
        for (token, probability) in [(0, 0.090), (1, 0.665), (2, 0.245), (3, 0.0)] {
            assert!((share(&all, token) - probability).abs() < 0.04, "{token}");
        }
        // The two most likely have nine tenths.
        let most = drawn(1.0, 0.9);
        assert_eq!(share(&most, 0), 0.0);
        assert!((share(&most, 2) - 0.269).abs() < 0.04);
    }
}
