#![doc = include_str!("README.md")]

mod queue;
mod request;
mod stream;

pub use queue::{QueueLimits, RequestQueue, ServeStatus, SubmitError};
pub use request::{RequestError, ServeRequest, TokenConstraint, TokenLogprob, TokenMask};
pub use stream::{RequestStream, TokenEvent};
