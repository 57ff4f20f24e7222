//! Digests of a file of tensors: one of its header, and one of each block of the bytes behind it.
//!
//! They lie in the header, in `__metadata__`, where other programs ignore them. A program that reads such a file and writes it again may
//! keep them beside other bytes. A space at the start of the header, which no common writer puts there, tells that the header is as it was
//! written here, so its digests hold.
use candle_dist::bits::digest_bytes;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::hash::Hasher;
use twox_hash::XxHash3_64;

/// The bytes of a block, except the last one.
pub(super) const BLOCK: usize = 1 << 20;

/// The largest block that is read, which takes memory.
const LARGEST_BLOCK: usize = 64 << 20;

/// The name of the digests in `__metadata__`.
const KEY: &str = "candle-shard.xxh3";

/// What a header with digests begins with.
const START: &str = "{ \"__metadata__\":{\"format\":\"pt\",\"candle-shard.xxh3\":\"";

/// The hexadecimal digits of a digest.
const DIGITS: usize = 16;

/// What tells a file from others of its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileStamp {
    /// Its bytes.
    pub(super) length: u64,
    /// The digest of its header, which has those of its blocks.
    #[serde(with = "hex")]
    pub(super) digest: u64,
}

/// Digests as text, since other readers of JSON round large numbers.
pub(super) mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(in crate::files) fn serialize<S: Serializer>(digest: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{digest:016x}"))
    }

    pub(in crate::files) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        u64::from_str_radix(&String::deserialize(deserializer)?, 16).map_err(D::Error::custom)
    }
}

/// The digests of a file, as its header has them.
#[derive(Debug)]
pub(super) struct Digests {
    /// Of the header, where this digest itself is zeros.
    pub(super) header: u64,
    /// The bytes of a block.
    pub(super) block: usize,
    /// Of the blocks of data.
    pub(super) blocks: Vec<u64>,
}

impl Digests {
    /// Returns the digests of a header with this `__metadata__`, or `None` if another program wrote it.
    ///
    /// # Errors
    /// If the header is not as it was written.
    pub(super) fn of(
        header: &[u8],
        metadata: Option<&HashMap<String, String>>,
        data: u64,
    ) -> Result<Option<Self>, String> {
        let Some(text) = metadata.and_then(|metadata| metadata.get(KEY)) else { return Ok(None) };
        if !header.starts_with(START.as_bytes()) {
            return Ok(None);
        }
        let damaged = || "has a header that is not as it was written".to_owned();
        let (block, digits) = text.split_once(' ').ok_or_else(damaged)?;
        let block = block
            .parse::<usize>()
            .ok()
            .filter(|block| (1..=LARGEST_BLOCK).contains(block))
            .ok_or_else(damaged)?;
        let of = |digits: &[u8]| u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
        let all: Option<Vec<u64>> = digits.as_bytes().chunks(DIGITS).map(of).collect();
        let (&said, blocks) = all.as_deref().and_then(<[u64]>::split_first).ok_or_else(damaged)?;
        let at = START.len() + text.len() - digits.len();
        let mut bytes = header.to_vec();
        bytes.get_mut(at..at + DIGITS).ok_or_else(damaged)?.fill(b'0');
        if digest_bytes(&bytes) != said || blocks.len() as u64 != data.div_ceil(block as u64) {
            return Err(damaged());
        }
        Ok(Some(Self { header: said, block, blocks: blocks.to_vec() }))
    }
}

/// The digests of a file that is being written.
pub(super) struct Digester {
    header: Vec<u8>,
    blocks: Vec<u64>,
    open: XxHash3_64,
    /// The bytes in the open block.
    filled: usize,
}

impl Digester {
    /// Begins a file with these tensors in its header, each a name and a description in JSON, and so many bytes of data.
    pub(super) fn new(tensors: impl Iterator<Item = (String, String)>, data: usize) -> Self {
        let zeros = "0".repeat(DIGITS * (1 + data.div_ceil(BLOCK)));
        let mut header = format!("{START}{BLOCK} {zeros}\"}}");
        for (name, described) in tensors {
            header.extend([",", &name, ":", &described]);
        }
        header.push('}');
        let mut header = header.into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        Self { header, blocks: Vec::new(), open: XxHash3_64::new(), filled: 0 }
    }

    /// Returns the header, with zeros in the place of the digests until the file is [finished](Self::finish).
    pub(super) fn header(&self) -> &[u8] {
        &self.header
    }

    /// Takes the next bytes of data.
    pub(super) fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK - self.filled));
            if now.len() == BLOCK {
                self.blocks.push(digest_bytes(now));
            } else {
                self.open.write(now);
                self.filled += now.len();
                if self.filled == BLOCK {
                    self.close();
                }
            }
            bytes = later;
        }
    }

    fn close(&mut self) {
        self.blocks.push(std::mem::replace(&mut self.open, XxHash3_64::new()).finish());
        self.filled = 0;
    }

    /// Puts the digests into the header; returns that of the header.
    pub(super) fn finish(&mut self) -> u64 {
        if self.filled > 0 {
            self.close();
        }
        let at = START.len() + format!("{BLOCK} ").len();
        let digits: String = self.blocks.iter().map(|digest| format!("{digest:016x}")).collect();
        self.header[at + DIGITS..at + DIGITS + digits.len()].copy_from_slice(digits.as_bytes());
        let digest = digest_bytes(&self.header);
        self.header[at..at + DIGITS].copy_from_slice(format!("{digest:016x}").as_bytes());
        digest
    }
}
