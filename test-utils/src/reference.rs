//! The toy Transformer on one device in plain candle, the reference for every distributed form.

use candle_core::{DType, Device, Result, Tensor, Var, bail};
use candle_shard::kernels;
use candle_shard::random::{Distribution, Stream};

use crate::model_args::ModelArgs;
use crate::reference_moe::MoeLayer;
use crate::reference_ops as ops;
pub use crate::reference_ops::Arithmetic;
use crate::reference_params::{LayerNorm, Linear, Params};

pub use candle_shard::nn::Mode;

/// A decoder-only Transformer in the style of nanoGPT, with the structure and parameter names of PyTorch's toy model.
///
/// Each parameter is drawn from the stream of its full name, such as `layers.0.attention.wq.weight`: linear layers
/// uniformly in ±1/√in, embeddings from a normal distribution. Each dropout uses the stream `<path>.dropout`, folded
/// with the step. [`ModelArgs::recompute_activations`] has no effect here, because recomputing does not change
/// results.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use test_utils::model_args::ModelArgs;
/// use test_utils::reference::{Mode, Transformer, loss};
///
/// # fn main() -> candle_core::Result<()> {
/// let model = Transformer::new(&ModelArgs::default(), DType::F32, &Device::Cpu)?;
/// let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &Device::Cpu)?;
/// let logits = model.forward(&tokens, Mode::Train { step: 0 })?;
/// assert_eq!(logits.dims(), [1, 4, 8]);
/// let grads = loss(&logits, &tokens)?.backward()?;
/// assert!(model.vars().iter().all(|(_, var)| grads.get(var).is_some()));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Transformer {
    args: ModelArgs,
    tok_embeddings: Tensor,
    pos_embeddings: Tensor,
    dropout: Dropout,
    layers: Vec<TransformerBlock>,
    norm: LayerNorm,
    output: Linear,
    arithmetic: Arithmetic,
    vars: Vec<(String, Var)>,
}

impl Transformer {
    /// Creates the model that `args` describes, with newly drawn parameters.
    ///
    /// # Errors
    /// If `n_heads` does not divide `dim`.
    pub fn new(args: &ModelArgs, dtype: DType, device: &Device) -> Result<Self> {
        Self::computing(Arithmetic::default(), args, dtype, device)
    }

    /// Like [`new`](Self::new), with a choice of the arithmetic.
    ///
    /// # Errors
    /// If `n_heads` does not divide `dim`.
    pub fn computing(
        arithmetic: Arithmetic,
        args: &ModelArgs,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let &ModelArgs { dim, n_heads, .. } = args;
        if n_heads == 0 || !dim.is_multiple_of(n_heads) {
            bail!("a model of dim {dim} cannot have {n_heads} heads: the heads must divide it evenly");
        }
        let mut params = Params::new(args.seed, dtype, device).computing(arithmetic);
        let embedding = Distribution::Normal { mean: 0.0, stdev: args.init_stdev.unwrap_or(1.0) };
        let mut table = |name: &str, rows| params.draw(name.to_owned(), &[rows, dim], embedding);
        let tok_embeddings = table("tok_embeddings.weight", args.vocab_size)?;
        let pos_embeddings = table("pos_embeddings.weight", args.max_seq_len)?;
        let layers = (0..args.n_layers)
            .map(|i| TransformerBlock::new(&mut params, &format!("layers.{i}"), args))
            .collect::<Result<_>>()?;
        let norm = LayerNorm::new(&mut params, "norm", dim)?;
        let output = if args.weight_tying {
            Linear::tied(&params, &tok_embeddings)
        } else {
            Linear::new(&mut params, "output", dim, args.vocab_size, false)?
        };
        Ok(Self {
            args: args.clone(),
            tok_embeddings,
            pos_embeddings,
            dropout: Dropout::new(args, "dropout"),
            layers,
            norm,
            output,
            arithmetic,
            vars: params.into_vars(),
        })
    }

