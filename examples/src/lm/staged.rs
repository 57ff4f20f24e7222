//! Writing with a decoder that is a pipeline of stages.

use candle_core::{DType, Tensor};
use candle_dist::{DeviceMesh, ProcessGroup, RankContext};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{Kwargs, Layout, Result, Runtime};
use candle_shard::nn::ShardedVarBuilder;

use super::config::Config;
use super::declare::{self, Cut};
use crate::pipeline::for_device;

/// This rank's stage of a Llama, which holds the keys and values of its layers.
pub struct StagedDecoder {
    runtime: Runtime,
    stages: ProcessGroup,
    vocab_size: usize,
    has_logits: bool,
}

impl StagedDecoder {
    /// This rank's stage of a model of as many stages as the mesh axis `"pp"` has ranks, for sequences of up to `longest`
    /// tokens; `vb` builds on the axis `"tp"`. Stages cost about equally much unless a layout says which layers each has.
    ///
    /// # Errors
    /// If there are more stages than the model can be cut into, or other ones than the layout has; those of the builder.
    pub fn new(
        config: &Config,
        longest: usize,
        (layout, cache): (Option<&Layout>, Option<DType>),
        mesh: &DeviceMesh,
        vb: &ShardedVarBuilder,
        ctx: &RankContext,
    ) -> Result<Self> {
        let stages = mesh.axis_group("pp")?;
        let pipe = declare::writer(config, longest, cache, &Cut::new(stages.size(), layout))?;
        let schedule = ScheduleKind::GPipe.schedule(stages.size(), 1, 1)?.forward_only();
        let runtime = for_device(Runtime::new(&pipe, &schedule, stages, vb, vb.device())?, ctx)?;
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
