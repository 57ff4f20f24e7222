//! Every schedule on worlds 1 to 4, even and uneven microbatches: loss, outputs and all gradients of the uncut model.
use crate::runtime::model::{Expected, Values, batch, builder, numbers, pipe, uncut, values};
use candle_core::DType;
use candle_pipe::schedule::{Schedule, ScheduleKind};
use candle_pipe::{Keep, Result, Runtime, StepOptions};
use itertools::Itertools;
use std::collections::HashSet;
use std::sync::Arc;
use test_utils::{on_ranks, over_nccl, skip, worlds};

pub(crate) fn close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let size = want.iter().fold(1.0, |size: f64, want| size.max(want.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (got - want).abs();
        assert!(off <= tolerance * size, "{what} at {i}: {got}, one device {want}, off by {off:e}");
    }
}

/// One case: a schedule, and how it runs.
#[derive(Clone)]
struct Case {
    schedule: Schedule,
    rows: usize,
    dtype: DType,
    keep: Vec<Keep>,
    drop: bool,
}

fn check(label: &str, case: Case, values: &Arc<Values>) {
    let tolerance = if case.dtype == DType::F64 { 1e-12 } else { 1e-5 };
    let expected = Arc::new(uncut(values, case.rows, case.dtype, case.drop).unwrap());
    let (values, ranks) = (values.clone(), case.schedule.ranks().len());
    let shown = label.to_string();
    let names = on_ranks(ranks, label, move |ctx| -> Result<Vec<String>> {
        let Expected { loss, outputs, grads } = &*expected;
        let pipe = pipe(case.schedule.stages(), case.drop)?;
        let runtime =
            Runtime::new(&pipe, &case.schedule, ctx.group(), &builder(&values, case.dtype)?, ctx.device())?;
        let batch = batch(case.rows, case.schedule.microbatches(), case.dtype)?;
        let options = StepOptions::default().step(3).keep(case.keep.clone());
        let mut found = Vec::new();
        for _ in 0..2 {
            // Twice: nothing of a step is left for the next.
            found.clear();
            let made = runtime.forward_backward(&batch, &options)?.step;
            if let Ok(got) = made.loss() {
                close(&numbers(got)?, &[*loss], tolerance, &format!("{shown}: loss"));
                found.push("loss".to_string());
            }
            for (name, want) in outputs {
                let parts =
                    made.outputs.iter().filter_map(|output| output.get(name).ok().cloned()).collect_vec();
                if !parts.is_empty() {
                    close(
                        &numbers(batch.merge(&parts, None)?.tensor()?)?,
                        want,
                        tolerance,
                        &format!("{shown}: {name}"),
                    );
                    found.push((*name).to_string());
                }
            }
            for (name, parameter) in runtime.stages().flat_map(|stage| stage.parameters()) {
                let grad =
                    made.grads.get(parameter).unwrap_or_else(|| panic!("{shown}: no gradient of {name}"));
                close(&numbers(grad)?, &grads[name], tolerance, &format!("{shown}: gradient of {name}"));
                found.push(name.clone());
            }
        }
        Ok(found)
    });
    let all: HashSet<String> = names.into_iter().flatten().collect();
    assert_eq!(all.len(), 3 + values_count(), "{label}: {all:?}");
}

fn values_count() -> usize {
    values(DType::F64).unwrap().len()
}

pub(crate) const KINDS: [(ScheduleKind, &[usize]); 12] = [
    (ScheduleKind::GPipe, &[1]),
    (ScheduleKind::OneFOneB, &[1]),
    (ScheduleKind::Eager1F1B, &[1]),
    (ScheduleKind::Interleaved1F1B, &[1, 2, 3]),
    (ScheduleKind::LoopedBfs, &[1, 2, 3]),
    (ScheduleKind::ZbH1, &[1]),
    (ScheduleKind::ZbH2, &[1]),
    (ScheduleKind::InterleavedZb, &[1, 2, 3]),
    (ScheduleKind::Zbv, &[2]),
    (ScheduleKind::VHalf, &[2]),
    (ScheduleKind::VMin, &[2]),
    (ScheduleKind::DualPipeV, &[2]),
];

