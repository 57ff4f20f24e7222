//! Sets of mesh axes.

/// A set of mesh axes, as bits.
pub(crate) type Axes = u32;

/// Returns the set of these axes.
pub(crate) fn axes_of(axes: &[usize]) -> Axes {
    axes.iter().map(|axis| 1 << axis).sum()
}
