//! How values are cut and joined.
use super::{CustomReducer, DEFAULT_CHUNK_DIM, LossReducer};
use crate::value::{Children, containers, entries, items, write_list, write_map, write_tuple};
use crate::{Error, Result, Value, ValuePath};
use std::collections::BTreeMap;
use std::fmt;

/// Cuts a tensor into chunks along a dim, and joins them along it; negative dims count from the end.
///
/// ```
/// use candle_pipe::microbatch::TensorChunkSpec;
///
/// assert_eq!(TensorChunkSpec(-1).to_string(), "TensorChunkSpec(-1)");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorChunkSpec(pub i64);

/// How a value is cut into microbatches, or joined from their results: one spec for each value, in the same structure.
///
/// A spec at the position of a container applies to all values in it. There, a [`TensorChunkSpec`] cuts the tensors and
/// passes plain values to every chunk. Convert from specs of leaves, and from tuples, vectors, arrays and maps of them,
/// by `into()`.
///
/// ```
/// use candle_pipe::microbatch::{ChunkSpec, LossReducer, Replicate, TensorChunkSpec};
///
/// let spec = ChunkSpec::from((TensorChunkSpec(0), [Replicate, Replicate], LossReducer::sum_reducer()));
/// assert_eq!(spec.to_string(), "(TensorChunkSpec(0), [Replicate, Replicate], LossReducer(sum))");
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ChunkSpec {
    /// Tensors are cut and joined along a dim.
    Split(TensorChunkSpec),
    /// Every chunk gets the same value, and must have the same when chunks are joined.
    Replicate,
    /// The results of the chunks are folded; only for joining.
    Reduce(CustomReducer),
    /// The chunks' losses are reduced to that of the batch; only for joining.
    Loss(LossReducer),
    /// One spec for each value of a list or tuple.
    List(Vec<ChunkSpec>),
    /// One spec for each value of a tuple or list.
    Tuple(Vec<ChunkSpec>),
    /// One spec for each name of a map.
    Map(KwargsSpec),
}

pub use ChunkSpec::Replicate;

/// One spec for each argument by name.
pub type KwargsSpec = BTreeMap<String, ChunkSpec>;

containers!(ChunkSpec);

impl TensorChunkSpec {
    /// Creates specs of positional arguments from dims, nested as the arguments are.
    ///
    /// # Errors
    /// [`Error::Microbatches`] if a value in it is not an integer.
    ///
    /// ```
    /// use candle_pipe::microbatch::{ChunkSpec, TensorChunkSpec};
    ///
    /// let specs = TensorChunkSpec::from_tuple((0, (1, 2), [0]))?;
    /// let text = "[TensorChunkSpec(0), (TensorChunkSpec(1), TensorChunkSpec(2)), [TensorChunkSpec(0)]]";
    /// assert_eq!(ChunkSpec::List(specs).to_string(), text);
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    pub fn from_tuple(dims: impl Into<Value>) -> Result<Vec<ChunkSpec>> {
        match of_dims(&ValuePath::new("from_tuple"), &dims.into())? {
            ChunkSpec::List(specs) | ChunkSpec::Tuple(specs) => Ok(specs),
            other => Err(Error::Microbatches(format!("from_tuple expects a tuple of dims, got {other}"))),
        }
    }

    /// Creates specs of arguments by name from dims, nested as the arguments are.
    ///
    /// # Errors
    /// [`Error::Microbatches`] if a value in it is not an integer.
    ///
    /// ```
    /// use candle_pipe::microbatch::TensorChunkSpec;
    /// use std::collections::BTreeMap;
    ///
    /// let specs = TensorChunkSpec::from_dict(BTreeMap::from([("ids", 0), ("mask", 1)]))?;
    /// assert_eq!(specs["mask"].to_string(), "TensorChunkSpec(1)");
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    pub fn from_dict(dims: impl Into<Value>) -> Result<KwargsSpec> {
        match of_dims(&ValuePath::new("from_dict"), &dims.into())? {
            ChunkSpec::Map(specs) => Ok(specs),
            other => Err(Error::Microbatches(format!("from_dict expects a map of dims, got {other}"))),
        }
    }

    /// Returns the dim counted from the front, for a tensor with `rank` dims; `None` if it has no such dim.
    pub(super) fn resolve(self, rank: usize) -> Option<usize> {
        let dim = if self.0 < 0 { i64::try_from(rank).ok()?.checked_add(self.0)? } else { self.0 };
        usize::try_from(dim).ok().filter(|&dim| dim < rank)
    }
}

fn of_dims(path: &ValuePath, dims: &Value) -> Result<ChunkSpec> {
    Ok(match dims {
        Value::Int(dim) => TensorChunkSpec(*dim).into(),
        Value::List(list) | Value::Tuple(list) => {
            let specs = list
                .iter()
                .enumerate()
                .map(|(i, dims)| of_dims(&path.index(i), dims))
                .collect::<Result<_>>()?;
            if matches!(dims, Value::List(_)) { ChunkSpec::List(specs) } else { ChunkSpec::Tuple(specs) }
        }
        Value::Map(map) => {
            let specs = map.iter().map(|(key, dims)| Ok((key.clone(), of_dims(&path.key(key), dims)?)));
            ChunkSpec::Map(specs.collect::<Result<_>>()?)
        }
        other => {
            return Err(Error::Microbatches(format!(
                "{path}: dims are whole numbers, this is {}",
                other.kind()
            )));
        }
    })
}

impl ChunkSpec {
    /// The default spec.
    pub(super) const DEFAULT: Self = Self::Split(TensorChunkSpec(DEFAULT_CHUNK_DIM));

    /// Returns the specs in this container; `None` for a leaf.
    pub(crate) fn children(&self) -> Option<Children<'_, Self>> {
        match self {
            Self::List(specs) | Self::Tuple(specs) => Some(items(specs)),
            Self::Map(specs) => Some(entries(specs)),
            _ => None,
        }
    }
}

impl From<TensorChunkSpec> for ChunkSpec {
    fn from(spec: TensorChunkSpec) -> Self {
        Self::Split(spec)
    }
}

impl From<CustomReducer> for ChunkSpec {
    fn from(reducer: CustomReducer) -> Self {
        Self::Reduce(reducer)
    }
}

impl From<LossReducer> for ChunkSpec {
    fn from(reducer: LossReducer) -> Self {
        Self::Loss(reducer)
    }
}

impl fmt::Display for TensorChunkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorChunkSpec({})", self.0)
    }
}

impl fmt::Display for ChunkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Split(spec) => write!(f, "{spec}"),
            Self::Replicate => f.write_str("Replicate"),
            Self::Reduce(_) => f.write_str("CustomReducer"),
            Self::Loss(reducer) => write!(f, "{reducer}"),
            Self::List(specs) => write_list(f, specs),
            Self::Tuple(specs) => write_tuple(f, specs),
            Self::Map(specs) => write_map(f, specs),
        }
    }
}
