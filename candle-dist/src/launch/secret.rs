//! The secret of a job, and where it comes from.
use super::LaunchInfo;
use super::secret_file::SecretFile;
use crate::{Error, Result};
use std::fmt;
use std::io;

/// The fewest characters of a token: 128 random bits in base64, without padding.
const MIN_TOKEN: usize = 22;
/// The length of a secret that rank 0 makes.
pub(super) const BYTES: usize = 32;

/// What the processes of a job know and others do not. They prove it to each other and never send it.
///
/// `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// A text that every process has: from [`InitOptions::token`](super::InitOptions::token), from `CANDLE_DIST_TOKEN`, or
    /// random bits of the launcher.
    Token(String),
    /// 256 random bits. Rank 0 writes them to a file that only its user can read, because all ranks are on one host.
    File(SecretScope),
    /// None: each process that reaches rank 0 may join.
    Absent,
}

/// Which processes of a user find the same file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecretScope {
    /// The processes of the job of this name ([`LaunchInfo::job`]), which is of one launch alone.
    Job,
    /// The children of one launcher, and their children. The launcher is the nearest ancestor without this variable.
    Launcher(&'static str),
    /// All that use the same address.
    Address,
}

/// The former name of [`SecretScope`].
#[deprecated(since = "0.1.0", note = "renamed to SecretScope")]
pub type Scope = SecretScope;

impl Secret {
    /// Returns whether all processes find it that one launcher starts for one address.
    pub(crate) fn is_of_launcher(&self) -> bool {
        matches!(self, Self::File(SecretScope::Job | SecretScope::Launcher(_)))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Token(_) => f.write_str("Token(..)"),
            Self::File(scope) => write!(f, "File({scope:?})"),
            Self::Absent => f.write_str("Absent"),
        }
    }
}

impl Secret {
    /// Checks the length of a token.
    pub(super) fn checked(self) -> Result<Self> {
        match &self {
            Self::Token(text) if text.chars().count() < MIN_TOKEN => Err(Error::Init(format!(
                "the token has {} characters, which others may guess; set CANDLE_DIST_TOKEN to at least {MIN_TOKEN} random \
                 ones, equal on all ranks, such as those of `openssl rand -hex 16`",
                text.chars().count()
            ))),
            _ => Ok(self),
        }
    }

    /// Returns the secret in a launcher's key of 128 bits (two hexadecimal numbers), unless it is made of a job id.
    pub(super) fn key(text: &str) -> Option<Self> {
        let (a, b) = text.split_once('-')?;
        let is_number = |half: &str| half.len() == 16 && half.bytes().all(|digit| digit.is_ascii_hexdigit());
        let has_zeros = |half: &str| half[..8] == *"00000000" || half[8..] == *"00000000";
        let is_random = is_number(a) && is_number(b) && a != b && !has_zeros(a) && !has_zeros(b);
        is_random.then(|| Self::Token(text.to_string()))
    }
}

/// The secret as rank 0 has it.
pub(crate) struct JobSecret {
    pub(crate) bytes: Vec<u8>,
    /// Goes when no rank is missing any more.
    pub(crate) file: Option<SecretFile>,
}

impl Secret {
    /// Returns the secret as rank 0 has it. Writes the file if there is to be one.
    pub(crate) fn of_host(&self, info: &LaunchInfo) -> Result<JobSecret> {
        Ok(match self {
            Self::Token(token) => JobSecret { bytes: token.clone().into(), file: None },
            Self::File(_) if info.world_size == 1 => {
                JobSecret { bytes: random::<BYTES>()?.into(), file: None }
            }
            Self::File(scope) => {
                let file = SecretFile::create(info, *scope)?;
                JobSecret { bytes: file.secret.into(), file: Some(file) }
            }
            Self::Absent => {
                log::warn!(
                    "the world at {} has no secret: each process that reaches it may join",
                    info.address
                );
                JobSecret { bytes: Vec::new(), file: None }
            }
        })
    }

    /// Returns the secret as other ranks have it. The inner error is that rank 0 has not written it yet.
    pub(crate) fn of_guest(&self, info: &LaunchInfo) -> Result<io::Result<Vec<u8>>> {
        Ok(match self {
            Self::Token(token) => Ok(token.clone().into()),
            Self::File(scope) => SecretFile::read(info, *scope)?.map(Vec::from),
            Self::Absent => Ok(Vec::new()),
        })
    }
}

pub(super) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let failed = |error| Error::Init(format!("the system gives no random numbers: {error}"));
    getrandom::fill(&mut bytes).map_err(failed)?;
    Ok(bytes)
}
