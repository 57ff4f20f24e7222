//! The toy Transformer as a pipeline.
use super::transformer::TransformerBlock;
use crate::model_args::ModelArgs;
use candle_core::{DType, Tensor};
use candle_dist::DeviceMesh;
use candle_pipe::graph::ValueId;
use candle_pipe::{Balanced, Ctx, In, Pipe, PipeBuilder, Reduction, Result, Share, StageOp, Value, stage_op};
use candle_shard::nn::{Dropout, Embedding, LayerNorm, Linear, Mode, ShardedVarBuilder};
use candle_shard::{DTensor, Placement, Replicate, Shard};
use std::sync::Arc;

/// Declares the [`Transformer`](super::Transformer) as a pipeline with sharded stages.
///
/// It has the same parameters, dropout masks and results as the uncut model under the same plan, on a mesh with one
/// axis. The embeddings, dropout, each block, the last norm, the output layer and the loss are separate nodes. A tied
/// weight is replicated on the stages that use it. Between nodes, the plan decides whether the sequence is whole or
/// cut.
///
/// Inputs are `tokens` and `targets` (u32, `[batch, sequence]`), the output is `logits`.
#[derive(Debug, Clone)]
pub struct TransformerPipe {
    args: ModelArgs,
    /// The placement of sequences between nodes.
    sequence: Placement,
}

/// The placement of token tables under the plan: cut by rows, as in output layers.
const TABLE: Placement = Shard(0);

impl TransformerPipe {
    /// Creates the declaration for `args` and a [plan](super::Transformer::plan) with or without sequence parallelism.
    pub fn new(args: &ModelArgs, use_seq_parallel: bool) -> Self {
        Self { args: args.clone(), sequence: if use_seq_parallel { Shard(1) } else { Replicate } }
    }

    /// Returns the maximum number of stages.
    pub fn most_stages(&self) -> usize {
        // Two embeddings, dropout, norm, output layer and loss.
        self.args.n_layers + 6
    }

    /// Cuts the model into stages with about equal amounts of computation.
    ///
    /// # Errors
    /// If the number of stages is zero or too large.
    pub fn cut(&self, stages: usize) -> Result<Pipe<ShardedVarBuilder>> {
        self.declare().finish(Balanced::new(stages, self.costs()))
    }

    /// Returns the model before it is cut.
    pub fn declare(&self) -> PipeBuilder<ShardedVarBuilder> {
        let mut g = PipeBuilder::new();
        let (tokens, targets) = (g.input("tokens", In::Arg), g.input("targets", In::Arg));
        let (rows, width, stdev) = (self.args.vocab_size, self.args.dim, self.args.init_stdev.unwrap_or(1.0));
        let tied = self.args.weight_tying.then(|| {
            let build =
                move |vb: &ShardedVarBuilder| Ok(Embedding::new(rows, width, stdev, vb)?.weight().to_local().clone());
            g.parameter("tok_embeddings.weight", Share::Replicate, build)
        });
        let with_table = |value: ValueId| [value].into_iter().chain(tied);

        let this = self.clone();
        let mut h = g.module("tok_embeddings", move |vb| this.tok_embeddings(vb), with_table(tokens));
        let this = self.clone();
        h = g.module("pos_embeddings", move |vb| this.pos_embeddings(vb), [h]);
        let this = self.clone();
        let dropout = move |vb: &ShardedVarBuilder| {
            let dropout = Dropout::new(this.args.dropout_p, vb);
            Ok(this.hidden(vb, move |h, mode| dropout.forward(h, mode)))
        };
        h = g.module("dropout", dropout, [h]);
        for i in 0..self.args.n_layers {
            let this = self.clone();
            let layer = move |vb: &ShardedVarBuilder| {
                let layer = Arc::new(TransformerBlock::new(&this.args, vb)?);
                let is_recomputed = this.args.recompute_activations;
                Ok(this.hidden(vb, move |h, mode| layer.run(h, mode, is_recomputed)))
            };
            h = g.module(&format!("layers.{i}"), layer, [h]);
        }
        let this = self.clone();
        let norm = move |vb: &ShardedVarBuilder| {
            let norm = LayerNorm::new(this.args.dim, 1e-5, vb)?;
            Ok(this.hidden(vb, move |h, _| norm.forward(h)))
        };
        h = g.module("norm", norm, [h]);
        let this = self.clone();
        let logits = g.module("output", move |vb| this.output(vb), with_table(h));
        g.output("logits", logits);
        let loss = g.module("loss", |vb| Ok(loss(vb.mesh().clone())), [logits, targets]);
        g.loss(loss, Reduction::Mean);
        g
    }

    /// Returns the approximate number of multiplications per token and node, by node name.
    fn costs(&self) -> Vec<(String, f64)> {
        let ModelArgs { n_layers, vocab_size, max_seq_len, dim, .. } = self.args;
        let [vocab, seq, dim] = [vocab_size, max_seq_len, dim].map(|size| size as f64);
        let layers = (0..n_layers).map(|i| (format!("layers.{i}"), 12.0 * dim * dim + 2.0 * seq * dim));
        let others = [
            ("tok_embeddings", dim),
            ("pos_embeddings", dim),
            ("dropout", dim),
            ("norm", 4.0 * dim),
            ("output", vocab * dim),
            ("loss", 4.0 * vocab),
        ];
        layers.chain(others.map(|(name, cost)| (name.to_owned(), cost))).collect()
    }

