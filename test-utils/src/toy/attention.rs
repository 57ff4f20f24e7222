//! The two halves of a Transformer block.
use crate::model_args::ModelArgs;
use candle_shard::nn::{Dropout, Linear, MeshVarBuilder, MoE, Mode, Width};
use candle_shard::parallel::ModuleStyle;
use candle_shard::{DTensor, Error, Result, TokenOrder};

/// Multi-head self-attention. With tensor parallelism, each rank has some of the heads.
#[derive(Debug, Clone)]
pub(super) struct Attention {
    n_heads: usize,
    head_dim: usize,
    causal: bool,
    wq: Linear,
    wk: Linear,
    wv: Linear,
    wo: Linear,
    attn_dropout: Dropout,
    resid_dropout: Dropout,
    style: ModuleStyle,
}

impl Attention {
    pub(super) fn new(args: &ModelArgs, vb: &MeshVarBuilder) -> Result<Self> {
        // Cut between heads, so that attention needs no communication even if the heads are uneven.
        let heads = Width::new(args.n_heads, args.head_dim());
        let to_heads = |name: &str| Linear::new(args.dim, heads, false, &vb.pp(name));
        Ok(Self {
            n_heads: args.n_heads,
            head_dim: args.head_dim(),
            causal: args.use_attn_mask,
            wq: to_heads("wq")?,
            wk: to_heads("wk")?,
            wv: to_heads("wv")?,
            wo: Linear::new(heads, args.dim, false, &vb.pp("wo"))?,
            attn_dropout: Dropout::new(args.dropout_p, &vb.pp("attn_dropout")),
            resid_dropout: Dropout::new(args.dropout_p, &vb.pp("resid_dropout")),
            style: vb.module_style()?,
        })
    }

    pub(super) fn forward(&self, x: &DTensor, order: Option<&TokenOrder>, mode: Mode) -> Result<DTensor> {
        let [x] = self.style.inputs([x])?;
        let &[batch, seq_len, dim] = x.dims() else {
            return Err(candle_core::Error::msg(format!(
                "attention input {}: expected [batch, sequence, dim]",
                x.spec()
            ))
            .into());
        };
        let heads = |projection: &Linear| {
            projection.forward(&x)?.reshape((batch, seq_len, self.n_heads, self.head_dim))
        };
        let (q, k, v) = (heads(&self.wq)?, heads(&self.wk)?, heads(&self.wv)?);
        let scale = 1.0 / (self.head_dim as f64).sqrt();
        let mixed = match (self.attn_dropout.is_identity(mode), order) {
            (true, _) => {
                let attention = candle_shard::Attention::default().scale(scale).causal(self.causal);
                attention.order(order.cloned()).of(&q, &k, &v)?
            }
            (false, None) => self.with_dropout(&q, &k, &v, scale, mode)?,
            (false, Some(_)) => {
                let reason =
                    "dropout of tokens in an order of their own: masks are drawn by position; use no dropout";
                return Err(Error::Layout(reason.into()));
            }
        };
        let merged = mixed.reshape((batch, seq_len, dim))?;
        let [y] = self.style.outputs([&self.resid_dropout.forward(&self.wo.forward(&merged)?, mode)?])?;
        Ok(y)
    }

    /// Computes attention with dropout on the attention weights, which needs them in memory.
    fn with_dropout(&self, q: &DTensor, k: &DTensor, v: &DTensor, scale: f64, mode: Mode) -> Result<DTensor> {
        let (q, k, v) = (q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?);
        let scores = q.matmul(&k.t()?)?;
        let weights = match self.causal {
            true => scores.causal_softmax(scale)?,
            false => scores.affine(scale, 0.0)?.softmax_last_dim()?,
        };
        self.attn_dropout.forward(&weights, mode)?.matmul(&v)?.transpose(1, 2)
    }
}

/// Linear dim → 4·dim, GELU, Linear back; or experts, distributed over the mesh axis `ep` and cut over `tp`, if there are
/// such axes.
#[derive(Debug, Clone)]
pub(super) struct FeedForward {
    network: Network,
    resid_dropout: Dropout,
}

#[derive(Debug, Clone)]
enum Network {
    /// `w1` and `w2`.
    Dense(Box<[Linear; 2]>),
    Experts(Box<MoE>),
}

impl FeedForward {
    pub(super) fn new(args: &ModelArgs, vb: &MeshVarBuilder) -> Result<Self> {
        let network = match args.mixture() {
            None => Network::Dense(Box::new([
                Linear::new(args.dim, args.hidden_dim(), true, &vb.pp("w1"))?,
                Linear::new(args.hidden_dim(), args.dim, true, &vb.pp("w2"))?,
            ])),
            Some(config) => {
                let has = |axis: &str| vb.mesh().names().iter().any(|name| name == axis);
                let config = if has("ep") { config.expert_axis("ep") } else { config };
                let config = if has("tp") { config.tensor_axis("tp") } else { config };
                Network::Experts(Box::new(MoE::new(config, vb)?))
            }
        };
        Ok(Self { network, resid_dropout: Dropout::new(args.dropout_p, &vb.pp("resid_dropout")) })
    }

    /// Returns the hidden states, and the auxiliary losses of experts, if there are some.
    pub(super) fn forward(&self, x: &DTensor, mode: Mode) -> Result<(DTensor, Option<DTensor>)> {
        let (made, losses) = match &self.network {
            Network::Dense(layers) => (layers[1].forward(&layers[0].forward(x)?.gelu_erf()?)?, None),
            Network::Experts(layer) => {
                let made = layer.forward(x, mode)?;
                (made.output, made.loss)
            }
        };
        Ok((self.resid_dropout.forward(&made, mode)?, losses))
    }
}
