//! The command-line arguments for training.

use std::path::PathBuf;

use candle_lm::dtype::DTypeName;
use candle_lm::train::data::{DataOptions, TooLong};
use candle_lm::train::rate::{Decay, Rate};
use candle_lm::train::recipe::Recipe;
use candle_pipe::Pipeline;
use candle_pipe::schedule::ScheduleKind;
use clap::Args;
use examples::arguments::{ANY, check_counts};
use examples::cli::{Checked, UsageError, check_file, require};

use crate::input::refusal;
use crate::values;

/// The training options; the comments on the fields are the program's help.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Training")]
pub struct TrainArgs {
    /// Train on this text, instead of generating one
    #[arg(id = "train_text", long = "train", value_name = "FILE", group = "train", conflicts_with_all = OTHERS)]
    pub train: Option<PathBuf>,

    /// Train on records, one JSON object per line: {"text": ..}, of which all is learned; {"prompt": .., "completion": ..}, of which the
    /// completion is; {"messages": [{"role": .., "content": ..}, ..]}, in the model's chat template, of which the messages of the assistant
    /// are. May be given several times: all files are one list, which each epoch shuffles anew
    #[arg(long, value_name = "FILE", group = "train", conflicts_with_all = OTHERS)]
    pub data: Vec<PathBuf>,

    /// What happens to records with more tokens than --seq-len takes
    #[arg(long, value_name = "NAME", value_parser = values::too_long(), default_value = "error", requires = "train")]
    pub too_long: TooLong,

    /// Leave out and count lines that are no records, instead of stopping at the first
    #[arg(long, requires = "train")]
    pub skip_bad_lines: bool,

    /// Give each record a sequence for itself, which is filled up; otherwise records that fit share one, and do not see each other
    #[arg(long, requires = "train")]
    pub no_packing: bool,

    /// Start from random weights: of the folder --model only the config and the tokenizer are read
    #[arg(long, requires_all = ["train", "model"], conflicts_with = "resume")]
    pub fresh: bool,

    /// Optimizer steps, including those before --resume [default: 100]; after the end of a decay the learning rate
    /// stays constant, unless --decay is given
    #[arg(long, value_name = "N", requires = "train")]
    pub steps: Option<usize>,

    /// Sequences per step, on all ranks together; with --prompts, texts that are continued at once [default: 8]
    #[arg(long, value_name = "N")]
    pub batch: Option<usize>,

    /// Tokens per sequence [default: 128]
    #[arg(long, value_name = "N", requires = "train")]
    pub seq_len: Option<usize>,

    /// Learning rate of AdamW after the warm-up [default: 0.0003]
    #[arg(long, value_name = "X", allow_negative_numbers = true, requires = "train")]
    pub lr: Option<f64>,

    /// Steps of the warm-up, in which the learning rate rises [default: 10]
    #[arg(long, value_name = "N", requires = "train")]
    pub warmup: Option<usize>,

    /// Decay of the learning rate until the last step [default: cosine]
    #[arg(long, value_name = "NAME", value_parser = values::decay(), requires = "train")]
    pub decay: Option<Decay>,

    /// Weight decay, relative to the learning rate [default: 0.1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, requires = "train")]
    pub weight_decay: Option<f64>,

    /// Largest norm of the gradients of a step, which are scaled down to it; 0 for no limit [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, requires = "train")]
    pub clip_norm: Option<f64>,

    /// Replicas of the model, each with its part of the batch
    #[arg(long, value_name = "N", default_value_t = 1, requires = "train")]
    pub dp: usize,

    /// Shard parameters, gradients and optimizer state over --dp; each layer is whole only while it runs
    #[arg(long, requires = "train")]
    pub fsdp: bool,

    /// Schedule of the stages: one of those that `--bin schedules` draws
    #[arg(long, value_name = "NAME", default_value = "1f1b", requires = "train")]
    pub schedule: ScheduleKind,

    /// Stages per rank [default: as many as the schedule needs]
    #[arg(long, value_name = "N", requires = "train")]
    pub virtual_stages: Option<usize>,

