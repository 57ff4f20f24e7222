//! Collectives and messages.
use super::group::add;
use crate::nccl::code;
use crate::nccl::part::{Call, Part};
use crate::number::Type;
use std::ffi::c_int;

/// What the calls have in common: their buffers, count, dtype, op and root or peer.
struct Arguments {
    buffers: [u64; 2],
    count: usize,
    codes: [c_int; 3],
}

impl Arguments {
    fn call(self, call: Call, comm: u64, stream: u64, name: &str) -> c_int {
        let ([send, recv], [dtype, op, root]) = (self.buffers, self.codes);
        match (Type::of_nccl(dtype), usize::try_from(root)) {
            (Some(dtype), Ok(root)) if (0..5).contains(&op) => {
                let part = Part { call, send, recv, count: self.count, dtype, op, root, number: 0 };
                add(comm, stream, part, name)
            }
            _ => code::INVALID_ARGUMENT,
        }
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclAllReduce(
    send: u64,
    recv: u64,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    Arguments { buffers: [send, recv], count, codes: [dtype, op, 0] }.call(
        Call::AllReduce,
        comm,
        stream,
        "ncclAllReduce",
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclBroadcast(
    send: u64,
    recv: u64,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    Arguments { buffers: [send, recv], count, codes: [dtype, 0, root] }.call(
        Call::Broadcast,
        comm,
        stream,
        "ncclBroadcast",
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclReduce(
    send: u64,
    recv: u64,
    count: usize,
    dtype: c_int,
    op: c_int,
    root: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    Arguments { buffers: [send, recv], count, codes: [dtype, op, root] }.call(
        Call::Reduce,
        comm,
        stream,
        "ncclReduce",
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclAllGather(
    send: u64,
    recv: u64,
    count: usize,
    dtype: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    Arguments { buffers: [send, recv], count, codes: [dtype, 0, 0] }.call(
        Call::AllGather,
        comm,
        stream,
        "ncclAllGather",
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclReduceScatter(
    send: u64,
    recv: u64,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    Arguments { buffers: [send, recv], count, codes: [dtype, op, 0] }.call(
        Call::ReduceScatter,
        comm,
        stream,
        "ncclReduceScatter",
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclSend(
    send: u64,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    Arguments { buffers: [send, 0], count, codes: [dtype, 0, peer] }.call(
        Call::Send,
        comm,
        stream,
        "ncclSend",
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclRecv(
    recv: u64,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    Arguments { buffers: [0, recv], count, codes: [dtype, 0, peer] }.call(
        Call::Recv,
        comm,
        stream,
        "ncclRecv",
    )
}
