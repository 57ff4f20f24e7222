//! A BERT encoder for sentence embeddings, cut over ranks by heads and by columns of the feed-forward layers.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Tensor};
use candle_dist::DeviceMesh;
use candle_nn::Activation;
use candle_shard::nn::{Embedding, FusedQkv, Heads, LayerNorm, Linear, MeshVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{AttentionMask, DTensor, Placements, Replicate, Weights, regular};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use wildmatch::WildMatch;

/// The sizes of a `config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct EncoderConfig {
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads.
    pub num_attention_heads: usize,
    /// Rows of the table.
    pub vocab_size: usize,
    /// The longest text.
    pub max_position_embeddings: usize,
    /// Kinds of tokens; all of a sentence are of the first.
    pub type_vocab_size: usize,
    /// What keeps norms from dividing by zero.
    pub layer_norm_eps: f64,
    hidden_act: String,
    model_type: String,
    #[serde(default)]
    position_embedding_type: Option<String>,
    #[serde(default)]
    is_decoder: Option<bool>,
    /// The longest text, where `sentence_bert_config.json` says it.
    #[serde(skip)]
    max_seq_length: Option<usize>,
}

/// The former name of [`EncoderConfig`].
#[deprecated(since = "0.1.0", note = "renamed to EncoderConfig")]
pub type Config = EncoderConfig;

/// Tensors that sentence embeddings do not use.
const UNUSED: [&str; 2] = ["embeddings.position_ids", "pooler.*"];

impl EncoderConfig {
    /// Reads the config of the model in `folder`.
    ///
    /// # Errors
    /// If it is no BERT that this encoder computes; the field is named.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let read =
            || -> Result<Self> { Ok(serde_json::from_str(&regular::read_text(&path, regular::CONFIG)?)?) };
        let mut config = read().with_context(|| format!("{}", path.display()))?;
        let Self { hidden_size, num_attention_heads: heads, .. } = config;
        ensure!(
            config.model_type == "bert",
            "model_type is {:?}, and only \"bert\" is supported",
            config.model_type
        );
        ensure!(
            config.hidden_act == "gelu",
            "hidden_act is {:?}, and only \"gelu\" is supported",
            config.hidden_act
        );
        let positions = config.position_embedding_type.as_deref().unwrap_or("absolute");
        ensure!(
            positions == "absolute",
            "position_embedding_type is {positions:?}, and only \"absolute\" is supported"
        );
        ensure!(
            heads > 0 && hidden_size.is_multiple_of(heads),
            "num_attention_heads {heads} does not divide hidden_size {hidden_size}"
        );
        ensure!(config.is_decoder != Some(true), "is_decoder is true, and only encoders are supported");
        check_pooling(&folder.join(check_modules(folder)?))?;
        config.max_seq_length = check_texts(folder)?;
        Ok(config)
    }

    /// The most tokens of a text.
    pub fn longest(&self) -> usize {
        self.max_seq_length
            .map_or(self.max_position_embeddings, |most| most.min(self.max_position_embeddings))
    }

    fn heads(&self) -> Heads {
        let count = self.num_attention_heads;
        Heads { query: count, key_value: count, dim: self.hidden_size / count }
    }
}

/// Reads a file that may be absent.
fn said_in<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let text = match regular::read_text(path, regular::CONFIG) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.with_context(|| format!("{}", path.display()))?,
    };
    serde_json::from_str(&text).map(Some).with_context(|| format!("{}", path.display()))
}

/// Checks that nothing else comes behind the encoder than a pool and a division by the length, where the files say what does. Returns the
/// folder of the pool.
fn check_modules(folder: &Path) -> Result<String> {
    const KNOWN: [&str; 3] = ["Transformer", "Pooling", "Normalize"];
    let (path, mut pool) = (folder.join("modules.json"), "1_Pooling".to_owned());
    for module in said_in::<Vec<Value>>(&path)?.into_iter().flatten() {
        let kind = module["type"].as_str().and_then(|kind| kind.rsplit('.').next());
        ensure!(
            kind.is_some_and(|kind| KNOWN.contains(&kind)),
            "{}: a module has the type {}, and only {} are supported",
            path.display(),
            module["type"],
            KNOWN.join(", ")
        );
        if kind == Some(KNOWN[1])
            && let Some(path) = module["path"].as_str().filter(|path| !path.is_empty())
        {
            pool = path.to_owned();
        }
    }
    Ok(pool)
}

