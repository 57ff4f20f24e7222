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
pub const LACKS: [Lack; 7] = [
    nccl("sums in rank order, the same bits on all ranks", "the order of sums is NCCL's own"),
    nccl("16-bit sums accumulate in f32", "NCCL rounds each step"),
    nccl("values are multiplied before they are added", SUMS),
    nccl("factor", SUMS),
    nccl("tensors of i16, i32 and f8e4m3", "candle has no kernels that copy parts of them; refused"),
    nccl("and, or, xor and sums with factors", "NCCL has none; refused"),
    nccl("probes, receives from any rank, monitored barriers", "NCCL has none; unsupported"),
];
const SUMS: &str = "sums with factors are refused";

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

/// Returns the dtypes that the backend of a group supports.
pub(super) fn dtypes(g: &ProcessGroup) -> impl Iterator<Item = DType> + Clone + use<> {
    let nccl = over_nccl(g);
    let lacks = move |dtype| nccl && matches!(dtype, DType::I16 | DType::I32 | DType::F8E4M3);
    DTYPES.into_iter().filter(move |&dtype| !lacks(dtype))
}

/// Returns whether the backend of a group supports a reduction.
pub(super) fn reduces(g: &ProcessGroup, op: ReduceOp) -> bool {
    !over_nccl(g) || !(op.is_bitwise() || matches!(op, ReduceOp::PreMulSum(_)))
}
