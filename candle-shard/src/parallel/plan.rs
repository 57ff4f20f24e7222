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
    axis: String,
    entries: Vec<Entry>,
    shares: Option<Shares>,
}

#[derive(Clone, Debug)]
struct Entry {
    pattern: Pattern,
    style: Style,
}

impl Plan {
    /// Creates a plan for the mesh axis `axis` in which every module is replicated.
    pub fn new(axis: impl Into<String>) -> Self {
        Self { axis: axis.into(), entries: Vec::new(), shares: None }
    }

    /// Adds a style for the modules that `pattern` matches.
    pub fn with(mut self, pattern: impl Into<String>, style: impl Into<Style>) -> Self {
        self.entries.push(Entry { pattern: Pattern::new(pattern), style: style.into() });
        self
    }

    /// Cuts the dims of layers in these shares of the ranks, instead of evenly.
    ///
    /// The experts of [`MoE`](crate::nn::MoE) have sizes of their own, and the state of a recurrent layer begins in even shards.
    pub fn with_shares(mut self, shares: impl Into<Option<Shares>>) -> Self {
        self.shares = shares.into();
        self
    }

    /// Returns the sizes of the shards of a dim on the axis.
    pub(crate) fn cut(&self, width: Width, mesh: &DeviceMesh) -> Result<Dims> {
        Ok(cut(self.shares.as_ref(), width, mesh.shape()[self.axis_index(mesh)?]))
    }

    /// Returns the name of the axis.
    pub fn axis(&self) -> &str {
        &self.axis
    }

    pub(crate) fn axis_index(&self, mesh: &DeviceMesh) -> Result<usize> {
        Ok(mesh.axis_index(&self.axis)?)
    }

    /// Checks everything that does not depend on the model.
    pub(crate) fn check(&self, mesh: &DeviceMesh) -> Result<()> {
        let ranks = mesh.shape()[self.axis_index(mesh)?];
        if let Some(shares) = self.shares.as_ref().filter(|shares| shares.ranks() != ranks) {
            let (axis, count) = (&self.axis, shares.ranks());
            return Err(Error::Plan(format!(
                "the shares {shares} are for {count} ranks, and axis {axis:?} has {ranks}; give a share for each rank"
            )));
        }
        self.entries.iter().try_for_each(|entry| entry.style.check(entry.pattern.text()))
    }

    /// Returns the style of the module at `path`, and adds the matching patterns to `matched`.
    pub(crate) fn style_of(&self, path: &[String], mesh: &DeviceMesh, matched: &mut BTreeSet<usize>) -> ModuleStyle {
        let mut style = None;
        for (i, entry) in self.entries.iter().enumerate() {
            if entry.pattern.matches(path) {
                matched.insert(i);
                style = Some(&entry.style);
            }
        }
        // The builder has checked that the axis exists.
        let (axis, shares) = (self.axis_index(mesh).unwrap_or(0), self.shares.clone());
        ModuleStyle { path: path.join("."), style: style.cloned(), axis, shares }
    }

    /// Returns an error that names patterns without a matching module.
    pub(crate) fn check_all_matched(&self, matched: &BTreeSet<usize>) -> Result<()> {
        let unmatched = self.entries.iter().enumerate().filter(|(i, _)| !matched.contains(i));
        let names = unmatched.map(|(_, e)| format!("{:?}", e.pattern.text())).join(", ");
        if names.is_empty() {
            return Ok(());
        }
        let axis = &self.axis;
        Err(Error::Plan(format!(
            "{names} on axis {axis:?} matched no module of the model; check the paths against its parameter names"
        )))
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "plan for axis {:?}", self.axis)?;
        if let Some(shares) = &self.shares {
            write!(f, " in shares {shares}")?;
        }
        for entry in &self.entries {
            write!(f, "\n  {}: {:?}", entry.pattern, entry.style)?;
        }
        Ok(())
    }
}
