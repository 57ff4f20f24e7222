//! Tensor parallelism: which module is cut how, as data.
mod module;
pub(crate) mod pattern;
mod plan;
mod style;

pub use module::{LayerKind, Layout, ModuleStyle};
pub use plan::Plan;
pub use style::{
    ColwiseParallel, PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput, RowwiseParallel,
    SequenceParallel, Style,
};
