//! A small server that answers as the Hub does, with the faults that a test wants.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// The commits of all models, oldest first.
pub(crate) const COMMITS: [&str; 2] =
    ["0123456789abcdef0123456789abcdef01234567", "fedcba9876543210fedcba9876543210fedcba98"];

/// How a file is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Manner {
    /// Never.
    Silent,
    /// Only so many bytes, and then nothing.
    Stops(usize),
    /// After a pause behind the headers.
    Late(Duration),
    /// Not: the place where it lies has no such file at the moment.
    Gone,
    /// Whole, with another bit in the byte of this number.
    Damaged(usize),
    /// Without its size, to the end of the connection, after so many bytes.
    Unsized(usize),
    /// In chunks without an end.
    Endless,
    /// A byte at a time.
    Drips,
    /// From a place that leads to itself.
    Loops,
    /// Whole, and called so.
    Called(&'static str),
    /// So many bytes, as if that were all.
    Cut(usize),
    /// With a header that says so many bytes.
    Sized(u64),
}

/// What the server has, and the files that it was asked to send.
#[derive(Clone, Default)]
pub(crate) struct Server {
    state: Arc<Mutex<State>>,
    pub(crate) address: String,
}

#[derive(Default)]
struct State {
    /// The files of each commit by `owner/name/file`.
    commits: Vec<BTreeMap<String, Vec<u8>>>,
    /// The commit of `main`.
    main: usize,
    /// Whether `main` becomes the last commit after the next answer for it.
    moves: bool,
    /// The name that answers have for the commit, if not the true one.
    called: Option<String>,
    manners: BTreeMap<String, Manner>,
    sent: Vec<String>,
}

