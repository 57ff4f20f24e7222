//! What a training is to do, with everything checked that can be before memory is taken.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use candle_dist::ProcessGroup;
use candle_pipe::{Pipeline, StageLayout};
use candle_shard::parallel::Shares;
use candle_shard::regular;
use serde_json::{Map, Value};

use super::corpus::Stamp;
use super::data::TrainingData;
use super::folder::{Damage, Retention};
use super::frozen::FrozenModules;
use super::loop_state::LoopState;
use super::recipe::Recipe;
use super::resume::TrainState;
use super::trainer::StepOutput;
use crate::adapter::{self, AdapterConfig};
use crate::config::Config;
use crate::config::tensors::layer_of;
use crate::cut::{DecoderPipe, StageCut};
use crate::declare;
use crate::dtype::DTypeName;
use crate::error::{InputResult, require};
use crate::files::Files;

/// A training that can begin.
#[derive(Clone, Debug)]
pub struct Job {
    /// The model's files.
    pub files: Files,
    /// Files beside the weights that a checkpoint has too: who moves the model away meanwhile loses nothing.
    pub beside: Vec<(&'static str, Vec<u8>)>,
    /// Which layers make a stage, if they are not to cost about equally much.
    pub layout: Option<StageLayout>,
    /// The shares of the ranks over which a layer is sharded, if they are unlike.
    pub shares: Option<Shares>,
    /// How to train.
    pub recipe: Recipe,
    /// The adapter that is trained instead of the model, of which it is the only one.
    pub lora: Option<AdapterConfig>,
    /// What tells the model from others, if an adapter of it is trained.
    pub base: Option<Stamp>,
    /// What tells the adapter that the training begins with from others, if it does not begin with a fresh one or with that of a checkpoint.
    pub begins_with: Option<Stamp>,
    /// What on.
    pub text: TrainingData,
    /// The validation text, and the steps between its losses; without a number they come with the checkpoints.
    pub valid: Option<(TrainingData, Option<usize>)>,
    /// The mesh and the schedule.
    pub pipeline: Pipeline,
    /// Whether parameters are cut over the replicas.
    pub fsdp: bool,
    /// Parts of the batch that are run one after the other.
    pub accumulate: usize,
    /// Whether layers compute again instead of keeping.
    pub recompute: bool,
    /// Where checkpoints go, and after how many steps, if there are to be any.
    pub save: Option<(PathBuf, usize)>,
    /// Which checkpoints stay there.
    pub retention: Retention,
    /// Steps in a row that may be left out, since their loss or a gradient is no finite number.
    pub skip_nonfinite: usize,
    /// Losses of the validation text that are no lower than the least one, after which the training ends.
    pub patience: Option<usize>,
    /// Whether steps tell how much they change the parameters.
    pub update_norm: bool,
    /// Ends the training after the step in which any rank has set it, such as by a signal.
    pub stop: Arc<AtomicBool>,
    /// What did not learn before the checkpoint, which has no state of the optimizer for it.
    pub thawed: FrozenModules,
    /// The steps that were made before.
    pub start: usize,
    /// What the loop knew after these.
    pub progress: LoopState,
    /// The file with the optimizer's state after these.
    pub optimizer: Option<PathBuf>,
    /// The folder of the checkpoint, if its replicas trained apart.
    pub apart: Option<PathBuf>,
    /// Checkpoints in the way of `save` that are not whole. The training renames them.
    pub damaged: Vec<Damage>,
    /// What the user should know of the checkpoint that it goes on from, and of the files.
    pub notes: Vec<String>,
}

impl Job {
    /// Whether sequences may be packed of documents.
    pub(super) fn is_packed(&self) -> bool {
        let valid = self.valid.iter().map(|(text, _)| text);
        valid.chain([&self.text]).any(|text| matches!(text, TrainingData::Documents(_)))
    }

