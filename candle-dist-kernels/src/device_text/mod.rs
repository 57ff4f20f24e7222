//! The texts of kernels for CUDA devices, and whether they are used.
//!
//! A text is CUDA C without `#include`, which NVRTC compiles when its first kernel is used, and which tests compile for the host.
//! Fused kernels have the prelude in front.
#[cfg(feature = "cuda")]
use candle_core::Device;
#[cfg(feature = "cuda")]
use std::sync::OnceLock;

/// A text of kernels, whose path is relative to `src`, behind the prelude.
macro_rules! with_prelude {
    ($path:literal) => {
        concat!(
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/device_text/prelude.cu")),
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/", $path))
        )
    };
}
pub(crate) use with_prelude;

/// Whether ops on this device run by fused kernels: on CUDA devices, unless the environment has `CANDLE_DIST_COMPOSED=1`.
///
/// The variable is read once. With it, ops are composed of candle's operations, to compare both.
#[cfg(feature = "cuda")]
pub(crate) fn is_fused(device: &Device) -> bool {
    static COMPOSED: OnceLock<bool> = OnceLock::new();
    let is_composed = || std::env::var_os("CANDLE_DIST_COMPOSED").is_some_and(|value| value == "1");
    device.is_cuda() && !*COMPOSED.get_or_init(is_composed)
}
