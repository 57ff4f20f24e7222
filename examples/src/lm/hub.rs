//! Models by their names on the Hub: `owner/name`, `owner/name@revision` or `owner/name/file.gguf`.
//!
//! Files are kept in the cache that Python's `huggingface_hub` has too, under `HF_HOME` or `~/.cache/huggingface`.
//! `HF_ENDPOINT` is another server, `HF_TOKEN` or the file `token` of the cache allows what is not public, and
//! `HF_HUB_OFFLINE=1` uses the cache alone.

use std::collections::BTreeSet;
use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

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

/// The files of a folder, and whether the model needs them.
const FILES: [(&str, bool); 5] = [
    ("config.json", true),
    ("tokenizer.json", true),
    ("generation_config.json", false),
    ("tokenizer_config.json", false),
    ("chat_template.jinja", false),
];

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

impl HubName {
    /// Parses the value of `--model`; `None` if it can only be a path.
    ///
    /// ```
    /// use examples::lm::hub::HubName;
    ///
    /// let name = HubName::parse("Qwen/Qwen3-0.6B@main").unwrap();
    /// assert_eq!((name.repo.as_str(), name.revision.as_str(), name.file), ("Qwen/Qwen3-0.6B", "main", None));
    /// assert_eq!(HubName::parse("unsloth/x-GGUF/x-Q4_K_M.gguf").unwrap().file.as_deref(), Some("x-Q4_K_M.gguf"));
    /// assert_eq!(HubName::parse("./a/b"), None);
    /// ```
    pub fn parse(text: &str) -> Option<Self> {
        let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
        let parts: Vec<&str> = name.split('/').collect();
        let is_word = |part: &str| {
            let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !part.is_empty() && part.chars().all(known) && !part.starts_with('.') && !part.contains("..")
        };
        let is_revision = revision.split('/').all(is_word);
        let (&owner, &repo, file) = match &parts[..] {
            [owner, repo] => (owner, repo, None),
            [owner, repo, file @ ..] if file.last()?.ends_with(".gguf") => (owner, repo, Some(file.join("/"))),
            _ => return None,
        };
        let is_name = is_revision && parts.iter().all(|part| is_word(part));
        is_name.then(|| Self { repo: format!("{owner}/{repo}"), revision: revision.into(), file })
    }

    /// Returns the path of the model in the cache, after downloading what the cache lacks. `shows` draws progress on
    /// stderr, if that is a terminal.
    ///
    /// # Errors
    /// If there is no such model, file or revision, the server cannot be reached or refuses the token, or, offline, the
    /// cache lacks a file.
    pub fn fetch(&self, shows: bool) -> Result<PathBuf> {
        let fetched = || {
            let files = Source::new(self, shows)?;
            match &self.file {
                Some(file) => files.get(file),
                None => files.folder(),
            }
        };
        fetched().with_context(|| format!("--model {self}"))
    }
}

impl std::fmt::Display for HubName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let file = self.file.as_ref().map(|file| format!("/{file}")).unwrap_or_default();
        write!(f, "{}{file}@{}", self.repo, self.revision)
    }
}

/// Where files come from.
struct Source {
    cache: CacheRepo,
    /// `None` offline.
    remote: Option<ApiRepo>,
    endpoint: String,
    has_token: bool,
    shows: bool,
}

