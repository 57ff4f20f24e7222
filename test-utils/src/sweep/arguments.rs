//! Arguments by position and by name, in trees, and plain numbers.
use super::{Case, Input, Kind, sweep};
use candle_core::Tensor;
use candle_shard::{DTensor, Result};
use itertools::Itertools;
use std::ops::Index;

/// The arguments of a call: tensors, by position or name, and numbers by name.
///
/// A name with dots is a path in a tree: [`under`](Self::under) returns a branch of it.
#[derive(Debug, Clone)]
pub struct Arguments<T> {
    tensors: Vec<(String, T)>,
    numbers: Vec<(String, f64)>,
}

impl<T: Clone> Arguments<T> {
    /// Returns the plain argument with this name.
    ///
    /// # Panics
    /// If there is none.
    pub fn number(&self, name: &str) -> f64 {
        let known = || self.numbers.iter().map(|(name, _)| name).join(", ");
        let found = self.numbers.iter().find(|(of, _)| of == name);
        found.map_or_else(|| panic!("no number {name:?} among the arguments {}", known()), |(_, number)| *number)
    }

    /// Returns the tensor with this name, if there is one.
    pub fn get(&self, name: &str) -> Option<&T> {
        self.tensors.iter().find(|(of, _)| of == name).map(|(_, tensor)| tensor)
    }

    /// Returns the branch of the tree under a name: `blocks.0.weight` is `weight` under `blocks.0`. Numbers are kept.
    pub fn under(&self, name: &str) -> Self {
        let rest = |of: &String| of.strip_prefix(name)?.strip_prefix('.').map(str::to_string);
        let tensors = self.tensors.iter().filter_map(|(of, tensor)| Some((rest(of)?, tensor.clone()))).collect();
        Self { tensors, numbers: self.numbers.clone() }
    }

    /// Returns all tensors in order.
    pub fn tensors(&self) -> Vec<T> {
        self.tensors.iter().map(|(_, tensor)| tensor.clone()).collect()
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

/// Checks an op, for example your own, with all its arguments.
///
/// Use shapes with dims larger than four, between one and four, and one, so that there are uneven and empty pieces.
///
/// ```
/// use test_utils::{Kind::Float, OpCheck};
///
/// OpCheck::new("scaled sum")
///     .tensor("x", &[&[4, 6], &[5, 3], &[1, 7]], Float)
///     .tensor("terms.bias", &[&[6], &[3], &[7]], Float)
///     .plain("scale", &[0.0, -1.5])
///     .sweep(
///         |a| a["x"].affine(a.number("scale"), 0.0)?.add(&a.under("terms")["bias"]),
///         |a| a["x"].affine(a.number("scale"), 0.0)?.broadcast_add(&a["terms.bias"]),
///     );
/// ```
#[derive(Debug, Clone)]
pub struct OpCheck {
    name: String,
    tensors: Vec<(String, Vec<&'static [usize]>, Kind)>,
    numbers: Vec<(String, Vec<f64>)>,
}

impl OpCheck {
    /// Creates a check of the op with this name.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_string(), tensors: Vec::new(), numbers: Vec::new() }
    }

    /// Adds a tensor: its shape in each case, and its values. In the n-th case, all tensors have their n-th shape.
    pub fn tensor(mut self, name: &str, shapes: &[&'static [usize]], kind: Kind) -> Self {
        self.tensors.push((name.to_string(), shapes.to_vec(), kind));
        self
    }

    /// Adds a plain argument, which is tested with each of these values.
    pub fn plain(mut self, name: &str, values: &[f64]) -> Self {
        self.numbers.push((name.to_string(), values.to_vec()));
        self
    }

    /// Compares the op with its single-device form, in all layouts.
    ///
    /// # Panics
    /// Like [`sweep`]; and if there are no tensors, or they have different numbers of shapes.
    pub fn sweep(
        self,
        distributed: impl Fn(&Arguments<DTensor>) -> Result<DTensor> + Clone + Send + Sync + 'static,
        plain: impl Fn(&Arguments<Tensor>) -> candle_core::Result<Tensor> + Clone + Send + Sync + 'static,
    ) {
        let Self { name, tensors, numbers } = self;
        let counts = tensors.iter().map(|(_, shapes, _)| shapes.len());
        let count = counts.clone().all_equal_value().unwrap_or_else(|_| {
            panic!("{name}: tensors with different numbers of shapes, or none: {:?}", counts.collect_vec())
        });
        let names = tensors.iter().map(|(name, ..)| name.clone()).collect_vec();
        let choices =
            numbers.iter().map(|(name, values)| values.iter().map(|value| (name.clone(), *value)).collect_vec());
        let mut cases = Vec::new();
        for (at, numbers) in (0..count).cartesian_product(choices.multi_cartesian_product()) {
            let inputs: Vec<Input> = tensors.iter().map(|(_, shapes, kind)| (shapes[at], *kind)).collect();
            let shown = numbers.iter().map(|(name, value)| format!(" {name}={value}")).join("");
            let (distributed, plain) = (distributed.clone(), plain.clone());
            let (here, there) = ((names.clone(), numbers.clone()), (names.clone(), numbers));
            cases.push(Case::new(
                &format!("{name}{shown}"),
                &inputs,
                move |x| distributed(&arguments(x, &here)),
                move |x| plain(&arguments(x, &there)),
            ));
        }
        sweep(&name, cases);
    }
}

fn arguments<T: Clone>(tensors: &[T], (names, numbers): &(Vec<String>, Vec<(String, f64)>)) -> Arguments<T> {
    Arguments { tensors: names.iter().cloned().zip(tensors.iter().cloned()).collect(), numbers: numbers.clone() }
}
