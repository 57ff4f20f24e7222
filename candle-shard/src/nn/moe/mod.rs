//! Mixtures of experts: each token goes to a few of many feed-forward networks, which lie on different ranks.
//!
#![doc = include_str!("README.md")]

mod capacity;
mod config;
mod dispatch;
mod expert_bytes;
mod experts;
mod layer;
mod load;
mod losses;
mod quantized;
mod router;
mod shared;

pub use config::{ExpertGate, ExpertGroups, MoEConfig, Scores};
pub use layer::{MoE, MoEOutput};
pub use load::Load;

/// The name of the layer in errors and explanations.
const OP: &str = "moe";

/// The expert of a choice that is not carried out: a dropped one, or one that another rank carries out.
const NO_EXPERT: u32 = u32::MAX;
