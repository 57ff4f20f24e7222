//! Reductions of NCCL. Those that a communicator makes have numbers of their own, which the enum of cudarc does not have, so the calls
//! that take one are declared here.
use crate::backend::ReduceOp;
use candle_core::DType;
use cudarc::nccl::sys::{cudaStream_t, ncclScalarResidence_t};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t};
use half::{bf16, f16};
use std::ffi::{c_int, c_void};

unsafe extern "C" {
    #[link_name = "ncclAllReduce"]
    pub(super) fn all_reduce(
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        kind: ncclDataType_t,
        op: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t;
    #[link_name = "ncclReduce"]
    pub(super) fn reduce(
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        kind: ncclDataType_t,
        op: c_int,
        root: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t;
    #[link_name = "ncclReduceScatter"]
    pub(super) fn reduce_scatter(
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        kind: ncclDataType_t,
        op: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t;
    fn ncclRedOpCreatePreMulSum(
        op: *mut c_int,
        scalar: *mut c_void,
        kind: ncclDataType_t,
        residence: ncclScalarResidence_t,
        comm: ncclComm_t,
    ) -> ncclResult_t;
    fn ncclRedOpDestroy(op: c_int, comm: ncclComm_t) -> ncclResult_t;
}

/// A reduction as a communicator knows it. NCCL copies it when a call names it, so it may end before the group of the call does.
pub(super) struct CommReduction {
    pub(super) op: c_int,
    /// The communicator for which it was made.
    made_for: Option<ncclComm_t>,
}

impl CommReduction {
    /// Returns NCCL's reduction. Calls without one ignore it.
    pub(super) fn new(
        reduce: Option<ReduceOp>,
        dtype: DType,
        kind: ncclDataType_t,
        comm: ncclComm_t,
    ) -> Result<Self, ncclResult_t> {
        let op = match reduce {
            Some(ReduceOp::Sum) | None => ncclRedOp_t::ncclSum,
            Some(ReduceOp::Avg) => ncclRedOp_t::ncclAvg,
            Some(ReduceOp::Min) => ncclRedOp_t::ncclMin,
            Some(ReduceOp::Max) => ncclRedOp_t::ncclMax,
            Some(ReduceOp::Product) => ncclRedOp_t::ncclProd,
            Some(ReduceOp::PreMulSum(factor)) => {
                let mut scalar = scalar(factor.value(), dtype).ok_or(ncclResult_t::ncclInvalidArgument)?;
                let mut op = 0;
                let here = ncclScalarResidence_t::ncclScalarHostImmediate;
                let place = scalar.as_mut_ptr().cast();
                // SAFETY: the communicator is alive and locked by the caller. NCCL reads a number of this dtype from valid memory
                // before it returns, and writes its op.
                let code = unsafe { ncclRedOpCreatePreMulSum(&mut op, place, kind, here, comm) };
                return match code {
                    ncclResult_t::ncclSuccess => Ok(Self { op, made_for: Some(comm) }),
                    code => Err(code),
                };
            }
            Some(ReduceOp::And | ReduceOp::Or | ReduceOp::Xor) => {
                return Err(ncclResult_t::ncclInvalidArgument);
            }
        };
        Ok(Self { op: op as c_int, made_for: None })
    }
}

impl Drop for CommReduction {
    fn drop(&mut self) {
        if let Some(comm) = self.made_for {
            // SAFETY: the communicator is alive, and the op is its own. An error is ignored.
            let _ = unsafe { ncclRedOpDestroy(self.op, comm) };
        }
    }
}

/// Returns a number in the bytes of a dtype of floats.
fn scalar(number: f64, dtype: DType) -> Option<[u8; 8]> {
    let mut bytes = [0; 8];
    match dtype {
        DType::F16 => bytes[..2].copy_from_slice(&f16::from_f64(number).to_ne_bytes()),
        DType::BF16 => bytes[..2].copy_from_slice(&bf16::from_f64(number).to_ne_bytes()),
        DType::F32 => bytes[..4].copy_from_slice(&(number as f32).to_ne_bytes()),
        DType::F64 => bytes = number.to_ne_bytes(),
        _ => return None,
    }
    Some(bytes)
}
