#![doc = include_str!("README.md")]

mod encode;
mod guard;
mod order;
mod queue;
mod request;
mod run;
mod spans;
mod speed;
mod stream;
mod text;

// A front may be tested with an engine of its own.
pub use encode::{EncoderOptions, serve_encoder};
#[doc(hidden)]
pub use queue::WaitingRequest;
pub use queue::{QueueLimits, RequestQueue, ServeStatus, SubmitError};
pub use request::{RequestError, ServeRequest, TokenConstraint, TokenLogprob, TokenMask};
pub use run::{ServeOptions, ServeReport, serve};
#[doc(hidden)]
pub use stream::EventSender;
pub use stream::{RequestStream, TokenEvent};
