//! The values of a pipeline: tensors and small plain values in nested containers.
mod convert;
mod listing;
mod path;
#[cfg(feature = "shard")]
mod sharded;
mod walk;

pub(crate) use convert::containers;
pub(crate) use listing::{write_list, write_map, write_tuple};
pub use path::ValuePath;
pub(crate) use path::{Children, entries, items};

use crate::{Error, Result};
use candle_core::Tensor;
use candle_dist::TensorTree;
use candle_dist::bits::same_bits;
use itertools::Itertools;
use std::collections::BTreeMap;
use std::fmt;

/// Arguments by name.
pub type Kwargs = BTreeMap<String, Value>;

/// A tensor, a plain value, or a container of values: an input or output of a model.
///
/// Convert with `into()` from tensors, sharded ones, numbers, `bool`, text, `()` and `Option`, and from tuples, vectors,
/// arrays and maps of those; with [`of_tree`](Self::of_tree) from a structure of your own. It is a
/// [`TensorTree`](candle_dist::TensorTree): it can be cast, moved and flattened as a whole.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_pipe::Value;
///
/// let x = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
/// let value = Value::from((x, vec![Some(1), None], "train"));
/// assert_eq!(value.to_string(), r#"(f32[2, 3], [1, none], "train")"#);
/// assert_eq!(value.at(0)?.tensor()?.dims(), [2, 3]);
/// assert_eq!(value.at(2)?.int().unwrap_err().to_string(), r#"value: expected an int, got a text: "train""#);
/// # Ok::<(), candle_pipe::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Value {
    /// A tensor, with its graph.
    Tensor(Tensor),
    /// A tensor distributed over a mesh within its stage, with its graph.
    #[cfg(feature = "shard")]
    DTensor(candle_shard::DTensor),
    /// An integer.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// A text.
    Text(String),
    /// An absent optional value.
    None,
    /// Any number of values with one meaning.
    List(Vec<Value>),
    /// Values with different meanings, by position.
    Tuple(Vec<Value>),
    /// Values by name, in the names' order.
    Map(Kwargs),
}

/// An accessor: the content of one variant, or an error that names the actual kind.
macro_rules! content {
    ($($doc:literal $name:ident: $variant:ident($pattern:pat => $content:expr) -> $type:ty, $wanted:literal;)*) => {$(
        #[doc = concat!($doc, ", or an [`Error::Value`] that names the actual kind.")]
        pub fn $name(&self) -> Result<$type> {
            match self {
                Self::$variant($pattern) => Ok($content),
                _ => Err(self.other_than($wanted)),
            }
        }
    )*};
}

impl Value {
    content! {
        "The tensor" tensor: Tensor(t => t) -> &Tensor, "a tensor";
        "The whole number" int: Int(n => *n) -> i64, "an int";
        "The number" float: Float(x => *x) -> f64, "a float";
        "The truth" bool: Bool(b => *b) -> bool, "a bool";
        "The text" text: Text(text => text) -> &str, "a text";
        "The values by name" map: Map(map => map) -> &Kwargs, "a map";
    }

    /// Returns the values of a list or tuple, or an [`Error::Value`] that names the actual kind.
    pub fn items(&self) -> Result<&[Self]> {
        match self {
            Self::List(items) | Self::Tuple(items) => Ok(items),
            _ => Err(self.other_than("a list or tuple")),
        }
    }

    /// Returns the value at an index of a list or tuple.
    ///
    /// # Errors
    /// [`Error::Value`] if this is neither, or is shorter.
    pub fn at(&self, index: usize) -> Result<&Self> {
        let items = self.items()?;
        let outside =
            || Error::Value(format!("no place {index} in {self}, which has {} values", items.len()));
        items.get(index).ok_or_else(outside)
    }

    /// Returns the value of a name in a map.
    ///
    /// # Errors
    /// [`Error::Value`] if this is not a map, or has no such name.
    pub fn get(&self, key: &str) -> Result<&Self> {
        let map = self.map()?;
        map.get(key).ok_or_else(|| Error::Value(format!("no {key:?} among [{}]", map.keys().join(", "))))
    }

