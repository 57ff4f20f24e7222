//! What a model's `config.json` says.

mod families;
mod fields;
mod generation;
pub mod parts;
mod rope;
mod scaling;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_shard::nn::Heads;
use serde::Serialize;
use serde_json::{Map, Value};

use fields::Fields;
pub use generation::Generation;
use parts::{Parts, QkNorm};
pub use scaling::RopeScaling;

/// The largest size, and the most layers: whatever the file says, what follows from it is work of bounded length.
const MOST: usize = 1 << 30;
const MOST_LAYERS: usize = 4096;

/// The sizes and parts of a decoder, by the names that the Hub's files have.
///
/// That of a Llama is written as transformers 4 writes it, which later versions read too.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "model_type", rename = "llama")]
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_key_value_heads: Option<usize>,
    /// Width of a head, `hidden_size / num_attention_heads` if not said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Tokens.
    pub vocab_size: usize,
    /// The longest sequence.
    pub max_position_embeddings: usize,
    /// What keeps norms from dividing by zero.
    pub rms_norm_eps: f64,
    /// The base of the wavelengths of positions.
    pub rope_theta: f64,
    /// How positions are stretched, if they are.
    pub rope_scaling: Option<RopeScaling>,
    /// Whether the output layer is the table of the input.
    pub tie_word_embeddings: bool,
    /// The token that starts a text.
    pub bos_token_id: Option<u32>,
    /// Those that end one.
    pub eos_token_id: Option<TokenIds>,
    /// What the family computes.
    #[serde(skip)]
    pub parts: Parts,
    /// The family.
    #[serde(skip)]
    pub family: &'static str,
}

/// One token or several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum TokenIds {
    /// One.
    One(u32),
    /// Several.
    Many(Vec<u32>),
}

impl TokenIds {
    /// Those of a field, if it is not null.
    fn read(name: &str, value: &Value) -> Result<Option<Self>> {
        let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = match value {
            Value::Null => return Ok(None),
            Value::Array(ids) => ids.iter().map(one).collect::<Option<_>>().map(Self::Many),
            _ => one(value).map(Self::One),
        };
        let said =
            || format!("{name} is {}; expected the number of a token, or a list of them", fields::shortened(value));
        ids.map(Some).with_context(said)
    }

    /// All of them.
    pub fn ids(&self) -> &[u32] {
        match self {
            Self::One(id) => std::slice::from_ref(id),
            Self::Many(ids) => ids,
        }
    }
}

