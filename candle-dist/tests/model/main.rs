//! Checks protocols with loom, a model checker that tries every interleaving and every value a load may see.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod letters;
mod waiting;

/// Tries the interleavings of `run` with at most `preemptions` preemptions.
fn explore(preemptions: Option<usize>, run: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(run);
}
