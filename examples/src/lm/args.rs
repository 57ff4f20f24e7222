//! The command line of `lm`.

use std::ffi::OsString;
use std::fs;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

use candle_core::DType;
use candle_pipe::Layout;
use candle_shard::parallel::Shares;
use clap::{ArgMatches, Parser, ValueEnum};

use serde::{Deserialize, Serialize};

use super::batch::args::BatchArgs;
use super::chat::args::ChatArgs;
use super::flags;
use super::hub::HubName;
use super::sample::Sampling;
use super::score::args::ScoreArgs;
use super::train::args::TrainArgs;
use crate::arguments::check_counts;
use crate::cli::{Checked, Output, UsageError, require};
use crate::launch::{BackendName, Launched, Patience, local_size};

const ABOUT: &str = "\
Writes on from a prompt with a language model that is cut over ranks, or trains it on a text

Takes a folder as the Hub has it (config.json, tokenizer.json and model.safetensors, in one file or several with an
index), or a GGUF file, whose weights stay quantized. Families: Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, Phi-3, SmolLM3,
OLMo 2, Granite, and mixtures of experts: Mixtral, Qwen 3 MoE. Each rank reads its own part of the weights and no more. Without a model a small random one is made,
which shows that everything works and writes nonsense.

The text is the same on any number of ranks for a seed, as far as rounding goes; so are the losses of a training, which
may stop and go on on other ranks.";

const EXAMPLES: &str = "\
Examples:
  cargo run --release --bin lm -- generate --tp 2 --prompt \"Once\"
      Nonsense of a small random model, from two ranks.
  cargo run --release --bin lm -- generate --model ./Llama-3.2-1B --tp 2 --prompt \"The capital of France is\" --temperature 0
      A model of your own.
  cargo run --release --bin lm -- generate --model ./SmolLM2-135M-Instruct.Q4_1.gguf --tp 2 --prompt \"Once\"
      A quantized model, each rank with the blocks of its part.
  cargo run --release --bin lm -- generate --ep 2 --prompt \"Once\"
      Nonsense of a small random mixture, whose experts are distributed over two ranks.
  cargo run --release --bin lm -- score --model ./Llama-3.2-1B --tp 2 --text book.txt
      How likely the model finds a text.
  cargo run --release --bin lm -- generate --model ./Llama-3.2-1B --tp 2 --prompts prompts.txt --batch 8 --json texts.jsonl
      Each line of a file, eight at a time.
  cargo run --release --bin lm -- generate --model ./SmolLM2-135M-Instruct.Q4_1.gguf --tp 2 --chat
      A conversation with a model that was trained for it; each line is a message.
  git log -1 --format=%B | cargo run --release --bin lm -- generate --model ./Llama-3.2-1B
      The prompt from a pipe.
  cargo build --release --features mpi && mpirun -n 2 target/release/lm generate --tp 2 --backend mpi
      On 2 processes, of which the first shows the text.
  cargo run --release --bin lm -- train --train book.txt --dp 2 --tp 1 --save ./learned
      Train the small random model on a text of your own, on two replicas.
  cargo run --release --bin lm -- train --train book.txt --resume ./learned --save ./learned --steps 200 --pp 2 --tp 1
      Go on with that, on a pipeline of two stages.
  cargo run --release --bin lm -- generate --model ./learned/step-00000200 --prompt \"Once\"
      Write with what was learned.

Exit status: 0 if all went well, 1 if the model could not be read or run, 2 if the command line cannot work.";

const PROMPT: &str = "Once upon a time";

