//! What a model's `config.json` says.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_shard::nn::Heads;
use serde::{Deserialize, Serialize};

/// The sizes of a Llama, by the names that the Hub's files have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads, as many as query heads if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_key_value_heads: Option<usize>,
    /// Width of a head, `hidden_size / num_attention_heads` if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Tokens.
    pub vocab_size: usize,
    /// The longest sequence.
    pub max_position_embeddings: usize,
    /// What keeps norms from dividing by zero.
    pub rms_norm_eps: f64,
    /// The base of the wavelengths of positions.
    #[serde(default = "ten_thousand")]
    pub rope_theta: f64,
    /// How positions are stretched, if they are.
    #[serde(default)]
    pub rope_scaling: Option<RopeScaling>,
    /// Whether the output layer is the table of the input.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Whether the projections of attention have biases; only `false` is known here.
    #[serde(default)]
    pub attention_bias: bool,
    /// The token that starts a text.
    #[serde(default)]
    pub bos_token_id: Option<u32>,
    /// Those that end one.
    #[serde(default)]
    pub eos_token_id: Option<TokenIds>,
}

fn ten_thousand() -> f64 {
    10_000.0
}

/// One token or several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TokenIds {
    /// One.
    One(u32),
    /// Several.
    Many(Vec<u32>),
}

/// How the positions of a longer context are brought into the range that was learnt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeScaling {
    /// The kind: `llama3`, `linear` or `default`.
    #[serde(alias = "type", default = "default_kind")]
    pub rope_type: String,
    /// By how much wavelengths are stretched.
    #[serde(default = "one")]
    pub factor: f64,
    /// Llama 3: wavelengths longer than the learnt context divided by this are stretched by the whole factor.
    #[serde(default = "one")]
    pub low_freq_factor: f64,
    /// Llama 3: those shorter than the learnt context divided by this are not stretched.
    #[serde(default = "one")]
    pub high_freq_factor: f64,
    /// Llama 3: the learnt context.
    #[serde(default)]
    pub original_max_position_embeddings: usize,
}

fn default_kind() -> String {
    "default".into()
}

fn one() -> f64 {
    1.0
}

impl Config {
    /// The config of the model in `folder`.
    ///
    /// # Errors
    /// If there is no such file, or it is no config of a Llama that can be run; the file is named.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        let config: Self = serde_json::from_str(&text).with_context(|| format!("{}", path.display()))?;
        config.check().with_context(|| format!("{}", path.display()))?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.heads().key_value),
            ("head_dim", self.heads().dim),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        for (name, size) in sizes {
            ensure!((1..=1 << 30).contains(&size), "{name} is {size}; want a size from 1 to {}", 1 << 30);
        }
        let Heads { query, key_value, dim } = self.heads();
        ensure!(
            self.head_dim.is_some() || self.hidden_size.is_multiple_of(query),
            "num_attention_heads {query} does not divide hidden_size {}",
            self.hidden_size
        );
        ensure!(
            query.is_multiple_of(key_value),
            "num_key_value_heads {key_value} does not divide num_attention_heads {query}"
        );
        ensure!(dim.is_multiple_of(2), "heads are {dim} wide; rotary positions want an even number");
        ensure!(self.rope_theta.is_finite() && self.rope_theta > 0.0, "rope_theta is {}", self.rope_theta);
        ensure!(!self.attention_bias, "attention_bias is true; models with biases in attention are not supported");
        let Some(scaling) = &self.rope_scaling else { return Ok(()) };
        let RopeScaling { rope_type, factor, low_freq_factor: low, high_freq_factor: high, .. } = scaling;
        ensure!(
            ["llama3", "linear", "default"].contains(&rope_type.as_str()),
            "rope_scaling of type {rope_type:?} is not known; llama3, linear and default are"
        );
        ensure!(factor.is_finite() && *factor > 0.0, "the factor of rope_scaling is {factor}");
        if rope_type == "llama3" {
            let learnt = scaling.original_max_position_embeddings;
            ensure!(
                learnt > 0 && 0.0 < *low && low < high && high.is_finite(),
                "rope_scaling {scaling:?} has no range"
            );
        }
        Ok(())
    }

    /// The heads of attention.
    pub fn heads(&self) -> Heads {
        let query = self.num_attention_heads;
        let dim = self.head_dim.unwrap_or(self.hidden_size.checked_div(query).unwrap_or(0));
        Heads { query, key_value: self.num_key_value_heads.unwrap_or(query), dim }
    }

    /// The tokens that end a text.
    pub fn ends(&self) -> &[u32] {
        match &self.eos_token_id {
            Some(TokenIds::One(id)) => std::slice::from_ref(id),
            Some(TokenIds::Many(ids)) => ids,
            None => &[],
        }
    }

    /// The name and shape of every tensor of the model.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let Heads { query, key_value, dim } = self.heads();
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, hidden]),
            ("model.norm.weight".to_owned(), vec![hidden]),
        ];
        if !self.tie_word_embeddings {
            tensors.push(("lm_head.weight".to_owned(), vec![self.vocab_size, hidden]));
        }
        for layer in 0..self.num_hidden_layers {
            let named = [
                ("self_attn.q_proj", vec![query * dim, hidden]),
                ("self_attn.k_proj", vec![key_value * dim, hidden]),
                ("self_attn.v_proj", vec![key_value * dim, hidden]),
                ("self_attn.o_proj", vec![hidden, query * dim]),
                ("mlp.gate_proj", vec![inner, hidden]),
                ("mlp.up_proj", vec![inner, hidden]),
                ("mlp.down_proj", vec![hidden, inner]),
                ("input_layernorm", vec![hidden]),
                ("post_attention_layernorm", vec![hidden]),
            ];
            tensors.extend(named.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
        }
        tensors
    }

    /// The parameters of the model.
    pub fn parameters(&self) -> usize {
        self.tensors().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }
}
