//! Conversions between local tensors and distributed ones that need more than the layout.
use crate::layout::{Partial, Placement, Replicate, Shard, Sizes, Spec};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Device, Tensor};
use candle_dist::functional::Step;
use candle_dist::{DeviceMesh, ReduceOp};
use std::collections::BTreeMap;

/// The most dims of a tensor whose shape is exchanged.
const MOST_DIMS: usize = 14;

impl DTensor {
    /// Uses this rank's tensor as a piece of a tensor whose pieces may have any sizes, which the ranks exchange.
    ///
    /// Runs one small all_gather over the mesh. Sizes other than the default ones become explicit; only the outermost
    /// axis that shards a dim can have explicit sizes.
    ///
    /// # Errors
    /// On all ranks, with the same text, if the pieces do not fit together.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{DTensor, Result, Shard};
    ///
    /// let dims = World::threads(2).run(|ctx| -> Result<Vec<usize>> {
    ///     let rows = Tensor::zeros((1 + 3 * ctx.rank(), 2), DType::F32, &Device::Cpu)?; // 1 row and 4 rows
    ///     Ok(DTensor::from_local_ragged(rows, &ctx.mesh(&[("dp", 2)])?, &[Shard(0)])?.dims().to_vec())
    /// })?;
    /// assert_eq!(dims, [[5, 2], [5, 2]]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn from_local_ragged(local: Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<Self> {
        let pieces = exchange_shapes(&local, mesh)?;
        let spec = ragged_spec(&pieces, mesh, placements, local.dtype())?;
        Self::from_local_with_spec(local, spec)
    }

    /// Returns this rank's shard for a use whose gradient has the layout `gradient`, one placement per axis.
    ///
    /// Where the tensor is sharded, the gradient is that of the shard. Where it is replicated or partial, the incoming
    /// gradient may be `Replicate`, equal on all ranks, or `Partial(sum)`, each rank's share, which results from a use
    /// that differs between the ranks. It is converted to the gradient that [`to_local`](Self::to_local) expects.
    pub fn to_local_with_grad(&self, gradient: &[Placement]) -> Result<Tensor> {
        if gradient.len() != self.placements().len() {
            return Error::op(
                "to_local_with_grad",
                format!("{gradient:?} for {}: expected one for each axis", self.spec()),
            );
        }
        let exchange = |(axis, (&at, &gradient)): (usize, (&Placement, &Placement))| {
            let share = gradient == Placement::PARTIAL_SUM;
            Ok(match at {
                Shard(_) if gradient == at => None,
                Replicate if share && self.is_varying(axis) => None,
                Replicate if gradient == Replicate && self.is_varying(axis) => Some(Step::ToInvariant),
                Replicate | Partial(ReduceOp::Sum) if gradient == Replicate => None,
                Replicate | Partial(ReduceOp::Sum) if share => Some(Step::ToVarying),
                _ => {
                    let reason = format!("no gradient {gradient} on axis {axis} for {}", self.spec());
                    return Error::op(
                        "to_local_with_grad",
                        format!("{reason}; a shard's is a shard, else R or P(sum)"),
                    );
                }
            })
        };
        let pairs = self.placements().iter().zip(gradient);
        let exchanges = pairs.enumerate().map(exchange).collect::<Result<Vec<_>>>()?;
        let steps = exchanges.into_iter().enumerate().filter_map(|(axis, exchange)| Some((axis, exchange?)));
        steps.into_iter().try_fold(self.to_local().clone(), |local, (axis, exchange)| {
            Ok(exchange.apply(&local, &self.described(self.mesh().axis_group(axis)?.clone(), 1 << axis))?)
        })
    }

    /// Distributes named tensors that are equal on every rank over the mesh, each with the placements that `placements`
    /// returns for it.
    ///
    /// Works for a map of tensors or for the variables of a candle `VarMap`, whose values are used. No element is sent; the
    /// ranks compare hashes as in [`distribute`](Self::distribute).
    ///
    /// # Errors
    /// Those of [`distribute`](Self::distribute), for the first name in alphabetical order.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{DTensor, Replicate, Result, Shard};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let whole = Tensor::zeros((4, 2), DType::F32, &Device::Cpu)?;
    ///     let model = [("up.weight", &whole), ("norm.weight", &whole)];
    ///     let place = |name: &str, _: &Tensor| vec![if name.starts_with("up") { Shard(0) } else { Replicate }];
    ///     let model = DTensor::distribute_all(model, &ctx.mesh(&[("tp", 2)])?, place)?;
    ///     assert_eq!(model["up.weight"].to_local().dims(), [2, 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn distribute_all<'a>(
        tensors: impl IntoIterator<Item = (impl Into<String>, &'a Tensor)>,
        mesh: &DeviceMesh,
        mut placements: impl FnMut(&str, &Tensor) -> Vec<Placement>,
    ) -> Result<BTreeMap<String, Self>> {
        let by_name: BTreeMap<String, &Tensor> =
            tensors.into_iter().map(|(name, t)| (name.into(), t)).collect();
        let mut made = BTreeMap::new();
        for (name, tensor) in by_name {
            match Self::distribute_named(&name, &tensor.detach(), mesh, &placements(&name, tensor)) {
                Err(Error::Layout(reason)) => return Err(Error::Layout(format!("{name}: {reason}"))),
                spread => made.insert(name, spread?),
            };
        }
        Ok(made)
    }
}

