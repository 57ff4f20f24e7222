//! Gradient clipping by the norm over all parameters.
use super::host::read_all;
use super::sharded::rows_of;
use crate::{Error, ProcessGroup, ReduceOp, Result, empty, rows, square_sum};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, TensorId, Var};
use std::collections::HashSet;
use std::ops::Deref;

/// The maximum number of groups. Every set of groups has its own total.
const MOST_GROUPS: usize = 12;

/// Scales gradients so that their norm over all parameters is at most a bound.
///
/// The norm is that of all gradients as one vector, summed in f64. Average gradients over data-parallel ranks before
/// you clip them. A parameter that is [`sharded`](Self::sharded) over a group counts with the shards of all its ranks.
/// Any other parameter is whole on this rank and counts once. A variable with several names counts once, under its
/// first name.
///
/// A table whose gradient is kept by rows, a `RowVar` of candle-shard, is listed by its variable, `table.var()`. Its rows count and
/// are scaled where they are kept. A table that is not to be bounded makes the step of its own optimizer before.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_dist::{ClipGradNorm, Result, World};
///
/// let clipped = World::threads(2).run(|ctx| -> Result<(f64, Vec<f64>)> {
///     let weight = Var::new(&[1f64], &Device::Cpu)?; // this rank's piece of a vector of two
///     let mut grads = (weight.as_tensor() * [3.0, 4.0][ctx.rank()])?.sum_all()?.backward()?;
///     let clip = ClipGradNorm::new(1.0).sharded(ctx.group(), ["weight"]);
///     let norm = clip.clip(&[("weight", weight.clone())], &mut grads)?;
///     Ok((norm, grads.get(&weight).expect("a gradient").to_vec1()?))
/// })?;
/// let (norm, grad) = &clipped[1];
/// assert_eq!(*norm, 5.0); // √(3² + 4²)
/// assert!((grad[0] - 0.8).abs() < 1e-6);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ClipGradNorm {
    max_norm: f64,
    norm_type: f64,
    error_if_nonfinite: bool,
    sharded: Vec<(ProcessGroup, ShardedNames)>,
    /// Variables that another rank counts.
    elsewhere: HashSet<TensorId>,
}

/// The parameters that a group shards.
#[derive(Debug, Clone, Default)]
struct ShardedNames {
    some: HashSet<String>,
    /// Whether it is all parameters, whatever their names.
    all: bool,
}

impl ShardedNames {
    fn has(&self, name: &str) -> bool {
        self.all || self.some.contains(name)
    }
}

impl ClipGradNorm {
    /// Limits the 2-norm to `max_norm`.
    pub fn new(max_norm: f64) -> Self {
        Self {
            max_norm,
            norm_type: 2.0,
            error_if_nonfinite: false,
            sharded: Vec::new(),
            elsewhere: HashSet::new(),
        }
    }

    /// Limits the p-norm instead; `f64::INFINITY` means the largest absolute value.
    pub fn norm_type(mut self, p: f64) -> Self {
        self.norm_type = p;
        self
    }

    /// Makes an infinite or NaN norm an error on every rank.
    ///
    /// By default, such a norm is returned and the gradients stay unchanged, so that the caller can skip the step.
    pub fn error_if_nonfinite(mut self, error: bool) -> Self {
        self.error_if_nonfinite = error;
        self
    }

    /// Declares that each rank of `group` holds a shard of these parameters.
    ///
    /// Name a parameter that is sharded over several groups once per group. A rank may name parameters that only it
    /// holds. The norm is summed group by group, in the order of the first calls.
    /// From a shared group on, its ranks must name the same groups; before it, they may have named different ones.
    pub fn sharded<N: Into<String>>(
        mut self,
        group: &ProcessGroup,
        names: impl IntoIterator<Item = N>,
    ) -> Self {
        self.names(group).some.extend(names.into_iter().map(Into::into));
        self
    }

    /// Declares that each rank of `group` holds parameters of its own, such as those of its pipeline stage: all that are not
    /// [`elsewhere`](Self::elsewhere).
    pub fn staged(mut self, group: &ProcessGroup) -> Self {
        self.names(group).all = true;
        self
    }

    fn names(&mut self, group: &ProcessGroup) -> &mut ShardedNames {
        let known = self.sharded.iter().position(|(other, _)| other.is_same(group));
        let place = known.unwrap_or_else(|| {
            self.sharded.push((group.clone(), ShardedNames::default()));
            self.sharded.len() - 1
        });
        &mut self.sharded[place].1
    }

