//! Bounds of bags, and checks of their weights.
use super::ArgumentError;
use crate::kernels::BagMode;
use candle_core::{DType, Tensor};

/// The start of each bag in the ids, and the end of the last one.
pub(crate) struct BagOffsets(pub(crate) Vec<usize>);

impl BagOffsets {
    /// Returns the number of bags for ids and offsets of these shapes, or the error in them.
    pub(crate) fn count(
        ids: &[usize],
        offsets: Option<(&[usize], DType)>,
        include_last_offset: bool,
    ) -> Result<usize, ArgumentError> {
        match (ids, offsets) {
            (&[bags, _], None) if !include_last_offset => Ok(bags),
            (_, None) if include_last_offset => Err("include_last_offset needs offsets".into()),
            ([_], None) => Err("ids [n] need offsets, which say where bags begin".into()),
            ([_], Some((&[n], DType::U8 | DType::U32 | DType::I64))) => {
                match n.checked_sub(usize::from(include_last_offset)) {
                    Some(bags) => Ok(bags),
                    None => Err(
                        "offsets without elements; with include_last_offset the last is the number of ids"
                            .into(),
                    ),
                }
            }
            ([_], Some((dims, dtype))) => {
                Err(format!("offsets {}{dims:?}: expected [bags] of u8, u32 or i64", dtype.as_str()))
            }
            ([_, _], Some(_)) => Err(format!("ids {ids:?} are bags already; give no offsets, or ids [n]")),
            (dims, _) => Err(format!("ids {dims:?}: expected [bags, n], or [n] and offsets")),
        }
    }

    /// Returns the bounds for these ids and offsets, or the error in them.
    pub(crate) fn of(
        ids: &Tensor,
        offsets: Option<&Tensor>,
        include_last_offset: bool,
    ) -> Result<Self, ArgumentError> {
        let shape = offsets.map(|offsets| (offsets.dims(), offsets.dtype()));
        Self::count(ids.dims(), shape, include_last_offset)?;
        match offsets {
            Some(offsets) => Self::between(offsets, ids.elem_count(), include_last_offset),
            None => Ok(Self::even(ids.dims())),
        }
    }

    /// Returns the bounds of the bags `[bags, n]`.
    pub(crate) fn even(dims: &[usize]) -> Self {
        Self((0..=dims[0]).map(|bag| bag * dims[1]).collect())
    }

    /// Returns the bounds for offsets of a valid shape, where `ids` is the number of ids.
    pub(crate) fn between(
        offsets: &Tensor,
        ids: usize,
        include_last_offset: bool,
    ) -> Result<Self, ArgumentError> {
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
            return Err(format!(
                "bag {bag} begins at {from} and ends at {to}; offsets must rise up to {ids} ids"
            ));
        }
        if bounds[0] != 0 {
            return Err(format!(
                "the first bag begins at {}, which leaves ids out; it must begin at 0",
                bounds[0]
            ));
        }
        Ok(Self(bounds.into_iter().map(|bound| bound as usize).collect()))
    }
}

/// Refuses weights that do not fit the ids, the mode or the table's dtype.
pub(crate) fn check_weights(
    (ids, dtype): (&[usize], DType),
    weights: Option<(&[usize], DType)>,
    mode: BagMode,
) -> Result<(), ArgumentError> {
    let Some((dims, got)) = weights else { return Ok(()) };
    if mode != BagMode::Sum {
        return Err(format!("per_sample_weights in mode {mode:?}; they are for BagMode::Sum"));
    }
    if dims != ids || got != dtype {
        let (got, want) = (got.as_str(), dtype.as_str());
        return Err(format!("per_sample_weights {got}{dims:?}: expected {want}{ids:?}, one for each id"));
    }
    Ok(())
}
