//! Plans that say which parameters of a model are sharded, and how.
use super::ShardedTensor;
use crate::parallel::pattern::Pattern;
use crate::tables::sharding_spec::ShardingSpec;
use crate::{Error, Result};
use candle_core::Tensor;
use candle_dist::{ProcessGroup, verify_parameter_shapes};
use itertools::Itertools;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// A user's sharder; arguments: the parameter's name, this rank's tensor, the source rank, and the group.
type SharderFn = dyn Fn(&str, &Tensor, usize, &ProcessGroup) -> Result<ShardedTensor> + Send + Sync;

/// A plan that says which parameters are sharded, and how; other parameters stay as they are.
///
/// A pattern is a parameter's name whose parts may contain `*` and `?`, for example `tables.*.weight`; each part
/// matches one part of a name. If several patterns match, the last one counts.
#[derive(Clone, Default)]
pub struct ShardingPlan {
    entries: Vec<(Pattern, ShardingMethod)>,
}

#[derive(Clone)]
enum ShardingMethod {
    Spec(ShardingSpec),
    Sharder(Arc<SharderFn>),
}

/// The parameters of a model, by name.
#[derive(Debug, Clone)]
pub struct ShardedModule {
    /// The parameters that the plan shards.
    pub sharded: BTreeMap<String, ShardedTensor>,
    /// The other parameters, unchanged.
    pub rest: BTreeMap<String, Tensor>,
}

impl ShardingPlan {
    /// Creates a plan that shards nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a spec for the parameters that match `pattern`.
    pub fn with(mut self, pattern: impl Into<String>, spec: impl Into<ShardingSpec>) -> Self {
        self.entries.push((Pattern::new(pattern), ShardingMethod::Spec(spec.into())));
        self
    }

    /// Adds a function that shards the parameters that match `pattern`.
    ///
    /// It is called on every rank, in the order of the names, with the parameter's name, this rank's tensor, the source
    /// rank, and the group.
    pub fn with_sharder(
        mut self,
        pattern: impl Into<String>,
        sharder: impl Fn(&str, &Tensor, usize, &ProcessGroup) -> Result<ShardedTensor> + Send + Sync + 'static,
    ) -> Self {
        self.entries.push((Pattern::new(pattern), ShardingMethod::Sharder(Arc::new(sharder))));
        self
    }

    /// Returns the entry for each parameter that the plan names.
    fn matched<'a>(
        &'a self,
        parameters: &'a BTreeMap<String, Tensor>,
    ) -> Result<BTreeMap<&'a str, &'a ShardingMethod>> {
        let (mut matched, mut unmatched) = (BTreeMap::new(), Vec::new());
        for (pattern, how) in &self.entries {
            let names = parameters
                .keys()
                .filter(|name| pattern.matches(&name.split('.').collect_vec()))
                .collect_vec();
            if names.is_empty() {
                unmatched.push(format!("{:?}", pattern.text()));
            }
            matched.extend(names.into_iter().map(|name| (name.as_str(), how)));
        }
        if unmatched.is_empty() {
            return Ok(matched);
        }
        let (names, known) = (unmatched.join(", "), parameters.keys().take(3).join(", "));
        Err(Error::Plan(format!("{names} matched no parameter; the names are like {known}")))
    }
}

/// Shards the parameters of a model according to a plan, with the values of rank `src_rank` of the group.
///
/// Every rank passes the same names and shapes, which the ranks compare; values are read only on `src_rank`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::sharded_tensor::{ShardingPlan, shard_module};
/// use candle_shard::{ChunkShardingSpec, Result};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let zeros = |rows: usize| Tensor::zeros((rows, 4), DType::F32, &Device::Cpu);
///     let model = [("table.weight".into(), zeros(6)?), ("top.weight".into(), zeros(1)?)].into();
///     let plan = ShardingPlan::new().with("table.weight", ChunkShardingSpec::on_ranks(0, [0, 1])?);
///     let model = shard_module(&model, &plan, 0, ctx.group())?;
///     assert_eq!(model.sharded["table.weight"].local_tensor()?.dims(), [3, 4]);
///     assert_eq!(model.rest["top.weight"].dims(), [1, 4]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
///
/// # Errors
/// Before any communication, if a pattern matches no parameter, or a spec does not fit its parameter or the group; on
/// every rank alike, if the ranks pass different names or shapes; any error of a sharder, and [`Error::Plan`] if it
/// returns a tensor of another shape.
pub fn shard_module(
    parameters: &BTreeMap<String, Tensor>,
    plan: &ShardingPlan,
    src_rank: usize,
    group: &ProcessGroup,
) -> Result<ShardedModule> {
    let matched = plan.matched(parameters)?;
    for (name, how) in &matched {
        if let ShardingMethod::Spec(spec) = how {
            let fits = spec.check(group.size()).and_then(|()| spec.build_metadata(parameters[*name].dims()));
            fits.map_err(|error| Error::Plan(format!("{name}: {error}")))?;
        }
    }
    verify_parameter_shapes(group, &parameters.iter().collect_vec())?;
    let mut sharded = BTreeMap::new();
    for (&name, how) in &matched {
        let tensor = &parameters[name];
        let made = match how {
            ShardingMethod::Spec(spec) => ShardedTensor::shard(tensor, spec, src_rank, group)?,
            ShardingMethod::Sharder(sharder) => sharder(name, tensor, src_rank, group)?,
        };
        if made.dims() != tensor.dims() {
            let (made, dims) = (made.dims(), tensor.dims());
            let reason = format!("{name}: its sharder returns shape {made:?} for {dims:?}; keep the shape");
            return Err(Error::Plan(reason));
        }
        sharded.insert(name.to_string(), made);
    }
    let rest = parameters.iter().filter(|(name, _)| !matched.contains_key(name.as_str()));
    Ok(ShardedModule { rest: rest.map(|(name, tensor)| (name.clone(), tensor.clone())).collect(), sharded })
}

impl fmt::Debug for ShardingPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |(pattern, how): &(Pattern, ShardingMethod)| match how {
            ShardingMethod::Spec(spec) => format!("{pattern}: {spec}"),
            ShardingMethod::Sharder(_) => format!("{pattern}: a sharder"),
        };
        write!(f, "ShardingPlan {{ {} }}", self.entries.iter().map(show).join("; "))
    }
}
