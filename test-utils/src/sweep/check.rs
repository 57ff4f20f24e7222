//! The check of one op with all its arguments.
use super::arguments::{Arguments, PlainValue};
use super::{Case, Input, Kind, MESHES, sweep_on};
use candle_core::{DType, Tensor};
use candle_shard::{DTensor, Result};
use itertools::Itertools;
use std::fmt;

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
    values: Vec<(String, Vec<PlainValue>)>,
    dtypes: Vec<DType>,
    meshes: Option<Vec<Vec<usize>>>,
}

impl OpCheck {
    /// Creates a check of the op with this name: in f64, f32, f16 and bf16, on meshes of 2, 3, 4, 2 × 2 and 3 × 2 ranks.
    pub fn new(name: &str) -> Self {
        let dtypes = vec![DType::F64, DType::F32, DType::F16, DType::BF16];
        Self { name: name.to_string(), tensors: Vec::new(), values: Vec::new(), dtypes, meshes: None }
    }

    /// Adds a tensor: its shape in each case, and its values. In the n-th case, all tensors have their n-th shape.
    pub fn tensor(mut self, name: &str, shapes: &[&'static [usize]], kind: Kind) -> Self {
        self.tensors.push((name.to_string(), shapes.to_vec(), kind));
        self
    }

    /// Adds a plain argument, which is tested with each of these values.
    pub fn plain<V: Clone + fmt::Debug + Send + Sync + 'static>(mut self, name: &str, values: &[V]) -> Self {
        self.values.push((name.to_string(), values.iter().cloned().map(PlainValue::new).collect()));
        self
    }

    /// Sets the dtypes of the floats.
    pub fn dtypes(self, dtypes: &[DType]) -> Self {
        Self { dtypes: dtypes.to_vec(), ..self }
    }

    /// Sets the meshes, by the sizes of their axes. Then the pieces of the tensors need not be even, uneven and empty.
    pub fn meshes(self, meshes: &[&[usize]]) -> Self {
        Self { meshes: Some(meshes.iter().map(|shape| shape.to_vec()).collect()), ..self }
    }

    /// Compares the op with its single-device form, in all layouts.
    ///
    /// In 16 bits, what is expected is computed in f64 from the rounded inputs, and rounded.
    ///
    /// # Panics
    /// Like [`sweep`](super::sweep()); and if there are no tensors, or they have different numbers of shapes.
    pub fn sweep(
        self,
        distributed: impl Fn(&Arguments<DTensor>) -> Result<DTensor> + Clone + Send + Sync + 'static,
        plain: impl Fn(&Arguments<Tensor>) -> candle_core::Result<Tensor> + Clone + Send + Sync + 'static,
    ) {
        let Self { name, tensors, values, dtypes, meshes } = self;
        let counts = tensors.iter().map(|(_, shapes, _)| shapes.len());
        let count = counts.clone().all_equal_value().unwrap_or_else(|_| {
            panic!("{name}: tensors with different numbers of shapes, or none: {:?}", counts.collect_vec())
        });
        let names = tensors.iter().map(|(name, ..)| name.clone()).collect_vec();
        let choices = values
            .iter()
            .map(|(name, values)| values.iter().map(|value| (name.clone(), value.clone())).collect_vec());
        let mut cases = Vec::new();
        for (at, values) in (0..count).cartesian_product(choices.multi_cartesian_product()) {
            let inputs: Vec<Input> = tensors.iter().map(|(_, shapes, kind)| (shapes[at], *kind)).collect();
            let shown = values.iter().map(|(name, value)| format!(" {name}={}", value.shown)).join("");
            let (distributed, plain) = (distributed.clone(), plain.clone());
            let (here, there) = ((names.clone(), values.clone()), (names.clone(), values));
            cases.push(Case::new(
                &format!("{name}{shown}"),
                &inputs,
                move |x| distributed(&arguments(x, &here)),
                move |x| plain(&arguments(x, &there)),
            ));
        }
        let standard = || MESHES.iter().map(|shape| shape.to_vec()).collect();
        let covers_all = meshes.is_none();
        sweep_on(&meshes.unwrap_or_else(standard), covers_all, &dtypes, &name, cases);
    }
}

fn arguments<T: Clone>(
    tensors: &[T],
    (names, values): &(Vec<String>, Vec<(String, PlainValue)>),
) -> Arguments<T> {
    Arguments::of_parts(names.iter().cloned().zip(tensors.iter().cloned()).collect(), values.clone())
}
