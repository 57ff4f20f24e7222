//! How rotary positions are scaled.

use anyhow::{Result, ensure};
use serde::Serialize;

/// How the positions of a longer context are brought into the range that was learned.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// All wavelengths are stretched alike.
    Linear {
        /// By how much.
        factor: f64,
    },
    /// Long wavelengths are stretched, short ones are not (Llama 3).
    Llama3 {
        /// By how much wavelengths are stretched.
        factor: f64,
        /// Wavelengths longer than the learned context divided by this are stretched by the whole factor.
        low_freq_factor: f64,
        /// Those shorter than the learned context divided by this are not stretched.
        high_freq_factor: f64,
        /// The learned context.
        original_max_position_embeddings: usize,
    },
    /// The base grows with sequences that are longer than the learned context.
    Dynamic {
        /// How fast it grows.
        factor: f64,
        /// The learned context: `max_position_embeddings`.
        #[serde(skip)]
        learned: usize,
    },
    /// Wavelengths that turn rarely in the learned context are stretched, and scores are scaled.
    Yarn {
        /// By how much wavelengths are stretched.
        factor: f64,
        /// The factor of cosines and sines.
        attention_factor: f64,
        /// Wavelengths that turn more often than this are not stretched.
        beta_fast: f64,
        /// Those that turn less often are stretched by the whole factor.
        beta_slow: f64,
        /// Whether the range between both is rounded outward to whole pairs.
        truncate: bool,
        /// The learned context.
        original_max_position_embeddings: usize,
    },
    /// Each wavelength is stretched by a factor of its own, in sequences within the learned context by another one than
    /// in longer ones (Phi-3).
    Longrope {
        /// The factors within the learned context.
        short_factor: Vec<f64>,
        /// Those of longer sequences.
        long_factor: Vec<f64>,
        /// The factor of cosines and sines.
        attention_factor: f64,
        /// The learned context.
        original_max_position_embeddings: usize,
    },
    /// Each wavelength is stretched by a factor of its own, as GGUF files of Llama 3 say.
    #[serde(skip)]
    Factors(Vec<f64>),
}

impl RopeScaling {
    /// The length after which all positions are turned otherwise, those of earlier tokens too.
    pub(crate) fn turns_anew_after(&self) -> Option<usize> {
        match self {
            Self::Longrope { original_max_position_embeddings: learned, .. } => Some(*learned),
            _ => None,
        }
    }

    /// Checks that there is a factor for each pair of `width` elements, and that all frequencies are defined.
    pub(super) fn check(&self, width: usize) -> Result<()> {
        let lists = match self {
            Self::Longrope { short_factor, long_factor, .. } => {
                vec![("short_factor", short_factor), ("long_factor", long_factor)]
            }
            Self::Factors(factors) => vec![("rope_freqs.weight", factors)],
            _ => vec![],
        };
        for (name, list) in lists {
            ensure!(
                list.len() == width / 2,
                "{name} has {} factors for {} pairs of a head",
                list.len(),
                width / 2
            );
        }
        let needs_more = matches!(self, Self::Dynamic { .. }) && width < 4;
        ensure!(!needs_more, "rope_type \"dynamic\" needs more than {width} elements of a head");
        Ok(())
    }

    /// The factor of cosines and sines of a context that is `factor` times as long as the `learned` one.
    pub(crate) fn longrope_attention(factor: f64, learned: usize) -> f64 {
        if factor <= 1.0 || learned < 2 { 1.0 } else { (1.0 + factor.ln() / (learned as f64).ln()).sqrt() }
    }
}
