//! Packs positional and named arguments into one list of tensors.
use crate::{Error, Result, TensorTree};
use candle_core::{DType, Tensor};
use itertools::Itertools;
use std::any::{Any, type_name};
use std::fmt;
use std::sync::Arc;

/// Arguments by position and by name, packed into one flat list of tensors.
///
/// Use it to pass arguments through something that accepts a plain list: a graph node or a recomputed block.
/// [`into_parts`](Self::into_parts) returns the list with its [`PackedKeys`], which keep the structures and all values
/// that are not tensors. [`from_parts`](Self::from_parts) joins them again. It is a [`TensorTree`], so you can cast or
/// move all arguments at once.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::{PackedArgs, TensorTree};
///
/// let x = Tensor::ones(4, DType::F32, &Device::Cpu)?;
/// let (args, mask) = ((x.clone(), 0.5), Some(x));
///
/// let (keys, tensors) = PackedArgs::new(&args)?.with("mask", &mask)?.into_parts();
/// assert_eq!((tensors.len(), keys.names().collect::<Vec<_>>()), (2, vec!["mask"]));
///
/// let packed = PackedArgs::from_parts(keys, tensors)?.cast_floats(DType::F64)?;
/// let (x, scale): (Tensor, f64) = packed.args()?;
/// let mask: Option<Tensor> = packed.get("mask")?;
/// assert_eq!([x.dtype(), mask.expect("it was given").dtype()], [DType::F64; 2]);
/// assert_eq!(scale, 0.5);
/// # Ok::<(), candle_dist::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PackedArgs {
    keys: PackedKeys,
    tensors: Vec<Tensor>,
}

/// The former name of [`PackedArgs`].
#[deprecated(since = "0.1.0", note = "renamed to PackedArgs")]
pub type Packed = PackedArgs;

/// The number of tensors of the positional arguments and of each named argument, and all values that are not tensors.
#[derive(Debug, Clone)]
pub struct PackedKeys {
    positional: Argument,
    named: Vec<(String, Argument)>,
}

/// One argument without its tensors.
#[derive(Clone)]
struct Argument {
    tensors: usize,
    /// The packed argument, with one-element tensors in place of its own.
    outline: Arc<dyn Any + Send + Sync>,
    type_name: &'static str,
}

impl Argument {
    fn new<T: Packable>(value: &T) -> Result<Self> {
        let mut tensors = 0;
        let outline = value.map_tensors(|tensor| -> Result<Tensor> {
            tensors += 1;
            // The shape stays the same, because structures may check it.
            Ok(Tensor::zeros((), DType::U8, tensor.device())?.broadcast_as(tensor.shape())?)
        })?;
        Ok(Self { tensors, outline: Arc::new(outline), type_name: type_name::<T>() })
    }

    fn restore<T: Packable>(&self, what: &str, tensors: &[Tensor]) -> Result<T> {
        let other = || {
            let (packed, asked) = (self.type_name, type_name::<T>());
            invalid(
                "Packed",
                format!("{what}: packed as {packed}, requested as {asked}; request the packed type"),
            )
        };
        self.outline.downcast_ref::<T>().ok_or_else(other)?.unflatten_tensors(tensors.iter().cloned())
    }
}

impl fmt::Debug for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} tensors", self.type_name, self.tensors)
    }
}

/// A value that can be packed: any [`TensorTree`] that may be stored and sent to other threads.
pub trait Packable: TensorTree + Send + Sync + 'static {}

impl<T: TensorTree + Send + Sync + 'static> Packable for T {}

impl PackedKeys {
    /// Returns the names, in the order in which they were added.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.named.iter().map(|(name, _)| name.as_str())
    }

    /// Returns the number of tensors of all arguments.
    pub fn tensor_count(&self) -> usize {
        self.positional.tensors + self.named.iter().map(|(_, argument)| argument.tensors).sum::<usize>()
    }

    /// Returns the first argument that a list of `given` tensors does not cover.
    fn first_missing(&self, given: usize) -> Option<String> {
        if given < self.positional.tensors {
            return Some(format!("tensor {given} of the positional arguments"));
        }
        let mut end = self.positional.tensors;
        let missing = self.named.iter().find(|(_, argument)| {
            end += argument.tensors;
            end > given
        });
        missing.map(|(name, _)| format!("argument {name:?}"))
    }
}

impl PackedArgs {
    /// Packs positional arguments, usually a tuple.
    ///
    /// # Errors
    /// If candle fails.
    pub fn new<A: Packable>(args: &A) -> Result<Self> {
        Ok(Self {
            keys: PackedKeys { positional: Argument::new(args)?, named: Vec::new() },
            tensors: args.flatten_tensors(),
        })
    }

    /// Adds an argument by name.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the name is already used.
    pub fn with<T: Packable>(mut self, name: &str, value: &T) -> Result<Self> {
        if self.keys.names().contains(&name) {
            return Err(invalid("PackedArgs::with", format!("argument {name:?} is given twice")));
        }
        self.keys.named.push((name.to_string(), Argument::new(value)?));
        self.tensors.extend(value.flatten_tensors());
        Ok(self)
    }

    /// Returns the names and structures.
    pub fn keys(&self) -> &PackedKeys {
        &self.keys
    }

    /// Returns all tensors: those of the positional arguments, then those of each name.
    pub fn as_slice(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Returns the names and the flat list.
    pub fn into_parts(self) -> (PackedKeys, Vec<Tensor>) {
        (self.keys, self.tensors)
    }

    /// Joins names and list again.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the list does not have the number of tensors in `keys`. It names the first missing one.
    pub fn from_parts(keys: PackedKeys, tensors: Vec<Tensor>) -> Result<Self> {
        let (given, needed) = (tensors.len(), keys.tensor_count());
        if given == needed {
            return Ok(Self { keys, tensors });
        }
        let missing = keys.first_missing(given).map_or(String::new(), |what| format!("; {what} is missing"));
        Err(invalid("PackedArgs::from_parts", format!("{given} tensors for arguments of {needed}{missing}")))
    }

    /// Returns the positional arguments in their packed structure, with the current tensors.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they were packed with another type.
    pub fn args<A: Packable>(&self) -> Result<A> {
        let positional = &self.keys.positional;
        positional.restore("the positional arguments", &self.tensors[..positional.tensors])
    }

    /// Returns the argument with this name in its packed structure, with the current tensors.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is none, or if it was packed with another type.
    pub fn get<T: Packable>(&self, name: &str) -> Result<T> {
        let mut start = self.keys.positional.tensors;
        for (known, argument) in &self.keys.named {
            let end = start + argument.tensors;
            if known == name {
                return argument.restore(&format!("argument {name:?}"), &self.tensors[start..end]);
            }
            start = end;
        }
        let known = self.keys.names().map(|name| format!("{name:?}")).join(", ");
        Err(invalid("PackedArgs::get", format!("no argument {name:?}; the names are [{known}]")))
    }
}

impl TensorTree for PackedArgs {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.tensors.visit(f);
    }

    fn rebuild<E: From<Error>>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        Ok(Self { keys: self.keys.clone(), tensors: self.tensors.rebuild(f)? })
    }
}

fn invalid(op: &'static str, reason: String) -> Error {
    Error::Invalid { op, reason }
}
