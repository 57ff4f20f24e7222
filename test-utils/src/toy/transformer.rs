//! The toy Transformer on a mesh.
use super::attention::{Attention, FeedForward};
use crate::model_args::ModelArgs;
use candle_core::{DType, Device, Tensor};
use candle_dist::DeviceMesh;
use candle_shard::nn::{Dropout, Embedding, LayerNorm, Linear, MeshVarBuilder, Mode, recompute};
use candle_shard::parallel::{ColwiseParallel, Plan, PrepareModuleInput, RowwiseParallel, SequenceParallel};
use candle_shard::{DTensor, Error, Placement, Replicate, Result, Shard, TokenOrder};
use std::sync::Arc;

/// A decoder-only Transformer in the style of nanoGPT, sharded by its plan.
///
/// With the same [`ModelArgs`], it has the same parameters, dropout masks and results as
/// [`reference::Transformer`](crate::reference::Transformer), on every mesh.
#[derive(Debug, Clone)]
pub struct Transformer {
    args: ModelArgs,
    tok_embeddings: Embedding,
    pos_embeddings: Embedding,
    dropout: Dropout,
    layers: Vec<Arc<TransformerBlock>>,
    norm: LayerNorm,
    output: Linear,
}

impl Transformer {
    /// Creates the model at the builder's path.
    ///
    /// # Errors
    /// If `n_heads` does not divide `dim`, or the plan does not fit the model.
    pub fn new(args: &ModelArgs, vb: &MeshVarBuilder) -> Result<Self> {
        let &ModelArgs { dim, n_heads, vocab_size, max_seq_len, .. } = args;
        if n_heads == 0 || !dim.is_multiple_of(n_heads) {
            return Err(Error::Plan(format!(
                "{n_heads} heads do not divide a model of dim {dim}; choose a number that does"
            )));
        }
        let stdev = args.init_stdev.unwrap_or(1.0);
        let tok_embeddings = Embedding::new(vocab_size, dim, stdev, &vb.pp("tok_embeddings"))?;
        let pos_embeddings = Embedding::new(max_seq_len, dim, stdev, &vb.pp("pos_embeddings"))?;
        let block = |i: usize| TransformerBlock::new(args, &vb.pp("layers").pp(i)).map(Arc::new);
        let layers = (0..args.n_layers).map(block).collect::<Result<_>>()?;
        let norm = LayerNorm::new(dim, 1e-5, &vb.pp("norm"))?;
        let output = match args.weight_tying {
            true => Linear::tied(tok_embeddings.weight(), &vb.pp("output"))?,
            false => Linear::new(dim, vocab_size, false, &vb.pp("output"))?,
        };
        let dropout = Dropout::new(args.dropout_p, &vb.pp("dropout"));
        Ok(Self { args: args.clone(), tok_embeddings, pos_embeddings, dropout, layers, norm, output })
    }

    /// Returns the Megatron plan of this model on the mesh axis `axis`, with or without sequence parallelism.
    pub fn plan(axis: &str, use_seq_parallel: bool) -> Plan {
        Self::plan_of(&ModelArgs::default(), axis, use_seq_parallel)
    }

    /// Like [`plan`](Self::plan), for a model that may have experts, which know their axes themselves.
    pub fn plan_of(args: &ModelArgs, axis: &str, use_seq_parallel: bool) -> Plan {
        let sequence = if use_seq_parallel { Shard(1) } else { Replicate };
        let plan = Plan::new(axis)
            .with("tok_embeddings", RowwiseParallel::default().output(sequence))
            .with("layers.*.attention.w?", ColwiseParallel::default())
            .with("layers.*.attention.wo", RowwiseParallel::default().output(sequence))
            .with("output", ColwiseParallel::default().output(Replicate));
        let plan = match args.experts {
            0 => plan
                .with("layers.*.feed_forward.w1", ColwiseParallel::default())
                .with("layers.*.feed_forward.w2", RowwiseParallel::default().output(sequence)),
            _ => plan,
        };
        if !use_seq_parallel {
            return plan;
        }
        plan.with("pos_embeddings", SequenceParallel::default().dim(0))
            .with("layers.*.attention", PrepareModuleInput::new([Replicate]))
            .with("layers.*.attention_norm", SequenceParallel::default())
            .with("layers.*.ffn_norm", SequenceParallel::default())
            .with("norm", SequenceParallel::default())
    }

    /// Returns the logits `[batch, sequence, vocab]` of u32 `tokens` `[batch, sequence]`, in f32 for 16-bit models.
    ///
    /// # Errors
    /// If the sequence is longer than [`ModelArgs::max_seq_len`].
    pub fn forward(&self, tokens: &DTensor, mode: Mode) -> Result<DTensor> {
        Ok(self.run(tokens, None, mode)?.logits)
    }

