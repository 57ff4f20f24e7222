//! Packs positional and named arguments into one list of tensors.
use crate::{Error, Result, TensorTree};
use candle_core::Tensor;
use itertools::Itertools;

/// Arguments by position and by name, packed into one flat list of tensors.
///
/// Use it to pass arguments through something that accepts a plain list: a graph node, a recomputed block, a
/// connection. [`into_parts`](Self::into_parts) returns the list with its [`PackedKeys`], and
/// [`from_parts`](Self::from_parts) joins them again. It is a [`TensorTree`], so you can cast or move all arguments at
/// once.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::{Packed, TensorTree};
///
/// let x = Tensor::ones(4, DType::F32, &Device::Cpu)?;
/// let (args, mask) = ((x.clone(), x.clone()), Some(x));
///
/// let (keys, tensors) = Packed::new(&args).with("mask", &mask)?.into_parts();
/// assert_eq!((tensors.len(), keys.names().collect::<Vec<_>>()), (3, vec!["mask"]));
///
/// let packed = Packed::from_parts(keys, tensors)?.cast_floats(DType::F64)?;
/// let (a, b) = packed.args(&args)?;
/// let mask = packed.get("mask", &mask)?.expect("it was given");
/// assert_eq!([a.dtype(), b.dtype(), mask.dtype()], [DType::F64; 3]);
/// # Ok::<(), candle_dist::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Packed {
    keys: PackedKeys,
    tensors: Vec<Tensor>,
}

/// The number of tensors of the positional arguments and of each named argument in a packed list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedKeys {
    positional: usize,
    named: Vec<(String, usize)>,
}

impl PackedKeys {
    /// Returns the names, in the order in which they were added.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.named.iter().map(|(name, _)| name.as_str())
    }

    /// Returns the number of tensors of all arguments.
    pub fn tensor_count(&self) -> usize {
        self.positional + self.named.iter().map(|(_, count)| count).sum::<usize>()
    }

    /// Returns the first argument that a list of `given` tensors does not cover.
    fn first_missing(&self, given: usize) -> Option<String> {
        if given < self.positional {
            return Some(format!("tensor {given} of the positional arguments"));
        }
        let mut end = self.positional;
        let missing = self.named.iter().find(|(_, count)| {
            end += count;
            end > given
        });
        missing.map(|(name, _)| format!("argument {name:?}"))
    }
}

impl Packed {
    /// Packs positional arguments, usually a tuple.
    pub fn new(args: &impl TensorTree) -> Self {
        let tensors = args.flatten_tensors();
        Self { keys: PackedKeys { positional: tensors.len(), named: Vec::new() }, tensors }
    }

    /// Adds an argument by name. Each name may be used once.
    pub fn with(mut self, name: &str, value: &impl TensorTree) -> Result<Self> {
        if self.keys.names().contains(&name) {
            return Err(invalid("Packed::with", format!("argument {name:?} is given twice")));
        }
        let before = self.tensors.len();
        self.tensors.extend(value.flatten_tensors());
        self.keys.named.push((name.to_string(), self.tensors.len() - before));
        Ok(self)
    }

    /// Returns the names with their numbers of tensors.
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
    /// [`Error::Invalid`] if the list does not have as many tensors as `keys` counts. It names the first missing
    /// argument.
    pub fn from_parts(keys: PackedKeys, tensors: Vec<Tensor>) -> Result<Self> {
        let (given, needed) = (tensors.len(), keys.tensor_count());
        if given == needed {
            return Ok(Self { keys, tensors });
        }
        let missing = keys.first_missing(given).map_or(String::new(), |what| format!("; {what} is missing"));
        Err(invalid("Packed::from_parts", format!("{given} tensors for arguments of {needed}{missing}")))
    }

    /// Returns the positional arguments, in the structure of `like`.
    pub fn args<A: TensorTree>(&self, like: &A) -> Result<A> {
        restore("the positional arguments", &self.tensors[..self.keys.positional], like)
    }

    /// Returns the argument with this name, in the structure of `like`.
    pub fn get<T: TensorTree>(&self, name: &str, like: &T) -> Result<T> {
        let mut start = self.keys.positional;
        for (known, count) in &self.keys.named {
            if known == name {
                return restore(&format!("argument {name:?}"), &self.tensors[start..start + count], like);
            }
            start += count;
        }
        let known = self.keys.names().map(|name| format!("{name:?}")).join(", ");
        Err(invalid("Packed::get", format!("no argument {name:?}; the names are [{known}]")))
    }
}

impl TensorTree for Packed {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.tensors.visit(f);
    }

    fn rebuild<E>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        Ok(Self { keys: self.keys.clone(), tensors: self.tensors.rebuild(f)? })
    }
}

fn restore<T: TensorTree>(what: &str, tensors: &[Tensor], like: &T) -> Result<T> {
    let (packed, wanted) = (tensors.len(), like.tensors().len());
    if packed != wanted {
        return Err(invalid("Packed", format!("{what}: {packed} tensors are packed, the structure holds {wanted}")));
    }
    like.unflatten_tensors(tensors.iter().cloned())
}

fn invalid(op: &'static str, reason: String) -> Error {
    Error::Invalid { op, reason }
}
