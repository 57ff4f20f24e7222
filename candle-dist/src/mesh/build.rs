//! Creating meshes from groups and ranks.
use super::layout::{MeshLayout, shown};
use super::root::MeshRoot;
use super::{DeviceMesh, MeshInner};
use crate::{Error, ProcessGroup, Result};
use candle_core::{Device, Tensor};
use itertools::Itertools;
use std::sync::{Arc, OnceLock};

impl DeviceMesh {
    /// Creates a mesh of all ranks of `group` with the given axes, outermost first.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// The same on every rank: if the ranks describe different meshes, if the product of the axis sizes is not the
    /// number of ranks, or if a name is empty or occurs twice.
    #[track_caller]
    pub fn new(group: &ProcessGroup, axes: &[(&str, usize)]) -> Result<Self> {
        Self::of_all(group, axes, None)
    }

    /// Creates a mesh of all ranks of `group`; `known` is a group that exists already.
    #[track_caller]
    fn of_all(group: &ProcessGroup, axes: &[(&str, usize)], known: Option<ProcessGroup>) -> Result<Self> {
        // Compare before the checks, so that a mistake on one rank is an error on all.
        group.agree(&format!("DeviceMesh{}", shown(axes)))?;
        let layout = MeshLayout::new(axes)?;
        let (shown, places, n) = (shown(axes), layout.size(), group.size());
        if places != n {
            return Err(Error::Mesh(format!(
                "{shown} has {places} places for a group of {n} ranks; make them equal"
            )));
        }
        let coordinate = layout.coordinate(group.rank());
        Self::found(MeshRoot::new(group, known), layout, group.ranks().to_vec(), coordinate)
    }

    /// Creates a mesh of some ranks of `group`, which fill the grid row by row in the given order. Other ranks get
    /// `None`.
    ///
    /// Every rank of `group` must call it, including those outside of the mesh. `ranks` are ranks of `group`.
    ///
    /// ```
    /// use candle_dist::{DeviceMesh, Result, World};
    ///
    /// let coordinates = World::threads(6).run(|ctx| -> Result<Option<Vec<usize>>> {
    ///     let mesh = DeviceMesh::from_ranks(ctx.group(), &[0, 1, 4, 5], &[("dp", 2), ("tp", 2)])?;
    ///     Ok(mesh.map(|mesh| mesh.coordinate().to_vec()))
    /// })?;
    /// assert_eq!(coordinates[4], Some(vec![1, 0]));
    /// assert_eq!(coordinates[2], None);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and if a rank is outside of the group or occurs twice.
    #[track_caller]
    pub fn from_ranks(group: &ProcessGroup, ranks: &[usize], axes: &[(&str, usize)]) -> Result<Option<Self>> {
        let shown = shown(axes);
        group.agree(&format!("DeviceMesh{shown} of ranks {ranks:?}"))?;
        let layout = MeshLayout::new(axes)?;
        let (places, given, n) = (layout.size(), ranks.len(), group.size());
        if places != given || given == 0 {
            return Err(Error::Mesh(format!(
                "{shown} has {places} places and {given} ranks are given; give one for each place, at least one"
            )));
        }
        if let Some(rank) = ranks.iter().find(|&&rank| rank >= n) {
            let last = n - 1;
            return Err(Error::Mesh(format!(
                "rank {rank} in {ranks:?} for {shown} is outside the group; its ranks are 0 to {last}"
            )));
        }
        if let Some(rank) = ranks.iter().duplicates().next() {
            return Err(Error::Mesh(format!(
                "rank {rank} occurs twice in {ranks:?} for {shown}; give each rank once"
            )));
        }
        let Some(place) = ranks.iter().position(|&rank| rank == group.rank()) else { return Ok(None) };
        let coordinate = layout.coordinate(place);
        let ranks = ranks.iter().map(|&rank| group.ranks()[rank]).collect();
        Self::found(MeshRoot::new(group, []), layout, ranks, coordinate).map(Some)
    }

