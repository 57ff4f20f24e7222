//! What a backend cannot do, with the reasons: cases to skip, and parts of cases that are left out.
use crate::{ProcessGroup, ReduceOp};
use candle_core::DType;

/// Something that a backend cannot do.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Lack {
    /// The [name](crate::backend::Backend::name) of the backend.
    pub backend: &'static str,
    /// The case or failure that cannot pass, or a part that all cases leave out.
    pub what: &'static str,
    /// Why.
    pub why: &'static str,
}

const fn nccl(what: &'static str, why: &'static str) -> Lack {
    Lack { backend: "nccl", what, why }
}

/// What the backends of this crate cannot do. Report it as skipped.
pub const LACKS: [Lack; 6] = [
    nccl("sums in rank order, the same bits on all ranks", "the order of sums is NCCL's own"),
    nccl("16-bit sums accumulate in f32", "NCCL rounds each step"),
    nccl(
        "reductions of i16 and f8e4m3",
        "NCCL has none of i16, and those of 8-bit floats need new GPUs; refused",
    ),
    nccl("pieces of i16 and i32, except for those of dim 0", "candle has no kernels that copy them; refused"),
    nccl("and, or and xor", "NCCL has none; refused"),
    nccl("probes, receives from any rank, monitored barriers", "NCCL has none; unsupported"),
];

/// Returns why `backend` cannot pass the case or failure of this name; `None` if it must.
pub fn lack(backend: &str, name: &str) -> Option<&'static str> {
    LACKS.iter().find(|lack| lack.backend == backend && lack.what == name).map(|lack| lack.why)
}

/// The dtypes that collectives support between hosts.
const DTYPES: [DType; 10] = [
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::F8E4M3,
    DType::F16,
    DType::BF16,
    DType::F32,
    DType::F64,
];

pub(super) fn over_nccl(g: &ProcessGroup) -> bool {
    g.backend().name() == "nccl"
}

/// Returns the dtypes of tensors that the backend of a group moves as they are.
pub(super) fn dtypes(_: &ProcessGroup) -> impl Iterator<Item = DType> + Clone + use<> {
    DTYPES.into_iter()
}

/// Returns the dtypes of tensors of which the backend of a group moves pieces of any dim.
pub(super) fn cut_dtypes(g: &ProcessGroup) -> impl Iterator<Item = DType> + Clone + use<> {
    let nccl = over_nccl(g);
    dtypes(g).filter(move |&dtype| !(nccl && matches!(dtype, DType::I16 | DType::I32)))
}

/// Returns the dtypes of tensors that the backend of a group reduces, and of which it moves pieces of any dim.
pub(super) fn reduced_dtypes(g: &ProcessGroup) -> impl Iterator<Item = DType> + Clone + use<> {
    let nccl = over_nccl(g);
    cut_dtypes(g).filter(move |&dtype| !(nccl && dtype == DType::F8E4M3))
}

/// Returns whether the backend of a group supports a reduction.
pub(super) fn reduces(g: &ProcessGroup, op: ReduceOp) -> bool {
    !over_nccl(g) || !op.is_bitwise()
}
