//! The model as a declared graph: built by name, cut into stages, listed, checked.
mod bind;
mod check;
mod declared;
mod info;
mod layout;
mod masked;
mod op;
mod partition;
mod policy;
mod scope;
#[cfg(feature = "shard")]
mod sharded;
mod split;
mod stages;
mod suggest;

pub(crate) use bind::GraphSignature;
pub use bind::Inputs;
#[allow(deprecated)]
pub use declared::Reduction;
pub use declared::{Graph, In, Input, Loss, LossReduction, Node, NodeKind, Output, Share, ValueId};
pub use info::PipeInfo;
#[allow(deprecated)]
pub use layout::Layout;
pub use layout::StageLayout;
#[allow(deprecated)]
pub use masked::Masked;
pub use masked::MaskedRows;
pub use op::{Ctx, StageOp, stage_op};
#[allow(deprecated)]
pub use policy::Balanced;
pub use policy::{BalancedCost, EqualCount, EqualParams, SizeThreshold};
#[allow(deprecated)]
pub use scope::Named;
pub(crate) use scope::variables;
pub use scope::{NamedTensors, Scope, shapes_only};
#[cfg(feature = "shard")]
pub use sharded::sharded_op;
pub use split::{SplitPoint, SplitPolicy, SplitSpec};
pub use stages::{Edge, ShareGroup, StageDef, StageInput, StageOutput};
