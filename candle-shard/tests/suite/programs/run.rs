//! A program on the ranks of its mesh.
use super::program::{Leaf, Program, Source};
use super::table::Content;
use super::truth::{Truth, largest, value};
use candle_dist::{DeviceMesh, RankContext};
use candle_shard::{DTensor, Error, Result, Spec};
use itertools::Itertools;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use test_utils::{Ranks, mesh, strided, value_error};

/// How a program ended on a rank.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Outcome {
    Equal,
    Wrong(String),
    Refused(String),
}

/// What rounding may change, relative to the largest element of the whole.
const TOLERANCE: f64 = 1e-9;

fn make(leaf: &Leaf, mesh: &DeviceMesh) -> Result<(DTensor, Option<test_utils::Leaf>)> {
    let (whole, at) = (leaf.whole(), leaf.lays.iter().map(|lay| lay.placement()).collect_vec());
    if leaf.content != Content::Float {
        return Ok((test_utils::distribute(&whole, mesh, &at)?, None));
    }
    let made = match &leaf.sizes {
        Some((axis, sizes)) => {
            let spec = Spec::new(mesh, &at, &leaf.shape[..], whole.dtype())?;
            test_utils::Leaf::with_spec(
                &whole,
                spec.with_sizes(*axis, Some(Arc::from(&sizes[..])))?,
                &leaf.lays,
            )?
        }
        None => test_utils::Leaf::new(&whole, mesh, &leaf.lays)?,
    };
    let tensor = if leaf.strided { strided(&made.tensor)? } else { made.tensor.clone() };
    Ok((tensor, Some(made)))
}

fn run(program: &Program, truth: &Truth, mesh: &DeviceMesh) -> Result<Outcome> {
    let leaves: Vec<_> = program.leaves.iter().map(|leaf| make(leaf, mesh)).try_collect()?;
    let (tensors, leaves): (Vec<DTensor>, Vec<_>) = leaves.into_iter().unzip();
    let mut steps: Vec<DTensor> = Vec::new();
    let mut refused = None;
    for step in &program.steps {
        let inputs = step.inputs.iter().map(|&source| value(source, &tensors, &steps).clone()).collect_vec();
        match (step.entry.here)(&inputs, &step.numbers) {
            Ok(made) => steps.push(made),
            Err(error @ Error::Dist(_)) => return Err(error), // the world is over
            Err(error) if program.wrong && steps.len() + 1 == program.steps.len() => {
                refused = Some(error.to_string());
            }
            Err(error) => return Ok(Outcome::Refused(format!("y{}: {error}", steps.len()))),
        }
    }
    let mut wrong = Vec::new();
    let mut compare = |what: String, error: f64, whole: f64| {
        if error > TOLERANCE * whole.max(1.0) {
            wrong.push(format!("{what} is off by {error:e}"));
        }
    };
    for (at, (made, want)) in steps.iter().zip(&truth.values).enumerate() {
        compare(format!("y{at}, {},", made.spec()), value_error(made, want)?, largest(want));
    }
    let mut loss: Option<DTensor> = None;
    for (at, (source, placements)) in program.loss.iter().enumerate() {
        let made = value(*source, &tensors, &steps);
        let weights = test_utils::distribute(&program.weights(at, made.dims()), mesh, placements)?;
        let term = made.mul(&weights)?.sum_all()?;
        loss = Some(loss.map_or(Ok(term.clone()), |loss| loss.add(&term))?);
    }
    if let Some(loss) = loss {
        let grads = loss.backward()?;
        for (at, (leaf, want)) in leaves.iter().zip(&truth.gradients).enumerate() {
            if let (Some(leaf), Some(want)) = (leaf, want) {
                compare(format!("the gradient of x{at}"), leaf.gradient_error(&grads, want)?, largest(want));
            }
        }
    }
    Ok(match (wrong.is_empty(), refused) {
        (false, _) => Outcome::Wrong(wrong.join(", ")),
        (true, Some(text)) => Outcome::Refused(text),
        (true, None) => Outcome::Equal,
    })
}

/// What the ranks must agree on, and what may not be at all.
fn judge(program: &Program, outcomes: &[&Outcome]) -> Result<Outcome, String> {
    if let Some(Outcome::Wrong(text)) = outcomes.iter().find(|outcome| matches!(outcome, Outcome::Wrong(_))) {
        return Err(text.clone());
    }
    match outcomes {
        [first, others @ ..] if others.iter().all(|other| other == first) => match first {
            Outcome::Refused(text) if !program.wrong => Err(format!("refused: {text}")),
            outcome => Ok((*outcome).clone()),
        },
        _ => Err(format!("the ranks do not agree: {outcomes:?}")),
    }
}

type Batch = Arc<Vec<(Program, Truth)>>;

