//! The hyperparameters of the toy Transformer in all its forms.

use candle_shard::nn::MoEConfig;

/// The hyperparameters of the toy Transformer. The defaults are those of PyTorch's model with the same name.
///
/// ```
/// use test_utils::model_args::ModelArgs;
///
/// let args = ModelArgs { n_layers: 4, dropout_p: 0.0, ..ModelArgs::default() };
/// assert_eq!((args.head_dim(), args.hidden_dim()), (4, 64));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ModelArgs {
    /// The number of Transformer blocks.
    pub n_layers: usize,
    /// The number of token ids.
    pub vocab_size: usize,
    /// The maximum sequence length, for which there are position embeddings.
    pub max_seq_len: usize,
    /// The width of the residual stream.
    pub dim: usize,
    /// The number of attention heads; must divide `dim`.
    pub n_heads: usize,
    /// The probability that dropout zeroes an element, in `[0, 1)`.
    pub dropout_p: f64,
    /// Whether a position attends only to itself and earlier positions.
    pub use_attn_mask: bool,
    /// Whether the output layer shares the token embedding's weight.
    pub weight_tying: bool,
    /// Whether the backward pass recomputes a block's activations. This changes memory and time, but not results.
    pub recompute_activations: bool,
    /// The standard deviation of the initial embeddings; `None` means 1, PyTorch's default.
    pub init_stdev: Option<f64>,
    /// The number of experts in each feed-forward network; 0 for a network without experts.
    pub experts: usize,
    /// The number of experts that each token uses, if there are experts.
    pub top_k: usize,
    /// The factor of the loss that balances the choice of experts; 0 for none.
    pub balance_weight: f64,
    /// The factor of the loss that keeps a router's logits small; 0 for none.
    pub z_weight: f64,
    /// The seed of every random stream: initialization and dropout.
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
            recompute_activations: false,
            init_stdev: None,
            experts: 0,
            top_k: 2,
            balance_weight: 0.0,
            z_weight: 0.0,
            seed: 0,
        }
    }
}

impl ModelArgs {
    /// Returns the width of one attention head.
    pub fn head_dim(&self) -> usize {
        self.dim / self.n_heads
    }

    /// Returns the width between the two layers of a feed-forward network.
    pub fn hidden_dim(&self) -> usize {
        4 * self.dim
    }

    /// Returns the options of the experts, if there are some. Each is half as wide as a network without experts.
    pub fn mixture(&self) -> Option<MoEConfig> {
        let config = MoEConfig::new(self.dim, self.hidden_dim() / 2, self.experts, self.top_k);
        let config = config.normalize(true).balance_weight(self.balance_weight).z_weight(self.z_weight);
        (self.experts > 0).then_some(config)
    }

    /// Returns whether experts add auxiliary losses to the loss of the model.
    pub fn has_auxiliary_losses(&self) -> bool {
        self.experts > 0 && (self.balance_weight != 0.0 || self.z_weight != 0.0)
    }
}