/// Checks that texts are encoded as they are, where the files say how they are. Returns the most tokens of one.
fn check_texts(folder: &Path) -> Result<Option<usize>> {
    let says = |file: &str, field: &str, is_plain: fn(&Value) -> bool| -> Result<Map<String, Value>> {
        let path = folder.join(file);
        let said: Map<String, Value> = said_in(&path)?.unwrap_or_default();
        let value = said.get(field).unwrap_or(&Value::Null);
        ensure!(is_plain(value), "{}: {field} is {value}, which is not supported", path.display());
        Ok(said)
    };
    says("config_sentence_transformers.json", "default_prompt_name", Value::is_null)?;
    let is_false = |value: &Value| !value.as_bool().unwrap_or_default();
    let said = says("sentence_bert_config.json", "do_lower_case", is_false)?;
    let most = said.get("max_seq_length").and_then(Value::as_u64);
    Ok(most.map(usize::try_from).transpose()?)
}

/// Checks that embeddings are means of the last hidden states, where the files say what they are.
fn check_pooling(folder: &Path) -> Result<()> {
    let path = folder.join("config.json");
    let said: Map<String, Value> = said_in(&path)?.unwrap_or_default();
    let is_other = |(name, value): &(&String, &Value)| match name.as_str() {
        "pooling_mode" => *value != "mean",
        "pooling_mode_mean_tokens" => **value != Value::Bool(true),
        name => name.starts_with("pooling_mode_") && **value != Value::Bool(false),
    };
    match said.iter().find(is_other) {
        None => Ok(()),
        Some((name, value)) => {
            bail!("{}: {name} is {value}, and only means of tokens are supported", path.display())
        }
    }
}

/// Opens the weights of the model in `folder`.
///
/// # Errors
/// If there are tensors that are no part of the encoder: a model with them computes something else.
pub fn weights(folder: &Path) -> Result<Weights> {
    let weights = Weights::open(folder)?;
    let known = |name: &str| {
        let unused = UNUSED.iter().any(|pattern| WildMatch::new(pattern).matches(name));
        unused || name.starts_with("embeddings.") || name.starts_with("encoder.layer.")
    };
    if let Some(other) = weights.names().find(|name| !known(name)) {
        bail!("{}: the tensor {other:?} is no part of a BERT encoder", folder.display());
    }
    Ok(weights)
}

/// The encoder.
#[derive(Debug)]
pub struct Encoder {
    words: Embedding,
    positions: Embedding,
    kinds: Embedding,
    norm: LayerNorm,
    layers: Vec<EncoderLayer>,
    mesh: DeviceMesh,
    longest: usize,
}

#[derive(Debug)]
struct EncoderLayer {
    qkv: FusedQkv,
    mixed: Linear,
    mixed_norm: LayerNorm,
    up: Linear,
    down: Linear,
    down_norm: LayerNorm,
}

impl Encoder {
    /// How the encoder is cut on the mesh axis `axis`: heads and feed-forward columns.
    pub fn plan(axis: &str) -> Plan {
        let whole = RowwiseParallel::default().output(Replicate);
        Plan::new(axis)
            .with("encoder.layer.*.attention.self", ColwiseParallel::default())
            .with("encoder.layer.*.attention.output.dense", whole)
            .with("encoder.layer.*.intermediate.dense", ColwiseParallel::default())
            .with("encoder.layer.*.output.dense", whole)
    }

