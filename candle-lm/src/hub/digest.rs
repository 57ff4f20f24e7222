//! The digests by which the Hub names the bytes of files.

use std::fs::File;
use std::io::{self, Read, Seek};

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// The digest that a file has, in hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Digest {
    /// Of large files: their SHA-256.
    Sha256(String),
    /// Of other ones: the SHA-1 with which git names them, or on some mirrors that of their bytes.
    Git(String),
}

impl Digest {
    /// Returns the digest that a name is; `None` if it is another kind of name.
    pub(super) fn of_name(name: &str) -> Option<Self> {
        let is_digest = name.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
        match name.len() {
            64 if is_digest => Some(Self::Sha256(name.into())),
            40 if is_digest => Some(Self::Git(name.into())),
            _ => None,
        }
    }

    /// Begins to digest a file of so many bytes.
    pub(super) fn begin(&self, length: u64) -> Context {
        match self {
            Self::Sha256(_) => Context::new(&SHA256),
            Self::Git(_) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {length}\0").as_bytes());
                context
            }
        }
    }

    /// Returns the digest of this kind of what was read.
    pub(super) fn end(&self, context: Context) -> Self {
        let digits = context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Self::Sha256(_) => Self::Sha256(digits),
            Self::Git(_) => Self::Git(digits),
        }
    }

    /// Returns the digest that git has of a whole file.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(super) fn of_git(file: File) -> io::Result<Self> {
        Self::Git(String::new()).of_file(file)
    }

    /// Returns the digest of this kind of a whole file.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(super) fn of_file(&self, file: File) -> io::Result<Self> {
        let mut context = self.begin(file.metadata()?.len());
        read(file, &mut context)?;
        Ok(self.end(context))
    }

    /// Whether it is the digest of a whole file.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(super) fn is_of(&self, mut file: File) -> io::Result<bool> {
        if self.of_file(file.try_clone()?)? == *self {
            return Ok(true);
        }
        let Self::Git(_) = self else { return Ok(false) };
        file.rewind()?;
        let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
        read(file, &mut context)?;
        Ok(self.end(context) == *self)
    }

    /// The name of the kind, and the digits.
    pub(super) fn parts(&self) -> (&'static str, &str) {
        match self {
            Self::Sha256(digits) => ("SHA-256", digits),
            Self::Git(digits) => ("SHA-1", digits),
        }
    }
}

/// Digests all bytes of a file.
pub(super) fn read(mut file: File, context: &mut Context) -> io::Result<()> {
    let mut chunk = vec![0; 1 << 18];
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(count) => context.update(&chunk[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
