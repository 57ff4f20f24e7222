//! The front page: a model that is opened once and writes, converses and scores.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use candle_core::DType;
use candle_dist::{DeviceMesh, ProcessGroup};
use tokenizers::Tokenizer;

use crate::agree::agreed;
use crate::chat::{self, ChatMessage};
use crate::config::Config;
use crate::engine::{Engine, ModelOptions};
use crate::error::{InputError, Result};
use crate::files::Files;
use crate::generate::{Stop, Task};
use crate::hub::{Hub, HubName};
use crate::model::Decoder;
use crate::sample::Sampling;
use crate::score::{self, windows};
use crate::session::{Draft, Session};
use crate::stops::{self, Stops};
use crate::tokens::{self, TextStream};
use crate::{EXPERT_AXIS, LAYER_AXIS, TOKEN_AXIS};

/// A language model, of which each rank of a mesh has a part.
///
/// The mesh has an axis `"tp"`, over which layers are cut. It may have an axis `"cp"`, whose ranks each keep the keys and
/// values of some tokens, and an axis `"ep"`, over which experts are distributed. Ranks of other axes hold copies of the model.
///
/// Every rank of the mesh calls each function alike, and consumes [`Pieces`] alike. All get the same results.
pub struct Lm {
    files: Files,
    tokenizer: Tokenizer,
    decoder: Arc<Decoder>,
    held: ModelOptions,
    longest: usize,
    /// The axes of the mesh that the model lies on.
    mesh: DeviceMesh,
    bytes: usize,
}

/// How a model is opened; see [`Lm::options`].
#[derive(Clone, Debug, Default)]
pub struct LmOptions {
    dtype: Option<DType>,
    cache_dtype: Option<DType>,
    dequantize: bool,
    ignored: Vec<String>,
    longest: Option<usize>,
    hub: Option<Hub>,
}

/// The longest sequence of a model that takes longer ones, if the options do not say.
const LONGEST: usize = 8192;

impl LmOptions {
    /// Holds and computes parameters in this dtype: f32, bf16 or f16. The default is that of the files.
    #[must_use]
    pub fn dtype(self, dtype: DType) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Keeps keys and values in this dtype. The default is that of the computation.
    #[must_use]
    pub fn cache_dtype(self, dtype: DType) -> Self {
        Self { cache_dtype: Some(dtype), ..self }
    }

    /// Holds the quantized weights of GGUF files as floats. The default is to hold them as they are stored. Those of folders are
    /// held as floats, unless an adapter learns beside codes with scales.
    #[must_use]
    pub fn dequantize(self, dequantize: bool) -> Self {
        Self { dequantize, ..self }
    }

    /// Ignores fields of the config, or keys of a GGUF file, that are refused otherwise and change nothing as the caller knows.
    #[must_use]
    pub fn ignore_fields<T: Into<String>>(self, names: impl IntoIterator<Item = T>) -> Self {
        Self { ignored: names.into_iter().map(Into::into).collect(), ..self }
    }

    /// Bounds sequences to so many tokens. The default is what the model takes, at most 8192.
    #[must_use]
    pub fn longest(self, tokens: usize) -> Self {
        Self { longest: Some(tokens), ..self }
    }

    /// Looks names up in this cache and on its server. The default is those that the environment names, see [`Hub::from_env`].
    #[must_use]
    pub fn hub(self, hub: Hub) -> Self {
        Self { hub: Some(hub), ..self }
    }

