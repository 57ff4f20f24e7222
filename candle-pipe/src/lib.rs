//! Pipeline parallelism for [candle](https://github.com/huggingface/candle): models cut into stages, batches into
//! microbatches, and schedules that keep the stages busy.
//!
//! The numbers are those of one device on the whole batch, gradients included, for every cut, schedule and number of
//! microbatches. The [`guide`] goes from a declaration to training on a mesh, step by step.
//!
//! ```
//! use candle_pipe::schedule::{Costs, Edges, ScheduleKind};
//!
//! // What a step costs is known before it runs: here 4 ranks, 8 microbatches, 2 stages a rank.
//! let schedule = ScheduleKind::Zbv.schedule(4, 8, 2)?;
//! let timeline = schedule.simulate(&Edges::chain(8), &Costs::per_rank(schedule.stage_ranks(), 1.0, 1.0, 1.0))?;
//! assert_eq!((timeline.makespan(), timeline.bubble_span()), (25.5, 0.0)); // no rank idle once it has begun
//! # Ok::<(), candle_pipe::Error>(())
//! ```
//!
//! # What is here
//!
//! | to | there is |
//! |---|---|
//! | declare a model as named nodes | [`PipeBuilder`], [`PipeModule`], [`StageOp`], [`stage_op`], [`Scope`] |
//! | cut it into stages: at names, evenly, by size, by cost, by a text | [`SplitSpec`], [`SplitPolicy`], [`EqualCount`], [`EqualParams`], [`SizeThreshold`], [`Balanced`], [`Layout`] |
//! | look at stages and what they exchange, as plain data | [`Pipe`], [`PipeInfo`], [`Graph`] |
//! | give and take tensors, plain values and containers of them | [`Value`], [`Kwargs`] |
//! | cut a batch and join outputs | [`microbatch`] |
//! | run all stages in one process, and measure them | [`LocalPipe`], [`NodeProfile`] |
//! | run this rank's stages as a schedule says, beside data and tensor parallelism | [`Runtime`] |
//! | make, read, check, simulate, compare and draw schedules | [`schedule`] |
//! | share a parameter between stages | [`PipeBuilder::parameter`], [`Share`] |
//! | recompute activations, put weight gradients off | [`StepOptions`], [`Keep`], [`nn`] |
//! | run one stage by hand: forward, input gradients, weight gradients | [`StageModule`], [`Tape`] |
mod error;
mod grads;
mod graph;
#[doc = include_str!("guide.md")]
pub mod guide {}
mod local_pipe;
pub mod microbatch;
mod nearest;
pub mod nn;
mod runtime;
pub mod schedule;
mod tape;
mod value;

pub use error::{Error, Result};
pub use graph::{
    Balanced, Ctx, Edge, EqualCount, EqualParams, Graph, In, Input, Inputs, Layer, Layout, Loss, Named, Node, NodeKind,
    Output, Pipe, PipeBuilder, PipeInfo, PipeModule, Reduction, Scope, Share, ShareGroup, SizeThreshold, SplitPoint,
    SplitPolicy, SplitSpec, StageDef, StageInput, StageOp, StageOutput, ValueId, shapes_only, stage_op,
};
pub use local_pipe::{LocalPipe, NodeProfile, Step, StepOptions};
pub use runtime::{RankStep, Runtime};
pub use tape::{Activation, Backward, Gradient, Keep, StageModule, Tape, WeightTape};
pub use value::{Kwargs, Path, Value};
