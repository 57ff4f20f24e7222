//! Named axes and coordinates, without ranks or communication.
use crate::{Error, Result};
use itertools::Itertools;
use std::fmt;

/// An axis of a mesh: an index (the outermost is 0) or a name.
///
/// `usize`, `&str` and `&String` convert into it, so calls read `mesh.size_of("tp")` or `mesh.size_of(0)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis<'a> {
    /// The index; the outermost axis is 0.
    Index(usize),
    /// The name.
    Name(&'a str),
}

impl From<usize> for Axis<'_> {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}

impl<'a> From<&'a str> for Axis<'a> {
    fn from(name: &'a str) -> Self {
        Self::Name(name)
    }
}

impl<'a> From<&'a String> for Axis<'a> {
    fn from(name: &'a String) -> Self {
        Self::Name(name)
    }
}

/// The names and sizes of axes, outermost first. Places count in row-major order.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct MeshLayout {
    pub(super) names: Vec<String>,
    pub(super) shape: Vec<usize>,
}

/// Formats axes for messages, e.g. `(dp=2, tp=4)`.
pub(super) fn shown(axes: &[(&str, usize)]) -> String {
    format!("({})", axes.iter().map(|(name, size)| format!("{name}={size}")).join(", "))
}

impl MeshLayout {
    /// # Errors
    /// If there is no axis, a name is empty or occurs twice, or the number of places overflows.
    pub(super) fn new(axes: &[(&str, usize)]) -> Result<Self> {
        let shown = shown(axes);
        if axes.is_empty() {
            return Err(Error::Mesh(
                "a mesh needs at least one axis; for a single rank, give an axis of size 1".into(),
            ));
        }
        if let Some(name) = axes.iter().map(|(name, _)| name).duplicates().next() {
            return Err(Error::Mesh(format!(
                "axis name {name:?} occurs twice in {shown}; name each axis once"
            )));
        }
        if axes.iter().any(|(name, _)| name.is_empty()) {
            return Err(Error::Mesh(format!("an axis of {shown} has no name; name every axis")));
        }
        if axes.iter().try_fold(1usize, |n, (_, size)| n.checked_mul(*size)).is_none() {
            return Err(Error::Mesh(format!("the sizes of {shown} overflow; give the number of ranks")));
        }
        let (names, shape) = axes.iter().map(|(name, size)| (name.to_string(), *size)).unzip();
        Ok(Self { names, shape })
    }

    /// Returns the number of places.
    pub(super) fn size(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the index of an axis.
    pub(super) fn index(&self, axis: Axis<'_>) -> Result<usize> {
        match axis {
            Axis::Index(index) if index < self.shape.len() => Ok(index),
            Axis::Index(index) => {
                let n = self.shape.len();
                Err(Error::Mesh(format!("axis {index} of a mesh with {n} axes; count from 0")))
            }
            Axis::Name(name) => self.names.iter().position(|n| n == name).ok_or_else(|| {
                let known = self.names.iter().map(|n| format!("{n:?}")).join(", ");
                Error::Mesh(format!("no axis {name:?}; the axes are {known}"))
            }),
        }
    }

    /// Returns the indices of several named axes, which must be in the order of the layout.
    pub(super) fn indices(&self, names: &[&str]) -> Result<Vec<usize>> {
        if names.is_empty() {
            return Err(Error::Mesh(format!("no axes of {self} were named; name at least one")));
        }
        let axes: Vec<usize> = names.iter().map(|&name| self.index(name.into())).try_collect()?;
        if let Some(name) = names.iter().duplicates().next() {
            return Err(Error::Mesh(format!("axis {name:?} occurs twice in {names:?}; name each axis once")));
        }
        if !axes.is_sorted() {
            let sorted: Vec<_> = axes.iter().sorted().map(|&axis| &self.names[axis]).collect();
            return Err(Error::Mesh(format!(
                "axes {names:?} are not in the order of {self}, outermost first; write {sorted:?}"
            )));
        }
        Ok(axes)
    }

    /// Returns the coordinate of a place.
    pub(super) fn coordinate(&self, mut place: usize) -> Vec<usize> {
        let mut coordinate = vec![0; self.shape.len()];
        for (c, size) in coordinate.iter_mut().zip(&self.shape).rev() {
            (*c, place) = (place % size, place / size);
        }
        coordinate
    }

    /// Returns the place at a coordinate.
    pub(super) fn place(&self, coordinate: &[usize]) -> usize {
        coordinate.iter().zip(&self.shape).fold(0, |place, (c, size)| place * size + c)
    }

    /// Returns the places that differ from `coordinate` only on `axes`, in row-major order.
    pub(super) fn row(&self, coordinate: &[usize], axes: &[usize]) -> Vec<usize> {
        let along = |axis: usize| {
            if axes.contains(&axis) { 0..self.shape[axis] } else { coordinate[axis]..coordinate[axis] + 1 }
        };
        (0..self.shape.len()).map(along).multi_cartesian_product().map(|at| self.place(&at)).collect()
    }

    /// Returns the layout of some of the axes.
    pub(super) fn pick(&self, axes: &[usize]) -> Self {
        Self {
            names: axes.iter().map(|&axis| self.names[axis].clone()).collect(),
            shape: axes.iter().map(|&axis| self.shape[axis]).collect(),
        }
    }

    /// Returns the axes as pairs of name and size.
    pub(super) fn axes(&self) -> Vec<(&str, usize)> {
        self.names.iter().map(String::as_str).zip(self.shape.iter().copied()).collect()
    }
}

impl fmt::Display for MeshLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMesh{}", shown(&self.axes()))
    }
}
