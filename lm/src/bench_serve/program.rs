//! The program that loads a server.

use std::io::Write;

use anyhow::{Result, bail};
use examples::cli::{self, Output};
use indicatif::{ProgressBar, ProgressStyle};

use super::client::ApiClient;
use super::load::send_all;
use super::plan;
use super::report::LoadReport;
use crate::args::Args;

/// Sends all requests of a load, and tells what became of them.
///
/// # Errors
/// If the server cannot be reached, or answers none of them.
pub fn run(args: &Args) -> Result<bool> {
    let load = &args.load;
    let most_open = load.max_concurrency.unwrap_or(load.num_prompts);
    let client = ApiClient::new(most_open);
    let model = match args.model.as_ref().and_then(|model| model.to_str()) {
        Some(model) => model.to_owned(),
        None => client.model(&load.url("models"))?,
    };
    let url = load.url(load.endpoint.path());
    let requests = plan::requests(load, &model, args.seed())?;
    // A connection, and a server that has answered once, are no part of what is measured.
    if let Some(error) = requests.first().and_then(|first| client.ask(&url, &first.body).error) {
        bail!("{url} does not answer the first request: {error}");
    }
    let style = ProgressStyle::with_template("{bar:32} {pos}/{len} requests [{elapsed}]")?;
    // Drawn on stderr, and only if that is a terminal.
    let bar = ProgressBar::new(requests.len() as u64).with_style(style);
    let (outcomes, duration) = send_all(&client, &url, &requests, most_open, || bar.inc(1))?;
    bar.finish_and_clear();
    let report = LoadReport::new(&model, (load.request_rate, load.max_concurrency), &outcomes, duration);
    let output = Output::new(args.json.as_deref());
    writeln!(output.screen(), "{report}")?;
    output.write_json(&report)?;
    if report.is_empty() {
        cli::tell("error", format_args!("no request was answered: {}", report.failures()));
    }
    Ok(!report.is_empty())
}
