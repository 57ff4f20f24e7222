//! Continues a prompt with a Llama that is sharded over ranks, or trains it; see `--help`.

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use candle_dist::RankContext;
use candle_lm::chat::{self, ChatMessage, ChatTemplate};
use candle_lm::files::Files;
use candle_lm::generate::{Task, generate};
use candle_lm::hub::Hub;
use candle_lm::stops::{self, Stops};
use candle_lm::tokens::{self, TextStream};
use examples::allocator;
use examples::cli::Output;
use examples::launch::{self, Ranks, gather};
use examples::progress::Loading;
use jiff::civil::DateTime;
use lm::args::Args;
use lm::chat::converse::{self, Conversation, Event, converse};
use lm::chat::transcript::Transcript;
use lm::command::Command;
use lm::info::Info;
use lm::input::{agree, usage};
use lm::located::located;
use lm::report::Report;
use lm::{batch, bench_serve, export, memory, merge, opened, score, serve, train};
use tokenizers::Tokenizer;

fn main() -> ExitCode {
    allocator::keep_pages();
    launch::start(Args::validate, |args, (), ranks| command(args, ranks).map_err(usage))
}

/// Does what the command line says.
fn command(args: &Args, ranks: &Ranks<'_>) -> anyhow::Result<bool> {
    if args.command == Some(Command::BenchServe) {
        return bench_serve::program::run(args);
    }
    args.check_inputs(ranks)?;
    let name = serve::program::name(args);
    let args = &located(args, ranks, Hub::from_env)?;
    match args.command {
        _ if args.training.trains() => train::run::run(args, ranks),
        Some(Command::Info) => info(args, ranks),
        Some(Command::Export) => export::run(args, ranks),
        Some(Command::Merge) => merge::run(args, ranks),
        Some(Command::Serve) => serve::program::run(args, &name, ranks),
        Some(Command::Score) => score::program::run(args, ranks),
        _ if args.talk.chat && args.prompt.is_none() => talk(args, ranks),
        _ => match &args.batches.prompts {
            Some(prompts) => batch::program::run(args, prompts, ranks),
            None => run(args, ranks),
        },
    }
}

/// Writes the text and its speed.
fn run(args: &Args, ranks: &Ranks<'_>) -> anyhow::Result<bool> {
    // A launcher connects stdin to the first process, or to all of them. It may be a terminal.
    let read = ranks.on_first(|| Ok(args.prompt()))?.unwrap_or_else(|| Ok(String::new()));
    let prompt = ranks.of_first(&agree(ranks, read)?)?;
    // The clocks of hosts differ.
    let now = ranks.of_first(&chat::now().to_string())?.parse()?;
    let scratch = tempfile::tempdir()?;
    let Opened { files, tokenizer, task, stops, .. } =
        agree(ranks, open(args, scratch.path()).and_then(|opened| opened.with_prompt(args, &prompt, now)))?;
    let shown = if args.talk.chat { "" } else { &prompt };
    opened::note(&files, ranks);

    let output = Output::new(args.json.as_deref());
    let write = |ctx: &RankContext, loading: &Loading| {
        let mut screen = if ctx.rank() == 0 { output.screen() } else { Box::new(io::sink()) };
        // If the reader of stdout has stopped, the ranks still finish together.
        let mut tell = |text: &str| drop(write!(screen, "{text}").and_then(|()| screen.flush()));
        let (mut stream, mut text) = (TextStream::new(&tokenizer, &task.prompt), String::new());
        let mut stops = Stops::new(stops.clone());
        let mut is_over = false;
        let written = generate(ctx, args.pp, &files, &task, |token| {
            if let Some(token) = token {
                let (more, ends) = stops.next(&stream.next(token)?);
                tell(&more);
                text.push_str(&more);
                is_over = ends;
            } else if ctx.rank() == 0 {
                loading.finish();
                tell(shown);
            }
            Ok(!is_over)
        })?;
        let rest = stops.rest(stream, is_over)?;
        tell(&rest);
        text.push_str(&rest);
        Ok::<_, anyhow::Error>(gather(ctx.group(), written)?.map(|written| (text, written)))
    };
    let written = loaded(args, ranks, &files, write)?;
    let Some((text, written)) = written.flatten() else { return Ok(true) };
    let report = Report::new(format!("{shown}{text}"), &task, &written);
    writeln!(output.screen(), "\n\n{report}{}", args.precision.said())?;
    output.write_json(&report)?;
    Ok(true)
}

