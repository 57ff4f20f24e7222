//! The sweep: one op, every layout of its inputs, against one device.
use crate::common::*;
use candle_core::{DType, Tensor, Var};
use candle_dist::DeviceMesh;
use candle_shard::{DTensor, Error, Replicate, Result, Shard};
use itertools::Itertools;
use std::sync::Arc;
use test_utils::on_ranks;

/// What an input holds.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// Numbers in ±1.5, with a gradient.
    Float,
    /// Numbers in 0.5..2.5, with a gradient.
    Positive,
    /// -1, 0 and 1, with a gradient.
    Whole,
    /// u32 below this bound, without gradient.
    Ids(u32),
}

/// An input: its global shape and what it holds.
pub(crate) type Input = (&'static [usize], Kind);

type Distributed = Arc<dyn Fn(&[DTensor]) -> Result<DTensor> + Send + Sync>;
type Plain = Arc<dyn Fn(&[Tensor]) -> candle_core::Result<Tensor> + Send + Sync>;

/// An op on inputs of some shapes, in both forms.
#[derive(Clone)]
pub(crate) struct Case {
    name: String,
    inputs: Vec<Input>,
    distributed: Distributed,
    plain: Plain,
}

impl Case {
    pub(crate) fn new(
        name: &str,
        inputs: &[Input],
        distributed: impl Fn(&[DTensor]) -> Result<DTensor> + Send + Sync + 'static,
        plain: impl Fn(&[Tensor]) -> candle_core::Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        let shapes = inputs.iter().map(|(shape, _)| format!("{shape:?}")).join(" ");
        let name = format!("{name} {shapes}");
        Self { name, inputs: inputs.to_vec(), distributed: Arc::new(distributed), plain: Arc::new(plain) }
    }
}

/// What one device gives: the inputs, the value, the weights of the loss, and the gradient of each input.
struct Reference {
    inputs: Vec<Tensor>,
    value: Tensor,
    weights: Tensor,
    gradients: Vec<Option<Tensor>>,
}

impl Reference {
    fn new(case: &Case, dtype: DType) -> candle_core::Result<Self> {
        let make = |(i, (shape, kind)): (usize, &Input)| {
            let even = values(shape, 100 + i as u64, DType::F64);
            match *kind {
                Kind::Float => even.to_dtype(dtype),
                Kind::Positive => ((even / 1.5)? + 1.5)?.to_dtype(dtype),
                Kind::Whole => even.round()?.clamp(-1f64, 1f64)?.to_dtype(dtype),
                Kind::Ids(bound) => {
                    let unit = even.affine(1.0 / 3.0, 0.5)?;
                    (unit * f64::from(bound))?.to_dtype(DType::U32)?.clamp(0u32, bound - 1)
                }
            }
        };
        let inputs = case.inputs.iter().enumerate().map(make).collect::<candle_core::Result<Vec<_>>>()?;
        let vars: Vec<Option<Var>> =
            inputs.iter().map(|x| x.dtype().is_float().then(|| Var::from_tensor(x)).transpose()).try_collect()?;
        let with_vars = inputs.iter().zip(&vars).map(|(x, v)| v.as_ref().map_or(x, |v| v.as_tensor()).clone());
        let value = (case.plain)(&with_vars.collect_vec())?;
        let weights = values(value.dims(), 99, dtype);
        let grads = (&value * &weights)?.sum_all()?.backward()?;
        let gradients = vars.iter().map(|v| v.as_ref().and_then(|v| grads.get(v).cloned())).collect();
        Ok(Self { inputs, value: value.detach(), weights, gradients })
    }
}

/// How one case ended on this rank.
#[derive(Clone, PartialEq, Debug)]
enum Outcome {
    Equal,
    Refused(String),
    Wrong(String),
}

/// One op with its inputs in these layouts: value and all gradients.
fn run(case: &Case, reference: &Reference, mesh: &DeviceMesh, lays: &[Vec<Lay>]) -> Result<Outcome> {
    let dtype = reference.weights.dtype();
    let mut leaves = Vec::new();
    let mut inputs = Vec::new();
    for (whole, lays) in reference.inputs.iter().zip(lays) {
        if whole.dtype().is_float() {
            let leaf = Leaf::new(whole, mesh, lays)?;
            inputs.push(leaf.tensor.clone());
            leaves.push(Some(leaf));
        } else {
            let placements = lays.iter().map(|lay| lay.placement()).collect_vec();
            inputs.push(DTensor::distribute(whole, mesh, &placements)?);
            leaves.push(None);
        }
    }
    let out = match (case.distributed)(&inputs) {
        Ok(out) => out,
        Err(error @ Error::Dist(_)) => return Err(error), // the world is over
        Err(error) => return Ok(Outcome::Refused(error.to_string())),
    };
    let mut errors = vec![("value".to_string(), value_error(&out, &reference.value)?)];
    let weights = DTensor::distribute(&reference.weights, mesh, &vec![Replicate; mesh.ndim()])?;
    let grads = out.mul(&weights)?.sum_all()?.backward()?;
    for (i, (leaf, want)) in leaves.iter().zip(&reference.gradients).enumerate() {
        if let (Some(leaf), Some(want)) = (leaf, want) {
            errors.push((format!("gradient {i}"), leaf.gradient_error(&grads, want)?));
        }
    }
    match errors.iter().find(|(_, error)| *error > tolerance(dtype)) {
        Some((what, error)) => Ok(Outcome::Wrong(format!("{what} is off by {error:e}, output {}", out.spec()))),
        None => Ok(Outcome::Equal),
    }
}

/// All layouts of all inputs, or a fixed choice of `most` of them where there are more.
fn layouts(case: &Case, axes: usize, most: usize) -> Vec<Vec<Vec<Lay>>> {
    let of_input = |(shape, kind): &Input| match kind {
        Kind::Ids(_) => {
            let shards = (0..shape.len()).map(|d| Lay::At(Shard(d)));
            on_axes(&shards.chain([Lay::At(Replicate)]).collect_vec(), axes)
        }
        _ => on_axes(&lays(shape.len()), axes),
    };
    let choices = case.inputs.iter().map(of_input).collect_vec();
    let count: usize = choices.iter().map(Vec::len).product();
    // A stride without a common divisor with the count visits every layout of every input alike.
    let step = (count.div_ceil(most)..).find(|&step| gcd(step, count) == 1).unwrap_or(1);
    let pick = |mut index: usize| {
        choices.iter().map(|of_input| (of_input[index % of_input.len()].clone(), index /= of_input.len()).0).collect()
    };
    (0..count).step_by(step).map(pick).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The meshes of a sweep; the last two have more layouts than are tried.
const MESHES: [&[usize]; 5] = [&[2], &[3], &[4], &[2, 2], &[3, 2]];

/// Runs all cases in all layouts on all meshes and panics on the first that is neither equal nor refused alike.
pub(crate) fn sweep(family: &str, dtype: DType, cases: Vec<Case>) {
    let (mut equal, mut refused) = (0, 0);
    let ops = cases.len();
    let cases = Arc::new(cases);
    for shape in MESHES {
        let cases = cases.clone();
        let most = if shape.len() == 1 { 400 } else { 80 };
        let outcomes = on_ranks(shape.iter().product(), family, move |ctx| -> Result<Vec<(String, Outcome)>> {
            let mesh = mesh(ctx, shape)?;
            let mut outcomes = Vec::new();
            for case in cases.iter() {
                let reference = Reference::new(case, dtype)?;
                for lays in layouts(case, mesh.ndim(), most) {
                    let shown = lays.iter().map(|lays| format!("({})", lays.iter().join(", "))).join(" ");
                    let label = format!("{} as {shown} on {mesh}", case.name);
                    let outcome = run(case, &reference, &mesh, &lays);
                    let outcome = outcome.map_err(|e| candle_core::Error::Msg(format!("{label}: {e}")))?;
                    outcomes.push((label, outcome));
                }
            }
            Ok(outcomes)
        });
        for (i, (label, outcome)) in outcomes[0].iter().enumerate() {
            let all = outcomes.iter().map(|rank| &rank[i].1).collect_vec();
            assert!(all.iter().all(|o| *o == outcome || matches!(o, Outcome::Wrong(_))), "{label}: {all:?}");
            match all.iter().find(|o| matches!(o, Outcome::Wrong(_))).unwrap_or(&outcome) {
                Outcome::Equal => equal += 1,
                Outcome::Refused(text) => {
                    println!("{label}: {text}");
                    refused += 1;
                }
                Outcome::Wrong(text) => panic!("{label}: {text}"),
            }
        }
    }
    println!("sweep {family}: {ops} ops, {} cases, {equal} equal, {refused} refused alike", equal + refused);
    assert_eq!(refused, 0, "every op of this sweep can be run in every layout");
}
