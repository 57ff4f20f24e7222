//! Parameters that are rows of a larger tensor in files.
use super::spec::Spec;
use candle_dist::backend::Dims;
use smallvec::SmallVec;
use std::ops::Range;

/// The name of a parameter, and the tensor of files that contains it.
pub(crate) struct StoredName {
    pub(crate) name: String,
    pub(crate) within: Option<RowsOf>,
}

impl From<&str> for StoredName {
    fn from(name: &str) -> Self {
        Self { name: name.into(), within: None }
    }
}

impl From<String> for StoredName {
    fn from(name: String) -> Self {
        Self { name, within: None }
    }
}

/// The tensor of files whose rows from `start` on are a parameter.
#[derive(Debug, Clone)]
pub(crate) struct RowsOf {
    pub(crate) of: String,
    pub(crate) rows: usize,
    pub(crate) start: usize,
}

impl RowsOf {
    /// Returns the shape of the whole tensor, for a parameter of this layout.
    pub(crate) fn whole(&self, spec: &Spec) -> Dims {
        [self.rows].into_iter().chain(spec.dims().iter().skip(1).copied()).collect()
    }

    /// Returns this rank's shard of the parameter as a block of the whole tensor.
    pub(crate) fn block(&self, spec: &Spec) -> SmallVec<[Range<usize>; 6]> {
        let mut block = spec.local_block();
        block.iter_mut().take(1).for_each(|rows| *rows = rows.start + self.start..rows.end + self.start);
        block
    }
}
