//! Continues a prompt with a Llama that is sharded over ranks, or trains it; see `--help`.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use candle_dist::RankContext;
use examples::allocator;
use examples::cli::Output;
use examples::launch::{self, Ranks, gather};
use examples::lm::args::{Args, Command, DTypeName};
use examples::lm::files::Files;
use examples::lm::generate::{Task, generate};
use examples::lm::info::Info;
use examples::lm::report::Report;
use examples::lm::stops::Stops;
use examples::lm::tokens::{self, TextStream};
use examples::lm::{random_model, train};
use examples::progress::Loading;
use tokenizers::Tokenizer;

fn main() -> ExitCode {
    allocator::keep_pages();
    launch::start(Args::validate, |args, (), ranks| match &args.training.train {
        Some(text) => train::run::run(args, text, ranks),
        None if args.command == Some(Command::Info) => info(args, ranks),
        None => run(args, ranks),
    })
}

/// Writes the text and its speed.
fn run(args: &Args, ranks: &Ranks<'_>) -> anyhow::Result<bool> {
    // A launcher connects stdin to the first process, or to all of them. It may be a terminal.
    let read = ranks.on_first(|| Ok(args.prompt()))?.unwrap_or_else(|| Ok(String::new()));
    let prompt = ranks.of_first(&ranks.agree(read)?)?;
    let scratch = tempfile::tempdir()?;
    let (files, tokenizer, task) = ranks.agree(open(args, &prompt, scratch.path()))?;
    if ranks.is_first() {
        files.unmet.iter().for_each(|unmet| eprintln!("note: {unmet}."));
    }

    let output = Output::new(args.json.as_deref());
    let write = |ctx: &RankContext, loading: &Loading| {
        let mut screen = if ctx.rank() == 0 { output.screen() } else { Box::new(io::sink()) };
        // If the reader of stdout has stopped, the ranks still finish together.
        let mut tell = |text: &str| drop(write!(screen, "{text}").and_then(|()| screen.flush()));
        let (mut stream, mut text) = (TextStream::new(&tokenizer, &task.prompt), String::new());
        let mut stops = Stops::new(args.stop.clone());
        let mut is_over = false;
        let written = generate(ctx, args.pp, &files, &task, |token| {
            if let Some(token) = token {
                let (more, ends) = stops.next(&stream.next(token)?);
                tell(&more);
                text.push_str(&more);
                is_over = ends;
            } else if ctx.rank() == 0 {
                loading.finish();
                tell(&prompt);
            }
            Ok(!is_over)
        })?;
        let (mut rest, ends) = if is_over { (String::new(), true) } else { stops.next(&stream.finish()?) };
        if !ends {
            rest.push_str(&stops.finish());
        }
        tell(&rest);
        text.push_str(&rest);
        Ok::<_, anyhow::Error>(gather(ctx.group(), written)?.map(|written| (text, written)))
    };
    let written = Loading::watch(
        ranks.is_first(),
        files.bytes(),
        || files.bytes_read(),
        |loading| ranks.run(args.pp * args.tp, args.threads, |ctx| write(ctx, loading)),
    )?;
    let Some((text, written)) = written.flatten() else { return Ok(true) };
    let report = Report::new(format!("{prompt}{text}"), &task, &written);
    writeln!(output.screen(), "\n\n{report}")?;
    output.write_json(&report)?;
    Ok(true)
}

/// Tells what the model is, and what each rank would hold.
fn info(args: &Args, ranks: &Ranks<'_>) -> anyhow::Result<bool> {
    let scratch = tempfile::tempdir()?;
    let folder = args.model.as_deref().unwrap_or(scratch.path());
    let found = || -> anyhow::Result<Info> {
        if args.model.is_none() {
            let dtype = args.dtype.unwrap_or(DTypeName::F32);
            random_model::write(folder, &random_model::config(), args.seed(), dtype.into())?;
        }
        let files = Files::open(folder)?;
        let dtype = args.dtype.map_or_else(|| files.dtype(), |dtype| Ok(dtype.into()))?;
        Info::new(&files, args.tp, dtype, args.dequantize)
    };
    let info = ranks.agree(found())?;
    let output = Output::new(args.json.as_deref());
    writeln!(output.screen(), "{info}")?;
    output.write_json(&info)?;
    Ok(true)
}

/// Returns the model and its task. Without a folder, it writes a random model to `scratch`.
fn open(args: &Args, prompt: &str, scratch: &Path) -> anyhow::Result<(Files, Tokenizer, Task)> {
    let folder = args.model.as_deref().unwrap_or(scratch);
    if args.model.is_none() {
        let dtype = args.dtype.unwrap_or(DTypeName::F32);
        random_model::write(folder, &random_model::config(), args.seed(), dtype.into())?;
    }
    let files = Files::open(folder)?;
    let tokenizer = files.tokenizer()?;
    let task = Task {
        prompt: tokens::encode(&tokenizer, prompt)?,
        most: args.max_tokens,
        sampling: args.sampling(),
        dtype: args.dtype.map_or_else(|| files.dtype(), |dtype| Ok(dtype.into()))?,
        layout: args.layout.clone(),
        dequantize: args.dequantize,
        cache: args.cache_dtype.map(Into::into),
    };
    task.check(&files.config)?;
    Ok((files, tokenizer, task))
}
