//! One parameter or buffer: from its name, its sizes and its placement to the tensor of this rank.
use super::MeshVarBuilder;
use crate::layout::{Axes, Placement, Placements, Replicate, RowsOf, Shard, Spec, StoredName, axes_of};
use crate::nn::place::{AxisCut, ParameterPlace};
use crate::nn::source::Init;
use crate::nn::{Parameter, Width};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Shape};
use candle_dist::backend::Dims;
use candle_dist::{GradMark, empty};
use smallvec::SmallVec;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

impl MeshVarBuilder {
    /// Creates the parameter `name` of this module: global `shape`, placed on the plan's axis as `placement` says.
    ///
    /// With `varying`, the gradient of a replicated parameter is left partial until
    /// [`Parameters::reduce`](crate::nn::Parameters::reduce).
    pub fn get(
        &self,
        shape: impl Into<Shape>,
        name: &str,
        init: Init,
        placement: Placement,
        varying: bool,
    ) -> Result<DTensor> {
        let dims: SmallVec<[Width; 4]> = shape.into().dims().iter().map(|&size| size.into()).collect();
        self.build(&dims, name.into(), (init, None), placement.into(), varying)
    }

    /// Like [`get`](Self::get), for sizes in units that shards do not cut, such as heads.
    pub fn get_in_units(
        &self,
        dims: &[Width],
        name: &str,
        init: Init,
        placement: Placement,
        varying: bool,
    ) -> Result<DTensor> {
        self.build(dims, name.into(), (init, None), placement.into(), varying)
    }

    /// Creates the parameter `name` of this module, sharded as `cuts` say: an axis, the dim that it shards, and the
    /// sizes of the shards if they are not the default ones. It is replicated on all other axes.
    ///
    /// # Errors
    /// If the sizes do not cut the dim, or parameters are fully sharded over one of the axes.
    pub(in crate::nn) fn cut(
        &self,
        dims: &[usize],
        name: &str,
        init: Init,
        cuts: &[AxisCut],
    ) -> Result<DTensor> {
        let dims: SmallVec<[Width; 4]> = dims.iter().map(|&size| size.into()).collect();
        let place = ParameterPlace { cuts, ..Replicate.into() };
        self.build(&dims, name.into(), (init, None), place, false)
    }

    /// Creates a vector that gets no gradient, such as running statistics. It is saved and loaded like a parameter.
    ///
    /// It is whole on the axis of fully sharded parameters: a layer must not write to a gathered copy.
    pub(in crate::nn) fn buffer(
        &self,
        size: usize,
        name: &str,
        value: f64,
        placement: Placement,
    ) -> Result<DTensor> {
        self.buffer_of(size, name, value, placement.into())
    }

    /// Like [`buffer`](Self::buffer), replicated, and in f32 for 16-bit parameters, for small steps.
    pub(in crate::nn) fn wide_buffer(&self, size: usize, name: &str, value: f64) -> Result<DTensor> {
        let wide = matches!(self.dtype(), DType::F16 | DType::BF16).then_some(DType::F32);
        self.buffer_of(size, name, value, ParameterPlace { dtype: wide, ..Replicate.into() })
    }

    fn buffer_of(&self, size: usize, name: &str, value: f64, place: ParameterPlace<'_>) -> Result<DTensor> {
        let outside = Self { frozen: true, ..self.within(None, None) };
        let init = (Init::Const(value), None);
        Ok(outside.build(&[size.into()], name.into(), init, place, false)?.into_made())
    }

    /// Like [`get`](Self::get), sharded between units, and perhaps from some rows of a stored tensor.
    pub(in crate::nn) fn part(
        &self,
        dims: &[Width],
        stored: StoredName,
        init: Init,
        placement: Placement,
        varying: bool,
    ) -> Result<DTensor> {
        self.build(dims, stored, (init, None), placement.into(), varying)
    }

    /// Like [`get`](Self::get), for a table with an optional row of zeros in a fresh table.
    pub(in crate::nn) fn table(
        &self,
        [rows, width]: [usize; 2],
        name: &str,
        init: (Init, Option<usize>),
        placement: Placement,
        varying: bool,
    ) -> Result<DTensor> {
        self.build(&[rows.into(), width.into()], name.into(), init, placement.into(), varying)
    }

