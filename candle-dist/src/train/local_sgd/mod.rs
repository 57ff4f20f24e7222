//! Local SGD: replicas train apart, and bring their parameters together from time to time.

mod options;
mod outer;
mod state;

pub use options::LocalSgdOptions;

use super::data_parallel::InitialSync;
use super::host::read_results;
use super::sync::sync_params;
use crate::{Collective, Error, PendingTensors, ProcessGroup, ReduceOp, Result, hash};
use candle_core::{DType, Tensor, Var};
use itertools::Itertools;
use outer::OuterParameter;

const OP: &str = "LocalSgd";

/// Local SGD of replicas: each takes many inner steps with an optimizer of its own, and then all take one outer step together.
///
/// An outer step averages how far the replicas have gone since the last one, the *pseudo-gradient*, and gives the mean to SGD with
/// Nesterov momentum. All replicas go on from its result, which is equal on all of them bit for bit. With an inner AdamW and
/// the default options this is DiLoCo (Douillard et al. 2023). Compared with [`DataParallel`](crate::DataParallel) it sends the
/// parameters once in [`sync_every`](LocalSgdOptions::sync_every) steps instead of the gradients in each.
///
/// Call [`step`](Self::step) after each step of the inner optimizer, on all ranks, and [`synchronize`](Self::synchronize) at the end of
/// the training.
///
/// # Fragments
/// Streaming DiLoCo (Douillard et al. 2025) cuts the parameters into [`fragments`](LocalSgdOptions::fragments). Each fragment meets at a
/// phase of its own, so less is sent at once. A parameter's fragment is the first number in its name, as 3 in `layers.3.up.weight`, modulo
/// the number of fragments; a hash spreads names without a number.
///
/// With a [`delay`](LocalSgdOptions::delay), inner steps run while a reduction is under way. The outer step uses the changes at the start
/// of the reduction. Its result replaces the replica's own value, of which [`merge_weight`](LocalSgdOptions::merge_weight) keeps a share.
/// With a share, replicas have equal parameters only after [`synchronize`](Self::synchronize).
///
/// # Parameters
/// The variables are those of this rank: all of a model, or its shards on other axes of the mesh, which may be empty. Leave out
/// frozen ones. Integers are made equal at the start and then left alone. If the inner optimizer of 16-bit parameters has 32-bit
/// master weights, [`with_master_weights`](Self::with_master_weights) brings these together, and parameters are their
/// rounded values. Otherwise it brings the parameters together, and what an outer step is too small to change in 16 bits adds up in
/// its own f32 copy. Moments and other state of the inner optimizer stay each replica's own.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_dist::{LocalSgd, LocalSgdOptions, Result, World};
///
/// let weights = World::threads(2).run(|ctx| -> Result<f32> {
///     let weight = Var::new(0f32, &Device::Cpu)?;
///     let options = LocalSgdOptions::default().sync_every(4).lr(1.0).momentum(0.0);
///     let mut outer = LocalSgd::new(ctx.group(), &[("weight", weight.clone())], &options)?;
///     for _ in 0..4 {
///         let own = 1.0 + ctx.rank() as f64; // each replica has its own data
///         weight.set(&(weight.as_detached_tensor() + own)?)?; // a step of the inner optimizer
///         outer.step()?;
///     }
///     Ok(weight.to_scalar()?)
/// })?;
/// assert_eq!(weights, [6.0, 6.0]); // the mean of 4 and 8
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug)]
pub struct LocalSgd {
    group: ProcessGroup,
    options: LocalSgdOptions,
    /// The inner steps so far.
    steps: usize,
    fragments: Vec<Fragment>,
}

/// Parameters that meet at the same time.
#[derive(Debug, Default)]
struct Fragment {
    parameters: Vec<OuterParameter>,
    /// Whether replicas may have other values than the last outer step gave them.
    is_apart: bool,
    flight: Option<Flight>,
}

/// A reduction that was started, and whose outer step is yet to come.
#[derive(Debug)]
struct Flight {
    /// The step after which its outer step is made.
    due: usize,
    means: Means,
}

/// The means of the changes of a fragment, of those parameters that are not empty.
#[derive(Debug)]
enum Means {
    Pending(PendingTensors),
    Known(Vec<Tensor>),
}

impl Means {
    fn wait(self) -> Result<Vec<Tensor>> {
        match self {
            Self::Pending(pending) => pending.wait(),
            Self::Known(means) => Ok(means),
        }
    }
}

impl Fragment {
    /// Returns the parameters that have elements on this rank.
    fn filled(&self) -> impl Iterator<Item = &OuterParameter> {
        self.parameters.iter().filter(|parameter| !parameter.is_empty())
    }
}

