//! Deriving meshes: selecting axes, merging axes, and splitting an axis.
use super::layout::{Axis, MeshLayout};
use super::{DeviceMesh, shown};
use crate::{Error, Result};
use std::ops::Range;

impl DeviceMesh {
    /// Returns the one-dimensional mesh along an axis that contains this rank. Communicates nothing.
    ///
    /// # Errors
    /// If the axis does not exist.
    pub fn axis<'a>(&self, axis: impl Into<Axis<'a>>) -> Result<Self> {
        Ok(self.pick(&[self.axis_index(axis)?]))
    }

    /// Returns the mesh of several axes that contains this rank. Communicates nothing.
    ///
    /// ```
    /// use candle_dist::{Result, World};
    ///
    /// let ranks = World::threads(8).run(|ctx| -> Result<Vec<usize>> {
    ///     let mesh = ctx.mesh(&[("dp", 2), ("cp", 2), ("tp", 2)])?;
    ///     Ok(mesh.axes(&["dp", "tp"])?.ranks().to_vec())
    /// })?;
    /// assert_eq!(ranks[0], [0, 1, 4, 5]);
    /// assert_eq!(ranks[7], [2, 3, 6, 7]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If a name is unknown or occurs twice, or the names are not in the order of the mesh, outermost first.
    pub fn axes(&self, names: &[&str]) -> Result<Self> {
        Ok(self.pick(&self.0.layout.indices(names)?))
    }

    /// Merges several axes into a one-dimensional mesh with a new name. The last axis varies fastest.
    ///
    /// Every rank of this mesh must call it. Repeated calls cost nothing and create nothing. A single axis may keep its
    /// name; the result is then that axis.
    ///
    /// ```
    /// use candle_dist::{Result, World};
    ///
    /// let ranks = World::threads(8).run(|ctx| -> Result<Vec<usize>> {
    ///     let mesh = ctx.mesh(&[("dp", 2), ("cp", 2), ("tp", 2)])?;
    ///     Ok(mesh.flatten(&["dp", "tp"], "dp_tp")?.axis_group("dp_tp")?.ranks().to_vec())
    /// })?;
    /// assert_eq!(ranks[0], [0, 1, 4, 5]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// The same on every rank: if the ranks disagree, as for [`axes`](Self::axes), or if the new name belongs to other
    /// ranks in this mesh or in one that shares its groups.
    #[track_caller]
    pub fn flatten(&self, names: &[&str], name: &str) -> Result<Self> {
        let flat = || {
            let part = self.axes(names)?;
            let layout = MeshLayout::new(&[(name, part.size())])?;
            let place = part.0.layout.place(part.coordinate());
            Ok(Self::assemble(self.0.root.clone(), layout, part.ranks().to_vec(), vec![place]))
        };
        self.derive(&format!("flatten {names:?} to {name:?}"), flat(), 0..1)
    }

    /// Returns the mesh with one axis split into several. The last new axis varies fastest.
    ///
    /// Every rank of this mesh must call it. Repeated calls cost nothing.
    ///
    /// ```
    /// use candle_dist::{Result, World};
    ///
    /// let shapes = World::threads(4).run(|ctx| -> Result<String> {
    ///     let mesh = ctx.mesh(&[("dp", 4)])?;
    ///     Ok(mesh.unflatten("dp", &[("replicate", 2), ("shard", 2)])?.to_string())
    /// })?;
    /// assert_eq!(shapes[0], "DeviceMesh(replicate=2, shard=2)");
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// The same on every rank: if the ranks disagree, the axis is unknown, the product of the sizes is not its size, or
    /// a name is empty, occurs twice, or belongs to other ranks in this mesh or in one that shares its groups.
    #[track_caller]
    pub fn unflatten<'a>(&self, axis: impl Into<Axis<'a>>, into: &[(&str, usize)]) -> Result<Self> {
        let axis = axis.into();
        let (shown, at) = (shown(into), self.axis_index(axis));
        let cut = || {
            let axis = at.clone()?;
            let (name, size, places) =
                (&self.names()[axis], self.shape()[axis], MeshLayout::new(into)?.size());
            if places != size {
                return Err(Error::Mesh(format!(
                    "axis {name:?} has {size} ranks and {shown} {places} places; the sizes must multiply to {size}"
                )));
            }
            let mut axes = self.0.layout.axes();
            axes.splice(axis..=axis, into.iter().copied());
            let layout = MeshLayout::new(&axes)?;
            let coordinate = layout.coordinate(self.0.layout.place(self.coordinate()));
            Ok(Self::assemble(self.0.root.clone(), layout, self.ranks().to_vec(), coordinate))
        };
        let first = at.clone().unwrap_or_default();
        self.derive(&format!("unflatten {axis:?} into {shown}"), cut(), first..first + into.len())
    }

    /// Registers the `new` axes of a derived mesh, if all ranks derive the same mesh and the names are free.
    #[track_caller]
    fn derive(&self, what: &str, made: Result<Self>, new: Range<usize>) -> Result<Self> {
        // A name may be taken on some ranks only, but all ranks must get the error.
        let taken = made.as_ref().is_ok_and(|mesh| mesh.check_names(new.clone()).is_err());
        self.agree(&format!("{what}{}", if taken { ", a name in use for other ranks" } else { "" }))?;
        let mesh = made?;
        mesh.claim_names(new)?;
        Ok(mesh)
    }

    /// Returns the mesh of some axes, in order.
    fn pick(&self, axes: &[usize]) -> Self {
        if axes.len() == self.ndim() {
            return self.clone();
        }
        let coordinate = axes.iter().map(|&axis| self.coordinate()[axis]).collect();
        Self::assemble(self.0.root.clone(), self.0.layout.pick(axes), self.ranks_along(axes), coordinate)
    }

    /// Registers the names of some axes for the ranks along them.
    pub(super) fn claim_names(&self, axes: Range<usize>) -> Result<()> {
        self.0.root.claim(&self.lines(axes))
    }

    /// Fails if the name of one of the axes belongs to other ranks.
    fn check_names(&self, axes: Range<usize>) -> Result<()> {
        self.0.root.check(&self.lines(axes))
    }

    /// Returns the names of some axes with the ranks along them.
    fn lines(&self, axes: Range<usize>) -> Vec<(&str, Vec<usize>)> {
        axes.map(|axis| (self.names()[axis].as_str(), self.ranks_along(&[axis]))).collect()
    }

    /// Fails on every rank of the mesh unless all describe the same operation on it.
    #[track_caller]
    fn agree(&self, what: &str) -> Result<()> {
        self.0.root.agree(self.ranks(), format!("{self} of ranks {:?}: {what}", self.ranks()))
    }
}