    fn tok_embeddings(&self, vb: &ShardedVarBuilder) -> Result<impl StageOp + use<>> {
        let (this, vb) = (self.clone(), vb.clone());
        let (rows, width, stdev) = (self.args.vocab_size, self.args.dim, self.args.init_stdev.unwrap_or(1.0));
        let own = match self.args.weight_tying {
            true => None,
            false => Some(Embedding::new(rows, width, stdev, &vb)?),
        };
        Ok(stage_op(move |xs, _| {
            let tokens = DTensor::distribute(xs[0].tensor()?, vb.mesh(), &[Replicate])?;
            let h = match &own {
                Some(own) => own.forward(&tokens)?,
                None => Embedding::tied(&this.table(&xs[1], &vb)?, &vb)?.forward(&tokens)?,
            };
            Ok(vec![this.leave(&h)?])
        }))
    }

    fn pos_embeddings(&self, vb: &ShardedVarBuilder) -> Result<impl StageOp + use<>> {
        let stdev = self.args.init_stdev.unwrap_or(1.0);
        let embeddings = Embedding::new(self.args.max_seq_len, self.args.dim, stdev, vb)?;
        Ok(self.hidden(vb, move |h, _| {
            let positions = Tensor::arange(0u32, h.dim(1)? as u32, h.device())?;
            let positions = DTensor::distribute(&positions, h.mesh(), &[Replicate])?;
            h.add(&embeddings.forward(&positions)?)
        }))
    }

    fn output(&self, vb: &ShardedVarBuilder) -> Result<impl StageOp + use<>> {
        let (this, vb) = (self.clone(), vb.clone());
        let own = match self.args.weight_tying {
            true => None,
            false => Some(Linear::new(self.args.dim, self.args.vocab_size, false, &vb)?),
        };
        Ok(stage_op(move |xs, _| {
            let h = this.enter(&xs[0], vb.mesh())?;
            let logits = match &own {
                Some(own) => own.forward(&h)?,
                None => Linear::tied(&this.table(&xs[1], &vb)?, &vb)?.forward(&h)?,
            };
            let logits = match logits.dtype() {
                DType::F16 | DType::BF16 => logits.to_dtype(DType::F32)?,
                _ => logits,
            };
            Ok(vec![logits.full_tensor()?.into()])
        }))
    }

    /// Creates a node from hidden states to hidden states.
    fn hidden<F>(&self, vb: &ShardedVarBuilder, f: F) -> impl StageOp + use<F>
    where
        F: Fn(&DTensor, Mode) -> candle_shard::Result<DTensor>,
    {
        let (this, mesh) = (self.clone(), vb.mesh().clone());
        stage_op(move |xs, ctx| Ok(vec![this.leave(&f(&this.enter(&xs[0], &mesh)?, mode(ctx))?)?]))
    }

    /// Returns the tied weight, from this rank's shard of it.
    fn table(&self, shard: &Value, vb: &ShardedVarBuilder) -> Result<DTensor> {
        let shape = (self.args.vocab_size, self.args.dim);
        Ok(DTensor::from_local(shard.tensor()?.clone(), vb.mesh(), &[TABLE], shape)?)
    }

    /// Returns the hidden states `[batch, sequence, dim]`, from this rank's shard and the length of the sequence.
    fn enter(&self, value: &Value, mesh: &DeviceMesh) -> Result<DTensor> {
        let (local, length) = (value.at(0)?.tensor()?, value.at(1)?.int()? as usize);
        let shape = (local.dim(0)?, length, self.args.dim);
        Ok(DTensor::from_local(local.clone(), mesh, &[self.sequence], shape)?)
    }

    /// Returns the value from which [`enter`](Self::enter) restores the states. Gradients have the same layout.
    fn leave(&self, h: &DTensor) -> Result<Value> {
        let h = h.redistribute(&[self.sequence])?;
        Ok((h.to_local_with_grad(&[self.sequence])?, h.dim(1)? as i64).into())
    }
}

/// Returns the mean cross entropy of replicated logits.
fn loss(mesh: DeviceMesh) -> impl StageOp {
    stage_op(move |xs, _| {
        let (logits, targets) = (xs[0].tensor()?, xs[1].tensor()?);
        let logits = DTensor::from_local(logits.clone(), &mesh, &[Replicate], logits.shape())?;
        let targets = DTensor::distribute(targets, &mesh, &[Replicate])?;
        Ok(vec![logits.cross_entropy(&targets)?.full_tensor()?.into()])
    })
}

fn mode(ctx: &Ctx) -> Mode {
    match ctx.training {
        true => Mode::TrainRows { step: ctx.step, first_row: ctx.rows.start },
        false => Mode::Eval,
    }
}
