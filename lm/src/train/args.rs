//! The command-line arguments for training.

use std::path::PathBuf;

use candle_lm::dtype::DTypeName;
use candle_lm::train::data::{DataOptions, TooLong};
use candle_lm::train::frozen::FrozenModules;
use candle_lm::train::rate::{Decay, Rate};
use candle_lm::train::recipe::{LocalRecipe, Recipe};
use candle_pipe::Pipeline;
use candle_pipe::schedule::ScheduleKind;
use clap::Args;
use examples::arguments::{ANY, check_counts};
use examples::cli::{Checked, UsageError, check_file, require};

use crate::adapters::LoraFlag;
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

    /// Train an adapter instead of the model, and save it in PEFT's layout: r=N, alpha=X, dropout=P, targets=NAME+NAME or
    /// all-linear, layers=N+N, ranks=NAME:N+NAME:N, alphas=NAME:X+NAME:X, save=NAME+NAME, rslora, dora, bias, separated by commas; the
    /// model may be a GGUF file
    #[arg(long, value_name = "OPTIONS", requires_all = ["train", "model"], conflicts_with_all = ["resume", "fresh"])]
    pub lora: Option<LoraFlag>,

    /// As --lora, of a model whose weights stay in blocks of few bits, as those of a GGUF file and of folders in FP8 or MXFP4 do
    /// (QLoRA); another model is refused
    #[arg(long, value_name = "OPTIONS", requires_all = ["train", "model"], conflicts_with_all = ["resume", "fresh", "lora"])]
    pub qlora: Option<LoraFlag>,

    /// Learn which of two answers is the better one, by direct preference optimization with this β: the records of --data have prompt,
    /// chosen and rejected. The model without the adapter of --lora is the reference
    #[arg(long, value_name = "BETA", num_args = 0..=1, default_missing_value = "0.1", requires = "data")]
    pub dpo: Option<f64>,

    /// Learn the factors B of the adapter of --lora at RATIO times the learning rate (LoRA+), and magnitudes too
    #[arg(long, value_name = "RATIO", allow_negative_numbers = true, requires = "train")]
    pub lora_plus: Option<f64>,

    /// Modules of the model that do not learn, by parts of their paths, with * and ? for any characters: embed_tokens+layers.0+layers.*.mlp.
    /// With --resume they replace those of before, and none stands for no module: what learns anew begins with a fresh optimizer
    #[arg(long, value_name = "NAME+NAME", value_delimiter = '+', requires = "train", conflicts_with_all = ["lora", "qlora"])]
    pub freeze: Vec<String>,

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

    /// Learning rate at which the decay ends [default: a tenth of --lr; 0 for inverse-sqrt]
    #[arg(long, value_name = "X", allow_negative_numbers = true, requires = "train")]
    pub min_lr: Option<f64>,

    /// Last steps, in which --decay wsd falls [default: a tenth of --steps]
    #[arg(long, value_name = "N", requires = "train")]
    pub decay_steps: Option<usize>,

    /// Weight decay, relative to the learning rate [default: 0.1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, requires = "train")]
    pub weight_decay: Option<f64>,

    /// Largest norm of the gradients of a step, which are scaled down to it; 0 for no limit [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, requires = "train")]
    pub clip_norm: Option<f64>,

    /// Leave out steps whose loss or gradients are not finite, up to N in a row; one more ends the training. In f16, steps that
    /// overflow do not count: they halve the scale of the loss
    #[arg(long, value_name = "N", default_value_t = 0, requires = "train")]
    pub skip_nonfinite: usize,

    /// Replicas of the model, each with its part of the batch, or with texts of its own of a server
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub dp: usize,

    /// Shard parameters, gradients and optimizer state over --dp; each layer is whole only while it runs
    #[arg(long, requires = "train")]
    pub fsdp: bool,

    /// Let the replicas of --dp train apart, and bring them together every this many steps (DiLoCo)
    #[arg(long, value_name = "N", requires = "train")]
    pub local_steps: Option<usize>,

    /// Learning rate of the outer optimizer, by which the replicas of --local-steps meet [default: 0.7]
    #[arg(long, value_name = "X", allow_negative_numbers = true, requires = "train")]
    pub outer_lr: Option<f64>,

    /// Nesterov momentum of the outer optimizer [default: 0.9]
    #[arg(long, value_name = "X", allow_negative_numbers = true, requires = "train")]
    pub outer_momentum: Option<f64>,

    /// Parts of the parameters, each of which meets at a time of its own within --local-steps [default: 1]
    #[arg(long, value_name = "N", requires = "train")]
    pub fragments: Option<usize>,

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

    /// Keep only the last N checkpoints of --save, the best one, and the one of --resume [default: all]
    #[arg(long, value_name = "N", requires = "save")]
    pub keep: Option<usize>,

    /// Save a checkpoint whenever the loss of --valid is the least so far; the link `best` in the folder of --save leads to it
    #[arg(long, requires_all = ["save", "valid"])]
    pub keep_best: bool,

    /// Continue from the last checkpoint of this folder, on any mesh; options that are not given keep their values. An adapter changes the
    /// model of --model, or the one that it was trained on, where that was
    #[arg(long, value_name = "FOLDER", requires = "train")]
    pub resume: Option<PathBuf>,

    /// Print the loss of this text, which is not trained on, with each checkpoint, and at the end. A file whose name ends with .jsonl has
    /// records, as those of --data
    #[arg(long, value_name = "FILE", requires = "train")]
    pub valid: Option<PathBuf>,

    /// Steps between the losses of --valid [default: those of --save-every]
    #[arg(long, value_name = "N", requires = "valid")]
    pub valid_every: Option<usize>,

    /// End the training, with a checkpoint, after N losses of --valid in a row that are no lower than the least before
    #[arg(long, value_name = "N", requires = "valid")]
    pub patience: Option<usize>,

    /// Steps between printed losses
    #[arg(long, value_name = "N", default_value_t = 10, requires = "train")]
    pub log_every: usize,

    /// Write each step to this file, as one JSON object per line; --resume goes on behind the checkpoint's step
    #[arg(long, value_name = "FILE", requires = "train")]
    pub log: Option<PathBuf>,

    /// Write the numbers of each step to a new event file in this folder, as TensorBoard reads them
    #[arg(long, value_name = "FOLDER", requires = "train")]
    pub tensorboard: Option<PathBuf>,

    /// Floating-point operations per second of all ranks together, in 10^12, of which the share that is used is printed
    #[arg(long, value_name = "X", allow_negative_numbers = true, requires = "train")]
    pub peak_tflops: Option<f64>,
}

