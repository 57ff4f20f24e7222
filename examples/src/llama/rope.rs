//! Rotary positions.

use std::f64::consts::TAU;

use candle_core::{DType, Tensor};
use candle_shard::kernels::RopePairs;
use candle_shard::nn::ShardedVarBuilder;
use candle_shard::{DTensor, Placements, Replicate, Result};

use super::config::{Config, RopeScaling};

/// The cosines and sines of positions, which every rank has.
#[derive(Clone, Debug)]
pub(super) struct Angles([DTensor; 2]);

impl Angles {
    /// Those of so many positions.
    pub(super) fn new(config: &Config, positions: usize, vb: &ShardedVarBuilder) -> Result<Self> {
        let dim = config.heads().dim;
        let frequencies: Vec<f32> = (0..dim / 2)
            .map(|i| config.rope_theta.powf(-(2.0 * i as f64) / dim as f64))
            .map(|frequency| scaled(frequency, config.rope_scaling.as_ref()) as f32)
            .collect();
        let frequencies = Tensor::from_vec(frequencies, (1, dim / 2), vb.device())?;
        let positions = Tensor::arange(0u32, positions as u32, vb.device())?.to_dtype(DType::F32)?;
        let angles = positions.unsqueeze(1)?.matmul(&frequencies)?;
        let everywhere = Placements::from_elem(Replicate, vb.mesh().ndim());
        let whole = |table: Tensor| DTensor::distribute(&table.to_dtype(vb.dtype())?, vb.mesh(), &everywhere);
        Ok(Self([whole(angles.cos()?)?, whole(angles.sin()?)?]))
    }

    /// How many positions these are.
    pub(super) fn positions(&self) -> usize {
        self.0[0].dims()[0]
    }

    /// Queries or keys `[batch, heads, tokens, dim]`, turned by their positions, the first of which is `start`.
    pub(super) fn turn(&self, x: &DTensor, start: usize) -> Result<DTensor> {
        x.rope(&self.0[0], &self.0[1], start, RopePairs::Halves)
    }
}

/// The frequency of a pair of elements after scaling.
fn scaled(frequency: f64, scaling: Option<&RopeScaling>) -> f64 {
    match scaling {
        None => frequency,
        Some(RopeScaling::Linear { factor }) => frequency / factor,
        Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings }) => {
            // How often the pair turns in the learned context: rare turns are stretched, frequent ones are not.
            let turns = *original_max_position_embeddings as f64 * frequency / TAU;
            let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
            frequency * (kept + (1.0 - kept) / factor)
        }
    }
}
