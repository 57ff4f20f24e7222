//! What is checked when a model is complete: that ranks have built the same, and that the plan fits the model.
use super::{BuilderState, MeshVarBuilder};
use crate::nn::Parameters;
use crate::nn::adapter::check_patterns;
use crate::nn::source::ParameterSource;
use crate::{Error, Result, Weights};
use candle_dist::ProcessGroup;
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What a builder knows of the end of its model.
#[derive(Default)]
pub(super) struct BuildStatus {
    /// Whether the plan was checked, or a parameter could not be built, so that the caller knows of it.
    is_settled: AtomicBool,
}

/// A parameter that is being built. If it is dropped without `end`, its error is the caller's.
pub(super) struct BuildGuard<'a>(&'a BuildStatus);

impl BuildStatus {
    pub(super) fn begin(&self) -> BuildGuard<'_> {
        self.is_settled.store(true, Relaxed);
        BuildGuard(self)
    }
}

impl BuildGuard<'_> {
    pub(super) fn end(self) {
        self.0.is_settled.store(false, Relaxed);
    }
}

/// What one rank has of a model whose stages several ranks build.
#[derive(Serialize, Deserialize)]
struct StageOfModel {
    seed: u64,
    plan: String,
    /// The patterns of the plan that matched no module on this rank.
    unmatched: BTreeSet<String>,
    /// The patterns of its adapters that did so.
    adapters: BTreeSet<String>,
}

impl MeshVarBuilder {
    /// Returns the parameters that were built.
    ///
    /// All ranks of the mesh call it. They compare the seed, the plan, the names, layouts and dtypes of the parameters, and
    /// [what their files have](Weights::fingerprint) or the first elements of the tensors that they were made of: one
    /// [check](candle_dist::ProcessGroup::compare) of 8 bytes per rank. If nobody calls it, patterns of the plan without a module are a
    /// warning when the builder is dropped. The stages of a pipeline are checked by its runtime.
    ///
    /// # Errors
    /// On all ranks alike: if they have built unlike models; if a pattern of the plan matched no module, so that the model would
    /// not run as planned; or if a [moved](Self::parallelize) model has tensors that no layer used.
    #[track_caller]
    pub fn finish(&self) -> Result<Parameters> {
        let shared = &*self.shared;
        shared.completion.is_settled.store(true, Relaxed);
        let left = match &*shared.source {
            ParameterSource::Moved(moved, _) => moved.finish(),
            _ => Ok(()),
        };
        if self.mesh().size() > 1 {
            let group = self.mesh().group()?;
            let compared = group.with_description("the comparison of models in MeshVarBuilder::finish");
            if let Some(texts) = compared.compare(&self.description(&left))? {
                return Err(unlike(group, &texts));
            }
        }
        shared.plan.check_all_matched(&shared.matched.lock().unwrap_or_else(PoisonError::into_inner))?;
        self.adapters.iter().try_for_each(|set| set.check_matched())?;
        left?;
        Ok(self.built())
    }

    /// Checks a model whose stages the ranks of `group` have built, each with a builder of its own. Returns the patterns of the plan that
    /// matched no module of any stage, in quotes: typos, or layers that are made in a forward pass, such as a tied head.
    ///
    /// Every rank of the group calls it; a runtime of a pipeline does, and warns of such patterns.
    ///
    /// # Errors
    /// On all ranks alike, if the builders have unlike seeds, or a pattern of an adapter matched no module of any stage.
    #[track_caller]
    pub fn finish_stages(&self, group: &ProcessGroup) -> Result<Vec<String>> {
        const OP: &str = "finish_stages";
        let shared = &*self.shared;
        shared.completion.is_settled.store(true, Relaxed);
        let mine = StageOfModel {
            seed: shared.seed,
            plan: shared.plan.to_string(),
            unmatched: shared.unmatched(),
            adapters: self.unmatched_adapters(),
        };
        let failed = |error: serde_json::Error| Error::Op {
            op: OP,
            reason: format!("a message between ranks ({error})"),
        };
        let text = serde_json::to_string(&mine).map_err(failed)?;
        let compared = group.with_description("the comparison of the plans of stages").compare(&text)?;
        let texts = compared.unwrap_or_else(|| vec![text]);
        let stages: Vec<StageOfModel> =
            texts.iter().map(|text| serde_json::from_str(text).map_err(failed)).collect::<Result<_>>()?;
        if let Some(rank) = stages.iter().position(|stage| stage.seed != stages[0].seed) {
            let (ranks, seeds) = (group.ranks(), [stages[0].seed, stages[rank].seed]);
            return Error::op(
                OP,
                format!(
                    "rank {} builds its stages with seed {}, and rank {} with seed {}; give all builders of a model one seed",
                    ranks[0], seeds[0], ranks[rank], seeds[1]
                ),
            );
        }
        let of_adapters = mine.adapters.iter();
        let nowhere =
            of_adapters.filter(|pattern| stages.iter().all(|stage| stage.adapters.contains(*pattern)));
        check_patterns(nowhere)?;
        // Stages may have plans of their own.
        let of_plan = || stages.iter().filter(|stage| stage.plan == mine.plan);
        let unmatched =
            mine.unmatched.iter().filter(|pattern| of_plan().all(|stage| stage.unmatched.contains(*pattern)));
        Ok(unmatched.map(|pattern| format!("{pattern:?}")).collect())
    }

