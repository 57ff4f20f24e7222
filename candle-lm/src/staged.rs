//! Writing and scoring with a decoder that is a pipeline of stages.

use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, ProcessGroup, RankContext};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{Kwargs, Result, Runtime, StageLayout, StepOptions};
use candle_shard::nn::MeshVarBuilder;

use crate::config::Config;
use crate::cut::{DecoderPipe, StageCut};
use crate::declare;
use crate::step::DecodeStep;

/// This rank's stage of a decoder, which holds the keys and values of its layers.
pub(crate) struct StagedDecoder {
    runtime: Runtime,
    stages: ProcessGroup,
    device: Device,
    vocab_size: usize,
}

/// What a staged decoder is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DecoderPurpose {
    /// Writing so many texts at once.
    Write {
        /// The texts.
        slots: usize,
        /// What keys and values are kept in, if not in the dtype of the computation.
        cache: Option<DType>,
    },
    /// Scoring a text.
    Score,
}

impl StagedDecoder {
    /// This rank's stage of a model of as many stages as the mesh axis `"pp"` has ranks, for texts of up to `longest`
    /// tokens; `vb` builds on the axes of a stage. Stages cost about equally much unless a layout says which layers each has.
    ///
    /// # Errors
    /// If there are more stages than the model can be cut into, or other ones than the layout has; those of the builder.
    pub(crate) fn new(
        config: &Config,
        (longest, used): (usize, DecoderPurpose),
        layout: Option<&StageLayout>,
        mesh: &DeviceMesh,
        vb: &MeshVarBuilder,
        ctx: &RankContext,
    ) -> Result<Self> {
        let stages = mesh.axis_group("pp")?;
        let cut = StageCut::new(stages.size(), layout);
        let pipe: DecoderPipe = match used {
            DecoderPurpose::Write { slots, cache } => declare::writer(config, [slots, longest], cache, &cut)?,
            DecoderPurpose::Score => declare::scorer(config, longest, &cut)?,
        };
        let schedule = ScheduleKind::GPipe.schedule(stages.size(), 1, 1)?.forward_only();
        let runtime = Runtime::new(&pipe, &schedule, stages, vb, vb.device())?.for_device_of(ctx)?;
        Ok(Self {
            runtime,
            stages: stages.clone(),
            device: vb.device().clone(),
            vocab_size: config.vocab_size,
        })
    }

    /// The logits `[rows, vocabulary]` of what follows new tokens of texts, for the rows of a step, on all ranks, of a
    /// decoder that writes.
    ///
    /// # Errors
    /// Those of the runtime.
    pub(crate) fn step(&self, step: &DecodeStep) -> Result<Tensor> {
        let device = &self.device;
        let shape = [step.rows(), self.vocab_size];
        let inputs = [step.tokens(device)?, step.packed(device)?];
        step.adapters().run(|| self.output("logits", inputs, &shape))
    }

    /// The sum of the losses of `targets` `[1, last]`, which follow the last of `tokens` `[1, tokens]`, on all ranks, of a
    /// decoder that scores.
    ///
    /// # Errors
    /// Those of the runtime.
    pub(crate) fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<f64> {
        let loss = self.output("sum", [tokens.clone(), targets.clone()], &[1])?;
        Ok(f64::from(loss.to_vec1::<f32>()?[0]))
    }

    /// An output of the last stage, on all ranks.
    fn output(&self, name: &str, inputs: [Tensor; 2], shape: &[usize]) -> Result<Tensor> {
        let device = inputs[0].device().clone();
        let batch = split_args_kwargs_into_chunks(&inputs.map(Into::into), &Kwargs::new(), 1, None, None)?;
        let outputs = self.runtime.evaluate(&batch, &StepOptions::default())?.step.outputs;
        let last = self.stages.size() - 1;
        let mine =
            outputs.iter().find_map(|output| output.get(name).ok()).filter(|_| self.stages.rank() == last);
        let made = match mine {
            Some(made) => made.tensor()?.clone(),
            None => Tensor::zeros(shape, DType::F32, &device)?,
        };
        Ok(self.stages.broadcast(&made, last)?)
    }
}
