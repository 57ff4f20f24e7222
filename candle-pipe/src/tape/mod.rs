//! One stage's forward and backward passes of one microbatch.
mod activation;
mod queue;
mod seed;

mod record;
mod stage;

pub use activation::{Activation, Gradient};
pub use record::{Backward, Tape, WeightTape};
pub use stage::{Keep, StageModule};

pub(crate) use activation::scalar;
pub(crate) use queue::WeightQueue;
pub(crate) use seed::vjp;
pub(crate) use stage::StageNode;
