//! Pipeline parallelism for [candle](https://github.com/huggingface/candle): models cut into stages, batches into
//! microbatches, and schedules that keep the stages busy.
mod error;
mod graph;
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
