//! What a training is to do, with everything checked that can be before memory is taken.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use candle_pipe::Layout;
use candle_shard::regular;
use serde_json::{Map, Value};

use super::corpus::Corpus;
use super::folder::{self, Damage};
use super::recipe::Recipe;
use super::resume::{Flaw, Resumed, State};
use crate::cli::{Checked, UsageError, require};
use crate::lm::args::Args;
use crate::lm::config::Config;
use crate::lm::cut::{Cut, DecoderPipe};
use crate::lm::declare;
use crate::lm::dtype::DTypeName;
use crate::lm::files::Files;
use crate::lm::{opened, random_model, tokens};
use crate::pipeline::Pipeline;

/// A training that can begin.
#[derive(Clone, Debug)]
pub struct Job {
    /// The model's files.
    pub files: Files,
    /// Files beside the weights that a checkpoint has too: who moves the model away meanwhile loses nothing.
    pub beside: Vec<(&'static str, Vec<u8>)>,
    /// Which layers make a stage, if they are not to cost about equally much.
    pub layout: Option<Layout>,
    /// How to train.
    pub recipe: Recipe,
    /// What on.
    pub text: Corpus,
    /// The validation text, and the steps between its losses; without a number they come with the checkpoints.
    pub valid: Option<(Corpus, Option<usize>)>,
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
    /// The steps that were made before.
    pub start: usize,
    /// The file with the optimizer's state after these.
    pub optimizer: Option<PathBuf>,
    /// Checkpoints in the way of `save` that are not whole. The training renames them.
    pub damaged: Vec<Damage>,
    /// What the user should know of the checkpoint that it goes on from, and of the files.
    pub notes: Vec<String>,
}

impl Job {
    /// Opens the model or the checkpoint, of which a random one is made in `scratch` if none is given, and reads `text`.
    ///
    /// # Errors
    /// A sentence for what the flags should say instead; those of the files, which are named.
    pub fn open(args: &Args, text: &Path, scratch: &Path) -> Result<Self> {
        Self::after(
            args.training.resume.as_deref().map(|path| Resumed::open(path, &args.ignore_field)).transpose()?,
            args,
            text,
            scratch,
        )
    }

    /// Opens as [`open`](Self::open) does, after the checkpoint that was opened for `--resume`.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn after(resumed: Option<Resumed>, args: &Args, text: &Path, scratch: &Path) -> Result<Self> {
        let flags = &args.training;
        let saved = resumed.as_ref().map(|resumed| &resumed.state.recipe);
        let (start, optimizer) = match &resumed {
            Some(resumed) => (resumed.state.step, Some(resumed.optimizer())),
            None => (0, None),
        };
        let (folder, files) = match &resumed {
            Some(Resumed { folder, files, .. }) => (folder.clone(), files.clone()),
            None => {
                let folder = args.model.as_deref().unwrap_or(scratch);
                if args.model.is_none() {
                    let base = flags.recipe(args.dtype, args.seed, None, Recipe::default())?;
                    random_model::write(folder, &opened::random(args), base.seed, base.dtype.into())?;
                }
                (folder.to_owned(), Files::open_without(folder, &args.ignore_field)?)
            }
        };
        let base = Recipe { dtype: files.dtype()?.try_into()?, ..Recipe::default() };
        let mut recipe = flags.recipe(args.dtype, args.seed, saved, base)?;
        if let (Some(saved), None) = (saved, flags.decay) {
            recipe.rate = recipe.rate.after(&saved.rate, start);
        }
        ensure!(
            files.config.parts.can_learn(),
            "{}: only models of the families llama and mistral and mixtures of experts, without biases and windows, can be trained",
            folder.display()
        );
        opened::check_experts(args, &files)?;
        flags.check_batch(&recipe, args.ep)?;
        check_steps(&recipe, start)?;
        check_length(&recipe, &files)?;
        let pipeline = flags.pipeline([args.pp, args.cp, args.ep, args.tp], recipe.batch)?;
        let beside = beside(&folder, &files.config, recipe.dtype)?;
        let tokenizer = tokens::read(&folder)?;
        let read = |flag, path: &Path| Corpus::read(flag, path, &tokenizer, files.config.vocab_size, recipe.seq_len);
        let text = read("--train", text)?;
        let valid = flags.valid.as_deref().map(|path| read("--valid", path)).transpose()?;
        if let Some(resumed) = &resumed {
            check_text(&text, &resumed.state)?;
        }
        let (mut damaged, mut notes) = (Vec::new(), Vec::new());
        for Flaw { folder, reason } in resumed.iter().flat_map(|resumed| &resumed.skipped) {
            let moved = flags.save.as_ref().and_then(|save| Damage::within(save, folder));
            let kept =
                moved.as_ref().map(|moved| format!("; it is kept as {}", moved.to.display())).unwrap_or_default();
            damaged.extend(moved);
            let shown = folder.display();
            notes.push(format!("{shown} is no whole checkpoint: {reason}; goes on from step {start}{kept}"));
        }
        notes.extend(files.unmet.iter().cloned());
        if let Some(save) = &flags.save {
            folder::check(save, start, &damaged)?;
        }
        let save = flags.save.clone().map(|save| (save, flags.save_every.unwrap_or(recipe.rate.steps)));
        let job = Self {
            files,
            beside,
            layout: args.layout.clone(),
            recipe,
            text,
            valid: valid.map(|text| (text, flags.valid_every)),
            pipeline,
            fsdp: flags.fsdp,
            accumulate: flags.accumulate,
            recompute: flags.recompute,
            save,
            start,
            optimizer,
            damaged,
            notes,
        };
        job.declare().map_err(|error| {
            UsageError(format!("--pp {} with --schedule {} does not fit the model: {error}.", args.pp, pipeline.kind))
        })?;
        Ok(job)
    }

