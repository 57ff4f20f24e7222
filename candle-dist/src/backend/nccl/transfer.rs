//! Prepares the tensors of a collective in GPU memory, and enqueues NCCL's calls.
use super::comm::NcclComm;
use super::limit::PriorWork;
use super::marks;
use super::plan::{BufferSpan, FlatTransfer, StripCopies, TransferPlan};
use super::rank::NcclRank;
use super::reduction::{CommReduction, all_reduce, reduce, reduce_scatter};
use crate::backend::cuda::{address, memory, note_written, written};
use crate::backend::guards::Guards;
use crate::backend::storage::{DeviceStorage, StorageOperand};
use crate::backend::{Call, Cut, Fresh, ReduceOp};
use crate::{Error, Result};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Layout, Shape, Storage, Tensor};
use cudarc::driver::{CudaEvent, CudaStream};
use cudarc::nccl::sys;
use std::ffi::c_void;
use std::sync::Arc;

/// The end of a call on the GPU.
pub(super) type DoneEvent = Arc<CudaEvent>;

/// One tensor of a collective: planned, packed, and with memory for the result.
pub(super) struct TensorTransfer {
    plan: TransferPlan,
    /// The data to send, which stays alive until the result is returned.
    sent: SendData,
    received: Option<CudaStorage>,
    /// The marks of NaN that travel with the numbers, and memory for those that come.
    marks: Option<(CudaStorage, Option<CudaStorage>)>,
    dtype: DType,
}

enum SendData {
    Nothing,
    Tensor(Tensor),
    Packed { storage: CudaStorage, len: usize },
}

impl SendData {
    /// Returns the marks of the numbers to send. Their computation is enqueued on the stream of their device.
    fn marks(&self) -> Result<Option<CudaStorage>> {
        match self {
            Self::Nothing => Ok(None),
            Self::Tensor(tensor) => {
                let (storage, layout) = tensor.storage_and_layout();
                marks::of(CudaStorage::of(&storage)?, layout).map(Some)
            }
            Self::Packed { storage, len } => marks::of(storage, &Layout::contiguous(*len)).map(Some),
        }
    }
}

impl TensorTransfer {
    /// Prepares rank `me`'s part of a call. Packing, one launch for all tensors of a device, is enqueued on its stream.
    pub(super) fn of_call(
        device: &CudaDevice,
        call: &Call,
        me: usize,
        tensors: &[Tensor],
    ) -> Result<Vec<Self>> {
        let plan = |i: usize| {
            TransferPlan::new(call, i, me, tensors.get(i).map_or(&call.shape, |tensor| tensor.dims()))
        };
        let plans = (0..call.count()).map(plan).collect::<Result<Vec<_>>>()?;
        let packed = pack(&plans, tensors)?;
        let each = plans.into_iter().zip(packed).enumerate();
        each.map(|(i, (plan, packed))| Self::new(device, call, plan, (tensors.get(i), packed))).collect()
    }

    fn new(
        device: &CudaDevice,
        call: &Call,
        plan: TransferPlan,
        (tensor, packed): (Option<&Tensor>, Option<CudaStorage>),
    ) -> Result<Self> {
        let none = || Error::Unsupported(format!("{} without a dtype", call.op()));
        let dtype = tensor.map(Tensor::dtype).or(call.dtype).ok_or_else(none)?;
        let sent = match (tensor, packed) {
            (None, _) => SendData::Nothing,
            (Some(tensor), None) => SendData::Tensor(tensor.clone()),
            (Some(tensor), Some(storage)) => SendData::Packed { storage, len: tensor.elem_count() },
        };
        let memory = |dtype| plan.shape.is_some().then(|| memory(device, plan.received, dtype)).transpose();
        let marks = match marks::needed(call, dtype) {
            true => sent.marks()?.map(|marks| Ok::<_, Error>((marks, memory(DType::U8)?))).transpose()?,
            false => None,
        };
        let received = memory(dtype)?;
        Ok(Self { plan, sent, received, marks, dtype })
    }

    /// Enqueues the transfer on `stream`.
    fn enqueue(
        &self,
        reduce: Option<ReduceOp>,
        comm: sys::ncclComm_t,
        stream: sys::cudaStream_t,
    ) -> sys::ncclResult_t {
        let from = match &self.sent {
            SendData::Nothing => 0,
            SendData::Tensor(tensor) => address_of(tensor),
            SendData::Packed { storage, .. } => address(storage, 0),
        };
        let start = |storage: &Option<CudaStorage>| storage.as_ref().map_or(0, |storage| address(storage, 0));
        let numbers =
            enqueue(&self.plan.transfer, (from, start(&self.received)), self.dtype, reduce, comm, stream);
        let marks = self.marks.as_ref().map(|(sent, received)| {
            let places = (address(sent, 0), start(received));
            enqueue(&self.plan.transfer, places, DType::U8, Some(ReduceOp::Max), comm, stream)
        });
        first_error([numbers].into_iter().chain(marks))
    }

