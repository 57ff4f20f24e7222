//! The sweep: one op, every layout of its inputs, against one device.
use crate::common::*;
use candle_core::{DType, Tensor, Var};
use candle_dist::{DeviceMesh, comm};
use candle_shard::{DTensor, Error, Replicate, Result, Shard, explain};
use itertools::Itertools;
use std::io::Write;
use std::sync::Arc;
use test_utils::on_ranks;

/// What an input holds.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// Numbers in ±1.5, with a gradient.
    Float,
    /// Numbers in 0.5..2.5, with a gradient.
    Positive,
    /// -12, 0 and 12, whose shares add up exactly on all meshes, with a gradient.
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
                Kind::Whole => even.round()?.clamp(-1f64, 1f64)?.affine(12.0, 0.0)?.to_dtype(dtype),
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
        let value = (case.plain)(&with_vars.collect_vec())?.to_dtype(dtype)?;
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

/// How many cases have an input in pieces of one size, of unlike ones, with empty ones, in memory with gaps.
#[derive(Clone, Copy, Default)]
struct Covered {
    even: usize,
    uneven: usize,
    empty: usize,
    strided: usize,
}

impl Covered {
    fn count(&mut self, inputs: &[DTensor], strided: bool) {
        let of_input = |x: &DTensor| {
            let mesh = x.mesh();
            let block = |rank: usize| x.spec().block_at(&mesh.coordinate_of(rank).unwrap());
            let sizes = (0..mesh.size()).map(|rank| block(rank).iter().map(|range| range.len()).collect_vec());
            let (sizes, cut) = (sizes.collect_vec(), x.placements().iter().any(|p| p.shard_dim().is_some()));
            let empty = x.elem_count() > 0 && sizes.iter().any(|size| size.contains(&0));
            (cut, sizes.iter().all_equal(), empty)
        };
        let pieces = inputs.iter().map(of_input).filter(|(cut, ..)| *cut).collect_vec();
        self.even += usize::from(pieces.iter().any(|(_, equal, _)| *equal));
        self.uneven += usize::from(pieces.iter().any(|(_, equal, empty)| !equal && !empty));
        self.empty += usize::from(pieces.iter().any(|(.., empty)| *empty));
        self.strided += usize::from(strided);
    }

    fn add(&mut self, other: Self) {
        self.even += other.even;
        self.uneven += other.uneven;
        self.empty += other.empty;
        self.strided += other.strided;
    }
}

/// The same tensor in other memory: every second element of a transposed one.
fn strided(x: &DTensor) -> Result<DTensor> {
    let local = x.to_local();
    let (rank, last) = (local.rank(), local.rank().saturating_sub(1));
    let swap = |x: &Tensor| if rank > 1 { x.transpose(0, last) } else { Ok(x.clone()) };
    let view = if local.elem_count() == 0 {
        local.unsqueeze(0)?.squeeze(0)? // nothing lies nowhere
    } else {
        let turned = swap(local)?;
        swap(&Tensor::stack(&[&turned.detach(), &turned], rank)?.narrow(rank, 1, 1)?.squeeze(rank)?)?
    };
    let view = DTensor::from_local_with_spec(view, x.spec().clone())?;
    (0..x.mesh().ndim()).filter(|&axis| x.is_varying(axis)).try_fold(view, |view, axis| view.varying_on(axis))
}

