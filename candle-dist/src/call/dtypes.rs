//! The dtypes that collectives support.
use candle_core::DType;

/// The dtypes that the backends carry. NCCL reduces eight of them.
pub(crate) const CARRIED: [DType; 10] = [
    DType::U8,
    DType::U32,
    DType::I64,
    DType::BF16,
    DType::F16,
    DType::F32,
    DType::F64,
    DType::I16,
    DType::I32,
    DType::F8E4M3,
];

/// Returns the names of these dtypes, for error messages.
pub(crate) fn carried() -> String {
    CARRIED.map(|dtype| dtype.as_str()).join(", ")
}