    /// Returns what was received, with NaN where they are marked, and how it is unpacked.
    fn received(self) -> Result<Option<TransferResult>> {
        let (Some(mut storage), Some(shape)) = (self.received, self.plan.shape) else { return Ok(None) };
        written(&mut storage);
        if let Some((_, Some(mut marks))) = self.marks {
            written(&mut marks);
            storage = marks::apply(&marks, storage, self.plan.received)?;
        }
        Ok(Some(TransferResult { storage, unpack: self.plan.unpack, shape: Shape::from(shape.as_slice()) }))
    }
}

/// A result that may have to be unpacked.
struct TransferResult {
    storage: CudaStorage,
    unpack: Option<StripCopies>,
    shape: Shape,
}

/// Packs tensors as their plans say, each on the stream of its device; `None` for those that are sent as they are.
fn pack(plans: &[TransferPlan], tensors: &[Tensor]) -> Result<Vec<Option<CudaStorage>>> {
    let mut made: Vec<Option<CudaStorage>> = plans.iter().map(|_| None).collect();
    let pairs = plans.iter().zip(tensors).enumerate();
    let mut rest: Vec<_> = pairs.filter_map(|(i, (plan, x))| Some((i, plan.pack.as_ref()?, x))).collect();
    while let Some(Device::Cuda(device)) = rest.first().map(|(_, _, x)| x.device()) {
        let (these, others): (Vec<_>, Vec<_>) =
            rest.iter().copied().partition(|(_, _, x)| x.device().same_device(&Device::Cuda(device.clone())));
        let operands: Vec<_> = these.iter().map(|(_, _, x)| StorageOperand::of(x)).collect();
        let guards = Guards::new(&operands);
        let mut buffers = Vec::with_capacity(these.len());
        for ((_, moves, x), guard) in these.iter().zip(guards.iter()) {
            buffers.push(moves.buffer(CudaStorage::of(guard)?, x.layout().start_offset()));
        }
        for ((i, ..), packed) in these.iter().zip(CudaStorage::copy_strips(device, &buffers)?) {
            made[*i] = Some(packed);
        }
        rest = others;
    }
    Ok(made)
}

/// Returns the results of a call; `None` for a tensor without one. Unpacking, one launch for all of them, is enqueued on the stream of
/// `device`.
pub(super) fn land(device: &CudaDevice, prepared: Vec<TensorTransfer>) -> Result<Vec<Option<Fresh>>> {
    let all = prepared.into_iter().map(TensorTransfer::received).collect::<Result<Vec<_>>>()?;
    let packed = all.iter().flatten().filter_map(|it| Some(it.unpack.as_ref()?.buffer(&it.storage, 0)));
    let buffers: Vec<_> = packed.collect();
    let made = if buffers.is_empty() { Vec::new() } else { CudaStorage::copy_strips(device, &buffers)? };
    let mut made = made.into_iter();
    let mut result = |TransferResult { storage, unpack, shape }: TransferResult| {
        let storage = if unpack.is_some() { made.next().unwrap_or(storage) } else { storage };
        Fresh { storage: Storage::Cuda(storage), shape }
    };
    Ok(all.into_iter().map(|it| it.map(&mut result)).collect())
}

/// Enqueues all of `prepared` as one group after the work `after`.
pub(super) fn issue(
    comm: &NcclComm,
    after: &PriorWork,
    call: &Call,
    prepared: &[TensorTransfer],
) -> Result<DoneEvent> {
    let done = comm.issue(call.op().name(), after, |comm, stream| {
        let codes =
            prepared.iter().map(|prepared| prepared.enqueue(call.collective.reduction(), comm, stream));
        first_error(codes)
    })?;
    comm.note_met(exchanges(prepared));
    Ok(done)
}

/// Returns the direct exchanges of a call with other members: whether this one sends, and to or from whom.
pub(super) fn exchanges(prepared: &[TensorTransfer]) -> impl Iterator<Item = (bool, usize)> {
    let spans = prepared.iter().filter_map(|prepared| match &prepared.plan.transfer {
        FlatTransfer::SendReceive { sends, receives } => Some((sends, receives)),
        _ => None,
    });
    spans.flat_map(|(sends, receives)| {
        let sends = sends.iter().map(|span| (true, span.peer));
        sends.chain(receives.iter().map(|span| (false, span.peer)))
    })
}

