//! Ranks arranged in an n-dimensional grid with named axes.
use crate::{Error, ProcessGroup, Result};
use itertools::Itertools;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// An n-dimensional grid of ranks with named axes: which axis of the machine does what.
///
/// Ranks fill the grid in row-major order: the last axis varies fastest. Groups along an axis are made when first
/// asked for. Cheap to clone.
///
/// ```
/// use candle_dist::{Result, World};
///
/// let coordinates = World::local(4).run(|ctx| -> Result<Vec<usize>> {
///     let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
///     assert_eq!(mesh.axis_group(mesh.axis_index("tp")?)?.size(), 2);
///     Ok(mesh.coordinate().to_vec())
/// })?;
/// assert_eq!(coordinates, [[0, 0], [0, 1], [1, 0], [1, 1]]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Clone)]
pub struct DeviceMesh(Arc<Inner>);

struct Inner {
    group: ProcessGroup,
    names: Vec<String>,
    shape: Vec<usize>,
    coordinate: Vec<usize>,
    axis_groups: Vec<OnceLock<ProcessGroup>>,
}

impl DeviceMesh {
    /// A mesh of all ranks of `group` with the given axes, outermost first.
    ///
    /// Every rank calls it; a mesh that is described differently on some rank is an error on every rank.
    pub fn new(group: &ProcessGroup, axes: &[(&str, usize)]) -> Result<Self> {
        let shown = axes.iter().map(|(name, size)| format!("{name}={size}")).join(", ");
        if axes.is_empty() {
            return Err(Error::Mesh("a mesh needs at least one axis".to_string()));
        }
        if let Some(name) = axes.iter().map(|(name, _)| name).duplicates().next() {
            return Err(Error::Mesh(format!("axis name {name:?} occurs twice in ({shown}); name each axis once")));
        }
        if axes.iter().any(|(name, _)| name.is_empty()) {
            return Err(Error::Mesh(format!("an axis of ({shown}) has no name")));
        }
        let size: usize = axes.iter().map(|(_, size)| size).product();
        if size != group.size() {
            let n = group.size();
            return Err(Error::Mesh(format!("({shown}) has {size} places for a group of {n} ranks; make them equal")));
        }
        group.agree(&format!("DeviceMesh({shown})"))?;
        Ok(Self::build(group.clone(), axes.iter().map(|(n, s)| (n.to_string(), *s)).unzip()))
    }

    fn build(group: ProcessGroup, (names, shape): (Vec<String>, Vec<usize>)) -> Self {
        let mut coordinate = vec![0; shape.len()];
        let mut rest = group.rank();
        for (c, size) in coordinate.iter_mut().zip(&shape).rev() {
            (*c, rest) = (rest % size, rest / size);
        }
        let axis_groups = shape.iter().map(|_| OnceLock::new()).collect();
        Self(Arc::new(Inner { group, names, shape, coordinate, axis_groups }))
    }

    /// The number of axes.
    pub fn ndim(&self) -> usize {
        self.0.shape.len()
    }

    /// The sizes of the axes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// The names of the axes, outermost first.
    pub fn names(&self) -> &[String] {
        &self.0.names
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.0.group.size()
    }

    /// The group of all ranks of the mesh, in row-major order.
    pub fn group(&self) -> &ProcessGroup {
        &self.0.group
    }

    /// This rank's place: its index on each axis.
    pub fn coordinate(&self) -> &[usize] {
        &self.0.coordinate
    }

    /// The coordinate of a rank of [`group`](Self::group).
    pub fn coordinate_of(&self, rank: usize) -> Vec<usize> {
        let mut coordinate = vec![0; self.ndim()];
        let mut rest = rank;
        for (c, size) in coordinate.iter_mut().zip(self.shape()).rev() {
            (*c, rest) = (rest % size, rest / size);
        }
        coordinate
    }

    /// The index of a named axis.
    pub fn axis_index(&self, name: &str) -> Result<usize> {
        self.names().iter().position(|n| n == name).ok_or_else(|| {
            let known = self.names().iter().map(|n| format!("{n:?}")).join(", ");
            Error::Mesh(format!("no axis {name:?}; the axes are {known}"))
        })
    }

    /// The ranks that differ from this one only on axis number `axis`, ordered by their place on it.
    pub fn axis_group(&self, axis: usize) -> Result<&ProcessGroup> {
        let slot = self
            .0
            .axis_groups
            .get(axis)
            .ok_or_else(|| Error::Mesh(format!("axis {axis} of a mesh with {} axes; count from 0", self.ndim())))?;
        if let Some(group) = slot.get() {
            return Ok(group);
        }
        let group = if self.ndim() == 1 { self.0.group.clone() } else { self.0.group.subgroup(&self.row(&[axis]))? };
        Ok(slot.get_or_init(|| group))
    }

    /// The one-dimensional mesh along a named axis.
    pub fn axis(&self, name: &str) -> Result<Self> {
        let axis = self.axis_index(name)?;
        if self.ndim() == 1 {
            return Ok(self.clone());
        }
        let group = self.axis_group(axis)?.clone();
        Ok(Self::build(group, (vec![name.to_string()], vec![self.shape()[axis]])))
    }

    /// The ranks, row-major, that share this rank's place on all other axes.
    fn row(&self, axes: &[usize]) -> Vec<usize> {
        let along = |axis: usize| {
            if axes.contains(&axis) {
                0..self.shape()[axis]
            } else {
                self.coordinate()[axis]..self.coordinate()[axis] + 1
            }
        };
        let places = (0..self.ndim()).map(along).multi_cartesian_product();
        places.map(|place| place.iter().zip(self.shape()).fold(0, |rank, (c, size)| rank * size + c)).collect()
    }
}

impl PartialEq for DeviceMesh {
    /// Meshes are equal if they arrange the same ranks on the same axes.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || (self.names() == other.names()
                && self.shape() == other.shape()
                && self.group().ranks() == other.group().ranks())
    }
}

impl Eq for DeviceMesh {}

impl fmt::Display for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = self.names().iter().zip(self.shape()).map(|(n, s)| format!("{n}={s}")).join(", ");
        write!(f, "DeviceMesh({axes})")
    }
}

impl fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} at {:?}", self.coordinate())
    }
}