    /// Declares that this rank has copies of these variables and that other ranks count them, such as parameters shared
    /// between pipeline stages. They are scaled like all others. Variables may be anything that dereferences to a tensor:
    /// `&Tensor`, `Var`.
    pub fn elsewhere<T: Deref<Target = Tensor>>(mut self, copies: impl IntoIterator<Item = T>) -> Self {
        self.elsewhere.extend(copies.into_iter().map(|copy| copy.id()));
        self
    }

    /// Returns the norm of the gradients of `params`. Above the bound, scales them by `max_norm / (norm + 1e-6)`.
    ///
    /// Makes one small all_reduce per group of [`sharded`](Self::sharded), whether or not there are gradients.
    /// Parameters without a gradient count as zeros.
    ///
    /// # Errors
    /// If the bound is negative or NaN, or the norm type is not above 0; as described in
    /// [`error_if_nonfinite`](Self::error_if_nonfinite). On all ranks of the groups, if on one of them a sharded name is not
    /// among the parameters, or a table that the backward pass has reached by rows is not, or a parameter with a gradient is a [`ShardedVar`](crate::ShardedVar) and no group has the
    /// ranks with its other shards: each rank would scale by another norm.
    #[track_caller]
    pub fn clip<N: AsRef<str>>(&self, params: &[(N, Var)], grads: &mut GradStore) -> Result<f64> {
        self.check_options()?;
        let norm = self.total_norm(params, grads)?;
        if !norm.is_finite() {
            return match self.error_if_nonfinite {
                true => invalid(format!("the norm of the gradients is {norm}")),
                false => Ok(norm),
            };
        }
        let scale = self.max_norm / (norm + 1e-6);
        if scale < 1.0 {
            let mut scaled = HashSet::new();
            for (_, var) in params {
                if !scaled.insert(var.id()) {
                    continue;
                }
                if let Some(grad) = grads.remove(var) {
                    grads.insert(var, empty::compute(&grad.detach(), |grad| grad.affine(scale, 0.0))?);
                }
                if let Some(table) = rows::of(var.id()) {
                    table.scale(0, scale)?;
                }
            }
        }
        Ok(norm)
    }

    /// Returns the norm over all parameters and all shards, the same on every rank.
    #[track_caller]
    fn total_norm<N: AsRef<str>>(&self, params: &[(N, Var)], grads: &GradStore) -> Result<f64> {
        // What is wrong here is only known here. So ranks first sum what they can, and learn of it on the way.
        let mut wrong = self.wrong(params, grads);
        // One total per set of groups that parameters are sharded over. The bits of the index are the set.
        let mut totals = vec![0.0; 1 << self.sharded.len()];
        let (mut counted, mut terms, mut sets) = (HashSet::new(), Vec::new(), Vec::new());
        for (name, var) in params {
            let is_counted = !self.elsewhere.contains(&var.id()) && counted.insert(var.id());
            if !is_counted {
                continue;
            }
            let by_rows = rows::of(var.id()).map(|table| table.rows()).transpose()?.flatten();
            let bits = self.sharded.iter().enumerate();
            let set: usize = bits.map(|(bit, (_, names))| usize::from(names.has(name.as_ref())) << bit).sum();
            let found = grads.get(var).into_iter().chain(by_rows.as_ref().map(|(_, values)| values));
            for grad in found.filter(|grad| grad.elem_count() > 0) {
                terms.push(self.term(grad)?);
                sets.push(set);
            }
        }
        let read = read_all::<f64>(&terms)?;
        for (set, term) in sets.iter().zip(read.chunks(if self.is_max() { 2 } else { 1 })) {
            totals[*set] = self
                .join(totals[*set], if term.iter().any(|term| term.is_nan()) { f64::NAN } else { term[0] });
        }
        let op = if self.is_max() { ReduceOp::Max } else { ReduceOp::Sum };
        for (bit, (group, _)) in self.sharded.iter().enumerate() {
            // Sums over earlier groups are complete by now, so their totals have moved to the set without these groups.
            let cut: Vec<usize> = (0..totals.len()).filter(|set| set % (2 << bit) == 1 << bit).collect();
            let mut mine: Vec<f64> = cut.iter().map(|&set| totals[set]).collect();
            mine.push(f64::from(u8::from(wrong.is_some())));
            let mut all = group.all_reduce(&Tensor::new(&mine[..], &Device::Cpu)?, op)?.to_vec1::<f64>()?;
            if all.pop().is_some_and(|count| count > 0.0) {
                let texts = group.all_gather_text(wrong.as_deref().unwrap_or_default())?;
                wrong = texts.into_iter().find(|text| !text.is_empty());
            }
            for (set, total) in cut.into_iter().zip(all) {
                let whole = set & !(1 << bit);
                totals[whole] = self.join(totals[whole], total);
            }
        }
        if let Some(reason) = wrong {
            return invalid(reason);
        }
        let total = totals[0];
        Ok(if self.is_max() { total } else { total.powf(1.0 / self.norm_type) })
    }

