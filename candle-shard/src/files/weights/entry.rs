//! One tensor of a file, as the header of the file describes it.

/// One tensor of a file.
pub(super) struct Entry {
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// The offset of its bytes in the file.
    pub(super) at: u64,
}

/// Returns the number of elements of a shape; `None` if the non-zero dims multiply to more than fits a `usize`.
pub(super) fn elements(shape: &[usize]) -> Option<usize> {
    let most = shape.iter().try_fold(1, |n: usize, &size| n.checked_mul(size.max(1)))?;
    Some(if shape.contains(&0) { 0 } else { most })
}
