//! Writes a model, or an adapter, into a GGUF file.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_core::quantized::GgmlDType;
use candle_lm::adapter;
use clap::Args;
use examples::cli::{Checked, Output, require};
use examples::launch::Ranks;
use serde::Serialize;

use crate::args::Args as Line;
use crate::input::agree;
use crate::{opened, values};

/// The options of the export; the comments on the fields are the program's help.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Export")]
pub struct ExportArgs {
    /// How matrices are stored; those whose rows have no whole blocks are stored as q8_0 or f16 [default: q8_0; merge
    /// stores those of a GGUF file as they were]
    #[arg(long, value_name = "TYPE", value_parser = values::gguf())]
    pub gguf: Option<GgmlDType>,

    /// The file to write, which must not exist; with merge a folder, or a file whose name ends with .gguf
    #[arg(long, value_name = "PATH")]
    pub out: Option<PathBuf>,
}

/// What was written.
#[derive(Clone, Debug, Serialize)]
pub struct Export {
    /// The file.
    pub file: PathBuf,
    /// Its bytes.
    pub bytes: u64,
    /// The bytes of the model that it was made of.
    pub from_bytes: u64,
}

impl ExportArgs {
    /// Checks the flags of the command `export`.
    ///
    /// # Errors
    /// A sentence with the flag and a remedy.
    pub(crate) fn validate(&self, has_model: bool) -> Checked {
        require!(has_model, "export has no model: give --model.");
        let Some(out) = &self.out else {
            return Err(examples::cli::UsageError("export has no file to write: give --out FILE.".into()));
        };
        require!(!out.exists(), "--out {} exists: give another name, or remove it.", out.display());
        Ok(())
    }
}

/// Writes the file on the first process.
///
/// # Errors
/// If llama.cpp has no such model, or the file cannot be written.
pub fn run(args: &Line, ranks: &Ranks<'_>) -> Result<bool> {
    let made = ranks.on_first(|| {
        let out = args.export.out.as_deref().context("there is no --out");
        Ok(out.and_then(|out| write(args, out)))
    })?;
    let made = agree(ranks, made.transpose())?;
    let output = Output::new(args.json.as_deref());
    if let Some(made) = made {
        let (file, bytes, from) = (made.file.display(), made.bytes, made.from_bytes);
        writeln!(output.screen(), "{file} has {bytes} bytes; the model has {from}")?;
        output.write_json(&made)?;
    }
    Ok(true)
}

fn write(args: &Line, out: &Path) -> Result<Export> {
    let scratch = tempfile::tempdir()?;
    let files = opened::base(args, scratch.path())?;
    match &args.adapters.adapter[..] {
        [] => files.export_gguf(out, args.export.gguf.unwrap_or(GgmlDType::Q8_0), |_, _| {})?,
        [one] => adapter::export_gguf(&files, one.path(), out)?,
        _ => bail!("several adapters are no one file: give one --adapter"),
    }
    let bytes = std::fs::metadata(out)?.len();
    Ok(Export { file: out.to_owned(), bytes, from_bytes: files.bytes() })
}
