//! Models by their names on the Hub: `owner/name`, `owner/name@revision` or `owner/name/file.gguf`.
//!
//! Files are kept in the cache that Python's `huggingface_hub` has too, under `HF_HOME` or `~/.cache/huggingface`.
//! `HF_ENDPOINT` is another server, `HF_TOKEN` or the file `token` of the cache allows what is not public,
//! `HF_HUB_OFFLINE=1` uses the cache alone, and `HF_HUB_DOWNLOAD_TIMEOUT` is the seconds without any byte after which a
//! download fails (30 without it).
//!
//! All files of a model are of one commit: the one that the cache has for the revision, or else the one that the first
//! answer of the server names. A model is refused as early as can be: by its config, then by the headers of its weights, and then
//! by the digest of each file, SHA-256 or that of git. Without a digest a download is not resumed.
//!
//! The crate hf-hub keeps the folders of the cache here, and does not download: version 0.5 compares no
//! digest and sets no time limit; version 1 needs an async runtime, and compares no digest and does not resume where it downloads
//! by HTTP. So ours still has the digests of all files, resumption, time limits and a least pace, bounds of sizes, one commit
//! for all files, and headers before weights.

mod digest;
mod lock;
mod outline;
mod server;
mod snapshot;

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use hf_hub::Cache;

use server::Server;
use snapshot::Snapshots;

use crate::error::{InputError, InputResult, require};

/// A model on the Hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    /// The owner and the name.
    pub repo: String,
    /// The branch, tag or commit.
    pub revision: String,
    /// The GGUF file in it, or the files of a folder.
    pub file: Option<String>,
}

/// Whether a text is one part of a path, and nothing else.
fn is_word(part: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !part.is_empty() && part.chars().all(known) && !part.starts_with('.') && !part.contains("..")
}

impl HubName {
    /// Parses the value of `--model`; `None` if it can only be a path.
    ///
    /// ```
    /// use candle_lm::hub::HubName;
    ///
    /// let name = HubName::parse("Qwen/Qwen3-0.6B@main").unwrap();
    /// assert_eq!((name.repo.as_str(), name.revision.as_str(), name.file), ("Qwen/Qwen3-0.6B", "main", None));
    /// assert_eq!(HubName::parse("unsloth/x-GGUF/x-Q4_K_M.gguf").unwrap().file.as_deref(), Some("x-Q4_K_M.gguf"));
    /// assert_eq!(HubName::parse("./a/b"), None);
    /// ```
    pub fn parse(text: &str) -> Option<Self> {
        let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
        let parts: Vec<&str> = name.split('/').collect();
        let is_revision = revision.split('/').all(is_word);
        let (&owner, &repo, file) = match &parts[..] {
            [owner, repo] => (owner, repo, None),
            [owner, repo, file @ ..] if file.last()?.ends_with(".gguf") => {
                (owner, repo, Some(file.join("/")))
            }
            _ => return None,
        };
        let is_name = is_revision && parts.iter().all(|part| is_word(part));
        is_name.then(|| Self { repo: format!("{owner}/{repo}"), revision: revision.into(), file })
    }
}

impl std::fmt::Display for HubName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let file = self.file.as_ref().map(|file| format!("/{file}")).unwrap_or_default();
        write!(f, "{}{file}@{}", self.repo, self.revision)
    }
}

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The folder or the GGUF file.
    pub path: PathBuf,
    /// The commit of all its files.
    pub commit: String,
}

/// What happens while a model is downloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Download<'a> {
    /// Another program downloads a file, and this one waits for it.
    Wait {
        /// Its name in the repository.
        file: &'a str,
    },
    /// A part of a file is here.
    Bytes {
        /// Its name in the repository.
        file: &'a str,
        /// The bytes that are here.
        bytes: u64,
        /// All bytes, if the server says how many.
        size: Option<u64>,
    },
    /// The download of a file has ended, perhaps with an error.
    End {
        /// Its name in the repository.
        file: &'a str,
    },
}

/// A cache, and the server that has what the cache lacks.
#[derive(Clone, Debug)]
pub struct Hub {
    cache: Cache,
    /// `None` offline.
    server: Option<Server>,
    /// Fields of configs that do not count.
    ignored: Vec<String>,
}

/// The seconds without any byte after which a download fails, if the environment does not say.
const PATIENCE: u64 = 30;
const MOST_PATIENCE: u64 = 24 * 60 * 60;

impl Hub {
    /// Uses a cache and a server; a download fails after `patience` without any byte.
    pub fn new(cache: PathBuf, endpoint: &str, token: Option<String>, patience: Duration) -> Self {
        Self {
            cache: Cache::new(cache),
            server: Some(Server::new(endpoint, token, patience)),
            ignored: Vec::new(),
        }
    }

    /// Uses the cache and the server that the environment names.
    ///
    /// # Errors
    /// If there is no place for a cache, or the time limit is not a number of seconds.
    pub fn from_env() -> Result<Self> {
        let set = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        ensure!(
            set("HF_HOME").is_some() || env::home_dir().is_some(),
            "there is no home folder for the cache: set HF_HOME"
        );
        let patience = set("HF_HUB_DOWNLOAD_TIMEOUT").map_or(Ok(PATIENCE), |value| seconds(&value))?;
        let cache = if set("HF_HOME").is_some() { Cache::from_env() } else { Cache::default() };
        let is_offline = set("HF_HUB_OFFLINE")
            .is_some_and(|value| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str()));
        let server = (!is_offline).then(|| {
            let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
            Server::new(&endpoint, set("HF_TOKEN").or_else(|| cache.token()), Duration::from_secs(patience))
        });
        Ok(Self { cache, server, ignored: Vec::new() })
    }

    /// Lets models pass whose configs say something unknown in these fields.
    pub fn ignoring(self, fields: &[String]) -> Self {
        Self { ignored: fields.to_vec(), ..self }
    }

    /// Returns the path of a model in the cache, after downloading what the cache lacks; of this `commit`, if there is one.
    /// `show` gets what happens meanwhile.
    ///
    /// Programs that download a file at once wait for the one that is first.
    ///
    /// # Errors
    /// If there is no such model, file or revision, the server cannot be reached, does not answer or refuses the token,
    /// or, offline, the cache lacks a file.
    pub fn fetch(
        &self,
        name: &HubName,
        commit: Option<&str>,
        show: impl Fn(Download<'_>),
    ) -> Result<Snapshot> {
        Snapshots::new(self, name, &show).fetch(commit)
    }
}

fn seconds(value: &str) -> InputResult<u64> {
    let wrong =
        || InputError(format!("HF_HUB_DOWNLOAD_TIMEOUT is {value:?}: give whole seconds, or unset it."));
    let seconds = value.parse().map_err(|_| wrong())?;
    require!(
        (1..=MOST_PATIENCE).contains(&seconds),
        "HF_HUB_DOWNLOAD_TIMEOUT is {seconds}: give 1 to {MOST_PATIENCE} seconds."
    );
    Ok(seconds)
}