/// The command-line arguments; the comments on the fields are the program's help.
#[derive(Clone, Debug, Parser)]
#[command(name = "lm", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Args {
    /// What to do [default: train with --train, else generate]
    #[arg(value_name = "COMMAND")]
    pub command: Option<Command>,

    /// Folder or GGUF file of the model, or its name on the Hub: owner/name, owner/name@revision or owner/name/file.gguf
    /// [default: a small random one]
    #[arg(long, value_name = "PATH|NAME", help_heading = "Model")]
    pub model: Option<PathBuf>,

    /// Hold quantized weights as floats
    #[arg(long, help_heading = "Model")]
    pub dequantize: bool,

    /// Dtype of parameters and computation; bf16 is trained with 32-bit master weights [default: that of the files; f32
    /// for a random model]
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub dtype: Option<DTypeName>,

    /// Ranks over which each layer is sharded
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Ranks")]
    pub tp: usize,

    /// Shares of the --tp ranks, for example 3:1 if the first has three times the memory of the second [default: even]
    #[arg(long, value_name = "A:B", help_heading = "Ranks")]
    pub shares: Option<Shares>,

    /// Ranks over which the tokens of a text are distributed: each keeps the keys and values of some of them
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
    pub layout: Option<Layout>,

    /// Compute threads of each rank; keep ranks × threads within the number of cores
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Ranks")]
    pub threads: usize,

    /// Backend that moves tensors between ranks; for processes, start one per rank with mpirun
    #[arg(long, value_name = "NAME", default_value = "local", help_heading = "Ranks")]
    pub backend: BackendName,

    /// How long ranks wait.
    #[command(flatten)]
    pub patience: Patience,

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
    #[arg(long, value_name = "X", default_value_t = 0.8, allow_negative_numbers = true, help_heading = "Text")]
    pub temperature: f64,

    /// The share of the probability from which tokens are sampled (top-p)
    #[arg(long, value_name = "P", default_value_t = 0.95, allow_negative_numbers = true, help_heading = "Text")]
    pub top_p: f64,

    /// Draw from this many of the most likely tokens; 0 for all
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Text")]
    pub top_k: usize,

    /// Do not draw tokens that are less likely than this share of the likeliest one
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true, help_heading = "Text")]
    pub min_p: f64,

    /// Divide positive logits of tokens that were there before by this, and multiply negative ones
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true, help_heading = "Text")]
    pub repetition_penalty: f64,

    /// Stop before this text or special token; may be given several times
    #[arg(long, value_name = "TEXT", help_heading = "Text")]
    pub stop: Vec<String>,

    /// Dtype of cached keys and values [default: that of the computation]
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub cache_dtype: Option<DTypeName>,

    /// Seed of sampling and batches, and of the random model [default: 0]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub seed: Option<u64>,

    /// Many prompts.
    #[command(flatten)]
    pub batches: BatchArgs,

    /// The scoring options.
    #[command(flatten)]
    pub score: ScoreArgs,

    /// The training options.
    #[command(flatten)]
    pub training: TrainArgs,

    /// Also write the results as one JSON object; `-` is stdout, without other output
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
}

/// What the program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Command {
    /// Writes on from a prompt
    Generate,
    /// Trains on a text
    Train,
    /// Scores a text: the perplexity that a model finds in it
    Score,
    /// Tells what a model is, and what each of --tp ranks would hold
    Info,
}

impl Command {
    /// Returns its name on the command line.
    pub(super) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// A dtype of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DTypeName {
    /// 32-bit floats.
    F32,
    /// Brain floats.
    Bf16,
    /// 16-bit floats.
    F16,
}

impl TryFrom<DType> for DTypeName {
    type Error = UsageError;

    /// The name of a dtype that models are computed in.
    fn try_from(dtype: DType) -> Checked<Self> {
        let known = [Self::F32, Self::Bf16, Self::F16].into_iter().find(|name| DType::from(*name) == dtype);
        known.ok_or_else(|| UsageError(format!("models are not computed in {}: say --dtype.", dtype.as_str())))
    }
}

impl std::fmt::Display for DTypeName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(DType::from(*self).as_str())
    }
}

impl From<DTypeName> for DType {
    fn from(name: DTypeName) -> Self {
        match name {
            DTypeName::F32 => Self::F32,
            DTypeName::Bf16 => Self::BF16,
            DTypeName::F16 => Self::F16,
        }
    }
}

const MAX_RANKS: usize = 256;
pub(super) const MAX_TOKENS: usize = 1 << 24;

impl Launched for Args {
    fn backend(&self) -> BackendName {
        self.backend
    }

    fn patience(&self) -> Patience {
        self.patience
    }

    fn threads(&self) -> usize {
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
        match &self.training {
            _ if self.command == Some(Command::Info) => vec![("info".into(), 1)],
            TrainArgs { train: Some(_), dp, .. } => {
                vec![(format!("--pp {pp} × --dp {dp}{experts} × --tp {tp}"), pp * dp * ep * tp)]
            }
            _ => {
                let tokens = if cp > 1 { format!(" × --cp {cp}") } else { String::new() };
                vec![(format!("--pp {pp}{tokens}{experts} × --tp {tp}"), self.model_ranks())]
            }
        }
    }
}

