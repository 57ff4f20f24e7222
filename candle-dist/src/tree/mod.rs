//! Nested containers of tensors, visited and rebuilt as a whole.
mod pack;
mod rename;

#[allow(deprecated)]
pub use pack::Packed;
pub use pack::{Packable, PackedArgs, PackedKeys};
pub use rename::replace_by_prefix;

use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};

/// A value made of tensors in nested containers, such as the arguments and results of a forward pass.
///
/// Tensors, `Option`, `Box`, `Vec`, arrays, tuples of up to eight, `BTreeMap` and `HashMap` are trees. Numbers, `bool`,
/// `char`, `String` and `()` are trees without tensors, and keep their values. Tensors have a fixed order, equal on all
/// ranks: the written order, and the order of keys in maps. To make a struct or an enum a tree, use
/// `#[derive(TensorTree)]`, or implement the two required methods. `#[tensor_tree(keep)]` marks fields that are not
/// trees and are cloned.
///
/// A [`Var`](candle_core::Var) is not a tree: mapping a parameter would return a tensor, not a parameter.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::TensorTree;
///
/// #[derive(Clone, PartialEq, Debug)]
/// enum Mode { Train, Eval }
///
/// #[derive(TensorTree)]
/// struct Batch<M> {
///     tokens: Tensor,
///     masks: Vec<Option<M>>,
///     epoch: usize,
///     #[tensor_tree(keep)]
///     mode: Mode,
/// }
///
/// let ones = Tensor::ones(3, DType::F32, &Device::Cpu)?;
/// let batch = Batch { tokens: ones.to_dtype(DType::U32)?, masks: vec![None, Some(ones)], epoch: 7, mode: Mode::Eval };
///
/// let doubled = batch.map_tensors(|t| t + t)?;
/// assert_eq!(doubled.tokens.to_vec1::<u32>()?, [2, 2, 2]);
/// assert_eq!((doubled.masks.len(), doubled.epoch, doubled.mode), (2, 7, Mode::Eval));
///
/// let half = batch.cast_floats(DType::F16)?;
/// assert_eq!(half.tensors().iter().map(|t| t.dtype()).collect::<Vec<_>>(), [DType::U32, DType::F16]);
/// # Ok::<(), candle_dist::Error>(())
/// ```
pub trait TensorTree: Sized {
    /// Calls `f` with every tensor, in the tree's order.
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor));

    /// Returns the same structure with `f` applied to every tensor, in the order of [`visit`](Self::visit).
    ///
    /// Stops at the first error. Implement this method, and call [`map_tensors`](Self::map_tensors). A structure that
    /// cannot hold the result of `f` returns an [`Error`].
    fn rebuild<E: From<Error>>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E>;

    /// Returns the same structure with `f` applied to every tensor, or the first error.
    fn map_tensors<E: From<Error>>(
        &self,
        mut f: impl FnMut(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Self, E> {
        self.rebuild(&mut f)
    }

    /// Returns every tensor, in the tree's order.
    fn tensors(&self) -> Vec<&Tensor> {
        let mut tensors = Vec::new();
        self.visit(&mut |tensor| tensors.push(tensor));
        tensors
    }

    /// Folds over the tensors, in the tree's order.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::TensorTree;
    ///
    /// let x = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
    /// let tree = (x.clone(), [Some(x), None]);
    /// assert_eq!(tree.fold_tensors(0, |elements, t| elements + t.elem_count()), 12);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    fn fold_tensors<A>(&self, init: A, f: impl FnMut(A, &Tensor) -> A) -> A {
        self.tensors().into_iter().fold(init, f)
    }

    /// Returns the tensors as a list, without copying. [`unflatten_tensors`](Self::unflatten_tensors) reverses it.
    fn flatten_tensors(&self) -> Vec<Tensor> {
        self.tensors().into_iter().cloned().collect()
    }

    /// Returns this structure with `tensors` in place of its own, in the tree's order.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the number of tensors differs from that of the structure.
    fn unflatten_tensors(&self, tensors: impl IntoIterator<Item = Tensor>) -> Result<Self> {
        let (wanted, tensors) = (self.tensors().len(), Vec::from_iter(tensors));
        let given = tensors.len();
        let wrong_count = || {
            let reason = format!("the structure holds {wanted} tensors, {given} were given");
            Error::Invalid { op: "unflatten_tensors", reason }
        };
        if given != wanted {
            return Err(wrong_count());
        }
        let mut tensors = tensors.into_iter();
        self.rebuild(&mut |_| tensors.next().ok_or_else(wrong_count))
    }

    /// Returns the same structure with float tensors cast to `dtype`.
    ///
    /// Integer tensors, and tensors of this dtype, are returned as they are and stay in the graph.
    fn cast_floats(&self, dtype: DType) -> Result<Self> {
        self.map_tensors(|t| {
            let cast = t.dtype().is_float() && t.dtype() != dtype;
            Ok(if cast { t.to_dtype(dtype)? } else { t.clone() })
        })
    }

    /// Returns the same structure with every tensor on `device`. Tensors that are there already stay as they are.
    fn to_device(&self, device: &Device) -> Result<Self> {
        self.map_tensors(|t| Ok(t.to_device(device)?))
    }
}

