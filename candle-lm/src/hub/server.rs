//! What a server says of a file, and the bytes that it sends.

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_shard::regular;
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::{Agent, Body};

use super::digest::{self, Digest};
use super::is_word;

/// A server that answers as the Hub does.
#[derive(Clone, Debug)]
pub(super) struct Server {
    agent: Agent,
    pub(super) endpoint: String,
    token: Option<String>,
    /// The time without any byte after which a request fails.
    pub(super) patience: Duration,
}

/// What a server says of a file.
pub(super) enum Reply {
    File(FileResponse),
    /// There is none of this name.
    None {
        /// Whether the commit never has one, since the Hub says so by name. Other servers on the way answer so for a while.
        ever: bool,
    },
}

impl Reply {
    /// The file, if there is one.
    pub(super) fn file(self) -> Option<FileResponse> {
        match self {
            Self::File(answer) => Some(answer),
            Self::None { .. } => None,
        }
    }
}

/// The beginning of an answer: what the file is, and its bytes from `from` on.
pub(super) struct FileResponse {
    /// The commit that the file is of.
    pub(super) commit: String,
    /// The name of its bytes.
    pub(super) etag: String,
    /// The digest of the whole file, which the Hub says of each.
    pub(super) digest: Option<Digest>,
    from: u64,
    /// The bytes of the whole file; `None` if the answer comes in chunks, of which the last one says that it is.
    pub(super) size: Option<u64>,
    body: Body,
}

/// The bytes of a file that are asked for.
#[derive(Clone, Copy, Debug)]
pub(super) enum ByteRange {
    /// Those from one on.
    From(u64),
    /// So many from one on.
    Some(u64, u64),
}

impl ByteRange {
    fn start(self) -> u64 {
        match self {
            Self::From(start) | Self::Some(start, _) => start,
        }
    }

    fn range(self) -> Option<String> {
        match self {
            Self::From(0) => None,
            Self::From(start) => Some(format!("bytes={start}-")),
            Self::Some(start, count) => Some(format!("bytes={start}-{}", start + count.saturating_sub(1))),
        }
    }
}

/// The most redirections from one request.
const MOST_HOPS: usize = 10;
/// Bytes that are written at a time.
const CHUNK: usize = 1 << 18;
/// Bytes per second below which a server keeps the program waiting rather than sending a file.
const SLOWEST: u64 = 1 << 10;

impl Server {
    pub(super) fn new(endpoint: &str, token: Option<String>, patience: Duration) -> Self {
        let limit = Some(patience);
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Where a file lies says nothing of what it is, and is not told the token.
            .max_redirects(0)
            .accept_encoding("identity")
            .timeout_resolve(limit)
            .timeout_connect(limit)
            .timeout_send_request(limit)
            .timeout_recv_response(limit)
            .timeout_per_read(limit)
            .timeout_per_write(limit);
        Self {
            agent: config.build().into(),
            endpoint: endpoint.trim_end_matches('/').into(),
            token,
            patience,
        }
    }

