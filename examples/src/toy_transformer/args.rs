//! The command line of the toy Transformer.

use std::fmt;
use std::path::PathBuf;

use candle_pipe::Pipeline;
use candle_pipe::schedule::ScheduleKind;
use clap::{Parser, ValueEnum};
use test_utils::model_args::ModelArgs;
use test_utils::toy::TransformerPipe;

use crate::launch::{BackendName, Launched, Patience, ProductPrecision};

/// The program reads and predicts bytes.
pub const VOCAB_SIZE: usize = 256;

const ABOUT: &str = "\
Trains a byte-level toy Transformer on one device and in parallel, and shows that the runs agree

The same model is trained from the same seed on the same batches once per run:

  single  on one device, in plain candle; the other runs must agree with it
  tp      tensor-parallel: attention heads and feed-forward columns split over the ranks
  tp_sp   the same with sequence parallel: norms and dropout work on a slice of the sequence
  cp      context-parallel: each rank has a part of each sequence, and keys and values meet queries in attention
  ep      expert-parallel, with experts in place of feed-forward networks: each rank has some of the sequences and some of
          the experts
  pp      pipeline, data and tensor-parallel on one mesh of ranks, pp × dp × tp: the model is cut into stages that are
          scheduled over microbatches, and each replica has its own part of the batch; with --fsdp, --cp and --ep
          each stage is cut over these axes too
  pp_sp   the same with sequence parallel

Ranks are threads of this process, so there is nothing to install or to start. With another --backend each rank is a
process, and the first one shows the results.";

const EXAMPLES: &str = "\
Examples:
  cargo run --release
      Compare the default runs.
  cargo run --release -- --runs single --steps 500 --dim 256 --text moby-dick.txt
      Learn a text of your own, longer and wider, on one device.
  cargo run --release -- --pp 2 --dp 2 --tp 2 --schedule 1f1b --microbatches 4
      Compare one device with a pipeline of two stages, two replicas and two tensor-parallel ranks each.
  cargo run --release -- --ep 2 --experts 8 --top-k 2
      Compare one device with two ranks that share the experts.
  cargo run --release -- --runs single,pp --pp 2 --cp 2 --ep 2 --experts 8 --dropout 0 --zigzag
      Compare one device with a pipeline of two stages, each on two ranks for sequences times two for experts.
  cargo run --release -- --json - 2>/dev/null | jq '.runs[] | {name, ms_per_step}'
      Get the numbers into a script: only JSON on stdout, all else on stderr.
  cargo build --release --features mpi && mpirun -n 2 target/release/toy-transformer --backend mpi
      Compare the default runs on 2 processes.

Exit status: 0 if the runs agree, 1 if they disagree or one failed, 2 if the command line cannot work.";