/// A rank's description of its piece.
#[derive(Debug, Clone, PartialEq)]
struct PieceReport {
    dtype: i64,
    dims: Vec<usize>,
}

impl PieceReport {
    fn text(&self) -> String {
        let known = [DType::U8, DType::U32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64];
        let name = known
            .into_iter()
            .find(|&dtype| dtype as i64 == self.dtype)
            .map_or("other", |dtype| dtype.as_str());
        format!("{name}{:?}", self.dims)
    }
}

/// Returns the pieces of all ranks of the mesh, in row-major order.
fn exchange_shapes(local: &Tensor, mesh: &DeviceMesh) -> Result<Vec<PieceReport>> {
    if local.rank() > MOST_DIMS {
        let reason = format!("a tensor with {} dims; at most {MOST_DIMS} are possible", local.rank());
        return Error::op("from_local_ragged", reason);
    }
    let mut mine = vec![0i64; MOST_DIMS + 2];
    mine[0] = local.dtype() as i64;
    mine[1] = local.rank() as i64;
    local.dims().iter().enumerate().for_each(|(d, &size)| mine[d + 2] = size as i64);
    let all = mesh.group()?.all_gather(&Tensor::from_vec(mine, (1, MOST_DIMS + 2), &Device::Cpu)?, 0)?;
    let piece = |row: Vec<i64>| {
        let (dtype, rank) = (row[0], row[1] as usize);
        PieceReport { dtype, dims: row[2..2 + rank].iter().map(|&size| size as usize).collect() }
    };
    Ok(all.to_vec2::<i64>()?.into_iter().map(piece).collect())
}

/// Returns the layout in which every rank holds its piece.
fn ragged_spec(
    pieces: &[PieceReport],
    mesh: &DeviceMesh,
    placements: &[Placement],
    dtype: DType,
) -> Result<Spec> {
    let (first, places): (_, Vec<_>) = (&pieces[0], mesh.coordinates().collect());
    let at = |rank: usize| &places[rank];
    let refuse = |reason: String| Error::op("from_local_ragged", reason);
    if let Some(rank) = pieces.iter().position(|p| p.dtype != first.dtype || p.dims.len() != first.dims.len())
    {
        let (a, b) = (first.text(), pieces[rank].text());
        let reason =
            format!("{a} at {:?} and {b} at {:?}: expected one dtype and number of dims", at(0), at(rank));
        return refuse(reason);
    }
    let axes_of = |dim: usize| (0..placements.len()).filter(move |&axis| placements[axis] == Shard(dim));
    let mut shape = first.dims.clone();
    let mut sizes: Vec<Option<Sizes>> = vec![None; placements.len()];
    for (dim, size) in shape.iter_mut().enumerate() {
        let Some(outermost) = axes_of(dim).next().filter(|&axis| axis < mesh.ndim()) else { continue };
        // All pieces of the dim lie along the axes that shard it, at coordinate 0 of the other axes.
        let mut along = vec![0; mesh.shape()[outermost]];
        for (rank, piece) in pieces.iter().enumerate() {
            let place = at(rank);
            if (0..place.len()).all(|axis| place[axis] == 0 || placements.get(axis) == Some(&Shard(dim))) {
                along[place[outermost]] += piece.dims[dim];
            }
        }
        *size = along.iter().sum();
        sizes[outermost] = Some(along.into());
    }
    let mut spec = Spec::new(mesh, placements, shape, dtype)?;
    for (axis, sizes) in sizes.into_iter().enumerate() {
        spec = spec.with_sizes(axis, sizes)?;
    }
    for (rank, piece) in pieces.iter().enumerate() {
        let (place, block) = (at(rank), spec.block_at(at(rank)));
        if let Some(dim) = (0..block.len()).find(|&dim| block[dim].len() != piece.dims[dim]) {
            let axes: Vec<&str> = axes_of(dim).map(|axis| mesh.names()[axis].as_str()).collect();
            let (size, want) = (piece.dims[dim], block[dim].len());
            let by =
                if axes.is_empty() { "no axis".to_string() } else { format!("axis {}", axes.join(", ")) };
            return refuse(format!(
                "dim {dim} has size {size} at {place:?}, but {spec} needs {want}; {by} shards it, and only the \
                 outermost of these supports any sizes"
            ));
        }
    }
    Ok(spec)
}
