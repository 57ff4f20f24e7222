//! Conversions between dtypes.
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_dist_base::{edges, empty};

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
        _ => empty::compute(x, |x| edges::to_dtype(x, dtype)),
    }
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
