//! The bytes of a GGUF header, read in order and within bounds.
use std::fs::File;
use std::io::{BufReader, Read};

use candle_core::quantized::gguf_file::Value;

/// The longest header that is accepted; vocabularies of 262,144 tokens take about 15 MB.
const LONGEST_HEADER: u64 = 1 << 28;
/// The most metadata values that are accepted, elements of arrays included.
const MOST_VALUES: u64 = 1 << 24;
/// The deepest nesting of arrays that is accepted.
const DEEPEST: usize = 8;

/// The part of a file that was not read yet.
pub(super) struct Bytes {
    file: BufReader<File>,
    /// The offset of the next byte.
    pub(super) at: u64,
    /// The bytes that may follow.
    left: u64,
    values: u64,
    /// Whether more bytes were wanted than may follow.
    pub(super) is_cut: bool,
}

impl Bytes {
    /// Starts at the beginning of a file with this many bytes.
    pub(super) fn new(file: File, length: u64) -> Self {
        Self {
            file: BufReader::with_capacity(1 << 16, file),
            at: 0,
            left: length.min(LONGEST_HEADER),
            values: 0,
            is_cut: false,
        }
    }

    /// Reads `N` bytes.
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.claim(N as u64)?;
        let mut bytes = [0; N];
        self.file
            .read_exact(&mut bytes)
            .map_err(|error| format!("cannot be read at byte {} ({error})", self.at))?;
        self.at += N as u64;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a count of things that take at least `least` bytes each, so that a count beyond the file is refused.
    pub(super) fn count(&mut self, what: &str, least: u64) -> Result<u64, String> {
        let count = self.u64()?;
        match count.checked_mul(least).is_some_and(|bytes| bytes <= self.left) {
            true => Ok(count),
            false => {
                self.is_cut = true;
                Err(format!(
                    "announces {count} {what} at byte {}, more than the header can hold",
                    self.at - 8
                ))
            }
        }
    }

    /// Reads a string.
    pub(super) fn text(&mut self) -> Result<String, String> {
        let (start, length) = (self.at, self.count("bytes of a text", 1)?);
        self.claim(length)?;
        let mut bytes = vec![0; length as usize];
        self.file
            .read_exact(&mut bytes)
            .map_err(|error| format!("cannot be read at byte {} ({error})", self.at))?;
        self.at += length;
        String::from_utf8(bytes).map_err(|_| format!("has a text at byte {start} that is not UTF-8"))
    }

    /// Reads a value of the type with this number.
    pub(super) fn value(&mut self, kind: u32, depth: usize) -> Result<Value, String> {
        self.values += 1;
        if self.values > MOST_VALUES {
            return Err(format!("has more than {MOST_VALUES} values of metadata"));
        }
        Ok(match kind {
            0 => Value::U8(self.array::<1>()?[0]),
            1 => Value::I8(self.array::<1>()?[0].cast_signed()),
            2 => Value::U16(self.array().map(u16::from_le_bytes)?),
            3 => Value::I16(self.array().map(i16::from_le_bytes)?),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(self.array().map(i32::from_le_bytes)?),
            6 => Value::F32(self.array().map(f32::from_le_bytes)?),
            7 => match self.array::<1>()?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => return Err(format!("has {other} where 0 or 1 is wanted, at byte {}", self.at - 1)),
            },
            8 => Value::String(self.text()?),
            9 => {
                let kind = self.u32()?;
                let least = match kind {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    4..=6 => 4,
                    8 | 10..=12 => 8,
                    9 if depth < DEEPEST => 12,
                    9 => return Err(format!("nests more than {DEEPEST} arrays, at byte {}", self.at)),
                    _ => {
                        return Err(format!(
                            "has an array of the unknown type {kind} at byte {}",
                            self.at - 4
                        ));
                    }
                };
                let count = self.count("values", least)?;
                // Memory grows with the values that are there.
                let mut values = Vec::new();
                for _ in 0..count {
                    values.push(self.value(kind, depth + 1)?);
                }
                Value::Array(values)
            }
            10 => Value::U64(self.u64()?),
            11 => Value::I64(self.array().map(i64::from_le_bytes)?),
            12 => Value::F64(self.array().map(f64::from_le_bytes)?),
            _ => return Err(format!("has a value of the unknown type {kind} at byte {}", self.at)),
        })
    }

    fn claim(&mut self, bytes: u64) -> Result<(), String> {
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => {
                self.is_cut = true;
                Err(format!("ends at byte {}, inside the header", self.at + self.left))
            }
        }
    }
}
