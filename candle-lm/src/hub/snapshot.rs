//! The files of a model in the cache: snapshots of commits, whose files lead to blobs with the names of their bytes.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;

use anyhow::{Context, Result, bail, ensure};
use candle_shard::{Weights, regular};
use hf_hub::{Repo, RepoType};
use serde_json::Value;

use super::digest::Digest;
use super::server::{ByteRange, FileResponse, Reply, Server};
use super::{Download, Hub, HubName, Snapshot, is_word, lock, outline};
use crate::chat::TOOL_USE;
use crate::config::Config;

/// The files of a folder that a model needs.
pub(super) const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];
/// Those that it may have.
pub(super) const OPTIONAL: [&str; 8] = [
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    TOOL_USE,
    "chat_template.json",
    "hf_quant_config.json",
];

const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The commits of a model.
pub(super) struct Snapshots<'a> {
    name: &'a HubName,
    /// `None` offline.
    server: Option<&'a Server>,
    /// The folder of the model in the cache.
    root: PathBuf,
    /// The locks of the model's files.
    locks: PathBuf,
    /// Fields of the config that do not count.
    ignored: &'a [String],
    show: &'a dyn Fn(Download<'_>),
}

impl<'a> Snapshots<'a> {
    pub(super) fn new(hub: &'a Hub, name: &'a HubName, show: &'a dyn Fn(Download<'_>)) -> Self {
        let folder = Repo::new(name.repo.clone(), RepoType::Model).folder_name();
        let cache = hub.cache.path();
        let (root, locks) = (cache.join(&folder), cache.join(".locks").join(&folder));
        Self { name, server: hub.server.as_ref(), root, locks, ignored: &hub.ignored, show }
    }

    /// Returns the model, of this commit if there is one, after downloading what is missing.
    pub(super) fn fetch(&self, commit: Option<&str>) -> Result<Snapshot> {
        let commit = match (commit.or_else(|| self.named()), self.known(), self.server) {
            (Some(commit), ..) => commit.to_owned(),
            (None, Some(commit), server) if server.is_none() || self.has_needed(&commit)? => commit,
            (None, _, Some(server)) => self.resolve(server)?,
            (None, _, None) => bail!(self.missing(self.first())),
        };
        let path = match &self.name.file {
            Some(file) => {
                let files = parts(file);
                // The header of a model in several files is that of all of them.
                if let Some(server) =
                    self.server.filter(|_| files.len() == 1 && !self.pointer(&commit, file).exists())
                {
                    outline::check_file(server, &self.name.repo, &commit, file, self.ignored)?;
                }
                for part in &files {
                    self.get(&commit, part)?;
                }
                self.pointer(&commit, file)
            }
            None => self.folder(&commit)?,
        };
        // Not before all of the files are here, so that the revision never leads to a part of a model.
        self.remember(&commit)?;
        Ok(Snapshot { path, commit })
    }

    /// The revision, if it is a commit.
    fn named(&self) -> Option<&str> {
        let revision = self.name.revision.as_str();
        let is_commit = revision.len() == 40 && revision.chars().all(|c| c.is_ascii_hexdigit());
        is_commit.then_some(revision)
    }

    /// The commit that the cache has for the revision.
    fn known(&self) -> Option<String> {
        let commit = regular::read_text(self.reference(), 1 << 12).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_word(commit))
    }

    fn reference(&self) -> PathBuf {
        self.root.join("refs").join(&self.name.revision)
    }

    /// Takes note of the commit of the revision.
    fn remember(&self, commit: &str) -> Result<()> {
        if self.name.revision == commit || self.known().as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.reference();
        // Other programs never see a part of the name.
        let new = path.with_file_name(format!(".{}.{commit}", process::id()));
        let write = || {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::write(&new, commit)?;
            fs::rename(&new, &path)
        };
        write().with_context(|| format!("{}", path.display()))
    }

    /// The file that is asked for first.
    fn first(&self) -> &str {
        self.name.file.as_deref().unwrap_or(NEEDED[0])
    }

    /// Asks the server for the commit of the revision, and stores the first of its files if it is a small one.
    fn resolve(&self, server: &Server) -> Result<String> {
        let part = if self.name.file.is_some() { ByteRange::Some(0, 1) } else { ByteRange::From(0) };
        let answer = server.ask(&self.name.repo, &self.name.revision, self.first(), part)?;
        let answer = answer.file().with_context(|| self.missing(self.first()))?;
        let commit = answer.commit.clone();
        if self.name.file.is_none() {
            self.store(server, answer, self.first())?;
        }
        Ok(commit)
    }

    fn missing(&self, file: &str) -> String {
        match self.server {
            Some(server) => format!("there is no {file} in {}", server.endpoint),
            None => format!("there is no {file} in the cache, and HF_HUB_OFFLINE is set"),
        }
    }

    fn pointer(&self, commit: &str, file: &str) -> PathBuf {
        self.root.join("snapshots").join(commit).join(file)
    }

    /// Whether the cache has all files of a commit that the model needs.
    fn has_needed(&self, commit: &str) -> Result<bool> {
        let has = |file: &str| self.pointer(commit, file).exists();
        Ok(match &self.name.file {
            Some(file) => parts(file).iter().all(|part| has(part)),
            None => {
                let index = self.pointer(commit, INDEX);
                let weights = match (has(SINGLE), index.exists()) {
                    // One that is damaged is downloaded again.
                    (false, true) => shards(&index).is_ok_and(|shards| shards.iter().all(|shard| has(shard))),
                    (has_single, _) => has_single,
                };
                weights && NEEDED.iter().all(|file| has(file))
            }
        })
    }

    /// Returns the folder with all files of a commit.
    fn folder(&self, commit: &str) -> Result<PathBuf> {
        let folder = self.root.join("snapshots").join(commit);
        self.get(commit, NEEDED[0])?;
        Config::read(&folder, self.ignored)?;
        for file in &NEEDED[1..] {
            self.get(commit, file)?;
        }
        for file in OPTIONAL {
            self.get_optional(commit, file)?;
        }
        let weights = match self.get_optional(commit, INDEX)? {
            None => BTreeSet::from([SINGLE.to_owned()]),
            Some(index) => shards(&index)?,
        };
        if let Some(server) =
            self.server.filter(|_| weights.iter().any(|file| !self.pointer(commit, file).exists()))
        {
            outline::check(server, &self.name.repo, commit, &folder, &weights, self.ignored)?;
        }
        for file in &weights {
            self.get(commit, file)?;
        }
        Ok(folder)
    }

    /// Returns a file that the model needs. What was noted of it does not count.
    fn get(&self, commit: &str, file: &str) -> Result<PathBuf> {
        let pointer = self.pointer(commit, file);
        if !self.has(&pointer)? {
            let server = self.server.with_context(|| self.missing(file))?;
            let answer = server.ask(&self.name.repo, commit, file, ByteRange::From(0))?.file();
            self.store_of(commit, server, answer.with_context(|| self.missing(file))?, file)?;
        }
        Ok(pointer)
    }

    /// Returns a file, or `None` if the model has none of this name.
    fn get_optional(&self, commit: &str, file: &str) -> Result<Option<PathBuf>> {
        let pointer = self.pointer(commit, file);
        if self.has(&pointer)? {
            return Ok(Some(pointer));
        }
        let absent = self.root.join(".no_exist").join(commit).join(file);
        let Some(server) = self.server.filter(|_| !absent.exists()) else { return Ok(None) };
        match server.ask(&self.name.repo, commit, file, ByteRange::From(0))? {
            Reply::File(answer) => self.store_of(commit, server, answer, file)?,
            Reply::None { ever } => {
                if ever {
                    // The next run need not ask. A cache that cannot be written to still serves.
                    absent
                        .parent()
                        .map_or(Ok(()), fs::create_dir_all)
                        .and_then(|()| fs::write(&absent, ""))
                        .ok();
                }
                return Ok(None);
            }
        }
        Ok(Some(pointer))
    }

    /// Whether a file is there, with the bytes that it is named by. Those of a large file are not read again.
    fn has(&self, pointer: &Path) -> Result<bool> {
        let Ok(blob) = pointer.canonicalize() else { return Ok(false) };
        if is_sound(&blob).with_context(|| format!("{}", pointer.display()))? {
            return Ok(true);
        }
        ensure!(
            self.server.is_some(),
            "{} is damaged, and HF_HUB_OFFLINE is set: unset it to download the file again",
            pointer.display()
        );
        Ok(false)
    }

    /// Stores a file that has to be of this commit.
    fn store_of(&self, commit: &str, server: &Server, answer: FileResponse, file: &str) -> Result<()> {
        ensure!(
            answer.commit == commit,
            "{} has {file} of the commit {} where that of {commit} was asked for",
            server.endpoint,
            answer.commit
        );
        self.store(server, answer, file)
    }

    /// Writes the bytes of an answer to their blob, unless it is there, and lets the file lead to it.
    fn store(&self, server: &Server, answer: FileResponse, file: &str) -> Result<()> {
        let (commit, etag) = (answer.commit.clone(), answer.etag.clone());
        let blobs = self.root.join("blobs");
        fs::create_dir_all(&blobs).with_context(|| format!("{}", blobs.display()))?;
        // A name that is no digest may be that of other bytes too, so these are named by git's digest when they are here.
        let named = answer.digest.is_some().then(|| blobs.join(&etag));
        let key = if named.is_some() { etag.clone() } else { format!("{commit}-{}", file.replace('/', "-")) };
        let part = blobs.join(format!("{key}.incomplete"));
        let found = || named.clone().filter(|blob| blob.exists() && is_sound(blob).unwrap_or(false));
        let blob = match found() {
            Some(blob) => blob,
            None => {
                let mut has_waited = false;
                let _lock =
                    lock::hold(&self.locks.join(format!("{key}.lock")), &part, server.patience, || {
                        has_waited = true;
                        (self.show)(Download::Wait { file });
                    })?;
                match found() {
                    Some(blob) => blob,
                    None => self.download(server, answer, file, &part, has_waited)?,
                }
            }
        };
        let pointer = self.pointer(&commit, file);
        link(&blob, &pointer).with_context(|| format!("{}", pointer.display()))
    }

    /// Downloads the bytes of an answer by way of the file `part`, and returns their blob. The answer is an old one if the
    /// program `has_waited`.
    fn download(
        &self,
        server: &Server,
        answer: FileResponse,
        file: &str,
        part: &Path,
        has_waited: bool,
    ) -> Result<PathBuf> {
        let (commit, etag, digest) = (answer.commit.clone(), answer.etag.clone(), answer.digest.clone());
        // Without a digest nobody knows what the first bytes are of.
        let has = digest.as_ref().map_or(0, |_| fs::metadata(part).map_or(0, |about| about.len()));
        if let Some(digest) = digest.as_ref().filter(|_| has > 0 && answer.size == Some(has))
            && regular::open(part).and_then(|file| digest.is_of(file)).unwrap_or(false)
        {
            // The program before stopped when all of them were here.
            return named(part, digest);
        }
        let answer = match has > 0 || has_waited {
            false => answer,
            true => {
                let again = server.ask(&self.name.repo, &commit, file, ByteRange::From(has))?.file();
                let again = again.filter(|again| (&again.commit, &again.etag) == (&commit, &etag));
                again.with_context(|| format!("{file} is another one than a moment ago: try again"))?
            }
        };
        let received = server.receive(answer, file, part, most(file), |bytes, size| {
            (self.show)(Download::Bytes { file, bytes, size });
        });
        (self.show)(Download::End { file });
        received?;
        let written = || format!("{}", part.display());
        let digest = match digest {
            Some(digest) => digest,
            None => Digest::of_git(regular::open(part).with_context(written)?).with_context(written)?,
        };
        named(part, &digest)
    }
}

