use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, D, DType, Device, Layout, MetalStorage, Result, Shape, Storage,
    Tensor, bail,
};

use super::floats::{FloatPanels, float_gradient, float_product};
use super::inputs;
use super::matrix::{MatrixStorage, QuantizedMatrix};
use super::tiles::Processor;
use crate::convert::{converted, to_dtype};
use crate::elements;
use candle_dist_base::edges;
use candle_dist_base::{Fresh, Ready};

/// Computes `x · weightᵀ` for `x` `[.., k]` and quantized weights `[n, k]`, side by side: `[.., n₁ + n₂ + ..]`.
///
/// On the CPU each 32 elements of `x` are rounded to multiples of a 127th of the largest of them, once for all weights.
/// Sums are in f32. A row of `x` with an element that is not finite gives NaN.
///
/// The input has a gradient, which candle's own `QMatMul` drops. The weights have none.
///
/// ```
/// use candle_core::quantized::{GgmlDType, QTensor};
/// use candle_core::{DType, Device::Cpu, Result, Tensor, Var};
/// use candle_dist_kernels::{QuantizedMatrix, quantized_linear};
///
/// let weight = QTensor::quantize(&Tensor::ones((3, 32), DType::F32, &Cpu)?, GgmlDType::Q8_0)?;
/// let weight = QuantizedMatrix::new(weight)?;
/// let x = Var::ones((2, 32), DType::F32, &Cpu)?;
/// let y = quantized_linear(&x, &[&weight])?;
/// assert_eq!(y.dims(), [2, 3]);
/// let gradient = y.sum_all()?.backward()?.remove(&x).unwrap();
/// assert!((gradient.get(0)?.get(0)?.to_scalar::<f32>()? - 3.0).abs() < 0.01);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If `x` has one dim alone, another last dim than a weight, or a dtype that is not f32, bf16 or f16; if it is on
/// another device than a weight, or there are no weights.
pub fn quantized_linear(x: &Tensor, weights: &[&QuantizedMatrix]) -> Result<Tensor> {
    let Some(first) = weights.first() else { bail!("quantized_linear: no weights; give at least one") };
    check("quantized_linear", x, weights)?;
    if weights.iter().any(|weight| matches!(*weight.0, MatrixStorage::Scaled(_))) {
        bail!("quantized_linear: a weight of codes with scales is multiplied by dequantized_linear");
    }
    let op = |weights: &[&QuantizedMatrix]| Products(weights.iter().map(|&weight| weight.clone()).collect());
    let x = x.contiguous()?;
    match &*first.0 {
        MatrixStorage::Tiles(_) | MatrixStorage::Scaled(_) => x.apply_op1(op(weights)),
        MatrixStorage::Blocks(_) => {
            let parts =
                weights.iter().map(|&weight| x.apply_op1(op(&[weight]))).collect::<Result<Vec<_>>>()?;
            if let [part] = &parts[..] { Ok(part.clone()) } else { Tensor::cat(&parts, D::Minus1) }
        }
    }
}

/// Computes `x · weightᵀ` for `x` `[.., k]` and the floats that a quantized weight `[n, k]` stands for, in the dtype of `x`: `[.., n]`.
///
/// `x` is not rounded, unlike in [`quantized_linear`], so a small change of the input is a small change of the output, as
/// training needs. The input has a gradient, the weight has none. On the CPU each pass makes the floats of a panel of the weight
/// at a time, in the cache of each thread, and no float of it stays in memory.
///
/// # Errors
/// Those of [`quantized_linear`].
pub fn dequantized_linear(x: &Tensor, weight: &QuantizedMatrix) -> Result<Tensor> {
    check("dequantized_linear", x, &[weight])?;
    let [n, k] = weight.dims();
    let rows = to_dtype(&x.detach().contiguous()?.reshape(((), k))?, DType::F32)?;
    let shape: Vec<usize> = x.dims()[..x.rank() - 1].iter().copied().chain([n]).collect();
    let shape = Shape::from(shape);
    let made = match weight.0.panels() {
        Some(panels) => {
            let made = with_elements(&rows, |x| float_product(panels, x, rows.dims()[0]))?;
            let made = CpuStorage::F32(made);
            let made = match x.dtype() {
                DType::F32 => made,
                dtype => converted(&made, &Layout::contiguous(&shape), dtype)?,
            };
            Fresh::host(made, shape)
        }
        None => {
            let made = rows.matmul(&weight.dequantize()?.t()?)?.to_dtype(x.dtype())?.reshape(shape)?;
            if !x.track_op() {
                return Ok(made);
            }
            Fresh::copy_of(&made)?
        }
    };
    if !x.track_op() {
        return Ok(made.into_tensor());
    }
    let made = Ready::new(made);
    edges::apply1(x, DequantizedProduct { products: Products([weight.clone()].into()), made })
}