    /// The model in stages; see [`learner`](declare::learner) for the group `replicas`.
    ///
    /// # Errors
    /// If the model cannot be cut into these stages.
    pub fn declare(&self, replicas: Option<&ProcessGroup>) -> candle_pipe::Result<DecoderPipe> {
        let cut = StageCut::new(self.pipeline.stages(), self.layout.as_ref());
        let mut config = self.files.config.clone();
        // A frozen table of blocks is held once, whichever layers read it.
        config.tie_word_embeddings &= self.lora.is_none() || !self.files.has_quantized_head();
        let learner = match self.recipe.dpo {
            Some(_) => declare::preference_learner,
            None if self.is_packed() => declare::packed_learner,
            None => declare::learner,
        };
        learner(&config, self.recipe.seq_len, self.recompute, replicas, &cut)
    }

    /// How many numbers are learned, which are those of the adapter, or of the model without what is frozen; and from which layer on.
    ///
    /// # Errors
    /// If the adapter does not fit the model.
    pub fn learned(&self) -> Result<(usize, usize)> {
        let mut tensors = match &self.lora {
            Some(config) => adapter::tensors(adapter::TRAINED, config, &self.files)?,
            None => self.files.config.learned(),
        };
        tensors.retain(|(name, _)| !self.recipe.freeze.contains(name));
        let numbers = tensors.iter().map(|(_, shape)| shape.iter().copied().fold(1, usize::saturating_mul));
        // What is outside of layers may be before the first.
        let layers = tensors.iter().map(|(name, _)| layer_of(name).unwrap_or(0));
        let lowest = layers.min().unwrap_or(self.files.config.num_hidden_layers);
        Ok((numbers.fold(0, usize::saturating_add), lowest))
    }

    /// Whether replicas train apart.
    pub fn is_local(&self) -> bool {
        self.recipe.local.is_some()
    }

    /// The steps to make.
    pub fn steps(&self) -> std::ops::Range<usize> {
        self.start..self.recipe.rate.steps
    }

    /// Whether a checkpoint is due when so many steps are made.
    pub fn saves_after(&self, steps: usize) -> bool {
        let is_due = |every: usize| steps.is_multiple_of(every) || steps == self.recipe.rate.steps;
        self.save.as_ref().is_some_and(|(_, every)| is_due(*every))
    }

    /// The validation text, if its loss is due after `steps` steps.
    pub fn validates_after(&self, steps: usize) -> Option<&TrainingData> {
        let (text, every) = self.valid.as_ref()?;
        let is_due = every.map_or_else(|| self.saves_after(steps), |every| steps.is_multiple_of(every));
        (is_due || steps == self.recipe.rate.steps).then_some(text)
    }

    /// The last step before the checkpoint, if its loss of the validation text is still to be computed.
    pub fn unvalidated(&self) -> Option<StepOutput> {
        self.progress.unvalidated.filter(|_| self.valid.is_some())
    }

