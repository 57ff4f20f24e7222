//! A model that is read and cut over the ranks.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, ProcessGroup, RankContext};
use candle_pipe::StageLayout;
use candle_shard::nn::MeshVarBuilder;
use candle_shard::parallel::{Plan, Shares};

use crate::cache::Cache;
use crate::files::Files;
use crate::model::Decoder;
use crate::pass::{PassBasis, PassLogits, RowNumbers};
use crate::staged::{DecoderPurpose, StagedDecoder};
use crate::step::DecodeStep;
use crate::{EXPERT_AXIS, LAYER_AXIS, TOKEN_AXIS};

/// How a model is held and cut.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// What parameters are held and computed in.
    pub dtype: DType,
    /// Which layers make a stage, if they are not to cost about equally much.
    pub layout: Option<StageLayout>,
    /// Whether quantized weights are held as floats.
    pub dequantize: bool,
    /// What keys and values are kept in, if not in the dtype of the computation.
    pub cache: Option<DType>,
    /// The shares of the ranks over which a layer is sharded, if they are unlike.
    pub shares: Option<Shares>,
    /// The ranks over which experts are distributed.
    pub ep: usize,
    /// The ranks over which the tokens of a text are distributed.
    pub cp: usize,
    /// The replicas of the model. A server gives each texts of its own; elsewhere all compute the same.
    pub dp: usize,
}

impl ModelOptions {
    /// Holds a model in a dtype, and quantized weights as they are stored.
    pub fn of(dtype: DType) -> Self {
        Self { dtype, layout: None, dequantize: false, cache: None, shares: None, ep: 1, cp: 1, dp: 1 }
    }

    /// Returns the mesh axes of a stage, and their ranks, which are `ranks` together.
    ///
    /// # Errors
    /// If the ranks of tokens and of experts do not divide them.
    pub fn axes(&self, ranks: usize) -> Result<Vec<(&'static str, usize)>> {
        let Self { cp, ep, .. } = *self;
        let others = cp.saturating_mul(ep);
        ensure!(
            others > 0 && ranks.is_multiple_of(others),
            "{cp} ranks of tokens × {ep} ranks of experts do not divide {ranks} ranks"
        );
        let axes = [(TOKEN_AXIS, cp), (EXPERT_AXIS, ep)].into_iter().filter(|(_, ranks)| *ranks > 1);
        Ok(axes.chain([(LAYER_AXIS, ranks / others)]).collect())
    }

    /// Returns the builder of a model that only computes, on the axes of a mesh that it lies on.
    pub(crate) fn builder(
        &self,
        files: &Files,
        plan: Plan,
        mesh: &DeviceMesh,
        device: &Device,
    ) -> Result<MeshVarBuilder> {
        let plan = plan.with_shares(self.shares.clone());
        let vb = MeshVarBuilder::from_weights(files.weights(), 0, mesh, plan, self.dtype, device)?;
        let vb = if files.adapters.is_empty() { vb } else { vb.with_adapters(files.adapters.clone())? };
        Ok(if self.dequantize { vb.dequantized() } else { vb }.frozen())
    }

    /// Returns a cache of `room` tokens, which takes memory for `block` of them at a time.
    pub(crate) fn slot(&self, decoder: &Decoder, [room, block]: [usize; 2]) -> Result<Cache> {
        let cache = Cache::of(decoder.config(), room).with_block(block);
        let cache = if self.cp > 1 { cache.over(decoder.mesh(), TOKEN_AXIS)? } else { cache };
        Ok(cache.with_dtype(self.cache))
    }

    /// Returns the parameters that this rank holds as floats, and the bytes of all weights.
    pub(crate) fn sizes(&self, vb: &MeshVarBuilder) -> [usize; 2] {
        let parameters: usize = vb.built().iter().map(|parameter| parameter.var.elem_count()).sum();
        [parameters, parameters * self.dtype.size_in_bytes() + vb.quantized_bytes()]
    }
}

/// What a model is read for.
#[derive(Clone, Copy, Debug)]
pub enum Purpose {
    /// Writing some texts at once.
    Write {
        /// The texts.
        slots: usize,
        /// The most tokens of a text.
        room: usize,
        /// The tokens for which a text takes memory at a time. Tokens that are distributed over ranks take
        /// all at once.
        block: usize,
    },
    /// Scoring windows of so many tokens.
    Score {
        /// The tokens.
        window: usize,
    },
}

/// A rank's part of a model.
pub struct Engine {
    model: EngineModel,
    device: Device,
    /// All ranks of a replica, if some compute the same logits, each by itself.
    alike: Option<ProcessGroup>,
    /// The ranks at this one's place in all replicas, if there are several.
    replicas: Option<ProcessGroup>,
    vocab_size: usize,
    /// Whether this is rank 0.
    is_first: bool,
    /// The rows of the last step of each replica, and the logits of this one's, until the next step.
    passed: (Vec<usize>, Option<PassLogits>),
    /// The seconds in which this rank's part was read.
    pub load: f64,
    /// The parameters that this rank holds as floats.
    pub parameters: usize,
    /// The bytes of all weights that this rank holds.
    pub bytes: usize,
}

