//! The functions of libnccl that the build calls.
mod calls;
mod comm;
mod group;

#[cfg(test)]
pub(crate) use {calls::*, comm::*, group::*};