    /// Returns the logits `[batch, sequence, vocab]` of u32 `tokens` `[batch, sequence]`, in f32 for 16-bit models.
    ///
    /// # Errors
    /// If the sequence is longer than [`ModelArgs::max_seq_len`].
    pub fn forward(&self, tokens: &Tensor, mode: Mode) -> Result<Tensor> {
        Ok(self.run(tokens, mode)?.0)
    }

    /// Returns the logits as [`forward`](Self::forward) does, and the sum of the auxiliary losses of all experts, if there
    /// are some.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward).
    pub fn run(&self, tokens: &Tensor, mode: Mode) -> Result<(Tensor, Option<Tensor>)> {
        let (_, seq_len) = tokens.dims2()?;
        if seq_len > self.args.max_seq_len {
            bail!("a sequence of {seq_len} is longer than the model's {}", self.args.max_seq_len);
        }
        let positions = self.pos_embeddings.narrow(0, 0, seq_len)?;
        let h = self.arithmetic.add(&ops::embedding(&self.tok_embeddings, tokens)?, &positions)?;
        let mut h = self.dropout.forward(&h, mode)?;
        let mut losses: Option<Tensor> = None;
        for layer in &self.layers {
            let (next, more) = layer.forward(&h, mode)?;
            h = next;
            losses = match (losses, more) {
                (Some(losses), Some(more)) => Some((losses + more)?),
                (losses, more) => losses.or(more),
            };
        }
        let logits = self.output.forward(&self.norm.forward(&h)?)?;
        let logits = match logits.dtype() {
            DType::F16 | DType::BF16 => logits.to_dtype(DType::F32)?,
            _ => logits,
        };
        Ok((logits, losses))
    }

    /// Returns the mean cross entropy over all tokens, like [`loss`], with the arithmetic of the model.
    pub fn loss(&self, logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
        self.arithmetic.cross_entropy(logits, targets)
    }

    /// Returns the parameters by name, in model order. A tied output weight is the token embedding and is not repeated.
    pub fn vars(&self) -> &[(String, Var)] {
        &self.vars
    }
}

/// Returns the mean cross entropy over all tokens, for logits `[batch, sequence, vocab]` and u32 targets
/// `[batch, sequence]`.
pub fn loss(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    ops::cross_entropy(logits, targets)
}

#[derive(Clone, Debug)]
struct TransformerBlock {
    attention_norm: LayerNorm,
    attention: Attention,
    ffn_norm: LayerNorm,
    feed_forward: FeedForward,
    arithmetic: Arithmetic,
}

impl TransformerBlock {
    fn new(params: &mut Params, path: &str, args: &ModelArgs) -> Result<Self> {
        Ok(Self {
            attention_norm: LayerNorm::new(params, &format!("{path}.attention_norm"), args.dim)?,
            attention: Attention::new(params, &format!("{path}.attention"), args)?,
            ffn_norm: LayerNorm::new(params, &format!("{path}.ffn_norm"), args.dim)?,
            feed_forward: FeedForward::new(params, &format!("{path}.feed_forward"), args)?,
            arithmetic: params.arithmetic(),
        })
    }

    /// Returns the hidden states, and the auxiliary losses of experts, if there are some.
    fn forward(&self, x: &Tensor, mode: Mode) -> Result<(Tensor, Option<Tensor>)> {
        let h = self.arithmetic.add(x, &self.attention.forward(&self.attention_norm.forward(x)?, mode)?)?;
        let (out, losses) = self.feed_forward.forward(&self.ffn_norm.forward(&h)?, mode)?;
        Ok((self.arithmetic.add(&h, &out)?, losses))
    }
}

#[derive(Clone, Debug)]
struct Attention {
    n_heads: usize,
    head_dim: usize,
    causal: bool,
    arithmetic: Arithmetic,
    wq: Linear,
    wk: Linear,
    wv: Linear,
    wo: Linear,
    attn_dropout: Dropout,
    resid_dropout: Dropout,
}

