//! Comparison of values that must be equal on all ranks of a group.
use super::ProcessGroup;
use crate::Result;
use crate::bits::digest_bytes;
use candle_core::{Device, Tensor};
use rustc_hash::FxBuildHasher;
use std::hash::{BuildHasher, Hash};

impl ProcessGroup {
    /// Compares a text with those of the other ranks. Returns `None` if all are equal, and otherwise every rank's text, on
    /// every rank, in rank order.
    ///
    /// One collective of 8 bytes per rank; three if the texts differ. They are [checks](crate::comm::Part::Check), which counts
    /// exclude. Groups of one rank do not communicate.
    ///
    /// ```
    /// use candle_dist::{Result, World};
    ///
    /// let differ = World::threads(2).run(|ctx| -> Result<_> {
    ///     assert_eq!(ctx.group().compare("a batch of 8 rows")?, None);
    ///     ctx.group().compare(["seed 1", "seed 2"][ctx.rank()])
    /// })?;
    /// assert_eq!(differ[0].as_deref(), Some(&["seed 1".to_string(), "seed 2".to_string()][..]));
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn compare(&self, text: &str) -> Result<Option<Vec<String>>> {
        if self.size() == 1 {
            return Ok(None);
        }
        let checks = self.with_checks();
        let digest = digest_bytes(text.as_bytes()) as i64;
        let digests = checks.all_gather(&Tensor::new(&[digest], &Device::Cpu)?, 0)?.to_vec1::<i64>()?;
        match digests.iter().all(|&other| other == digest) {
            true => Ok(None),
            false => checks.all_gather_text(text).map(Some),
        }
    }

    /// Returns whether this is the first call with `key` on any handle of this rank on the group.
    ///
    /// Ranks that run the same program get the same answers, so they may [`compare`](Self::compare) something on its first use
    /// only.
    pub fn is_first(&self, key: impl Hash) -> bool {
        let hash = FxBuildHasher.hash_one(key);
        self.compared.lock().insert(hash)
    }
}
