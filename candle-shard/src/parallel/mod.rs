//! Tensor parallelism: which module is cut how, as data.
mod plan;
mod style;

pub use plan::Plan;
pub use style::{
    ColwiseParallel, LayerKind, Layout, ModuleStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel, Style,
};
