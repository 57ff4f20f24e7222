//! Writes a model with an adapter made a part of its weights, or an adapter as llama.cpp reads it.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use candle_lm::adapter;
use candle_lm::dtype::DTypeName;
use examples::cli::{Checked, Output, require};
use examples::launch::Ranks;

use crate::args::Args;
use crate::export::Export;
use crate::input::agree;
use crate::opened;

/// Checks the flags of the command `merge`.
///
/// # Errors
/// A sentence with the flag and a remedy.
pub(crate) fn validate(args: &Args) -> Checked {
    require!(args.model.is_some(), "merge has no model: give --model.");
    require!(
        args.adapters.adapter.len() == 1,
        "merge takes one adapter, and there are {}: give --adapter FOLDER once.",
        args.adapters.adapter.len()
    );
    let Some(out) = &args.export.out else {
        return Err(examples::cli::UsageError(
            "merge has nothing to write to: give --out FOLDER, or --out FILE.gguf.".into(),
        ));
    };
    require!(!out.exists(), "--out {} exists: give another name, or remove it.", out.display());
    require!(
        is_gguf(out) || args.export.gguf.is_none(),
        "--gguf says how matrices of a GGUF file are stored, and --out {} is a folder: leave it out, or give a name that ends with .gguf.",
        out.display()
    );
    require!(
        !is_gguf(out) || args.dtype.is_none(),
        "--dtype is for a folder, and --gguf TYPE for {}: leave it out.",
        out.display()
    );
    Ok(())
}

fn is_gguf(out: &Path) -> bool {
    out.extension().is_some_and(|extension| extension == "gguf")
}

/// Writes the merged model on the first process.
///
/// # Errors
/// If the adapter is none of the model or cannot be merged, or a file cannot be written.
pub fn run(args: &Args, ranks: &Ranks<'_>) -> Result<bool> {
    let made = ranks.on_first(|| Ok(write(args)))?;
    let made = agree(ranks, made.transpose())?;
    let output = Output::new(args.json.as_deref());
    if let Some(made) = made {
        writeln!(
            output.screen(),
            "{} has {} bytes; the model has {}",
            made.file.display(),
            made.bytes,
            made.from_bytes
        )?;
        output.write_json(&made)?;
    }
    Ok(true)
}

fn write(args: &Args) -> Result<Export> {
    let (scratch, out) = (tempfile::tempdir()?, args.export.out.as_deref().context("there is no --out")?);
    let files = opened::base(args, scratch.path())?;
    let folder = args.adapters.adapter.first().context("there is no --adapter")?.path();
    if is_gguf(out) {
        adapter::merge_gguf(&files, folder, out, args.export.gguf)?;
    } else {
        let own = || anyhow::Ok(DTypeName::try_from(files.dtype()?)?);
        let dtype = args.dtype.map_or_else(own, Ok)?;
        adapter::merge(&files, folder, out, dtype)?;
    }
    let written = if out.is_dir() { out.join("model.safetensors") } else { out.to_owned() };
    Ok(Export { file: out.to_owned(), bytes: std::fs::metadata(written)?.len(), from_bytes: files.bytes() })
}
