//! Ranks arranged in an n-dimensional grid with named axes.
mod build;
mod derive;
mod layout;
mod root;

use crate::{Error, ProcessGroup, Result};
pub use layout::Axis;
use layout::{Layout, shown};
use root::Root;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, OnceLock};

/// An n-dimensional grid of ranks with named axes: which axis of the machine does what.
///
/// Ranks fill the grid in row-major order: the last axis varies fastest. A rank that holds a mesh is in it and has a
/// [`coordinate`](Self::coordinate). Cheap to clone.
///
/// Groups are made when first asked for, by their members alone; a mesh and all meshes derived from it share them, so
/// no group is made twice. Members ask for them in the same order.
///
/// ```
/// use candle_dist::{Result, World};
///
/// let coordinates = World::local(4).run(|ctx| -> Result<Vec<usize>> {
///     let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
///     assert_eq!(mesh.axis_group("tp")?.size(), 2);
///     Ok(mesh.coordinate().to_vec())
/// })?;
/// assert_eq!(coordinates, [[0, 0], [0, 1], [1, 0], [1, 1]]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Clone)]
pub struct DeviceMesh(Arc<Inner>);

struct Inner {
    root: Arc<Root>,
    layout: Layout,
    /// Ranks of the world, row-major.
    ranks: Vec<usize>,
    coordinate: Vec<usize>,
    axis_groups: Vec<OnceLock<ProcessGroup>>,
    group: OnceLock<ProcessGroup>,
}

impl DeviceMesh {
    /// The number of axes.
    pub fn ndim(&self) -> usize {
        self.shape().len()
    }

    /// The sizes of the axes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.0.layout.shape
    }

    /// The names of the axes, outermost first.
    pub fn names(&self) -> &[String] {
        &self.0.layout.names
    }

    /// Whether this is the same mesh in memory, not merely an equal one, which another world may have.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.0.ranks.len()
    }

    /// The members as ranks of the world, in row-major order.
    pub fn ranks(&self) -> &[usize] {
        &self.0.ranks
    }

    /// This rank's place: its index on each axis.
    pub fn coordinate(&self) -> &[usize] {
        &self.0.coordinate
    }

    /// The coordinate of a rank of [`group`](Self::group).
    ///
    /// # Errors
    /// If the mesh has fewer ranks.
    pub fn coordinate_of(&self, rank: usize) -> Result<Vec<usize>> {
        if rank >= self.size() {
            let last = self.size() - 1;
            return Err(Error::Mesh(format!("no rank {rank} in {self}; its ranks are counted from 0 to {last}")));
        }
        Ok(self.0.layout.coordinate(rank))
    }

    /// The coordinates of all ranks of [`group`](Self::group), in their order.
    pub fn coordinates(&self) -> impl ExactSizeIterator<Item = Vec<usize>> + '_ {
        (0..self.size()).map(|rank| self.0.layout.coordinate(rank))
    }

    /// The index of an axis; for a number, that it exists.
    pub fn axis_index<'a>(&self, axis: impl Into<Axis<'a>>) -> Result<usize> {
        self.0.layout.index(axis.into())
    }

    /// The number of ranks along an axis.
    pub fn size_of<'a>(&self, axis: impl Into<Axis<'a>>) -> Result<usize> {
        Ok(self.shape()[self.axis_index(axis)?])
    }

    /// This rank's index on an axis, which is its rank in the [`axis_group`](Self::axis_group).
    pub fn local_rank<'a>(&self, axis: impl Into<Axis<'a>>) -> Result<usize> {
        Ok(self.coordinate()[self.axis_index(axis)?])
    }

    /// The group of all ranks of the mesh, in row-major order.
    ///
    /// Unless it was given as such ([`from_group`](Self::from_group), [`from_groups`](Self::from_groups)), it is not the
    /// group that the mesh was made from, so another thread may communicate on that one. Meshes that are derived from each
    /// other share groups of the same ranks.
    #[track_caller]
    pub fn group(&self) -> Result<&ProcessGroup> {
        self.group_in(&self.0.group, || self.ranks().to_vec())
    }

    /// The ranks that differ from this one only on one axis, ordered by their place on it.
    ///
    /// An axis of all ranks has a group of its own too; see [`group`](Self::group).
    #[track_caller]
    pub fn axis_group<'a>(&self, axis: impl Into<Axis<'a>>) -> Result<&ProcessGroup> {
        let axis = self.axis_index(axis)?;
        self.group_in(&self.0.axis_groups[axis], || self.ranks_along(&[axis]))
    }

    /// The [`axis_group`](Self::axis_group) of every axis, outermost first.
    #[track_caller]
    pub fn all_groups(&self) -> Result<Vec<&ProcessGroup>> {
        let mut groups = Vec::with_capacity(self.ndim());
        for axis in 0..self.ndim() {
            groups.push(self.axis_group(axis)?);
        }
        Ok(groups)
    }

    /// The group in `slot`, which is put there when first asked for.
    #[track_caller]
    fn group_in<'m>(
        &'m self,
        slot: &'m OnceLock<ProcessGroup>,
        ranks: impl FnOnce() -> Vec<usize>,
    ) -> Result<&'m ProcessGroup> {
        if let Some(group) = slot.get() {
            return Ok(group);
        }
        let group = self.0.root.group(&ranks())?;
        Ok(slot.get_or_init(|| group))
    }

    /// The ranks of the world that share this rank's place on all other axes, row-major.
    fn ranks_along(&self, axes: &[usize]) -> Vec<usize> {
        self.0.layout.row(self.coordinate(), axes).into_iter().map(|place| self.ranks()[place]).collect()
    }
}

impl PartialEq for DeviceMesh {
    /// Meshes are equal if they arrange the same ranks on the same axes.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || (self.0.layout == other.0.layout && self.ranks() == other.ranks())
    }
}

impl Eq for DeviceMesh {}

impl Hash for DeviceMesh {
    /// Reads what equality reads; groups made later change neither.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.layout.hash(state);
        self.ranks().hash(state);
    }
}

impl fmt::Display for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.layout.fmt(f)
    }
}

impl fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} at {:?}", self.coordinate())
    }
}
