//! The hyper-parameters that every form of the toy Transformer is built from.

/// What the toy Transformer looks like; the defaults are those of PyTorch's model of the same name.
///
/// ```
/// use test_utils::model_args::ModelArgs;
///
/// let args = ModelArgs { n_layers: 4, dropout_p: 0.0, ..ModelArgs::default() };
/// assert_eq!((args.head_dim(), args.hidden_dim()), (4, 64));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ModelArgs {
    /// Number of Transformer blocks.
    pub n_layers: usize,
    /// Number of token ids.
    pub vocab_size: usize,
    /// The longest sequence that has position embeddings.
    pub max_seq_len: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of attention heads; divides `dim`.
    pub n_heads: usize,
    /// Probability that dropout zeroes an element, in `[0, 1)`.
    pub dropout_p: f64,
    /// Whether a position attends to itself and its past only.
    pub use_attn_mask: bool,
    /// Whether the output layer shares the token embedding's weight.
    pub weight_tying: bool,
    /// Whether a block's activations are recomputed in the backward pass. This changes memory and time, never a number.
    pub checkpoint_activations: bool,
    /// Standard deviation of the initial embeddings; `None` is 1, PyTorch's default.
    pub init_stdev: Option<f64>,
    /// Seed of every random stream: initialization and dropout.
    pub seed: u64,
}

impl Default for ModelArgs {
    fn default() -> Self {
        Self {
            n_layers: 2,
            vocab_size: 8,
            max_seq_len: 16,
            dim: 16,
            n_heads: 4,
            dropout_p: 0.1,
            use_attn_mask: true,
            weight_tying: true,
            checkpoint_activations: false,
            init_stdev: None,
            seed: 0,
        }
    }
}

impl ModelArgs {
    /// Width of one attention head.
    pub fn head_dim(&self) -> usize {
        self.dim / self.n_heads
    }

    /// Width between the two layers of a feed-forward network.
    pub fn hidden_dim(&self) -> usize {
        4 * self.dim
    }
}
