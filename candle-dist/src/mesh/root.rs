//! The groups and axis names that a mesh shares with all meshes derived from it.
use crate::{Error, ProcessGroup, Result};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};

/// The state that a mesh shares with all meshes derived from it.
pub(super) struct MeshRoot {
    /// A group that contains all ranks of the mesh.
    base: ProcessGroup,
    /// The groups created so far, by their ranks in order. No group is created twice. None of them is `base`, which
    /// another thread may be using.
    groups: Mutex<HashMap<Vec<usize>, ProcessGroup>>,
    /// For each axis name used so far, the ranks along that axis, as seen from this rank.
    lines: Mutex<HashMap<String, Vec<usize>>>,
    /// The descriptions that the ranks have compared already.
    settled: Mutex<HashSet<String>>,
}

impl MeshRoot {
    /// Creates the root of a mesh within `base`; `known` are groups that exist already.
    pub(super) fn new(base: &ProcessGroup, known: impl IntoIterator<Item = ProcessGroup>) -> Self {
        Self {
            base: base.clone(),
            groups: Mutex::new(known.into_iter().map(|group| (group.ranks().to_vec(), group)).collect()),
            lines: Mutex::default(),
            settled: Mutex::default(),
        }
    }

    /// A group that contains all ranks of the mesh. Nothing may be sent on it.
    pub(super) fn base(&self) -> &ProcessGroup {
        &self.base
    }

    /// Returns the group of `ranks` of the world, which is created on first use.
    #[track_caller]
    pub(super) fn group(&self, ranks: &[usize]) -> Result<ProcessGroup> {
        let mut groups = self.groups.lock();
        if let Some(group) = groups.get(ranks) {
            return Ok(group.clone());
        }
        let all = self.base.ranks();
        let members: Vec<usize> =
            ranks.iter().filter_map(|rank| all.iter().position(|r| r == rank)).collect();
        let group = self.base.subgroup(&members)?;
        groups.insert(ranks.to_vec(), group.clone());
        Ok(group)
    }

    /// Registers axis names for the given ranks, or none of them if one belongs to other ranks.
    pub(super) fn claim(&self, axes: &[(&str, Vec<usize>)]) -> Result<()> {
        self.check(axes)?;
        self.lines.lock().extend(axes.iter().map(|(name, ranks)| (name.to_string(), ranks.clone())));
        Ok(())
    }

    /// Fails if a name belongs to other ranks.
    pub(super) fn check(&self, axes: &[(&str, Vec<usize>)]) -> Result<()> {
        let lines = self.lines.lock();
        // The text names no ranks, because they differ from rank to rank and the error must not.
        if let Some((name, _)) =
            axes.iter().find(|(name, ranks)| lines.get(*name).is_some_and(|line| line != ranks))
        {
            return Err(Error::Mesh(format!(
                "the name {name:?} already stands for other ranks in this mesh or one it was made from; choose another"
            )));
        }
        Ok(())
    }

    /// Fails on all of `ranks` unless they give the same description. Each description is compared once.
    #[track_caller]
    pub(super) fn agree(&self, ranks: &[usize], description: String) -> Result<()> {
        if !self.settled.lock().contains(&description) {
            self.group(ranks)?.agree(&description)?;
            self.settled.lock().insert(description);
        }
        Ok(())
    }
}
