//! What one device says of a program.
use super::program::{Program, Source};
use super::table::{Content, Entry};
use candle_core::{DType, Result, Tensor, Var};
use itertools::Itertools;
use std::panic::{AssertUnwindSafe, catch_unwind};
use test_utils::{distance, values};

/// The values of the steps that are compared, and the gradient of each leaf.
pub(crate) struct Truth {
    pub(crate) values: Vec<Tensor>,
    pub(crate) gradients: Vec<Option<Tensor>>,
}

fn variable(x: &Tensor) -> Result<Option<Var>> {
    x.dtype().is_float().then(|| Var::from_tensor(x)).transpose()
}

fn apply(entry: &Entry, inputs: &[Tensor], numbers: &[usize]) -> Result<Tensor> {
    // candle's extremes divide by the stride of a dim, which is 0 for a repeated dim of size 1, contiguous or not.
    let repeated = |x: &Tensor| x.stride().contains(&0);
    let dense = |x: &Tensor| if repeated(x) { x.force_contiguous() } else { x.contiguous() };
    let dense = inputs.iter().map(dense).collect::<Result<Vec<_>>>()?;
    (entry.plain)(&dense, numbers)
}

/// The value of a call and the gradients of its inputs.
fn call(entry: &Entry, inputs: &[Tensor], numbers: &[usize]) -> Result<Vec<Tensor>> {
    let vars: Vec<Option<Var>> = inputs.iter().map(variable).try_collect()?;
    let with_vars = inputs.iter().zip(&vars).map(|(x, v)| v.as_ref().map_or(x, |v| v.as_tensor()).clone());
    let made = apply(entry, &with_vars.collect_vec(), numbers)?;
    let grads = (&made * values(made.dims(), 99, DType::F64))?.sum_all()?.backward()?;
    let of_inputs =
        vars.iter().flatten().map(|var| grads.get(var).cloned().map_or_else(|| var.zeros_like(), Ok));
    std::iter::once(Ok(made.detach())).chain(of_inputs).collect()
}

/// The value of a call, if rounding changes neither it nor its gradients much.
///
/// Ranks add up in another order than one device does. What is at the edge of a step or a fold then, such as equal
/// elements of an argmax, is for the sweeps, whose numbers are chosen for it.
pub(crate) fn steady(entry: &Entry, inputs: &[Tensor], numbers: &[usize]) -> Option<Tensor> {
    let nudge = |(i, x): (usize, &Tensor)| {
        let by = (values(x.dims(), 7 + i as u64, DType::F64) * 1e-9)?;
        if x.dtype().is_float() { (x * (1.0 + &by)?)? + by } else { Ok(x.clone()) }
    };
    let nudged: Vec<Tensor> = inputs.iter().enumerate().map(nudge).try_collect().ok()?;
    // candle panics on some calls, such as a gradient of parts without elements.
    let call = |inputs: &[Tensor]| {
        catch_unwind(AssertUnwindSafe(|| call(entry, inputs, numbers).ok())).ok().flatten()
    };
    let (exact, near) = (call(inputs)?, call(&nudged)?);
    let small = |x: &Tensor| {
        x.elem_count() > 0 && distance(&x.zeros_like().unwrap(), x) < f64::INFINITY && largest(x) < 30.0
    };
    let alike = exact.iter().zip(&near).all(|(a, b)| distance(a, b) < 1e-5);
    (alike && exact.iter().all(small)).then(|| exact[0].clone())
}

/// The largest absolute value.
pub(crate) fn largest(x: &Tensor) -> f64 {
    let elements = x.flatten_all().and_then(|x| x.to_vec1::<f64>()).unwrap();
    elements.into_iter().map(|x| if x.is_nan() { f64::INFINITY } else { x.abs() }).fold(0.0, f64::max)
}

impl Truth {
    /// The values and gradients of a program; those of a wrong call are not known.
    pub(crate) fn new(program: &Program) -> Result<Self> {
        let leaves = program.leaves.iter().map(|leaf| leaf.whole()).collect_vec();
        let vars: Vec<Option<Var>> = leaves.iter().map(variable).try_collect()?;
        let leaves = leaves
            .iter()
            .zip(&vars)
            .map(|(x, v)| v.as_ref().map_or(x, |v| v.as_tensor()).clone())
            .collect_vec();
        let mut values: Vec<Tensor> = Vec::new();
        let known = program.steps.len() - usize::from(program.wrong);
        for step in &program.steps[..known] {
            let inputs =
                step.inputs.iter().map(|&source| value(source, &leaves, &values).clone()).collect_vec();
            values.push(apply(step.entry, &inputs, &step.numbers)?);
        }
        let mut loss = Tensor::zeros((), DType::F64, &candle_core::Device::Cpu)?;
        for (at, (source, _)) in program.loss.iter().enumerate() {
            let value = value(*source, &leaves, &values);
            loss = (loss + (value * program.weights(at, value.dims()))?.sum_all()?)?;
        }
        let grads = loss.backward()?;
        let of_leaf = |(var, leaf): (&Option<Var>, &super::program::Leaf)| match (var, leaf.content) {
            (Some(var), Content::Float) => {
                grads.get(var).cloned().map_or_else(|| var.zeros_like(), Ok).map(Some)
            }
            _ => Ok(None),
        };
        let gradients = vars.iter().zip(&program.leaves).map(of_leaf).collect::<Result<_>>()?;
        Ok(Self { values: values.iter().map(Tensor::detach).collect(), gradients })
    }
}

pub(crate) fn value<'v, T>(source: Source, leaves: &'v [T], steps: &'v [T]) -> &'v T {
    match source {
        Source::Leaf(at) => &leaves[at],
        Source::Step(at) => &steps[at],
    }
}
