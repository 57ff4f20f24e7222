//! What a model's `config.json` says.

mod expert_names;
pub mod experts;
mod families;
mod fields;
mod generation;
pub mod mamba;
pub mod mixers;
pub mod parts;
mod rope;
mod scaling;
mod stored;
pub(super) mod tensors;
pub(super) mod unknown;
pub(super) mod wrapper;

use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_shard::Weights;
use candle_shard::nn::Heads;
use candle_shard::regular;
use serde::Serialize;
use serde_json::{Map, Value, json};

use fields::Fields;
pub use generation::GenerationConfig;
use parts::Parts;
pub use scaling::RopeScaling;
pub use stored::ExpertStack;
use unknown::UnknownFields;

/// The largest size, and the most layers: whatever the file says, what follows from it is work of bounded length.
const MOST: usize = 1 << 30;
pub(super) const MOST_LAYERS: usize = 4096;

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
    /// How the weights of a folder are quantized: `quantization_config`, if there is one.
    #[serde(skip)]
    pub quantization: Option<Value>,
    /// Whether the files have parts for images too, which are left out.
    #[serde(skip)]
    pub has_images: bool,
    /// The family.
    #[serde(skip)]
    pub family: &'static str,
    /// What the file says that changes nothing here, a sentence each.
    #[serde(skip)]
    pub notes: Vec<String>,
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
        let said = || {
            format!(
                "{name} is {}; expected the number of a token, or a list of them",
                fields::shortened(value)
            )
        };
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

/// Checks that the weights are quantized in a way that can be read, if they are.
fn quantization(field: Option<&Value>) -> Result<Option<Value>> {
    let Some(field) = field.filter(|field| !field.is_null()) else { return Ok(None) };
    Weights::check_quantization(field)?;
    Ok(Some(field.clone()))
}

/// Returns the `quantization_config` that ModelOpt writes into a file of its own.
fn of_modelopt(folder: &Path) -> Result<Option<Value>> {
    let name = "hf_quant_config.json";
    let text = match regular::read_text(folder.join(name), regular::CONFIG) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.with_context(|| name)?,
    };
    let said: Value = serde_json::from_str(&text).context(name)?;
    let algo = said["quantization"]["quant_algo"].clone();
    Ok((!algo.is_null()).then(|| json!({"quant_method": "modelopt", "quant_algo": algo})))
}

impl Config {
    /// The config of the model in `folder`, without what the fields `ignored` say.
    ///
    /// # Errors
    /// If there is no such file, or it is no config of a model that can be run: the file and the field are named.
    pub fn read(folder: &Path, ignored: &[String]) -> Result<Self> {
        let path = folder.join("config.json");
        let parsed = || {
            let text = regular::read_text(&path, regular::CONFIG)?;
            let mut fields: Map<String, Value> = serde_json::from_str(&fields::without_infinity(&text))?;
            if fields.get("quantization_config").is_none_or(Value::is_null) {
                fields.extend(of_modelopt(folder)?.map(|value| ("quantization_config".to_owned(), value)));
            }
            Self::from_fields(fields, ignored)
        };
        parsed().with_context(|| format!("{}", path.display()))
    }

    /// Parses a config and checks that all of its fields are known, or change nothing.
    ///
    /// # Errors
    /// If it is of another kind of model, lacks something, or says something that is not known: the field is named.
    pub fn parse(text: &str) -> Result<Self> {
        Self::from_fields(serde_json::from_str(&fields::without_infinity(text))?, &[])
    }

    /// Reads the fields of a config, and checks that all but those `ignored` are known, or change nothing.
    ///
    /// # Errors
    /// Those of [`parse`](Self::parse).
    pub fn from_fields(mut fields: Map<String, Value>, ignored: &[String]) -> Result<Self> {
        // MLX says it twice, or by its own name alone.
        let [own, common] = ["quantization", "quantization_config"];
        let is_repeated = match (fields.get(own), fields.get(common)) {
            (Some(said), Some(other)) => other.is_null() || said == other,
            (said, None) => said.is_some(),
            _ => false,
        };
        if is_repeated && let Some(said) = fields.remove(own) {
            fields.insert(common.into(), said);
        }
        Self::with_unknown(UnknownFields::of(&str::to_owned), fields, ignored)
    }

