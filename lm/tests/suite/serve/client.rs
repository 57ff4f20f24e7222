//! A small client.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};

/// What a server answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: String,
}

impl Answer {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
    }

    #[track_caller]
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.body))
    }

    /// The error object, which has all its fields.
    #[track_caller]
    pub(super) fn error(&self) -> Value {
        let body = self.json();
        let error = body["error"].as_object().unwrap_or_else(|| panic!("{body}"));
        assert!(error["message"].as_str().is_some_and(|message| message.len() > 5), "{body}");
        for field in ["type", "param", "code"] {
            assert!(error.contains_key(field), "{body}");
        }
        body["error"].clone()
    }

    /// The chunks of a stream, which ends as streams do.
    #[track_caller]
    pub(super) fn chunks(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.body);
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        let events: Vec<&str> = self.body.split_terminator("\n\n").filter(|event| *event != ":").collect();
        let data: Vec<&str> = events.iter().map(|event| event.strip_prefix("data: ").unwrap()).collect();
        let (last, chunks) = data.split_last().unwrap();
        assert_eq!(*last, "[DONE]", "{}", self.body);
        chunks.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
    }
}

/// A connection to a server.
pub(super) struct Client {
    pub(super) reader: BufReader<TcpStream>,
}

impl Client {
    pub(super) fn new(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { reader: BufReader::new(stream) }
    }

    pub(super) fn send(&mut self, bytes: &[u8]) {
        self.reader.get_mut().write_all(bytes).unwrap();
    }

    /// Sends a request, without waiting for the answer.
    pub(super) fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head = format!("{method} {path} HTTP/1.1\r\n");
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            head.push_str("Host: localhost\r\n");
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("Content-Length: {}\r\n\r\n", body.len()));
        self.send(&[head.as_bytes(), body].concat());
    }

    /// Reads a head; `None` if the connection ends.
    pub(super) fn head(&mut self) -> Option<Answer> {
        let mut line = String::new();
        self.reader.read_line(&mut line).ok().filter(|&bytes| bytes > 0)?;
        let status = line.split(' ').nth(1)?.parse().unwrap();
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            self.reader.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.push((name.to_ascii_lowercase(), value.to_owned()));
        }
        Some(Answer { status, headers, body: String::new() })
    }

    /// Reads one chunk of a body.
    pub(super) fn chunk(&mut self) -> Option<Vec<u8>> {
        let mut line = String::new();
        self.reader.read_line(&mut line).ok().filter(|&bytes| bytes > 0)?;
        let mut chunk = vec![0; usize::from_str_radix(line.trim_end(), 16).ok()? + 2];
        self.reader.read_exact(&mut chunk).ok()?;
        chunk.truncate(chunk.len() - 2);
        Some(chunk).filter(|chunk| !chunk.is_empty())
    }

    /// Reads an answer.
    pub(super) fn answer(&mut self) -> Option<Answer> {
        let mut answer = self.head()?;
        answer.body = self.body(&answer);
        Some(answer)
    }

    /// Reads the body behind a head, as much as comes of it.
    pub(super) fn body(&mut self, head: &Answer) -> String {
        let mut body = Vec::new();
        if head.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk() {
                body.extend(chunk);
            }
        } else if let Some(length) = head.header("content-length") {
            body.resize(length.parse().unwrap(), 0);
            self.reader.read_exact(&mut body).unwrap();
        }
        String::from_utf8(body).unwrap()
    }
}

pub(super) const JSON: (&str, &str) = ("Content-Type", "application/json");

pub(super) fn get(address: SocketAddr, path: &str) -> Answer {
    let mut client = Client::new(address);
    client.ask("GET", path, &[], b"");
    client.answer().unwrap()
}

pub(super) fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    post_with(address, path, &[JSON], body.to_string().as_bytes())
}

pub(super) fn post_with(address: SocketAddr, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    let mut client = Client::new(address);
    client.ask("POST", path, headers, body);
    client.answer().unwrap()
}

/// A message of a user, and other fields.
pub(super) fn said(text: &str, more: Value) -> Value {
    let mut body = json!({"model": "scripted", "messages": [{"role": "user", "content": text}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

pub(super) const CHAT: &str = "/v1/chat/completions";
pub(super) const COMPLETE: &str = "/v1/completions";
