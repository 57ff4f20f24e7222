//! Export to one ordinary file, for programs without meshes.
use super::agreement::{Named, check_alike};
use super::beside;
use crate::agreement::agreed;
use crate::files::disk;
use crate::files::weights::WeightWriter;
use crate::{DTensor, Error, Result};
use candle_dist::DeviceMesh;
use itertools::Itertools;
use std::path::Path;

const OP: &str = "checkpoint::export";

/// Writes tensors of `mesh` to one ordinary safetensors file, each as a whole.
///
/// They are gathered one after the other, so each rank needs memory for the largest of them. Rank 0 writes; the file
/// gets its name when it is complete.
///
/// # Errors
/// Those of [`save`](super::save).
pub fn export<N: AsRef<str>>(path: impl AsRef<Path>, mesh: &DeviceMesh, tensors: &[(N, DTensor)]) -> Result<()> {
    let named: Vec<Named<'_>> = tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor.spec())).collect();
    check_alike(OP, mesh, &named)?;
    let (group, path) = (mesh.group()?, path.as_ref());
    let partial = agreed(group, OP, beside(path, "partial"))?;
    let tensors = tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor));
    let tensors: Vec<_> = tensors.sorted_by_key(|(name, tensor)| WeightWriter::order(tensor.dtype(), name)).collect();
    let announced = tensors.iter().map(|(name, tensor)| (*name, tensor.dtype(), tensor.dims()));
    let mut writer = (group.rank() == 0).then(|| WeightWriter::create(&partial, announced)).transpose();
    for (_, tensor) in tensors {
        let detached = DTensor::from_local_with_spec(tensor.to_local().detach(), tensor.spec().clone())?;
        let whole = detached.full_tensor()?;
        // After a failure rank 0 continues to gather, because the other ranks wait for it.
        if let Ok(Some(file)) = &mut writer
            && let Err(error) = file.write(&whole)
        {
            writer = Err(error);
        }
    }
    let finish = |writer: Option<WeightWriter>| match writer {
        Some(writer) => {
            writer.finish()?;
            let put = disk::rename(&partial, path).and_then(|()| disk::sync_folder(disk::folder_of(path)));
            put.map_err(|error| Error::file(path, format!("cannot be written ({error})")))
        }
        None => Ok(()),
    };
    agreed(group, OP, writer.and_then(finish)).inspect_err(|_| {
        // The error matters, not whether its leftovers can be removed.
        disk::remove_file(&partial).ok();
    })
}