/// The numbers of microbatches that most tests give them.
pub(crate) const MICROBATCHES: [usize; 4] = [1, 4, 6, 8];

/// All schedules of a number of ranks, with a name each, for these numbers of microbatches.
pub(crate) fn schedules(ranks: usize, microbatches: &[usize]) -> Vec<(String, Schedule)> {
    let mut all = Vec::new();
    for (kind, stages) in KINDS {
        for (&v, &microbatches) in itertools::iproduct!(stages, microbatches) {
            let schedule = kind.schedule(ranks, microbatches, v);
            // One kind alone does not take every number.
            if kind == ScheduleKind::DualPipeV && microbatches < ranks * v {
                schedule.unwrap_err();
                continue;
            }
            let label = format!("{kind} on {ranks}, {microbatches} microbatches, {v} stages a rank");
            all.push((label, schedule.unwrap()));
        }
    }
    all
}

#[test]
fn every_kind_is_in_the_table() {
    let missing: Vec<_> =
        ScheduleKind::all().filter(|kind| KINDS.iter().all(|(listed, _)| listed != kind)).collect();
    assert!(missing.is_empty(), "kinds whose gradients no test compares; add them to KINDS: {missing:?}");
}

#[test]
fn every_schedule_computes_what_one_device_computes() {
    if over_nccl() {
        return skip("some schedules are run over NCCL");
    }
    let values = Arc::new(values(DType::F64).unwrap());
    for (ranks, count) in [(1, 71), (2, 71), (3, 70), (4, 69)] {
        let schedules = schedules(ranks, &MICROBATCHES);
        assert_eq!(schedules.len(), count, "a new kind adds 4 schedules for each number of stages in KINDS");
        for (label, schedule) in schedules {
            for rows in [schedule.microbatches() * 2, schedule.microbatches() * 2 + 3] {
                // All activations, the inputs of some stages, or of all.
                let by_stage =
                    (0..schedule.stages()).map(|s| if s % 2 == 0 { Keep::Inputs } else { Keep::Activations });
                let keep = match (rows % 2, schedule.microbatches() % 4) {
                    (0, _) => vec![],
                    (_, 0) => by_stage.collect(),
                    _ => vec![Keep::Inputs],
                };
                let case = Case { schedule: schedule.clone(), rows, dtype: DType::F64, keep, drop: true };
                check(&format!("{label}, {rows} rows"), case, &values);
            }
        }
    }
}

/// Few enough for simulated GPUs; the schedules differ in the order of messages.
#[test]
fn some_schedules_do_so_on_the_devices_of_the_backend() {
    let values = Arc::new(values(DType::F64).unwrap());
    let some = [
        (ScheduleKind::GPipe, 1),
        (ScheduleKind::OneFOneB, 1),
        (ScheduleKind::Interleaved1F1B, 2),
        (ScheduleKind::ZbH1, 1),
        (ScheduleKind::DualPipeV, 2),
    ];
    for ranks in worlds(2..=4) {
        for (kind, stages) in some {
            let schedule = kind.schedule(ranks, 2 * ranks, stages).unwrap();
            let rows = schedule.microbatches() + 3;
            let case = Case { schedule, rows, dtype: DType::F64, keep: vec![], drop: true };
            check(&format!("{kind} on {ranks}"), case, &values);
        }
    }
}

#[test]
fn so_do_they_in_f32() {
    if over_nccl() {
        return skip("some schedules are run over NCCL");
    }
    let values = Arc::new(values(DType::F32).unwrap());
    for (label, schedule) in schedules(3, &MICROBATCHES) {
        let rows = schedule.microbatches() + 1;
        let case = Case { schedule, rows, dtype: DType::F32, keep: vec![], drop: false };
        check(&label, case, &values);
    }
}