    /// Opens a model: a folder in the layout of the Hub, a GGUF file, or a name on the Hub as [`HubName`] parses it. Each rank
    /// reads its own part of the weights.
    ///
    /// Models by name are downloaded to the cache of `huggingface_hub` by each host. A host waits for slower ones no longer
    /// than the timeout of the mesh's group.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if there is no such model, or the mesh does not fit it.
    /// [`Error::Failed`](crate::Error::Failed) if its files cannot be read or run; they are named.
    pub fn open(&self, model: impl AsRef<Path>, mesh: &DeviceMesh) -> Result<Lm> {
        if mesh.axis_index(LAYER_AXIS).is_err() {
            return Err(InputError(format!(
                "the mesh has no axis {LAYER_AXIS:?}: give it one, perhaps of one rank"
            ))
            .into());
        }
        let is_cut = |axis: &&str| mesh.size_of(*axis).is_ok_and(|ranks| ranks > 1);
        let is_used =
            |axis: &&str| *axis == LAYER_AXIS || [TOKEN_AXIS, EXPERT_AXIS].contains(axis) && is_cut(axis);
        let axes: Vec<&str> = mesh.names().iter().map(String::as_str).filter(is_used).collect();
        let path = self.path(model.as_ref(), mesh)?;
        let mesh = mesh.axes(&axes)?;
        let size = |axis: &str| mesh.size_of(axis).unwrap_or(1);
        let opened =
            Files::open_without(&path, &self.ignored).and_then(|files| Ok((files.tokenizer()?, files)));
        let (tokenizer, files) = agreed(mesh.group()?, opened)?;
        files.ensure_alike(mesh.group()?)?;
        let (ep, Config { family, parts, .. }) = (size(EXPERT_AXIS), &files.config);
        if ep > 1 && parts.experts.is_none() {
            return Err(InputError(format!(
                "the axis {EXPERT_AXIS:?} has {ep} ranks, and a model of the family {family} has no experts: leave the axis out"
            ))
            .into());
        }
        if let Some(refusal) = files.config.refusal_of_token_ranks(size(TOKEN_AXIS)) {
            return Err(InputError(refusal).into());
        }
        let held = ModelOptions {
            dtype: self.dtype.map_or_else(|| files.dtype(), Ok)?,
            dequantize: self.dequantize,
            cache: self.cache_dtype,
            ep,
            cp: size(TOKEN_AXIS),
            ..ModelOptions::of(DType::F32)
        };
        let longest = self.longest.unwrap_or(LONGEST).min(files.config.longest());
        // No rank needs the logits of the whole vocabulary to score; those of one token are gathered.
        let plan = Decoder::training_plan(&files.config, LAYER_AXIS);
        let device = mesh.group()?.device().clone();
        let vb = held.builder(&files, plan, &mesh, &device)?;
        let decoder = Arc::new(Decoder::new(&files.config, longest, &vb)?);
        let [_, bytes] = held.sizes(&vb);
        Ok(Lm { tokenizer, files, decoder, held, longest, mesh, bytes })
    }

    /// The path of a model, which may be a name on the Hub.
    fn path(&self, model: &Path, mesh: &DeviceMesh) -> Result<PathBuf> {
        let (group, shown) = (mesh.group()?, model.display());
        let is_there = group.all_gather_text(if model.exists() { "yes" } else { "no" })?;
        match is_there.iter().position(|text| text == "no") {
            None => return Ok(model.to_owned()),
            Some(lacks) if is_there.iter().any(|text| text == "yes") => {
                return Err(
                    InputError(format!("{shown} is not there for rank {lacks}, and is for others")).into()
                );
            }
            Some(_) => {}
        }
        let Some(name) = model.to_str().and_then(HubName::parse) else {
            return Err(InputError(format!(
                "{shown} is no folder, no .gguf file and no name on the Hub: give a folder with config.json in it, a file, or owner/name"
            ))
            .into());
        };
        let fetch = |commit: Option<&str>| {
            let hub = self.hub.clone().map_or_else(Hub::from_env, Ok)?.ignoring(&self.ignored);
            hub.fetch(&name, commit, |_| {}).with_context(|| name.to_string())
        };
        let mine = agreed(group, fetch(None))?;
        // The revision may move between two downloads.
        let commits = group.all_gather_text(&mine.commit)?;
        if commits.iter().all(|commit| *commit == mine.commit) {
            return Ok(mine.path);
        }
        let again = if mine.commit == commits[0] { Ok(mine) } else { fetch(Some(&commits[0])) };
        Ok(agreed(group, again)?.path)
    }
}