const MAX_RANKS: usize = 256;

/// The flags of other commands.
const OTHERS: [&str; 15] = [
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
];

impl TrainArgs {
    /// Whether there is something to learn.
    pub fn trains(&self) -> bool {
        self.train.is_some() || !self.data.is_empty()
    }

    /// The adapter that is trained, if it is not one of a checkpoint.
    pub fn adapter(&self) -> Option<&LoraFlag> {
        self.lora.as_ref().or(self.qlora.as_ref())
    }

    /// How records become sequences, those of preferences too.
    pub fn data_options(&self, preferences: bool) -> DataOptions {
        let Self { too_long, skip_bad_lines, no_packing: apart, .. } = *self;
        DataOptions { too_long, skip_bad_lines, apart, preferences }
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
        let decay = self.decay.unwrap_or(base.rate.decay);
        let recipe = Recipe {
            rate: Rate {
                peak: self.lr.unwrap_or(base.rate.peak),
                warmup: self.warmup.unwrap_or(base.rate.warmup),
                decay,
                steps: self.steps.unwrap_or(base.rate.steps),
                ended: None,
                // Those of the checkpoint, as far as this decay has them.
                least: self.min_lr.or(base.rate.least.filter(|_| decay != Decay::None)),
                decay_steps: self.decay_steps.or(base.rate.decay_steps.filter(|_| decay == Decay::Wsd)),
            },
            batch: self.batch.unwrap_or(base.batch),
            seq_len: self.seq_len.unwrap_or(base.seq_len),
            weight_decay: self.weight_decay.unwrap_or(base.weight_decay),
            clip_norm: self.clip_norm.unwrap_or(base.clip_norm),
            dtype: dtype.unwrap_or(base.dtype),
            seed: seed.unwrap_or(base.seed),
            dpo: self.dpo.or(base.dpo),
            lora_plus: self.lora_plus.or(base.lora_plus),
            freeze: match &self.freeze[..] {
                [] => base.freeze,
                [none] if none == "none" => FrozenModules::default(),
                names => FrozenModules::new(names.iter().cloned()),
            },
            local: self.local(base.local)?,
        };
        recipe.check().map_err(refusal)?;
        match saved {
            Some(saved) => recipe.check_follows(saved).map_err(refusal).map(|()| recipe),
            None => Ok(recipe),
        }
    }

    /// Returns how replicas meet that train apart; options without a flag are those of the checkpoint.
    fn local(&self, saved: Option<LocalRecipe>) -> Checked<Option<LocalRecipe>> {
        let Some(steps) = self.local_steps.or(saved.map(|saved| saved.steps)) else {
            let given = [
                ("--outer-lr", self.outer_lr.is_some()),
                ("--outer-momentum", self.outer_momentum.is_some()),
                ("--fragments", self.fragments.is_some()),
            ];
            if let Some((flag, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
                require!(
                    false,
                    "{flag} is for replicas that train apart: give --local-steps too, or leave it out."
                );
            }
            return Ok(None);
        };
        require!(
            !self.fsdp,
            "--fsdp cuts each layer over the replicas of --dp, which train apart with --local-steps: leave one of them out."
        );
        let base =
            saved.unwrap_or(LocalRecipe { steps, replicas: self.dp, fragments: 1, lr: 0.7, momentum: 0.9 });
        Ok(Some(LocalRecipe {
            steps,
            replicas: self.dp,
            fragments: self.fragments.unwrap_or(base.fragments),
            lr: self.outer_lr.unwrap_or(base.lr),
            momentum: self.outer_momentum.unwrap_or(base.momentum),
        }))
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
            ("--keep", self.keep.unwrap_or(1), ANY),
            ("--patience", self.patience.unwrap_or(1), ANY),
            ("--log-every", self.log_every, ANY),
        ])?;
        // Their losses would be those of models that differ.
        for (flag, is_given) in [("--patience", self.patience.is_some()), ("--keep-best", self.keep_best)] {
            require!(
                !is_given || self.local_steps.is_none(),
                "{flag} needs replicas that are together, and --local-steps trains them apart: leave one of them out."
            );
        }
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
        if let Some(folder) = &self.tensorboard {
            let shown = folder.display();
            require!(!folder.exists() || folder.is_dir(), "--tensorboard {shown} is no folder: give one.");
        }
        if let Some(peak) = self.peak_tflops {
            require!(
                peak.is_finite() && peak > 0.0,
                "--peak-tflops {peak} is not a positive finite number: leave it out if you do not know it."
            );
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
            _ if recipe.local.is_some() => (batch.is_multiple_of(dp * ep * accumulate), "--local-steps"),
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
