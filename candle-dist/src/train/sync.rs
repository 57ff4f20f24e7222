//! Copies one rank's parameters to all ranks.
use crate::backend::joined;
use crate::{Error, ProcessGroup, Result, verify_parameter_shapes};
use candle_core::{DType, Tensor, Var};
use candle_nn::VarMap;
use itertools::Itertools;
use std::collections::BTreeSet;

/// Options of [`sync_params`] and [`sync_module_states`]: start from the default, and set what differs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SyncOptions {
    /// The rank, within the group, whose values the others copy; 0 by default.
    pub source: usize,
    /// The maximum size of one broadcast in bytes, 250 MiB by default. A larger tensor is a broadcast of its own.
    pub bucket_bytes: usize,
    /// The names of variables that keep their values on each rank; none by default.
    pub ignore: BTreeSet<String>,
    /// Whether [`sync_module_states`] includes buffers; true by default.
    pub buffers: bool,
}

impl Default for SyncOptions {
    fn default() -> Self {
        Self { source: 0, bucket_bytes: 250 << 20, ignore: BTreeSet::new(), buffers: true }
    }
}

impl SyncOptions {
    /// Sets the rank, within the group, whose values the others copy.
    pub fn source(self, source: usize) -> Self {
        Self { source, ..self }
    }

    /// Sets the maximum size of one broadcast in bytes.
    pub fn bucket_bytes(self, bucket_bytes: usize) -> Self {
        Self { bucket_bytes, ..self }
    }

    /// Sets the names of variables that keep their values on each rank.
    pub fn ignore(self, ignore: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { ignore: ignore.into_iter().map(Into::into).collect(), ..self }
    }

    /// Sets whether [`sync_module_states`] includes buffers.
    pub fn buffers(self, buffers: bool) -> Self {
        Self { buffers, ..self }
    }
}

/// Copies the source's values into every rank's variables, bit by bit.
///
/// All ranks must name the same variables in the same order; [`verify_parameter_shapes`] checks this before data moves.
/// Variables of one dtype fill buckets of [`bucket_bytes`](SyncOptions::bucket_bytes), in the order of the list. Each
/// bucket is one broadcast.
///
/// # Errors
/// The errors of [`verify_parameter_shapes`], and [`Error::InvalidArgument`] if the source is outside the group.
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_dist::{SyncOptions, World, sync_params};
///
/// let values = World::threads(3).run(|ctx| -> candle_dist::Result<f32> {
///     let weight = Var::new(ctx.rank() as f32, &Device::Cpu)?;
///     let options = SyncOptions::default().source(2);
///     sync_params(ctx.group(), &[("weight", weight.clone())], &options)?;
///     Ok(weight.to_scalar::<f32>()?)
/// })?;
/// assert_eq!(values, [2.0, 2.0, 2.0]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[track_caller]
pub fn sync_params<N: AsRef<str>>(
    group: &ProcessGroup,
    params: &[(N, Var)],
    options: &SyncOptions,
) -> Result<()> {
    sync(group, params.iter().map(|(name, var)| (name.as_ref(), var)), options)
}

/// [`sync_params`] for a module's parameters and, unless disabled in the options, its buffers, in one call.
#[track_caller]
pub fn sync_module_states<N: AsRef<str>, M: AsRef<str>>(
    group: &ProcessGroup,
    params: &[(N, Var)],
    buffers: &[(M, Var)],
    options: &SyncOptions,
) -> Result<()> {
    let buffers = if options.buffers { buffers } else { &[] };
    let params = params.iter().map(|(name, var)| (name.as_ref(), var));
    sync(group, params.chain(buffers.iter().map(|(name, var)| (name.as_ref(), var))), options)
}

/// Returns the variables of a map with their names, in an order that is equal on all ranks.
pub fn named_vars(map: &VarMap) -> Vec<(String, Var)> {
    let vars = map.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    vars.iter().map(|(name, var)| (name.clone(), var.clone())).sorted_by(|a, b| a.0.cmp(&b.0)).collect()
}

#[track_caller]
fn sync<'a>(
    group: &ProcessGroup,
    vars: impl Iterator<Item = (&'a str, &'a Var)>,
    options: &SyncOptions,
) -> Result<()> {
    let (source, n) = (options.source, group.size());
    if source >= n {
        let reason = format!("source {source} is outside the group; its ranks are 0 to {}", n - 1);
        return Err(Error::InvalidArgument { rank: group.ranks()[group.rank()], op: "sync_params", reason });
    }
    let vars: Vec<(&str, &Var)> = vars.filter(|(name, _)| !options.ignore.contains(*name)).collect();
    verify_parameter_shapes(group, &vars.iter().map(|(name, var)| (name, var.as_tensor())).collect_vec())?;
    if n == 1 {
        return Ok(());
    }
    let vars: Vec<&Var> = vars.into_iter().map(|(_, var)| var).filter(|var| var.elem_count() > 0).collect();
    for bucket in buckets(vars, |var| var.dtype(), |var| bytes(var), options.bucket_bytes) {
        broadcast(group, &bucket, source)?;
    }
    Ok(())
}

fn bytes(var: &Var) -> usize {
    var.elem_count() * var.dtype().size_in_bytes()
}

/// Cuts the items of each dtype, in order, into runs of at most `budget` bytes or of one item.
pub(crate) fn buckets<T>(
    items: Vec<T>,
    dtype: impl Fn(&T) -> DType,
    bytes: impl Fn(&T) -> usize,
    budget: usize,
) -> Vec<Vec<T>> {
    let mut dtypes: Vec<(DType, Vec<T>)> = Vec::new();
    for item in items {
        let dtype = dtype(&item);
        match dtypes.iter_mut().find(|(known, _)| *known == dtype) {
            Some((_, same)) => same.push(item),
            None => dtypes.push((dtype, vec![item])),
        }
    }
    let mut buckets: Vec<Vec<T>> = Vec::new();
    for (_, same) in dtypes {
        let mut room = None;
        for item in same {
            let bytes = bytes(&item);
            match (room, buckets.last_mut()) {
                (Some(left), Some(bucket)) if bytes <= left => {
                    bucket.push(item);
                    room = Some(left - bytes);
                }
                _ => {
                    buckets.push(vec![item]);
                    room = Some(budget.saturating_sub(bytes));
                }
            }
        }
    }
    buckets
}

/// Broadcasts the source's variables as one flat tensor, and writes it into the variables of the other ranks.
#[track_caller]
fn broadcast(group: &ProcessGroup, bucket: &[&Var], source: usize) -> Result<()> {
    let sends = group.rank() == source;
    let flat = match bucket {
        [var] => var.flatten_all()?,
        vars if sends => joined(&vars.iter().map(|var| var.detach()).collect::<Vec<_>>(), vars[0].dtype())?,
        vars => {
            // Only the dtype and the shape matter; untouched zeros cost no memory.
            let elements: usize = vars.iter().map(|var| var.elem_count()).sum();
            Tensor::zeros(elements, vars[0].dtype(), vars[0].device())?
        }
    };
    let received = group.broadcast(&flat, source)?;
    if sends {
        return Ok(());
    }
    let mut start = 0;
    for var in bucket {
        var.set(&received.narrow(0, start, var.elem_count())?.reshape(var.shape())?)?;
        start += var.elem_count();
    }
    Ok(())
}
