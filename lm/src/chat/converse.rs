//! A conversation: each line of the input is a message, and the model replies to it.

use std::io::{self, BufRead, Read};

use anyhow::{Result, ensure};
use candle_dist::RankContext;
use candle_lm::agreed;
use candle_lm::chat::{ChatMessage, ChatTemplate, now};
use candle_lm::files::Files;
use candle_lm::generate::{Stop, Task};
use candle_lm::session::Session;
use candle_lm::stops::Stops;
use candle_lm::tokens::{self, TextStream};
use examples::cli::{Checked, UsageError};
use examples::launch::on_first;
use serde::Serialize;
use tokenizers::Tokenizer;

use super::args::ChatArgs;

/// A message and the reply to it.
#[derive(Clone, Debug, Serialize)]
pub struct Turn {
    /// The message.
    pub message: String,
    /// The reply.
    pub text: String,
    /// The tokens of the reply.
    pub tokens: Vec<u32>,
    /// The tokens of the conversation up to the reply.
    pub prompt_tokens: usize,
    /// Those that were not computed again, because their keys and values were cached.
    pub cached_tokens: usize,
    /// Why the reply ended.
    pub stop: Stop,
    /// The seconds until the first token of the reply.
    pub seconds_to_first_token: f64,
    /// The tokens per second after it.
    pub tokens_per_s: f64,
}

/// What a conversation shows.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The model is loaded.
    Loaded,
    /// The next message can come.
    Listening,
    /// A part of the reply.
    Text(&'a str),
    /// The reply is complete.
    Replied(&'a Turn),
}

/// The model, template and options of a conversation.
#[derive(Clone, Copy, Debug)]
pub struct Conversation<'a> {
    /// The files of the model.
    pub files: &'a Files,
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Its chat template.
    pub template: &'a ChatTemplate,
    /// How replies are written; the prompt is not used.
    pub task: &'a Task,
    /// The system message and the most tokens.
    pub args: &'a ChatArgs,
    /// The texts that end a reply.
    pub stops: &'a [String],
}

/// Holds a conversation until `listen` returns `None`. Rank 0 listens, and all ranks read its messages.
///
/// The keys and values of earlier turns are kept while the template only appends to the text. Each reply equals that of a
/// run with the whole conversation as its prompt.
///
/// # Errors
/// If the template refuses the conversation: the inner error, on all ranks. If the conversation has more tokens than there is
/// room for; those of the model, of `listen` and of `show`.
pub fn converse(
    ctx: &RankContext,
    stages: usize,
    conversation: Conversation<'_>,
    mut listen: impl FnMut() -> Result<Option<String>> + Send,
    mut show: impl FnMut(Event<'_>),
) -> Result<Checked> {
    let Conversation { files, tokenizer, template, task, args, stops } = conversation;
    let room = args.room(files.config.longest());
    let mut session = Session::open(ctx, stages, files, task, room)?;
    show(Event::Loaded);
    let names = tokens::named(tokenizer);
    let mut messages: Vec<ChatMessage> =
        args.system.iter().map(|text| ChatMessage::new("system", text)).collect();
    loop {
        show(Event::Listening);
        // The clocks of ranks differ, and a template may be too slow on one of them alone.
        let heard = on_first(ctx.group(), || {
            Ok(listen().map(|heard| {
                let message = heard?;
                messages.push(ChatMessage::new("user", message.clone()));
                let script = template.render(&messages, now());
                let prompt = script.and_then(|script| tokens::encode_rendered(tokenizer, &script));
                messages.pop();
                Some((message, prompt.map_err(|error| format!("{error:#}"))))
            }))
        })?;
        let heard = agreed(ctx.group(), heard.unwrap_or(Ok(None)))?;
        let (message, prompt) = match shared(ctx, &heard)? {
            None => return Ok(Ok(())),
            Some((_, Err(refusal))) => return Ok(Err(UsageError(refusal))),
            Some((message, Ok(prompt))) => (message, prompt),
        };
        messages.push(ChatMessage::new("user", message.clone()));
        ensure!(
            prompt.len() < room,
            "the conversation has {} tokens, and there is room for {room}: start another one, or give a larger --context",
            prompt.len()
        );
        let task = Task { prompt, ..task.clone() };
        task.check(&files.config)?;
        let cached_tokens = session.cached_of(&task.prompt);
        let (mut stream, mut text) = (TextStream::new(tokenizer, &task.prompt), String::new());
        let (mut told, mut named) = (0, Vec::new());
        let mut stops = Stops::new(stops.to_vec());
        let mut is_over = false;
        let written = session.write(&task, |token| {
            let piece = stream.next(token)?;
            named.extend(names.get(&token).and_then(|name| {
                let start = told + piece.find(name)?;
                Some(start..start + name.len())
            }));
            told += piece.len();
            let (more, ends) = stops.next(&piece);
            show(Event::Text(&more));
            text.push_str(&more);
            is_over = ends;
            Ok(!ends)
        })?;
        let rest = stops.rest(stream, is_over)?;
        show(Event::Text(&rest));
        text.push_str(&rest);
        // A text that ends the reply is left out of it.
        named.retain(|name| name.end <= text.len());
        messages.push(ChatMessage { named, ..ChatMessage::new("assistant", text.clone()) });
        show(Event::Replied(&Turn {
            message,
            text,
            prompt_tokens: task.prompt.len(),
            cached_tokens,
            stop: written.stop,
            seconds_to_first_token: written.first,
            tokens_per_s: written.tokens.len().saturating_sub(1) as f64 / written.rest.max(f64::MIN_POSITIVE),
            tokens: written.tokens,
        }));
    }
}

/// A message, and the tokens of the conversation or why the template refuses it.
type Heard = (String, Result<Vec<u32>, String>);

/// What rank 0 heard, on all ranks.
fn shared(ctx: &RankContext, heard: &Option<Heard>) -> Result<Option<Heard>> {
    Ok(serde_json::from_str(&ctx.group().all_gather_text(&serde_json::to_string(heard)?)?[0])?)
}

/// The most bytes of a line of stdin.
const LONGEST_MESSAGE: u64 = 16 << 20;

/// Returns the next line of stdin that is not empty, without its end; `None` at the end of stdin.
///
/// # Errors
/// If stdin cannot be read, or is no UTF-8.
pub fn line() -> Result<Option<String>> {
    loop {
        let mut line = String::new();
        let mut some = io::stdin().lock().take(LONGEST_MESSAGE);
        if some.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        ensure!(some.limit() > 0, "a message on stdin has more than {LONGEST_MESSAGE} bytes: shorten it");
        let message = line.trim_end_matches(['\r', '\n']);
        if !message.trim().is_empty() {
            return Ok(Some(message.to_owned()));
        }
    }
}
