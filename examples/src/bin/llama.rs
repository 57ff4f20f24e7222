//! Writes on from a prompt with a Llama that is cut over ranks, or trains it; see `--help`.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use examples::allocator;
use examples::cli::Output;
use examples::launch::{self, Ranks, gather};
use examples::llama::args::Args;
use examples::llama::files::Files;
use examples::llama::generate::{Task, generate};
use examples::llama::report::Report;
use examples::llama::{random_model, tokens, train};
use tokenizers::Tokenizer;

fn main() -> ExitCode {
    allocator::keep_pages();
    launch::start(Args::validate, |args, (), ranks| match &args.training.train {
        Some(text) => train::run::run(args, text, ranks),
        None => run(args, ranks),
    })
}

/// Writes the text and tells how fast.
fn run(args: &Args, ranks: &Ranks<'_>) -> anyhow::Result<bool> {
    // A launcher gives stdin to the first process, or to all of them to read from together.
    let read = if ranks.is_first() { args.prompt() } else { Ok(String::new()) };
    let prompt = ranks.of_first(&ranks.agree(read)?)?;
    let scratch = tempfile::tempdir()?;
    let (files, tokenizer, task) = ranks.agree(open(args, &prompt, scratch.path()))?;

    let output = Output::new(args.json.as_deref());
    if ranks.is_first() {
        write!(output.screen(), "{prompt}")?;
    }
    let written = ranks.run(args.pp * args.tp, args.threads, |ctx| {
        let mut stream = tokenizer.decode_stream(true);
        let mut screen = if ctx.rank() == 0 { output.screen() } else { Box::new(io::sink()) };
        let written = generate(ctx, args.pp, &files, &task, |token| {
            // Whoever stopped reading misses the rest; the ranks go on together.
            if let Ok(Some(text)) = stream.step(token) {
                let _ = write!(screen, "{text}").and_then(|()| screen.flush());
            }
        })?;
        gather(ctx.group(), written)
    })?;
    let Some(written) = written.flatten() else { return Ok(true) };
    let text = tokenizer.decode(&written[0].tokens, true).map_err(|error| anyhow::anyhow!("{error}"))?;
    let report = Report::new(format!("{prompt}{text}"), &task, &written);
    writeln!(output.screen(), "\n\n{report}")?;
    output.write_json(&report)?;
    Ok(true)
}

/// The model, of which a random one is made in `scratch` if none is given, and what it is to do.
fn open(args: &Args, prompt: &str, scratch: &Path) -> anyhow::Result<(Files, Tokenizer, Task)> {
    let folder = args.model.as_deref().unwrap_or(scratch);
    if args.model.is_none() {
        random_model::write(folder, &random_model::config(), args.seed(), args.dtype())?;
    }
    let files = Files::open(folder)?;
    let tokenizer = tokens::read(folder)?;
    let task = Task {
        prompt: tokens::encode(&tokenizer, prompt)?,
        most: args.max_tokens,
        sampling: args.sampling(),
        dtype: args.dtype(),
    };
    task.check(&files.config)?;
    Ok((files, tokenizer, task))
}