/// How a text is continued.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The most tokens to write.
    pub max_tokens: usize,
    /// How tokens are chosen. The default takes the most likely one.
    pub sampling: Sampling,
    /// Texts and special tokens that end what is written, and are no part of it.
    pub stop: Vec<String>,
    /// Variables of the chat template by name, as JSON: `tools`, or those of a model, for example `enable_thinking`.
    pub chat_variables: BTreeMap<String, String>,
}

impl Default for Generation {
    /// Up to 100 tokens, each the most likely one.
    fn default() -> Self {
        Self {
            max_tokens: 100,
            sampling: Sampling::default(),
            stop: Vec::new(),
            chat_variables: BTreeMap::new(),
        }
    }
}

/// How likely a model finds a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// The tokens that were scored: all but the first.
    pub tokens: usize,
    /// The sum of the negative logarithms of their probabilities, in nats.
    pub nll: f64,
}

impl Score {
    /// Returns the exponential of the mean negative logarithm.
    pub fn perplexity(&self) -> f64 {
        (self.nll / self.tokens as f64).exp()
    }
}

impl Lm {
    /// Opens a model with the default options; see [`LmOptions::open`].
    ///
    /// # Errors
    /// Those of [`LmOptions::open`].
    pub fn open(model: impl AsRef<Path>, mesh: &DeviceMesh) -> Result<Self> {
        LmOptions::default().open(model, mesh)
    }

    /// Returns the options, to be changed.
    pub fn options() -> LmOptions {
        LmOptions::default()
    }

    /// The sizes of the model.
    pub fn config(&self) -> &Config {
        &self.files.config
    }

    /// The tokenizer of the model.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The decoder. Its parameters are frozen; [`Decoder::new`] builds one that learns.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// What the files ask for that is not done, a sentence each.
    pub fn notes(&self) -> &[String] {
        &self.files.unmet
    }

    /// The bytes of the weights that this rank holds.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Continues a text. The pieces come as they are computed, and do not repeat the prompt.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if the prompt is empty, or longer than the model takes; those of the tokenizer.
    pub fn generate(&self, prompt: &str, options: &Generation) -> Result<Pieces<'_>> {
        self.pieces(tokens::encode_prompt(&self.tokenizer, prompt)?, options, None)
    }

    /// Replies to a conversation, which the chat template of the model renders. The last message is the user's.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if the template refuses the conversation, or it is longer than the model takes;
    /// [`Error::Failed`](crate::Error::Failed) if the model has no template.
    pub fn chat(&self, messages: &[ChatMessage], options: &Generation) -> Result<Pieces<'_>> {
        let group = self.mesh.group()?;
        let template = || {
            let mut template = self.files.chat_template()?;
            let given = options.chat_variables.iter();
            // Some models have another template for tools.
            let (first, rest): (Vec<_>, Vec<_>) = given.partition(|(name, _)| *name == "tools");
            for (name, json) in first.into_iter().chain(rest) {
                template = template.with_variable(name, json)?;
            }
            Ok(template)
        };
        let template = agreed(group, template())?;
        // The clocks of hosts differ.
        let now = group.all_gather_text(&chat::now().to_string())?.swap_remove(0);
        let now = now.parse().context("the time of rank 0")?;
        let prompt = tokens::encode_rendered(&self.tokenizer, &template.render(messages, now)?)?;
        self.pieces(prompt, options, template.end_of_turn(&self.tokenizer))
    }

    /// Scores a text, in windows of up to 2048 tokens that overlap by half.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if the text has fewer than two tokens; those of the model.
    pub fn score(&self, text: &str) -> Result<Score> {
        let ids = tokens::encode(&self.tokenizer, text)?;
        tokens::check(&ids, self.config().vocab_size)?;
        if ids.len() < 2 {
            let count = ids.len();
            let sentence =
                format!("the text has {count} tokens, and the first is not scored; give a longer one");
            return Err(InputError(sentence).into());
        }
        let size = windows::WINDOW.min(self.longest).max(2);
        let windows = windows::windows(ids.len(), size.min(ids.len()), size / 2);
        let engine = Engine::of(self.decoder.clone(), Vec::new(), None);
        let nll = score::nll(&engine, &ids, &windows)?;
        Ok(Score { tokens: windows.iter().map(|window| window.scored).sum(), nll })
    }

    /// What follows tokens; `end` ends a text too.
    fn pieces(&self, prompt: Vec<u32>, options: &Generation, end: Option<u32>) -> Result<Pieces<'_>> {
        let (texts, special) = stops::split(&options.stop, &self.tokenizer).map_err(refusal)?;
        let mut ends: BTreeSet<u32> = self.files.ends.clone();
        ends.extend(special.into_iter().chain(end));
        let config = self.config();
        let task = Task {
            prompt,
            most: options.max_tokens,
            cache_tokens: None,
            sampling: options.sampling,
            held: self.held.clone(),
        };
        task.check(config).map_err(refusal)?;
        let (count, longest) = (task.prompt.len(), self.longest);
        if count >= longest {
            let sentence =
                format!("the prompt has {count} tokens, and the model is opened for {longest}; shorten it");
            return Err(InputError(sentence).into());
        }
        let room = task.room(config).min(longest);
        let slot = self.held.slot(&self.decoder, [room, room])?;
        let engine = Engine::of(self.decoder.clone(), vec![slot], self.replicas()?);
        let mut session = Session::of(engine, config.clone(), ends, room);
        let draft = session.begin(&task);
        let stream = TextStream::new(&self.tokenizer, &task.prompt);
        Ok(Pieces { session, draft, text: Some((stream, Stops::new(texts))), is_over: false })
    }

    /// All ranks of the model, if some of them compute the same logits, each by itself.
    fn replicas(&self) -> Result<Option<ProcessGroup>> {
        Ok(if self.held.cp * self.held.ep > 1 { Some(self.mesh.group()?.clone()) } else { None })
    }
}