    /// Creates a mesh with one axis, whose group is `group`.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    #[track_caller]
    pub fn from_group(group: &ProcessGroup, name: &str) -> Result<Self> {
        Self::of_all(group, &[(name, group.size())], Some(group.clone()))
    }

    /// Creates a mesh from existing groups: `axes` are the names and groups of this rank's axes, outermost first.
    ///
    /// Every rank of `group` must call it with its own groups. `group` has the ranks of the mesh in any order. A rank's
    /// index on an axis is its rank in the group of that axis. The ranks exchange the members of their groups.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and if the groups do not form a grid; it names a rank, an axis and both lists.
    #[track_caller]
    pub fn from_groups(group: &ProcessGroup, axes: &[(&str, &ProcessGroup)]) -> Result<Self> {
        let sizes: Vec<(&str, usize)> = axes.iter().map(|(name, along)| (*name, along.size())).collect();
        let shown = shown(&sizes);
        group.agree(&format!("DeviceMesh{shown} from groups"))?;
        let layout = MeshLayout::new(&sizes)?;
        let (places, n) = (layout.size(), group.size());
        if places != n {
            return Err(Error::Mesh(format!(
                "the groups of {shown} make {places} places for a group of {n} ranks; give the group of all its ranks"
            )));
        }
        // One row per rank: its coordinate, then the members of its groups. All see all rows, so all fail alike.
        let ndim = axes.len();
        let mine = axes.iter().map(|(_, along)| along.rank());
        let mine = mine.chain(axes.iter().flat_map(|(_, along)| along.ranks().iter().copied()));
        let mine: Vec<i64> = mine.map(|number| number as i64).collect();
        let all = group.all_gather(&Tensor::from_vec(mine.clone(), (1, mine.len()), &Device::Cpu)?, 0)?;
        let all: Vec<Vec<usize>> = all
            .to_vec2::<i64>()?
            .into_iter()
            .map(|row| row.into_iter().map(|number| number as usize).collect())
            .collect();

        let mut grid: Vec<Option<usize>> = vec![None; n];
        for (row, &rank) in all.iter().zip(group.ranks()) {
            let coordinate = &row[..ndim];
            if let Some(other) = grid[layout.place(coordinate)].replace(rank) {
                return Err(Error::Mesh(format!(
                    "ranks {other} and {rank} are both at {coordinate:?} of {shown}; give groups that form a grid"
                )));
            }
        }
        // There are as many ranks as places, and no place is taken twice, so every place is taken.
        let ranks: Vec<usize> = grid.into_iter().flatten().collect();
        for (row, rank) in all.iter().zip(group.ranks()) {
            let mut members = &row[ndim..];
            for (axis, (name, size)) in sizes.iter().enumerate() {
                let (given, rest) = members.split_at(*size);
                let want: Vec<usize> =
                    layout.row(&row[..ndim], &[axis]).iter().map(|&place| ranks[place]).collect();
                if given != want {
                    return Err(Error::Mesh(format!(
                        "axis {name:?} of {shown}: rank {rank} has a group of ranks {given:?}, but the ranks along \
                         the axis there are {want:?}; give the group of these"
                    )));
                }
                members = rest;
            }
        }
        let known = axes.iter().map(|(_, along)| (*along).clone());
        let coordinate = mine[..ndim].iter().map(|&c| c as usize).collect();
        Self::found(MeshRoot::new(group, known), layout, ranks, coordinate)
    }

    /// Creates the first mesh on a root.
    fn found(root: MeshRoot, layout: MeshLayout, ranks: Vec<usize>, coordinate: Vec<usize>) -> Result<Self> {
        let mesh = Self::assemble(Arc::new(root), layout, ranks, coordinate);
        mesh.claim_names(0..mesh.ndim())?;
        Ok(mesh)
    }

    pub(super) fn assemble(
        root: Arc<MeshRoot>,
        layout: MeshLayout,
        ranks: Vec<usize>,
        coordinate: Vec<usize>,
    ) -> Self {
        let axis_groups = layout.shape.iter().map(|_| OnceLock::new()).collect();
        Self(Arc::new(MeshInner { root, layout, ranks, coordinate, axis_groups, group: OnceLock::new() }))
    }
}