    /// The model in stages.
    ///
    /// # Errors
    /// If the model cannot be cut into these stages.
    pub fn declare(&self) -> candle_pipe::Result<DecoderPipe> {
        let cut = Cut::new(self.pipeline.stages(), self.layout.as_ref());
        declare::learner(&self.files.config, self.recipe.seq_len, self.recompute, &cut)
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
    pub fn validates_after(&self, steps: usize) -> Option<&Corpus> {
        let (text, every) = self.valid.as_ref()?;
        let is_due = every.map_or_else(|| self.saves_after(steps), |every| steps.is_multiple_of(every));
        (is_due || steps == self.recipe.rate.steps).then_some(text)
    }

    /// How far the training is when so many steps are made.
    pub fn state(&self, step: usize) -> State {
        State { step, text: self.text.stamp(), recipe: self.recipe.clone() }
    }
}

/// Files that a model's folder must have, and those that others read where it has them.
const NEEDED: [&str; 2] = [CONFIG, "tokenizer.json"];
const KNOWN: [&str; 7] = [
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
];
const CONFIG: &str = "config.json";

/// The model's files that a checkpoint has too, with what the training changes in them.
fn beside(folder: &Path, config: &Config, dtype: DTypeName) -> Result<Vec<(&'static str, Vec<u8>)>> {
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
    let said: Vec<&str> = ["dtype", "torch_dtype"].into_iter().filter(|field| fields.contains_key(*field)).collect();
    let said = if said.is_empty() { vec!["torch_dtype"] } else { said };
    let tied = model.tie_word_embeddings;
    let wants = said.into_iter().map(|field| (field, Value::from(name)));
    let wants: Vec<(&str, Value)> = wants.chain([("tie_word_embeddings", Value::from(tied))]).collect();
    if wants.iter().all(|(field, value)| fields.get(*field) == Some(value)) {
        return Ok(config.to_vec());
    }
    fields.extend(wants.into_iter().map(|(field, value)| (field.to_owned(), value)));
    Ok(serde_json::to_vec_pretty(&fields)?)
}

fn check_steps(recipe: &Recipe, start: usize) -> Checked {
    let steps = recipe.rate.steps;
    require!(start < steps, "--steps {steps} are made: there is nothing left to learn, give more than {start}.");
    Ok(())
}

fn check_length(recipe: &Recipe, files: &Files) -> Checked {
    let (length, longest) = (recipe.seq_len, files.config.longest());
    require!(
        length <= longest,
        "--seq-len {length} is more than the {longest} tokens that the model takes: give less."
    );
    Ok(())
}

fn check_text(text: &Corpus, state: &State) -> Checked {
    require!(
        text.stamp() == state.text,
        "--train is another text than the one that --resume goes on with: give that one."
    );
    Ok(())
}