    /// Like [`from_fields`](Self::from_fields), for a file whose other fields `unknown` has judged.
    ///
    /// # Errors
    /// Those of [`parse`](Self::parse).
    pub(super) fn with_unknown(
        unknown: UnknownFields<'_>,
        fields: Map<String, Value>,
        ignored: &[String],
    ) -> Result<Self> {
        let (fields, has_images) = wrapper::unwrapped(fields)?;
        let fields = families::plain(fields)?;
        let mut fields = Fields::new(fields, unknown, ignored)?;
        let ((rope_theta, rope_scaling), notes) = rope::read(&fields)?;
        fields.notes.extend(notes);
        fields.notes.extend(has_images.then(|| "the parts for images are left out".to_owned()));
        let ids = |name: &str| fields.get(name).map_or(Ok(None), |value| TokenIds::read(name, value));
        let absent = fields.family.absent;
        let num_hidden_layers = fields.size("num_hidden_layers", MOST_LAYERS)?;
        let parts = Parts {
            rotary_share: rope::share(&fields)?,
            ..(fields.family.parts)(&fields, num_hidden_layers)?
        };
        // A head's share of latent attention, whatever the field says.
        let head_dim = match parts.latent() {
            Some(widths) => Some(widths.own + widths.rotary),
            None => fields.optional_size("head_dim", MOST)?.or(absent.head_dim),
        };
        // Mixtures without other layers may leave out the width of these.
        let experts = (0..num_hidden_layers).map(|layer| parts.experts(layer)).collect::<Option<Vec<_>>>();
        let intermediate_size = match experts.as_deref() {
            Some([experts, ..]) => fields.optional_size("intermediate_size", MOST)?.unwrap_or(experts.hidden),
            _ => fields.size("intermediate_size", MOST)?,
        };
        let config = Self {
            hidden_size: fields.size("hidden_size", MOST)?,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads: fields.size("num_attention_heads", MOST)?,
            num_key_value_heads: fields.optional_size("num_key_value_heads", MOST)?,
            head_dim,
            vocab_size: fields.size("vocab_size", MOST)?,
            max_position_embeddings: fields.size("max_position_embeddings", MOST)?,
            rms_norm_eps: fields.positive(fields.family.eps())?,
            rope_theta,
            rope_scaling,
            tie_word_embeddings: fields.switch_or("tie_word_embeddings", absent.tied)?,
            bos_token_id: ids("bos_token_id")?.and_then(|ids| ids.ids().first().copied()),
            eos_token_id: ids("eos_token_id")?,
            parts,
            quantization: quantization(fields.get("quantization_config"))?,
            has_images,
            family: fields.family.model_type,
            notes: fields.notes,
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
        let others = self.parts.full_heads.map_or(key_value, |heads| heads.key_value);
        ensure!(
            query.is_multiple_of(others),
            "num_global_key_value_heads {others} does not divide num_attention_heads {query}"
        );
        ensure!(
            self.parts.latent().is_none() || query == key_value,
            "num_key_value_heads is {key_value}, and latent attention has as many as num_attention_heads, which is {query}"
        );
        let width = self.rotary_width();
        ensure!(
            width > 0 && width.is_multiple_of(2),
            "heads are {dim} wide, and {width} of it have rotary positions; they need an even number"
        );
        let local = self.parts.local_rope.as_ref().and_then(|(_, scaling)| scaling.as_ref());
        let of_windows = self.local_rotary_width();
        ensure!(
            of_windows > 0 && of_windows.is_multiple_of(2),
            "heads of layers with a window are {dim} wide, and {of_windows} of it have rotary positions; they need an even number"
        );
        let rows = self.parts.layer_embeddings.map_or(self.vocab_size, |sizes| sizes.tokens);
        ensure!(
            rows >= self.vocab_size,
            "vocab_size_per_layer_input is {rows}, and layers have embeddings of all {} tokens",
            self.vocab_size
        );
        self.rope_scaling.iter().try_for_each(|scaling| scaling.check(width))?;
        local.iter().try_for_each(|scaling| scaling.check(of_windows))
    }

    /// The elements of a head that have rotary positions: its first ones, or the last ones of latent attention.
    pub(super) fn rotary_width(&self) -> usize {
        let dim = self.parts.full_heads.unwrap_or(self.heads()).dim;
        let share = (dim as f64 * self.parts.rotary_share) as usize;
        self.parts.latent().map_or(share, |widths| widths.rotary)
    }

    /// The same of layers with a window.
    pub(super) fn local_rotary_width(&self) -> usize {
        match self.parts.full_heads {
            Some(_) => (self.heads().dim as f64 * self.parts.rotary_share) as usize,
            None => self.rotary_width(),
        }
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

    /// The width inside the feed-forward network of a layer that has one for all tokens.
    pub fn inner_of(&self, layer: usize) -> usize {
        let is_wide = self.parts.double_wide && self.parts.key_source(layer).is_some();
        if is_wide { 2 * self.intermediate_size } else { self.intermediate_size }
    }

    /// The heads of attention of a layer.
    pub fn heads_of(&self, layer: usize) -> Heads {
        let is_full = self.parts.window(layer).is_none();
        self.parts.full_heads.filter(|_| is_full).unwrap_or(self.heads())
    }

    /// The heads of attention; where layers without a window have others, those of layers with one.
    pub fn heads(&self) -> Heads {
        let query = self.num_attention_heads;
        let dim = self.head_dim.unwrap_or(self.hidden_size.checked_div(query).unwrap_or(0));
        Heads { query, key_value: self.num_key_value_heads.unwrap_or(query), dim }
    }

    /// The tokens that end a text.
    pub fn ends(&self) -> &[u32] {
        self.eos_token_id.as_ref().map_or(&[], TokenIds::ids)
    }
}
