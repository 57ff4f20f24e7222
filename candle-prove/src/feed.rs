//! The inputs of a run on a rank.
use super::TOKENS;
use super::model::ModelInput;
use super::setup::Setup;
use super::trainer::Subject;
use candle_core::{Device, Tensor};
use candle_dist::DeviceMesh;
use candle_pipe::microbatch::{Microbatches, Splitter, TensorChunkSpec};
use candle_pipe::{Kwargs, Result};
use candle_shard::{DTensor, Placement, Replicate, Shard};
use std::collections::BTreeMap;
use std::ops::Range;

impl Subject {
    /// Returns these rows of the inputs on a mesh.
    pub(super) fn on_mesh(
        &self,
        setup: &Setup,
        mesh: &DeviceMesh,
        rows: &Range<usize>,
    ) -> Result<Vec<DTensor>> {
        let device = mesh.axis_group(0)?.device();
        let place = |input: &ModelInput, name: &String| -> Placement {
            let dim = match name.as_str() {
                TOKENS => input.tokens,
                name if self.rows.iter().any(|axis| axis == name) => input.rows,
                _ => None,
            };
            dim.map_or(Replicate, Shard)
        };
        let on_mesh = |input: &ModelInput| -> Result<DTensor> {
            let places: Vec<Placement> = mesh.names().iter().map(|name| place(input, name)).collect();
            Ok(DTensor::distribute(&piece(input, rows, setup, device)?, mesh, &places)?)
        };
        self.inputs.iter().map(on_mesh).collect()
    }

    /// Returns these rows of the inputs as microbatches of a pipeline.
    pub(super) fn microbatches(
        &self,
        setup: &Setup,
        rows: &Range<usize>,
        device: &Device,
    ) -> Result<Microbatches> {
        let mut kwargs = Kwargs::new();
        let mut specs = BTreeMap::new();
        for input in &self.inputs {
            kwargs.insert(input.name.clone(), piece(input, rows, setup, device)?.into());
            let spec = match input.rows {
                Some(dim) => TensorChunkSpec(dim as i64).into(),
                None => candle_pipe::microbatch::Replicate,
            };
            specs.insert(input.name.clone(), spec);
        }
        let microbatches = setup.schedule.map_or(1, |(_, microbatches, _)| microbatches);
        Splitter::new(microbatches).split(&[], &kwargs, None, Some(&specs))
    }
}

/// Returns rows of an input in the dtype of the set-up.
fn piece(input: &ModelInput, rows: &Range<usize>, setup: &Setup, device: &Device) -> Result<Tensor> {
    let some = match input.rows {
        Some(dim) => input.whole.narrow(dim, rows.start, rows.len())?,
        None => input.whole.clone(),
    };
    if !some.dtype().is_float() {
        return Ok(some.to_device(device)?);
    }
    let rounded = some.to_dtype(setup.rounded.unwrap_or(setup.dtype))?;
    Ok(rounded.to_dtype(setup.dtype)?.to_device(device)?)
}
