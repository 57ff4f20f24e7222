//! Files of JSON lines.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor};
use std::path::Path;

use anyhow::Result;
use candle_shard::regular;

use super::documents::{DocumentSet, counted};
use super::encoder::{Document, RecordEncoder};
use super::record::Record;
use super::{DataOptions, TooLong};
use crate::error::{InputError, InputResult, require};

/// What happened to lines that are not learned as they are.
#[derive(Debug, Default)]
struct LineCounts {
    bad: usize,
    /// The first bad line.
    first: String,
    skipped: usize,
    cut: usize,
    split: usize,
}

/// Reads the records of files, which are one list.
pub(super) fn read(
    flag: &str,
    paths: &[impl AsRef<Path>],
    encoder: &RecordEncoder,
    options: &DataOptions,
    seq_len: usize,
) -> Result<DocumentSet> {
    let (mut set, mut counts) = (DocumentSet::new(seq_len), LineCounts::default());
    for path in paths {
        let shown = path.as_ref().display();
        let unreadable = |error: io::Error| {
            InputError(format!("{flag} {shown} cannot be read ({error}): give a file of JSON lines."))
        };
        let mut lines = open(path.as_ref()).map_err(unreadable)?;
        let (mut line, mut number) = (Vec::new(), 0);
        loop {
            line.clear();
            if lines.read_until(b'\n', &mut line).map_err(unreadable)? == 0 {
                break;
            }
            number += 1;
            // Some programs put a mark of UTF-8 before the first line.
            let mark: &[u8] = if number == 1 { "\u{feff}".as_bytes() } else { b"" };
            let line = line.strip_prefix(mark).unwrap_or(&line).trim_ascii();
            if line.is_empty() {
                continue;
            }
            match documents(line, encoder, options, seq_len, &mut counts) {
                Ok(made) => made.into_iter().for_each(|document| set.push(document)),
                Err(reason) => {
                    let place = format!("{shown}, line {number}: {reason}");
                    require_skipped(flag, options, &place)?;
                    counts.bad += 1;
                    if counts.bad == 1 {
                        counts.first = place;
                    }
                }
            }
        }
    }
    let names: Vec<String> = paths.iter().map(|path| path.as_ref().display().to_string()).collect();
    let (names, told) = (names.join(" "), counts.notes(flag));
    let left = if told.is_empty() { String::new() } else { format!(" ({})", told.join("; ")) };
    let check = || -> InputResult {
        require!(
            set.documents() > 0,
            "{flag} {names} has no token to learn{left}: give records that are texts, completions or replies."
        );
        Ok(())
    };
    check()?;
    set.pack(options);
    set.notes = told;
    Ok(set)
}

/// Refuses a bad line, if these are not skipped.
fn require_skipped(flag: &str, options: &DataOptions, place: &str) -> InputResult {
    require!(options.skip_bad_lines, "{flag} {place}: change the line, or give --skip-bad-lines.");
    Ok(())
}

fn open(path: &Path) -> io::Result<Box<dyn BufRead>> {
    Ok(match regular::is_pipe(path) {
        true => Box::new(Cursor::new(regular::read_stream(File::open(path)?, regular::STREAM)?)),
        false => Box::new(BufReader::new(regular::open(path)?)),
    })
}

/// The documents of a line, none if it is left out.
///
/// # Errors
/// What is wrong with it, a sentence without an end.
fn documents(
    line: &[u8],
    encoder: &RecordEncoder,
    options: &DataOptions,
    seq_len: usize,
    counts: &mut LineCounts,
) -> Result<Vec<Document>, String> {
    let line = std::str::from_utf8(line).map_err(|error| format!("it is no UTF-8 ({error})"))?;
    let record = Record::parse(line)?;
    match (&record, options.preferences) {
        (Record::Preference { .. }, false) => return Err("it is a preference, which --dpo learns".into()),
        (Record::Preference { .. }, true) | (_, false) => {}
        (_, true) => return Err("it is no preference, and --dpo learns prompt, chosen and rejected".into()),
    }
    let whole = encoder.encode(&record).map_err(|error| format!("{error:#}"))?;
    // Two answers share a sequence.
    let has = whole.iter().map(|document| document.tokens.len()).sum::<usize>();
    let takes = seq_len + whole.len();
    let mut made = if has <= takes {
        whole
    } else {
        match (options.too_long, &record) {
            (TooLong::Error, _) => {
                return Err(format!(
                    "it has {has} tokens, and --seq-len {seq_len} takes {takes}; --too-long says what to do with such records"
                ));
            }
            (TooLong::Skip, _) => {
                counts.skipped += 1;
                return Ok(Vec::new());
            }
            (TooLong::Split, Record::Text(_)) => {
                counts.split += 1;
                whole.iter().flat_map(|document| split(document, seq_len)).collect()
            }
            (TooLong::Cut | TooLong::Split, _) => {
                counts.cut += 1;
                let takes = seq_len / whole.len() + 1;
                whole.iter().map(|document| part(document, 0, takes.min(document.tokens.len()))).collect()
            }
        }
    };
    if let (true, [chosen, rejected]) = (options.preferences, &mut made[..]) {
        // What both have in front has one probability, which cancels out.
        let common = chosen.tokens.iter().zip(&rejected.tokens).take_while(|(a, b)| a == b).count();
        chosen.counts[..common].fill(false);
        rejected.counts[..common].fill(false);
    }
    match made.iter().all(|document| counted(&document.counts) > 0) {
        true => Ok(made),
        false if options.preferences && has > takes => Err(format!(
            "an answer has no token of its own to be predicted in the first {} tokens with the prompt, where --too-long cut ends it: raise \
             --seq-len, or give --too-long skip",
            seq_len / 2 + 1
        )),
        false if options.preferences => Err("an answer has no token of its own to be predicted".into()),
        false if has > takes => Err(format!("none of its first {takes} tokens is to be predicted")),
        false => Err("none of its tokens is to be predicted".into()),
    }
}

/// The parts of a text. Each begins with the last token of the one before, so that each token is predicted once.
fn split(document: &Document, seq_len: usize) -> Vec<Document> {
    let last = document.tokens.len() - 1;
    let starts = (0..last).step_by(seq_len);
    starts.map(|start| part(document, start, (start + seq_len).min(last) + 1)).collect()
}

fn part(document: &Document, start: usize, end: usize) -> Document {
    Document { tokens: document.tokens[start..end].to_vec(), counts: document.counts[start..end].to_vec() }
}

impl LineCounts {
    /// Sentences without ends.
    fn notes(&self, flag: &str) -> Vec<String> {
        let Self { bad, first, skipped, cut, split } = self;
        let lines = |count: usize| if count == 1 { "line" } else { "lines" };
        let mut notes = Vec::new();
        if *bad > 0 {
            notes.push(format!("{bad} bad {} of {flag} skipped, the first: {first}", lines(*bad)));
        }
        for (count, what) in [(*skipped, "skipped"), (*cut, "cut"), (*split, "split")] {
            if count > 0 {
                notes.push(format!("{count} too long {} of {flag} {what}", lines(count)));
            }
        }
        notes
    }
}