    /// Returns the patterns of adapters that matched no module.
    fn unmatched_adapters(&self) -> BTreeSet<String> {
        self.adapters.as_ref().map(|set| set.unmatched()).unwrap_or_default()
    }

    /// Describes all that must be equal on the ranks of the mesh, a line for each property.
    fn description(&self, left: &Result<()>) -> String {
        let shared = &*self.shared;
        let of_files = |weights: &Weights| match weights.fingerprint() {
            Ok(number) => format!("parameters of files with the fingerprint {number:016x}"),
            Err(error) => error.to_string(),
        };
        let source = match &*shared.source {
            ParameterSource::Fresh => "fresh parameters".into(),
            ParameterSource::Loaded(..) => "parameters of a VarBuilder".into(),
            ParameterSource::Stored(weights) => of_files(weights),
            ParameterSource::Moved(..) => "parameters of a model".into(),
        };
        let mut lines =
            vec![format!("seed {}", shared.seed), format!("dtype {}", shared.dtype.as_str()), source];
        if let ParameterSource::Loaded(_, samples) | ParameterSource::Moved(_, samples) = &*shared.source {
            lines.extend(samples.lines());
        }
        let adapters = self.adapters.iter().flat_map(|set| set.adapters());
        lines.extend(adapters.filter_map(|adapter| {
            adapter
                .weights()
                .map(|weights| format!("the adapter {:?}: {}", adapter.name(), of_files(weights)))
        }));
        lines.extend(
            shared.plan.to_string().lines().map(|line| format!("the line {:?} in its plan", line.trim())),
        );
        let built = self.built();
        let parameters = built.iter().map(|parameter| {
            let frozen = if parameter.is_frozen() { ", frozen" } else { "" };
            format!("the parameter {:?} {}{frozen}", parameter.name, parameter.tensor.spec())
        });
        lines.extend(parameters.sorted());
        lines.extend(
            shared.unmatched().iter().map(|pattern| format!("the pattern {pattern:?} without a module")),
        );
        lines.extend(left.as_ref().err().map(|error| error.to_string()));
        lines.join("\n")
    }
}

impl BuilderState {
    /// Returns the patterns of the plan that matched no module.
    fn unmatched(&self) -> BTreeSet<String> {
        let matched = self.matched.lock().unwrap_or_else(PoisonError::into_inner);
        self.plan.unmatched(&matched).map(str::to_string).collect()
    }
}

impl Drop for BuilderState {
    /// Warns of a plan that was never checked and does not fit.
    fn drop(&mut self) {
        let is_first = self.mesh.coordinate().iter().all(|&at| at == 0);
        if self.completion.is_settled.load(Relaxed) || !is_first || std::thread::panicking() {
            return;
        }
        let unmatched = self.unmatched();
        let is_unused = self.built.get_mut().unwrap_or_else(PoisonError::into_inner).is_empty();
        if !unmatched.is_empty() && !is_unused {
            candle_dist::warn(format_args!(
                "{} in the {} matched no module of the model, and nobody called MeshVarBuilder::finish, which refuses that",
                unmatched.iter().map(|pattern| format!("{pattern:?}")).join(", "),
                self.plan.to_string().lines().next().unwrap_or_default()
            ));
        }
    }
}

/// Returns the error of ranks with unlike descriptions: the first line of one that the other lacks, and the other's.
fn unlike(group: &ProcessGroup, texts: &[String]) -> Error {
    let at = texts.iter().position(|text| *text != texts[0]).unwrap_or_default();
    let of = |mine: &'_ str, other: &'_ str| {
        let own = mine.lines().find(|line| other.lines().all(|line_there| line_there != *line));
        own.unwrap_or("nothing like it").to_string()
    };
    let (first, other, ranks) = (of(&texts[0], &texts[at]), of(&texts[at], &texts[0]), group.ranks());
    Error::Op {
        op: "finish",
        reason: format!(
            "rank {} has {first}, and rank {} has {other}; give the builders of all ranks one seed, dtype and plan and the same \
             weights, and build the same layers under the same paths",
            ranks[0], ranks[at]
        ),
    }
}
