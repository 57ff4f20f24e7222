//! The texts of kernels for CUDA devices, and whether they are used.
//!
//! A text is CUDA C without `#include`, which NVRTC compiles when its first kernel is used, and which tests compile for the host.
//! Fused kernels have the prelude in front.
#[cfg(feature = "cuda")]
use candle_core::Device;
#[cfg(any(test, feature = "cuda"))]
use candle_core::Result;
#[cfg(feature = "cuda")]
use std::sync::OnceLock;
#[cfg(any(test, feature = "cuda"))]
use std::sync::{Mutex, PoisonError};

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
pub fn is_fused(device: &Device) -> bool {
    static COMPOSED: OnceLock<bool> = OnceLock::new();
    let is_composed = || std::env::var_os("CANDLE_DIST_COMPOSED").is_some_and(|value| value == "1");
    device.is_cuda() && !*COMPOSED.get_or_init(is_composed)
}

/// The bytes of shared memory that launches of a function may have, which only grow.
///
/// They belong to the function: a smaller number for one launch would refuse that of another thread, which has asked for more.
#[cfg(any(test, feature = "cuda"))]
#[derive(Debug)]
pub(crate) struct SharedLimit(Mutex<u32>);

#[cfg(any(test, feature = "cuda"))]
impl Default for SharedLimit {
    /// What each launch may have.
    fn default() -> Self {
        Self(Mutex::new(48 << 10))
    }
}

#[cfg(any(test, feature = "cuda"))]
impl SharedLimit {
    /// Sets the limit by `set`, unless launches may have so many bytes already.
    pub(crate) fn raise(&self, bytes: u32, set: impl FnOnce(u32) -> Result<()>) -> Result<()> {
        let mut limit = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > *limit {
            set(bytes)?;
            *limit = bytes;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::SharedLimit;
    use candle_core::bail;

    #[test]
    fn launches_with_less_shared_memory_take_none_from_others() {
        let (limit, mut set) = (SharedLimit::default(), Vec::new());
        let mut raise = |bytes: u32, fails: bool| {
            limit.raise(bytes, |bytes| {
                set.push(bytes);
                if fails { bail!("refused") } else { Ok(()) }
            })
        };
        let kibibytes =
            [(0, false), (48, false), (90, true), (60, false), (50, false), (60, false), (90, false)];
        let refused = kibibytes.map(|(bytes, fails)| raise(bytes << 10, fails).is_err());
        assert_eq!(refused, [false, false, true, false, false, false, false]);
        assert_eq!(set, [90, 60, 90].map(|bytes| bytes << 10));
    }
}
