//! Arguments by position and by name, in trees, and plain values.
use candle_core::Tensor;
use candle_dist::TensorTree;
use itertools::Itertools;
use std::any::{Any, type_name};
use std::fmt;
use std::ops::Index;
use std::sync::Arc;

/// The arguments of a call: tensors by position or name, and plain values by name.
///
/// A name with dots is a path in a tree: [`under`](Self::under) returns a branch of it.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use test_utils::Arguments;
///
/// let x = Tensor::ones(3, DType::F32, &Device::Cpu)?;
/// let norm = Arguments::new(&[]).tensor("weight", &x).tensor("bias", &x);
/// let arguments = Arguments::new(&[x]).branch("norm", norm).value("eps", 0.1).value("dim", 2usize);
/// assert_eq!(arguments[0].dims(), arguments.under("norm")["bias"].dims());
/// assert_eq!((arguments.number("eps"), *arguments.get_value::<usize>("dim")), (0.1, 2));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Arguments<T> {
    tensors: Vec<(String, T)>,
    values: Vec<(String, PlainValue)>,
}

/// A value that is no tensor.
#[derive(Clone)]
pub(super) struct PlainValue {
    value: Arc<dyn Any + Send + Sync>,
    type_name: &'static str,
    pub(super) shown: String,
}

impl PlainValue {
    pub(super) fn new<V: fmt::Debug + Send + Sync + 'static>(value: V) -> Self {
        let shown = format!("{value:?}");
        Self { value: Arc::new(value), type_name: type_name::<V>(), shown }
    }
}

impl fmt::Debug for PlainValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl<T: Clone> Arguments<T> {
    /// Creates arguments by position.
    pub fn new(tensors: &[T]) -> Self {
        Self {
            tensors: tensors.iter().map(|tensor| (String::new(), tensor.clone())).collect(),
            values: Vec::new(),
        }
    }

    pub(super) fn of_parts(tensors: Vec<(String, T)>, values: Vec<(String, PlainValue)>) -> Self {
        Self { tensors, values }
    }

    /// Adds a tensor by name.
    pub fn tensor(mut self, name: &str, tensor: &T) -> Self {
        self.tensors.push((name.to_string(), tensor.clone()));
        self
    }

    /// Adds a plain value by name.
    pub fn value<V: fmt::Debug + Send + Sync + 'static>(mut self, name: &str, value: V) -> Self {
        self.values.push((name.to_string(), PlainValue::new(value)));
        self
    }

    /// Adds the arguments of a branch, with names that begin with its own.
    pub fn branch(mut self, name: &str, branch: Self) -> Self {
        let of_place = |(at, (of, tensor)): (usize, (String, T))| match &*of {
            "" => (format!("{name}.{at}"), tensor),
            of => (format!("{name}.{of}"), tensor),
        };
        self.tensors.extend(branch.tensors.into_iter().enumerate().map(of_place));
        self.values.extend(branch.values.into_iter().map(|(of, value)| (format!("{name}.{of}"), value)));
        self
    }

    /// Returns the plain number with this name.
    ///
    /// # Panics
    /// If there is none.
    pub fn number(&self, name: &str) -> f64 {
        *self.get_value(name)
    }

    /// Returns the plain value with this name.
    ///
    /// # Panics
    /// If there is none, or it has another type.
    pub fn get_value<V: 'static>(&self, name: &str) -> &V {
        let known = || self.values.iter().map(|(name, _)| name).join(", ");
        let Some((_, found)) = self.values.iter().find(|(of, _)| of == name) else {
            panic!("no value {name:?} among the arguments {}", known())
        };
        let other = || panic!("the value {name:?} is of {}, not of {}", found.type_name, type_name::<V>());
        found.value.downcast_ref().unwrap_or_else(other)
    }

    /// Returns the tensor with this name, if there is one.
    pub fn get(&self, name: &str) -> Option<&T> {
        self.tensors.iter().find(|(of, _)| of == name).map(|(_, tensor)| tensor)
    }

    /// Returns the branch of the tree under a name: `blocks.0.weight` is `weight` under `blocks.0`. Plain values that are not
    /// in another branch are kept.
    pub fn under(&self, name: &str) -> Self {
        let rest = |of: &String| of.strip_prefix(name)?.strip_prefix('.').map(str::to_string);
        let tensors =
            self.tensors.iter().filter_map(|(of, tensor)| Some((rest(of)?, tensor.clone()))).collect();
        let own = self.values.iter().filter_map(|(of, value)| Some((rest(of)?, value.clone())));
        let outer = self.values.iter().filter(|(of, _)| rest(of).is_none()).cloned();
        Self { tensors, values: own.chain(outer).collect() }
    }

    /// Returns all tensors in order.
    pub fn tensors(&self) -> Vec<T> {
        self.tensors.iter().map(|(_, tensor)| tensor.clone()).collect()
    }

    /// Returns the same arguments with other tensors, in their order.
    pub(crate) fn with_tensors<U>(&self, tensors: impl IntoIterator<Item = U>) -> Arguments<U> {
        let names = self.tensors.iter().map(|(name, _)| name.clone());
        Arguments { tensors: names.zip(tensors).collect(), values: self.values.clone() }
    }
}

impl Arguments<Tensor> {
    /// Adds the tensors of a tree: `name.0`, `name.1` and so on, in its order.
    pub fn tree(self, name: &str, tree: &impl TensorTree) -> Self {
        self.branch(name, Arguments::new(&tree.flatten_tensors()))
    }
}

impl<T: Clone> From<&[T]> for Arguments<T> {
    fn from(tensors: &[T]) -> Self {
        Self::new(tensors)
    }
}

impl<T: Clone, const N: usize> From<&[T; N]> for Arguments<T> {
    fn from(tensors: &[T; N]) -> Self {
        Self::new(tensors)
    }
}

impl<T: Clone> From<&Vec<T>> for Arguments<T> {
    fn from(tensors: &Vec<T>) -> Self {
        Self::new(tensors)
    }
}

impl<T> Index<usize> for Arguments<T> {
    type Output = T;

    fn index(&self, at: usize) -> &T {
        &self.tensors[at].1
    }
}

impl<T: Clone> Index<&str> for Arguments<T> {
    type Output = T;

    fn index(&self, name: &str) -> &T {
        let known = || self.tensors.iter().map(|(name, _)| name).join(", ");
        self.get(name).unwrap_or_else(|| panic!("no tensor {name:?} among the arguments {}", known()))
    }
}