enum EngineModel {
    /// All layers on each rank, and the slots of texts.
    Whole(Arc<Decoder>, Vec<Cache>),
    /// Some of them.
    Staged(Box<StagedDecoder>),
}

impl Engine {
    /// Reads this rank's part of a model of `stages` stages. Every rank calls it. Each replica has as many
    /// ranks as the others, one replica's behind another's.
    ///
    /// # Errors
    /// If the stages and the replicas do not divide the ranks, or there are more than the model can be cut
    /// into; those of the files.
    pub fn new(
        ctx: &RankContext,
        stages: usize,
        files: &Files,
        held: &ModelOptions,
        purpose: Purpose,
    ) -> Result<Self> {
        let mut config = files.config.clone();
        // The last stage reads the output layer by itself where files allow that.
        config.tie_word_embeddings &= stages == 1 || !files.has_head();
        let config = &config;
        let (ranks, dp) = (ctx.world_size(), held.dp);
        ensure!(
            dp > 0 && ranks.is_multiple_of(dp),
            "{dp} replicas of the model do not divide {ranks} ranks: give each replica as many ranks"
        );
        let ranks = ranks / dp;
        ensure!(stages > 0 && ranks.is_multiple_of(stages), "{stages} stages do not divide {ranks} ranks");
        ensure!(
            stages == 1 || held.cp == 1,
            "tokens on {} ranks and layers in {stages} stages: a stage keeps all tokens; use one stage, or one rank of tokens",
            held.cp
        );
        if let Some(refusal) = config.refusal_of_token_ranks(held.cp) {
            bail!(refusal);
        }
        let sizes = held.axes(ranks / stages)?;
        let layer: Vec<&str> = sizes.iter().map(|(axis, _)| *axis).collect();
        files.ensure_alike(ctx.group())?;
        let began = Instant::now();
        let all = ctx.mesh(&[&[("dp", dp), ("pp", stages)], &sizes[..]].concat())?;
        let of_replica = [&["pp"], &layer[..]].concat();
        let mesh = all.axes(&of_replica)?;
        // Positions that are turned by the length of a text need all of its tokens at once, and adapters are
        // those of rows.
        let is_turned = |room| config.turns_by_length(room) || config.turns_anew(1, room);
        let is_cut =
            matches!(purpose, Purpose::Write { room, .. } if files.adapters.is_empty() && !is_turned(room));
        let (plan, longest, used, (slots, block)) = match purpose {
            // A rank gets all logits only where they are wanted.
            Purpose::Write { slots, room, block } => (
                if stages == 1 { Decoder::training_plan } else { Decoder::plan }(config, LAYER_AXIS),
                room,
                DecoderPurpose::Write { slots, block, cache: held.cache, is_cut },
                (slots, block),
            ),
            // No rank needs the logits of the whole vocabulary.
            Purpose::Score { window } => {
                (Decoder::training_plan(config, LAYER_AXIS), window, DecoderPurpose::Score, (0, window))
            }
        };
        let device = ctx.device();
        let vb = held.builder(files, plan, &mesh.axes(&layer)?, device)?;
        let model = match stages {
            1 => {
                let decoder = Decoder::new(config, longest, &vb)?;
                let slots =
                    (0..slots).map(|_| held.slot(&decoder, [longest, block])).collect::<Result<_>>()?;
                EngineModel::Whole(Arc::new(decoder), slots)
            }
            _ => {
                let layout = held.layout.as_ref();
                EngineModel::Staged(Box::new(StagedDecoder::new(
                    config,
                    (longest, used),
                    layout,
                    &mesh,
                    &vb,
                    ctx,
                )?))
            }
        };
        let [parameters, bytes] = held.sizes(&vb);
        let alike = match held.cp * held.ep {
            1 => None,
            _ => Some(all.flatten(&of_replica, "replica")?.group()?.clone()),
        };
        let replicas = (dp > 1).then(|| all.axis_group("dp").cloned()).transpose()?;
        Ok(Self {
            model,
            device: device.clone(),
            alike,
            replicas,
            vocab_size: config.vocab_size,
            is_first: ctx.rank() == 0,
            passed: (Vec::new(), None),
            load: began.elapsed().as_secs_f64(),
            parameters,
            bytes,
        })
    }

