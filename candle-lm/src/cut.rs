//! How a declared model is cut into stages.

use std::collections::BTreeMap;

use candle_pipe::{BalancedCost, Error, Pipe, PipeBuilder, Result, StageLayout};
use candle_shard::nn::MeshVarBuilder;

use crate::config::Config;

/// A model in stages.
pub type DecoderPipe = Pipe<MeshVarBuilder>;

/// How a model is cut into stages.
#[derive(Clone, Copy, Debug)]
pub struct StageCut<'a> {
    stages: usize,
    layout: Option<&'a StageLayout>,
}

/// The former name of [`StageCut`].
#[deprecated(since = "0.1.0", note = "renamed to StageCut")]
pub type Cut<'a> = StageCut<'a>;

impl<'a> StageCut<'a> {
    /// A number of stages with about equal costs, or the stages of a layout, which must have the same number.
    pub fn new(stages: usize, layout: Option<&'a StageLayout>) -> Self {
        Self { stages, layout }
    }

    /// Cuts the declared model of a config.
    ///
    /// # Errors
    /// If there are more stages than the model can be cut into, or other ones than the layout has.
    pub(crate) fn finish(
        &self,
        declared: PipeBuilder<MeshVarBuilder>,
        config: &Config,
    ) -> Result<DecoderPipe> {
        let Some(layout) = self.layout else {
            return declared.finish(BalancedCost::new(self.stages, costs(config)));
        };
        let pipe = declared.finish(layout.clone())?;
        match pipe.num_stages() == self.stages {
            true => Ok(pipe),
            false => Err(Error::Pipe(format!(
                "the layout {layout} has {} stages, and there are {} to fill",
                pipe.num_stages(),
                self.stages
            ))),
        }
    }
}

/// The parameters of each node that compute for a token: what decides how long it takes.
fn costs(config: &Config) -> Vec<(String, f64)> {
    let node = |name: &str| -> Option<String> {
        let parts: Vec<&str> = name.split('.').collect();
        match parts[..] {
            ["model", "layers", layer, ..] => Some(format!("model.layers.{layer}")),
            ["lm_head", ..] => Some("lm_head".into()),
            _ => None,
        }
    };
    let mut costs = BTreeMap::<String, f64>::new();
    for (name, shape) in config.tensors() {
        if let Some(node) = node(&name) {
            *costs.entry(node).or_default() += config.active(&name, &shape) as f64;
        }
    }
    if config.tie_word_embeddings {
        costs.insert("lm_head".into(), (config.vocab_size * config.hidden_size) as f64);
    }
    costs.into_iter().collect()
}
