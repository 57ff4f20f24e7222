//! Who may ask.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use axum::http::{HeaderMap, header};
use candle_shard::regular;
use sha2::{Digest, Sha256};

use super::api_error::{ApiError, ApiResult};

/// A key as it is kept.
type KeyDigest = [u8; 32];

/// The keys of clients, by the names that logs have.
#[derive(Clone, Debug, Default)]
pub struct ApiKeys(Vec<(String, KeyDigest)>);

/// The most keys, all of which are compared with that of each request.
const MOST_KEYS: usize = 10_000;

impl ApiKeys {
    /// Reads a file with a key in each line, or `NAME:KEY`. A key that has a colon needs a name in front of it.
    /// Empty lines and those that begin with `#` are left out.
    ///
    /// # Errors
    /// If it cannot be read, has no key, or one of fewer than 8 bytes.
    pub fn read(path: &Path) -> Result<Self> {
        let text = regular::read_text(path, regular::CONFIG)
            .with_context(|| format!("--api-key-file {}", path.display()))?;
        let mut keys = Self::default();
        // Some editors begin a file with a mark of its encoding.
        let text = text.trim_start_matches('\u{feff}');
        for (number, line) in text.lines().map(str::trim).enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (name, key) =
                line.split_once(':').map_or((None, line), |(name, key)| (Some(name), key.trim()));
            ensure!(
                key.len() >= 8,
                "--api-key-file {}, line {}: a key has fewer than 8 bytes, which can be guessed: give a longer one",
                path.display(),
                number + 1
            );
            let name = name.map_or_else(|| format!("line {}", number + 1), |name| name.trim().to_owned());
            keys.add(&name, key);
        }
        ensure!(!keys.0.is_empty(), "--api-key-file {} has no key: write one in each line", path.display());
        ensure!(
            keys.0.len() <= MOST_KEYS,
            "--api-key-file {} has more than {MOST_KEYS} keys",
            path.display()
        );
        Ok(keys)
    }

    /// Adds a key.
    pub fn add(&mut self, name: &str, key: &str) {
        self.0.push((name.to_owned(), Sha256::digest(key.as_bytes()).into()));
    }

    /// Whether nobody needs a key.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the name of a key. All keys are compared to their ends, so that the time says nothing of them.
    fn name(&self, key: &[u8]) -> Option<(&str, u64)> {
        let given: KeyDigest = Sha256::digest(key).into();
        let mut found = None;
        for (name, known) in &self.0 {
            let unlike = known.iter().zip(&given).fold(0, |unlike, (a, b)| unlike | (a ^ b));
            if std::hint::black_box(unlike) == 0 {
                let salt = given.iter().take(8).fold(0, |salt, &byte| salt << 8 | u64::from(byte));
                found = Some((name.as_str(), salt));
            }
        }
        found
    }
}

/// Who sent a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Client {
    /// The name of its key.
    pub(super) name: Option<String>,
    /// What keeps its cached prompts from those of others.
    pub(super) salt: u64,
}

/// Who may ask: those with a key, of a host by its name.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// The keys; none lets everybody in.
    pub keys: ApiKeys,
    /// Whether the server listens on this machine alone, so that a request must name it. A page on the web could otherwise let a name
    /// of its own lead here.
    pub is_local: bool,
}

impl Access {
    /// Returns who sent a request with these headers.
    pub(super) fn client(&self, headers: &HeaderMap) -> ApiResult<Client> {
        if self.keys.is_empty() {
            return Ok(Client::default());
        }
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
            let (scheme, key) = value.as_bytes().split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
        });
        // Without a key the same work is done.
        let found = self.keys.name(bearer.unwrap_or_default());
        let (name, salt) = found.ok_or_else(ApiError::unauthorized)?;
        Ok(Client { name: Some(name.to_owned()), salt })
    }

    /// Refuses a request to another host.
    pub(super) fn check_host(&self, headers: &HeaderMap) -> ApiResult<()> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = hosts.next().and_then(|host| host.to_str().ok()).unwrap_or_default();
        let is_known = !self.is_local || (is_loopback(host) && hosts.next().is_none());
        is_known.then_some(()).ok_or_else(ApiError::strange_host)
    }
}

/// Whether a header `Host` names this machine.
fn is_loopback(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, port),
        _ => (host, ""),
    };
    let is_port = port.bytes().all(|byte| byte.is_ascii_digit());
    let is_address = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(name) => name.parse().is_ok_and(|address: Ipv6Addr| address.is_loopback()),
        None => name.parse().is_ok_and(|address: Ipv4Addr| address.is_loopback()),
    };
    is_port && (is_address || name.eq_ignore_ascii_case("localhost"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn only_names_of_this_machine_are_its_names() {
        for host in
            ["localhost", "LocalHost:8080", "127.0.0.1:1", "127.0.0.1", "127.0.0.2:8080", "[::1]:80", "[::1]"]
        {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:80",
            "localhost:80@evil",
            "::1",
            "128.0.0.1",
            "[::2]:80",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn files_of_keys_are_read_as_editors_write_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, "\u{feff}sk-one-one\r\n# none\r\n\r\nname: sk-two:two \r\n").unwrap();
        let keys = ApiKeys::read(&path).unwrap();
        assert_eq!(keys.name(b"sk-one-one").unwrap().0, "line 1");
        assert_eq!(keys.name(b"sk-two:two").unwrap().0, "name");
        assert_eq!(keys.name(b""), None);
    }

    #[test]
    fn keys_are_known_whole_and_by_their_names() {
        let mut keys = ApiKeys::default();
        keys.add("one", "sk-one-one");
        keys.add("two", "sk-two-two");
        let access = Access { keys, is_local: false };
        let of = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
            access.client(&headers)
        };
        assert_eq!(of("Bearer sk-one-one").unwrap().name.unwrap(), "one");
        assert_eq!(of("bearer sk-two-two").unwrap().name.unwrap(), "two");
        assert_ne!(of("Bearer sk-one-one").unwrap().salt, of("Bearer sk-two-two").unwrap().salt);
        for wrong in
            ["Bearer sk-one-on", "Bearer sk-one-onex", "Basic sk-one-one", "Bearer ", "", "sk-one-one"]
        {
            assert_eq!(of(wrong), Err(ApiError::unauthorized()), "{wrong}");
        }
        assert_eq!(access.client(&HeaderMap::new()), Err(ApiError::unauthorized()));
    }
}