impl MatrixStorage {
    /// Returns what makes panels of floats, if that is on the host.
    fn panels(&self) -> Option<&dyn FloatPanels> {
        match self {
            Self::Tiles(tiles) => Some(tiles),
            Self::Scaled(codes) if codes.is_on_host() => Some(codes),
            Self::Scaled(_) | Self::Blocks(_) => None,
        }
    }
}

/// Runs `f` on the elements of a contiguous tensor on the CPU.
fn with_elements<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        bail!(
            "a product with a quantized weight: the input is not on the CPU and the weight is; use one device"
        );
    };
    f(elements(storage, layout)?)
}

fn check(op: &str, x: &Tensor, weights: &[&QuantizedMatrix]) -> Result<()> {
    if x.rank() < 2 || !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        bail!("{op}: {}{:?}: expected two dims or more of f32, f16 or bf16", x.dtype().as_str(), x.dims());
    }
    let k = x.dim(D::Minus1)?;
    if let Some(other) = weights.iter().find(|weight| weight.dims()[1] != k) {
        bail!("{op}: input {:?} does not fit a weight {:?}", x.dims(), other.dims());
    }
    Ok(())
}

/// A product that was computed already.
struct DequantizedProduct {
    products: Products,
    made: Ready,
}

impl CustomOp1 for DequantizedProduct {
    fn name(&self) -> &'static str {
        "dequantized_linear"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.made.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.made.cuda()
    }

    fn bwd(&self, x: &Tensor, made: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.products.bwd(x, made, gradient)
    }
}

/// Products with weights on one device; on others than the CPU with one weight.
struct Products(Vec<QuantizedMatrix>);

impl Products {
    /// Returns the weight that candle multiplies with.
    fn of_candle(&self, device: &'static str) -> Result<&candle_core::quantized::QTensor> {
        match self.0.first().map(|weight| &*weight.0) {
            Some(MatrixStorage::Blocks(weight)) => Ok(weight),
            _ => bail!("quantized_linear: the input is on {device} and the weight is not; use one device"),
        }
    }
}

impl CustomOp1 for Products {
    fn name(&self) -> &'static str {
        "quantized_linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        if x.dtype() != DType::F32 {
            let wide = converted(x, layout, DType::F32)?;
            let (made, shape) = self.cpu_fwd(&wide, &Layout::contiguous(layout.shape()))?;
            return Ok((converted(&made, &Layout::contiguous(&shape), x.dtype())?, shape));
        }
        let (k, n) =
            (layout.dims()[layout.dims().len() - 1], self.0.iter().map(|weight| weight.dims()[0]).sum());
        let m = layout.shape().elem_count() / k;
        let inputs = inputs::round(elements(x, layout)?);
        let mut out = vec![0.0; m * n];
        let mut first = 0;
        for weight in &self.0 {
            let MatrixStorage::Tiles(tiles) = &*weight.0 else {
                bail!("quantized_linear: the input is on the CPU and a weight is not; use one device");
            };
            if m > 0 {
                tiles.product(Processor::best(), &inputs, m, &mut out, first);
            }
            first += tiles.rows;
        }
        let mut shape = layout.dims().to_vec();
        shape[layout.dims().len() - 1] = n;
        Ok((CpuStorage::F32(out), Shape::from(shape)))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.of_candle("CUDA")?.cuda_fwd(x, layout)
    }

    fn metal_fwd(&self, x: &MetalStorage, layout: &Layout) -> Result<(MetalStorage, Shape)> {
        self.of_candle("Metal")?.metal_fwd(x, layout)
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let all = gradient.dim(D::Minus1)?;
        let rows = gradient.detach().contiguous()?.reshape(((), all))?;
        let mut sum: Option<Tensor> = None;
        let mut first = 0;
        for weight in &self.0 {
            let [n, k] = weight.dims();
            let part = match weight.0.panels() {
                Some(panels) => {
                    let m = rows.dims()[0];
                    let product =
                        |rows: &[f32]| float_gradient(panels, rows.get(first..).unwrap_or_default(), all, m);
                    let made = with_elements(&to_dtype(&rows, DType::F32)?, product)?;
                    to_dtype(&Tensor::from_vec(made, (m, k), &Device::Cpu)?, x.dtype())?
                }
                None => rows.narrow(1, first, n)?.matmul(&weight.dequantize()?.to_dtype(x.dtype())?)?,
            };
            sum = Some(match sum {
                Some(sum) => (sum + part)?,
                None => part,
            });
            first += n;
        }
        sum.map(|sum| sum.reshape(x.shape())).transpose()
    }
}
