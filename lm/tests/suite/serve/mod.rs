//! The server, over sockets: with an engine that writes what a test says, and with the model.

mod adapters;
mod bench;
mod chat;
mod client;
mod completions;
mod embeddings;
mod faults;
mod hostile;
mod limits;
mod otlp;
mod process;
mod program;
mod refusals;
mod responses;
mod scripted;
mod storm;
