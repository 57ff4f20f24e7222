//! Writing on from a prompt.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_dist::RankContext;
use candle_pipe::Layout;
use candle_shard::nn::ShardedVarBuilder;

use serde::{Deserialize, Serialize};

use super::cache::Cache;
use super::config::Config;
use super::files::Files;
use super::model::Decoder;
use super::sample::{Sampler, Sampling};
use super::staged::StagedDecoder;
use super::tokens;

/// What to write, and how.
#[derive(Clone, Debug)]
pub struct Task {
    /// The tokens to go on from.
    pub prompt: Vec<u32>,
    /// The most tokens to write.
    pub most: usize,
    /// How they are chosen.
    pub sampling: Sampling,
    /// What parameters are held and computed in.
    pub dtype: DType,
    /// Which layers make a stage, if they are not to cost about equally much.
    pub layout: Option<Layout>,
    /// Whether quantized weights are held as floats.
    pub dequantize: bool,
    /// What keys and values are kept in, if not in the dtype of the computation.
    pub cache: Option<DType>,
}

impl Task {
    /// Checks that a model of this config can do it.
    ///
    /// # Errors
    /// If the prompt is empty, longer than the model's longest sequence, or has tokens that the model does not know.
    pub fn check(&self, config: &Config) -> Result<()> {
        let (tokens, longest) = (self.prompt.len(), config.max_position_embeddings);
        ensure!(tokens > 0, "the prompt has no tokens; give some text to go on from");
        ensure!(tokens < longest, "the prompt has {tokens} tokens, and the model takes {longest}; shorten it");
        tokens::check(&self.prompt, config.vocab_size)
    }
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stop {
    /// The model gave a token that ends texts.
    End,
    /// There are as many tokens as were asked for.
    Length,
    /// The model takes no longer sequences.
    Context,
    /// A text came that ends what is written.
    Text,
}

/// What a rank did.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Written {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Why there are no more.
    pub stop: Stop,
    /// The seconds in which this rank's part of the model was read.
    pub load: f64,
    /// The seconds from there to the first token.
    pub first: f64,
    /// The seconds from there to the last.
    pub rest: f64,
    /// The parameters that this rank holds as floats.
    pub parameters: usize,
    /// The bytes of all weights that this rank holds.
    pub bytes: usize,
    /// The tokens with the largest logits at the end of the prompt, and these.
    pub logits_top: Vec<(u32, f32)>,
}

/// A model that goes on from what it was given.
enum Model {
    /// All layers on each rank.
    Whole(Box<Decoder>, Cache),
    /// Some of them.
    Staged(Box<StagedDecoder>),
}

impl Model {
    /// The logits `[vocabulary]` of what follows these tokens, on the device that has the parameters.
    fn next(&mut self, tokens: &[u32], device: &Device) -> Result<Tensor> {
        let tokens = Tensor::from_slice(tokens, (1, tokens.len()), device)?;
        let logits = match self {
            Self::Whole(model, cache) => model.next(&tokens, cache)?,
            Self::Staged(model) => model.next(&tokens)?,
        };
        Ok(logits.squeeze(0)?)
    }
}

/// Writes on from the prompt, on all ranks in `stages` stages, and shows to `show` that the model is read, and then each
/// token, until it returns false.
///
/// Every rank calls it.
///
/// # Errors
/// If the stages do not divide the ranks, or there are more than the model can be cut into; if the model's logits are no
/// numbers; those of the model and of `show`.
pub fn generate(
    ctx: &RankContext,
    stages: usize,
    files: &Files,
    task: &Task,
    mut show: impl FnMut(Option<u32>) -> Result<bool>,
) -> Result<Written> {
    let Files { config, weights, ends, .. } = files;
    let mut config = config.clone();
    // The last stage reads the output layer by itself where files allow that.
    config.tie_word_embeddings &= stages == 1 || !files.has_head();
    let config = &config;
    let ranks = ctx.world_size();
    ensure!(stages > 0 && ranks.is_multiple_of(stages), "{stages} stages do not divide {ranks} ranks");
    let began = Instant::now();
    let mesh = ctx.mesh(&[("pp", stages), ("tp", ranks / stages)])?;
    let (plan, device) = (Decoder::plan("tp"), ctx.device());
    let vb = ShardedVarBuilder::from_weights(weights.clone(), 0, &mesh.axis("tp")?, plan, task.dtype, device)?;
    let vb = if task.dequantize { vb.dequantized() } else { vb };
    let room = (task.prompt.len() + task.most).min(config.max_position_embeddings);
    let mut model = match stages {
        1 => Model::Whole(
            Box::new(Decoder::new(config, room, &vb.frozen())?),
            Cache::new(config.num_hidden_layers, room).with_dtype(task.cache),
        ),
        _ => Model::Staged(Box::new(StagedDecoder::new(
            config,
            room,
            (task.layout.as_ref(), task.cache),
            &mesh,
            &vb.frozen(),
            ctx,
        )?)),
    };
    let parameters: usize = vb.built().iter().map(|parameter| parameter.var.elem_count()).sum();
    let bytes = parameters * task.dtype.size_in_bytes() + vb.quantized_bytes();

    let load = began.elapsed().as_secs_f64();
    show(None)?;

    let mut sampler = Sampler::new(task.sampling);
    sampler.see(&task.prompt);
    let mut tokens: Vec<u32> = Vec::new();
    let began = Instant::now();
    let (mut first, mut logits_top) = (0.0, Vec::new());
    let mut input = task.prompt.clone();
    let stop = loop {
        let so_far = task.prompt.len() + tokens.len();
        if tokens.len() >= task.most {
            break Stop::Length;
        }
        if so_far > room {
            break Stop::Context;
        }
        let logits = model.next(&input, device)?;
        let token = sampler.next(&logits).with_context(|| format!("the token at position {so_far}"))?;
        if tokens.is_empty() {
            logits_top = top(&logits)?;
            first = began.elapsed().as_secs_f64();
        }
        if ends.contains(&token) {
            break Stop::End;
        }
        tokens.push(token);
        sampler.see(&[token]);
        if !show(Some(token))? {
            break Stop::Text;
        }
        input = vec![token];
    };
    Ok(Written {
        tokens,
        stop,
        load,
        first,
        rest: began.elapsed().as_secs_f64() - first,
        parameters,
        bytes,
        logits_top,
    })
}

/// How many logits are told.
const TOP: usize = 20;

/// The tokens with the largest logits.
fn top(logits: &Tensor) -> Result<Vec<(u32, f32)>> {
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.to_dtype(DType::F32)?.to_vec1::<f32>()?).collect();
    all.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
    all.truncate(TOP);
    Ok(all)
}
