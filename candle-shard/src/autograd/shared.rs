//! Replicated variables that ranks use differently, perhaps many times: their gradients are summed over the ranks once.
//!
//! Ranks may use variables in unlike orders, or use different ones. So the sums are of lists that are equal on all ranks,
//! whatever each of them has used:
//!
//! - Variables of a builder are listed by name, used or not. The list begins with one number for each of them: how many
//!   ranks have used it. After a pass the ranks know which ones any of them has used, and the next lists have only these.
//!   A rank that uses another one then adds to a number that makes all ranks sum the rest too.
//! - Other variables have no names. They are listed in the order of their creation. With each goes its ordinal among the
//!   variables of its layout, and a number that depends on its values. Where one of them differs between ranks, all of
//!   them return an error. A variable that [`DTensor::from_local`](crate::DTensor::from_local) was given has no ordinal,
//!   since each call may wrap the same variable: only its values are compared.
use super::off_graph;
use super::order::number;
use crate::layout::Axes;
use crate::tensor::{Origin, VarEntry, VarName, VarRegistry, Variable};
use crate::{Error, Result, scoped};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Shape, Tensor};
use candle_dist::backend::{Fresh, Ready};
use candle_dist::{Collective, DeviceMesh, ProcessGroup, ReduceOp, add_grad};
use itertools::Itertools;
use rustc_hash::FxHasher;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

thread_local! {
    /// This rank's parts of gradients, until the backward pass ends.
    static SHARES: RefCell<Vec<PartialGrad>> = const { RefCell::new(Vec::new()) };
    static IS_COLLECTING: Cell<bool> = const { Cell::new(false) };
}

/// This rank's part of the gradient of a variable, to be summed over some axes.
struct PartialGrad {
    over: MeshAxes,
    variable: Variable,
    sum: Tensor,
}

/// The axes of a mesh over which a gradient is summed.
#[derive(Clone)]
struct MeshAxes {
    mesh: DeviceMesh,
    axes: Axes,
}

impl MeshAxes {
    fn indices(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.mesh.ndim()).filter(|axis| self.axes & (1 << axis) != 0)
    }

    fn groups(&self) -> Result<Vec<ProcessGroup>> {
        Ok(self
            .indices()
            .map(|axis| self.mesh.axis_group(axis).cloned())
            .collect::<candle_dist::Result<_>>()?)
    }

    /// Returns the names of the axes, which are equal on all ranks.
    fn names(&self) -> Vec<String> {
        self.indices().map(|axis| self.mesh.names()[axis].clone()).collect()
    }

    /// Returns whether both are over the same groups.
    fn is_same(&self, other: &Self) -> Result<bool> {
        let (some, others) = (self.groups()?, other.groups()?);
        Ok(some.len() == others.len() && some.iter().zip(&others).all(|(one, other)| one.is_same(other)))
    }
}

/// Copies a variable, or a view of it, for one use, whose gradient is a part of the variable's gradient on `axes`.
///
/// A recurrent model uses a weight, or its transpose, at each step. No copy can be shared by several uses, since an
/// optimizer writes to the weight in place. Instead the parts of the gradient are collected, and summed over the ranks
/// at the end of the backward pass, all of a group in one call.
pub(crate) fn view(origin: &Origin, mesh: &DeviceMesh, axes: Axes) -> Result<Tensor> {
    let Origin { variable, view } = origin.clone();
    let Variable { tensor, name, ordinal } = Variable::clone(&variable);
    let copy = Ready::new(Fresh::copy_of(view.as_ref().unwrap_or(&tensor))?);
    let over = MeshAxes { mesh: mesh.clone(), axes };
    // An op on the variable itself: candle requires a gradient for nodes in between.
    Ok(tensor.apply_op1(ParameterUse { over, name, ordinal, view, copy })?)
}

struct ParameterUse {
    over: MeshAxes,
    /// The name of the variable, if a builder made it.
    name: Option<VarName>,
    /// The variable's ordinal, if it has no name.
    ordinal: Option<u64>,
    /// The view of the variable that was copied, if it was not the variable itself.
    view: Option<Tensor>,
    copy: Ready,
}

