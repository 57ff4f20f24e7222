//! The command line of `lm`.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::path::PathBuf;

use candle_lm::dtype::DTypeName;
use candle_lm::hub::HubName;
use candle_lm::sample::Sampling;
use candle_pipe::StageLayout;
use candle_shard::parallel::Shares;
use candle_shard::regular;
use clap::{ArgMatches, Parser};
use examples::cli::{Checked, UsageError, require};
use examples::launch::{BackendName, Launched, Patience, ProductPrecision, local_size};

use crate::adapters::AdapterArgs;
use crate::batch::args::BatchArgs;
use crate::bench_serve::args::BenchServeArgs;
use crate::chat::args::ChatArgs;
use crate::command::Command;
use crate::export::ExportArgs;
use crate::flags;
use crate::help::{ABOUT, EXAMPLES};
use crate::score::args::ScoreArgs;
use crate::serve::args::ServeArgs;
use crate::train::args::TrainArgs;
use crate::values;

const PROMPT: &str = "Once upon a time";

/// The command-line arguments; the comments on the fields are the program's help.
#[derive(Clone, Debug, Parser)]
#[command(name = "lm", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Args {
    /// What to do [default: train with --train or --data, else generate]
    #[arg(value_name = "COMMAND")]
    pub command: Option<Command>,

    /// Folder or GGUF file of the model, or its name on the Hub: owner/name, owner/name@revision or owner/name/file.gguf; with
    /// bench-serve its name at the server [default: a small random one; the first one of the server]
    #[arg(long, value_name = "PATH|NAME", help_heading = "Model")]
    pub model: Option<PathBuf>,

    /// Field of the config, or key of a GGUF file, that is refused and changes nothing as you know; may be given several times
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub ignore_field: Vec<String>,

    /// Adapters.
    #[command(flatten)]
    pub adapters: AdapterArgs,

    /// Hold quantized weights as floats
    #[arg(long, help_heading = "Model")]
    pub dequantize: bool,

    /// Dtype of parameters and computation; bf16 and f16 are trained with 32-bit master weights, and f16 with scaled
    /// gradients [default: that of the files; f32 for a random model]
    #[arg(long, value_name = "NAME", value_parser = values::dtype(), help_heading = "Model")]
    pub dtype: Option<DTypeName>,

    /// Ranks over which each layer is sharded
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Ranks")]
    pub tp: usize,

    /// Shares of the --tp ranks, for example 3:1 if the first has three times the memory of the second [default: even]
    #[arg(long, value_name = "A:B", help_heading = "Ranks")]
    pub shares: Option<Shares>,

    /// Ranks over which the tokens of a text are distributed: each keeps the keys and values of some of them, and in
    /// training all states
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Ranks")]
    pub cp: usize,

    /// Ranks over which the experts of a mixture are distributed; each has --tp ranks, over which experts are cut too
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Ranks")]
    pub ep: usize,

    /// Stages into which the layers are cut, each on --ep × --tp ranks
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Ranks")]
    pub pp: usize,

    /// The layers of each stage, one letter each for the token table, each layer, the last norm and the output layer:
    /// `E|t*3|tnL` [default: stages of about equal cost]
    #[arg(long, value_name = "TEXT", help_heading = "Ranks")]
    pub layout: Option<StageLayout>,

    /// Compute threads of each rank; keep ranks × threads within the number of cores [default: the cores divided by the
    /// ranks of this machine]
    #[arg(long, value_name = "N", help_heading = "Ranks")]
    pub threads: Option<usize>,

    /// Backend that moves tensors between ranks; for processes, start one per rank with mpirun
    #[arg(long, value_name = "NAME", default_value = "threads", help_heading = "Ranks")]
    pub backend: BackendName,

    /// How long ranks wait.
    #[command(flatten)]
    pub patience: Patience,

    /// How exact products are.
    #[command(flatten)]
    pub precision: ProductPrecision,

    /// The text to continue [default: stdin unless it is a terminal, else "Once upon a time"]
    #[arg(long, value_name = "TEXT", help_heading = "Text")]
    pub prompt: Option<String>,

    /// Conversations.
    #[command(flatten)]
    pub talk: ChatArgs,

    /// The most tokens to generate, in a conversation for each reply
    #[arg(long, value_name = "N", default_value_t = 100, help_heading = "Text")]
    pub max_tokens: usize,

    /// Temperature of the sampling; 0 picks the most likely token. generation_config.json is not used for it
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.8,
        allow_negative_numbers = true,
        help_heading = "Text"
    )]
    pub temperature: f64,

    /// The share of the probability from which tokens are sampled (top-p)
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.95,
        allow_negative_numbers = true,
        help_heading = "Text"
    )]
    pub top_p: f64,

    /// Draw from this many of the most likely tokens; 0 for all
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Text")]
    pub top_k: usize,

    /// Do not draw tokens that are less likely than this share of the likeliest one
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        help_heading = "Text"
    )]
    pub min_p: f64,

    /// Divide positive logits of tokens that were there before by this, and multiply negative ones
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        allow_negative_numbers = true,
        help_heading = "Text"
    )]
    pub repetition_penalty: f64,

    /// Stop before this text or special token; may be given several times
    #[arg(long, value_name = "TEXT", help_heading = "Text")]
    pub stop: Vec<String>,

    /// Dtype of cached keys and values [default: that of the computation]
    #[arg(long, value_name = "NAME", value_parser = values::dtype(), help_heading = "Model")]
    pub cache_dtype: Option<DTypeName>,

    /// Seed of sampling and batches, and of the random model [default: 0]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub seed: Option<u64>,

    /// Many prompts.
    #[command(flatten)]
    pub batches: BatchArgs,

    /// The options of a server.
    #[command(flatten)]
    pub serve: ServeArgs,

    /// The options of a load on a server.
    #[command(flatten)]
    pub load: BenchServeArgs,

    /// The scoring options.
    #[command(flatten)]
    pub score: ScoreArgs,

    /// The export options.
    #[command(flatten)]
    pub export: ExportArgs,

    /// The training options.
    #[command(flatten)]
    pub training: TrainArgs,

    /// Also write the results as one JSON object; `-` is stdout, without other output
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
}