    /// Microbatches per replica [default: the fewest that leave ranks idle for less than a fifth of a step, as far as
    /// the batch has sequences]
    #[arg(long, value_name = "N", requires = "train")]
    pub microbatches: Option<usize>,

    /// Parts of the batch whose gradients are accumulated, to save memory
    #[arg(long, value_name = "N", default_value_t = 1, requires = "train")]
    pub accumulate: usize,

    /// Keep only the inputs of layers and recompute the rest in the backward pass, to save memory
    #[arg(long, requires = "train")]
    pub recompute: bool,

    /// Folder for checkpoints; each is also a model for --model
    #[arg(long, value_name = "FOLDER", requires = "train")]
    pub save: Option<PathBuf>,

    /// Save a checkpoint every this many steps, and at the end [default: at the end]
    #[arg(long, value_name = "N", requires = "save")]
    pub save_every: Option<usize>,

    /// Continue from the last checkpoint of this folder, on any mesh; options that are not given keep their values
    #[arg(long, value_name = "FOLDER", requires = "train", conflicts_with = "model")]
    pub resume: Option<PathBuf>,

    /// Print the loss of this text, which is not trained on, with each checkpoint, and at the end. A file whose name ends with .jsonl has
    /// records, as those of --data
    #[arg(long, value_name = "FILE", requires = "train")]
    pub valid: Option<PathBuf>,

    /// Steps between the losses of --valid [default: those of --save-every]
    #[arg(long, value_name = "N", requires = "valid")]
    pub valid_every: Option<usize>,

    /// Steps between printed losses
    #[arg(long, value_name = "N", default_value_t = 10, requires = "train")]
    pub log_every: usize,

    /// Write each step to this file, as one JSON object per line; --resume goes on behind the checkpoint's step
    #[arg(long, value_name = "FILE", requires = "train")]
    pub log: Option<PathBuf>,
}

const MAX_RANKS: usize = 256;

/// The flags of other commands.
const OTHERS: [&str; 16] = [
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
    "cache_dtype",
    "dequantize",
    "prompts",
    "cache_tokens",
    "text",
    "window",
    "stride",
    "shares",
];

impl TrainArgs {
    /// Whether there is something to learn.
    pub fn trains(&self) -> bool {
        self.train.is_some() || !self.data.is_empty()
    }

    /// How records become sequences.
    pub fn data_options(&self) -> DataOptions {
        let Self { too_long, skip_bad_lines, no_packing: apart, .. } = *self;
        DataOptions { too_long, skip_bad_lines, apart }
    }

