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

pub use bind::Inputs;
pub(crate) use bind::Signature;
pub use declared::{Graph, In, Input, Loss, Node, NodeKind, Output, Reduction, Share, ValueId};
pub use info::PipeInfo;
pub use layout::Layout;
pub use masked::Masked;
pub use op::{Ctx, StageOp, stage_op};
pub use policy::{Balanced, EqualCount, EqualParams, SizeThreshold};
pub(crate) use scope::variables;
pub use scope::{Named, Scope, shapes_only};
#[cfg(feature = "shard")]
pub use sharded::sharded_op;
pub use split::{SplitPoint, SplitPolicy, SplitSpec};
pub use stages::{Edge, ShareGroup, StageDef, StageInput, StageOutput};
