//! Options of lookups.
use crate::kernels::BagMode;

/// Options of [`ShardedTensor::embedding`](crate::ShardedTensor::embedding); PyTorch's arguments. Start
/// from the default, and set what differs.
///
/// ```
/// use candle_shard::EmbeddingOptions;
///
/// let options = EmbeddingOptions::default().max_norm(1.0);
/// assert_eq!((options.padding_idx, options.norm_type), (None, 2.0));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct EmbeddingOptions {
    /// A row without gradient, counted from the end if negative; bags skip it.
    pub padding_idx: Option<i64>,
    /// Rows with a larger norm are scaled to this norm *in the table*, before the lookup.
    pub max_norm: Option<f64>,
    /// The p of the norm: any number, or an infinity for the largest or smallest absolute value.
    pub norm_type: f64,
}

impl Default for EmbeddingOptions {
    fn default() -> Self {
        Self { padding_idx: None, max_norm: None, norm_type: 2.0 }
    }
}

/// Options of [`ShardedTensor::embedding_bag`](crate::ShardedTensor::embedding_bag); PyTorch's arguments.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct EmbeddingBagOptions {
    /// How the rows of a bag are reduced to one.
    pub mode: BagMode,
    /// Whether the last offset is the end of the last bag instead of the start of another one.
    pub include_last_offset: bool,
    /// How the rows are looked up.
    pub lookup: EmbeddingOptions,
}

impl EmbeddingBagOptions {
    /// Sets how the rows of a bag are reduced to one.
    pub fn mode(self, mode: BagMode) -> Self {
        Self { mode, ..self }
    }

    /// Sets whether the last offset is the end of the last bag.
    pub fn include_last_offset(self, include_last_offset: bool) -> Self {
        Self { include_last_offset, ..self }
    }

    /// Sets how the rows are looked up.
    pub fn lookup(self, lookup: EmbeddingOptions) -> Self {
        Self { lookup, ..self }
    }
}

/// Options that fit a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LookupOptions {
    pub(crate) padding: Option<u32>,
    pub(crate) renorm: Option<Renorm>,
}

/// The limit for the norm of rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Renorm {
    pub(crate) max_norm: f64,
    pub(crate) norm_type: f64,
}

impl EmbeddingOptions {
    /// Sets a row without gradient, counted from the end if negative.
    pub fn padding_idx(self, padding_idx: impl Into<Option<i64>>) -> Self {
        Self { padding_idx: padding_idx.into(), ..self }
    }

    /// Sets the norm to which longer rows are scaled in the table.
    pub fn max_norm(self, max_norm: impl Into<Option<f64>>) -> Self {
        Self { max_norm: max_norm.into(), ..self }
    }

    /// Sets the p of the norm.
    pub fn norm_type(self, norm_type: f64) -> Self {
        Self { norm_type, ..self }
    }

    /// Checks the options for a table with `rows` rows; returns the error in them.
    pub(crate) fn checked(&self, rows: usize) -> Result<LookupOptions, String> {
        let place = |idx: i64| {
            let counted = if idx < 0 { idx.checked_add_unsigned(rows as u64) } else { Some(idx) };
            let place = counted.and_then(|idx| u32::try_from(idx).ok()).filter(|&idx| (idx as usize) < rows);
            place.ok_or_else(|| {
                let mend = match rows.checked_sub(1) {
                    Some(last) => format!("give one from -{rows} to {last}"),
                    None => "give None".into(),
                };
                format!("padding_idx {idx} is out of range for a table of {rows} rows; {mend}")
            })
        };
        if self.norm_type.is_nan() {
            return Err("norm_type is not a number; give 2 for the usual length".into());
        }
        let renorm = |max_norm: f64| match max_norm > 0.0 {
            true => Ok(Renorm { max_norm, norm_type: self.norm_type }),
            false => Err(format!("max_norm {max_norm} must be larger than zero; give None for no limit")),
        };
        Ok(LookupOptions {
            padding: self.padding_idx.map(place).transpose()?,
            renorm: self.max_norm.map(renorm).transpose()?,
        })
    }
}