/// The command-line arguments; the comments on the fields are the program's help.
#[derive(Clone, Debug, Parser)]
#[command(name = "toy-transformer", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Args {
    /// Runs, in this order; all are compared with `single`, or without it with the first [default: single,tp,tp_sp, or
    /// single,pp if a pipeline option or both --cp and --ep are given, single,cp if --cp is given, or single,ep if --ep or
    /// --experts is given]
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        hide_possible_values = true,
        help_heading = "Runs"
    )]
    pub runs: Vec<RunName>,

    /// Tensor-parallel ranks of the runs `tp` and `tp_sp`, and of each stage of `pp` and `pp_sp` [default: 2, or 1 per
    /// stage]
    #[arg(long, value_name = "N", help_heading = "Runs")]
    pub tp: Option<usize>,

    /// Context-parallel ranks of the run `cp`, and of each stage of `pp` [default: 2, or 1 per stage]
    #[arg(long, value_name = "N", help_heading = "Runs")]
    pub cp: Option<usize>,

    /// Give each context-parallel rank a piece from the front of a sequence and one from its end, so that all have as
    /// much work; without dropout, whose masks are drawn by position
    #[arg(long, help_heading = "Runs")]
    pub zigzag: bool,

    /// Expert-parallel ranks of the run `ep`, and of each stage of `pp` and `pp_sp`, each with some of the batch and some
    /// of the experts [default: 2, or 1 per stage]
    #[arg(long, value_name = "N", help_heading = "Runs")]
    pub ep: Option<usize>,

    /// Compute threads of each rank; keep ranks × threads within the number of cores [default: the cores divided by the
    /// ranks of this machine]
    #[arg(long, value_name = "N", help_heading = "Runs")]
    pub threads: Option<usize>,

    /// Pipeline ranks of the runs `pp` and `pp_sp`, each with one or two stages, as the schedule requires [default: 2,
    /// or 1 with another axis]
    #[arg(long, value_name = "N", help_heading = "Pipelines")]
    pub pp: Option<usize>,

    /// Replicas of the model, each with its part of the batch [default: 1]
    #[arg(long, value_name = "N", help_heading = "Pipelines")]
    pub dp: Option<usize>,

    /// Ranks of each stage that have pieces of the blocks' parameters, each with some of the batch [default: 1]
    #[arg(long, value_name = "N", help_heading = "Pipelines")]
    pub fsdp: Option<usize>,

    /// Schedule of the pipeline: one of those that `--bin schedules` draws [default: 1f1b]
    #[arg(long, value_name = "NAME", help_heading = "Pipelines")]
    pub schedule: Option<ScheduleKind>,

    /// Microbatches per replica [default: 4]
    #[arg(long, value_name = "N", help_heading = "Pipelines")]
    pub microbatches: Option<usize>,

    /// Backend that moves tensors between ranks; for processes, start one per rank with mpirun
    #[arg(long, value_name = "NAME", default_value = "threads", help_heading = "Runs")]
    pub backend: BackendName,

    /// How long ranks wait.
    #[command(flatten)]
    pub patience: Patience,

    /// How exact products are.
    #[command(flatten)]
    pub precision: ProductPrecision,

    /// Largest difference of losses (relative) and gradients (absolute) at which runs count as equal; 100 times that
    /// for logits
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1e-4,
        allow_negative_numbers = true,
        help_heading = "Runs"
    )]
    pub tolerance: f64,

    /// Width of the model; a multiple of --heads
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Model")]
    pub dim: usize,

    /// Transformer blocks
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Model")]
    pub layers: usize,

    /// Attention heads, at least as many as --tp; their number need not divide evenly
    #[arg(long, value_name = "N", default_value_t = 8, help_heading = "Model")]
    pub heads: usize,

    /// Experts of each feed-forward network [default: none, or 8 with --ep or the run `ep`]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub experts: Option<usize>,

    /// Experts that each token uses, at most --experts [default: 2, or 1 of 1]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub top_k: Option<usize>,

    /// Probability that dropout zeroes an element, in [0, 1)
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.1,
        allow_negative_numbers = true,
        help_heading = "Model"
    )]
    pub dropout: f64,

    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = 150, help_heading = "Training")]
    pub steps: usize,

    /// Bytes per sequence
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Training")]
    pub seq: usize,

    /// Sequences per step
    #[arg(long, value_name = "N", default_value_t = 8, help_heading = "Training")]
    pub batch: usize,

    /// Learning rate of AdamW
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1e-3,
        allow_negative_numbers = true,
        help_heading = "Training"
    )]
    pub lr: f64,

    /// Largest norm of the gradients of a step, which are scaled down to it [default: none]
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Training")]
    pub clip_norm: Option<f64>,

    /// Seed of the initial parameters, the batches and dropout
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Training")]
    pub seed: u64,

    /// Text to train on [default: stories that the program generates, the same each time]
    #[arg(long, value_name = "FILE", help_heading = "Input and output")]
    pub text: Option<PathBuf>,

    /// Also write the results as one JSON object; `-` is stdout, without other output
    #[arg(long, value_name = "FILE", help_heading = "Input and output")]
    pub json: Option<PathBuf>,
}

impl Args {
    /// Returns the runs to make.
    pub fn runs(&self) -> Vec<RunName> {
        use RunName::{Cp, Ep, Pp, Single, Tp, TpSp};
        let counts = [self.pp, self.dp, self.fsdp, self.microbatches];
        let has_pipeline = self.schedule.is_some() || counts.iter().any(Option::is_some);
        match &self.runs[..] {
            [] if has_pipeline || (self.cp.is_some() && self.ep.is_some()) => vec![Single, Pp],
            [] if self.cp.is_some() => vec![Single, Cp],
            [] if self.ep.is_some() || self.experts.is_some() => vec![Single, Ep],
            [] => vec![Single, Tp, TpSp],
            runs => runs.to_vec(),
        }
    }

    /// Returns the tensor-parallel ranks of runs without pipelines.
    pub fn tensor_parallel(&self) -> usize {
        self.tp.unwrap_or(2)
    }

    /// Returns the ranks of the run `cp`.
    pub fn context_parallel(&self) -> usize {
        self.cp.unwrap_or(2)
    }

    /// Returns the ranks of the run `ep`.
    pub fn expert_parallel(&self) -> usize {
        self.ep.unwrap_or(2)
    }

    /// Returns the number of experts of a feed-forward network, and of those that each token uses; 0 for a network
    /// without experts.
    pub fn mixture(&self) -> (usize, usize) {
        let has_experts = self.ep.is_some() || self.runs().contains(&RunName::Ep);
        let experts = self.experts.unwrap_or(if has_experts { 8 } else { 0 });
        (experts, self.top_k.unwrap_or(experts.min(2)))
    }