impl LocalSgd {
    /// Creates one for these variables and the replicas of `group`, such as a mesh axis. All ranks use one order of names.
    ///
    /// A variable that is named twice is brought together once.
    ///
    /// # Errors
    /// On all ranks alike, if an option is out of range, or ranks have unlike options. The errors of [`sync_params`] or
    /// [`verify_parameter_shapes`](crate::verify_parameter_shapes); and if ranks of the group hold different shards of a parameter
    /// ([`ShardedVar`](crate::ShardedVar)).
    #[track_caller]
    pub fn new<N: AsRef<str>>(
        group: &ProcessGroup,
        params: &[(N, Var)],
        options: &LocalSgdOptions,
    ) -> Result<Self> {
        let compared = group.with_description("the options of LocalSgd").compare(&options.of_all_ranks())?;
        if let Some(texts) = compared {
            let at = texts.iter().position(|text| *text != texts[0]).unwrap_or_default();
            let (rank, first) = (group.ranks()[at], group.ranks()[0]);
            let reason =
                format!("has {} here and {} on rank {first}; give all ranks the same", texts[at], texts[0]);
            return Err(Error::InvalidArgument { rank, op: OP, reason });
        }
        options.check()?;
        options.start.apply(OP, group, params)?;
        let mut fragments: Vec<Fragment> = Vec::new();
        fragments.resize_with(options.fragments, Fragment::default);
        let trained = params.iter().filter(|(_, var)| var.dtype().is_float()).unique_by(|(_, var)| var.id());
        for (name, var) in trained {
            let name = name.as_ref();
            let outer = OuterParameter::new(name.to_string(), var.clone(), options.momentum > 0.0)?;
            fragments[fragment_of(name, options.fragments)].parameters.push(outer);
        }
        Ok(Self { group: group.clone(), options: options.clone(), steps: 0, fragments })
    }

    /// Brings these master weights together instead of the 16-bit parameters of their names, which are their rounded values.
    ///
    /// The master weights of the optimizers of candle-shard are their `master_weights()`. They are made equal as
    /// [`start`](LocalSgdOptions::start) says.
    ///
    /// # Errors
    /// If there is no parameter of a name, or it has another shape; those of [`sync_params`].
    #[track_caller]
    pub fn with_master_weights<N: AsRef<str>>(mut self, masters: &[(N, Var)]) -> Result<Self> {
        for (name, master) in masters {
            let name = name.as_ref();
            let parameter = self.parameters_mut().find(|parameter| parameter.name == name);
            match parameter.filter(|parameter| parameter.var.shape() == master.shape()) {
                Some(parameter) => parameter.set_master(master)?,
                None => {
                    let reason = format!(
                        "{name:?} has a master weight {:?} and is no parameter of this shape; give those of the parameters",
                        master.dims()
                    );
                    return Err(Error::Invalid { op: "LocalSgd::with_master_weights", reason });
                }
            }
        }
        if let InitialSync::Sync(sync) = &self.options.start {
            sync_params(&self.group, masters, sync)?;
        }
        let mut with_master = self.parameters_mut().filter(|parameter| parameter.master.is_some());
        with_master.try_for_each(OuterParameter::reset)?;
        drop(with_master);
        Ok(self)
    }

    /// Returns the group of the replicas.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the number of inner steps so far.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Counts a step of the inner optimizer, and makes the outer steps that are due after it. Every rank calls it.
    ///
    /// Sends nothing unless a fragment is due: then one all_reduce of its tensors.
    ///
    /// # Errors
    /// On all ranks alike: if a mean of changes is not finite, before it changes anything; and if ranks send different fragments, or
    /// after different numbers of steps, where the backend compares calls.
    #[track_caller]
    pub fn step(&mut self) -> Result<()> {
        self.steps += 1;
        self.fragments.iter_mut().for_each(|fragment| fragment.is_apart = true);
        for nth in 0..self.fragments.len() {
            if self.fragments[nth].flight.as_ref().is_some_and(|flight| flight.due <= self.steps) {
                self.finish(nth, self.options.merge_weight)?;
            }
        }
        for nth in 0..self.fragments.len() {
            if self.options.is_due(nth, self.steps) {
                self.start(nth)?;
                if self.options.delay == 0 {
                    self.finish(nth, self.options.merge_weight)?;
                }
            }
        }
        Ok(())
    }

