//! What ranks must name alike before they go on.
use super::Named;
use crate::{Error, Result};
use candle_dist::DeviceMesh;
use itertools::{EitherOrBoth, Itertools};

/// Checks that all ranks name the same tensors in the same layouts, which can be saved.
pub(super) fn check_alike(op: &'static str, mesh: &DeviceMesh, tensors: &[Named<'_>]) -> Result<()> {
    let group = mesh.group()?;
    let describe = |(name, spec): &Named<'_>| format!("{name:?} as {spec} on {}", spec.mesh());
    let texts = group.all_gather_text(&tensors.iter().map(describe).join("\n"))?;
    for (rank, text) in group.ranks().iter().zip(&texts) {
        let differs = text.lines().zip_longest(texts[0].lines()).find(|pair| match pair {
            EitherOrBoth::Both(here, there) => here != there,
            _ => true,
        });
        if let Some(pair) = differs {
            let (here, there) = pair.or("nothing more", "nothing more");
            let first = group.ranks()[0];
            return Error::op(op, format!("rank {rank} names {here}, and rank {first} names {there}; name the same"));
        }
    }
    if let Some(name) = tensors.iter().map(|(name, _)| name).duplicates().next() {
        return Error::op(op, format!("{name:?} is named twice; give each tensor a name of its own"));
    }
    for (name, spec) in tensors {
        if *name == "__metadata__" {
            return Error::op(op, format!("{name:?} is no name for a tensor in a safetensors file; choose another"));
        }
        if spec.mesh() != mesh {
            return Error::op(op, format!("{name:?} lies on {}, and {mesh} is saved; save it by itself", spec.mesh()));
        }
        if let Some(p) = spec.placements().iter().find(|p| p.is_partial()) {
            return Error::op(op, format!("{name:?} as {spec} is {p}, not yet a value; redistribute it first"));
        }
    }
    Ok(())
}
