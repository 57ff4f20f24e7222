//! Pipeline parallelism for [candle](https://github.com/huggingface/candle): models cut into stages, batches cut into
//! microbatches, and schedules that keep the stages busy.
//!
//! Use this crate to spread the layers of a model over ranks. Values and gradients are those of one device on the whole
//! batch, for each cut, schedule and number of microbatches. The exceptions are what mixes the rows of a batch: batch norms
//! and balance losses see one microbatch, so their results depend on the number of microbatches. The [`guide`] goes from a declaration to training on a
//! mesh, step by step.
//!
//! ```
//! use candle_pipe::schedule::{Costs, Edges, ScheduleKind};
//!
//! // The cost of a step is known before it runs: 4 ranks, 8 microbatches, 2 stages per rank.
//! let schedule = ScheduleKind::Zbv.schedule(4, 8, 2)?;
//! let timeline = schedule.simulate(&Edges::chain(8), &Costs::per_rank(schedule.stage_ranks(), 1.0, 1.0, 1.0))?;
//! assert_eq!((timeline.makespan(), timeline.bubble_span()), (25.5, 0.0)); // no rank is idle after its start
//! # Ok::<(), candle_pipe::Error>(())
//! ```
//!
//! # What is here
//!
//! | task | items |
//! |---|---|
//! | declare a model as named nodes | [`PipeBuilder`], [`PipeModule`], [`StageOp`], [`stage_op`], [`sharded_op`], [`Scope`] |
//! | say which output is the loss; compare with the plain model | [`LossSpec`], [`Pipe::check_against`] |
//! | cut it into stages: at names, evenly, by size, by cost, by a text | [`SplitSpec`], [`SplitPolicy`], [`EqualCount`], [`EqualParams`], [`SizeThreshold`], [`BalancedCost`], [`StageLayout`] |
//! | inspect stages and their exchanges, as plain data | [`Pipe`], [`PipeInfo`], [`graph`] |
//! | pass tensors, plain values and containers of them | [`Value`], [`Kwargs`] |
//! | cut a batch and join outputs; draw the tokens of a step and each replica's part of them | [`microbatch`], [`Batch`] |
//! | run all stages in one process, and measure them | [`LocalPipe`], [`NodeProfile`] |
//! | run the stages of this rank under a schedule, with data and tensor parallelism | [`Runtime`] |
//! | make, read, validate, simulate, compare and draw schedules; choose the microbatches | [`schedule`], [`Pipeline`] |
//! | share a parameter or a module between stages | [`PipeBuilder::parameter`], [`Share`], [`PipeBuilder::shared_module`] |
//! | recompute activations, defer weight gradients | [`StepOptions`], [`Keep`], [`nn`] |
//! | run one stage by hand: forward, input gradients, weight gradients | [`StageModule`], [`Tape`] |
mod action;
mod batch;
mod cuts;
mod error;
mod grads;
pub mod graph;
#[doc = include_str!("guide.md")]
pub mod guide {}
mod local_pipe;
pub mod microbatch;
mod nearest;
pub mod nn;
mod pipe;
mod pipeline;
mod runtime;
pub mod schedule;
mod step;
mod tape;
mod value;

pub use batch::Batch;
#[doc(inline)]
pub use candle_dist_kernels::random;
pub use error::{Error, Result};
#[allow(deprecated)]
pub use graph::Balanced;
#[allow(deprecated)]
pub use graph::Layout;
#[allow(deprecated)]
pub use graph::Reduction;
#[cfg(feature = "shard")]
pub use graph::sharded_op;
pub use graph::{
    BalancedCost, Ctx, EqualCount, EqualParams, In, LossReduction, PipeInfo, Scope, Share, SizeThreshold,
    SplitPoint, SplitPolicy, SplitSpec, StageLayout, StageOp, shapes_only, stage_op,
};
pub use local_pipe::{LocalPipe, NodeProfile};
pub use pipe::{Layer, LossSpec, Pipe, PipeBuilder, PipeModule, SharedModule};
pub use pipeline::Pipeline;
pub use runtime::{RankStep, Runtime};
pub use step::{StepOptions, StepResult};
pub use tape::{Activation, Backward, Gradient, Keep, StageModule, Tape, WeightTape};
pub use value::{Kwargs, Value, ValuePath};

/// What most programs import: `use candle_pipe::prelude::*`.
pub mod prelude {
    pub use crate::microbatch::{Microbatches, split_args_kwargs_into_chunks};
    pub use crate::schedule::ScheduleKind;
    pub use crate::{
        BalancedCost, EqualCount, In, Kwargs, LocalPipe, LossReduction, Pipe, PipeBuilder, Runtime, Share,
        SplitSpec, StepOptions, Value, stage_op,
    };
    pub use candle_dist::prelude::*;
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
