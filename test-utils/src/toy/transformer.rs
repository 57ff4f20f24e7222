//! The toy Transformer on a mesh.
use super::attention::{Attention, FeedForward};
use crate::model_args::ModelArgs;
use candle_core::{DType, Tensor};
use candle_shard::nn::{Dropout, Embedding, LayerNorm, Linear, Mode, ShardedVarBuilder, recompute};
use candle_shard::parallel::{ColwiseParallel, Plan, PrepareModuleInput, RowwiseParallel, SequenceParallel};
use candle_shard::{DTensor, Error, Replicate, Result, Shard};
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
    pub fn new(args: &ModelArgs, vb: &ShardedVarBuilder) -> Result<Self> {
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
        let sequence = if use_seq_parallel { Shard(1) } else { Replicate };
        let plan = Plan::new(axis)
            .with("tok_embeddings", RowwiseParallel::default().output(sequence))
            .with("layers.*.attention.w?", ColwiseParallel::default())
            .with("layers.*.attention.wo", RowwiseParallel::default().output(sequence))
            .with("layers.*.feed_forward.w1", ColwiseParallel::default())
            .with("layers.*.feed_forward.w2", RowwiseParallel::default().output(sequence))
            .with("output", ColwiseParallel::default().output(Replicate));
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
        let (seq_len, longest) = (tokens.dims().last().copied().unwrap_or(0), self.args.max_seq_len);
        if tokens.rank() != 2 || seq_len > longest {
            let text =
                format!("tokens {}: expected [batch, sequence] with at most {longest} in sequence", tokens.spec());
            return Err(candle_core::Error::msg(text).into());
        }
        let positions = Tensor::arange(0u32, seq_len as u32, tokens.device())?;
        // Each rank looks up the positions of its own tokens.
        let with_tokens = tokens.placements().iter().map(|at| if *at == Shard(1) { Shard(0) } else { Replicate });
        let positions = DTensor::distribute(&positions, tokens.mesh(), &with_tokens.collect::<Vec<_>>())?;
        let h = self.tok_embeddings.forward(tokens)?.add(&self.pos_embeddings.forward(&positions)?)?;
        let mut h = self.dropout.forward(&h, mode)?;
        for layer in &self.layers {
            h = layer.run(&h, mode, self.args.recompute_activations)?;
        }
        let logits = self.output.forward(&self.norm.forward(&h)?)?;
        match logits.dtype() {
            DType::F16 | DType::BF16 => logits.to_dtype(DType::F32),
            _ => Ok(logits),
        }
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
    pub(super) fn new(args: &ModelArgs, vb: &ShardedVarBuilder) -> Result<Self> {
        Ok(Self {
            attention_norm: LayerNorm::new(args.dim, 1e-5, &vb.pp("attention_norm"))?,
            attention: Attention::new(args, &vb.pp("attention"))?,
            ffn_norm: LayerNorm::new(args.dim, 1e-5, &vb.pp("ffn_norm"))?,
            feed_forward: FeedForward::new(args, &vb.pp("feed_forward"))?,
        })
    }

    /// Runs the block. If `is_recomputed`, the backward pass recomputes the activations.
    pub(super) fn run(self: &Arc<Self>, x: &DTensor, mode: Mode, is_recomputed: bool) -> Result<DTensor> {
        if !is_recomputed {
            return self.forward(x, mode);
        }
        let block = self.clone();
        recompute(x, move |x| block.forward(x, mode))
    }

    fn forward(&self, x: &DTensor, mode: Mode) -> Result<DTensor> {
        let h = x.add(&self.attention.forward(&self.attention_norm.forward(x)?, mode)?)?;
        h.add(&self.feed_forward.forward(&self.ffn_norm.forward(&h)?, mode)?)
    }
}
