//! Kernels of this crate on CUDA devices. NVRTC compiles them when the first one is used.
use candle_core::cuda_backend::cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};
use candle_core::{Result, bail};
use std::sync::OnceLock;

/// Kernels that are compiled together, for all devices.
pub(crate) struct Kernels {
    name: &'static str,
    source: &'static str,
    compiled: OnceLock<std::result::Result<String, CompileError>>,
}

impl Kernels {
    /// Names the text of some kernels.
    pub(crate) const fn new(name: &'static str, source: &'static str) -> Self {
        Self { name, source, compiled: OnceLock::new() }
    }

    /// The name of their module.
    pub(crate) const fn name(&self) -> &'static str {
        self.name
    }

    /// Returns them compiled.
    ///
    /// # Errors
    /// If NVRTC refuses the text.
    pub(crate) fn ptx(&self) -> Result<&str> {
        let compiled = self.compiled.get_or_init(|| {
            // Each operation is rounded by itself, as on the host.
            let exact = CompileOptions {
                ftz: Some(false),
                prec_sqrt: Some(true),
                prec_div: Some(true),
                fmad: Some(false),
                ..CompileOptions::default()
            };
            compile_ptx_with_opts(self.source, exact).map(|ptx| ptx.to_src())
        });
        match compiled {
            Ok(ptx) => Ok(ptx),
            Err(error) => bail!("NVRTC cannot compile {}: {error}", self.name),
        }
    }
}
