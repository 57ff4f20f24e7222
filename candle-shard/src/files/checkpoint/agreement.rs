//! Checks that all ranks pass the same tensors.
use crate::files::weights::is_reserved;
use crate::layout::Spec;
use crate::{Error, Result};
use candle_dist::{DeviceMesh, ProcessGroup};
use itertools::{EitherOrBoth, Itertools};

/// A tensor to save.
pub(super) type NamedSpec<'a> = (&'a str, &'a Spec);

/// Refuses names that a file cannot hold: one that comes twice, or that its format keeps to itself.
pub(crate) fn check_names<'a>(op: &'static str, names: impl Iterator<Item = &'a str> + Clone) -> Result<()> {
    if let Some(name) = names.clone().duplicates().next() {
        return Error::op(op, format!("{name:?} is named twice; give each tensor a name of its own"));
    }
    match names.into_iter().find(|name| is_reserved(name)) {
        Some(name) => Error::op(
            op,
            format!("{name:?} is not a valid name for a tensor in a safetensors file; choose another"),
        ),
        None => Ok(()),
    }
}

/// Checks that all ranks of `group` pass the same names with the same descriptions, and that files can contain the
/// names.
pub(crate) fn check_named<N: AsRef<str>>(
    op: &'static str,
    group: &ProcessGroup,
    tensors: &[(N, String)],
) -> Result<()> {
    let describe = |(name, description): &(N, String)| format!("{:?} as {description}", name.as_ref());
    let texts = group.all_gather_text(&tensors.iter().map(describe).join("\n"))?;
    for (rank, text) in group.ranks().iter().zip(&texts) {
        let differs = text.lines().zip_longest(texts[0].lines()).find(|pair| match pair {
            EitherOrBoth::Both(here, there) => here != there,
            _ => true,
        });
        if let Some(pair) = differs {
            let (here, there) = pair.or("nothing more", "nothing more");
            let first = group.ranks()[0];
            return Error::op(
                op,
                format!("rank {rank} names {here}, and rank {first} names {there}; name the same"),
            );
        }
    }
    check_names(op, tensors.iter().map(|(name, _)| name.as_ref()))
}

/// Checks that all ranks pass the same names in the same layouts, and that these can be saved.
pub(super) fn check_alike(op: &'static str, mesh: &DeviceMesh, tensors: &[NamedSpec<'_>]) -> Result<()> {
    let described = tensors.iter().map(|&(name, spec)| (name, format!("{spec} on {}", spec.mesh())));
    check_named(op, mesh.group()?, &described.collect_vec())?;
    for (name, spec) in tensors {
        if spec.mesh() != mesh {
            return Error::op(
                op,
                format!("{name:?} lies on {}, and {mesh} is saved; save it by itself", spec.mesh()),
            );
        }
        if let Some(p) = spec.placements().iter().find(|p| p.is_partial()) {
            return Error::op(
                op,
                format!("{name:?} as {spec} is {p}, not yet a value; redistribute it first"),
            );
        }
    }
    Ok(())
}
