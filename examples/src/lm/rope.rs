//! Rotary positions.

use std::f64::consts::TAU;

use candle_core::{DType, Tensor};
use candle_shard::kernels::RopePairs;
use candle_shard::nn::ShardedVarBuilder;
use candle_shard::{DTensor, Placements, Replicate, Result};

use super::config::{Config, RopeScaling};

/// The cosines and sines of positions, which every rank has.
#[derive(Clone, Debug)]
pub(super) struct Angles {
    tables: [DTensor; 2],
    /// Those of layers with a window, if they are others.
    local: Option<[DTensor; 2]>,
    pairs: RopePairs,
}

impl Angles {
    /// Those of so many positions.
    pub(super) fn new(config: &Config, positions: usize, vb: &ShardedVarBuilder) -> Result<Self> {
        let tables = |theta: f64, scaling| tables(config.heads().dim, theta, scaling, positions, vb);
        let local = config.parts.local_theta.map(|theta| tables(theta, None)).transpose()?;
        let all = tables(config.rope_theta, config.rope_scaling.as_ref())?;
        Ok(Self { tables: all, local, pairs: config.parts.pairs })
    }

    /// How many positions these are.
    pub(super) fn positions(&self) -> usize {
        self.tables[0].dims()[0]
    }

    /// Queries or keys `[batch, heads, tokens, dim]`, turned by their positions, the first of which is `start`; for a layer
    /// with a window if it `is_local`.
    pub(super) fn turn(&self, x: &DTensor, start: usize, is_local: bool) -> Result<DTensor> {
        let [cos, sin] = self.local.as_ref().filter(|_| is_local).unwrap_or(&self.tables);
        x.rope(cos, sin, start, self.pairs)
    }
}

fn tables(
    dim: usize,
    theta: f64,
    scaling: Option<&RopeScaling>,
    positions: usize,
    vb: &ShardedVarBuilder,
) -> Result<[DTensor; 2]> {
    let frequencies: Vec<f32> = (0..dim / 2)
        .map(|i| theta.powf(-(2.0 * i as f64) / dim as f64))
        .map(|frequency| scaled(frequency, scaling) as f32)
        .collect();
    let frequencies = Tensor::from_vec(frequencies, (1, dim / 2), vb.device())?;
    let positions = Tensor::arange(0u32, positions as u32, vb.device())?.to_dtype(DType::F32)?;
    let angles = positions.unsqueeze(1)?.matmul(&frequencies)?;
    let everywhere = Placements::from_elem(Replicate, vb.mesh().ndim());
    let whole = |table: Tensor| DTensor::distribute(&table.to_dtype(vb.dtype())?, vb.mesh(), &everywhere);
    Ok([whole(angles.cos()?)?, whole(angles.sin()?)?])
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
