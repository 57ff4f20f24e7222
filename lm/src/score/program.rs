//! The program that scores.

use std::io::Write;

use anyhow::{Result, ensure};
use candle_lm::score::score;
use candle_lm::score::windows::windows;
use candle_lm::tokens;
use examples::cli::Output;
use examples::launch::{Ranks, gather};
use examples::progress::Loading;

use super::report::Report;
use crate::args::Args;
use crate::input::agree;
use crate::memory;
use crate::opened;

/// Scores the text that the command line names.
///
/// # Errors
/// If the text or the model cannot be read, or the text has no token to score; those of the model.
pub fn run(args: &Args, ranks: &Ranks<'_>) -> Result<bool> {
    let read = ranks.on_first(|| Ok(args.score.read()))?.unwrap_or_else(|| Ok(String::new()));
    let text = ranks.of_first(&agree(ranks, read)?)?;
    let scratch = tempfile::tempdir()?;
    let open = || -> Result<_> {
        let files = opened::files(args, scratch.path())?;
        let tokens = tokens::encode(&files.tokenizer()?, &text)?;
        tokens::check(&tokens, files.config.vocab_size)?;
        ensure!(
            tokens.len() > 1,
            "the text has {} tokens, and the first is not scored; give a longer one",
            tokens.len()
        );
        let (window, stride) = args.score.sizes(files.config.longest())?;
        let held = opened::held(args, &files)?;
        memory::check(args, &files, &held, None)?;
        let window = window.min(tokens.len());
        Ok((files, tokens, window, stride, held))
    };
    let (files, tokens, window, stride, held) = agree(ranks, open())?;
    let windows = windows(tokens.len(), window, stride);

    let scored = Loading::watch(
        ranks.is_first(),
        files.bytes(),
        || files.bytes_read(),
        |loading| {
            ranks.run(args.model_ranks(), |ctx| {
                let scored = score(ctx, args.pp, &files, &held, (&tokens, &windows), || {
                    if ctx.rank() == 0 {
                        loading.finish();
                    }
                })?;
                gather(ctx.group(), scored)
            })
        },
    )?;
    let Some(all) = scored.flatten() else { return Ok(true) };
    let scored: usize = windows.iter().map(|window| window.scored).sum();
    let mean_nll = all[0].nll / scored as f64;
    let seconds = all[0].seconds;
    let report = Report {
        tokens: tokens.len(),
        scored,
        mean_nll,
        perplexity: mean_nll.exp(),
        window,
        stride,
        windows: windows.len(),
        tokens_per_s: if seconds > 0.0 { scored as f64 / seconds } else { 0.0 },
        load_seconds: all.iter().map(|rank| rank.load).fold(0.0, f64::max),
        dtype: held.dtype.as_str(),
        ranks: all.len(),
        bytes_per_rank: all.iter().map(|rank| rank.bytes).collect(),
    };
    let output = Output::new(args.json.as_deref());
    writeln!(output.screen(), "{report}")?;
    output.write_json(&report)?;
    Ok(true)
}
