//! Errors of inputs, which end the program as a command line does that cannot work.

use anyhow::{Error, Result};
use candle_lm::InputError;
use examples::cli::UsageError;
use examples::launch::Ranks;

/// Returns what the user should change as an error of the command line.
pub fn refusal(error: InputError) -> UsageError {
    UsageError(error.0)
}

/// Returns an error of the library as one of the command line, if the user should change something.
pub fn usage(error: Error) -> Error {
    if error.is::<InputError>() { UsageError(format!("{error:#}")).into() } else { error }
}

/// Returns this process's result if all processes succeeded, as [`Ranks::agree`] does.
///
/// # Errors
/// Those of [`Ranks::agree`].
pub fn agree<T, E: Into<Error>>(ranks: &Ranks<'_>, mine: Result<T, E>) -> Result<T> {
    ranks.agree(mine.map_err(|error| usage(error.into())))
}
