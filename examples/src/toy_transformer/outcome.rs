//! The result of one run, for reports and comparisons.

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::args::RunName;
use crate::comm::CommStat;
use crate::pipeline::PipelineStat;

/// The result of training the model once.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// Which run this was.
    pub name: RunName,
    /// Number of ranks.
    pub world: usize,
    /// The loss of every step.
    pub losses: Vec<f64>,
    /// Median time of a step in milliseconds.
    pub ms_per_step: f64,
    /// Page faults of the process in a step, after warm-up; `None` where the system does not count them.
    pub page_faults_per_step: Option<f64>,
    /// The trained model's logits on the held-out batch, `[batch, sequence, vocab]`, without dropout.
    pub logits: Tensor,
    /// The gradients of the first step by parameter name, each whole and in the global shape.
    pub first_grads: BTreeMap<String, Tensor>,
    /// Number of parameter elements that each rank holds.
    pub params_per_rank: Vec<usize>,
    /// The collectives of one step.
    pub comm_per_step: Vec<CommStat>,
    /// The layouts of some weights on the mesh.
    pub pictures: Vec<Picture>,
    /// The idle times of the ranks of a pipeline.
    pub pipeline: Option<PipelineStat>,
}

/// The layout of one weight on the mesh.
#[derive(Clone, Debug)]
pub struct Picture {
    /// The name of the weight, and its style.
    pub title: String,
    /// A text of several lines.
    pub picture: String,
}