impl fmt::Debug for Lm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lm")
            .field("family", &self.config().family)
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

/// An error of what the caller gave.
fn refusal(error: anyhow::Error) -> InputError {
    InputError(format!("{error:#}"))
}

/// A text that is written, piece by piece: an iterator of strings, which are never empty.
///
/// Each call of `next` runs the model, so every rank of the mesh makes the same calls.
pub struct Pieces<'a> {
    session: Session,
    draft: Draft,
    /// What turns tokens into text; `None` when all of it is told.
    text: Option<(TextStream<'a>, Stops)>,
    /// Whether one of the texts came that end what is written.
    is_over: bool,
}

impl Pieces<'_> {
    /// The tokens that were written so far.
    pub fn tokens(&self) -> &[u32] {
        self.draft.tokens()
    }

    /// Why the text has ended, if it has.
    pub fn stop(&self) -> Option<Stop> {
        self.draft.stop()
    }

    /// The next piece, which may be empty; `None` at the end.
    fn advance(&mut self) -> Result<Option<String>> {
        if self.draft.stop().is_some() {
            let Some((stream, stops)) = self.text.take() else { return Ok(None) };
            return Ok(Some(stops.rest(stream, self.is_over)?));
        }
        let Some((stream, stops)) = &mut self.text else { return Ok(None) };
        let (mut piece, is_over) = (String::new(), &mut self.is_over);
        self.session.advance(&mut self.draft, |token| {
            let (more, ends) = stops.next(&stream.next(token)?);
            (piece, *is_over) = (more, ends);
            Ok(!ends)
        })?;
        Ok(Some(piece))
    }
}

impl Iterator for Pieces<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.advance() {
                Ok(Some(piece)) if piece.is_empty() => {}
                Ok(piece) => return piece.map(Ok),
                Err(error) => {
                    // Nothing follows an error.
                    self.text = None;
                    return Some(Err(error));
                }
            }
        }
    }
}

impl fmt::Debug for Pieces<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pieces").field("draft", &self.draft).finish_non_exhaustive()
    }
}
