//! The training that the command line names.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use candle_lm::adapter::AdapterConfig;
use candle_lm::files::Files;
use candle_lm::train::base;
use candle_lm::train::corpus::Corpus;
use candle_lm::train::data::{RecordEncoder, TooLong, TrainingData};
use candle_lm::train::folder::{self, Damage, Retention};
use candle_lm::train::job::{self, Job};
use candle_lm::train::loop_state::BestLoss;
use candle_lm::train::recipe::Recipe;
use candle_lm::train::resume::{Checkpoint, Flaw};
use candle_lm::{adapter, random_model};
use examples::cli::UsageError;

use crate::adapters::with_base;
use crate::args::Args;
use crate::train::args::TrainArgs;
use crate::{memory, opened};

/// Opens the model or the checkpoint, of which a random one is made in `scratch` if none is given, and reads what is learned.
///
/// # Errors
/// A sentence for what the flags should say instead; those of the files, which are named.
pub fn open(args: &Args, scratch: &Path) -> Result<Job> {
    after(
        args.training
            .resume
            .as_deref()
            .map(|path| Checkpoint::open(path, args.model.as_deref(), &args.ignore_field))
            .transpose()?,
        args,
        scratch,
    )
}

/// Opens as [`open`] does, after the checkpoint that was opened for `--resume`.
///
/// # Errors
/// Those of [`open`].
pub fn after(mut resumed: Option<Checkpoint>, args: &Args, scratch: &Path) -> Result<Job> {
    let flags = &args.training;
    if let (Some(Checkpoint { folder, lora: None, .. }), Some(_)) = (&resumed, &args.model) {
        let said = format!(
            "--model beside --resume names the model that an adapter changes, and {} is no adapter: leave it out.",
            folder.display()
        );
        return Err(UsageError(said).into());
    }
    let saved = resumed.as_ref().map(|resumed| resumed.state.recipe.clone());
    let saved = saved.as_ref();
    let (start, optimizer) = match &resumed {
        Some(resumed) => (resumed.state.step, Some(resumed.optimizer())),
        None => (0, None),
    };
    let retention = Retention {
        last: flags.keep,
        best: flags.keep_best,
        resumed: resumed.as_ref().map(|resumed| resumed.folder.clone()),
    };
    let (folder, files) = match &resumed {
        Some(Checkpoint { folder, files, .. }) => (folder.clone(), files.clone()),
        None => {
            let given = args.model.as_deref().filter(|_| !flags.fresh);
            let folder = given.unwrap_or(scratch);
            if given.is_none() {
                let Recipe { seed, dtype, .. } =
                    flags.recipe(args.dtype, args.seed, None, Recipe::default())?;
                match &args.model {
                    Some(like) => {
                        random_model::write_like(folder, like, &args.ignore_field, seed, dtype.into())?;
                    }
                    None => random_model::write(folder, &opened::random(args), seed, dtype.into())?,
                }
            }
            (folder.to_owned(), Files::open_without(folder, &args.ignore_field)?)
        }
    };
    let mut files = files;
    if flags.qlora.is_some() && !files.has_blocks() {
        return Err(UsageError(format!(
            "--qlora is for a model whose weights are in blocks, and those of {} are floats: give a GGUF file, which lm export writes, a \
             folder in FP8 or MXFP4, or --lora.",
            folder.display()
        ))
        .into());
    }
    let lora = match (&resumed, flags.adapter()) {
        (Some(resumed), _) => resumed.lora.clone(),
        (None, None) => match args.adapters.trained() {
            None => None,
            Some(at) => {
                let (adapter, config) = adapter::opened(adapter::TRAINED, at, &files)?;
                files.adapters.push(adapter);
                Some(with_base(config, &folder))
            }
        },
        (None, Some(flag)) => {
            let refused = |error| UsageError(format!("--lora does not fit the model: {error:#}."));
            let (adapter, config) =
                adapter::fresh(adapter::TRAINED, &flag.config(&folder), &files).map_err(refused)?;
            files.adapters.push(adapter);
            Some(config)
        }
    };
    let begins_with = args.adapters.trained().map(adapter::stamp).transpose()?;
    let absent = Recipe { dtype: files.dtype()?.try_into()?, ..Recipe::default() };
    let mut recipe = flags.recipe(args.dtype, args.seed, saved, absent)?;
    if let (Some(saved), None) = (saved, flags.decay) {
        recipe.rate = recipe.rate.after(&saved.rate, start);
    }
    if recipe.lora_plus.is_some() && lora.is_none() {
        return Err(UsageError(
            "--lora-plus is for the factors of an adapter: give --lora too, or leave it out.".into(),
        )
        .into());
    }
    if !recipe.freeze.is_empty() && lora.is_some() {
        return Err(UsageError(
            "--freeze is for the training of a model, all of which is frozen beside an adapter: leave it out.".into(),
        )
        .into());
    }
    let is_owed = resumed.as_ref().is_some_and(|resumed| resumed.state.progress.unvalidated.is_some());
    let made = (start, is_owed && flags.valid.is_some());
    job::check(&folder, &files, lora.is_some(), &recipe, made)?;
    opened::check_ranks(args, &files)?;
    flags.check_batch(&recipe, args.ep)?;
    let pipeline = flags.pipeline([args.pp, args.cp, args.ep, args.tp], recipe.batch)?;
    let beside = match lora {
        Some(_) => Vec::new(),
        None => job::beside(&folder, &files.config, recipe.dtype)?,
    };
    if recipe.dpo.is_some() {
        check_preferences(flags, lora.as_ref())?;
    }
    let (text, valid) = texts(flags, &files, &recipe)?;
    let (mut damaged, mut notes) = (Vec::new(), Vec::new());
    if let Some(resumed) = &mut resumed {
        job::check_text(&text, &resumed.state)?;
        notes.append(&mut resumed.notes);
    }
    let mut progress = resumed.as_ref().map(|resumed| resumed.state.progress).unwrap_or_default();
    let forgotten = valid.as_ref().and_then(|text| progress.begin_valid(text.stamp()));
    notes.extend(forgotten.map(|BestLoss { steps, loss }| {
        format!(
            "--valid is another text than before: the least loss {loss:.4} after {steps} steps, which was that of the other text, does not count"
        )
    }));
    let base = lora.is_some().then(|| base::stamp(&files)).transpose()?;
    for Flaw { folder, reason } in resumed.iter().flat_map(|resumed| &resumed.skipped) {
        let moved = flags.save.as_ref().and_then(|save| Damage::within(save, folder));
        let kept =
            moved.as_ref().map(|moved| format!("; it is kept as {}", moved.to.display())).unwrap_or_default();
        damaged.extend(moved);
        let shown = folder.display();
        notes.push(format!("{shown} is no whole checkpoint: {reason}; goes on from step {start}{kept}"));
    }
    notes.extend(files.unmet.iter().cloned());
    for text in [Some(&text), valid.as_ref()].into_iter().flatten() {
        if let TrainingData::Documents(set) = text {
            notes.extend(set.notes.iter().cloned());
        }
    }
    if let Some(save) = &flags.save {
        folder::check(save, start, &damaged)?;
        if retention.best {
            folder::check_best(save)?;
        }
    }
    let save = flags.save.clone().map(|save| (save, flags.save_every.unwrap_or(recipe.rate.steps)));
    let job = Job {
        files,
        beside,
        layout: args.layout.clone(),
        shares: args.shares.clone(),
        recipe,
        lora,
        base,
        begins_with,
        text,
        valid: valid.map(|text| (text, flags.valid_every)),
        pipeline,
        fsdp: flags.fsdp,
        accumulate: flags.accumulate,
        recompute: flags.recompute,
        save,
        retention,
        skip_nonfinite: flags.skip_nonfinite,
        patience: flags.patience,
        update_norm: flags.log.is_some() || flags.tensorboard.is_some(),
        stop: Arc::default(),
        thawed: saved.map(|saved| saved.freeze.clone()).unwrap_or_default(),
        start,
        progress,
        optimizer,
        apart: resumed.filter(|resumed| resumed.state.recipe.local.is_some()).map(|resumed| resumed.folder),
        damaged,
        notes,
    };
    memory::check_training(args, &job)?;
    job.declare(None).map_err(|error| {
        UsageError(format!(
            "--pp {} with --schedule {} does not fit the model: {error}.",
            args.pp, pipeline.kind
        ))
    })?;
    Ok(job)
}

