//! The greeting: before it, a connection may come from anybody; after it, from a process of this job.
use std::io::{self, ErrorKind, Read, Write};

/// The first bytes of both directions, which nothing else begins with.
const MAGIC: [u8; 8] = *b"\xc4ndlDist";
/// The version of everything that goes over the connection.
const VERSION: u16 = 1;
/// The longest token.
pub(crate) const MAX_TOKEN: usize = 1024;

/// How a process introduces itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) token: Vec<u8>,
}

/// Why a greeting is not one.
#[derive(Debug)]
pub(crate) enum Stranger {
    /// It is no process of any world, or too slow; not worth an answer.
    Unknown,
    /// It speaks another version.
    Version(u16),
}

impl From<io::Error> for Stranger {
    fn from(_: io::Error) -> Self {
        Self::Unknown
    }
}

impl Hello {
    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let token = u16::try_from(self.token.len()).map_err(io::Error::other)?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.rank.to_le_bytes());
        bytes.extend_from_slice(&self.size.to_le_bytes());
        bytes.extend_from_slice(&token.to_le_bytes());
        bytes.extend_from_slice(&self.token);
        to.write_all(&bytes)
    }

    pub(crate) fn read(from: &mut impl Read) -> Result<Self, Stranger> {
        if bytes::<8>(from)? != MAGIC {
            return Err(Stranger::Unknown);
        }
        let version = u16::from_le_bytes(bytes(from)?);
        if version != VERSION {
            return Err(Stranger::Version(version));
        }
        let (rank, size) = (u32::from_le_bytes(bytes(from)?), u32::from_le_bytes(bytes(from)?));
        let mut token = vec![0; usize::from(u16::from_le_bytes(bytes(from)?))];
        if token.len() > MAX_TOKEN {
            return Err(Stranger::Unknown);
        }
        from.read_exact(&mut token)?;
        Ok(Self { rank, size, token })
    }

    /// Whether this is the token, in a time that does not tell how much of it is right.
    pub(crate) fn knows(&self, token: &[u8]) -> bool {
        let differs = self.token.iter().zip(token).fold(0, |differs, (a, b)| differs | (a ^ b));
        self.token.len() == token.len() && differs == 0
    }
}

impl Stranger {
    /// What to tell it, if anything.
    pub(crate) fn answer(&self) -> Option<String> {
        match self {
            Self::Unknown => None,
            Self::Version(theirs) => Some(format!(
                "this process speaks version {theirs} of the protocol and rank 0 version {VERSION}; run the same build \
                 on all hosts"
            )),
        }
    }
}

/// Writes the answer to a greeting: welcome, or why not.
pub(crate) fn answer(to: &mut impl Write, refusal: Option<&str>) -> io::Result<()> {
    let text = refusal.unwrap_or_default().as_bytes();
    let text = &text[..text.len().min(usize::from(u16::MAX))];
    let mut bytes = MAGIC.to_vec();
    bytes.push(u8::from(refusal.is_some()));
    bytes.extend_from_slice(&u16::try_from(text.len()).map_err(io::Error::other)?.to_le_bytes());
    bytes.extend_from_slice(text);
    to.write_all(&bytes)
}

/// Reads the answer to a greeting: `Ok(None)` is a welcome, `InvalidData` comes from a program of another kind.
pub(crate) fn read_answer(from: &mut impl Read) -> io::Result<Option<String>> {
    if bytes::<8>(from)? != MAGIC {
        return Err(ErrorKind::InvalidData.into());
    }
    let [refused] = bytes(from)?;
    let mut text = vec![0; usize::from(u16::from_le_bytes(bytes(from)?))];
    from.read_exact(&mut text)?;
    Ok((refused != 0).then(|| String::from_utf8_lossy(&text).into_owned()))
}

fn bytes<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn another_version_is_told_so() {
        let mut bytes = Vec::new();
        Hello { rank: 0, size: 1, token: Vec::new() }.write(&mut bytes).unwrap();
        bytes[MAGIC.len()] = 9;
        let stranger = Hello::read(&mut &bytes[..]).unwrap_err();
        assert!(stranger.answer().unwrap().contains("version 9"), "{stranger:?}");
    }

    #[test]
    fn tokens_are_equal_or_not() {
        let hello = Hello { rank: 0, size: 1, token: b"abc".to_vec() };
        let cases = [("abc", true), ("abd", false), ("ab", false), ("abcd", false), ("", false)];
        for (token, knows) in cases {
            assert_eq!(hello.knows(token.as_bytes()), knows, "{token}");
        }
    }

    proptest! {
        #[test]
        fn greetings_come_out_as_they_went_in(rank: u32, size: u32, token in prop::collection::vec(any::<u8>(), 0..1024)) {
            let (hello, mut bytes) = (Hello { rank, size, token }, Vec::new());
            hello.write(&mut bytes).unwrap();
            prop_assert_eq!(Hello::read(&mut &bytes[..]).unwrap(), hello);
            prop_assert!(Hello::read(&mut &bytes[..bytes.len() - 1]).is_err());
        }

        #[test]
        fn answers_come_out_as_they_went_in(refusal: Option<String>) {
            let mut bytes = Vec::new();
            answer(&mut bytes, refusal.as_deref()).unwrap();
            prop_assert_eq!(read_answer(&mut &bytes[..]).unwrap(), refusal);
        }

        #[test]
        fn any_bytes_are_a_stranger(bytes: Vec<u8>) {
            prop_assume!(!bytes.starts_with(&MAGIC));
            prop_assert!(matches!(Hello::read(&mut &bytes[..]), Err(Stranger::Unknown)));
            prop_assert!(read_answer(&mut &bytes[..]).is_err());
        }
    }
}
