//! Checks that the arguments of several programs need.

use crate::cli::{Checked, require};

/// Checks counts, each with its flag and the most that it may be.
///
/// # Errors
/// A sentence with the flag, its value and a remedy.
pub fn check_counts<const N: usize>(counts: [(&str, usize, usize); N]) -> Checked {
    for (flag, value, most) in counts {
        require!(value > 0, "{flag} is 0: give at least 1.");
        require!(value <= most, "{flag} {value} is too large: give at most {most}.");
    }
    Ok(())
}

/// The most of a count that has no limit of its own.
pub const ANY: usize = usize::MAX;

/// Checks a number that must be positive and finite; `such_as` is the number to try instead.
///
/// # Errors
/// A sentence with the flag, its value and a remedy.
pub fn check_positive(flag: &str, value: f64, such_as: &str) -> Checked {
    require!(
        value.is_finite() && value > 0.0,
        "{flag} {value} is not a positive finite number: try {such_as}."
    );
    Ok(())
}
