//! The command-line arguments of a load.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use examples::arguments::check_counts;
use examples::cli::{Checked, require};

/// The most requests of a load.
const MOST_REQUESTS: usize = 1 << 20;

/// The most tokens of a prompt, and of what is written behind it.
pub(super) const MOST_TOKENS: usize = 1 << 20;

/// What a load asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EndpointName {
    /// Texts that go on from a prompt
    #[value(name = "/v1/completions", alias = "completions")]
    Completions,
    /// Replies in conversations
    #[value(name = "/v1/chat/completions", alias = "chat")]
    Chat,
}

impl EndpointName {
    /// Its path, without that of the version.
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Completions => "completions",
            Self::Chat => "chat/completions",
        }
    }
}

/// The options of a load; the comments on the fields are the program's help.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Load")]
pub struct BenchServeArgs {
    /// Address of the server; the key is in OPENAI_API_KEY of the environment, if it wants one
    #[arg(long, alias = "url", value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub base_url: String,

    /// What is asked for
    #[arg(long, value_name = "PATH", default_value = "/v1/completions")]
    pub endpoint: EndpointName,

    /// Requests per second on average, at random times; inf for all at once
    #[arg(long, alias = "rate", value_name = "X", default_value_t = f64::INFINITY)]
    pub request_rate: f64,

    /// Requests
    #[arg(long, alias = "requests", value_name = "N", default_value_t = 100)]
    pub num_prompts: usize,

    /// Requests that are open at once; more wait, and their times begin when they are sent [default: as many as come]
    #[arg(long, alias = "concurrency", value_name = "N")]
    pub max_concurrency: Option<usize>,

    /// Words of each prompt, of about a token each
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub input_len: usize,

    /// Tokens of each text
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub output_len: usize,

    /// File of JSON lines, taken in turn, each an object that may have `prompt` or `messages`, or `input_len`, and `output_len`;
    /// what it lacks is that of the flags
    #[arg(long, value_name = "FILE")]
    pub dataset_path: Option<PathBuf>,

    /// Go on to the last token also if the model says that a text has ended
    #[arg(long)]
    pub ignore_eos: bool,
}

impl BenchServeArgs {
    /// Checks everything that does not depend on the server and the files.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub(crate) fn validate(&self) -> Checked {
        check_counts([
            ("--num-prompts", self.num_prompts, MOST_REQUESTS),
            ("--max-concurrency", self.max_concurrency.unwrap_or(1), 1 << 14),
            ("--input-len", self.input_len, MOST_TOKENS),
            ("--output-len", self.output_len, MOST_TOKENS),
        ])?;
        require!(
            self.request_rate > 0.0,
            "--request-rate {} is no rate: give for example 4 for four requests per second, or inf for all at once.",
            self.request_rate
        );
        let host = ["http://", "https://"].iter().find_map(|scheme| self.base_url.strip_prefix(scheme));
        require!(
            host.is_some_and(|host| !host.is_empty() && !host.starts_with('/')),
            "--base-url {} is no address: give for example http://127.0.0.1:8080.",
            self.base_url
        );
        Ok(())
    }

    /// The address of a path of the API.
    pub(crate) fn url(&self, path: &str) -> String {
        let base = self.base_url.trim_end_matches('/');
        format!("{}/v1/{path}", base.strip_suffix("/v1").unwrap_or(base))
    }
}