impl TensorTree for Tensor {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        f(self);
    }

    fn rebuild<E: From<Error>>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        f(self)
    }
}

/// Implements the trait for values without tensors.
macro_rules! leaf {
    ($($leaf:ty),*) => {$(
        impl TensorTree for $leaf {
            fn visit<'a>(&'a self, _: &mut dyn FnMut(&'a Tensor)) {}

            fn rebuild<E: From<Error>>(&self, _: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
                Ok(self.clone())
            }
        }
    )*};
}

leaf!((), bool, char, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize, f32, f64, String);

impl<T: TensorTree> TensorTree for Option<T> {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.iter().for_each(|tree| tree.visit(f));
    }

    fn rebuild<E: From<Error>>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        self.as_ref().map(|tree| tree.rebuild(f)).transpose()
    }
}

impl<T: TensorTree> TensorTree for Box<T> {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.as_ref().visit(f);
    }

    fn rebuild<E: From<Error>>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        self.as_ref().rebuild(f).map(Box::new)
    }
}

impl<T: TensorTree> TensorTree for Vec<T> {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.iter().for_each(|tree| tree.visit(f));
    }

    fn rebuild<E: From<Error>>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        self.iter().map(|tree| tree.rebuild(f)).collect()
    }
}

impl<T: TensorTree, const N: usize> TensorTree for [T; N] {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.iter().for_each(|tree| tree.visit(f));
    }

    fn rebuild<E: From<Error>>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        let trees: Vec<T> = self.iter().map(|tree| tree.rebuild(f)).collect::<Result<_, E>>()?;
        Ok(trees.try_into().unwrap_or_else(|trees: Vec<T>| unreachable!("{} trees of {N}", trees.len())))
    }
}

macro_rules! tuple {
    ($($t:ident . $i:tt),+) => {
        impl<$($t: TensorTree),+> TensorTree for ($($t,)+) {
            fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
                $(self.$i.visit(f);)+
            }

            fn rebuild<Err: From<Error>>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, Err>) -> Result<Self, Err> {
                Ok(($(self.$i.rebuild(f)?,)+))
            }
        }
    };
}

tuple!(A.0);
tuple!(A.0, B.1);
tuple!(A.0, B.1, C.2);
tuple!(A.0, B.1, C.2, D.3);
tuple!(A.0, B.1, C.2, D.3, E.4);
tuple!(A.0, B.1, C.2, D.3, E.4, F.5);
tuple!(A.0, B.1, C.2, D.3, E.4, F.5, G.6);
tuple!(A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7);

impl<K: Ord + Clone, T: TensorTree> TensorTree for BTreeMap<K, T> {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.values().for_each(|tree| tree.visit(f));
    }

    fn rebuild<E: From<Error>>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        self.iter().map(|(key, tree)| Ok((key.clone(), tree.rebuild(f)?))).collect()
    }
}

impl<K: Ord + Hash + Clone, T: TensorTree, S: BuildHasher + Clone> TensorTree for HashMap<K, T, S> {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        by_key(self).into_iter().for_each(|(_, tree)| tree.visit(f));
    }

    fn rebuild<E: From<Error>>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        let mut made = HashMap::with_capacity_and_hasher(self.len(), self.hasher().clone());
        for (key, tree) in by_key(self) {
            made.insert(key.clone(), tree.rebuild(f)?);
        }
        Ok(made)
    }
}

/// Returns the entries in key order. The order of a hash map differs between processes.
fn by_key<K: Ord, T, S>(map: &HashMap<K, T, S>) -> Vec<(&K, &T)> {
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_by_key(|(key, _)| *key);
    entries
}