    /// A decoder that was read before, and the slots of texts; `alike` are all ranks, if some compute the
    /// same logits.
    pub(crate) fn of(decoder: Arc<Decoder>, slots: Vec<Cache>, alike: Option<ProcessGroup>) -> Self {
        let (device, vocab_size) = (decoder.device().clone(), decoder.config().vocab_size);
        Self {
            model: EngineModel::Whole(decoder, slots),
            device,
            alike,
            replicas: None,
            vocab_size,
            is_first: true,
            passed: (Vec::new(), None),
            load: 0.0,
            parameters: 0,
            bytes: 0,
        }
    }

    /// The logits `[rows, vocabulary]` of what follows new tokens of texts, for the [rows](DecodeStep::rows) of a step, with the same
    /// bits on all ranks.
    ///
    /// # Errors
    /// Those of the model.
    pub fn step(&mut self, step: &DecodeStep) -> Result<Tensor> {
        self.pass(step)?.all()
    }

    /// The [logits](Self::step), which stay on their devices.
    ///
    /// # Errors
    /// Those of the model.
    pub(crate) fn pass(&mut self, step: &DecodeStep) -> Result<PassLogits> {
        let alike = self.alike.clone();
        Ok(match &mut self.model {
            EngineModel::Whole(model, slots) => PassLogits::cut(model.step_logits(step, slots)?, alike),
            EngineModel::Staged(model) => PassLogits::whole(model.step(step)?, alike),
        })
    }

    /// What is read of the logits of the steps of all replicas, one replica's behind another's, on rank 0; `None` on others. Each replica
    /// computes its own step. Every rank calls it with all of them.
    ///
    /// # Errors
    /// Those of the model and of the group; if there are not as many steps as replicas.
    pub(crate) fn step_of_each(
        &mut self,
        steps: &[DecodeStep],
        basis: &PassBasis,
    ) -> Result<Option<RowNumbers>> {
        let replica = self.replicas.as_ref().map_or(0, ProcessGroup::rank);
        let replicas = self.replicas();
        ensure!(steps.len() == replicas, "{} steps for {replicas} replicas", steps.len());
        let own = &steps[replica];
        self.passed = (Vec::new(), None);
        let logits = if own.is_empty() { None } else { Some(self.pass(own)?) };
        self.passed = (steps.iter().map(DecodeStep::wanted).collect(), logits);
        self.read_of_each(basis)
    }

    /// How many replicas of the model there are.
    fn replicas(&self) -> usize {
        self.replicas.as_ref().map_or(1, ProcessGroup::size)
    }

    /// What is read of the logits of the last [steps](Self::step_of_each). Several replicas read no candidates.
    ///
    /// # Errors
    /// Those of the group.
    pub(crate) fn read_of_each(&self, basis: &PassBasis) -> Result<Option<RowNumbers>> {
        let (wanted, logits) = &self.passed;
        if wanted.iter().all(|&rows| rows == 0) {
            return Ok(None);
        }
        let read = |numbers: Tensor| Ok(Some(RowNumbers::read(&numbers, basis)?));
        let is_needed =
            |logits: &&PassLogits| self.is_first || self.replicas.is_some() || logits.are_shared();
        let numbers = logits.as_ref().filter(is_needed).map(|logits| logits.numbers(basis)).transpose()?;
        // Only rank 0 reads.
        let Some(group) = &self.replicas else {
            return if self.is_first { numbers.map_or(Ok(None), read) } else { Ok(None) };
        };
        // The first ranks of all replicas bring them together.
        if group.ranks()[0] != 0 {
            return Ok(None);
        }
        if wanted[1..].iter().all(|&rows| rows == 0) {
            return numbers.filter(|_| group.rank() == 0).map_or(Ok(None), read);
        }
        let (width, dtype) = match basis {
            PassBasis::All => (self.vocab_size, DType::F32),
            PassBasis::Largest => (1, DType::I64),
            PassBasis::Candidates(_) => bail!("candidates of several replicas are not read"),
        };
        let mine = match numbers {
            Some(numbers) if wanted[group.rank()] > 0 => match basis {
                PassBasis::Largest => numbers.max_keepdim(1)?,
                _ => numbers.to_dtype(dtype)?,
            },
            _ => Tensor::zeros((0, width), dtype, &self.device)?,
        };
        group.gather(&mine, 0, wanted, 0)?.map_or(Ok(None), read)
    }

    /// The sum of the losses of `targets`, which follow the last of `tokens`.
    ///
    /// # Errors
    /// Those of the model.
    pub fn loss(&self, tokens: &[u32], targets: &[u32]) -> Result<f64> {
        let row = |tokens: &[u32]| Tensor::from_slice(tokens, (1, tokens.len()), &self.device);
        Ok(match &self.model {
            EngineModel::Whole(model, _) => model.loss(&row(tokens)?, &row(targets)?)?,
            EngineModel::Staged(model) => model.loss(&row(tokens)?, &row(targets)?)?,
        })
    }
}