/// Refuses what does not fit preferences.
fn check_preferences(flags: &TrainArgs, lora: Option<&AdapterConfig>) -> Result<()> {
    let said = match lora {
        None => "--dpo trains an adapter, without which the model is the reference: give --lora too.",
        Some(lora) if !lora.modules_to_save.is_empty() => {
            "--dpo compares with the model without its adapter, and save= of --lora trains modules of the model itself: leave out save=."
        }
        Some(_) if flags.no_packing => {
            "--no-packing gives each record a sequence, and the two answers of --dpo share one: leave one of them out."
        }
        Some(_) if flags.too_long == TooLong::Split => {
            "--too-long split is for texts, and --dpo learns answers: give cut or skip."
        }
        Some(_) => return Ok(()),
    };
    Err(UsageError(said.into()).into())
}

/// Reads what is learned, and what has a validation loss.
fn texts(flags: &TrainArgs, files: &Files, recipe: &Recipe) -> Result<(TrainingData, Option<TrainingData>)> {
    let (seq_len, preferences) = (recipe.seq_len, recipe.dpo.is_some());
    let records = |flag, paths: &[PathBuf]| {
        flags.data_options(preferences).read(flag, paths, &RecordEncoder::new(files)?, seq_len)
    };
    let text = |flag, path: &Path| -> Result<TrainingData> {
        if preferences {
            let said = format!("{flag} {} is a text, and --dpo learns records of --data.", path.display());
            return Err(UsageError(said).into());
        }
        let tokenizer = files.tokenizer()?;
        let text = Corpus::read(flag, path, &tokenizer, files.config.vocab_size, seq_len)?;
        Ok(TrainingData::Text(text))
    };
    let learned = match &flags.train {
        Some(path) => text("--train", path)?,
        None => records("--data", &flags.data)?,
    };
    let valid = flags.valid.as_ref().map(|path| match TrainingData::is_records(path) {
        true => records("--valid", std::slice::from_ref(path)),
        false => text("--valid", path),
    });
    Ok((learned, valid.transpose()?))
}