    fn build(
        &self,
        dims: &[Width],
        stored: StoredName,
        (init, zero_row): (Init, Option<usize>),
        ParameterPlace { placement, cuts, dtype }: ParameterPlace<'_>,
        varying: bool,
    ) -> Result<DTensor> {
        let mesh = self.mesh();
        let building = self.shared.completion.begin();
        let dtype = &dtype.unwrap_or(self.shared.dtype);
        let name = self.full_name(&stored.name);
        let axis = self.shared.plan.axis_index(mesh)?;
        if axis.is_none() && (placement != Replicate || varying) {
            let asked = if varying { "a gradient that varies".to_string() } else { placement.to_string() };
            return Err(Error::Plan(format!(
                "{name} asks for {asked} on the axis of the plan, which has none; give it one"
            )));
        }
        let mut placements: Placements =
            (0..mesh.ndim()).map(|a| if Some(a) == axis { placement } else { Replicate }).collect();
        let sharder = self.sharder.as_ref();
        for &AxisCut { axis, dim, .. } in cuts {
            if sharder.is_some_and(|sharder| sharder.axes().contains(&axis)) {
                let axis = &mesh.names()[axis];
                let reason =
                    format!("{name} is cut over axis {axis:?}, over which parameters are fully sharded");
                return Err(Error::Plan(format!("{reason}; use two axes")));
            }
            placements[axis] = Shard(dim);
        }
        let of_unit = sharder.zip(self.unit.as_ref());
        let fully = of_unit.and_then(|(sharder, _)| sharder.placement(mesh, &placements, dims.len()));
        if let Some((sharder, cut)) = sharder.zip(fully) {
            sharder.axes().iter().for_each(|&axis| placements[axis] = cut);
        }
        // A unit also has parameters that are only cast.
        let unit = self.unit.as_ref().filter(|unit| fully.is_some() || unit.dtype_of(*dtype) != *dtype);
        let shape: Dims = dims.iter().map(|width| width.size()).collect();
        let sharded = axis.filter(|&axis| mesh.shape()[axis] > 1).zip(placement.shard_dim());
        let width = sharded.and_then(|(axis, dim)| Some((axis, dims.get(dim)?)));
        let sizes =
            width.map(|(axis, width)| Ok::<_, Error>((axis, self.shard_sizes(*width)?))).transpose()?;
        let spec = Spec::new(mesh, &placements, shape.as_slice(), *dtype)?;
        let mut spec = match sizes {
            Some((axis, sizes)) => spec.with_sizes(axis, Some(sizes.as_slice().into()))?,
            None => spec,
        };
        for cut in cuts.iter().filter(|cut| cut.sizes.is_some()) {
            spec = spec.with_sizes(cut.axis, cut.sizes.clone())?;
        }
        let mut requested = self.requested.lock().unwrap_or_else(PoisonError::into_inner);
        if requested.contains(&name) {
            return Err(Error::Plan(format!(
                "parameter {name} is built twice; give each layer a path of its own with vb.pp(..), or share the layer"
            )));
        }
        if self.is_outline {
            let zeros =
                empty::full(0.0, &[], *dtype, self.device())?.broadcast_as(spec.local_shape().as_slice())?;
            self.shared.outlined.fetch_add(zeros.elem_count(), Ordering::Relaxed);
            requested.push(name.clone());
            building.end();
            return Ok(DTensor::from_local_with_spec(zeros, spec)?.named(&name));
        }
        let within = stored.within.map(|within| RowsOf { of: self.full_name(&within.of), ..within });
        let vary_on = axis.filter(|_| varying);
        let mut vary: Axes = vary_on.map_or(0, |axis| 1 << axis);
        if let Some(sharder) = sharder.filter(|_| fully.is_none()) {
            vary |= axes_of(sharder.axes());
        }
        let is_named = self.frozen_names.as_ref().is_some_and(|is_frozen| is_frozen(&name));
        let frozen = self.frozen || is_named || self.is_base(&name);
        let known = self.known(&name, &spec, vary, frozen)?;
        let is_known = known.is_some();
        let (mut tensor, var) = match known {
            // No model has trained it so far.
            Some(known) if known.is_frozen() && !frozen => (known.tensor.parameter_of(&known.var), known.var),
            Some(known) => (known.tensor, known.var),
            None => self.made(&name, within.as_ref(), spec, init, zero_row)?,
        };
        tensor = tensor.named(&name);
        if frozen {
            tensor = tensor.detach();
        } else {
            let mut axes = (0..mesh.ndim()).filter(|axis| vary & (1 << axis) != 0);
            tensor = axes.try_fold(tensor, DTensor::varying_on)?;
            tensor = tensor.registered(&self.shared.registry, &name);
        }
        let whole = unit.map(|unit| unit.add(&name, &tensor, &var, axis, frozen)).transpose()?;
        let whole = match (whole, vary_on.filter(|_| !frozen)) {
            (Some(whole), Some(axis)) => Some(whole.varying_on(axis)?),
            (whole, _) => whole,
        };
        requested.push(name.clone());
        let mut built = self.shared.built.lock().unwrap_or_else(PoisonError::into_inner);
        match built.iter_mut().find(|p| is_known && p.name == name) {
            Some(known) if known.is_frozen() => known.tensor = tensor.clone(),
            Some(_) => {}
            None => {
                let is_summed = GradMark::new()?;
                built.push(Parameter { name, tensor: tensor.clone(), var, within, is_summed });
            }
        }
        building.end();
        Ok(whole.unwrap_or(tensor))
    }
}
