//! The options of groups in checkpoints.
use super::group::{Groups, OptimizerGroup, read};
use super::params::Params;
use super::slot::{OPTIONS, Slot};
use crate::{DTensor, Error, Result, Weights};
use itertools::Itertools;

impl<P: Params> Groups<P> {
    /// Returns the options that each group was saved with, or those that it has if a checkpoint has none.
    ///
    /// They are saved for each parameter: the stages of a pipeline have groups of their own, and a checkpoint loads with other stages.
    ///
    /// # Errors
    /// If parameters of one group were saved with unlike options, or with options that need other state.
    pub(super) fn saved_params(&self, saved: &Weights) -> Result<Vec<P>> {
        let now = || self.0.iter().map(|group| group.params.clone()).collect();
        let (with, without): (Vec<&Slot>, Vec<&Slot>) =
            self.slots().partition(|slot| saved.contains_tensor(&slot.name::<P>(OPTIONS)));
        match (with.first(), without.first()) {
            (None, _) => return Ok(now()),
            (Some(with), Some(without)) => {
                let (with, without) = (&with.of.name, &without.of.name);
                return Self::refuse(format!(
                    "the checkpoint has the options of {with} and not of {without}"
                ));
            }
            _ => {}
        }
        let wanted: Vec<(String, DTensor)> = self
            .0
            .iter()
            .flat_map(|group| group.slots.iter().map(|slot| slot.options(&group.params)))
            .try_collect()?;
        let mut values = read(saved, &wanted)?.into_iter();
        let of_group = |(at, group): (usize, &OptimizerGroup<P>)| {
            let mut saved: Option<(&Slot, Vec<f64>)> = None;
            for (slot, value) in group.slots.iter().zip(values.by_ref()) {
                let options = value.to_local().to_vec1::<f64>()?;
                match &saved {
                    Some((first, of_first)) if !is_same(of_first, &options) => {
                        let shown = format!("{} has {}", first.of.name, unlike::<P>(of_first, &options));
                        let shown =
                            format!("{shown}, {} has {}", slot.of.name, unlike::<P>(&options, of_first));
                        return Self::refuse(format!(
                            "parameters of group {at} were saved with unlike options: {shown}"
                        ));
                    }
                    Some(_) => {}
                    None => saved = Some((slot, options)),
                }
            }
            let Some((_, saved)) = saved else { return Ok(group.params.clone()) };
            let params = group.params.with_options(&saved)?;
            params.check()?;
            let state = |params: &P| (params.states(), params.counts_steps());
            if state(&params) != state(&group.params) {
                let now = group.params.options();
                let shown =
                    format!("{}, and is made with {}", unlike::<P>(&saved, &now), unlike::<P>(&now, &saved));
                return Self::refuse(format!(
                    "group {at} was saved with {shown}, for which parameters have other state"
                ));
            }
            Ok(params)
        };
        self.0.iter().enumerate().map(of_group).collect()
    }

    fn refuse<T>(reason: String) -> Result<T> {
        let fix = "make the groups and options that were saved, or use load_partial, which leaves the options as they are";
        Error::op(P::TYPE, format!("{reason}; {fix}"))
    }
}

fn is_same(a: &[f64], b: &[f64]) -> bool {
    a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits()))
}

/// Lists the options that are not those of `other`.
fn unlike<P: Params>(options: &[f64], other: &[f64]) -> String {
    let named =
        P::OPTIONS.iter().zip(options.iter().zip(other)).filter(|(_, (a, b))| a.to_bits() != b.to_bits());
    named.map(|(name, (value, _))| format!("{name} {value}")).join(" and ")
}
