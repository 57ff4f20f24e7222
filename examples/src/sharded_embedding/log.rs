//! The synthetic log: impressions, and whether they were clicked.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use candle_shard::kernels::BagMode;
use candle_shard::random::{Distribution, Stream, sample, sample_full};

use super::features::{Bag, DENSE, FEATURES, Feature};

/// The log of a seed, from which every rank reads its own part of a step's batch.
#[derive(Clone, Debug)]
pub struct Log {
    seed: u64,
    /// The term that each value of each feature adds to the logit of a click.
    effects: Vec<Vec<f64>>,
}

/// Some samples.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The values of each of [`FEATURES`].
    pub features: Vec<Values>,
    /// `[samples, DENSE]`.
    pub dense: Tensor,
    /// `[samples]`, 1 for a click.
    pub clicks: Tensor,
}

impl Batch {
    /// Moves the numbers to a device. Ids and offsets stay on the host, which reads them.
    ///
    /// # Errors
    /// candle's.
    pub fn to_device(self, device: &Device) -> Result<Self> {
        let of_feature = |values: Values| {
            let weights = values.weights.map(|weights| weights.to_device(device)).transpose()?;
            Ok(Values { weights, ..values })
        };
        Ok(Self {
            features: self.features.into_iter().map(of_feature).collect::<Result<_>>()?,
            dense: self.dense.to_device(device)?,
            clicks: self.clicks.to_device(device)?,
        })
    }
}

/// The values of one feature.
#[derive(Clone, Debug)]
pub struct Values {
    /// `[n]`, all samples' values concatenated.
    pub ids: Tensor,
    /// The index of each sample's first value, `[samples]`; `None` if each sample has one value.
    pub offsets: Option<Tensor>,
    /// `[n]`, if values have weights.
    pub weights: Option<Tensor>,
}

/// The logit of a click without features: most impressions are not clicked.
const BIAS: f64 = -1.2;
/// The effects of the dense features on the logit.
const SLOPES: [f64; DENSE] = [0.6, -0.4, 0.3, 0.0];
/// A prime that divides no vocabulary. Multiplying by it spreads frequent values over a table, as hashing does.
const SCATTER: usize = 7919;
const UNIT: Distribution = Distribution::Uniform { lo: 0.0, up: 1.0 };
const NORMAL: Distribution = Distribution::Normal { mean: 0.0, stdev: 1.0 };

impl Log {
    /// Creates the log of a seed.
    ///
    /// # Errors
    /// candle's.
    pub fn new(seed: u64) -> Result<Self> {
        let effects = |feature: &Feature| {
            let stream = Stream::new(seed, &format!("effects of {}", feature.name));
            sample_full(stream, NORMAL, &[feature.vocab], DType::F64, &Device::Cpu)?.to_vec1::<f64>()
        };
        Ok(Self { seed, effects: FEATURES.iter().map(effects).collect::<Result<_>>()? })
    }

    /// Returns the samples `part` of the batch of `size` samples of a step.
    ///
    /// # Errors
    /// candle's.
    pub fn batch(&self, step: u64, size: usize, part: Range<usize>) -> Result<Batch> {
        let draws = Draws { seed: self.seed, step, size, part };
        let dense = draws.numbers("dense", NORMAL, DENSE)?;
        let slope = |dense: &[f64]| dense.iter().zip(SLOPES).map(|(x, slope)| x * slope).sum::<f64>();
        let mut logits: Vec<f64> = dense.chunks(DENSE).map(|dense| BIAS + slope(dense)).collect();
        let mut features = Vec::with_capacity(FEATURES.len());
        for (feature, effects) in FEATURES.iter().zip(&self.effects) {
            features.push(values(feature, effects, &draws, &mut logits)?);
        }
        let chances = draws.numbers("clicks", UNIT, 1)?;
        let clicked = logits.iter().zip(chances).map(|(logit, chance)| chance < 1.0 / (1.0 + (-logit).exp()));
        let clicks = Tensor::from_iter(clicked.map(|clicked| f32::from(u8::from(clicked))), &Device::Cpu)?;
        let dense = Tensor::from_vec(dense, (logits.len(), DENSE), &Device::Cpu)?.to_dtype(DType::F32)?;
        Ok(Batch { features, dense, clicks })
    }
}

/// Draws a feature's values, and adds their effects to the logits.
fn values(feature: &Feature, effects: &[f64], draws: &Draws, logits: &mut [f64]) -> Result<Values> {
    let name = |what: &str| format!("{what} of {}", feature.name);
    let most = feature.bag.map_or(1, |bag| bag.most);
    let drawn = draws.numbers(&name("values"), UNIT, most)?;
    let lens: Vec<usize> = match feature.bag {
        None => vec![1; logits.len()],
        Some(Bag { most, .. }) => {
            let drawn = draws.numbers(&name("numbers"), UNIT, 1)?;
            drawn.into_iter().map(|x| ((x * (most + 1) as f64) as usize).min(most)).collect()
        }
    };
    let weighted = feature.bag.is_some_and(|bag| bag.weighted);
    let drawn_weights =
        if weighted { draws.numbers(&name("weights"), UNIT, most)? } else { vec![1.0; drawn.len()] };
    let (mut ids, mut weights, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
    for (i, (&len, logit)) in lens.iter().zip(logits).enumerate() {
        offsets.push(ids.len() as u32);
        let mean = feature.bag.is_some_and(|bag| bag.mode == BagMode::Mean);
        let share = if mean { 1.0 / len.max(1) as f64 } else { 1.0 };
        for at in i * most..i * most + len {
            let id = zipf(drawn[at], feature.vocab);
            *logit += effects[id] * drawn_weights[at] * share;
            ids.push(id as u32);
            weights.push(drawn_weights[at] as f32);
        }
    }
    let count = ids.len();
    Ok(Values {
        ids: Tensor::from_vec(ids, count, &Device::Cpu)?,
        offsets: feature.bag.map(|_| Tensor::new(&offsets[..], &Device::Cpu)).transpose()?,
        weights: weighted.then(|| Tensor::from_vec(weights, count, &Device::Cpu)).transpose()?,
    })
}

/// Maps a uniform number of [0, 1) to a value by Zipf's law: the frequency of the k-th value is proportional to 1/k.
fn zipf(x: f64, vocab: usize) -> usize {
    let rank = ((vocab + 1) as f64).powf(x) as usize;
    rank.clamp(1, vocab) * SCATTER % vocab
}

/// The random numbers of part of a batch.
struct Draws {
    seed: u64,
    step: u64,
    size: usize,
    part: Range<usize>,
}

impl Draws {
    /// Draws `count` numbers per sample of the part; the numbers of a sample do not depend on the part.
    fn numbers(&self, name: &str, of: Distribution, count: usize) -> Result<Vec<f64>> {
        let stream = Stream::new(self.seed, name).fold(self.step);
        let (shape, block) = ([self.size, count], [self.part.clone(), 0..count]);
        sample(stream, of, &shape, &block, DType::F64, &Device::Cpu)?.flatten_all()?.to_vec1()
    }
}