impl Launched for Args {
    fn backend(&self) -> BackendName {
        self.backend
    }

    fn patience(&self) -> Patience {
        self.patience
    }

    fn precision(&self) -> ProductPrecision {
        self.precision
    }

    fn threads(&self) -> Option<usize> {
        self.threads
    }

    fn define(definition: clap::Command, arguments: &[OsString]) -> clap::Command {
        flags::hide(definition, arguments)
    }

    fn check_given(matches: &ArgMatches) -> Checked {
        flags::check(matches)
    }

    fn ranks(&self) -> Vec<(String, usize)> {
        let Self { pp, cp, tp, ep, .. } = *self;
        let experts = if ep > 1 { format!(" × --ep {ep}") } else { String::new() };
        let tokens = if cp > 1 { format!(" × --cp {cp}") } else { String::new() };
        match &self.training {
            _ if self.command == Some(Command::Info) => vec![("info".into(), 1)],
            _ if self.command == Some(Command::Export) => vec![("export".into(), 1)],
            _ if self.command == Some(Command::Merge) => vec![("merge".into(), 1)],
            _ if self.command == Some(Command::BenchServe) => vec![("bench-serve".into(), 1)],
            training @ TrainArgs { dp, .. } if training.trains() => {
                vec![(
                    format!("--pp {pp} × --dp {dp}{tokens}{experts} × --tp {tp}"),
                    self.model_ranks().saturating_mul(*dp),
                )]
            }
            _ => {
                let replicas = if self.dp() > 1 { format!(" × --dp {}", self.dp()) } else { String::new() };
                vec![(format!("--pp {pp}{replicas}{tokens}{experts} × --tp {tp}"), self.model_ranks())]
            }
        }
    }
}

impl Args {
    /// The ranks of generating or scoring that share the memory of this machine; none if they compute on GPUs.
    pub fn ranks_here(&self) -> usize {
        match self.backend {
            BackendName::Threads => self.model_ranks(),
            BackendName::Mpi => local_size(),
            BackendName::Nccl => 0,
        }
    }

    /// Returns the model's name on the Hub, if `--model` is no path that exists.
    pub fn hub_name(&self) -> Option<HubName> {
        let model = self.model.as_ref().filter(|model| !model.exists())?;
        HubName::parse(model.to_str()?)
    }

    /// The ranks of all replicas over which a model that is not trained is cut.
    pub fn model_ranks(&self) -> usize {
        // Also asked for before the flags are checked.
        [self.pp, self.cp, self.ep, self.tp].into_iter().fold(self.dp(), usize::saturating_mul)
    }

    /// The replicas of a model that is not trained: those of a server.
    pub fn dp(&self) -> usize {
        if self.command == Some(Command::Serve) { self.training.dp } else { 1 }
    }

    /// The seed of all random numbers.
    pub fn seed(&self) -> u64 {
        self.seed.unwrap_or_default()
    }

    /// Returns the text to continue.
    ///
    /// # Errors
    /// If it is empty, or stdin cannot be read.
    pub fn prompt(&self) -> Checked<String> {
        let prompt = match &self.prompt {
            Some(prompt) => prompt.clone(),
            None if io::stdin().is_terminal() => PROMPT.into(),
            None => {
                let read = regular::read_stream(io::stdin().lock(), regular::STREAM);
                let read = read
                    .map_err(|error| UsageError(format!("the prompt on stdin cannot be read: {error}.")))?;
                if read.is_empty() { PROMPT.into() } else { read }
            }
        };
        require!(!prompt.is_empty(), "--prompt is empty: give some text to go on from.");
        Ok(prompt)
    }

    /// Returns the sampling options.
    pub fn sampling(&self) -> Sampling {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, .. } = *self;
        let seed = self.seed();
        Sampling { temperature, top_p, top_k, min_p, repetition_penalty, seed, ..Sampling::default() }
    }
}
