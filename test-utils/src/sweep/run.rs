//! Runs one case in one layout.
use super::Case;
use super::Kind;
use super::covered::Covered;
use crate::{Lay, Leaf, device_of, strided, tolerance, value_error, values};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_dist::{DeviceMesh, comm};
use candle_shard::{DTensor, Error, Replicate, Result, explain};
use itertools::Itertools;

/// The results of one device: the inputs, the value, the weights of the loss, and the gradient of each input.
pub(super) struct Reference {
    inputs: Vec<Tensor>,
    value: Tensor,
    weights: Tensor,
    gradients: Vec<Option<Tensor>>,
}

impl Reference {
    pub(super) fn new(case: &Case, dtype: DType) -> candle_core::Result<Self> {
        let make = |(i, (shape, kind)): (usize, &(Vec<usize>, Kind))| {
            let even = values(shape, 100 + i as u64, DType::F64);
            match *kind {
                Kind::Float => even.to_dtype(dtype),
                Kind::Positive => ((even / 1.5)? + 1.5)?.to_dtype(dtype),
                Kind::Whole => even.round()?.clamp(-1f64, 1f64)?.affine(12.0, 0.0)?.to_dtype(dtype),
                Kind::Ids(bound) => {
                    let unit = even.affine(1.0 / 3.0, 0.5)?;
                    (unit * f64::from(bound))?.to_dtype(DType::U32)?.clamp(0u32, bound - 1)
                }
            }
        };
        let inputs = case.inputs.iter().enumerate().map(make).collect::<candle_core::Result<Vec<_>>>()?;
        // One rounding at the end is all that 16 bits may cost.
        let wide = if is_narrow(dtype) { DType::F64 } else { dtype };
        let var = |x: &Tensor| x.dtype().is_float().then(|| Var::from_tensor(&x.to_dtype(wide)?)).transpose();
        let vars: Vec<Option<Var>> = inputs.iter().map(var).try_collect()?;
        let with_vars =
            inputs.iter().zip(&vars).map(|(x, v)| v.as_ref().map_or(x, |v| v.as_tensor()).clone());
        let value = (case.plain)(&with_vars.collect_vec())?.to_dtype(wide)?;
        let weights = values(value.dims(), 99, dtype);
        let grads = (&value * weights.to_dtype(wide)?)?.sum_all()?.backward()?;
        let grad = |v: &Option<Var>| grads.get(v.as_ref()?.as_tensor()).map(|grad| grad.to_dtype(dtype));
        let gradients = vars.iter().map(|v| grad(v).transpose()).collect::<candle_core::Result<_>>()?;
        Ok(Self { inputs, value: value.detach().to_dtype(dtype)?, weights, gradients })
    }
}

/// Returns whether floats have 16 bits.
fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// How one case ended on this rank.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "mpi", derive(serde::Serialize, serde::Deserialize))]
pub(crate) enum Outcome {
    Equal,
    Refused(String),
    Wrong(String),
}

/// Runs one op with its inputs in these layouts, and compares the value and all gradients.
pub(super) fn run(
    case: &Case,
    reference: &Reference,
    mesh: &DeviceMesh,
    lays: &[Vec<Lay>],
    (gaps, explained, covered): (bool, bool, &mut Covered),
) -> Result<Outcome> {
    let dtype = reference.weights.dtype();
    let device = device_of(mesh);
    let mut leaves = Vec::new();
    let mut inputs = Vec::new();
    for (whole, lays) in reference.inputs.iter().zip(lays) {
        let (input, leaf) = if whole.dtype().is_float() {
            let leaf = Leaf::new(whole, mesh, lays)?;
            (leaf.tensor.clone(), Some(leaf))
        } else {
            let placements = lays.iter().map(|lay| lay.placement()).collect_vec();
            (DTensor::distribute(&whole.to_device(&device)?, mesh, &placements)?, None)
        };
        inputs.push(if gaps { strided(&input)? } else { input });
        leaves.push(leaf);
    }
    covered.count(&inputs, gaps);
    if explained {
        explains_all(case, &inputs)?;
    }
    let out = match (case.distributed)(&inputs) {
        Ok(out) => out.to_dtype(dtype)?,
        Err(error @ Error::Dist(_)) => return Err(error), // the world is over
        Err(error) => return Ok(Outcome::Refused(error.to_string())),
    };
    let mut errors = vec![("value".to_string(), value_error(&out, &reference.value)?)];
    let weights =
        DTensor::distribute(&reference.weights.to_device(&device)?, mesh, &vec![Replicate; mesh.ndim()])?;
    let grads = out.mul(&weights)?.sum_all()?.backward()?;
    for (i, (leaf, want)) in leaves.iter().zip(&reference.gradients).enumerate() {
        if let (Some(leaf), Some(want)) = (leaf, want) {
            let got = grads.get(&leaf.var).map(|grad| grad.to_dtype(dtype)).transpose()?;
            let mut rounded = GradStore::default();
            got.and_then(|grad| rounded.insert(&leaf.var, grad));
            errors.push((format!("gradient {i}"), leaf.gradient_error(&rounded, want)?));
        }
    }
    let most = match dtype {
        DType::F16 => 1e-2,
        DType::BF16 => 8e-2,
        dtype => tolerance(dtype),
    };
    match errors.iter().find(|(_, error)| *error > most) {
        Some((what, error)) => {
            Ok(Outcome::Wrong(format!("{what} is off by {error:e}, output {}", out.spec())))
        }
        None => Ok(Outcome::Equal),
    }
}

/// Checks that `explain` reports what the ranks send, and that the op specs report what is sent for the inputs.
fn explains_all(case: &Case, inputs: &[DTensor]) -> Result<()> {
    let check = |inputs: &[DTensor], shared: bool| {
        let ((out, told), counts) = comm::record(|| explain(|| (case.distributed)(inputs)));
        assert_eq!(told.bytes(), counts.total_bytes(), "{}: {told}", case.name);
        assert_eq!(told.calls().count(), counts.total(), "{}: {told}", case.name);
        for op in &told.ops {
            let expected: usize = op.inputs.iter().map(|input| input.bytes).sum();
            let moved: usize = op.input_calls.iter().map(|call| call.bytes).sum();
            // Uses of a tracked tensor share the communication for one of them.
            assert!(
                moved == expected || shared && moved < expected,
                "{}: {op}: {expected} expected",
                case.name
            );
        }
        out
    };
    match check(inputs, true) {
        Err(error @ Error::Dist(_)) => return Err(error), // the world is over
        Err(_) => return Ok(()),
        Ok(_) => {}
    }
    let detached: Vec<DTensor> = inputs.iter().map(DTensor::detach).collect();
    check(&detached, false).map(drop)
}
