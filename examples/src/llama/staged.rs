//! The decoder as a pipeline of stages, each of them cut over another mesh axis.

use std::cell::RefCell;
use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use candle_dist::{DeviceMesh, ProcessGroup};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{Balanced, In, Kwargs, PipeBuilder, Result, Runtime, Share, StageOp, Value, stage_op};
use candle_shard::nn::{Embedding, Linear, RmsNorm, ShardedVarBuilder};
use candle_shard::{DTensor, Placement, Replicate, Shard};

use super::cache::Cache;
use super::config::Config;
use super::layer::Layer;
use super::rope::Angles;

/// This rank's stage of a Llama, which holds the keys and values of its layers.
pub struct StagedLlama {
    runtime: Runtime,
    stages: ProcessGroup,
    vocab_size: usize,
    has_logits: bool,
}

impl StagedLlama {
    /// This rank's stage of a model of as many stages as the mesh axis `"pp"` has ranks, for sequences of up to `longest`
    /// tokens; `vb` builds on the axis `"tp"`.
    ///
    /// # Errors
    /// If there are more stages than the model can be cut into; those of the builder.
    pub fn new(config: &Config, longest: usize, mesh: &DeviceMesh, vb: &ShardedVarBuilder) -> Result<Self> {
        let stages = mesh.axis_group("pp")?;
        let pipe = declare(config, longest).finish(Balanced::new(stages.size(), costs(config)))?;
        let schedule = ScheduleKind::GPipe.schedule(stages.size(), 1, 1)?.forward_only();
        let runtime = Runtime::new(&pipe, &schedule, stages, vb, vb.device())?;
        let has_logits = stages.rank() + 1 == stages.size();
        Ok(Self { runtime, stages: stages.clone(), vocab_size: config.vocab_size, has_logits })
    }

    /// The logits `[1, vocabulary]` of what follows the last of `tokens` `[1, tokens]`, which follow those before; on all
    /// ranks.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn next(&self, tokens: &Tensor) -> Result<Tensor> {
        let batch = split_args_kwargs_into_chunks(&[tokens.into()], &Kwargs::new(), 1, None, None)?;
        let outputs = self.runtime.evaluate(&batch)?.step.outputs;
        let logits = match outputs.iter().find_map(|output| output.get("logits").ok()).filter(|_| self.has_logits) {
            Some(logits) => logits.tensor()?.clone(),
            None => Tensor::zeros((1, self.vocab_size), DType::F32, tokens.device())?,
        };
        Ok(self.stages.broadcast(&logits, self.stages.size() - 1)?)
    }
}

/// What is said of the mesh axis in a stage.
const WHOLE: [Placement; 1] = [Replicate];

/// The model, not yet cut: a node for the table, for each layer, for the last norm and for the output layer.
fn declare(config: &Config, longest: usize) -> PipeBuilder<ShardedVarBuilder> {
    let mut g = PipeBuilder::new();
    let tokens = g.input("tokens", In::Arg);
    let (rows, width) = (config.vocab_size, config.hidden_size);
    let table = move |vb: &ShardedVarBuilder| Embedding::new(rows, width, 1.0, vb);
    let tied = config.tie_word_embeddings.then(|| {
        let build = move |vb: &ShardedVarBuilder| Ok(table(vb)?.weight().to_local().clone());
        g.parameter("model.embed_tokens.weight", Share::Replicate, build)
    });
    let shared = move |xs: &[Value], vb: &ShardedVarBuilder| -> Result<DTensor> {
        Ok(DTensor::from_local(xs[1].tensor()?.clone(), vb.mesh(), &[Shard(0)], (rows, width))?)
    };
    let is_tied = tied.is_some();
    let embed = move |vb: &ShardedVarBuilder| {
        let own = (!is_tied).then(|| table(vb)).transpose()?;
        let vb = vb.clone();
        Ok(stage_op(move |xs, _| {
            let tokens = DTensor::distribute(xs[0].tensor()?, vb.mesh(), &WHOLE)?;
            let h = match &own {
                Some(own) => own.forward(&tokens)?,
                None => Embedding::tied(&shared(xs, &vb)?, &vb)?.forward(&tokens)?,
            };
            Ok(vec![h.full_tensor()?.into()])
        }))
    };
    let mut h = g.module("model.embed_tokens", embed, [tokens].into_iter().chain(tied));
    for i in 0..config.num_hidden_layers {
        let config = config.clone();
        let layer = move |vb: &ShardedVarBuilder| {
            let (layer, angles) = (Layer::new(&config, vb)?, Angles::new(&config, longest, vb)?);
            let cache = RefCell::new(Cache::new(1, longest));
            Ok(hidden(vb, move |h| {
                let mut cache = cache.borrow_mut();
                cache.check(h.dims()[1])?;
                let y = layer.forward(h, &angles, 0, &mut cache)?;
                cache.advance(h.dims()[1]);
                Ok(y)
            }))
        };
        h = g.module(&format!("model.layers.{i}"), layer, [h]);
    }
    let eps = config.rms_norm_eps;
    let norm = move |vb: &ShardedVarBuilder| {
        let norm = RmsNorm::new(width, eps, vb)?;
        // Only what follows the last token is asked for.
        Ok(hidden(vb, move |h| norm.forward(&h.narrow(1, h.dims()[1] - 1, 1)?)))
    };
    h = g.module("model.norm", norm, [h]);
    let head = move |vb: &ShardedVarBuilder| {
        let own = (!is_tied).then(|| Linear::new(width, rows, false, vb)).transpose()?;
        let vb = vb.clone();
        Ok(stage_op(move |xs, _| {
            let h = DTensor::distribute(xs[0].tensor()?, vb.mesh(), &WHOLE)?;
            let logits = match &own {
                Some(own) => own.forward(&h)?,
                None => Linear::tied(&shared(xs, &vb)?, &vb)?.forward(&h)?,
            };
            let logits = logits.full_tensor()?.squeeze(1)?;
            Ok(vec![logits.to_dtype(DType::F32)?.into()])
        }))
    };
    let logits = g.module("lm_head", head, [h].into_iter().chain(tied));
    g.output("logits", logits);
    g
}

/// A node from hidden states to hidden states.
fn hidden<F>(vb: &ShardedVarBuilder, f: F) -> impl StageOp + use<F>
where
    F: Fn(&DTensor) -> candle_shard::Result<DTensor> + 'static,
{
    let mesh = vb.mesh().clone();
    stage_op(move |xs, _| {
        let h = f(&DTensor::distribute(xs[0].tensor()?, &mesh, &WHOLE)?)?;
        Ok(vec![h.full_tensor()?.into()])
    })
}

/// The parameters of each node: what decides how long a token takes.
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
            *costs.entry(node).or_default() += shape.iter().product::<usize>() as f64;
        }
    }
    if config.tie_word_embeddings {
        costs.insert("lm_head".into(), (config.vocab_size * config.hidden_size) as f64);
    }
    costs.into_iter().collect()
}