    /// Asks for a part of a file of a model at a revision.
    ///
    /// # Errors
    /// If the server cannot be reached, does not answer or refuses, or its answer does not say what the file is and where
    /// it ends.
    pub(super) fn ask(&self, repo: &str, revision: &str, file: &str, part: ByteRange) -> Result<Reply> {
        let first = format!("{}/{repo}/resolve/{}/{file}", self.endpoint, revision.replace('/', "%2F"));
        let mut url = first.clone();
        let mut about: Option<FileInfo> = None;
        for _ in 0..MOST_HOPS {
            let answer = self.get(&url, part).map_err(|error| self.explained(file, error))?;
            let status = answer.status();
            // The Hub renames by redirections within itself, and only the last of its answers describes the file.
            if let (true, Some(location)) = (status.is_redirection(), header(answer.headers(), "location")) {
                if about.is_none() && !location.starts_with('/') {
                    about = Some(described(answer.headers(), file)?);
                }
                url = joined(&url, location)?;
                continue;
            }
            match status {
                StatusCode::NOT_FOUND if about.is_none() => {
                    let ever = header(answer.headers(), "x-error-code") == Some("EntryNotFound");
                    return Ok(Reply::None { ever });
                }
                StatusCode::NOT_FOUND => {
                    bail!("the place where {file} lies has no such file (status 404): try again later")
                }
                // More bytes are here than the file has.
                StatusCode::RANGE_NOT_SATISFIABLE if part.range().is_some() && part.start() > 0 => {
                    return self.ask(repo, revision, file, ByteRange::From(0));
                }
                status if !status.is_success() => bail!(self.refused(file, status.as_u16())),
                _ => {}
            }
            let FileInfo { commit, etag, digest, size: told } =
                about.map_or_else(|| described(answer.headers(), file), Ok)?;
            let said = |name: &str| header(answer.headers(), name);
            let (from, size) = match status {
                StatusCode::PARTIAL_CONTENT => {
                    let range = said("content-range").and_then(range);
                    range.with_context(|| format!("{file}: the answer has no range"))?
                }
                _ => (0, said("content-length").and_then(|size| size.parse().ok())),
            };
            let (size, in_chunks) = (told.or(size), said("transfer-encoding").is_some());
            ensure!(
                size.is_some() || in_chunks,
                "{file}: the answer does not say how many bytes there are; is this a Hub?"
            );
            return Ok(Reply::File(FileResponse {
                commit,
                etag,
                digest,
                from,
                size,
                body: answer.into_body(),
            }));
        }
        bail!("{first} leads to more than {MOST_HOPS} other places")
    }

    fn get(&self, url: &str, part: ByteRange) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(url);
        let rest = url.strip_prefix(&self.endpoint);
        if let Some(token) = self.token.as_ref().filter(|_| rest.is_some_and(|rest| rest.starts_with('/'))) {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(range) = part.range() {
            request = request.header("Range", range);
        }
        request.call()
    }

