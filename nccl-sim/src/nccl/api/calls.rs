//! Collectives and messages.
use super::group::add;
use crate::abi::put;
use crate::engine::lock;
use crate::nccl::code;
use crate::nccl::part::{Call, Part};
use crate::number::{Element, Type, elements, with_type};
use std::ffi::{c_int, c_void};

/// What the calls have in common: their buffers, count, dtype, op and root or peer.
struct Arguments {
    buffers: [u64; 2],
    count: usize,
    codes: [c_int; 3],
}

impl Arguments {
    fn call(self, call: Call, comm: u64, stream: u64, name: &str) -> c_int {
        let ([send, recv], [dtype, op, root]) = (self.buffers, self.codes);
        let scale = lock().comms.scales.get(&(comm, op)).copied();
        match (Type::of_nccl(dtype), usize::try_from(root)) {
            (Some(dtype), Ok(root)) if (0..SCALED_SUM).contains(&op) || scale.is_some() => {
                let op = op.min(SCALED_SUM);
                let part = Part { call, send, recv, count: self.count, dtype, op, scale, root, number: 0 };
                add(comm, stream, part, name)
            }
            _ => code::INVALID_ARGUMENT,
        }
    }
}

/// `ncclNumOps`: the first number of a reduction that a program makes.
const SCALED_SUM: c_int = 5;
/// `ncclScalarHostImmediate`.
const ON_HOST: c_int = 1;

// "ncclRedOpCreatePreMulSum": the factor is a number of this dtype, which is read before the call returns if it is on the host.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclRedOpCreatePreMulSum(
    to: *mut c_int,
    factor: *const c_void,
    dtype: c_int,
    residence: c_int,
    comm: u64,
) -> c_int {
    let Some(dtype) = Type::of_nccl(dtype) else { return code::INVALID_ARGUMENT };
    if residence != ON_HOST {
        crate::report::die("a factor of a reduction on the device is not modeled");
    }
    let bytes = crate::abi::array(factor.cast::<u8>(), dtype.size());
    let factor = with_type!(dtype, T => elements::<T>(&bytes).first().map(|x| x.float()));
    let Some(factor) = factor else { return code::INVALID_ARGUMENT };
    let scales = &mut lock().comms.scales;
    let number = (SCALED_SUM..c_int::MAX).find(|number| !scales.contains_key(&(comm, *number)));
    let number = number.unwrap_or(SCALED_SUM);
    scales.insert((comm, number), factor);
    put(to, number);
    code::SUCCESS
}

// "ncclRedOpDestroy": may come before the calls that use it have ended.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclRedOpDestroy(op: c_int, comm: u64) -> c_int {
    lock().comms.scales.remove(&(comm, op)).map_or(code::INVALID_ARGUMENT, |_| code::SUCCESS)
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