/// Runs programs on the ranks of one mesh: how each ended, or how the world did.
fn on_mesh(shape: &[usize], batch: Batch) -> Result<Vec<Result<Outcome, String>>, String> {
    let (programs, axes) = (batch.clone(), shape.to_vec());
    let each = move |ctx: &RankContext| -> Result<Vec<Outcome>> {
        let mesh = mesh(ctx, &axes)?;
        batch.iter().map(|(program, truth)| run(program, truth, &mesh)).collect()
    };
    let ranks = Ranks::new(shape.iter().product(), "programs").deadline(Duration::from_secs(60)).run(each);
    let ranks = ranks.map_err(|error| error.to_string())?;
    let of_program = |at: usize| ranks.iter().map(|outcomes| &outcomes[at]).collect_vec();
    Ok(programs.iter().enumerate().map(|(at, (program, _))| judge(program, &of_program(at))).collect())
}

/// Why a program fails, run on its own.
pub(crate) fn failure(program: &Program) -> Option<String> {
    let truth = match Truth::new(program) {
        Ok(truth) => truth,
        Err(error) => return Some(format!("one device: {error}")),
    };
    match on_mesh(&program.mesh, Arc::new(vec![(program.clone(), truth)])) {
        Ok(judged) => judged.into_iter().find_map(Result::err),
        Err(text) => Some(text),
    }
}

/// Runs programs, those of one mesh in one world: how many were refused, and those that fail with the reason.
pub(crate) fn all(programs: Vec<Program>) -> (usize, Vec<(Program, String)>) {
    let mut by_mesh: BTreeMap<Vec<usize>, Vec<Program>> = BTreeMap::new();
    programs.into_iter().for_each(|program| by_mesh.entry(program.mesh.clone()).or_default().push(program));
    let (mut refused, mut failed) = (0, Vec::new());
    for (mesh, programs) in by_mesh {
        let with_truth = |program: &Program| Some((program.clone(), Truth::new(program).ok()?));
        let batch: Batch = Arc::new(programs.iter().filter_map(with_truth).collect());
        let judged =
            if batch.len() == programs.len() { on_mesh(&mesh, batch) } else { Err("one device".into()) };
        match judged {
            Ok(judged) => {
                refused += judged.iter().filter(|judged| matches!(judged, Ok(Outcome::Refused(_)))).count();
                let reasons = programs.into_iter().zip(judged);
                failed.extend(reasons.filter_map(|(program, judged)| Some((program, judged.err()?))));
            }
            // The world ended: which program did it shows alone.
            Err(text) => {
                let before = failed.len();
                failed
                    .extend(programs.iter().filter_map(|program| Some((program.clone(), failure(program)?))));
                if failed.len() == before {
                    failed.push((
                        programs[0].clone(),
                        format!("only together with others of its mesh: {text}"),
                    ));
                }
            }
        }
    }
    (refused, failed)
}

/// A smaller program that fails too, with its reason: without steps and terms that need not be there, in plainer layouts.
pub(crate) fn shrunk(program: Program, reason: String) -> (Program, String) {
    let mut smallest = (program, reason);
    'again: loop {
        for smaller in smaller(&smallest.0) {
            if let Some(reason) = failure(&smaller) {
                smallest = (smaller, reason);
                continue 'again;
            }
        }
        return smallest;
    }
}

/// Programs with one thing less.
fn smaller(program: &Program) -> Vec<Program> {
    let mut all = Vec::new();
    let last = program.steps.len() - usize::from(program.wrong);
    all.extend((0..last).rev().filter_map(|at| without(program, at)));
    for at in 0..program.loss.len() {
        let mut less = program.clone();
        less.loss.remove(at);
        all.push(less);
    }
    let used = |at: usize| program.steps.iter().any(|step| step.inputs.contains(&Source::Leaf(at)));
    for at in 0..program.leaves.len() {
        let with = |change: &dyn Fn(&mut Leaf)| {
            let mut less = program.clone();
            change(&mut less.leaves[at]);
            less
        };
        let leaf = &program.leaves[at];
        if leaf.strided {
            all.push(with(&|leaf| leaf.strided = false));
        }
        if leaf.sizes.is_some() {
            all.push(with(&|leaf| leaf.sizes = None));
        }
        let plain = test_utils::Lay::At(candle_shard::Replicate);
        for axis in 0..leaf.lays.len() {
            let sized = leaf.sizes.as_ref().is_some_and(|(cut, _)| *cut == axis);
            if leaf.lays[axis] != plain && !sized {
                all.push(with(&|leaf| leaf.lays[axis] = plain));
            }
        }
        if !used(at) && at + 1 == program.leaves.len() {
            let mut less = program.clone();
            less.leaves.pop();
            all.push(less);
        }
    }
    all
}

/// The program without a step that no other needs.
fn without(program: &Program, at: usize) -> Option<Program> {
    let source = Source::Step(at);
    if program.steps.iter().any(|step| step.inputs.contains(&source)) {
        return None;
    }
    let moved = |source: &mut Source| {
        if let Source::Step(step) = source {
            *step -= usize::from(*step > at);
        }
    };
    let mut less = program.clone();
    less.steps.remove(at);
    less.loss.retain(|(term, _)| *term != source);
    less.steps.iter_mut().flat_map(|step| &mut step.inputs).for_each(moved);
    less.loss.iter_mut().for_each(|(term, _)| moved(term));
    Some(less)
}