    /// Makes an outer step of all parameters that may differ between replicas, so that all have the same model. Every rank calls it.
    ///
    /// This is for the end of a training, since the periods do not begin anew. It first finishes what is under way. Parameters that
    /// are equal already stay as they are.
    ///
    /// # Errors
    /// Those of [`step`](Self::step). If ranks have made different numbers of steps, the world stops.
    #[track_caller]
    pub fn synchronize(&mut self) -> Result<()> {
        self.agree()?;
        for nth in 0..self.fragments.len() {
            self.finish(nth, self.options.merge_weight)?;
        }
        let apart = self.fragments.iter().positions(|fragment| fragment.is_apart).collect_vec();
        apart.iter().try_for_each(|&nth| self.start(nth))?;
        apart.iter().try_for_each(|&nth| self.finish(nth, 0.0))
    }

    /// Stops the world if ranks have made different numbers of steps.
    #[track_caller]
    fn agree(&self) -> Result<()> {
        self.group.agree(&format!("LocalSgd after {} steps", self.steps))
    }

    /// Starts to average the changes of a fragment.
    #[track_caller]
    fn start(&mut self, nth: usize) -> Result<()> {
        let about =
            format!("fragment {nth} of {} of LocalSgd after {} steps", self.fragments.len(), self.steps);
        let fragment = &mut self.fragments[nth];
        let changes = fragment.filled().map(|parameter| parameter.change(&self.options));
        let changes = changes.collect::<Result<Vec<_>>>()?;
        let group = self.group.with_description(about);
        let means = group.call(Collective::AllReduce(ReduceOp::Avg)).owned().start_all(&changes)?;
        fragment.flight = Some(Flight { due: self.steps + self.options.delay, means: Means::Pending(means) });
        fragment.is_apart = false;
        Ok(())
    }

    /// Makes the outer step of a fragment that is under way.
    #[track_caller]
    fn finish(&mut self, nth: usize, merge_weight: f64) -> Result<()> {
        let Some(flight) = self.fragments[nth].flight.take() else { return Ok(()) };
        let means = flight.means.wait()?;
        self.check_finite(nth, &means)?;
        let fragment = &mut self.fragments[nth];
        let filled = fragment.parameters.iter_mut().filter(|parameter| !parameter.is_empty());
        for (parameter, mean) in filled.zip(&means) {
            parameter.step(mean, merge_weight, &self.options)?;
        }
        // What was done meanwhile is gone, but for a share of it.
        fragment.is_apart = merge_weight > 0.0;
        Ok(())
    }

    /// Refuses means that are no numbers, which all replicas have alike.
    fn check_finite(&self, nth: usize, means: &[Tensor]) -> Result<()> {
        // A number times 0 is 0, anything else is not.
        let signs =
            means.iter().map(|mean| mean.affine(0.0, 0.0)?.sum_all()?.to_dtype(DType::F32)?.reshape(1));
        let signs = read_results::<f32>(&self.group, &signs.collect::<candle_core::Result<Vec<_>>>()?)?;
        let mut checked = self.fragments[nth].filled().zip(signs);
        let Some((parameter, _)) = checked.find(|(_, sign)| *sign != 0.0) else { return Ok(()) };
        let reason = format!(
            "the mean change of {:?} over the replicas is not finite after {} steps: a replica has diverged; lower its learning \
             rate, and go on from the last checkpoint",
            parameter.name, self.steps
        );
        Err(Error::Invalid { op: OP, reason })
    }

    fn parameters_mut(&mut self) -> impl Iterator<Item = &mut OuterParameter> {
        self.fragments.iter_mut().flat_map(|fragment| &mut fragment.parameters)
    }
}

/// Returns the fragment of a parameter, which its name alone decides: stages of a pipeline that share a parameter agree.
fn fragment_of(name: &str, fragments: usize) -> usize {
    let number = name.split('.').find_map(|part| part.parse::<u64>().ok());
    (number.unwrap_or_else(|| hash::stable(name.as_bytes())) % fragments as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::fragment_of;

    #[test]
    fn layers_are_strided_over_fragments_by_their_numbers() {
        for (name, fragment) in [
            ("model.layers.0.mlp.experts.5.up", 0),
            ("model.layers.7.norm", 1),
            ("model.layers.31.norm", 1),
            ("5.weight", 2),
            ("h.99999999999999999999.w", fragment_of("h.99999999999999999999.w", 3)),
        ] {
            assert_eq!(fragment_of(name, 3), fragment, "{name}");
        }
        let spread: std::collections::BTreeSet<usize> = [
            "model.embed_tokens.weight",
            "model.norm.weight",
            "lm_head.weight",
            "up.w1",
            "up.w2",
            "down.bias",
        ]
        .map(|name| fragment_of(name, 2))
        .into();
        assert_eq!(spread.len(), 2);
    }
}