    /// Builds the encoder with the names that the Hub's files have.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn new(config: &EncoderConfig, vb: &MeshVarBuilder) -> Result<Self> {
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.layer_norm_eps);
        let tables = vb.pp("embeddings");
        let table = |rows: usize, name: &str| Embedding::new(rows, hidden, 1.0, &tables.pp(name));
        let layer = |i: usize| -> Result<EncoderLayer> {
            let vb = vb.pp("encoder.layer").pp(i);
            let (attention, output) = (vb.pp("attention"), vb.pp("output"));
            let names = ["query", "key", "value"];
            let qkv = FusedQkv::with_names(hidden, config.heads(), 1, true, names, &attention.pp("self"))?;
            Ok(EncoderLayer {
                mixed: Linear::new(qkv.width(), hidden, true, &attention.pp("output.dense"))?,
                qkv,
                mixed_norm: LayerNorm::new(hidden, eps, &attention.pp("output.LayerNorm"))?,
                up: Linear::new(hidden, inner, true, &vb.pp("intermediate.dense"))?,
                down: Linear::new(inner, hidden, true, &output.pp("dense"))?,
                down_norm: LayerNorm::new(hidden, eps, &output.pp("LayerNorm"))?,
            })
        };
        Ok(Self {
            words: table(config.vocab_size, "word_embeddings")?,
            positions: table(config.max_position_embeddings, "position_embeddings")?,
            kinds: table(config.type_vocab_size, "token_type_embeddings")?,
            norm: LayerNorm::new(hidden, eps, &tables.pp("LayerNorm"))?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            mesh: vb.mesh().clone(),
            longest: config.longest(),
        })
    }

    /// Returns the embeddings `[texts, hidden]` of texts, of length 1: the mean of the last hidden states of each text, in f32 where the
    /// model has 16 bits.
    ///
    /// # Errors
    /// If there are no texts, one has no tokens, or more than the model takes.
    pub fn embed(&self, texts: &[Vec<u32>]) -> Result<Tensor> {
        let width = texts.iter().map(Vec::len).max().context("there are no texts")?;
        ensure!(texts.iter().all(|text| !text.is_empty()), "a text has no tokens");
        let longest = self.longest;
        ensure!(width <= longest, "a text has {width} tokens, and the model takes {longest}; shorten it");
        let places = || texts.iter().flat_map(|text| (0..width).map(move |i| text.get(i).copied()));
        let ids: Vec<u32> = places().map(Option::unwrap_or_default).collect();
        let hidden: Vec<f32> = places().map(|id| id.map_or(f32::NEG_INFINITY, |_| 0.0)).collect();
        let device = self.words.weight().device().clone();
        let everywhere = Placements::from_elem(Replicate, self.mesh.ndim());
        let replicated = |tensor: Tensor| {
            let dims = tensor.dims().to_vec();
            DTensor::from_local(tensor, &self.mesh, &everywhere, dims)
        };
        let ids = replicated(Tensor::from_vec(ids, (texts.len(), width), &device)?)?;
        let mask = Tensor::from_vec(hidden, (texts.len(), 1, 1, width), &device)?;
        let mask = replicated(mask.to_dtype(self.words.weight().dtype())?)?;
        let places = replicated(Tensor::arange(0, width as u32, &device)?.unsqueeze(0)?)?;
        let kinds = replicated(Tensor::zeros((1, width), DType::U32, &device)?)?;
        let h = self
            .words
            .forward(&ids)?
            .add(&self.positions.forward(&places)?)?
            .add(&self.kinds.forward(&kinds)?)?;
        let mut h = self.norm.forward(&h)?;
        for layer in &self.layers {
            h = layer.forward(&h, &mask)?;
        }
        // Sums over tokens in 16 bits would lose most of them.
        let h = h.full_tensor()?;
        let h = if h.dtype() == DType::F64 { h } else { h.to_dtype(DType::F32)? };
        let means = texts.iter().enumerate().map(|(i, text)| h.get(i)?.narrow(0, 0, text.len())?.mean(0));
        let means = Tensor::stack(&means.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
        Ok(means.broadcast_div(&means.sqr()?.sum_keepdim(1)?.sqrt()?)?)
    }
}

impl EncoderLayer {
    fn forward(&self, x: &DTensor, mask: &DTensor) -> Result<DTensor> {
        let [q, k, v] = self.qkv.forward(x)?;
        let mixed = q.scaled_dot_product_attention(&k, &v, AttentionMask::Additive(mask), None)?;
        let mixed = self.mixed.forward(&mixed.transpose(1, 2)?.flatten_from(2)?)?;
        let x = self.mixed_norm.forward(&mixed.add(x)?)?;
        let down = self.down.forward(&self.up.forward(&x)?.activation(Activation::Gelu)?)?;
        Ok(self.down_norm.forward(&down.add(&x)?)?)
    }
}
