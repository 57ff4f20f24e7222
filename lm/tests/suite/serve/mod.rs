//! The server, over sockets: with an engine that writes what a test says, and with the model.

mod adapters;
mod chat;
mod client;
mod completions;
mod hostile;
mod limits;
mod program;
mod refusals;
mod scripted;