impl ParameterUse {
    /// Converts the gradient of the copy to that of the variable.
    fn of_variable(&self, variable: &Tensor, grad: &Tensor) -> candle_core::Result<Tensor> {
        let Some(view) = &self.view else { return Ok(grad.clone()) };
        let found = (view * grad.detach())?.sum_all()?.backward()?.remove(variable);
        found.map_or_else(|| variable.zeros_like(), |grad| Ok(grad.detach()))
    }
}

impl CustomOp1 for ParameterUse {
    fn name(&self) -> &'static str {
        "shared-variable"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.copy.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.copy.cuda()
    }

    fn bwd(&self, variable: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let grad = self.of_variable(variable, grad)?;
        let variable = Variable { tensor: variable.clone(), name: self.name.clone(), ordinal: self.ordinal };
        if IS_COLLECTING.get() {
            add_to(self.over.clone(), variable, &grad)?;
            return Ok(None);
        }
        // candle's own backward pass, at whose end nothing would sum them.
        Ok(Some(sum_alone(&self.over, &variable, &grad)?))
    }
}

/// Adds a part of the gradient of a variable, to be summed over `axes` at the end of the running backward pass.
pub(crate) fn add(mesh: &DeviceMesh, axes: Axes, variable: &Variable, grad: &Tensor) -> Result<()> {
    add_to(MeshAxes { mesh: mesh.clone(), axes }, variable.clone(), grad)
}

fn add_to(over: MeshAxes, variable: Variable, grad: &Tensor) -> Result<()> {
    SHARES.with_borrow_mut(|shares| {
        for share in shares.iter_mut().filter(|share| share.variable.tensor.id() == variable.tensor.id()) {
            if share.over.is_same(&over)? {
                share.sum = add_grad(Some(&share.sum), grad)?;
                share.variable.ordinal = share.variable.ordinal.max(variable.ordinal);
                return Ok(());
            }
        }
        let sum = add_grad(None, grad)?;
        shares.push(PartialGrad { over, variable, sum });
        Ok(())
    })
}

/// Collects the parts of the backward pass `f`, and adds their sums to its gradients.
pub(super) fn collecting<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    SHARES.take();
    let made = scoped::with(&IS_COLLECTING, true, f);
    let shares = SHARES.take();
    let made = made?;
    let mut sets: Vec<Vec<PartialGrad>> = Vec::new();
    'shares: for share in shares {
        for set in &mut sets {
            if set[0].over.is_same(&share.over)? {
                set.push(share);
                continue 'shares;
            }
        }
        sets.push(vec![share]);
    }
    // In an order that is equal on all ranks. Axes of one name are of several meshes, which ranks make in one order.
    let first = |set: &[PartialGrad]| set.iter().map(|share| share.variable.tensor.id()).map(number).min();
    sets.sort_by_cached_key(|set| (set[0].over.names(), first(set)));
    sets.into_iter().try_for_each(sum)?;
    Ok(made)
}

/// Sums parts of gradients over the axes of all of them.
fn sum(shares: Vec<PartialGrad>) -> Result<()> {
    let Some(over) = shares.first().map(|share| share.over.clone()) else { return Ok(()) };
    let mut others = Vec::new();
    let mut registries: BTreeMap<u64, (Arc<VarRegistry>, Axes, PartMap)> = BTreeMap::new();
    for PartialGrad { over, variable, sum } in shares {
        match &variable.name {
            Some(VarName { registry, name }) => {
                let of = registries.entry(registry.number);
                let of = of.or_insert_with(|| (registry.clone(), over.axes, BTreeMap::new()));
                of.2.insert(name.clone(), (variable, sum));
            }
            None => others.push((variable, sum)),
        }
    }
    let (mut likely, mut rest) = (Vec::new(), Vec::new());
    for (registry, axes, mut mine) in registries.into_values() {
        let [first, second] =
            registry.on(axes).map(|entries| PartList::new(&registry, axes, entries, &mut mine));
        likely.push(first);
        rest.push(second);
        // Used in another layout than the registry knows.
        others.extend(mine.into_values());
    }
    others.sort_by_key(|(variable, _)| number(variable.tensor.id()));
    let is_more = rest.iter().any(PartList::is_used);
    if sum_lists(&over, likely, &others, is_more)? {
        sum_lists(&over, rest, &[], false)?;
    }
    Ok(())
}

