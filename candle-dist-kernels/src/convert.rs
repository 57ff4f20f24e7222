//! Conversions between dtypes.
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};
use candle_dist_base::{Fresh, edges, empty};
use half::{bf16, f16};

use super::element::Element;
use super::rows::new_by_blocks;

/// Returns whether candle converts tensors on a device from one dtype to the other.
///
/// candle 0.11.1 asks for kernels of 8-bit floats by names that they do not have.
pub fn converts(from: DType, to: DType, device: &Device) -> bool {
    from == to || device.is_cpu() || (from != DType::F8E4M3 && to != DType::F8E4M3)
}

/// Converts a tensor to another dtype, as `Tensor::to_dtype` does.
///
/// candle's conversion of 8-bit floats to f64 calls itself without end, so they pass through f32, which holds each of
/// them exactly. So does a tracked f64 that becomes an 8-bit float, whose gradient takes the way back.
///
/// # Errors
/// If candle has no such conversion.
pub fn convert(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if !converts(x.dtype(), dtype, x.device()) {
        bail!(
            "{:?} to {dtype:?} on {:?}: not supported by candle; convert on the host",
            x.dtype(),
            x.device()
        );
    }
    match (x.dtype(), dtype) {
        (DType::F8E4M3, DType::F64) => x.to_dtype(DType::F32)?.to_dtype(DType::F64),
        (DType::F64, DType::F8E4M3) if x.track_op() => x.to_dtype(DType::F32)?.to_dtype(DType::F8E4M3),
        _ => empty::compute(x, |x| to_dtype(x, dtype)),
    }
}

/// Like [`Tensor::to_dtype`], on all threads. The node of the result does not hold `x`.
pub(super) fn to_dtype(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let from = x.dtype();
    // candle launches a kernel without blocks for no elements.
    let is_nothing = x.elem_count() == 0 && !x.device().is_cpu();
    if from == dtype || is_nothing {
        return x.to_dtype(dtype);
    }
    if !edges::has_ticket(&[x]) {
        return match x.device().is_cpu() && !x.track_op() {
            true => x.apply_op1_no_bwd(&Conversion(dtype)),
            false => x.to_dtype(dtype),
        };
    }
    let storage = {
        let (s, l) = x.storage_and_layout();
        match &*s {
            Storage::Cpu(s) => Storage::Cpu(converted(s, l, dtype)?),
            Storage::Cuda(s) => Storage::Cuda(s.to_dtype(l, dtype)?),
            Storage::Metal(_) => bail!("to_dtype: expected a tensor on the CPU or on a CUDA device"),
        }
    };
    let made = Fresh { storage, shape: x.shape().clone() };
    edges::record("to_dtype", &[x], made, move |grad| Ok([Some(to_dtype(grad, from)?), None, None]))
}

/// The conversion to a dtype, without a gradient.
struct Conversion(DType);

impl CustomOp1 for Conversion {
    fn name(&self) -> &'static str {
        "to_dtype"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((converted(s, l, self.0)?, l.shape().clone()))
    }
}

/// Returns the elements in another dtype, contiguous: by this rank's threads between f32 and 16 bits, else by candle.
pub(super) fn converted(storage: &CpuStorage, layout: &Layout, dtype: DType) -> Result<CpuStorage> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        return storage.to_dtype(layout, dtype);
    };
    match (storage, dtype) {
        (CpuStorage::F32(from), DType::BF16) => Ok(stored(&from[start..end], <bf16 as Element>::store)),
        (CpuStorage::F32(from), DType::F16) => Ok(stored(&from[start..end], <f16 as Element>::store)),
        (CpuStorage::BF16(from), DType::F32) => Ok(stored(&from[start..end], Element::load)),
        (CpuStorage::F16(from), DType::F32) => Ok(stored(&from[start..end], Element::load)),
        _ => storage.to_dtype(layout, dtype),
    }
}

