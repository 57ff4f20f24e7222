//! The program that serves an encoder, whose texts have embeddings.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::DType;
use candle_lm::serve::{EncoderOptions, QueueLimits, serve_encoder};
use candle_lm::{sentence_embedding, tokens};
use candle_shard::regular;
use examples::cli::{Checked, require};
use examples::launch::{Ranks, StopSignal};
use serde_json::Value;

use super::embeddings::MOST_INPUTS;
use super::model::ServedModel;
use super::program::{HEARTBEAT, ServedEngine, WAITING_TOKENS, host};
use crate::args::Args;
use crate::input::agree;

/// The kind of models that are encoders.
const KIND: &str = "bert";

/// Whether the folder on the command line has an encoder.
///
/// # Errors
/// If flags are for decoders.
pub(super) fn is_one(args: &Args) -> Result<bool> {
    let Some(folder) = args.model.as_deref().filter(|folder| folder.is_dir()) else { return Ok(false) };
    let text = regular::read_text(folder.join("config.json"), regular::CONFIG).unwrap_or_default();
    let fields: Value = serde_json::from_str(&text).unwrap_or_default();
    if fields["model_type"] != KIND {
        return Ok(false);
    }
    check(args)?;
    Ok(true)
}

/// Refuses what is done with decoders alone.
fn check(args: &Args) -> Checked {
    let others = [("--pp", args.pp), ("--cp", args.cp), ("--ep", args.ep), ("--dp", args.dp())];
    for (flag, ranks) in others {
        require!(
            ranks == 1,
            "{flag} {ranks}: an encoder is cut by --tp alone, and its texts are computed together; leave it out."
        );
    }
    require!(args.shares.is_none(), "--shares: an encoder is cut evenly; leave it out.");
    require!(
        args.adapters.adapter.is_empty(),
        "--adapter: an encoder is served without adapters; leave it out."
    );
    let of_decoders = [
        ("--layout", args.layout.is_some()),
        ("--dequantize", args.dequantize),
        ("--ignore-field", !args.ignore_field.is_empty()),
    ];
    for (flag, is_given) in of_decoders {
        require!(!is_given, "{flag} changes nothing of an encoder; leave it out.");
    }
    let caches = [
        ("--cache-bytes", args.serve.cache_bytes.is_some()),
        ("--cache-tokens", args.batches.cache_tokens.is_some()),
        ("--cache-dtype", args.cache_dtype.is_some()),
    ];
    for (flag, is_given) in caches {
        require!(!is_given, "{flag}: an encoder has no cache; leave it out.");
    }
    Ok(())
}

/// Serves the encoder under this name until a signal ends the program.
///
/// # Errors
/// If the model cannot be read, or the port is taken; that of the rank that failed.
pub(super) fn run(args: &Args, name: &str, ranks: &Ranks<'_>, stop: &StopSignal) -> Result<bool> {
    let folder = args.model.as_deref().context("there is no --model")?;
    let model = agree(ranks, open(folder, name))?;
    let options = EncoderOptions {
        slots: args.serve.slots,
        heartbeat: HEARTBEAT,
        ..EncoderOptions::of(args.dtype.map_or(DType::F32, Into::into))
    };
    // All texts of a request wait at once.
    let requests = args.serve.queue.max(MOST_INPUTS);
    let engine = ServedEngine {
        model,
        limits: QueueLimits { requests, tokens: requests.saturating_mul(WAITING_TOKENS) },
        bytes: 0,
        bytes_read: &|| 0,
        ranks: args.model_ranks(),
        serve: &|ctx, mine| serve_encoder(ctx, folder, &options, mine),
    };
    host(args, name, ranks, (stop, engine))
}

/// The encoder as requests see it.
fn open(folder: &Path, name: &str) -> Result<ServedModel> {
    let config = sentence_embedding::EncoderConfig::read(folder)?;
    sentence_embedding::weights(folder)?;
    let tokenizer = tokens::read(folder)?;
    let model = ServedModel::of_parts(name, tokenizer, None, config.vocab_size, &BTreeSet::new());
    Ok(model.with_embeddings(config.hidden_size))
}
