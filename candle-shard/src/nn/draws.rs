//! Counts uses of random layers, and replays random draws when a part of a model runs a second time.
use crate::autograd::counts::passes;
use crate::nn::Mode;
use crate::{Error, Result};
use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

thread_local! {
    /// The active runs whose draws are recorded or replayed, the innermost last.
    static RUNS: RefCell<Vec<Run>> = const { RefCell::new(Vec::new()) };
}

enum Run {
    First(Vec<u64>),
    Again { draws: Draws, next: usize },
}

/// The random draws of one run of a part of a model, to replay in another run that must compute the same numbers.
///
/// [`recompute`](crate::nn::recompute) does this itself. `Draws` is for other code that computes a part twice.
/// Without it the second run would count as a second use of each [`Dropout`](crate::nn::Dropout) and get other masks.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_dist::World;
/// use candle_shard::nn::{Draws, Dropout, Mode, ShardedVarBuilder};
/// use candle_shard::parallel::Plan;
/// use candle_shard::{DTensor, Replicate, Result};
///
/// World::local(1).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 1)])?;
///     let vb = ShardedVarBuilder::fresh(1, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
///     let (dropout, x) = (Dropout::new(0.5, &vb), DTensor::ones(64, DType::F32, &Device::Cpu, &mesh, &[Replicate])?);
///     let run = || dropout.forward(&x, Mode::Train { step: 0 })?.to_local().to_vec1::<f32>().map_err(candle_shard::Error::from);
///     let (first, draws) = Draws::of(run)?;
///     let (again, second) = (draws.again(run)?, run()?);
///     assert_eq!(first, again);
///     assert_ne!(first, second);
///     Ok::<_, candle_shard::Error>(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Draws(Arc<[u64]>);

impl Draws {
    /// Runs `f` and returns its result with its draws.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn of<T, E>(f: impl FnOnce() -> Result<T, E>) -> Result<(T, Self), E> {
        let (made, run) = within(Run::First(Vec::new()), f);
        match run {
            Some(Run::First(drawn)) => Ok((made?, Self(drawn.into()))),
            _ => Ok((made?, Self::default())),
        }
    }

    /// Runs `f` with these draws and returns its result.
    ///
    /// # Errors
    /// Those of `f`. A [`Dropout`](crate::nn::Dropout) in `f` fails if the first run had fewer draws.
    pub fn again<T, E>(&self, f: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        within(Run::Again { draws: self.clone(), next: 0 }, f).0
    }
}

/// Runs `f` within a run and returns both. If `f` panics, the run ends too.
fn within<T>(run: Run, f: impl FnOnce() -> T) -> (T, Option<Run>) {
    struct Outer(usize);
    impl Drop for Outer {
        fn drop(&mut self) {
            RUNS.with_borrow_mut(|runs| runs.truncate(self.0));
        }
    }
    let _outer = Outer(RUNS.with_borrow(Vec::len));
    RUNS.with_borrow_mut(|runs| runs.push(run));
    let made = f();
    (made, RUNS.with_borrow_mut(Vec::pop))
}

/// Returns whether a part of a model is being recomputed.
pub(super) fn is_again() -> bool {
    RUNS.with_borrow(|runs| runs.iter().any(|run| matches!(run, Run::Again { .. })))
}

/// Counts the uses of one layer; its clones share the count.
#[derive(Debug, Clone, Default)]
pub(super) struct Uses(Arc<Mutex<Count>>);

#[derive(Debug, Default)]
struct Count {
    /// The pass that is counted.
    of: Option<(Mode, u64)>,
    uses: u64,
}

impl Uses {
    /// Returns the number of this use, from 0, in the present pass. A pass is identified by `mode` and the thread's
    /// count of backward passes.
    pub(super) fn next(&self, mode: Mode) -> Result<u64> {
        RUNS.with_borrow_mut(|runs| {
            let again = runs.iter().rposition(|run| matches!(run, Run::Again { .. }));
            let number = match again.map(|at| &mut runs[at]) {
                Some(Run::Again { draws, next }) => {
                    *next += 1;
                    let drawn = draws.0.get(*next - 1).copied();
                    drawn.ok_or_else(|| Error::Op {
                        op: "dropout",
                        reason: "a part of a model drew more masks when it was computed again; it must do the same \
                                 each time"
                            .into(),
                    })?
                }
                _ => self.count(mode),
            };
            for run in &mut runs[again.map_or(0, |at| at + 1)..] {
                if let Run::First(drawn) = run {
                    drawn.push(number);
                }
            }
            Ok(number)
        })
    }

    fn count(&self, mode: Mode) -> u64 {
        let mut count = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of = Some((mode, passes()));
        if count.of != of {
            *count = Count { of, uses: 0 };
        }
        count.uses += 1;
        count.uses - 1
    }
}
