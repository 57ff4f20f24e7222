//! What the command line refuses before a model is opened.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_shard::regular;
use examples::arguments::check_counts;
use examples::cli::{Checked, Output, require};
use examples::launch::Ranks;

use crate::args::Args;
use crate::command::Command;
use crate::merge;
use crate::train::args::TrainArgs;

const MAX_RANKS: usize = 256;
pub(crate) const MAX_TOKENS: usize = 1 << 24;

impl Args {
    /// Checks everything that does not depend on the model.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub fn validate(&self) -> Checked {
        let Self { tp, pp, threads, max_tokens, temperature, top_p, .. } = *self;
        check_counts([
            ("--tp", tp, MAX_RANKS),
            ("--pp", pp, MAX_RANKS),
            ("--cp", self.cp, MAX_RANKS),
            ("--ep", self.ep, MAX_RANKS),
            ("--dp", self.dp(), MAX_RANKS),
            ("--threads", threads.unwrap_or(1), 1024),
            ("--max-tokens", max_tokens, MAX_TOKENS),
        ])?;
        if !self.training.trains() {
            require!(
                self.model_ranks() <= MAX_RANKS,
                "--pp {pp} × --dp {} × --cp {} × --ep {} × --tp {tp} are too many ranks: give at most {MAX_RANKS}.",
                self.dp(),
                self.cp,
                self.ep
            );
        }
        require!(
            temperature.is_finite() && temperature >= 0.0,
            "--temperature {temperature} is no finite number of at least 0: try 0.8."
        );
        require!(top_p > 0.0 && top_p <= 1.0, "--top-p {top_p} is no share: give more than 0 and at most 1.");
        let Self { min_p, repetition_penalty, .. } = *self;
        require!((0.0..=1.0).contains(&min_p), "--min-p {min_p} is no share: give at least 0 and at most 1.");
        require!(
            (0.01..=100.0).contains(&repetition_penalty),
            "--repetition-penalty {repetition_penalty} is not from 0.01 to 100: give 1 for none."
        );
        let generates = !matches!(
            self.command,
            Some(Command::Info | Command::Export | Command::Merge | Command::Serve | Command::BenchServe)
        ) && !self.training.trains();
        self.talk.validate(generates, self.prompt.is_some())?;
        require!(
            self.stop.iter().all(|text| !text.is_empty()),
            "--stop is empty: give a text, or leave it out."
        );
        require!(
            self.cp == 1 || pp == 1 || self.training.trains(),
            "--cp {} gives each rank some of the tokens, and a stage of --pp {pp} keeps all: use one of them.",
            self.cp
        );
        require!(
            self.layout.is_none() || pp > 1 || self.training.trains(),
            "--layout says what is in each stage, and --pp 1 has all layers in one: give --pp, or leave it out."
        );
        let is_local = self.command != Some(Command::BenchServe) && self.hub_name().is_none();
        if let Some(model) = self.model.as_ref().filter(|_| is_local) {
            let is_gguf = model.is_file() && model.extension().is_some_and(|extension| extension == "gguf");
            require!(
                model.is_dir() || is_gguf,
                "--model {} is no folder, no .gguf file and no name on the Hub: give a folder with config.json in it, a file, or owner/name.",
                model.display()
            );
            require!(
                model.is_dir()
                    || !self.training.trains()
                    || self.training.adapter().is_some()
                    || !self.adapters.adapter.is_empty()
                    || self.training.resume.is_some(),
                "--model {} is a GGUF file, and only folders are trained: give a folder with config.json in it, or train an adapter with --lora or --adapter.",
                model.display()
            );
        }
        match (self.command, self.training.trains()) {
            (Some(Command::Train), false) => {
                require!(false, "train has no text: give --train FILE or --data FILE.");
            }
            (
                Some(
                    Command::Generate
                    | Command::Serve
                    | Command::BenchServe
                    | Command::Score
                    | Command::Info
                    | Command::Export
                    | Command::Merge,
                ),
                true,
            ) => {
                require!(false, "only train trains: leave out --train and --data, or say train.");
            }
            _ => {}
        }
        if let Some(shares) = &self.shares {
            let count = shares.ranks();
            require!(
                count == tp,
                "--shares {shares} are for {count} ranks, and there are --tp {tp}: give a share for each."
            );
        }
        if self.command == Some(Command::Export) {
            self.export.validate(self.model.is_some())?;
        }
        require!(
            self.command != Some(Command::Export)
                || self.adapters.adapter.is_empty()
                || self.export.gguf.is_none(),
            "--gguf says how matrices of a model are stored, and an adapter's are floats: leave it out."
        );
        if self.command == Some(Command::Merge) {
            merge::validate(self)?;
        }
        self.adapters.validate()?;
        if self.training.trains() {
            self.adapters.validate_trained(self.model.is_some(), &self.training)?;
        }
        if self.command == Some(Command::Serve) {
            self.adapters.validate_names()?;
        }
        self.score.validate()?;
        self.serve.validate()?;
        self.load.validate()?;
        self.batches.validate(self.training.batch)?;
        require!(
            self.training.batch.is_none() || self.training.trains() || self.batches.prompts.is_some(),
            "--batch is for many prompts or for training: give --prompts FILE, --train FILE or --data FILE, or leave it out."
        );
        self.check_files()?;
        self.training.validate(self.dtype, [pp, self.cp, self.ep, tp])?;
        Output::new(self.json.as_deref()).check()
    }

    /// Checks the files that rank 0 alone reads, before a model is downloaded or opened. Every rank calls it.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy, on all ranks.
    pub fn check_inputs(&self, ranks: &Ranks<'_>) -> Result<()> {
        let inputs = [
            ("--prompts", &self.batches.prompts, "a file with a prompt in each line"),
            ("--text", &self.score.text, "a text"),
        ];
        let check = || -> Checked {
            for (flag, path, wanted) in inputs {
                let Some(path) = path else { continue };
                let is_text = path.is_file() || regular::is_pipe(path);
                require!(is_text, "{flag} {} is no file: give {wanted}.", path.display());
            }
            Ok(())
        };
        ranks.agree(if ranks.is_first() { check() } else { Ok(()) })
    }

    /// Refuses outputs to input files or to files of a model, and two outputs to one file.
    fn check_files(&self) -> Checked {
        let TrainArgs { train, data, valid, log, resume, .. } = &self.training;
        let inputs = [
            ("--train", train),
            ("--valid", valid),
            ("--text", &self.score.text),
            ("--prompts", &self.batches.prompts),
            ("--dataset-path", &self.load.dataset_path),
            ("--tools", &self.talk.tools),
            ("--api-key-file", &self.serve.api_key_file),
            ("--model", &self.model),
            ("--resume", resume),
            ("--out", &self.export.out),
        ];
        let given = inputs.into_iter().filter_map(|(flag, path)| Some((flag, path.as_deref()?)));
        let adapters = self.adapters.adapter.iter().map(|adapter| ("--adapter", adapter.path()));
        let data = data.iter().map(|path| ("--data", &**path));
        let inputs: Vec<(&str, &Path)> = given.chain(adapters).chain(data).collect();
        let json = self.json.as_deref().map(|path| ("--json", path));
        for (flag, written, json) in [("--json", &self.json, None), ("--log", log, json)] {
            for (other, path) in inputs.iter().copied().chain(json) {
                let Some(written) = written else { continue };
                let is_of_model = flag == "--json" && is_model_file(written, path);
                let is = if is_of_model { "is a file of" } else { "is also" };
                require!(
                    !is_of_model && !is_one_file(written, path),
                    "{flag} {} {is} {other}, which would be lost: give another file.",
                    written.display()
                );
            }
        }
        Ok(())
    }
}

/// Returns a path without links, as far as there is something.
fn found(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Returns whether two paths lead to one file.
fn is_one_file(a: &Path, b: &Path) -> bool {
    found(a) == found(b)
}

/// The ends of the names of files of models, adapters and checkpoints.
const MODEL_FILES: [&str; 14] = [
    ".safetensors",
    ".gguf",
    ".bin",
    ".jinja",
    ".model",
    "config.json",
    ".index.json",
    "tokenizer.json",
    "vocab.json",
    "tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "modules.json",
    "transformers.json",
];

/// Returns whether a path leads to a file of the model, the adapter or the checkpoint in a folder, as far as its name tells. Reports of
/// earlier runs are none.
fn is_model_file(path: &Path, folder: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let is_named_so = name == "training.json" || MODEL_FILES.iter().any(|end| name.ends_with(end));
    is_named_so && path.is_file() && folder.is_dir() && found(path).starts_with(found(folder))
}
