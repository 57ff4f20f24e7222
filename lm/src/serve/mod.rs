#![doc = include_str!("README.md")]

mod access;
mod answer;
mod api_error;
pub mod args;
mod body;
mod calls;
mod chat;
mod choice;
mod chunks;
mod completion;
mod connection;
mod embeddings;
mod encoder;
mod events;
mod fields;
mod front;
mod grammar;
mod load;
mod metrics;
mod model;
mod openapi;
mod otlp;
mod parameters;
mod prep;
pub mod program;
mod reply;
mod response_writer;
mod responses;
mod routes;
mod token_queue;
mod vocabulary;

pub use access::{Access, ApiKeys};
pub use front::{Front, FrontOptions};
pub use model::ServedModel;
pub use otlp::SpanCounts;
pub use parameters::ServeLimits;
