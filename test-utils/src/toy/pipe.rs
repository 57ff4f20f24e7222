//! The toy Transformer as a pipeline.
use super::placements::placements;
use super::transformer::{TransformerBlock, positions};
use crate::model_args::ModelArgs;
use candle_core::DType;
use candle_dist::DeviceMesh;
use candle_pipe::graph::ValueId;
use candle_pipe::{
    BalancedCost, In, LossReduction, Pipe, PipeBuilder, Result, Share, StageOp, Value, stage_op,
};
use candle_shard::fsdp::FullyShard;
use candle_shard::nn::{Dropout, Embedding, LayerNorm, Linear, MeshVarBuilder, Mode};
use candle_shard::{DTensor, Error, Placement, Replicate, Shard, TokenOrder};
use std::sync::Arc;

/// Declares the [`Transformer`](super::Transformer) as a pipeline with sharded stages.
///
/// It has the same parameters, dropout masks and results as the uncut model under the same plan. A stage may lie on any mesh
/// of the axes `fsdp`, `cp`, `ep` and `tp`, on which tokens have these [placements](super::placements); replicas of all
/// stages are the business of the runtime. The embeddings, dropout, each block, the last norm, the output layer and the loss
/// are separate nodes. A tied weight is replicated on the stages that use it. Between nodes, the plan decides whether the
/// sequence is whole or cut on `tp`.
///
/// Auxiliary losses of experts travel beside the hidden states, and are those of a microbatch.
///
/// Inputs are `tokens` and `targets` (u32, `[batch, sequence]`), the output is `logits`.
#[derive(Debug, Clone)]
pub struct TransformerPipe {
    args: ModelArgs,
    /// The placement of sequences between nodes on the axis `tp`.
    sequence: Placement,
    /// Whether tokens lie in zigzag order on the axis `cp`.
    is_zigzag: bool,
}

/// The axis whose ranks have pieces of the blocks' parameters.
const PIECES: &str = "fsdp";

impl TransformerPipe {
    /// Creates the declaration for `args` and a [plan](super::Transformer::plan) with or without sequence parallelism.
    pub fn new(args: &ModelArgs, use_seq_parallel: bool) -> Self {
        Self {
            args: args.clone(),
            sequence: if use_seq_parallel { Shard(1) } else { Replicate },
            is_zigzag: false,
        }
    }