    /// Returns the ranks and microbatches of pipelines.
    pub fn pipeline(&self) -> Pipeline {
        let others = [self.dp, self.fsdp, self.cp, self.ep, self.tp];
        let pp = if others.iter().any(Option::is_some) { 1 } else { 2 };
        let kind = self.schedule.unwrap_or(ScheduleKind::OneFOneB);
        Pipeline {
            pp: self.pp.unwrap_or(pp),
            dp: self.dp.unwrap_or(1),
            cp: self.cp.unwrap_or(1),
            ep: self.ep.unwrap_or(1),
            tp: self.tp.unwrap_or(1),
            kind,
            virtual_stages: kind.stages_per_rank(),
            microbatches: self.microbatches.unwrap_or(4),
        }
    }

    /// Returns the axes of the mesh of each stage of a pipeline.
    pub fn stage_axes(&self) -> [(&'static str, usize); 4] {
        let [fsdp, cp, ep, tp] = [self.fsdp, self.cp, self.ep, self.tp].map(|ranks| ranks.unwrap_or(1));
        [("fsdp", fsdp), ("cp", cp), ("ep", ep), ("tp", tp)]
    }

    /// Returns the number of ranks of all pipelines; `None` if it is too large for a number.
    pub fn pipeline_ranks(&self) -> Option<usize> {
        let Pipeline { pp, dp, .. } = self.pipeline();
        self.stage_axes().iter().try_fold(pp.checked_mul(dp)?, |ranks, (_, more)| ranks.checked_mul(*more))
    }

    /// Returns the model that the flags describe.
    pub fn model_args(&self) -> ModelArgs {
        ModelArgs {
            n_layers: self.layers,
            vocab_size: VOCAB_SIZE,
            max_seq_len: self.seq,
            dim: self.dim,
            n_heads: self.heads,
            dropout_p: self.dropout,
            use_attn_mask: true,
            weight_tying: true,
            recompute_activations: false,
            // The embeddings are the output layer too. Small ones start the loss at that of guessing, ln 256.
            init_stdev: Some(0.02),
            experts: self.mixture().0,
            top_k: self.mixture().1,
            seed: self.seed,
            ..ModelArgs::default()
        }
    }

    /// Returns the model as a pipeline.
    pub fn pipe(&self, is_sequence_parallel: bool) -> TransformerPipe {
        TransformerPipe::new(&self.model_args(), is_sequence_parallel).zigzag(self.zigzag)
    }
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

    fn ranks(&self) -> Vec<(String, usize)> {
        let of = |run| match run {
            RunName::Single => None,
            RunName::Tp | RunName::TpSp => {
                Some((format!("--tp {}", self.tensor_parallel()), self.tensor_parallel()))
            }
            RunName::Cp => Some((format!("--cp {}", self.context_parallel()), self.context_parallel())),
            RunName::Ep => Some((format!("--ep {}", self.expert_parallel()), self.expert_parallel())),
            RunName::Pp | RunName::PpSp => {
                let Pipeline { pp, dp, .. } = self.pipeline();
                let is_cut = |(axis, ranks): &(&str, usize)| *axis == "tp" || *ranks > 1;
                let stage = self.stage_axes().into_iter().filter(is_cut);
                let stage = stage.map(|(axis, ranks)| format!(" × --{axis} {ranks}")).collect::<String>();
                Some((format!("--pp {pp} × --dp {dp}{stage}"), self.pipeline_ranks().unwrap_or(usize::MAX)))
            }
        };
        self.runs().into_iter().filter_map(of).collect()
    }
}

/// One way to train the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RunName {
    /// One device, plain candle.
    Single,
    /// Tensor-parallel.
    Tp,
    /// Tensor-parallel with sequence parallel.
    #[value(name = "tp_sp")]
    TpSp,
    /// Context-parallel.
    Cp,
    /// Expert-parallel.
    Ep,
    /// Pipeline, data and tensor-parallel.
    Pp,
    /// Pipeline, data and tensor-parallel with sequence parallel.
    #[value(name = "pp_sp")]
    PpSp,
}

impl RunName {
    /// Returns the name on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Tp => "tp",
            Self::TpSp => "tp_sp",
            Self::Cp => "cp",
            Self::Ep => "ep",
            Self::Pp => "pp",
            Self::PpSp => "pp_sp",
        }
    }

    /// Returns whether sequences are sharded over the tensor-parallel ranks.
    pub fn is_sequence_parallel(self) -> bool {
        matches!(self, Self::TpSp | Self::PpSp)
    }
}

impl fmt::Display for RunName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