impl Args {
    /// Checks everything that does not depend on the model.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub fn validate(&self) -> Checked {
        let Self { tp, pp, threads, max_tokens, temperature, top_p, .. } = *self;
        check_counts([
            ("--tp", tp, MAX_RANKS),
            ("--pp", pp, MAX_RANKS),
            ("--cp", self.cp, MAX_RANKS),
            ("--ep", self.ep, MAX_RANKS),
            ("--threads", threads, 1024),
            ("--max-tokens", max_tokens, MAX_TOKENS),
        ])?;
        require!(
            temperature.is_finite() && temperature >= 0.0,
            "--temperature {temperature} is no finite number of at least 0: try 0.8."
        );
        require!(top_p > 0.0 && top_p <= 1.0, "--top-p {top_p} is no share: give more than 0 and at most 1.");
        let Self { min_p, repetition_penalty, .. } = *self;
        require!((0.0..=1.0).contains(&min_p), "--min-p {min_p} is no share: give at least 0 and at most 1.");
        require!(
            (0.01..=100.0).contains(&repetition_penalty),
            "--repetition-penalty {repetition_penalty} is not from 0.01 to 100: give 1 for none."
        );
        let generates = self.command != Some(Command::Info) && self.training.train.is_none();
        self.talk.validate(generates, self.prompt.is_some())?;
        require!(self.stop.iter().all(|text| !text.is_empty()), "--stop is empty: give a text, or leave it out.");
        require!(
            self.cp == 1 || pp == 1,
            "--cp {} gives each rank some of the tokens, and a stage of --pp {pp} keeps all: use one of them.",
            self.cp
        );
        require!(
            self.layout.is_none() || pp > 1 || self.training.train.is_some(),
            "--layout says what is in each stage, and --pp 1 has all layers in one: give --pp, or leave it out."
        );
        if let Some(model) = self.model.as_ref().filter(|_| self.hub_name().is_none()) {
            let is_gguf = model.is_file() && model.extension().is_some_and(|extension| extension == "gguf");
            require!(
                model.is_dir() || is_gguf,
                "--model {} is no folder, no .gguf file and no name on the Hub: give a folder with config.json in it, a file, or owner/name.",
                model.display()
            );
            require!(
                model.is_dir() || self.training.train.is_none(),
                "--model {} is a GGUF file, and only folders are trained: give a folder with config.json in it.",
                model.display()
            );
        }
        match (self.command, &self.training.train) {
            (Some(Command::Train), None) => {
                require!(false, "train has no text: give --train FILE.");
            }
            (Some(Command::Generate | Command::Score | Command::Info), Some(_)) => {
                require!(false, "only train trains: leave out --train, or say train.");
            }
            _ => {}
        }
        if let Some(shares) = &self.shares {
            let count = shares.ranks();
            require!(
                count == tp,
                "--shares {shares} are for {count} ranks, and there are --tp {tp}: give a share for each."
            );
        }
        self.score.validate()?;
        self.batches.validate(self.training.batch)?;
        require!(
            self.training.batch.is_none() || self.training.train.is_some() || self.batches.prompts.is_some(),
            "--batch is for many prompts or for training: give --prompts FILE or --train FILE, or leave it out."
        );
        self.check_files()?;
        self.training.validate(self.dtype, [pp, self.ep, tp])?;
        Output::new(self.json.as_deref()).check()
    }

    /// Refuses outputs to input files, and two outputs to one file.
    fn check_files(&self) -> Checked {
        let TrainArgs { train, valid, log, .. } = &self.training;
        let (text, prompts) = (&self.score.text, &self.batches.prompts);
        let others = [
            ("--train", train),
            ("--valid", valid),
            ("--text", text),
            ("--prompts", prompts),
            ("--model", &self.model),
            ("--json", &self.json),
        ];
        for (flag, written, others) in [("--json", &self.json, &others[..5]), ("--log", log, &others[..])] {
            for (other, path) in others {
                let (Some(written), Some(path)) = (written, path) else { continue };
                require!(
                    !is_one_file(written, path),
                    "{flag} {} is also {other}, which would be lost: give another file.",
                    written.display()
                );
            }
        }
        Ok(())
    }

    /// The ranks of generating or scoring that share the memory of this machine; none if they compute on GPUs.
    pub fn ranks_here(&self) -> usize {
        match self.backend {
            BackendName::Local => self.model_ranks(),
            BackendName::Mpi => local_size(),
            BackendName::Nccl => 0,
        }
    }

    /// Returns the model's name on the Hub, if `--model` is no path that exists.
    pub fn hub_name(&self) -> Option<HubName> {
        let model = self.model.as_ref().filter(|model| !model.exists())?;
        HubName::parse(model.to_str()?)
    }

    /// The ranks over which a model that is not trained is cut.
    pub fn model_ranks(&self) -> usize {
        self.pp * self.cp * self.ep * self.tp
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
                let mut read = String::new();
                let got = io::stdin().read_to_string(&mut read);
                got.map_err(|error| UsageError(format!("the prompt on stdin cannot be read: {error}.")))?;
                if read.is_empty() { PROMPT.into() } else { read }
            }
        };
        require!(!prompt.is_empty(), "--prompt is empty: give some text to go on from.");
        Ok(prompt)
    }

    /// Returns the sampling options.
    pub fn sampling(&self) -> Sampling {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, .. } = *self;
        Sampling { temperature, top_p, top_k, min_p, repetition_penalty, seed: self.seed() }
    }
}

/// Returns whether two paths lead to one file.
fn is_one_file(a: &Path, b: &Path) -> bool {
    let found = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    found(a) == found(b)
}