/// Enqueues an all_reduce or a broadcast whose result overwrites `tensor`, which must be contiguous.
pub(super) fn issue_in_place(
    rank: &NcclRank,
    comm: &NcclComm,
    main: &Arc<CudaStream>,
    call: &Call,
    tensor: &Tensor,
) -> Result<()> {
    let plan = TransferPlan::new(call, 0, 0, tensor.dims())?;
    let place = address_of(tensor);
    let after = PriorWork::on(std::slice::from_ref(main))?;
    let done = comm.issue(call.op().name(), &after, |comm, stream| {
        enqueue(&plan.transfer, (place, place), tensor.dtype(), call.collective.reduction(), comm, stream)
    })?;
    rank.rejoin(main, &done)?;
    // Other `Device`s of this GPU have streams of their own.
    note_written(tensor)
}

/// Enqueues a send of `tensor`, whose data is there after the work `after`, to the member `peer`.
pub(super) fn issue_send(
    comm: &NcclComm,
    after: &PriorWork,
    tensor: &Tensor,
    peer: usize,
) -> Result<DoneEvent> {
    let sends = vec![BufferSpan { peer, start: 0, len: tensor.elem_count() }];
    let (transfer, place) = (FlatTransfer::SendReceive { sends, receives: Vec::new() }, address_of(tensor));
    comm.issue("send", after, |comm, stream| {
        enqueue(&transfer, (place, 0), tensor.dtype(), None, comm, stream)
    })
}

/// Enqueues a receive of a tensor of `call`'s shape and dtype from the member `peer`, into new memory of this rank's GPU. Calls
/// `is_sent` then until it returns whether the message is enqueued, and before anything waits for it on the GPU.
pub(super) fn issue_receive(
    rank: &NcclRank,
    comm: &NcclComm,
    call: &Call,
    peer: usize,
    is_sent: impl FnMut() -> bool,
) -> Result<Fresh> {
    let (shape, dtype) = (Shape::from(call.shape.as_slice()), call.dtype.unwrap_or(DType::U8));
    let mut storage = memory(&rank.device, shape.elem_count(), dtype)?;
    let receives = vec![BufferSpan { peer, start: 0, len: shape.elem_count() }];
    let (transfer, place) = (FlatTransfer::SendReceive { sends: Vec::new(), receives }, address(&storage, 0));
    let stream = rank.device.cuda_stream();
    let after = PriorWork::on(std::slice::from_ref(&stream))?;
    let receive = |comm, stream| enqueue(&transfer, (0, place), dtype, None, comm, stream);
    let done = comm.issue_marked("recv", &after, receive, is_sent)?;
    rank.rejoin(&stream, &done)?;
    written(&mut storage);
    Ok(Fresh { storage: Storage::Cuda(storage), shape })
}

fn first_error(codes: impl Iterator<Item = sys::ncclResult_t>) -> sys::ncclResult_t {
    let fine = [sys::ncclResult_t::ncclSuccess, sys::ncclResult_t::ncclInProgress];
    codes.into_iter().find(|code| !fine.contains(code)).unwrap_or(sys::ncclResult_t::ncclSuccess)
}

/// Enqueues one transfer, from the address of the send buffer to that of the receive buffer.
fn enqueue(
    transfer: &FlatTransfer,
    (from, to): (u64, u64),
    dtype: DType,
    reduction: Option<ReduceOp>,
    comm: sys::ncclComm_t,
    stream: sys::cudaStream_t,
) -> sys::ncclResult_t {
    let Some(kind) = kind(dtype, reduction.is_some()) else { return sys::ncclResult_t::ncclInvalidArgument };
    let reduction = match CommReduction::new(reduction, dtype, kind, comm) {
        Ok(reduction) => reduction,
        Err(code) => return code,
    };
    let op = reduction.op;
    let size = dtype.size_in_bytes() as u64;
    let at = |base: u64, start: usize| (base + start as u64 * size) as *mut c_void;
    let (send, receive) = (at(from, 0), at(to, 0));
    // SAFETY (for every call below): the communicator is alive and locked by the caller. The addresses are those of
    // device memory of this rank's GPU with at least as many elements as the plan counts. `TensorTransfer`, or the caller's
    // tensor, keeps that memory until the stream on which it is freed has passed the call. NCCL only enqueues.
    match transfer {
        FlatTransfer::AllReduce { len: 0 }
        | FlatTransfer::Broadcast { len: 0, .. }
        | FlatTransfer::Reduce { len: 0, .. } => sys::ncclResult_t::ncclSuccess,
        FlatTransfer::AllGather { len: 0 } | FlatTransfer::ReduceScatter { len: 0 } => {
            sys::ncclResult_t::ncclSuccess
        }
        // SAFETY: see above.
        FlatTransfer::AllReduce { len } => unsafe { all_reduce(send, receive, *len, kind, op, comm, stream) },
        FlatTransfer::Broadcast { root, len } => {
            // SAFETY: see above.
            unsafe { sys::ncclBroadcast(send, receive, *len, kind, *root as i32, comm, stream) }
        }
        FlatTransfer::Reduce { root, len } => {
            // SAFETY: see above.
            unsafe { reduce(send, receive, *len, kind, op, *root as i32, comm, stream) }
        }
        // SAFETY: see above.
        FlatTransfer::AllGather { len } => unsafe {
            sys::ncclAllGather(send, receive, *len, kind, comm, stream)
        },
        // SAFETY: see above.
        FlatTransfer::ReduceScatter { len } => unsafe {
            reduce_scatter(send, receive, *len, kind, op, comm, stream)
        },
        FlatTransfer::Reduces(spans) => first_error(spans.iter().map(|span| {
            let root = span.peer as i32;
            // SAFETY: see above.
            unsafe { reduce(at(from, span.start), receive, span.len, kind, op, root, comm, stream) }
        })),
        FlatTransfer::SendReceive { sends, receives } => {
            let send = |span: &BufferSpan| {
                // SAFETY: see above.
                unsafe { sys::ncclSend(at(from, span.start), span.len, kind, span.peer as i32, comm, stream) }
            };
            let receive = |span: &BufferSpan| {
                // SAFETY: see above.
                unsafe { sys::ncclRecv(at(to, span.start), span.len, kind, span.peer as i32, comm, stream) }
            };
            first_error(sends.iter().map(send).chain(receives.iter().map(receive)))
        }
    }
}