    /// Sets whether tokens lie in zigzag order on the axis `cp`, for even work under a causal mask.
    pub fn zigzag(self, is_zigzag: bool) -> Self {
        Self { is_zigzag, ..self }
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
    pub fn cut(&self, stages: usize) -> Result<Pipe<MeshVarBuilder>> {
        self.declare().finish(BalancedCost::new(stages, self.costs()))
    }

    /// Returns the model before it is cut.
    pub fn declare(&self) -> PipeBuilder<MeshVarBuilder> {
        let mut g = PipeBuilder::new();
        let (tokens, targets) = (g.input("tokens", In::Arg), g.input("targets", In::Arg));
        let (rows, width, stdev) = (self.args.vocab_size, self.args.dim, self.args.init_stdev.unwrap_or(1.0));
        let tied = self.args.weight_tying.then(|| {
            let build =
                move |vb: &MeshVarBuilder| Ok(Embedding::new(rows, width, stdev, vb)?.weight().clone());
            g.parameter("tok_embeddings.weight", Share::Replicate, build)
        });
        let with_table = |value: ValueId| [value].into_iter().chain(tied);

        let this = self.clone();
        let mut h = g.module("tok_embeddings", move |vb| this.tok_embeddings(vb), with_table(tokens));
        let this = self.clone();
        h = g.module("pos_embeddings", move |vb| this.pos_embeddings(vb), [h]);
        let this = self.clone();
        let dropout = move |vb: &MeshVarBuilder| {
            let dropout = Dropout::new(this.args.dropout_p, vb);
            Ok(this.hidden(vb, move |h, mode| dropout.forward(h, mode)))
        };
        h = g.module("dropout", dropout, [h]);
        let mut losses: Option<ValueId> = None;
        for i in 0..self.args.n_layers {
            let this = self.clone();
            let layer = move |vb: &MeshVarBuilder| this.layer(vb);
            let (name, inputs) = (format!("layers.{i}"), [h].into_iter().chain(losses));
            match self.args.has_auxiliary_losses() {
                false => h = g.module(&name, layer, inputs),
                true => {
                    let [next, sum] = g.module_many(&name, layer, inputs);
                    (h, losses) = (next, Some(sum));
                }
            }
        }
        let this = self.clone();
        let norm = move |vb: &MeshVarBuilder| {
            let norm = LayerNorm::new(this.args.dim, 1e-5, vb)?;
            Ok(this.hidden(vb, move |h, _| norm.forward(h)))
        };
        h = g.module("norm", norm, [h]);
        let this = self.clone();
        let logits = g.module("output", move |vb| this.output(vb), with_table(h));
        g.output("logits", logits);
        let inputs = [logits, targets].into_iter().chain(losses);
        let loss = g.module("loss", |vb| Ok(loss(vb.mesh().clone())), inputs);
        g.loss(loss, LossReduction::Mean);
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

    fn tok_embeddings(&self, vb: &MeshVarBuilder) -> Result<impl StageOp + use<>> {
        let (this, vb) = (self.clone(), vb.clone());
        let (rows, width, stdev) = (self.args.vocab_size, self.args.dim, self.args.init_stdev.unwrap_or(1.0));
        let own = match self.args.weight_tying {
            true => None,
            false => Some(Embedding::new(rows, width, stdev, &vb)?),
        };
        Ok(stage_op(move |xs, _| {
            let (tokens, mesh) = (xs[0].tensor()?, vb.mesh());
            let tokens = match this.order(tokens.dim(1)?, mesh)? {
                Some(order) => order.distribute(tokens, 1, mesh, &placements(mesh))?,
                None => DTensor::distribute(tokens, mesh, &placements(mesh))?,
            };
            let h = match &own {
                Some(own) => own.forward(&tokens)?,
                None => Embedding::tied(xs[1].dtensor()?, &vb)?.forward(&tokens)?,
            };
            Ok(vec![this.leave(&h)?])
        }))
    }

    fn pos_embeddings(&self, vb: &MeshVarBuilder) -> Result<impl StageOp + use<>> {
        let stdev = self.args.init_stdev.unwrap_or(1.0);
        let embeddings = Embedding::new(self.args.max_seq_len, self.args.dim, stdev, vb)?;
        let this = self.clone();
        Ok(self.hidden(vb, move |h, _| {
            let (mesh, len) = (h.mesh(), h.dim(1)?);
            let positions =
                positions(mesh, (len, &placements(mesh)), this.order(len, mesh)?.as_ref(), h.device())?;
            h.add(&embeddings.forward(&positions)?)
        }))
    }

    /// A block, whose parameters a builder may shard fully. With auxiliary losses, their sum is a second input, from the
    /// second block on, and a second output.
    fn layer(&self, vb: &MeshVarBuilder) -> Result<impl StageOp + use<>> {
        let (this, mesh) = (self.clone(), vb.mesh().clone());
        let has_losses = self.args.has_auxiliary_losses();
        if has_losses && mesh.size_of(PIECES).is_ok_and(|ranks| ranks > 1) {
            let reason = "auxiliary losses of experts in fully sharded blocks, whose only result is a hidden state: use none";
            return Err(Error::Plan(reason.into()).into());
        }
        let layer = FullyShard::new(vb, |vb| Ok(Arc::new(TransformerBlock::new(&self.args, vb)?)))?;
        Ok(stage_op(move |xs, ctx| {
            let (h, mode, recomputed) = (xs[0].on(&mesh)?, ctx.mode(), this.args.recompute_activations);
            let order = this.order(h.dim(1)?, &mesh)?;
            if !has_losses {
                let made = layer.run(|layer| Ok(layer.run(&h, order.as_ref(), mode, recomputed)?.0))?;
                return Ok(vec![this.leave(&made)?]);
            }
            let mut losses: Option<DTensor> = None;
            let made = layer.run(|layer| {
                let (h, more) = layer.run(&h, order.as_ref(), mode, recomputed)?;
                losses = more;
                Ok(h)
            })?;
            let no_losses = || Error::Plan("a block of experts without auxiliary losses".into());
            let losses = losses.ok_or_else(no_losses)?;
            let sum = match xs.get(1) {
                Some(before) => before.on(&mesh)?.add(&losses)?,
                None => losses,
            };
            Ok(vec![this.leave(&made)?, sum.into()])
        }))
    }

    fn output(&self, vb: &MeshVarBuilder) -> Result<impl StageOp + use<>> {
        let (this, vb) = (self.clone(), vb.clone());
        let own = match self.args.weight_tying {
            true => None,
            false => Some(Linear::new(self.args.dim, self.args.vocab_size, false, &vb)?),
        };
        Ok(stage_op(move |xs, _| {
            let h = xs[0].on(vb.mesh())?;
            let logits = match &own {
                Some(own) => own.forward(&h)?,
                None => Linear::tied(xs[1].dtensor()?, &vb)?.forward(&h)?,
            };
            let logits = match logits.dtype() {
                DType::F16 | DType::BF16 => logits.to_dtype(DType::F32)?,
                _ => logits,
            };
            let whole = logits.full_tensor()?;
            Ok(vec![match this.order(h.dim(1)?, vb.mesh())? {
                Some(order) => order.undo(&whole, 1)?.into(),
                None => whole.into(),
            }])
        }))
    }

    /// Creates a node from hidden states to hidden states.
    fn hidden<F>(&self, vb: &MeshVarBuilder, f: F) -> impl StageOp + use<F>
    where
        F: Fn(&DTensor, Mode) -> candle_shard::Result<DTensor>,
    {
        let (this, mesh) = (self.clone(), vb.mesh().clone());
        stage_op(move |xs, ctx| Ok(vec![this.leave(&f(&xs[0].on(&mesh)?, ctx.mode())?)?]))
    }

    /// Returns the order of tokens along the axis `cp`, if it is not that of their positions.
    fn order(&self, len: usize, mesh: &DeviceMesh) -> candle_shard::Result<Option<TokenOrder>> {
        Ok(if self.is_zigzag { Some(TokenOrder::zigzag(len, mesh.size_of("cp")?)) } else { None })
    }

    /// Returns hidden states as they lie between nodes.
    fn leave(&self, h: &DTensor) -> Result<Value> {
        let mut between = placements(h.mesh());
        if let Ok(axis) = h.mesh().axis_index("tp") {
            between[axis] = self.sequence;
        }
        // Tokens in an order lie in sizes of their own.
        if h.placements() == &between[..] {
            return Ok(h.into());
        }
        Ok(h.redistribute(&between)?.into())
    }
}

/// Returns the mean cross entropy of replicated logits, and what auxiliary losses add to it.
fn loss(mesh: DeviceMesh) -> impl StageOp {
    stage_op(move |xs, _| {
        let everywhere = vec![Replicate; mesh.ndim()];
        let (logits, targets) = (xs[0].tensor()?, xs[1].tensor()?);
        let logits = DTensor::from_local(logits.clone(), &mesh, &everywhere, logits.shape())?;
        let targets = DTensor::distribute(targets, &mesh, &everywhere)?;
        let loss = logits.cross_entropy(&targets)?;
        let loss = match xs.get(2) {
            Some(more) => loss.add(&more.on(&mesh)?)?,
            None => loss,
        };
        Ok(vec![loss.full_tensor()?.into()])
    })
}