    /// Like [`forward`](Self::forward), with the auxiliary losses, for tokens that may lie in an `order` along a sharded
    /// sequence. Logits lie in it too.
    ///
    /// # Errors
    /// If the sequence is longer than [`ModelArgs::max_seq_len`], the order is one of other tokens, there is dropout in an
    /// order, or recomputed blocks have auxiliary losses.
    pub fn run(&self, tokens: &DTensor, order: Option<&TokenOrder>, mode: Mode) -> Result<TransformerOutput> {
        let (seq_len, longest) = (tokens.dims().last().copied().unwrap_or(0), self.args.max_seq_len);
        if tokens.rank() != 2 || seq_len > longest {
            let text = format!(
                "tokens {}: expected [batch, sequence] with at most {longest} in sequence",
                tokens.spec()
            );
            return Err(candle_core::Error::msg(text).into());
        }
        let positions = positions(tokens.mesh(), (seq_len, tokens.placements()), order, tokens.device())?;
        let h = self.tok_embeddings.forward(tokens)?.add(&self.pos_embeddings.forward(&positions)?)?;
        let mut h = self.dropout.forward(&h, mode)?;
        let mut loss: Option<DTensor> = None;
        for layer in &self.layers {
            let recomputed = self.args.recompute_activations;
            let (next, more) = layer.run(&h, order, mode, recomputed)?;
            h = next;
            loss = match (loss, more) {
                (Some(loss), Some(more)) => Some(loss.add(&more)?),
                (loss, more) => loss.or(more),
            };
        }
        let logits = self.output.forward(&self.norm.forward(&h)?)?;
        let logits = match logits.dtype() {
            DType::F16 | DType::BF16 => logits.to_dtype(DType::F32)?,
            _ => logits,
        };
        Ok(TransformerOutput { logits, loss })
    }
}

/// The result of a [`Transformer`].
#[derive(Debug, Clone)]
pub struct TransformerOutput {
    /// `[batch, sequence, vocab]`.
    pub logits: DTensor,
    /// The sum of the auxiliary losses of experts, if there are some, to be added to the loss of the logits.
    pub loss: Option<DTensor>,
}

/// Returns the positions of `len` tokens on each rank, for tokens `[batch, sequence]` with these placements.
pub(super) fn positions(
    mesh: &DeviceMesh,
    (len, tokens): (usize, &[Placement]),
    order: Option<&TokenOrder>,
    device: &Device,
) -> Result<DTensor> {
    let positions = Tensor::arange(0u32, len as u32, device)?;
    let with_tokens = tokens.iter().map(|at| if *at == Shard(1) { Shard(0) } else { Replicate });
    let at: Vec<Placement> = with_tokens.collect();
    match order {
        Some(order) => order.distribute(&positions, 0, mesh, &at),
        None => DTensor::distribute(&positions, mesh, &at),
    }
}

#[derive(Debug, Clone)]
pub(super) struct TransformerBlock {
    attention_norm: LayerNorm,
    attention: Attention,
    ffn_norm: LayerNorm,
    feed_forward: FeedForward,
}

impl TransformerBlock {
    pub(super) fn new(args: &ModelArgs, vb: &MeshVarBuilder) -> Result<Self> {
        Ok(Self {
            attention_norm: LayerNorm::new(args.dim, 1e-5, &vb.pp("attention_norm"))?,
            attention: Attention::new(args, &vb.pp("attention"))?,
            ffn_norm: LayerNorm::new(args.dim, 1e-5, &vb.pp("ffn_norm"))?,
            feed_forward: FeedForward::new(args, &vb.pp("feed_forward"))?,
        })
    }

    /// Runs the block, and returns hidden states and auxiliary losses. If `is_recomputed`, the backward pass recomputes the
    /// activations.
    pub(super) fn run(
        self: &Arc<Self>,
        x: &DTensor,
        order: Option<&TokenOrder>,
        mode: Mode,
        is_recomputed: bool,
    ) -> Result<(DTensor, Option<DTensor>)> {
        if !is_recomputed {
            return self.forward(x, order, mode);
        }
        let (block, order) = (self.clone(), order.cloned());
        let made = recompute(x, move |x| match block.forward(x, order.as_ref(), mode)? {
            (h, None) => Ok(h),
            (_, Some(_)) => {
                Err(Error::Plan("auxiliary losses of recomputed blocks: recompute none, or use none".into()))
            }
        })?;
        Ok((made, None))
    }

    fn forward(
        &self,
        x: &DTensor,
        order: Option<&TokenOrder>,
        mode: Mode,
    ) -> Result<(DTensor, Option<DTensor>)> {
        let h = x.add(&self.attention.forward(&self.attention_norm.forward(x)?, order, mode)?)?;
        let (made, losses) = self.feed_forward.forward(&self.ffn_norm.forward(&h)?, mode)?;
        Ok((h.add(&made)?, losses))
    }
}
