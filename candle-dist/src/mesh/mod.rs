//! Ranks arranged in an n-dimensional grid with named axes.
mod build;
mod derive;
mod layout;
mod root;

use crate::switch::Switch;
use crate::{Error, ProcessGroup, Result};
use candle_core::Tensor;
pub use layout::Axis;
use layout::{MeshLayout, shown};
use root::MeshRoot;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, OnceLock};

/// An n-dimensional grid of ranks with named axes.
///
/// Ranks fill the grid in row-major order: the last axis varies fastest. A rank holds a mesh only if it is a member,
/// and has a [`coordinate`](Self::coordinate) in it. A mesh is cheap to clone.
///
/// Groups are created on first use, without communication. A mesh and all meshes derived from it share them, so no
/// group is created twice. All members must use new groups in the same order.
///
/// ```
/// use candle_dist::{Result, World};
///
/// let coordinates = World::threads(4).run(|ctx| -> Result<Vec<usize>> {
///     let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
///     assert_eq!(mesh.axis_group("tp")?.size(), 2);
///     Ok(mesh.coordinate().to_vec())
/// })?;
/// assert_eq!(coordinates, [[0, 0], [0, 1], [1, 0], [1, 1]]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Clone)]
pub struct DeviceMesh(Arc<MeshInner>);

struct MeshInner {
    root: Arc<MeshRoot>,
    layout: MeshLayout,
    /// The members as ranks of the world, row-major.
    ranks: Vec<usize>,
    coordinate: Vec<usize>,
    axis_groups: Vec<OnceLock<ProcessGroup>>,
    group: OnceLock<ProcessGroup>,
}

impl DeviceMesh {
    /// Returns the number of axes.
    pub fn ndim(&self) -> usize {
        self.shape().len()
    }

    /// Returns the sizes of the axes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.0.layout.shape
    }

    /// Returns the names of the axes, outermost first.
    pub fn names(&self) -> &[String] {
        &self.0.layout.names
    }

    /// Returns whether both are the same mesh in memory. An equal mesh may belong to another world.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns whether a switch is on in the world of this mesh: by rank 0's environment among processes, and
    /// otherwise by that of this process. It costs no system call.
    pub fn is_on(&self, switch: Switch) -> bool {
        self.0.root.base().switches.has(switch)
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.0.ranks.len()
    }

    /// Returns the members as ranks of the world, in row-major order.
    pub fn ranks(&self) -> &[usize] {
        &self.0.ranks
    }

    /// Returns this rank's index on each axis.
    pub fn coordinate(&self) -> &[usize] {
        &self.0.coordinate
    }

    /// Returns the coordinate of a rank of [`group`](Self::group).
    ///
    /// # Errors
    /// If the mesh has no such rank.
    pub fn coordinate_of(&self, rank: usize) -> Result<Vec<usize>> {
        if rank >= self.size() {
            let last = self.size() - 1;
            return Err(Error::Mesh(format!(
                "no rank {rank} in {self}; its ranks are counted from 0 to {last}"
            )));
        }
        Ok(self.0.layout.coordinate(rank))
    }

    /// Returns the coordinates of all ranks of [`group`](Self::group), in rank order.
    pub fn coordinates(&self) -> impl ExactSizeIterator<Item = Vec<usize>> + '_ {
        (0..self.size()).map(|rank| self.0.layout.coordinate(rank))
    }

    /// Returns the index of an axis. For a number, this checks that the axis exists.
    pub fn axis_index<'a>(&self, axis: impl Into<Axis<'a>>) -> Result<usize> {
        self.0.layout.index(axis.into())
    }

    /// Returns the number of ranks along an axis.
    pub fn size_of<'a>(&self, axis: impl Into<Axis<'a>>) -> Result<usize> {
        Ok(self.shape()[self.axis_index(axis)?])
    }

    /// Returns this rank's index on an axis, which is its rank in the [`axis_group`](Self::axis_group).
    pub fn local_rank<'a>(&self, axis: impl Into<Axis<'a>>) -> Result<usize> {
        Ok(self.coordinate()[self.axis_index(axis)?])
    }

    /// Returns the group of all ranks of the mesh, in row-major order.
    ///
    /// It is not the group that the mesh was created from, so another thread may communicate on that one. The
    /// exceptions are [`from_group`](Self::from_group) and [`from_groups`](Self::from_groups), which use the given
    /// groups. Meshes derived from each other share groups of the same ranks.
    #[track_caller]
    pub fn group(&self) -> Result<&ProcessGroup> {
        self.group_in(&self.0.group, || self.ranks().to_vec())
    }

    /// Returns the group of the ranks that differ from this one only on one axis, in the order of the axis.
    ///
    /// An axis of all ranks also has its own group; see [`group`](Self::group).
    #[track_caller]
    pub fn axis_group<'a>(&self, axis: impl Into<Axis<'a>>) -> Result<&ProcessGroup> {
        let axis = self.axis_index(axis)?;
        self.group_in(&self.0.axis_groups[axis], || self.ranks_along(&[axis]))
    }

    /// Copies the result of a call on a group of this mesh to the host; see [`ProcessGroup::to_host`].
    ///
    /// # Errors
    /// Those of [`ProcessGroup::to_host`].
    pub fn to_host(&self, tensor: &Tensor) -> Result<Tensor> {
        self.0.root.base().to_host(tensor)
    }

    /// Returns the [`axis_group`](Self::axis_group) of every axis, outermost first.
    #[track_caller]
    pub fn all_groups(&self) -> Result<Vec<&ProcessGroup>> {
        let mut groups = Vec::with_capacity(self.ndim());
        for axis in 0..self.ndim() {
            groups.push(self.axis_group(axis)?);
        }
        Ok(groups)
    }

    /// Returns the group in `slot`, which is created on first use.
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

    /// Returns the ranks of the world that differ from this rank only on `axes`, row-major.
    pub(crate) fn ranks_along(&self, axes: &[usize]) -> Vec<usize> {
        self.0.layout.row(self.coordinate(), axes).into_iter().map(|place| self.ranks()[place]).collect()
    }
}

impl PartialEq for DeviceMesh {
    /// Two meshes are equal if they have the same ranks on the same axes.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || (self.0.layout == other.0.layout && self.ranks() == other.ranks())
    }
}

impl Eq for DeviceMesh {}

impl Hash for DeviceMesh {
    /// Hashes the same fields that equality compares, which never change.
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
