//! The command-line arguments of a server.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use axum::http::Uri;
use clap::Args;
use examples::cli::{Checked, require};

use super::parameters::ServeLimits;

/// The options of a server; the comments on the fields are the program's help.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct ServeArgs {
    /// Address to listen on; 0.0.0.0 or :: for all of this machine's, best behind a proxy and with --api-key-file
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: IpAddr,

    /// Port to listen on; 0 for any that is free, which is printed
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,

    /// File with the keys that clients may have, one in each line, or NAME:KEY [default: LM_API_KEY of the environment, else
    /// everybody may ask]
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,

    /// Name of the model for clients [default: that of --model]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Texts that are written at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub slots: usize,

    /// Bytes of the keys and values of all texts of a replica. When they are full, the text that came last
    /// waits, and is computed again [default: those of --slots texts of --cache-tokens]
    #[arg(long, value_name = "BYTES")]
    pub cache_bytes: Option<usize>,

    /// Tokens of prompts that are read in a pass, beside one of each text that is being written: fewer make the pauses of texts
    /// shorter while others begin
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub chunk: usize,

    /// Requests that may wait; more are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub queue: usize,

    /// Texts that one request may ask for: its prompts × n
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub most_texts: usize,

    /// Bytes that the body of a request may have
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 20)]
    pub most_bytes: usize,

    /// Seconds that a request may take, from its arrival to its last token
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub most_seconds: u64,

    /// Connections that may be open at once
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub connections: usize,

    /// Collector of OpenTelemetry for spans of requests and passes, as JSON over HTTP, for example http://127.0.0.1:4318
    #[arg(long, value_name = "URL")]
    pub otlp: Option<String>,

    /// Seconds between two lines with the load, while there is some; 0 for none
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub load_every: u64,

    /// Seconds that requests have to end after SIGTERM or SIGINT; a second signal ends the program at once
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub drain: u64,
}

impl ServeArgs {
    /// Checks everything that does not depend on the model and the files.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub(crate) fn validate(&self) -> Checked {
        let counts = [
            ("--slots", self.slots, 4096),
            ("--chunk", self.chunk, 1 << 20),
            ("--queue", self.queue, 1 << 20),
            ("--most-texts", self.most_texts, 1024),
            ("--most-bytes", self.most_bytes, 1 << 30),
            ("--connections", self.connections, 1 << 16),
        ];
        examples::arguments::check_counts(counts)?;
        require!(
            (1..=86_400).contains(&self.most_seconds),
            "--most-seconds {} is not from 1 to 86400: give 600 for ten minutes.",
            self.most_seconds
        );
        require!(
            self.drain <= 86_400,
            "--drain {} is longer than a day: give 30 for half a minute.",
            self.drain
        );
        require!(
            self.load_every <= 86_400,
            "--load-every {} is longer than a day: give 10, or 0 for no lines.",
            self.load_every
        );
        let is_url = |url: &String| {
            let known = ["http", "https"];
            url.parse::<Uri>().is_ok_and(|url| {
                known.contains(&url.scheme_str().unwrap_or_default())
                    && url.host().is_some_and(|host| !host.is_empty())
            })
        };
        require!(
            self.otlp.as_ref().is_none_or(is_url),
            "--otlp {} is no address of a collector: give for example http://127.0.0.1:4318.",
            self.otlp.as_deref().unwrap_or_default()
        );
        let is_name =
            |name: &String| !name.is_empty() && name.len() <= 200 && !name.chars().any(char::is_control);
        require!(
            self.name.as_ref().is_none_or(is_name),
            "--name is empty, too long or has signs that cannot be seen: give for example llama-3.2-1b."
        );
        Ok(())
    }

    /// What a request may ask for.
    pub(crate) fn limits(&self) -> ServeLimits {
        ServeLimits {
            body: self.most_bytes,
            // All texts of a request wait at once.
            texts: self.most_texts.min(self.queue),
            time: Duration::from_secs(self.most_seconds),
        }
    }
}
