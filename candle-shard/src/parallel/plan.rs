//! Plans: styles of modules, by path pattern.
use super::module::ModuleStyle;
use super::pattern::Pattern;
use super::shares::{Shares, cut};
use super::style::Style;
use crate::layout::Width;
use crate::{Error, Result};
use candle_dist::DeviceMesh;
use candle_dist::backend::Dims;
use itertools::Itertools;
use std::collections::BTreeSet;
use std::fmt;

/// The style of each module on one axis of a mesh. Modules that are not named are replicated.
///
/// A pattern is a module path whose parts may contain `*` and `?`, for example `layers.*.attention.w?`. Each part
/// matches one part of a path. The empty pattern matches the model itself. If several patterns match, the last one
/// wins.
///
/// ```
/// use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
///
/// let plan = Plan::new("tp")
///     .with("layers.*.feed_forward.w1", ColwiseParallel::default())
///     .with("layers.*.feed_forward.w2", RowwiseParallel::default());
/// println!("{plan}");
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    /// `None` for the plan that cuts nothing.
    axis: Option<String>,
    entries: Vec<PlanEntry>,
    shares: Option<Shares>,
}

#[derive(Clone, Debug)]
struct PlanEntry {
    pattern: Pattern,
    style: Style,
}

impl Plan {
    /// Creates a plan for the mesh axis `axis` in which every module is replicated.
    pub fn new(axis: impl Into<String>) -> Self {
        Self { axis: Some(axis.into()), entries: Vec::new(), shares: None }
    }

    /// Creates the plan of a model that no layer cuts, on a mesh of any axes: every module is replicated. Units may be
    /// [fully sharded](crate::nn::MeshVarBuilder::fully_shard) over every axis.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist::World;
    /// use candle_shard::fsdp::{FullyShard, FullyShardOptions};
    /// use candle_shard::nn::{Linear, MeshVarBuilder};
    /// use candle_shard::parallel::Plan;
    /// use candle_shard::{DTensor, Result, Shard};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("fsdp", 2)])?;
    ///     let vb = MeshVarBuilder::fresh(42, &mesh, Plan::none(), DType::F32, &Device::Cpu)?;
    ///     let vb = vb.fully_shard("fsdp", FullyShardOptions::default())?;
    ///     let layer = FullyShard::new(&vb.pp("layer"), |vb| Linear::new(4, 6, false, vb))?;
    ///     let x = DTensor::ones((2, 4), DType::F32, &Device::Cpu, &mesh, &[Shard(0)])?;
    ///     layer.run(|layer| layer.forward(&x))?.sum_all()?.backward()?;
    ///     assert_eq!(vb.finish()?.local_elem_count(), 12);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn none() -> Self {
        Self { axis: None, entries: Vec::new(), shares: None }
    }

    /// Adds a style for the modules that `pattern` matches.
    pub fn with(mut self, pattern: impl Into<String>, style: impl Into<Style>) -> Self {
        self.entries.push(PlanEntry { pattern: Pattern::new(pattern), style: style.into() });
        self
    }

    /// Cuts the dims of layers in these shares of the ranks, instead of evenly.
    ///
    /// The experts of [`MoE`](crate::nn::MoE) have sizes of their own, and the state of a recurrent layer begins in even shards.
    pub fn with_shares(mut self, shares: impl Into<Option<Shares>>) -> Self {
        self.shares = shares.into();
        self
    }

    /// Returns the sizes of the shards of a dim on the axis, in these shares or without.
    pub(crate) fn cut(&self, width: Width, mesh: &DeviceMesh, shares: Option<&Shares>) -> Result<Dims> {
        Ok(cut(shares, width, self.ranks(mesh)?))
    }

    /// Returns the shares of the ranks of the axis, if they are unlike.
    pub(crate) fn shares(&self) -> Option<&Shares> {
        self.shares.as_ref()
    }

    /// Returns the name of the axis, if the plan has one.
    pub fn axis(&self) -> Option<&str> {
        self.axis.as_deref()
    }

    pub(crate) fn axis_index(&self, mesh: &DeviceMesh) -> Result<Option<usize>> {
        Ok(self.axis().map(|axis| mesh.axis_index(axis)).transpose()?)
    }

    /// Returns the number of ranks of the axis.
    fn ranks(&self, mesh: &DeviceMesh) -> Result<usize> {
        Ok(self.axis_index(mesh)?.map_or(1, |axis| mesh.shape()[axis]))
    }

    /// Checks everything that does not depend on the model.
    pub(crate) fn check(&self, mesh: &DeviceMesh) -> Result<()> {
        if let Some(entry) = self.entries.first().filter(|_| self.axis.is_none()) {
            let (pattern, style) = (entry.pattern.text(), &entry.style);
            return Err(Error::Plan(format!(
                "{pattern:?} has the style {style:?}, and the plan no axis; make it with Plan::new and the name of an axis"
            )));
        }
        self.check_shares(self.shares.as_ref(), mesh)?;
        self.entries.iter().try_for_each(|entry| entry.style.check(entry.pattern.text()))
    }

    /// Checks that there is a share for each rank of the axis.
    pub(crate) fn check_shares(&self, shares: Option<&Shares>, mesh: &DeviceMesh) -> Result<()> {
        let ranks = self.ranks(mesh)?;
        let Some(shares) = shares.filter(|shares| shares.ranks() != ranks) else { return Ok(()) };
        let (axis, count) = (self.axis().unwrap_or("none"), shares.ranks());
        Err(Error::Plan(format!(
            "the shares {shares} are for {count} ranks, and axis {axis:?} has {ranks}; give a share for each rank"
        )))
    }

    /// Returns the style of the module at `path`, which is cut in these shares or without, and adds the matching patterns to `matched`.
    pub(crate) fn style_of(
        &self,
        path: &[String],
        (mesh, shares): (&DeviceMesh, Option<&Shares>),
        matched: &mut BTreeSet<usize>,
    ) -> ModuleStyle {
        let mut style = None;
        for (i, entry) in self.entries.iter().enumerate() {
            if entry.pattern.matches(path) {
                matched.insert(i);
                style = Some(&entry.style);
            }
        }
        // The builder has checked that the axis exists. Without one all is replicated, on whatever axis.
        let axis = self.axis_index(mesh).ok().flatten().unwrap_or(0);
        ModuleStyle { path: path.join("."), style: style.cloned(), axis, shares: shares.cloned() }
    }

    /// Returns the patterns without a matching module.
    pub(crate) fn unmatched(&self, matched: &BTreeSet<usize>) -> impl Iterator<Item = &str> {
        let unmatched = self.entries.iter().enumerate().filter(|(i, _)| !matched.contains(i));
        unmatched.map(|(_, entry)| entry.pattern.text())
    }

    /// Returns an error that names patterns without a matching module.
    pub(crate) fn check_all_matched(&self, matched: &BTreeSet<usize>) -> Result<()> {
        let names = self.unmatched(matched).map(|pattern| format!("{pattern:?}")).join(", ");
        if names.is_empty() {
            return Ok(());
        }
        let axis = self.axis().unwrap_or("none");
        Err(Error::Plan(format!(
            "{names} on axis {axis:?} matched no module of the model; check the paths against its parameter names"
        )))
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.axis {
            Some(axis) => write!(f, "plan for axis {axis:?}")?,
            None => f.write_str("plan without an axis")?,
        }
        if let Some(shares) = &self.shares {
            write!(f, " in shares {shares}")?;
        }
        for entry in &self.entries {
            write!(f, "\n  {}: {:?}", entry.pattern, entry.style)?;
        }
        Ok(())
    }
}
