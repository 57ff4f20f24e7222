//! The sweep of `test-utils`, which users have for their own ops.
pub(crate) use test_utils::{Case, Input, Kind, sweep, sweep_in};
