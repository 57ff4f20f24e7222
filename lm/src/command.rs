//! What the program does.

use clap::ValueEnum;

/// What the program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Command {
    /// Writes on from a prompt
    Generate,
    /// Trains on a text, or on records
    Train,
    /// Answers requests of the OpenAI API over HTTP
    Serve,
    /// Loads a server of the OpenAI API with requests, and tells how long they take
    BenchServe,
    /// Scores a text: the perplexity that a model finds in it
    Score,
    /// Tells what a model is, and what each of --tp ranks would hold
    Info,
    /// Writes a model into a GGUF file, or with --adapter an adapter, as llama.cpp reads it
    Export,
    /// Writes a model with an adapter as a part of its weights, into a folder or a GGUF file
    Merge,
}

impl Command {
    /// Returns its name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}
