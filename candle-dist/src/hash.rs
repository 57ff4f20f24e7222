//! A hash that is the same in every process and build.

use std::hash::Hasher;

/// Returns the FNV-1a hash of `bytes`.
pub(crate) fn stable(bytes: &[u8]) -> u64 {
    let mut hash = StableHash::default();
    hash.write(bytes);
    hash.finish()
}

/// The FNV-1a hash of what is written.
pub(crate) struct StableHash(u64);

impl Default for StableHash {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for StableHash {
    fn write(&mut self, bytes: &[u8]) {
        self.0 =
            bytes.iter().fold(self.0, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
