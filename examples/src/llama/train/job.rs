//! What a training is to do, with everything checked that can be before memory is taken.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::data::Text;
use super::folder;
use super::recipe::Recipe;
use super::resume::{Resumed, State};
use crate::cli::{Checked, UsageError, require};
use crate::llama::args::Args;
use crate::llama::files::Files;
use crate::llama::{declare, random_model, tokens};
use crate::pipeline::Pipeline;

/// A training that can begin.
#[derive(Clone, Debug)]
pub struct Job {
    /// The model's files.
    pub files: Files,
    /// Files beside the weights that a checkpoint has too: who moves the model away meanwhile loses nothing.
    pub beside: Vec<(&'static str, Vec<u8>)>,
    /// How to train.
    pub recipe: Recipe,
    /// What on.
    pub text: Text,
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
    /// The file with the optimiser's state after these.
    pub optimiser: Option<PathBuf>,
}

impl Job {
    /// Opens the model or the checkpoint, of which a random one is made in `scratch` if none is given, and reads `text`.
    ///
    /// # Errors
    /// A sentence for what the flags should say instead; those of the files, which are named.
    pub fn open(args: &Args, text: &Path, scratch: &Path) -> Result<Self> {
        let flags = &args.training;
        let resumed = flags.resume.as_deref().map(Resumed::open).transpose()?;
        let saved = resumed.as_ref().map(|resumed| &resumed.state.recipe);
        let recipe = flags.recipe(args.dtype, args.seed, saved)?;
        flags.check_batch(&recipe, args.pp, args.tp)?;
        let (start, optimiser) = match &resumed {
            Some(resumed) => (resumed.state.step, Some(resumed.optimiser())),
            None => (0, None),
        };
        check_steps(&recipe, start)?;
        let (folder, files) = match &resumed {
            Some(Resumed { folder, files, .. }) => (folder.clone(), files.clone()),
            None => {
                let folder = args.model.as_deref().unwrap_or(scratch);
                if args.model.is_none() {
                    random_model::write(folder, &random_model::config(), recipe.seed, recipe.dtype.into())?;
                }
                (folder.to_owned(), Files::open(folder)?)
            }
        };
        check_length(&recipe, &files)?;
        let beside = ["config.json", "tokenizer.json"].map(|name| -> Result<_> {
            let path = folder.join(name);
            Ok((name, fs::read(&path).with_context(|| format!("{}", path.display()))?))
        });
        let beside = beside.into_iter().collect::<Result<_>>()?;
        let text = Text::read(text, &tokens::read(&folder)?, files.config.vocab_size, recipe.seq_len)?;
        if let Some(resumed) = &resumed {
            check_text(&text, &resumed.state)?;
        }
        let pipeline = flags.pipeline(args.pp, args.tp);
        declare::learner(&files.config, recipe.seq_len, flags.recompute, pipeline.stages()).map_err(|error| {
            UsageError(format!("--pp {} with --schedule {} does not fit the model: {error}.", args.pp, pipeline.kind))
        })?;
        if let Some(save) = &flags.save {
            folder::check(save, start)?;
        }
        let save = flags.save.clone().map(|save| (save, flags.save_every.unwrap_or(recipe.rate.steps)));
        let (fsdp, accumulate, recompute) = (flags.fsdp, flags.accumulate, flags.recompute);
        Ok(Self { files, beside, recipe, text, pipeline, fsdp, accumulate, recompute, save, start, optimiser })
    }

    /// The steps to make.
    pub fn steps(&self) -> std::ops::Range<usize> {
        self.start..self.recipe.rate.steps
    }

    /// Whether a checkpoint is due when so many steps are made, and where.
    pub fn saves_after(&self, steps: usize) -> Option<&Path> {
        let (folder, every) = self.save.as_ref()?;
        (steps.is_multiple_of(*every) || steps == self.recipe.rate.steps).then_some(folder)
    }

    /// How far the training is when so many steps are made.
    pub fn state(&self, step: usize) -> State {
        State { step, text: self.text.stamp(), recipe: self.recipe.clone() }
    }
}

fn check_steps(recipe: &Recipe, start: usize) -> Checked {
    let steps = recipe.rate.steps;
    require!(start < steps, "--steps {steps} are made: there is nothing left to learn, give more than {start}.");
    Ok(())
}

fn check_length(recipe: &Recipe, files: &Files) -> Checked {
    let (length, longest) = (recipe.seq_len, files.config.max_position_embeddings);
    require!(
        length <= longest,
        "--seq-len {length} is more than the {longest} tokens that the model takes: give less."
    );
    Ok(())
}

fn check_text(text: &Text, state: &State) -> Checked {
    require!(
        text.stamp() == state.text,
        "--train is another text than the one that --resume goes on with: give that one."
    );
    Ok(())
}