impl Config {
    /// The config of the model in `folder`.
    ///
    /// # Errors
    /// If there is no such file, or it is no config of a model that can be run: the file and the field are named.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let parsed = || Self::parse(&fs::read_to_string(&path)?);
        parsed().with_context(|| format!("{}", path.display()))
    }

    /// Parses a config and checks that all of its fields are known.
    ///
    /// # Errors
    /// If it is of another kind of model, lacks something, or says something that is not known: the field is named.
    pub fn parse(text: &str) -> Result<Self> {
        Self::from_fields(serde_json::from_str(text)?)
    }

    /// Reads the fields of a config, and checks that all of them are known.
    ///
    /// # Errors
    /// Those of [`parse`](Self::parse).
    pub fn from_fields(fields: Map<String, Value>) -> Result<Self> {
        let fields = Fields::new(fields)?;
        let (rope_theta, rope_scaling) = rope::read(&fields)?;
        let ids = |name: &str| fields.get(name).map_or(Ok(None), |value| TokenIds::read(name, value));
        let absent = fields.family.absent;
        let num_hidden_layers = fields.size("num_hidden_layers", MOST_LAYERS)?;
        let config = Self {
            hidden_size: fields.size("hidden_size", MOST)?,
            intermediate_size: fields.size("intermediate_size", MOST)?,
            num_hidden_layers,
            num_attention_heads: fields.size("num_attention_heads", MOST)?,
            num_key_value_heads: fields.optional_size("num_key_value_heads", MOST)?,
            head_dim: fields.optional_size("head_dim", MOST)?.or(absent.head_dim),
            vocab_size: fields.size("vocab_size", MOST)?,
            max_position_embeddings: fields.size("max_position_embeddings", MOST)?,
            rms_norm_eps: fields.positive("rms_norm_eps")?,
            rope_theta,
            rope_scaling,
            tie_word_embeddings: fields.switch_or("tie_word_embeddings", absent.tied)?,
            bos_token_id: ids("bos_token_id")?.and_then(|ids| ids.ids().first().copied()),
            eos_token_id: ids("eos_token_id")?,
            parts: Parts { rotary_share: rope::share(&fields)?, ..(fields.family.parts)(&fields, num_hidden_layers)? },
            family: fields.family.model_type,
        };
        config.check()?;
        Ok(config)
    }

    pub(super) fn check(&self) -> Result<()> {
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
        let width = self.rotary_width();
        ensure!(
            width > 0 && width.is_multiple_of(2),
            "heads are {dim} wide, and {width} of it have rotary positions; they need an even number"
        );
        let local = self.parts.local_rope.as_ref().and_then(|(_, scaling)| scaling.as_ref());
        self.rope_scaling.iter().chain(local).try_for_each(|scaling| scaling.check(width))
    }

    /// The elements of a head that have rotary positions: its first ones.
    pub(super) fn rotary_width(&self) -> usize {
        (self.heads().dim as f64 * self.parts.rotary_share) as usize
    }

    /// The longest sequence: positions that are scaled by its length go beyond what was learned.
    pub fn longest(&self) -> usize {
        match &self.rope_scaling {
            Some(RopeScaling::Dynamic { factor, learned }) => (*learned as f64 * factor.max(1.0)) as usize,
            _ => self.max_position_embeddings,
        }
    }

    /// Returns whether the positions of `read` tokens are turned otherwise in a sequence of `length` tokens.
    pub(super) fn turns_anew(&self, read: usize, length: usize) -> bool {
        let local = self.parts.local_rope.as_ref().and_then(|(_, scaling)| scaling.as_ref());
        let mut scalings = self.rope_scaling.iter().chain(local).filter_map(RopeScaling::turns_anew_after);
        scalings.any(|learned| (1..=learned).contains(&read) && length > learned)
    }

    /// Returns whether all positions of a prompt of this length are turned by its length.
    pub(super) fn turns_by_length(&self, length: usize) -> bool {
        matches!(self.rope_scaling, Some(RopeScaling::Dynamic { learned, .. }) if length > learned)
    }

    /// The heads of attention.
    pub fn heads(&self) -> Heads {
        let query = self.num_attention_heads;
        let dim = self.head_dim.unwrap_or(self.hidden_size.checked_div(query).unwrap_or(0));
        Heads { query, key_value: self.num_key_value_heads.unwrap_or(query), dim }
    }

    /// The tokens that end a text.
    pub fn ends(&self) -> &[u32] {
        self.eos_token_id.as_ref().map_or(&[], TokenIds::ids)
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
        let Parts { qkv_bias, output_bias, mlp_bias, qk_norm, norms, .. } = self.parts;
        let projections = [
            ("self_attn.q_proj", query * dim, hidden, qkv_bias),
            ("self_attn.k_proj", key_value * dim, hidden, qkv_bias),
            ("self_attn.v_proj", key_value * dim, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, query * dim, output_bias),
            ("mlp.gate_proj", inner, hidden, mlp_bias),
            ("mlp.up_proj", inner, hidden, mlp_bias),
            ("mlp.down_proj", hidden, inner, mlp_bias),
        ];
        let heads = match qk_norm {
            QkNorm::None => None,
            QkNorm::Head => Some([dim, dim]),
            QkNorm::All => Some([query * dim, key_value * dim]),
        };
        for layer in 0..self.num_hidden_layers {
            let named = |name: &str, parameter: &str| format!("model.layers.{layer}.{name}.{parameter}");
            for (name, rows, columns, has_bias) in projections {
                tensors.push((named(name, "weight"), vec![rows, columns]));
                tensors.extend(has_bias.then(|| (named(name, "bias"), vec![rows])));
            }
            let norms = norms.names().into_iter().flatten().map(|name| (named(name, "weight"), vec![hidden]));
            tensors.extend(norms);
            if let Some([query, key]) = heads {
                tensors.push((named("self_attn.q_norm", "weight"), vec![query]));
                tensors.push((named("self_attn.k_norm", "weight"), vec![key]));
            }
        }
        tensors
    }

    /// The tensors that files of some families have in one: the name of each, and the names and rows of its parts.
    pub fn fused(&self) -> Vec<(String, Vec<(String, usize)>)> {
        let layers = if self.parts.fused { self.num_hidden_layers } else { 0 };
        let Heads { query, key_value, dim } = self.heads();
        let of_layer = |layer: usize| {
            let name = |name: &str| format!("model.layers.{layer}.{name}.weight");
            let attention = [("q", query), ("k", key_value), ("v", key_value)];
            let attention = attention.map(|(part, heads)| (name(&format!("self_attn.{part}_proj")), heads * dim));
            let gate = ["gate", "up"].map(|part| (name(&format!("mlp.{part}_proj")), self.intermediate_size));
            [(name("self_attn.qkv_proj"), attention.to_vec()), (name("mlp.gate_up_proj"), gate.to_vec())]
        };
        (0..layers).flat_map(of_layer).collect()
    }

    /// The parameters of the model.
    pub fn parameters(&self) -> usize {
        self.tensors().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }
}