impl Source {
    fn new(name: &HubName, shows: bool) -> Result<Self> {
        let set = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let is_offline = set("HF_HUB_OFFLINE")
            .is_some_and(|value| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str()));
        ensure!(
            set("HF_HOME").is_some() || env::home_dir().is_some(),
            "there is no home folder for the cache: set HF_HOME"
        );
        let cache = if set("HF_HOME").is_some() { Cache::from_env() } else { Cache::default() };
        let token = set("HF_TOKEN").or_else(|| cache.token());
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let repo = Repo::with_revision(name.repo.clone(), RepoType::Model, name.revision.clone());
        let has_token = token.is_some();
        let builder = ApiBuilder::from_cache(cache.clone()).with_endpoint(endpoint.clone()).with_token(token);
        let remote = match is_offline {
            true => None,
            false => Some(builder.build()?.repo(repo.clone())),
        };
        Ok(Self { cache: cache.repo(repo), remote, endpoint, has_token, shows })
    }

    /// Returns the folder with all files of a model.
    fn folder(&self) -> Result<PathBuf> {
        let mut folder = None;
        for (name, is_needed) in FILES {
            match is_needed {
                true => folder = self.get(name)?.parent().map(Path::to_owned),
                false => drop(self.get_optional(name)?),
            }
        }
        match self.get_optional(INDEX)? {
            None => drop(self.get(SINGLE)?),
            Some(index) => {
                for shard in shards(&index)? {
                    self.get(&shard)?;
                }
            }
        }
        folder.context("the model has no files")
    }

    fn get(&self, file: &str) -> Result<PathBuf> {
        let found = self.get_optional(file)?;
        let remote =
            if self.remote.is_some() { self.endpoint.as_str() } else { "the cache, and HF_HUB_OFFLINE is set" };
        found.with_context(|| format!("there is no {file} in {remote}"))
    }

    /// Returns a file, or `None` if the model has none of this name.
    fn get_optional(&self, file: &str) -> Result<Option<PathBuf>> {
        if let Some(path) = self.cache.get(file) {
            return Ok(Some(path));
        }
        let Some(remote) = &self.remote else { return Ok(None) };
        let bar = if self.shows { ProgressBar::new(0) } else { ProgressBar::hidden() };
        let (mut bar, mut size) = (Bar(bar), 0);
        let path = match remote.download_with_progress(file, Sized { bar: &mut bar, size: &mut size }) {
            Err(error) => return self.explained(file, error),
            Ok(path) => path,
        };
        let has = fs::metadata(&path).with_context(|| format!("{}", path.display()))?.len();
        if has != size {
            // Not to be taken for the whole file in the next run.
            fs::canonicalize(&path).and_then(fs::remove_file).and_then(|()| fs::remove_file(&path)).ok();
            bail!("{file} has {has} of {size} bytes: the connection broke off; try again");
        }
        Ok(Some(path))
    }

    /// Says what an error means for the user.
    fn explained(&self, file: &str, error: ApiError) -> Result<Option<PathBuf>> {
        let status = match &error {
            ApiError::RequestError(request) => match **request {
                ureq::Error::StatusCode(status) => Some(status),
                _ => None,
            },
            _ => None,
        };
        let endpoint = &self.endpoint;
        match status {
            Some(404) => Ok(None),
            Some(status @ (401 | 403)) => bail!(
                "{endpoint} refuses {file} (status {status}): the model does not exist or is not public{}",
                match self.has_token {
                    true => ", and the token of HF_TOKEN or of the cache does not allow it",
                    false => "; if it is not public, set HF_TOKEN",
                }
            ),
            Some(status) => bail!("{endpoint} answers {file} with status {status}"),
            None => {
                let mut said = error.to_string();
                let mut cause = error.source();
                while let Some(error) = cause {
                    let more = error.to_string();
                    if !said.contains(&more) {
                        said.push_str(&format!(": {more}"));
                    }
                    cause = error.source();
                }
                bail!(
                    "{file} cannot be read from {endpoint} ({said}): check the network, or set HF_HUB_OFFLINE=1 to use the cache alone"
                )
            }
        }
    }
}

/// The names of the files in an index.
fn shards(index: &Path) -> Result<BTreeSet<String>> {
    let read = || -> Result<BTreeSet<String>> {
        let index: Value = serde_json::from_str(&fs::read_to_string(index)?)?;
        let map = index.get("weight_map").and_then(Value::as_object).context("there is no weight_map")?;
        let one = |file: &Value| {
            let name = file.as_str().filter(|name| !name.contains(['/', '\\']) && !name.starts_with('.'));
            name.map(str::to_owned).with_context(|| format!("weight_map has {file}, which is no name of a file"))
        };
        map.values().map(one).collect()
    };
    read().with_context(|| format!("{}", index.display()))
}

/// The bytes of one file on stderr.
struct Bar(ProgressBar);

/// The same, which also notes the size.
struct Sized<'a> {
    bar: &'a mut Bar,
    size: &'a mut u64,
}

impl Progress for Sized<'_> {
    fn init(&mut self, size: usize, file: &str) {
        *self.size = size as u64;
        let style = ProgressStyle::with_template("{msg} {bar:32} {bytes} of {total_bytes} [{elapsed}, {eta} left]");
        let bar = &self.bar.0;
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_length(size as u64);
        bar.set_position(0);
        bar.set_message(file.to_owned());
    }

    fn update(&mut self, size: usize) {
        self.bar.0.inc(size as u64);
    }

    fn finish(&mut self) {
        self.bar.0.finish_and_clear();
    }
}
