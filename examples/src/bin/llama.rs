//! Writes on from a prompt with a Llama that is cut over ranks; see `--help`.

use std::io::{self, Write};
use std::process::ExitCode;

use candle_dist::World;
use examples::allocator;
use examples::cli::{self, Output};
use examples::llama::args::Args;
use examples::llama::generate::{Files, Task, generate};
use examples::llama::report::Report;
use examples::llama::{random_model, tokens};

fn main() -> ExitCode {
    allocator::keep_pages();
    let (args, prompt) = match cli::arguments(|args: &Args| args.validate().and_then(|()| args.prompt())) {
        Ok(made) => made,
        Err(status) => return status,
    };
    match run(&args, &prompt) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => cli::failed(&error),
    }
}

/// Writes the text and tells how fast.
fn run(args: &Args, prompt: &str) -> anyhow::Result<()> {
    // Before the first tensor op.
    candle_dist::threads::settle(args.threads);
    let scratch = tempfile::tempdir()?;
    let folder = match &args.model {
        Some(folder) => folder.clone(),
        None => {
            random_model::write(scratch.path(), &random_model::config(), args.seed, args.dtype.into())?;
            scratch.path().to_owned()
        }
    };
    let files = Files::open(&folder)?;
    let tokenizer = tokens::read(&folder)?;
    let task = Task {
        prompt: tokens::encode(&tokenizer, prompt)?,
        most: args.max_tokens,
        sampling: args.sampling(),
        dtype: args.dtype.into(),
    };
    task.check(&files.config)?;

    let output = Output::new(args.json.as_deref());
    write!(output.screen(), "{prompt}")?;
    let ranks = World::local(args.pp * args.tp).threads_per_rank(args.threads).run(|ctx| {
        let mut stream = tokenizer.decode_stream(true);
        let mut screen = if ctx.rank() == 0 { output.screen() } else { Box::new(io::sink()) };
        generate(ctx, args.pp, &files, &task, |token| {
            // Whoever stopped reading misses the rest; the ranks go on together.
            if let Ok(Some(text)) = stream.step(token) {
                let _ = write!(screen, "{text}").and_then(|()| screen.flush());
            }
        })
    })?;
    let written = tokenizer.decode(&ranks[0].tokens, true).map_err(|error| anyhow::anyhow!("{error}"))?;
    let report = Report::new(format!("{prompt}{written}"), &task, &ranks);
    writeln!(output.screen(), "\n\n{report}")?;
    output.write_json(&report)
}