    /// Appends the bytes of an answer, of which there are at most so many, to a file that has those before, and tells `shows` how
    /// many there are, and of how many.
    ///
    /// # Errors
    /// If the connection breaks off, or nearly nothing comes for the patience of this server: what came stays in the file. If
    /// the whole file has another digest or size than the server says: the file is removed.
    pub(super) fn receive(
        &self,
        answer: FileResponse,
        name: &str,
        path: &Path,
        most: u64,
        mut shows: impl FnMut(u64, Option<u64>),
    ) -> Result<()> {
        let FileResponse { digest, from, size, body, .. } = answer;
        let written = || format!("{}", path.display());
        ensure!(
            size.is_none_or(|size| size <= most),
            "{name} has {} bytes, and at most {most} are read",
            size.unwrap_or_default()
        );
        if path.symlink_metadata().is_ok_and(|about| !about.is_file()) {
            bail!("{} is no regular file: remove it", path.display());
        }
        let mut file = OpenOptions::new().create(true).append(true).open(path).with_context(written)?;
        let before = file.metadata().with_context(written)?.len();
        ensure!(before >= from, "{name}: the answer begins at byte {from}, and {before} are here; try again");
        if before > from {
            // The server starts anew.
            file.set_len(from).with_context(written)?;
        }
        let (mut reader, mut has, mut chunk) = (body.into_reader(), from, vec![0; CHUNK]);
        let mut pace = Pace::new(self.patience);
        // The digest of git begins with the size.
        let mut context = digest.as_ref().zip(size).map(|(digest, size)| digest.begin(size));
        if let Some(context) = context.as_mut().filter(|_| from > 0) {
            digest::read(regular::open(path).with_context(written)?, context).with_context(written)?;
        }
        let end = loop {
            shows(has, size);
            match reader.read(&mut chunk) {
                Ok(0) => break None,
                Ok(count) => {
                    has += count as u64;
                    if has > size.unwrap_or(most) {
                        drop(file);
                        fs::remove_file(path).with_context(written)?;
                        bail!(
                            "{name} has more than {} bytes, unlike {} says",
                            size.unwrap_or(most),
                            self.endpoint
                        );
                    }
                    file.write_all(&chunk[..count]).with_context(written)?;
                    if let Some(context) = &mut context {
                        context.update(&chunk[..count]);
                    }
                    if let Err(slow) = pace.note(count as u64) {
                        break Some(slow);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Some(self.named(error.into())),
            }
        };
        file.sync_all().with_context(written)?;
        if end.is_none() && size.is_none_or(|size| size == has) {
            let Some(want) = digest else { return Ok(()) };
            let got = match context {
                Some(context) => want.end(context),
                None => want.of_file(regular::open(path).with_context(written)?).with_context(written)?,
            };
            let is_of = || regular::open(path).and_then(|file| want.is_of(file));
            if got == want || (matches!(want, Digest::Git(_)) && is_of().with_context(written)?) {
                return Ok(());
            }
            fs::remove_file(path).with_context(written)?;
            let ((kind, got), (_, want)) = (got.parts(), want.parts());
            bail!("{name} came damaged: its {kind} is {got}, and {} says {want}; try again", self.endpoint);
        }
        let of = size.map(|size| format!(" of {size}")).unwrap_or_default();
        let why = end.unwrap_or_else(|| "the connection broke off".into());
        let next = if digest.is_some() { "which goes on from there" } else { "which starts anew" };
        bail!("{name} has {has}{of} bytes, since {why}: try again, {next}")
    }

    /// Returns so many bytes of a file, from one on, and the size of the whole file.
    ///
    /// # Errors
    /// Those of [`ask`](Self::ask); if there are fewer.
    pub(super) fn some(
        &self,
        repo: &str,
        commit: &str,
        file: &str,
        start: u64,
        count: u64,
    ) -> Result<(Vec<u8>, u64)> {
        let answer = self.ask(repo, commit, file, ByteRange::Some(start, count))?.file();
        let answer = answer.with_context(|| format!("there is no {file} in {}", self.endpoint))?;
        ensure!(answer.commit == commit, "{} has {file} of another commit than {commit}", self.endpoint);
        let size = answer
            .size
            .with_context(|| format!("{file}: the answer does not say how many bytes there are"))?;
        let skipped = start.checked_sub(answer.from);
        let skipped =
            skipped.with_context(|| format!("{file}: the answer begins at byte {}", answer.from))?;
        let (mut bytes, mut pace) = (Vec::new(), Pace::new(self.patience));
        // Servers without ranges send the whole file, of which the rest is left.
        let mut reader = answer.body.into_reader().take(skipped.saturating_add(count));
        let mut chunk = vec![0; CHUNK];
        loop {
            match reader.read(&mut chunk) {
                Ok(0) => break,
                Ok(read) => {
                    bytes.extend_from_slice(&chunk[..read]);
                    pace.note(read as u64).map_err(|slow| anyhow!("{file}: {slow}"))?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => bail!("{file} cannot be read: {}", self.named(error.into())),
            }
        }
        let bytes = bytes.split_off(bytes.len().min(skipped as usize));
        ensure!(
            bytes.len() as u64 == count,
            "{file} has {} of {count} bytes at {start}: try again",
            bytes.len()
        );
        Ok((bytes, size))
    }

    /// Says what an error of the connection means for the user.
    fn explained(&self, file: &str, error: ureq::Error) -> anyhow::Error {
        anyhow!(
            "{file} cannot be read from {} ({}): check the network, or set HF_HUB_OFFLINE=1 to use the cache alone",
            self.endpoint,
            self.named(error)
        )
    }

    /// The error with its causes; a time limit with the way to change it.
    fn named(&self, error: ureq::Error) -> String {
        let seconds = self.patience.as_secs();
        let is_late = match &error {
            ureq::Error::Timeout(_) => true,
            ureq::Error::Io(error) => {
                matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
            }
            _ => false,
        };
        if is_late {
            return format!("nothing came for {seconds} s, the limit of HF_HUB_DOWNLOAD_TIMEOUT");
        }
        let mut said = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            let more = error.to_string();
            if !said.contains(&more) {
                said.push_str(&format!(": {more}"));
            }
            cause = error.source();
        }
        said
    }

    /// Says what a status means for the user.
    fn refused(&self, file: &str, status: u16) -> String {
        let endpoint = &self.endpoint;
        match (status, &self.token) {
            (401 | 403, None) => format!(
                "{endpoint} refuses {file} (status {status}): the model does not exist or is not public; if it is not \
                 public, set HF_TOKEN"
            ),
            (401 | 403, Some(_)) => format!(
                "{endpoint} refuses {file} (status {status}): the model does not exist or is not public, and the token of \
                 HF_TOKEN or of the cache does not allow it"
            ),
            _ => format!("{endpoint} answers {file} with status {status}"),
        }
    }
}

/// Whether bytes come at a pace at which a file ends.
struct Pace {
    patience: Duration,
    since: Instant,
    came: u64,
}

impl Pace {
    fn new(patience: Duration) -> Self {
        Self { patience, since: Instant::now(), came: 0 }
    }

    /// Notes that so many bytes came.
    ///
    /// # Errors
    /// If too few came for a while; what to say of it.
    fn note(&mut self, bytes: u64) -> Result<(), String> {
        self.came += bytes;
        if self.since.elapsed() < self.patience {
            return Ok(());
        }
        let (seconds, came) = (self.since.elapsed().as_secs().max(1), self.came);
        if came < seconds.saturating_mul(SLOWEST) {
            return Err(format!(
                "only {came} bytes came in {seconds} s, the limit of HF_HUB_DOWNLOAD_TIMEOUT"
            ));
        }
        (self.since, self.came) = (Instant::now(), 0);
        Ok(())
    }
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// What the Hub says of a file, and no other place: the commit and the name of the bytes, which become parts of paths, and
/// how many there are of a large one.
struct FileInfo {
    commit: String,
    etag: String,
    digest: Option<Digest>,
    size: Option<u64>,
}

fn described(headers: &HeaderMap, file: &str) -> Result<FileInfo> {
    let part = |names: [&str; 2]| -> Result<String> {
        let said = names.iter().find_map(|name| header(headers, name));
        let said = said.with_context(|| format!("{file}: the answer has no {}; is this a Hub?", names[1]))?;
        let word = said.trim_start_matches("W/").trim_matches('"');
        ensure!(
            is_word(word) && word.len() <= 128,
            "{file}: the answer has the {} {said:?}, which cannot name a file",
            names[1]
        );
        Ok(word.to_owned())
    };
    // Large files have another name where they lie than for the Hub.
    let (commit, etag) = (part(["x-repo-commit", "X-Repo-Commit"])?, part(["x-linked-etag", "ETag"])?);
    let digest = Digest::of_name(&etag);
    Ok(FileInfo {
        commit,
        etag,
        digest,
        size: header(headers, "x-linked-size").and_then(|size| size.parse().ok()),
    })
}

/// The first byte and the size of the whole, from `bytes 5-9/10`.
fn range(said: &str) -> Option<(u64, Option<u64>)> {
    let (span, size) = said.strip_prefix("bytes ")?.split_once('/')?;
    Some((span.split_once('-')?.0.parse().ok()?, size.parse().ok()))
}

/// The place that a redirection leads to.
fn joined(url: &str, location: &str) -> Result<String> {
    if location.starts_with("http://") || location.starts_with("https://") {
        return Ok(location.to_owned());
    }
    let host = url.find("://").map(|at| at + 3);
    let host = host.map(|start| url[start..].find('/').map_or(url.len(), |length| start + length));
    match host.filter(|_| location.starts_with('/') && !location.starts_with("//")) {
        Some(end) => Ok(format!("{}{location}", &url[..end])),
        None => bail!("{url} leads to {location:?}, which is no address"),
    }
}