    /// How far the training is when so many steps are made.
    pub fn state(&self, step: usize, progress: LoopState) -> TrainState {
        TrainState { step, text: self.text.stamp(), base: self.base, recipe: self.recipe.clone(), progress }
    }
}

/// Files that a model's folder must have, and those that others read where it has them.
const NEEDED: [&str; 2] = [CONFIG, "tokenizer.json"];
const KNOWN: [&str; 8] = [
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
];
const CONFIG: &str = "config.json";

/// Returns the files of the model in `folder` that a checkpoint has too, with what the training changes in them.
///
/// # Errors
/// If a file that a model must have is not there, or one cannot be read; it is named. If the files of the model have what no config says.
pub fn beside(folder: &Path, config: &Config, dtype: DTypeName) -> Result<Vec<(&'static str, Vec<u8>)>> {
    ensure!(
        !config.parts.norms_have_one,
        "{} is in the layout of MLX, which adds one to the norms of this family and says so nowhere: give the folder that it was made of",
        folder.display()
    );
    let needed = NEEDED.into_iter().map(|name| (name, true));
    let known = KNOWN.into_iter().map(|name| (name, false));
    let mut files = Vec::new();
    for (name, is_needed) in needed.chain(known) {
        let path = folder.join(name);
        match regular::read(&path, regular::TOKENIZER) {
            Err(error) if error.kind() == ErrorKind::NotFound && !is_needed => {}
            read => files.push((name, read.with_context(|| format!("{}", path.display()))?)),
        }
    }
    for (_, bytes) in files.iter_mut().filter(|(name, _)| *name == CONFIG) {
        *bytes = changed(bytes, config, dtype)?;
    }
    Ok(files)
}

/// The config with the dtype of the saved parameters, and whether the output layer is tied: other programs go by that.
fn changed(config: &[u8], model: &Config, dtype: DTypeName) -> Result<Vec<u8>> {
    let mut fields: Map<String, Value> = serde_json::from_slice(config)?;
    let name = match dtype {
        DTypeName::F32 => "float32",
        DTypeName::Bf16 => "bfloat16",
        DTypeName::F16 => "float16",
    };
    let said: Vec<&str> =
        ["dtype", "torch_dtype"].into_iter().filter(|field| fields.contains_key(*field)).collect();
    let said = if said.is_empty() { vec!["torch_dtype"] } else { said };
    let tied = model.tie_word_embeddings;
    let wants = said.into_iter().map(|field| (field, Value::from(name)));
    let wants: Vec<(&str, Value)> = wants.chain([("tie_word_embeddings", Value::from(tied))]).collect();
    // What is saved is not quantized.
    let removed = ["quantization_config", "quantization"].map(|field| fields.remove(field).is_some());
    let was_quantized = removed.contains(&true);
    if !was_quantized && wants.iter().all(|(field, value)| fields.get(*field) == Some(value)) {
        return Ok(config.to_vec());
    }
    fields.extend(wants.into_iter().map(|(field, value)| (field.to_owned(), value)));
    Ok(serde_json::to_vec_pretty(&fields)?)
}

/// Checks that a recipe can train the model in `folder`, or an adapter of it, after `start` steps that were made before, of which the last one
/// may still [owe](Job::unvalidated) a loss of the validation text.
///
/// # Errors
/// If the files are no folder of a language model alone. An [`InputError`](crate::InputError) if no steps are left to make, or
/// sequences are longer than the model takes.
pub fn check(
    folder: &Path,
    files: &Files,
    is_adapter: bool,
    recipe: &Recipe,
    (start, owes_loss): (usize, bool),
) -> Result<()> {
    let shown = folder.display();
    ensure!(
        folder.is_dir() || is_adapter,
        "{shown} is a GGUF file, and what is trained is saved in the layout of the Hub: give the folder that it was made of"
    );
    ensure!(
        !files.config.has_images,
        "{shown} has parts for images, which the saved model would lack: save its language model by itself with transformers, and train that"
    );
    recipe.freeze.check(&files.config)?;
    check_steps(recipe, start, owes_loss)?;
    check_length(recipe, files)?;
    Ok(())
}

fn check_steps(recipe: &Recipe, start: usize, owes_loss: bool) -> InputResult {
    let steps = recipe.rate.steps;
    require!(
        start < steps || owes_loss && start == steps,
        "--steps {steps} are made: there is nothing left to learn, give more than {start}."
    );
    Ok(())
}

fn check_length(recipe: &Recipe, files: &Files) -> InputResult {
    let (length, longest) = (recipe.seq_len, files.config.longest());
    require!(
        length <= longest,
        "--seq-len {length} is more than the {longest} tokens that the model takes: give less."
    );
    Ok(())
}

/// Checks that a training goes on with the text of its checkpoint.
///
/// # Errors
/// If it is another text.
pub fn check_text(text: &TrainingData, state: &TrainState) -> InputResult {
    require!(
        text.stamp() == state.text,
        "{} is another text than the one that --resume goes on with{}",
        text.flag(),
        match text {
            TrainingData::Text(_) => ": give that one.",
            TrainingData::Documents(_) =>
                ", or its records are cut or packed otherwise: give that one, with the --too-long, --skip-bad-lines and \
                 --no-packing of before.",
        }
    );
    Ok(())
}
