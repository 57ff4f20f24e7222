//! Writing and scoring with a decoder that is a pipeline of stages.

use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, ProcessGroup, RankContext};
use candle_pipe::microbatch::Microbatches;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{Result, Runtime, StageLayout, StepOptions, Value};
use candle_shard::nn::MeshVarBuilder;

use crate::config::Config;
use crate::cut::{DecoderPipe, StageCut};
use crate::declare;
use crate::step::DecodeStep;

/// The fewest tokens of a microbatch. With fewer, a stage would take about as long as for those of all
/// together.
const LEAST: usize = 64;

/// This rank's stage of a decoder, which holds the keys and values of its layers.
pub(crate) struct StagedDecoder {
    runtime: Runtime,
    stages: ProcessGroup,
    /// The most microbatches that are in flight at once.
    microbatches: usize,
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
        /// The tokens for which a text takes memory at a time.
        block: usize,
        /// Whether tokens of a text may be computed one after another in a step.
        is_cut: bool,
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
        let (pipe, microbatches): (DecoderPipe, usize) = match used {
            DecoderPurpose::Write { slots, block, cache, is_cut } => (
                declare::writer(config, [slots, longest, block], cache, &cut)?,
                if is_cut { stages.size() } else { 1 },
            ),
            DecoderPurpose::Score => (declare::scorer(config, longest, &cut)?, 1),
        };
        let schedule = ScheduleKind::GPipe.schedule(stages.size(), microbatches, 1)?.forward_only();
        let runtime = Runtime::new(&pipe, &schedule, stages, vb, vb.device())?.for_device_of(ctx)?;
        Ok(Self {
            runtime,
            stages: stages.clone(),
            microbatches,
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
        let parts = step.parts(self.microbatches, LEAST);
        let inputs = parts.iter().map(|part| Ok([part.tokens(device)?, part.packed(device)?]));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        // A part of which no logits are wanted has some all the same; so has a step.
        let has_rows = |part: usize| parts[part].wanted() > 0 || (step.wanted() == 0 && part == 0);
        let shape = [step.rows(), self.vocab_size];
        step.adapters().run(|| self.output("logits", inputs, has_rows, &shape))
    }

    /// The sum of the losses of `targets` `[1, last]`, which follow the last of `tokens` `[1, tokens]`, on all ranks, of a
    /// decoder that scores.
    ///
    /// # Errors
    /// Those of the runtime.
    pub(crate) fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<f64> {
        let loss = self.output("sum", vec![[tokens.clone(), targets.clone()]], |_| true, &[1])?;
        Ok(f64::from(loss.to_vec1::<f32>()?[0]))
    }

    /// An output of the last stage, on all ranks: those of the microbatches for which `is_wanted` says so,
    /// one behind another.
    fn output(
        &self,
        name: &str,
        inputs: Vec<[Tensor; 2]>,
        is_wanted: impl Fn(usize) -> bool,
        shape: &[usize],
    ) -> Result<Tensor> {
        let batch = inputs.into_iter().map(|inputs| inputs.map(Value::from).to_vec()).collect();
        let batch = Microbatches::of_rows(batch)?;
        let outputs = self.runtime.evaluate(&batch, &StepOptions::default())?.step.outputs;
        let last = self.stages.size() - 1;
        let made = if self.stages.rank() == last {
            let wanted = outputs.iter().enumerate().filter(|(at, _)| is_wanted(*at));
            let parts = wanted.map(|(_, output)| Ok(output.get(name)?.tensor()?.clone()));
            match &parts.collect::<Result<Vec<_>>>()?[..] {
                [whole] => whole.clone(),
                parts => Tensor::cat(parts, 0)?,
            }
        } else {
            Tensor::zeros(shape, DType::F32, &self.device)?
        };
        Ok(self.stages.broadcast(&made, last)?)
    }
}