    fn is_max(&self) -> bool {
        self.norm_type == f64::INFINITY
    }

    /// Returns the contribution of one gradient to the norm, before the root, where the gradient is. It is the first of
    /// these numbers, or NaN if one of them is.
    fn term(&self, grad: &Tensor) -> candle_core::Result<Tensor> {
        if self.norm_type == 2.0 {
            return square_sum(grad, None);
        }
        let sizes = grad.detach().to_dtype(DType::F64)?.abs()?;
        if !self.is_max() {
            return sizes.powf(self.norm_type)?.sum_all()?.reshape(1);
        }
        // candle's maximum may skip a NaN; a sum never does.
        Tensor::stack(&[sizes.max_all()?, sizes.sum_all()?], 0)
    }

    fn join(&self, a: f64, b: f64) -> f64 {
        match self.is_max() {
            true if a.is_nan() || b.is_nan() => f64::NAN,
            true => a.max(b),
            false => a + b,
        }
    }

    fn check_options(&self) -> Result<()> {
        let Self { max_norm, norm_type, .. } = self;
        if max_norm.is_nan() || *max_norm < 0.0 {
            return invalid(format!("max_norm {max_norm}: must be at least 0"));
        }
        if norm_type.is_nan() || *norm_type <= 0.0 {
            return invalid(format!("norm_type {norm_type}: must be greater than 0"));
        }
        if self.sharded.len() > MOST_GROUPS {
            let groups = self.sharded.len();
            return invalid(format!("parameters sharded over {groups} groups; the maximum is {MOST_GROUPS}"));
        }
        Ok(())
    }

    /// Returns why the norm would not be that of all gradients.
    fn wrong<N: AsRef<str>>(&self, params: &[(N, Var)], grads: &GradStore) -> Option<String> {
        let known: HashSet<&str> = params.iter().map(|(name, _)| name.as_ref()).collect();
        let mut named = self.sharded.iter().flat_map(|(_, names)| &names.some);
        if let Some(name) = named.find(|name| !known.contains(name.as_str())) {
            return Some(format!("{name:?} is said to be sharded but is not among the parameters"));
        }
        let mut counted = HashSet::new();
        let lacks = params.iter().find_map(|(name, var)| {
            let has_gradient = grads.get(var).is_some() || rows::of(var.id()).is_some();
            let is_counted = !self.elsewhere.contains(&var.id()) && counted.insert(var.id()) && has_gradient;
            let cuts = rows_of(var).filter(|_| is_counted)?;
            let name = name.as_ref();
            let sums = |row: &[usize]| {
                let over = self.sharded.iter().filter(|(_, names)| names.has(name));
                over.map(|(group, _)| group.ranks()).any(|ranks| row.iter().all(|rank| ranks.contains(rank)))
            };
            let row = cuts.iter().find(|row| !sums(row))?;
            let fix =
                "name it in `sharded` with their group, or start from candle-shard's `Parameters::clip_grad_norm`";
            Some(format!("{name:?} is a shard, and the norm lacks the other shards on ranks {row:?}; {fix}"))
        });
        let listed = params.iter().map(|(_, var)| var.id()).collect();
        let table = || match rows::left_out(grads, &listed) {
            Ok(None) => None,
            Ok(Some(shape)) => Some(format!(
                "a table {shape:?} with a gradient by rows is not among the parameters; add its `RowVar::var`, or take its \
                 gradient before, as the step of its optimizer does"
            )),
            Err(error) => Some(error.to_string()),
        };
        lacks.or_else(table)
    }
}

fn invalid<T>(reason: String) -> Result<T> {
    Err(Error::Invalid { op: "clip_grad_norm", reason })
}
