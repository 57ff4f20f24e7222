//! Event files as TensorBoard reads them.
//!
//! A file is a row of TFRecords: the length of the data in 8 bytes, its checksum, the data, and the checksum of the data. The data is a
//! message `tensorflow.Event` in the encoding of Protocol Buffers, of which only a few fields are written here. Numbers are little-endian.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use candle_dist::init::host_name;

/// What the first event says of the format.
const VERSION: &str = "brain.Event:2";
/// `SessionLog.SessionStatus.START`.
const START: u64 = 1;

/// A new event file. Each event is there when the call returns, so a reader sees all steps.
#[derive(Debug)]
pub(super) struct EventFile(File);

impl EventFile {
    /// Creates one in a folder, which is made if it is not there. Readers forget what other files of the folder have of `first_step` and of
    /// later steps, which a training makes again after a stop.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn create(folder: &Path, first_step: usize) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let mut events = Self(new_file(folder)?);
        events.write(&message(&[Field::Text(3, VERSION)]), 0)?;
        let session = message(&[Field::Int(1, START)]);
        events.write(&message(&[Field::Message(7, &session)]), first_step)?;
        Ok(events)
    }

    /// Writes numbers of a step, each under its name.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn scalars(&mut self, step: usize, scalars: &[(&str, f64)]) -> io::Result<()> {
        let value =
            |&(tag, value): &(&str, f64)| message(&[Field::Text(1, tag), Field::Float(2, value as f32)]);
        let values: Vec<Vec<u8>> = scalars.iter().map(value).collect();
        let values: Vec<Field<'_>> = values.iter().map(|value| Field::Message(1, value)).collect();
        self.write(&message(&[Field::Message(5, &message(&values))]), step)
    }

    /// Writes an event with the time, the step and what it says, in one call: a reader finds no half of it that stays.
    fn write(&mut self, what: &[u8], step: usize) -> io::Result<()> {
        let mut event = message(&[Field::Double(1, now().as_secs_f64()), Field::Int(2, step as u64)]);
        event.extend(what);
        self.0.write_all(&record(&event))
    }
}

/// Creates a file with a name of its own that TensorBoard knows.
fn new_file(folder: &Path) -> io::Result<File> {
    let (seconds, host, process) = (now().as_secs(), host_name(), std::process::id());
    let path = |n: usize| -> PathBuf {
        folder.join(format!("events.out.tfevents.{seconds:010}.{host}.{process}.{n}"))
    };
    let mut n = 0;
    loop {
        match OpenOptions::new().write(true).create_new(true).open(path(n)) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => n += 1,
            file => return file,
        }
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// A field of a message, with its number.
enum Field<'a> {
    Int(u64, u64),
    Double(u64, f64),
    Float(u64, f32),
    Text(u64, &'a str),
    Message(u64, &'a [u8]),
}

/// Encodes a message of Protocol Buffers.
fn message(fields: &[Field<'_>]) -> Vec<u8> {
    let mut made = Vec::new();
    // The number of a field, and how its value is written.
    let key = |number: u64, wire: u64, made: &mut Vec<u8>| varint(number << 3 | wire, made);
    for field in fields {
        match *field {
            Field::Int(number, value) => {
                key(number, 0, &mut made);
                varint(value, &mut made);
            }
            Field::Double(number, value) => {
                key(number, 1, &mut made);
                made.extend(value.to_le_bytes());
            }
            Field::Float(number, value) => {
                key(number, 5, &mut made);
                made.extend(value.to_le_bytes());
            }
            Field::Text(number, text) => bytes(number, text.as_bytes(), &mut made),
            Field::Message(number, message) => bytes(number, message, &mut made),
        }
    }
    made
}

fn bytes(number: u64, value: &[u8], made: &mut Vec<u8>) {
    varint(number << 3 | 2, made);
    varint(value.len() as u64, made);
    made.extend(value);
}

/// Seven bits in each byte, the lowest first; all but the last byte have the eighth bit.
fn varint(mut value: u64, made: &mut Vec<u8>) {
    while value > 0x7f {
        made.push(value as u8 | 0x80);
        value >>= 7;
    }
    made.push(value as u8);
}

/// Frames data as a TFRecord.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut made = length.to_vec();
    made.extend(masked(crc32c(&length)).to_le_bytes());
    made.extend(data);
    made.extend(masked(crc32c(data)).to_le_bytes());
    made
}

/// The mask of TFRecords: a checksum of data that has checksums in it would be weak.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli). A step has some hundred bytes, for which a bit at a time is fast enough.
fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg()))
    })
}

#[cfg(test)]
mod tests {
    use super::{Field, crc32c, masked, message, record};

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, appendix B.4.
        for (data, want) in [
            (&[0u8; 32][..], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&std::array::from_fn::<u8, 32, _>(|i| i as u8), 0x46dd_794e),
            (b"123456789", 0xe306_9283),
        ] {
            assert_eq!(crc32c(data), want);
        }
        assert_eq!(masked(0), 0xa282_ead8);
    }

    #[test]
    fn an_event_has_the_bytes_that_tensorflow_writes() {
        // Event(wall_time=1.5, step=300, summary=Summary(value=[Value(tag="loss", simple_value=2.0)])).
        let value = message(&[Field::Text(1, "loss"), Field::Float(2, 2.0)]);
        let summary = message(&[Field::Message(1, &value)]);
        let event = message(&[Field::Double(1, 1.5), Field::Int(2, 300), Field::Message(5, &summary)]);
        let want = [
            &[0x09, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f][..],
            &[0x10, 0xac, 0x02],
            &[0x2a, 13, 0x0a, 11, 0x0a, 4],
            b"loss",
            &[0x15, 0, 0, 0, 0x40],
        ]
        .concat();
        assert_eq!(event, want);
        let framed = record(&event);
        assert_eq!(framed.len(), 8 + 4 + want.len() + 4);
        assert_eq!(framed[..8], (want.len() as u64).to_le_bytes());
    }
}