    /// Creates the list of the tensors of a structure, in the tree's order. [`to_tree`](Self::to_tree) reverses it.
    ///
    /// Use it for the inputs and results of nodes that are structures of your own. Values that are not tensors stay behind.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::TensorTree;
    /// use candle_pipe::Value;
    ///
    /// #[derive(TensorTree)]
    /// struct State {
    ///     hidden: Tensor,
    ///     memory: Vec<Tensor>,
    ///     layers: usize,
    /// }
    ///
    /// let x = Tensor::ones(2, DType::F32, &Device::Cpu)?;
    /// let state = State { hidden: x.clone(), memory: vec![(&x * 2.0)?], layers: 3 };
    /// let value = Value::of_tree(&state);
    /// assert_eq!(value.to_string(), "[f32[2], f32[2]]");
    /// let back = value.to_tree(&state)?;
    /// assert_eq!((back.memory[0].to_vec1::<f32>()?, back.layers), (vec![2.0, 2.0], 3));
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    pub fn of_tree(tree: &impl TensorTree) -> Self {
        Self::List(tree.tensors().into_iter().map(Self::from).collect())
    }

    /// Returns the structure of `like`, with its values that are not tensors, and with the tensors of this value.
    ///
    /// # Errors
    /// [`Error::Value`] if this value holds another number of tensors than `like`.
    pub fn to_tree<T: TensorTree>(&self, like: &T) -> Result<T> {
        let (has, wants) = (self.tensors().len(), like.tensors().len());
        if has != wants {
            return Err(Error::Value(format!("{self} holds {has} tensors, the structure holds {wants}")));
        }
        Ok(like.unflatten_tensors(self.flatten_tensors())?)
    }

    /// Returns the whole tensor: a plain one, or the gathered one of a sharded tensor, for which every rank of its mesh
    /// calls it.
    ///
    /// # Errors
    /// [`Error::Value`] if this is neither; those of communication.
    pub fn full_tensor(&self) -> Result<Tensor> {
        match self {
            Self::Tensor(t) => Ok(t.clone()),
            #[cfg(feature = "shard")]
            Self::DTensor(t) => Ok(t.full_tensor()?),
            _ => Err(self.other_than("a tensor")),
        }
    }

    /// Returns the kind in words: `a tensor`, `an int`, `a list`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Tensor(_) => "a tensor",
            #[cfg(feature = "shard")]
            Self::DTensor(_) => "a sharded tensor",
            Self::Int(_) => "an int",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a bool",
            Self::Text(_) => "a text",
            Self::None => "none",
            Self::List(_) => "a list",
            Self::Tuple(_) => "a tuple",
            Self::Map(_) => "a map",
        }
    }

    /// Returns whether two values have the same structure and the same bits everywhere; a NaN equals itself.
    ///
    /// Tensors must have the same shape and dtype, and may be on different devices. A tensor is not compared with
    /// itself.
    ///
    /// # Errors
    /// If candle cannot read a tensor.
    pub fn same(&self, other: &Self) -> Result<bool> {
        Ok(match (self, other) {
            (Self::Tensor(a), Self::Tensor(b)) => same_bits(a, b)?,
            #[cfg(feature = "shard")]
            (Self::DTensor(a), Self::DTensor(b)) => {
                a.spec() == b.spec() && same_bits(a.to_local(), b.to_local())?
            }
            (Self::Int(a), Self::Int(b)) => a == b,
            (Self::Float(a), Self::Float(b)) => a.to_bits() == b.to_bits(),
            (Self::Bool(a), Self::Bool(b)) => a == b,
            (Self::Text(a), Self::Text(b)) => a == b,
            (Self::None, Self::None) => true,
            (Self::List(a), Self::List(b)) | (Self::Tuple(a), Self::Tuple(b)) => {
                a.len() == b.len() && all_same(a.iter().zip(b))?
            }
            (Self::Map(a), Self::Map(b)) => a.keys().eq(b.keys()) && all_same(a.values().zip(b.values()))?,
            _ => false,
        })
    }

    fn other_than(&self, wanted: &str) -> Error {
        Error::Value(format!("expected {wanted}, got {}: {self}", self.kind()))
    }
}

fn all_same<'a>(mut pairs: impl Iterator<Item = (&'a Value, &'a Value)>) -> Result<bool> {
    pairs.try_fold(true, |same, (a, b)| Ok(same && a.same(b)?))
}

impl fmt::Display for Value {
    /// Prints a listing on one line, with tensors as dtype and shape.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor(t) => write!(f, "{}{:?}", t.dtype().as_str(), t.dims()),
            #[cfg(feature = "shard")]
            Self::DTensor(t) => write!(f, "{}", t.spec()),
            Self::Int(n) => write!(f, "{n}"),
            Self::Float(x) => write!(f, "{x:?}"),
            Self::Bool(b) => write!(f, "{b}"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::None => f.write_str("none"),
            Self::List(items) => write_list(f, items),
            Self::Tuple(items) => write_tuple(f, items),
            Self::Map(map) => write_map(f, map),
        }
    }
}