/// Holds a conversation: each line of stdin is a message.
fn talk(args: &Args, ranks: &Ranks<'_>) -> anyhow::Result<bool> {
    let scratch = tempfile::tempdir()?;
    let Opened { files, tokenizer, task, stops, template } = agree(ranks, open(args, scratch.path()))?;
    let template = template.context("there is no chat template")?;
    let room = args.talk.room(files.config.longest()).min(task.cache_tokens.unwrap_or(usize::MAX));
    agree(ranks, memory::check(args, &files, &task.held, Some([1, room])))?;
    opened::note(&files, ranks);
    let (output, is_terminal) = (Output::new(args.json.as_deref()), io::stdin().is_terminal());
    let conversation = Conversation {
        files: &files,
        tokenizer: &tokenizer,
        template: &template,
        task: &task,
        args: &args.talk,
        stops: &stops,
    };
    let transcript = Transcript::new(output);
    let talked = loaded(args, ranks, &files, |ctx, loading| {
        let mut screen = if ctx.rank() == 0 { output.screen() } else { Box::new(io::sink()) };
        let mut tell = |text: &str| drop(write!(screen, "{text}").and_then(|()| screen.flush()));
        converse(ctx, args.pp, conversation, converse::line, |event| match event {
            Event::Loaded if ctx.rank() == 0 => loading.finish(),
            Event::Listening if ctx.rank() == 0 && is_terminal => eprint!("> "),
            Event::Text(text) => tell(text),
            Event::Replied(turn) => {
                tell("\n");
                if ctx.rank() == 0 {
                    transcript.add(turn);
                }
            }
            Event::Loaded | Event::Listening => {}
        })
    });
    let talked = talked.and_then(|refused| Ok(refused.unwrap_or(Ok(()))?));
    let kept = if ranks.is_first() { transcript.finish(talked.as_ref().err()) } else { Ok(()) };
    talked.and(kept.map(|()| true))
}

/// Runs `f` on all ranks, under a bar of the bytes of the model that were read.
fn loaded<T: Send>(
    args: &Args,
    ranks: &Ranks<'_>,
    files: &Files,
    f: impl Fn(&RankContext, &Loading) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<Option<T>> {
    Loading::watch(
        ranks.is_first(),
        files.bytes(),
        || files.bytes_read(),
        |loading| ranks.run(args.model_ranks(), |ctx| f(ctx, loading)),
    )
}

/// Tells what the model is, and what each rank would hold.
fn info(args: &Args, ranks: &Ranks<'_>) -> anyhow::Result<bool> {
    let scratch = tempfile::tempdir()?;
    let found = || -> anyhow::Result<Info> {
        let files = opened::files(args, scratch.path())?;
        Info::new(&files, args.ep * args.tp, &opened::held(args, &files)?)
    };
    let info = agree(ranks, found())?;
    let output = Output::new(args.json.as_deref());
    writeln!(output.screen(), "{info}")?;
    output.write_json(&info)?;
    Ok(true)
}

/// A model, and how it writes.
struct Opened {
    files: Files,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    task: Task,
    /// The texts that end what is written.
    stops: Vec<String>,
}

/// Opens the model. Without a folder, it writes a random model to `scratch`.
fn open(args: &Args, scratch: &Path) -> anyhow::Result<Opened> {
    let mut files = opened::files(args, scratch)?;
    let tokenizer = files.tokenizer()?;
    let template = args.talk.template(&files)?;
    let (stops, tokens) = stops::split(&args.stop, &tokenizer)?;
    files.ends.extend(tokens);
    files.ends.extend(template.as_ref().and_then(|template| template.end_of_turn(&tokenizer)));
    let task = Task {
        prompt: Vec::new(),
        most: args.max_tokens,
        cache_tokens: args.batches.cache_tokens,
        sampling: args.sampling(),
        held: opened::held(args, &files)?,
    };
    Ok(Opened { files, tokenizer, template, task, stops })
}

impl Opened {
    /// Sets the prompt of the task: with a template, the conversation that `prompt` starts.
    fn with_prompt(mut self, args: &Args, prompt: &str, now: DateTime) -> anyhow::Result<Self> {
        self.task.prompt = match &self.template {
            None => tokens::encode_prompt(&self.tokenizer, prompt)?,
            Some(template) => {
                let system = args.talk.system.iter().map(|text| ChatMessage::new("system", text));
                let messages: Vec<ChatMessage> = system.chain([ChatMessage::new("user", prompt)]).collect();
                tokens::encode_rendered(&self.tokenizer, &template.render(&messages, now)?)?
            }
        };
        self.task.check(&self.files.config)?;
        memory::check(args, &self.files, &self.task.held, Some([1, self.task.room(&self.files.config)]))?;
        Ok(self)
    }
}
