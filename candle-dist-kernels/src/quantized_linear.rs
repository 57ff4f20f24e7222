//! Products with quantized weights.

use std::sync::Arc;

use candle_core::quantized::QTensor;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, MetalStorage, Result, Shape, Tensor};

/// Computes `x · weightᵀ` by candle's quantized kernels, for `x` `[.., k]` and a quantized weight `[n, k]`; returns
/// `[.., n]`.
///
/// The input has a gradient, which candle's own `QMatMul` drops. The weight has none.
///
/// ```
/// use candle_core::quantized::{GgmlDType, QTensor};
/// use candle_core::{DType, Device::Cpu, Result, Tensor, Var};
/// use candle_dist_kernels::quantized_linear;
///
/// let weight = QTensor::quantize(&Tensor::ones((3, 32), DType::F32, &Cpu)?, GgmlDType::Q8_0)?;
/// let x = Var::ones((2, 32), DType::F32, &Cpu)?;
/// let y = quantized_linear(&x, &weight.into())?;
/// assert_eq!(y.dims(), [2, 3]);
/// let gradient = y.sum_all()?.backward()?.remove(&x).unwrap();
/// assert!((gradient.get(0)?.get(0)?.to_scalar::<f32>()? - 3.0).abs() < 0.01);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If `x` has another last dim, one dim alone, or a dtype that is not f32, bf16 or f16.
pub fn quantized_linear(x: &Tensor, weight: &Arc<QTensor>) -> Result<Tensor> {
    x.contiguous()?.apply_op1(Product(weight.clone()))
}

struct Product(Arc<QTensor>);

impl CustomOp1 for Product {
    fn name(&self) -> &'static str {
        "quantized_linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.0.cpu_fwd(x, layout)
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.0.cuda_fwd(x, layout)
    }

    fn metal_fwd(&self, x: &MetalStorage, layout: &Layout) -> Result<(MetalStorage, Shape)> {
        self.0.metal_fwd(x, layout)
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let (n, _) = self.0.shape().dims2()?;
        let weight = self.0.dequantize(x.device())?.to_dtype(x.dtype())?;
        let rows = gradient.contiguous()?.reshape(((), n))?;
        Ok(Some(rows.matmul(&weight)?.reshape(x.shape())?))
    }
}
