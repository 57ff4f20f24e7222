//! Gathers the results of ranks on rank 0.

use candle_core::{Device, Tensor};
use candle_dist::ProcessGroup;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Gathers each rank's value on rank 0, in rank order; every rank calls it.
///
/// Values are sent as JSON, which cannot express NaN and infinities, and may round other numbers: see [`Bits`].
///
/// # Errors
/// Those of the group, and those of JSON.
pub fn gather<T: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    mine: T,
) -> anyhow::Result<Option<Vec<T>>> {
    let is_first = group.rank() == 0;
    let text = if is_first { String::new() } else { serde_json::to_string(&mine)? };
    let texts = group.all_gather_text(&text)?;
    if !is_first {
        return Ok(None);
    }
    let mut all = vec![mine];
    for text in &texts[1..] {
        all.push(serde_json::from_str(text)?);
    }
    Ok(Some(all))
}

/// A tensor of 32-bit floats in a form that JSON keeps exactly.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use examples::launch::Bits;
///
/// let text = serde_json::to_string(&Bits::of(&Tensor::new(&[0.1f32, f32::NAN], &Device::Cpu)?)?)?;
/// let back = serde_json::from_str::<Bits>(&text)?.tensor()?.to_vec1::<f32>()?;
/// assert!(back[0] == 0.1 && back[1].is_nan());
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bits {
    dims: Vec<usize>,
    bits: Vec<u32>,
}

impl Bits {
    /// Returns the values of a tensor.
    ///
    /// # Errors
    /// If it is of another dtype.
    pub fn of(tensor: &Tensor) -> candle_core::Result<Self> {
        let values = tensor.flatten_all()?.to_vec1::<f32>()?;
        Ok(Self { dims: tensor.dims().to_vec(), bits: values.into_iter().map(f32::to_bits).collect() })
    }

    /// Returns the tensor of the values.
    ///
    /// # Errors
    /// If their number does not match the shape.
    pub fn tensor(&self) -> candle_core::Result<Tensor> {
        let values: Vec<f32> = self.bits.iter().copied().map(f32::from_bits).collect();
        Tensor::from_vec(values, self.dims.as_slice(), &Device::Cpu)
    }
}
