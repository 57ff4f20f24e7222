//! The program that continues a file of prompts.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use candle_dist::RankContext;
use candle_lm::batch::{BatchEvent, PromptBatch, Request, run as write_all};
use candle_lm::files::Files;
use candle_lm::stops::{self, Stops};
use candle_lm::tokens::{self, TextStream};
use candle_shard::regular;
use examples::cli::{Checked, Output, UsageError};
use examples::launch::{Ranks, gather};
use examples::progress::Loading;
use tokenizers::Tokenizer;

use super::args::SLOTS;
use super::prompts::{self, Prompt};
use super::report::{JsonLine, Line, Summary};
use crate::args::Args;
use crate::input::agree;
use crate::{memory, opened};

/// Continues the prompts of `file`, and writes the texts in the order of the file.
///
/// # Errors
/// If the file or the model cannot be read, or a prompt is longer than the model or the cache takes; those of the model.
pub fn run(args: &Args, file: &Path, ranks: &Ranks<'_>) -> Result<bool> {
    let read = ranks.on_first(|| Ok(read(file)))?.unwrap_or_else(|| Ok(String::new()));
    let text = ranks.of_first(&agree(ranks, read)?)?;
    let scratch = tempfile::tempdir()?;
    let Opened { files, tokenizer, prompts, batch, stops } =
        agree(ranks, open(args, (file, &text), scratch.path()))?;
    opened::note(&files, ranks);
    let sizes = [batch.slots(), batch.room(&files.config)];
    agree(ranks, memory::check(args, &files, &batch.held, Some(sizes)))?;

    let output = Output::new(args.json.as_deref());
    let write = |ctx: &RankContext, loading: &Loading| {
        let screen = if ctx.rank() == 0 { output.screen() } else { Box::new(io::sink()) };
        let mut shown =
            Shown { screen, texts: BTreeMap::new(), ended: BTreeMap::new(), next: 0, all: Vec::new() };
        let ran = write_all(ctx, args.pp, &files, &batch, |event| {
            match event {
                BatchEvent::Read if ctx.rank() == 0 => loading.finish(),
                BatchEvent::Read => {}
                BatchEvent::Token(place, token) => {
                    let begun = || Text::new(&tokenizer, &batch.requests[place].prompt, &stops);
                    return shown.texts.entry(place).or_insert_with(begun).push(token);
                }
                BatchEvent::Ended(place, _) => shown.end(place, &prompts)?,
            }
            Ok(true)
        })?;
        anyhow::Ok(gather(ctx.group(), ran)?.map(|ran| (shown.all, ran)))
    };
    let written = Loading::watch(
        ranks.is_first(),
        files.bytes(),
        || files.bytes_read(),
        |loading| ranks.run(args.model_ranks(), |ctx| write(ctx, loading)),
    )?;
    let Some((texts, ran)) = written.flatten() else { return Ok(true) };
    let summary = Summary::new(&batch, &ran);
    writeln!(output.screen(), "{summary}")?;
    let lines = prompts.iter().zip(texts).zip(batch.requests.iter().zip(&ran[0].texts));
    let lines = lines.map(|((prompt, text), (request, (tokens, stop)))| {
        JsonLine::Text(Line {
            line: prompt.line,
            prompt: &prompt.text,
            text,
            prompt_tokens: request.prompt.len(),
            tokens,
            stop: *stop,
        })
    });
    output.write_json_lines(lines.chain([JsonLine::Summary(&summary)]))?;
    Ok(true)
}

fn read(file: &Path) -> Checked<String> {
    regular::read_named(file)
        .map_err(|error| UsageError(format!("--prompts {} cannot be read: {error}.", file.display())))
}

/// A model, and what it writes.
struct Opened {
    files: Files,
    tokenizer: Tokenizer,
    prompts: Vec<Prompt>,
    batch: PromptBatch,
    /// The texts that end what is written.
    stops: Vec<String>,
}

fn open(args: &Args, (file, text): (&Path, &str), scratch: &Path) -> Result<Opened> {
    let file = format!("--prompts {}", file.display());
    let prompts = prompts::parse(&file, text)?;
    let mut files = opened::files(args, scratch)?;
    let tokenizer = files.tokenizer()?;
    let (stops, tokens) = stops::split(&args.stop, &tokenizer)?;
    files.ends.extend(tokens);
    let request = |prompt: &Prompt| -> Result<Request> {
        let most = prompt.max_tokens.unwrap_or(args.max_tokens);
        Ok(Request { prompt: tokens::encode_prompt(&tokenizer, &prompt.text)?, most })
    };
    let batch = PromptBatch {
        requests: prompts.iter().map(request).collect::<Result<_>>()?,
        slots: args.training.batch.unwrap_or(SLOTS),
        cache_tokens: args.batches.cache_tokens,
        sampling: args.sampling(),
        held: opened::held(args, &files)?,
    };
    batch.check(&files.config, |place| format!("{file}, line {}", prompts[place].line))?;
    Ok(Opened { files, tokenizer, prompts, batch, stops })
}

/// A text that becomes longer.
struct Text<'a> {
    stream: TextStream<'a>,
    stops: Stops,
    text: String,
    is_over: bool,
}

impl<'a> Text<'a> {
    fn new(tokenizer: &'a Tokenizer, prompt: &[u32], stops: &[String]) -> Self {
        let (stream, stops) = (TextStream::new(tokenizer, prompt), Stops::new(stops.to_vec()));
        Self { stream, stops, text: String::new(), is_over: false }
    }

    /// Takes a token, and returns whether the text goes on.
    fn push(&mut self, token: u32) -> Result<bool> {
        let (more, ends) = self.stops.next(&self.stream.next(token)?);
        self.text.push_str(&more);
        self.is_over = ends;
        Ok(!ends)
    }

    /// The whole text, when no token follows.
    fn finish(mut self) -> Result<String> {
        if !self.is_over {
            let (rest, ends) = self.stops.next(&self.stream.finish()?);
            self.text.push_str(&rest);
            if !ends {
                self.text.push_str(&self.stops.finish());
            }
        }
        Ok(self.text)
    }
}

/// The texts so far. Those that have ended are shown when all before them have.
struct Shown<'a> {
    screen: Box<dyn Write>,
    texts: BTreeMap<usize, Text<'a>>,
    ended: BTreeMap<usize, String>,
    next: usize,
    /// Those that were shown.
    all: Vec<String>,
}

impl Shown<'_> {
    fn end(&mut self, place: usize, prompts: &[Prompt]) -> Result<()> {
        let written = self.texts.remove(&place).map_or_else(|| Ok(String::new()), Text::finish)?;
        self.ended.insert(place, format!("{}{written}", prompts[place].text));
        while let Some(text) = self.ended.remove(&self.next) {
            // If the reader of stdout has stopped, the ranks still finish together.
            writeln!(self.screen, "{text}\n").and_then(|()| self.screen.flush()).ok();
            self.all.push(text);
            self.next += 1;
        }
        Ok(())
    }
}
