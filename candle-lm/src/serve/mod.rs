#![doc = include_str!("README.md")]

mod order;
mod queue;
mod request;
mod run;
mod stream;
mod text;

pub use queue::{QueueLimits, RequestQueue, ServeStatus, SubmitError};
pub use request::{RequestError, ServeRequest, TokenConstraint, TokenLogprob, TokenMask};
pub use run::{ServeOptions, ServeReport, serve};
pub use stream::{RequestStream, TokenEvent};
