//! The greeting, which separates processes of this job from other connections.
use std::io::{self, ErrorKind, Read, Write};

/// The first bytes in both directions, which no other protocol sends.
const MAGIC: [u8; 8] = *b"\xc4ndlDist";
/// The version of the whole protocol.
const VERSION: u16 = 2;
/// The maximum length of a token.
pub(crate) const MAX_TOKEN: usize = 1024;

/// The greeting of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) token: Vec<u8>,
}

/// Why a greeting was rejected.
#[derive(Debug)]
pub(crate) enum Stranger {
    /// The sender is not a process of any world, or is too slow. It gets no answer.
    Unknown,
    /// The sender uses another version of the protocol.
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

    /// Returns whether the tokens are equal, in constant time.
    pub(crate) fn knows(&self, token: &[u8]) -> bool {
        let differs = self.token.iter().zip(token).fold(0, |differs, (a, b)| differs | (a ^ b));
        self.token.len() == token.len() && differs == 0
    }
}

impl Stranger {
    /// Returns the answer to send, if any.
    pub(crate) fn answer(&self) -> Option<Answer> {
        match self {
            Self::Unknown => None,
            Self::Version(theirs) => Some(Answer::Never(format!(
                "this process has version {theirs} of the protocol and rank 0 version {VERSION}; run the same build \
                 on all hosts"
            ))),
        }
    }
}

/// The answer to a greeting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Welcome,
    /// Refused by this world, but the next world at the same address may accept.
    Later(String),
    Never(String),
}

impl Answer {
    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let (code, text) = match self {
            Self::Welcome => (0, ""),
            Self::Later(text) => (1, text.as_str()),
            Self::Never(text) => (2, text.as_str()),
        };
        let mut bytes = MAGIC.to_vec();
        bytes.push(code);
        bytes.extend_from_slice(&u16::try_from(text.len()).map_err(io::Error::other)?.to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
        to.write_all(&bytes)
    }

    /// Reads an answer. The error is `InvalidData` if another program sent it.
    pub(crate) fn read(from: &mut impl Read) -> io::Result<Self> {
        if bytes::<8>(from)? != MAGIC {
            return Err(ErrorKind::InvalidData.into());
        }
        let [code] = bytes(from)?;
        let mut text = vec![0; usize::from(u16::from_le_bytes(bytes(from)?))];
        from.read_exact(&mut text)?;
        let text = String::from_utf8_lossy(&text).into_owned();
        Ok(match code {
            0 => Self::Welcome,
            1 => Self::Later(text),
            _ => Self::Never(text),
        })
    }
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
        assert!(matches!(stranger.answer(), Some(Answer::Never(text)) if text.contains("version 9")));
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
        fn answers_come_out_as_they_went_in(text in ".{0,2000}") {
            for answer in [Answer::Welcome, Answer::Later(text.clone()), Answer::Never(text)] {
                let mut bytes = Vec::new();
                answer.write(&mut bytes).unwrap();
                prop_assert_eq!(Answer::read(&mut &bytes[..]).unwrap(), answer);
            }
        }

        #[test]
        fn any_bytes_are_a_stranger(bytes: Vec<u8>) {
            prop_assume!(!bytes.starts_with(&MAGIC));
            prop_assert!(matches!(Hello::read(&mut &bytes[..]), Err(Stranger::Unknown)));
            prop_assert!(Answer::read(&mut &bytes[..]).is_err());
        }
    }
}