/// Variables by name, with this rank's parts of their gradients.
type PartMap = BTreeMap<Arc<str>, (Variable, Tensor)>;

/// Variables of a registry, and this rank's parts of their gradients.
struct PartList {
    registry: Arc<VarRegistry>,
    axes: Axes,
    parts: Vec<(Arc<str>, VarEntry, Option<Tensor>)>,
}

impl PartList {
    fn new(
        registry: &Arc<VarRegistry>,
        axes: Axes,
        entries: BTreeMap<Arc<str>, VarEntry>,
        mine: &mut PartMap,
    ) -> Self {
        let part = |(name, entry)| {
            let part = mine.remove(&name).map(|(_, part)| part);
            (name, entry, part)
        };
        Self { registry: registry.clone(), axes, parts: entries.into_iter().map(part).collect() }
    }

    fn is_used(&self) -> bool {
        self.parts.iter().any(|(.., part)| part.is_some())
    }
}

/// Sums parts of the gradients of listed variables, and of others in their order. Returns whether a rank has more.
fn sum_lists(
    over: &MeshAxes,
    lists: Vec<PartList>,
    others: &[(Variable, Tensor)],
    is_more: bool,
) -> Result<bool> {
    let (mut sums, mut header) = (Vec::new(), vec![f64::from(u8::from(is_more))]);
    for (_, entry, part) in lists.iter().flat_map(|list| &list.parts) {
        header.push(f64::from(u8::from(part.is_some())));
        sums.push(part.clone().map_or_else(|| entry.zeros(), Ok)?);
    }
    let names = listed(lists.iter().flat_map(|list| &list.parts).map(|(name, ..)| &**name));
    let description: Arc<str> = format!("gradients of {names}, and of {} without names", others.len()).into();
    let device = sums.first().or(others.first().map(|(_, sum)| sum)).map_or(&Device::Cpu, Tensor::device);
    header.extend(others.iter().flat_map(|(variable, _)| ordinal_terms(variable)));
    let mut tail = vec![Tensor::new(&header[..], device)?];
    for (variable, sum) in others {
        sums.push(sum.clone());
        tail.push(fingerprint(&variable.tensor)?);
    }
    sums.push(Tensor::cat(&tail, 0)?);
    for group in over.groups()? {
        sums = group
            .with_description(description.clone())
            .call(Collective::AllReduce(ReduceOp::Sum))
            .run_all(&sums)?;
    }
    let header = sums.pop().map(|header| Ok::<_, Error>(over.mesh.to_host(&header)?.to_vec1::<f64>()?));
    let header = header.transpose()?.unwrap_or_default();
    let mut sums = sums.into_iter();
    let mut counts = header[1..].iter();
    for PartList { registry, axes, parts } in lists {
        let parts = parts.into_iter().zip(sums.by_ref()).zip(counts.by_ref());
        let used: Vec<_> = parts.filter(|(_, count)| **count > 0.0).map(|(part, _)| part).collect();
        registry.note_used(axes, used.iter().map(|((name, ..), _)| name.clone()));
        for ((_, entry, _), sum) in used {
            off_graph::add(entry.id, &sum)?;
        }
    }
    let ranks = over.indices().map(|axis| over.mesh.shape()[axis]).product();
    let (ordinals, values) = counts.as_slice().split_at(3 * others.len());
    let terms = ordinals.iter().tuples().zip(values.iter().tuples());
    for (((variable, _), sum), ((&has, &ordinals, &squares), (&total, &all))) in
        others.iter().zip(sums).zip(terms)
    {
        check_same(&variable.tensor, (has, ordinals, squares), (ranks, total, all))?;
        off_graph::add(variable.tensor.id(), &sum)?;
    }
    Ok(header[0] > 0.0)
}