/// The status, the headers and the body of an answer.
type Answer = (&'static str, String, Vec<u8>);

impl Server {
    /// Serves files by `owner/name/file`; those of the owner `closed` only with the token `open-sesame`.
    pub(crate) fn start(files: BTreeMap<String, Vec<u8>>) -> Self {
        Self::with_commits(vec![files])
    }

    /// Serves the files of several commits; `main` is the first.
    pub(crate) fn with_commits(commits: Vec<BTreeMap<String, Vec<u8>>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = Self { state: Arc::new(Mutex::new(State { commits, ..State::default() })), address };
        let answers = server.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let answers = answers.clone();
                thread::spawn(move || answers.answer(stream));
            }
        });
        server
    }

    /// Lets `main` become the last commit, after the next answer for it.
    pub(super) fn moves(&self) {
        self.state.lock().unwrap().moves = true;
    }

    /// Lets `main` become the last commit.
    pub(super) fn moved(&self) {
        let mut state = self.state.lock().unwrap();
        state.main = state.commits.len() - 1;
    }

    /// Lets answers call the commit so.
    pub(super) fn call(&self, commit: &str) {
        self.state.lock().unwrap().called = Some(commit.to_owned());
    }

    /// Sends a file in this manner from now on.
    pub(crate) fn manner(&self, file: &str, manner: Option<Manner>) {
        let mut state = self.state.lock().unwrap();
        state.manners.remove(file);
        state.manners.extend(manner.map(|manner| (file.to_owned(), manner)));
    }

    /// The files that were sent since the last call, with the first byte if it is not 0.
    pub(crate) fn sent(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().sent)
    }

    /// Answers the requests of one connection.
    fn answer(&self, stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap());
        let mut stream = stream;
        loop {
            let (mut first, mut headers) = (String::new(), BTreeMap::new());
            if lines.read_line(&mut first).unwrap_or(0) == 0 {
                return;
            }
            loop {
                let mut line = String::new();
                if lines.read_line(&mut line).unwrap_or(0) == 0 || line.trim().is_empty() {
                    break;
                }
                if let Some((name, value)) = line.split_once(':') {
                    headers.insert(name.to_lowercase(), value.trim().to_owned());
                }
            }
            let path = first.split(' ').nth(1).unwrap_or("/").to_owned();
            let (status, more, body) = self.reply(&path, &headers);
            let file = path.rsplit('/').next().unwrap_or_default();
            let manner = self.state.lock().unwrap().manners.get(file).copied();
            // Most are manners of whole files, which those who read headers do not ask for.
            let is_header = headers.get("range").is_some_and(|range| !range.ends_with('-'));
            let is_any = |manner: &Manner| {
                matches!(
                    manner,
                    Manner::Endless
                        | Manner::Drips
                        | Manner::Loops
                        | Manner::Called(_)
                        | Manner::Cut(_)
                        | Manner::Sized(_)
                )
            };
            let manner = manner.filter(|manner| !is_header || is_any(manner));
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{more}\r\n", body.len());
            let mut send = |bytes: &[u8]| stream.write_all(bytes).and_then(|()| stream.flush());
            // Answers without a body are those before the one with the file.
            let sent = match manner.filter(|_| !body.is_empty()) {
                None => send(head.as_bytes()).and_then(|()| send(&body)),
                Some(Manner::Damaged(at)) => {
                    let mut body = body;
                    body[at] ^= 1;
                    send(head.as_bytes()).and_then(|()| send(&body))
                }
                Some(Manner::Late(pause)) => send(head.as_bytes()).and_then(|()| {
                    thread::sleep(pause);
                    send(&body)
                }),
                Some(Manner::Stops(count)) => {
                    send(head.as_bytes()).and_then(|()| send(&body[..count])).ok();
                    thread::sleep(Duration::from_secs(60));
                    return;
                }
                Some(Manner::Silent) => {
                    thread::sleep(Duration::from_secs(60));
                    return;
                }
                Some(Manner::Unsized(count)) => {
                    send(format!("HTTP/1.1 {status}\r\nConnection: close\r\n{more}\r\n").as_bytes())
                        .and_then(|()| send(&body[..count]))
                        .ok();
                    stream.shutdown(Shutdown::Both).ok();
                    return;
                }
                Some(Manner::Endless) => {
                    let head = format!("HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n{more}\r\n");
                    send(head.as_bytes()).ok();
                    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
                    while send(chunk.as_bytes()).is_ok() {}
                    return;
                }
                Some(Manner::Drips) => {
                    send(head.as_bytes()).ok();
                    for byte in &body {
                        if send(&[*byte]).is_err() {
                            return;
                        }
                        thread::sleep(Duration::from_millis(100));
                    }
                    Ok(())
                }
                Some(Manner::Cut(count)) => {
                    let count = count.min(body.len());
                    send(format!("HTTP/1.1 {status}\r\nContent-Length: {count}\r\n{more}\r\n").as_bytes())
                        .and_then(|()| send(&body[..count]))
                }
                Some(Manner::Sized(size)) => {
                    send(format!("HTTP/1.1 {status}\r\nContent-Length: {size}\r\n{more}\r\n").as_bytes())
                        .ok();
                    send(&body).ok();
                    return;
                }
                Some(Manner::Called(_) | Manner::Loops) => send(head.as_bytes()).and_then(|()| send(&body)),
                Some(Manner::Gone) => unreachable!("nothing is sent"),
            };
            if sent.is_err() {
                return;
            }
        }
    }

    fn reply(&self, path: &str, headers: &BTreeMap<String, String>) -> Answer {
        let nothing = |status| (status, String::new(), Vec::new());
        let path = path.trim_start_matches('/');
        let (is_mirrored, is_stored) = (path.starts_with("mirror/"), path.starts_with("store/"));
        let is_redirected = is_mirrored || is_stored;
        let path = path.trim_start_matches("mirror/").trim_start_matches("store/");
        let Some((repo, rest)) = path.split_once("/resolve/") else { return nothing("404 Not Found") };
        let Some((revision, file)) = rest.split_once('/') else { return nothing("404 Not Found") };
        let mut state = self.state.lock().unwrap();
        let commit = match revision {
            "main" => {
                let main = state.main;
                if std::mem::take(&mut state.moves) {
                    state.main = state.commits.len() - 1;
                }
                main
            }
            commit => match COMMITS[..state.commits.len()].iter().position(|known| *known == commit) {
                Some(place) => place,
                None => return nothing("404 Not Found"),
            },
        };
        let token = headers.get("authorization").map(String::as_str);
        if is_redirected && token.is_some() {
            return nothing("400 Bad Request");
        }
        if repo.starts_with("closed/") && !is_redirected && token != Some("Bearer open-sesame") {
            return nothing(if token.is_some() { "403 Forbidden" } else { "401 Unauthorized" });
        }
        if repo.starts_with("broken/") {
            return nothing("500 Internal Server Error");
        }
        let Some(bytes) = state.commits[commit].get(&format!("{repo}/{file}")).cloned() else {
            return ("404 Not Found", "X-Error-Code: EntryNotFound\r\n".into(), Vec::new());
        };
        let called = state.called.clone().unwrap_or_else(|| COMMITS[commit].to_owned());
        let manner = state.manners.get(file).copied();
        let digits = |digest: ring::digest::Digest| -> String {
            digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
        };
        // As git names them.
        let named = [format!("blob {}\0", bytes.len()).as_bytes(), &bytes].concat();
        let git = digits(ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, &named));
        let etag = if let Some(Manner::Called(name)) = manner { name.into() } else { git };
        let about = format!("ETag: \"{etag}\"\r\nX-Repo-Commit: {called}\r\n");
        if matches!(manner, Some(Manner::Loops)) {
            return ("302 Found", format!("{about}Location: /{path}\r\n"), Vec::new());
        }
        // Weights lie elsewhere, for whom the token is not: a mirror knows the place, which says nothing of commits.
        let address = self.address.replace("127.0.0.1", "localhost");
        let location =
            |place| format!("Location: {address}/{place}/{repo}/resolve/{}/{file}\r\n", COMMITS[commit]);
        if is_mirrored {
            return ("302 Found", location("store"), Vec::new());
        }
        if file.ends_with(".safetensors") && !is_stored {
            let digest = digits(ring::digest::digest(&ring::digest::SHA256, &bytes));
            let large = format!("X-Linked-Size: {}\r\nX-Linked-ETag: \"{digest}\"\r\n", bytes.len());
            return ("302 Found", about + &large + &location("mirror"), Vec::new());
        }
        let about = if is_stored { "ETag: \"elsewhere\"\r\n".to_owned() } else { about };
        if matches!(state.manners.get(file), Some(Manner::Gone)) {
            return nothing("404 Not Found");
        }
        let range = headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let (from, to) = range.map_or((0, ""), |(from, to)| (from.parse().unwrap(), to));
        if from >= bytes.len() {
            return nothing("416 Range Not Satisfiable");
        }
        let end =
            if to.is_empty() { bytes.len() } else { (to.parse::<usize>().unwrap() + 1).min(bytes.len()) };
        if to.is_empty() {
            state.sent.push(if from == 0 { file.to_owned() } else { format!("{file} from {from}") });
        }
        match range {
            None => ("200 OK", about, bytes),
            Some(_) => {
                let range = format!("Content-Range: bytes {from}-{}/{}\r\n", end - 1, bytes.len());
                ("206 Partial Content", format!("{about}{range}"), bytes[from..end].to_vec())
            }
        }
    }
}
