//! Tests an op in every layout of its inputs, on many meshes, against one device.
//!
//! Use [`OpCheck`] to check your own op; [`sweep`] accepts lists of [`Case`]s. The meshes have 2, 3, 4, 2 × 2 and 3 × 2
//! ranks, or are those that an [`OpCheck`] names. Inputs are replicated, sharded on each dim in even, uneven and empty pieces, partial sums, and replicated
//! with partial gradients. Every other layout has them in strided memory. The value and the gradient of each input must
//! equal those of one device, all ranks must refuse alike, and [`explain`](candle_shard::explain()) must report exactly
//! what the ranks send, call by call and byte by byte.
mod arguments;
mod check;
mod covered;
mod run;

use crate::{mesh, on_ranks};
use candle_core::{DType, Tensor};
use candle_shard::{DTensor, Result};
use covered::{Covered, layouts};
use itertools::Itertools;
use run::{Outcome, Reference, run};
use std::io::Write;
use std::sync::Arc;

pub use arguments::Arguments;
pub use check::OpCheck;

/// The values of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Numbers in ±1.5, with a gradient.
    Float,
    /// Numbers in 0.5..2.5, with a gradient.
    Positive,
    /// -12, 0 and 12, whose shares sum exactly on all meshes, with a gradient.
    Whole,
    /// u32 below this bound, without gradient.
    Ids(u32),
}

/// An input: its global shape and its values.
pub type Input = (&'static [usize], Kind);

type Distributed = Arc<dyn Fn(&[DTensor]) -> Result<DTensor> + Send + Sync>;
type Plain = Arc<dyn Fn(&[Tensor]) -> candle_core::Result<Tensor> + Send + Sync>;

/// An op on inputs of some shapes, in both forms: on distributed tensors, and on one device.
#[derive(Clone)]
pub struct Case {
    name: String,
    inputs: Vec<(Vec<usize>, Kind)>,
    distributed: Distributed,
    plain: Plain,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Case").field("name", &self.name).field("inputs", &self.inputs).finish_non_exhaustive()
    }
}

impl Case {
    /// Creates a case; `plain` gets contiguous tensors.
    pub fn new(
        name: &str,
        inputs: &[Input],
        distributed: impl Fn(&[DTensor]) -> Result<DTensor> + Send + Sync + 'static,
        plain: impl Fn(&[Tensor]) -> candle_core::Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        let shapes = inputs.iter().map(|(shape, _)| format!("{shape:?}")).join(" ");
        let name = format!("{name} {shapes}");
        let inputs = inputs.iter().map(|(shape, kind)| (shape.to_vec(), *kind)).collect();
        Self { name, inputs, distributed: Arc::new(distributed), plain: Arc::new(plain) }
    }
}

/// The meshes of a sweep. Those with two axes have more layouts than are tested.
const MESHES: [&[usize]; 5] = [&[4], &[3], &[2], &[2, 2], &[3, 2]];

/// Returns the maximum number of layouts of a case that are tested on a mesh.
fn most(dtype: DType, axes: usize) -> usize {
    match (dtype, axes) {
        (DType::F64, 1) => 200,
        (DType::F64, _) => 40,
        _ => 12,
    }
}

/// Runs all cases on all meshes in f64, and in fewer layouts in f32.
///
/// Every other layout has inputs in strided memory. Prints the coverage, even if the test output is captured.
///
/// # Panics
/// On the first case that is refused, differs, or has unexplained communication; and if the shapes of all cases
/// together have no even, uneven or empty pieces.
pub fn sweep(family: &str, cases: Vec<Case>) {
    sweep_in(&[DType::F64, DType::F32], family, cases);
}

/// Like [`sweep`], in these dtypes.
///
/// # Panics
/// Like [`sweep`].
pub fn sweep_in(dtypes: &[DType], family: &str, cases: Vec<Case>) {
    sweep_on(&MESHES.map(<[usize]>::to_vec), true, dtypes, family, cases);
}

/// Like [`sweep`], on meshes of these shapes. With `covers_all`, there must be even, uneven and empty pieces.
fn sweep_on(meshes: &[Vec<usize>], covers_all: bool, dtypes: &[DType], family: &str, cases: Vec<Case>) {
    let cases = Arc::new(cases);
    for &dtype in dtypes {
        let (mut equal, mut covered) = (0, Covered::default());
        for (nth, shape) in meshes.iter().enumerate() {
            let (tried, of_mesh) = sweep_mesh((family, dtype), &cases, (nth, shape.clone()));
            equal += tried;
            covered.add(of_mesh);
        }
        let Covered { even, uneven, empty, strided } = covered;
        assert!(
            !covers_all || [even, uneven, empty, strided].iter().all(|&n| n > 0),
            "{family}: the shapes leave some pieces untried: even {even}, uneven {uneven}, empty {empty}, strided {strided}"
        );
        let (n, dtype) = (cases.len(), dtype.as_str());
        let of = format!("even {even:5}  uneven {uneven:5}  empty {empty:5}  strided {strided:5}");
        let line = format!("sweep {family:26} {dtype} {n:4} ops {equal:6} equal, of which {of}\n");
        let _ = std::io::stdout().write_all(line.as_bytes()); // tests capture what `println` writes
    }
}

/// How the cases ended on a rank, with their names, and what they covered.
pub(crate) type Outcomes = (Vec<(String, Outcome)>, Covered);

/// Runs all cases on one mesh. Returns how many were equal, and their coverage.
fn sweep_mesh(
    (family, dtype): (&str, DType),
    cases: &Arc<Vec<Case>>,
    (nth, shape): (usize, Vec<usize>),
) -> (usize, Covered) {
    let cases = cases.clone();
    let ranks = on_ranks(shape.iter().product(), family, move |ctx| -> Result<Outcomes> {
        let mesh = mesh(ctx, &shape)?;
        let (mut outcomes, mut covered) = (Vec::new(), Covered::default());
        for case in cases.iter() {
            let reference = Reference::new(case, dtype)?;
            for (i, lays) in layouts(case, mesh.ndim(), most(dtype, shape.len())).into_iter().enumerate() {
                let gaps = (i + nth) % 2 == 1;
                let shown = lays.iter().map(|lays| format!("({})", lays.iter().join(", "))).join(" ");
                let memory = if gaps { ", strided" } else { "" };
                let label = format!("{} {} as {shown}{memory} on {mesh}", case.name, dtype.as_str());
                let outcome = run(
                    case,
                    &reference,
                    &mesh,
                    &lays,
                    (gaps, i % 4 == 0 && dtype == DType::F64, &mut covered),
                );
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