/// Sums the gradient of one use of a variable.
fn sum_alone(over: &MeshAxes, variable: &Variable, grad: &Tensor) -> Result<Tensor> {
    let (name, mut sums) = match &variable.name {
        Some(VarName { name, .. }) => (Some(&**name), vec![grad.clone()]),
        None => {
            let ordinal = Tensor::new(&ordinal_terms(variable), grad.device())?;
            (None, vec![grad.clone(), Tensor::cat(&[ordinal, fingerprint(&variable.tensor)?], 0)?])
        }
    };
    let description: Arc<str> = format!("the gradient of {}", listed(name)).into();
    for group in over.groups()? {
        sums = group
            .with_description(description.clone())
            .call(Collective::AllReduce(ReduceOp::Sum))
            .run_all(&sums)?;
    }
    if let Some(total) = sums.get(1) {
        let total = over.mesh.to_host(total)?.to_vec1::<f64>()?;
        let ranks = over.groups()?.iter().map(ProcessGroup::size).product();
        check_same(&variable.tensor, (total[0], total[1], total[2]), (ranks, total[3], total[4]))?;
    }
    Ok(sums.swap_remove(0))
}

/// Describes a list of names, for calls that must be about the same list on all ranks.
pub(crate) fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let (mut first, mut more, mut hasher) = (None, 0, FxHasher::default());
    for name in names {
        more += usize::from(first.is_some());
        first.get_or_insert(name);
        name.hash(&mut hasher);
    }
    match (first, more) {
        (None, _) => "nothing".into(),
        (Some(first), 0) => first.into(),
        (Some(first), more) => format!("{first} and {more} more, with the hash {:016x}", hasher.finish()),
    }
}

/// Returns how many ordinals a variable has, its ordinal and the square of it.
fn ordinal_terms(variable: &Variable) -> [f64; 3] {
    variable.ordinal.map_or([0.0; 3], |ordinal| [1.0, ordinal as f64, (ordinal as f64).powi(2)])
}

/// Returns a number that depends on values of a variable, and its square.
fn fingerprint(variable: &Tensor) -> candle_core::Result<Tensor> {
    const ELEMENTS: usize = 16;
    let (count, device) = (variable.elem_count(), variable.device());
    if count == 0 {
        return Tensor::zeros(2, DType::F64, device);
    }
    let taken = count.min(ELEMENTS);
    let places = Tensor::from_iter((0..taken).map(|i| (i * count / taken) as u32), device)?;
    let weights = Tensor::from_iter((0..taken).map(|i| 1.0 + (i as f64 * 0.618).fract()), device)?;
    let elements = variable.detach().flatten_all()?.index_select(&places, 0)?.to_dtype(DType::F64)?;
    let sum = (elements * weights)?.sum_keepdim(0)?;
    Tensor::cat(&[&sum, &sum.sqr()?], 0)
}

/// Refuses a variable without a name that is another one on other ranks: the sums of its [`ordinal_terms`] or of its
/// [`fingerprint`] over `ranks` are not those of one variable.
///
/// The values may differ in the last bits where ranks have computed the same update in different ways.
fn check_same(
    variable: &Tensor,
    (has, ordinals, of_ordinals): (f64, f64, f64),
    (ranks, total, squares): (usize, f64, f64),
) -> Result<()> {
    const MOST: f64 = 1e-6;
    let (ranks, dims) = (ranks as f64, variable.dims());
    let is_other = has * of_ordinals - ordinals * ordinals > 0.5;
    if is_other || ranks * squares - total * total > MOST * ranks * squares {
        return Error::op(
            "backward",
            format!(
                "the ranks sum gradients of different variables of the shape {dims:?}: they have made variables in \
                 unlike orders, or used different ones. Build them with a MeshVarBuilder, which gives them names"
            ),
        );
    }
    Ok(())
}