/// One op with its inputs in these layouts: value and all gradients.
fn run(
    case: &Case,
    reference: &Reference,
    mesh: &DeviceMesh,
    lays: &[Vec<Lay>],
    (gaps, explained, covered): (bool, bool, &mut Covered),
) -> Result<Outcome> {
    let dtype = reference.weights.dtype();
    let mut leaves = Vec::new();
    let mut inputs = Vec::new();
    for (whole, lays) in reference.inputs.iter().zip(lays) {
        let (input, leaf) = if whole.dtype().is_float() {
            let leaf = Leaf::new(whole, mesh, lays)?;
            (leaf.tensor.clone(), Some(leaf))
        } else {
            let placements = lays.iter().map(|lay| lay.placement()).collect_vec();
            (DTensor::distribute(whole, mesh, &placements)?, None)
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

/// What `explain` tells is what the ranks send, and what plans say of the inputs is what is sent for them.
fn explains_all(case: &Case, inputs: &[DTensor]) -> Result<()> {
    let check = |inputs: &[DTensor], shared: bool| {
        let ((out, told), counts) = comm::record(|| explain(|| (case.distributed)(inputs)));
        assert_eq!(told.bytes(), counts.total_bytes(), "{}: {told}", case.name);
        assert_eq!(told.calls().count(), counts.total(), "{}: {told}", case.name);
        for step in &told.steps {
            let planned: usize = step.inputs.iter().map(|input| input.bytes).sum();
            let moved: usize = step.moved.iter().map(|call| call.bytes).sum();
            // Uses of a tracked tensor share what was sent for one of them.
            assert!(moved == planned || shared && moved < planned, "{}: {step}: {planned} planned", case.name);
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

/// The meshes of a sweep; those of two axes have more layouts than are tried.
const MESHES: [&[usize]; 5] = [&[4], &[3], &[2], &[2, 2], &[3, 2]];

/// How many layouts of a case are tried on a mesh at most.
fn most(dtype: DType, axes: usize) -> usize {
    match (dtype, axes) {
        (DType::F64, 1) => 200,
        (DType::F64, _) => 40,
        _ => 12,
    }
}

/// Runs all cases in f64 and in fewer layouts in f32, on all meshes, and panics on the first that is not equal.
///
/// Every other layout is tried with inputs in memory with gaps. Prints what was tried, past the capture of tests.
pub(crate) fn sweep(family: &str, cases: Vec<Case>) {
    sweep_in(&[DType::F64, DType::F32], family, cases);
}

/// Like [`sweep`] in these dtypes.
pub(crate) fn sweep_in(dtypes: &[DType], family: &str, cases: Vec<Case>) {
    let cases = Arc::new(cases);
    for &dtype in dtypes {
        let (mut equal, mut covered) = (0, Covered::default());
        for (nth, shape) in MESHES.into_iter().enumerate() {
            let (tried, of_mesh) = sweep_mesh((family, dtype), &cases, (nth, shape));
            equal += tried;
            covered.add(of_mesh);
        }
        let Covered { even, uneven, empty, strided } = covered;
        assert!(
            [even, uneven, empty, strided].iter().all(|&n| n > 0),
            "{family} lacks some: even {even}, uneven {uneven}, empty {empty}, strided {strided}"
        );
        let (n, dtype) = (cases.len(), dtype.as_str());
        let of = format!("even {even:5}  uneven {uneven:5}  empty {empty:5}  strided {strided:5}");
        let line = format!("sweep {family:26} {dtype} {n:4} ops {equal:6} equal, of which {of}\n");
        std::io::stdout().write_all(line.as_bytes()).unwrap(); // tests capture what `println` writes
    }
}

/// All cases on one mesh: how many were equal, and what they cover.
fn sweep_mesh(
    (family, dtype): (&str, DType),
    cases: &Arc<Vec<Case>>,
    (nth, shape): (usize, &'static [usize]),
) -> (usize, Covered) {
    let cases = cases.clone();
    let ranks = on_ranks(shape.iter().product(), family, move |ctx| -> Result<(Vec<(String, Outcome)>, Covered)> {
        let mesh = mesh(ctx, shape)?;
        let (mut outcomes, mut covered) = (Vec::new(), Covered::default());
        for case in cases.iter() {
            let reference = Reference::new(case, dtype)?;
            for (i, lays) in layouts(case, mesh.ndim(), most(dtype, shape.len())).into_iter().enumerate() {
                let gaps = (i + nth) % 2 == 1;
                let shown = lays.iter().map(|lays| format!("({})", lays.iter().join(", "))).join(" ");
                let memory = if gaps { ", strided" } else { "" };
                let label = format!("{} {} as {shown}{memory} on {mesh}", case.name, dtype.as_str());
                let outcome =
                    run(case, &reference, &mesh, &lays, (gaps, i % 4 == 0 && dtype == DType::F64, &mut covered));
                let outcome = outcome.map_err(|e| candle_core::Error::Msg(format!("{label}: {e}")))?;
                outcomes.push((label, outcome));
            }
        }
        Ok((outcomes, covered))
    });
    for (i, (label, first)) in ranks[0].0.iter().enumerate() {
        let all = ranks.iter().map(|(outcomes, _)| &outcomes[i].1).collect_vec();
        let wrong = all.iter().find(|outcome| matches!(outcome, Outcome::Wrong(_)));
        assert!(wrong.is_some() || all.iter().all(|outcome| *outcome == first), "{label}: {all:?}");
        match wrong.unwrap_or(&first) {
            Outcome::Equal => {}
            Outcome::Refused(text) | Outcome::Wrong(text) => panic!("{label}: {text}"),
        }
    }
    (ranks[0].0.len(), ranks[0].1)
}