    /// Returns the recipe of the flags; options without a flag are those of the checkpoint, or of `base`.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub fn recipe(
        &self,
        dtype: Option<DTypeName>,
        seed: Option<u64>,
        saved: Option<&Recipe>,
        base: Recipe,
    ) -> Checked<Recipe> {
        let base = saved.cloned().unwrap_or(base);
        let recipe = Recipe {
            rate: Rate {
                peak: self.lr.unwrap_or(base.rate.peak),
                warmup: self.warmup.unwrap_or(base.rate.warmup),
                decay: self.decay.unwrap_or(base.rate.decay),
                steps: self.steps.unwrap_or(base.rate.steps),
                ended: None,
            },
            batch: self.batch.unwrap_or(base.batch),
            seq_len: self.seq_len.unwrap_or(base.seq_len),
            weight_decay: self.weight_decay.unwrap_or(base.weight_decay),
            clip_norm: self.clip_norm.unwrap_or(base.clip_norm),
            dtype: dtype.unwrap_or(base.dtype),
            seed: seed.unwrap_or(base.seed),
        };
        recipe.check().map_err(refusal)?;
        match saved {
            Some(saved) => recipe.check_follows(saved).map_err(refusal).map(|()| recipe),
            None => Ok(recipe),
        }
    }

    /// Returns the mesh and the schedule for `pp` pipeline ranks, `cp` ranks of tokens, `ep` ranks of experts, `tp`
    /// tensor-parallel ranks, and `batch` sequences per step.
    ///
    /// # Errors
    /// A sentence with the flags, if the schedule does not fit them.
    pub fn pipeline(&self, [pp, cp, ep, tp]: [usize; 4], batch: usize) -> Checked<Pipeline> {
        let (dp, kind) = (self.dp, self.schedule);
        let virtual_stages = self.virtual_stages.unwrap_or(kind.stages_per_rank());
        let asked = Pipeline {
            pp,
            dp,
            cp,
            ep,
            tp,
            kind,
            virtual_stages,
            microbatches: self.microbatches.unwrap_or(1),
        };
        let fits = match self.microbatches {
            Some(_) => asked.schedule().map(|_| asked),
            // As many as the smallest part of the batch has sequences.
            None => asked.with_small_bubble(batch / (dp * ep * self.accumulate)),
        };
        fits.map_err(|error| {
            let parts = self.microbatches.map(|parts| format!(" --microbatches {parts}")).unwrap_or_default();
            let stages =
                self.virtual_stages.map(|stages| format!(" --virtual-stages {stages}")).unwrap_or_default();
            UsageError(format!(
                "--pp {pp}{stages}{parts} and --batch {batch} do not fit --schedule {kind}: {error}."
            ))
        })
    }

    /// Checks everything that does not depend on files.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub fn validate(&self, dtype: Option<DTypeName>, [pp, cp, ep, tp]: [usize; 4]) -> Checked {
        if !self.trains() {
            return Ok(());
        }
        let dp = self.dp;
        check_counts([
            ("--dp", dp, ANY),
            ("--microbatches", self.microbatches.unwrap_or(1), ANY),
            ("--virtual-stages", self.virtual_stages.unwrap_or(1), ANY),
            ("--accumulate", self.accumulate, ANY),
            ("--valid-every", self.valid_every.unwrap_or(1), ANY),
            ("--save-every", self.save_every.unwrap_or(1), ANY),
            ("--log-every", self.log_every, ANY),
        ])?;
        let ranks = dp.checked_mul(pp * cp * ep * tp).filter(|&ranks| ranks <= MAX_RANKS);
        require!(
            ranks.is_some(),
            "--pp {pp} × --dp {dp} × --cp {cp} × --ep {ep} × --tp {tp} are too many ranks: give at most {MAX_RANKS}."
        );
        if let Some(folder) = &self.resume {
            require!(
                folder.is_dir(),
                "--resume {} is no folder: give that of an earlier --save.",
                folder.display()
            );
        }
        if let Some(log) = &self.log {
            check_file("--log", log, "")?;
        }
        // Options that may come from a checkpoint are checked with it.
        if self.resume.is_none() {
            let recipe = self.recipe(dtype, None, None, Recipe::default())?;
            self.check_batch(&recipe, ep)?;
            self.pipeline([pp, cp, ep, tp], recipe.batch)?;
        }
        Ok(())
    }

    /// Checks that there are sequences for all parts of the batch, equally many where replicas compute together.
    ///
    /// # Errors
    /// A sentence with the flags, their values and a remedy.
    pub fn check_batch(&self, recipe: &Recipe, ep: usize) -> Checked {
        let (batch, dp, accumulate) = (recipe.batch, self.dp, self.accumulate);
        let microbatches = self.microbatches.unwrap_or(1);
        let parts = [dp, ep, microbatches, accumulate].into_iter().fold(1, usize::saturating_mul);
        let experts = if ep > 1 { format!(" × --ep {ep}") } else { String::new() };
        require!(
            batch >= parts,
            "--batch {batch} has too few sequences for --dp {dp}{experts} × --microbatches {microbatches} × --accumulate {accumulate}: give at least {parts}."
        );
        let (is_even, of) = match ep {
            1 => (!self.fsdp || dp == 1 || batch.is_multiple_of(dp * accumulate), "--fsdp"),
            _ => (batch.is_multiple_of(dp * ep * accumulate), "--ep"),
        };
        require!(
            is_even,
            "--batch {batch} does not divide evenly over --dp {dp}{experts} × --accumulate {accumulate}, as it must with {of}: give a multiple of {}.",
            dp * ep * accumulate
        );
        Ok(())
    }
}