fn stored<A: Copy + Sync, B: WithDType>(from: &[A], convert: impl Fn(A) -> B + Sync) -> CpuStorage {
    let (out, _) = new_by_blocks(
        from.len(),
        1,
        1,
        #[inline(always)]
        |first, out: &mut [B]| {
            out.iter_mut().zip(&from[first..]).for_each(|(out, &from)| *out = convert(from));
        },
    );
    B::to_cpu_storage_owned(out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn floats_of_8_bits_become_floats_of_64_with_their_gradient() {
        let x = Tensor::new(&[0f32, -0.25, 1.5, 448.0, 0.001953125], &Device::Cpu).unwrap();
        let var = Var::from_tensor(&x.to_dtype(DType::F8E4M3).unwrap()).unwrap();
        let y = convert(&var, DType::F64).unwrap();
        assert_eq!(y.to_vec1::<f64>().unwrap(), [0.0, -0.25, 1.5, 448.0, 0.001953125]);
        let grads = (&y * 2.0).unwrap().sum_all().unwrap().backward().unwrap();
        let grad = grads.get(&var).unwrap().to_dtype(DType::F32).unwrap();
        assert_eq!(grad.to_vec1::<f32>().unwrap(), [2.0; 5]);
    }

    #[test]
    fn the_gradient_of_floats_of_64_bits_that_become_floats_of_8_ends() {
        let var = Var::new(&[0f64, -0.25, 1.5], &Device::Cpu).unwrap();
        let y = convert(&var, DType::F8E4M3).unwrap().to_dtype(DType::F32).unwrap();
        assert_eq!(y.to_vec1::<f32>().unwrap(), [0.0, -0.25, 1.5]);
        let grads = (&y * 2.0).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(grads.get(&var).unwrap().to_vec1::<f64>().unwrap(), [2.0; 3]);
    }

    #[test]
    fn other_conversions_are_those_of_candle() {
        let x = Tensor::new(&[1.7f32, -2.0], &Device::Cpu).unwrap();
        for dtype in [DType::F64, DType::BF16, DType::I64, DType::F8E4M3] {
            let [got, want] =
                [convert(&x, dtype), x.to_dtype(dtype)].map(|y| y.unwrap().to_dtype(DType::F32).unwrap());
            assert_eq!(got.to_vec1::<f32>().unwrap(), want.to_vec1::<f32>().unwrap(), "{dtype:?}");
        }
    }

    /// A converted tensor that two ops use, made of a result of this crate.
    #[test]
    fn gradients_of_conversions_have_the_bits_of_candle() {
        let values: Vec<f64> = (0..300).map(|i| ((i * 7919 % 1000) as f64 - 500.0) / 37.0).collect();
        for (from, to) in [
            (DType::F32, DType::BF16),
            (DType::BF16, DType::F32),
            (DType::F16, DType::F32),
            (DType::F32, DType::F64),
            (DType::F64, DType::F16),
        ] {
            let x = Tensor::new(&values[..], &Device::Cpu).unwrap().to_dtype(from).unwrap();
            let x = Var::from_tensor(&x.reshape((20, 15)).unwrap()).unwrap();
            let run = |convert: &dyn Fn(&Tensor, DType) -> Result<Tensor>| {
                let made = convert(&crate::add(&x, &x).unwrap(), to).unwrap();
                let wide = convert(&made.t().unwrap(), DType::F64).unwrap();
                let loss = (wide.sqr().unwrap() * 0.125).unwrap().sum_all().unwrap();
                let more = convert(&made, DType::F64).unwrap().sum_all().unwrap();
                let grads = (loss + more).unwrap().backward().unwrap();
                let elements =
                    |x: &Tensor| x.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>();
                [elements(&wide).unwrap(), elements(grads.get(&x).unwrap()).unwrap()]
            };
            assert_eq!(run(&convert), run(&|x, dtype| x.to_dtype(dtype)), "{from:?} to {to:?}");
        }
    }
}
