//! The set-ups of a proof.
use super::model::ModelProgram;
use super::setup::{KEEPS, Setup};
use super::{PIPELINE, Proof};
use candle_core::DType;
use itertools::Itertools;

/// Returns the set-ups to prove: every mesh as it is, and every mesh with two more choices of the rest, or with all.
pub(super) fn all(plain: &Setup, proof: &Proof) -> Vec<Setup> {
    let meshes = meshes(plain.axes.len(), proof.ranks);
    let choices = choices(plain, proof);
    let mut setups = Vec::new();
    // A step that shares no factor with the number of choices meets all of them.
    let mut next = 0;
    for (nth, mesh) in meshes.iter().enumerate() {
        let on = |setup: &Setup, resume: bool| {
            let sized = |mesh: &[usize]| -> Vec<(String, usize)> {
                setup.axes.iter().zip(mesh).map(|((name, _), &size)| (name.clone(), size)).collect()
            };
            let is_possible = |mesh: &&Vec<usize>| {
                let next = Setup { axes: sized(mesh), ..setup.clone() };
                next.has_rows() && has_schedule(&next)
            };
            let possible: Vec<&Vec<usize>> = meshes.iter().filter(|_| resume).filter(is_possible).collect();
            let resume = (!possible.is_empty()).then(|| possible[(nth * 7 + 3) % possible.len()].clone());
            Setup { axes: sized(mesh), resume, ..setup.clone() }
        };
        // A function has no parameters to save.
        let can_resume = !matches!(proof.subject.program, ModelProgram::Function(_));
        if proof.exhaustive {
            setups.extend(choices.iter().map(|choice| on(choice, can_resume)));
            continue;
        }
        setups.push(on(plain, can_resume));
        for _ in 0..2.min(choices.len()) {
            next += 17;
            setups.push(on(&choices[next % choices.len()], false));
        }
    }
    setups.retain(Setup::has_rows);
    setups.into_iter().filter(|setup| setup != plain).collect()
}

/// Returns the sizes of all meshes with this many axes and up to this many ranks, the smallest first.
fn meshes(axes: usize, ranks: usize) -> Vec<Vec<usize>> {
    let all = (0..axes).map(|_| 1..=ranks).multi_cartesian_product();
    let all = all.filter(|sizes| sizes.iter().product::<usize>() <= ranks);
    all.sorted_by_key(|sizes| sizes.iter().product::<usize>()).collect()
}

/// Returns all combinations of what is no mesh.
fn choices(plain: &Setup, proof: &Proof) -> Vec<Setup> {
    let (whole, less) = (plain.batch, plain.batch - plain.batch / 3);
    let batches = [whole, less, 2, 1].into_iter().filter(|&rows| rows > 0 && rows <= whole).unique();
    // A function has one step.
    let has_steps = !matches!(proof.subject.program, ModelProgram::Function(_));
    let in_turn = (has_steps && less < whole).then_some((whole, Some(less)));
    let batches = batches.map(|rows| (rows, None)).chain(in_turn);
    let passes: &[usize] = match proof.subject.program {
        ModelProgram::Layers(_) => &proof.passes,
        _ => &[1],
    };
    let schedules: Vec<Option<_>> = match plain.schedule {
        None => vec![None],
        Some(_) => (proof.schedules.iter())
            .cartesian_product([1, 3, 4])
            .cartesian_product(KEEPS.map(|(_, keep)| keep))
            .map(|((&kind, microbatches), keep)| Some((kind, microbatches, keep)))
            .collect(),
    };
    let computes: Vec<(DType, Option<DType>)> = proof.dtypes.iter().map(|&dtype| (dtype, None)).collect();
    let mixed = !proof.subject.units.is_empty() && proof.dtypes.contains(&DType::BF16);
    let computes = computes.into_iter().chain(mixed.then_some((DType::F32, Some(DType::BF16))));
    let all = batches
        .cartesian_product(computes)
        .cartesian_product(passes)
        .cartesian_product(0..proof.subject.plans.len())
        .cartesian_product([false, true])
        .cartesian_product(schedules);
    let choice = |((((((batch, second), (dtype, compute)), &passes), plan), strict), schedule)| Setup {
        dtype,
        compute,
        batch,
        second,
        passes,
        plan,
        strict,
        schedule,
        ..plain.clone()
    };
    all.map(choice).collect()
}

/// Returns whether the schedule of a set-up can run on its ranks.
pub(super) fn has_schedule(setup: &Setup) -> bool {
    setup.schedule.is_none_or(|(kind, microbatches, _)| {
        kind.schedule(setup.size_of(PIPELINE), microbatches, kind.stages_per_rank()).is_ok()
    })
}