/// Refuses calls that NCCL does not support, the same on all ranks that make the call.
pub(super) fn check(call: &Call) -> Result<()> {
    let (op, reduction) = (call.op(), call.collective.reduction());
    let first = call.dtype.map(|dtype| (dtype, &call.shape));
    for (dtype, shape) in first.into_iter().chain(call.rest.iter().map(|(dtype, shape)| (*dtype, shape))) {
        if kind(dtype, reduction.is_some()).is_none() {
            let name = dtype.as_str();
            return Err(Error::Unsupported(format!(
                "{op} of {name} tensors over NCCL; cast them to another dtype"
            )));
        }
        // Pieces of other dims than the first are packed.
        let is_packed =
            |cut: &&Cut| shape.get(..cut.dim).is_some_and(|outer| outer.iter().any(|&len| len != 1));
        if matches!(dtype, DType::I16 | DType::I32)
            && let Some(cut) = call.collective.cuts().into_iter().find(is_packed)
        {
            let (name, dim) = (dtype.as_str(), cut.dim);
            return Err(Error::Unsupported(format!(
                "{op} of pieces of dim {dim} of {name} tensors over NCCL, which candle's kernels do not copy; cut dim 0, or cast them to \
                 another dtype"
            )));
        }
        let count = shape.iter().try_fold(1usize, |count, &len| count.checked_mul(len));
        if marks::needed(call, dtype) && count.is_none_or(|count| count > u32::MAX as usize) {
            return Err(Error::Unsupported(format!(
                "{op} (min or max) of more than {} floats over NCCL, whose NaN candle's kernels would miss; cut the tensor into \
                 pieces",
                u32::MAX
            )));
        }
    }
    match reduction {
        Some(reduce @ (ReduceOp::And | ReduceOp::Or | ReduceOp::Xor)) => Err(Error::Unsupported(format!(
            "{op} ({reduce}) over NCCL; use sum, avg, min, max, product or a sum with a factor"
        ))),
        _ => Ok(()),
    }
}

/// Returns NCCL's type of the elements. Where nothing is computed from them, any type of their size will do.
fn kind(dtype: DType, is_reduced: bool) -> Option<sys::ncclDataType_t> {
    Some(match dtype {
        DType::U8 => sys::ncclDataType_t::ncclUint8,
        DType::U32 => sys::ncclDataType_t::ncclUint32,
        DType::I32 => sys::ncclDataType_t::ncclInt32,
        DType::I64 => sys::ncclDataType_t::ncclInt64,
        DType::BF16 => sys::ncclDataType_t::ncclBfloat16,
        DType::F16 => sys::ncclDataType_t::ncclFloat16,
        DType::F32 => sys::ncclDataType_t::ncclFloat32,
        DType::F64 => sys::ncclDataType_t::ncclFloat64,
        // NCCL adds 8-bit floats from version 2.24 on, and only on GPUs from Hopper on.
        DType::F8E4M3 if !is_reduced => sys::ncclDataType_t::ncclUint8,
        DType::I16 if !is_reduced => sys::ncclDataType_t::ncclFloat16,
        _ => return None,
    })
}

/// Returns the address of a contiguous CUDA tensor's first element; 0 for a tensor elsewhere, which was refused before.
fn address_of(tensor: &Tensor) -> u64 {
    let (storage, layout) = tensor.storage_and_layout();
    CudaStorage::of(&storage).map_or(0, |storage| address(storage, layout.start_offset()))
}