/// The GGUF files of a model of which this one is a part, or this one.
fn parts(file: &str) -> Vec<String> {
    let paths = Weights::gguf_files(file).into_iter();
    paths.filter_map(|path| path.into_os_string().into_string().ok()).collect()
}

/// Gives the bytes their name.
fn named(part: &Path, digest: &Digest) -> Result<PathBuf> {
    let blob = part.with_file_name(digest.parts().1);
    fs::rename(part, &blob).with_context(|| format!("{}", blob.display()))?;
    Ok(blob)
}

/// The most bytes of a file of this name.
fn most(file: &str) -> u64 {
    match file {
        "tokenizer.json" => regular::TOKENIZER,
        INDEX => regular::INDEX,
        file if file.ends_with(".json") || file.ends_with(".jinja") => regular::CONFIG,
        _ => u64::MAX,
    }
}

/// Whether the bytes of a small file are those that it is named by.
fn is_sound(blob: &Path) -> io::Result<bool> {
    match blob.file_name().and_then(|name| Digest::of_name(name.to_str()?)) {
        Some(name @ Digest::Git(_)) => name.is_of(regular::open(blob)?),
        _ => Ok(true),
    }
}

/// Lets a file lead to its bytes.
fn link(blob: &Path, pointer: &Path) -> io::Result<()> {
    pointer.parent().map_or(Ok(()), fs::create_dir_all)?;
    if !pointer.exists() && pointer.symlink_metadata().is_ok() {
        // It leads to bytes that somebody deleted. Another program may be faster.
        match fs::remove_file(pointer) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    match linked(blob, pointer) {
        // Another program was faster.
        Err(_) if pointer.exists() => Ok(()),
        done => done,
    }
}

/// The cache may be moved, so links say where bytes are from where they are.
#[cfg(unix)]
fn linked(blob: &Path, pointer: &Path) -> io::Result<()> {
    let root = blob.ancestors().nth(2).unwrap_or(Path::new(""));
    let depth = pointer.strip_prefix(root).map_or(0, |inside| inside.components().count() - 1);
    let up: PathBuf = (0..depth).map(|_| "..").collect();
    let inside = blob.strip_prefix(root).unwrap_or(blob);
    std::os::unix::fs::symlink(up.join(inside), pointer)
}

/// Where links need a privilege, the bytes have a second name.
#[cfg(not(unix))]
fn linked(blob: &Path, pointer: &Path) -> io::Result<()> {
    fs::hard_link(blob, pointer).or_else(|_| fs::copy(blob, pointer).map(drop))
}

/// The names of the files in an index.
fn shards(index: &Path) -> Result<BTreeSet<String>> {
    let read = || -> Result<BTreeSet<String>> {
        let index: Value = serde_json::from_str(&regular::read_text(index, regular::INDEX)?)?;
        let map = index.get("weight_map").and_then(Value::as_object).context("there is no weight_map")?;
        let one = |file: &Value| {
            let name = file.as_str().filter(|name| is_word(name));
            name.map(str::to_owned)
                .with_context(|| format!("weight_map has {file}, which is no name of a file"))
        };
        map.values().map(one).collect()
    };
    read().with_context(|| format!("{}", index.display()))
}
