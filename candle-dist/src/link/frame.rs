//! Messages on a stream: two lengths, a JSON header, and raw bytes.
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Error, ErrorKind, Read, Write};

/// The maximum length of a header. One header may hold the reports of all ranks.
const MAX_HEADER: usize = 16 << 20;
/// The maximum length of a value.
pub(crate) const MAX_VALUE: usize = 16 << 20;
/// The maximum length of a key.
pub(crate) const MAX_KEY: usize = 4 << 10;

/// A frame without a header: a heartbeat.
pub(crate) const PING: [u8; 8] = [0; 8];

/// Writes one message.
pub(crate) fn write(to: &mut impl Write, message: &impl Serialize, payload: &[u8]) -> io::Result<()> {
    let header = serde_json::to_vec(message)?;
    if header.len() > MAX_HEADER || payload.len() > MAX_VALUE {
        return Err(Error::new(ErrorKind::InvalidInput, "a message is too long"));
    }
    let mut bytes = Vec::with_capacity(PING.len() + header.len() + payload.len());
    for part in [&header[..], payload] {
        // The conversion cannot fail: both limits are far below `u32::MAX`.
        bytes.extend_from_slice(&u32::try_from(part.len()).map_err(Error::other)?.to_le_bytes());
    }
    bytes.extend_from_slice(&header);
    bytes.extend_from_slice(payload);
    to.write_all(&bytes)
}

/// Reads the next message and skips pings; `None` at the end of the stream.
///
/// Memory grows with the bytes received, not with the length in the header.
pub(crate) fn read<M: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<(M, Vec<u8>)>> {
    loop {
        let mut lengths = PING;
        if !fill(from, &mut lengths)? {
            return Ok(None);
        }
        if lengths == PING {
            continue;
        }
        let [a, b, c, d, e, f, g, h] = lengths;
        let header = bounded(u32::from_le_bytes([a, b, c, d]), MAX_HEADER)?;
        let payload = bounded(u32::from_le_bytes([e, f, g, h]), MAX_VALUE)?;
        let header = part(from, header)?;
        let payload = part(from, payload)?;
        let message =
            serde_json::from_slice(&header).map_err(|error| Error::new(ErrorKind::InvalidData, error))?;
        return Ok(Some((message, payload)));
    }
}

/// Fills `buffer`. Returns false if the stream ends before the first byte.
fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..]) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn bounded(len: u32, limit: usize) -> io::Result<u32> {
    if len as usize <= limit {
        return Ok(len);
    }
    Err(Error::new(ErrorKind::InvalidData, format!("a length of {len} bytes is above the limit of {limit}")))
}

fn part(from: &mut impl Read, len: u32) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match from.take(u64::from(len)).read_to_end(&mut bytes)? {
        read if read == len as usize => Ok(bytes),
        _ => Err(ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_end_between_messages_is_none_and_within_one_an_error() {
        let mut bytes = PING.to_vec();
        write(&mut bytes, &"hello", b"value").unwrap();
        let mut whole = &bytes[..];
        assert_eq!(read::<String>(&mut whole).unwrap(), Some(("hello".to_string(), b"value".to_vec())));
        assert_eq!(read::<String>(&mut whole).unwrap(), None);
        for cut in (1..bytes.len()).filter(|&cut| cut != PING.len()) {
            assert_eq!(
                read::<String>(&mut &bytes[..cut]).unwrap_err().kind(),
                ErrorKind::UnexpectedEof,
                "{cut}"
            );
        }
    }

    #[test]
    fn lengths_above_the_limits_are_refused_unread() {
        for lengths in [[u32::MAX, 0], [0, u32::MAX], [1 << 25, 0], [2, 1 << 25]] {
            let bytes = lengths.map(u32::to_le_bytes).concat();
            assert_eq!(
                read::<String>(&mut &bytes[..]).unwrap_err().kind(),
                ErrorKind::InvalidData,
                "{lengths:?}"
            );
        }
        assert!(write(&mut Vec::new(), &"", &vec![0; MAX_VALUE + 1]).is_err());
    }

    proptest! {
        #[test]
        fn messages_come_out_as_they_went_in(messages: Vec<(String, Vec<u8>)>) {
            let mut bytes = Vec::new();
            for (header, payload) in &messages {
                write(&mut bytes, header, payload).unwrap();
                bytes.extend_from_slice(&PING);
            }
            let mut from = &bytes[..];
            for message in messages {
                prop_assert_eq!(read::<String>(&mut from).unwrap(), Some(message));
            }
            prop_assert!(read::<String>(&mut from).unwrap().is_none());
        }

        #[test]
        fn any_bytes_end_in_none_or_an_error(bytes: Vec<u8>) {
            let mut from = &bytes[..];
            while let Ok(Some(_)) = read::<serde_json::Value>(&mut from) {}
        }
    }
}
