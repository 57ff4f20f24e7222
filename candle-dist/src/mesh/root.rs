//! What a mesh shares with all meshes derived from it: the groups that exist, and what names stand for.
use crate::{Error, ProcessGroup, Result};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};

/// The common ground of a mesh and all meshes derived from it.
pub(super) struct Root {
    /// A group that has all ranks of the mesh.
    base: ProcessGroup,
    /// The groups made so far, by their ranks in order: no group is made twice, and none is `base`, which may be in use by
    /// another thread.
    groups: Mutex<HashMap<Vec<usize>, ProcessGroup>>,
    /// The ranks along each axis that was ever named, as seen from this rank.
    lines: Mutex<HashMap<String, Vec<usize>>>,
    /// What the ranks have compared already.
    settled: Mutex<HashSet<String>>,
}

impl Root {
    /// The root of a mesh within `base`; groups in `known` need not be made.
    pub(super) fn new(base: &ProcessGroup, known: impl IntoIterator<Item = ProcessGroup>) -> Self {
        Self {
            base: base.clone(),
            groups: Mutex::new(known.into_iter().map(|group| (group.ranks().to_vec(), group)).collect()),
            lines: Mutex::default(),
            settled: Mutex::default(),
        }
    }

    /// The group of `ranks` of the world, made when first asked for.
    #[track_caller]
    pub(super) fn group(&self, ranks: &[usize]) -> Result<ProcessGroup> {
        let mut groups = self.groups.lock();
        if let Some(group) = groups.get(ranks) {
            return Ok(group.clone());
        }
        let all = self.base.ranks();
        let members: Vec<usize> = ranks.iter().filter_map(|rank| all.iter().position(|r| r == rank)).collect();
        let group = self.base.subgroup(&members)?;
        groups.insert(ranks.to_vec(), group.clone());
        Ok(group)
    }

    /// Makes axis names stand for the given ranks, or none of them if one stands for other ranks already.
    pub(super) fn claim(&self, axes: &[(&str, Vec<usize>)]) -> Result<()> {
        self.check(axes)?;
        self.lines.lock().extend(axes.iter().map(|(name, ranks)| (name.to_string(), ranks.clone())));
        Ok(())
    }

    /// Fails if a name stands for other ranks already.
    pub(super) fn check(&self, axes: &[(&str, Vec<usize>)]) -> Result<()> {
        let lines = self.lines.lock();
        // The text names no ranks: they differ from rank to rank, and an error should not.
        if let Some((name, _)) = axes.iter().find(|(name, ranks)| lines.get(*name).is_some_and(|line| line != ranks)) {
            return Err(Error::Mesh(format!(
                "the name {name:?} already stands for other ranks in this mesh or one it was made from; choose another"
            )));
        }
        Ok(())
    }

    /// Fails on all of `ranks` unless they describe the same thing; the same thing is compared once.
    #[track_caller]
    pub(super) fn agree(&self, ranks: &[usize], description: String) -> Result<()> {
        if !self.settled.lock().contains(&description) {
            self.group(ranks)?.agree(&description)?;
            self.settled.lock().insert(description);
        }
        Ok(())
    }
}
