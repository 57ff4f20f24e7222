//! Systems where no file is known to be private to a user.
use super::secret::BYTES;
use super::{LaunchInfo, Scope};
use crate::{Error, Result};
use std::io;

/// No file.
#[derive(Debug)]
pub(crate) struct SecretFile {
    pub(super) secret: [u8; BYTES],
}

impl SecretFile {
    pub(super) fn create(_info: &LaunchInfo, _scope: Scope) -> Result<Self> {
        Err(unsupported())
    }

    pub(super) fn read(_info: &LaunchInfo, _scope: Scope) -> Result<io::Result<[u8; BYTES]>> {
        Err(unsupported())
    }
}

fn unsupported() -> Error {
    Error::Unsupported("a secret in a file of this user on this system; set CANDLE_DIST_TOKEN".to_string())
}