impl Attention {
    fn new(params: &mut Params, path: &str, args: &ModelArgs) -> Result<Self> {
        let arithmetic = params.arithmetic();
        let mut square = |name| Linear::new(params, &format!("{path}.{name}"), args.dim, args.dim, false);
        Ok(Self {
            n_heads: args.n_heads,
            head_dim: args.head_dim(),
            causal: args.use_attn_mask,
            arithmetic,
            wq: square("wq")?,
            wk: square("wk")?,
            wv: square("wv")?,
            wo: square("wo")?,
            attn_dropout: Dropout::new(args, &format!("{path}.attn_dropout")),
            resid_dropout: Dropout::new(args, &format!("{path}.resid_dropout")),
        })
    }

    fn forward(&self, x: &Tensor, mode: Mode) -> Result<Tensor> {
        let (batch, seq_len, dim) = x.dims3()?;
        let split = (batch, seq_len, self.n_heads, self.head_dim);
        let heads = |projection: &Linear| self.arithmetic.reshape(&projection.forward(x)?, split);
        let (q, k, v) = (heads(&self.wq)?, heads(&self.wk)?, heads(&self.wv)?);
        let scale = 1.0 / (self.head_dim as f64).sqrt();
        let mixed = match self.arithmetic {
            Arithmetic::Fused if self.attn_dropout.is_identity(mode) => {
                kernels::flash_attn(&q, &k, &v, scale, self.causal)?
            }
            _ => self.composed(&q, &k, &v, scale, mode)?,
        };
        let merged = self.arithmetic.reshape(&mixed, (batch, seq_len, dim))?;
        self.resid_dropout.forward(&self.wo.forward(&merged)?, mode)
    }

    /// Computes attention from separate ops.
    fn composed(&self, q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, mode: Mode) -> Result<Tensor> {
        let heads_first = |x: &Tensor| x.transpose(1, 2)?.contiguous();
        let scores = heads_first(q)?.matmul(&heads_first(k)?.t()?)?;
        let weights = self.arithmetic.attention_softmax(&scores, scale, self.causal)?;
        self.attn_dropout.forward(&weights, mode)?.matmul(&heads_first(v)?)?.transpose(1, 2)
    }
}

#[derive(Clone, Debug)]
struct FeedForward {
    network: Network,
    resid_dropout: Dropout,
}

#[derive(Clone, Debug)]
enum Network {
    Dense { w1: Linear, w2: Linear, arithmetic: Arithmetic },
    Experts(Box<MoeLayer>),
}

impl FeedForward {
    fn new(params: &mut Params, path: &str, args: &ModelArgs) -> Result<Self> {
        let (dim, hidden) = (args.dim, args.hidden_dim());
        let network = match args.mixture() {
            None => Network::Dense {
                w1: Linear::new(params, &format!("{path}.w1"), dim, hidden, true)?,
                w2: Linear::new(params, &format!("{path}.w2"), hidden, dim, true)?,
                arithmetic: params.arithmetic(),
            },
            Some(config) => Network::Experts(Box::new(MoeLayer::new(params, &format!("{path}."), &config)?)),
        };
        Ok(Self { network, resid_dropout: Dropout::new(args, &format!("{path}.resid_dropout")) })
    }

    fn forward(&self, x: &Tensor, mode: Mode) -> Result<(Tensor, Option<Tensor>)> {
        let (made, losses) = match &self.network {
            Network::Dense { w1, w2, arithmetic } => {
                (w2.forward(&arithmetic.gelu_erf(&w1.forward(x)?)?)?, None)
            }
            Network::Experts(layer) => {
                let made = layer.forward(x)?;
                (made.output, made.loss)
            }
        };
        Ok((self.resid_dropout.forward(&made, mode)?, losses))
    }
}

#[derive(Clone, Copy, Debug)]
struct Dropout {
    p: f64,
    stream: Stream,
}

impl Dropout {
    fn new(args: &ModelArgs, path: &str) -> Self {
        Self { p: args.dropout_p, stream: Stream::new(args.seed, &format!("{path}.dropout")) }
    }

    fn is_identity(self, mode: Mode) -> bool {
        mode == Mode::Eval || self.p == 0.0
    }

    fn forward(self, x: &Tensor, mode: Mode) -> Result<Tensor> {
        match mode.stream(self.stream, x.dims()) {
            Some(stream) => ops::dropout(x, self.p, stream),
            None => Ok(x.clone()),
        }
    }
}
