//! Forward and backward passes of one stage for one microbatch.
//!
#![doc = include_str!("README.md")]

mod activation;
mod again;
mod pass;
mod queue;
mod record;
mod seed;
mod stage;
mod state;

pub use activation::{Activation, Gradient};
pub use record::{Backward, Tape, WeightTape};
pub use stage::{Keep, StageModule};

pub(crate) use activation::parts;
pub(crate) use pass::backward;
pub(crate) use queue::WeightQueue;
pub(crate) use seed::vjp;
pub(crate) use stage::{StageNode, named_vars};

use again::Fingerprints;
