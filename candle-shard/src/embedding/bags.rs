//! Where bags begin and end, and what weighs their rows.
use super::inputs::Wrong;
use crate::kernels::BagMode;
use candle_core::{DType, Tensor};

/// Where each bag begins in the ids, and where the last one ends.
pub(crate) struct Bounds(pub(crate) Vec<usize>);

impl Bounds {
    /// The bounds that ids and offsets give, or what is wrong with them.
    pub(crate) fn of(ids: &Tensor, offsets: Option<&Tensor>, include_last_offset: bool) -> Result<Self, Wrong> {
        match (ids.dims(), offsets) {
            (&[bags, len], None) if !include_last_offset => Ok(Self((0..=bags).map(|bag| bag * len).collect())),
            ([_], Some(offsets)) => Self::between(offsets, ids.elem_count(), include_last_offset),
            ([_], None) => Err("ids [n] need offsets, which say where bags begin".into()),
            (_, None) if include_last_offset => Err("include_last_offset needs offsets".into()),
            ([_, _], Some(_)) => Err(format!("ids {:?} are bags already; give no offsets, or ids [n]", ids.dims())),
            (dims, _) => Err(format!("ids {dims:?}: want [bags, n], or [n] and offsets")),
        }
    }

    fn between(offsets: &Tensor, ids: usize, include_last_offset: bool) -> Result<Self, Wrong> {
        if !matches!(offsets.dtype(), DType::U8 | DType::U32 | DType::I64) || offsets.rank() != 1 {
            let (dtype, dims) = (offsets.dtype().as_str(), offsets.dims());
            return Err(format!("offsets {dtype}{dims:?}: want [bags] of u8, u32 or i64"));
        }
        let read = offsets.to_dtype(DType::I64).and_then(|offsets| offsets.to_vec1::<i64>());
        let mut bounds = read.map_err(|error| error.to_string())?;
        if include_last_offset && bounds.last() != Some(&(ids as i64)) {
            return Err(format!(
                "the last offset must be the number of ids, {ids}, with include_last_offset; got {:?}",
                bounds.last()
            ));
        }
        if !include_last_offset {
            bounds.push(ids as i64);
        }
        if let Some(bag) = bounds.windows(2).position(|pair| pair[0] > pair[1]) {
            let (from, to) = (bounds[bag], bounds[bag + 1]);
            return Err(format!("bag {bag} begins at {from} and ends at {to}; offsets must rise up to {ids} ids"));
        }
        if bounds[0] != 0 {
            return Err(format!("the first bag begins at {}, which leaves ids out; it must begin at 0", bounds[0]));
        }
        Ok(Self(bounds.into_iter().map(|bound| bound as usize).collect()))
    }
}

/// Refuses weights that do not fit the ids, the mode or the table's dtype.
pub(crate) fn check_weights(ids: &Tensor, weights: Option<&Tensor>, mode: BagMode, dtype: DType) -> Result<(), Wrong> {
    let Some(weights) = weights else { return Ok(()) };
    if mode != BagMode::Sum {
        return Err(format!("per_sample_weights in mode {mode:?}; they are for BagMode::Sum"));
    }
    if weights.dims() != ids.dims() || weights.dtype() != dtype {
        let (got, want) = (weights.dtype().as_str(), dtype.as_str());
        return Err(format!(
            "per_sample_weights {got}{:?}: want {want}{:?}, one for each id",
            weights.dims(),
            ids.dims()
        ));
    }
    Ok(())
}
