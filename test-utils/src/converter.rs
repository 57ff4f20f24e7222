//! Converts plain arguments to all their possible layouts.
use crate::Arguments;
use candle_core::{DType, Tensor};
use candle_dist::DeviceMesh;
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use itertools::{Itertools, MultiProduct};
use std::vec::IntoIter;

/// The dtypes that the converter shards.
const MOVED: [DType; 7] =
    [DType::F32, DType::F64, DType::F16, DType::BF16, DType::U8, DType::U32, DType::I64];

/// Converts the tensor arguments of an op to distributed ones, once for every combination of layouts.
///
/// [`Arguments`] are given by position or by name, in trees, and with plain values, which stay as they are. On each axis of
/// the mesh, a tensor is replicated, or cut on one of its dims, evenly or not. A variable becomes a distributed variable
/// with the same values, whose gradient [`DTensor::backward`] returns for [`DTensor::to_local`]. A tensor of another dtype
/// than f32, f64, f16, bf16, u8, u32 and i64 is always replicated, and counts as a miss. So does a tensor that cannot be
/// distributed, such as the result of an op on variables; its combinations are errors.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use test_utils::{Arguments, DTensorConverter, on_ranks};
///
/// on_ranks(2, "add", |ctx| -> candle_shard::Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let x = Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((3, 2))?;
///     let args = Arguments::new(&[x.clone()]).tensor("bias", &x).value("scale", 2.0);
///     let mut converter = DTensorConverter::new(&mesh, args);
///     for args in &mut converter {
///         let args = args?;
///         let sum = args[0].add(&args["bias"])?.affine(args.number("scale"), 0.0)?.full_tensor()?;
///         assert_eq!(sum.to_vec2::<f32>()?, (&x * 4.0)?.to_vec2::<f32>()?);
///     }
///     assert!(converter.successful());
///     assert_eq!(converter.hits(), 9 * 2); // three layouts each, two tensors
///     Ok(())
/// });
/// ```
#[derive(Debug)]
pub struct DTensorConverter {
    mesh: DeviceMesh,
    args: Arguments<Tensor>,
    /// One layout per argument, with one placement per axis.
    layouts: MultiProduct<IntoIter<Vec<Placement>>>,
    hits: usize,
    misses: usize,
}

impl DTensorConverter {
    /// Returns all combinations for `args`, which must be equal on all ranks, on `mesh`.
    pub fn new(mesh: &DeviceMesh, args: impl Into<Arguments<Tensor>>) -> Self {
        let args = args.into();
        let layouts = args.tensors().into_iter().map(|arg| layouts(&arg, mesh.ndim()).into_iter());
        Self { mesh: mesh.clone(), layouts: layouts.multi_cartesian_product(), args, hits: 0, misses: 0 }
    }

    /// Returns how often a tensor was converted so far.
    pub fn hits(&self) -> usize {
        self.hits
    }

    /// Returns how often a tensor could only be replicated, or not be converted at all, so far.
    pub fn misses(&self) -> usize {
        self.misses
    }

    /// Returns whether something was converted and nothing was missed.
    pub fn successful(&self) -> bool {
        self.hits > 0 && self.misses == 0
    }

    /// Distributes a tensor, and counts it.
    fn convert(&mut self, arg: &Tensor, layout: &[Placement]) -> Result<DTensor> {
        let made = match arg.is_variable() {
            true => {
                DTensor::distribute(&arg.detach(), &self.mesh, layout).and_then(|made| Ok(made.to_var()?.0))
            }
            false => DTensor::distribute(arg, &self.mesh, layout),
        };
        match made.is_ok() && MOVED.contains(&arg.dtype()) {
            true => self.hits += 1,
            false => self.misses += 1,
        }
        made
    }
}

impl Iterator for DTensorConverter {
    type Item = Result<Arguments<DTensor>>;

    fn next(&mut self) -> Option<Self::Item> {
        let layouts = self.layouts.next()?;
        let pairs = self.args.tensors().into_iter().zip(layouts);
        let made: Vec<Result<DTensor>> = pairs.map(|(arg, layout)| self.convert(&arg, &layout)).collect();
        Some(made.into_iter().collect::<Result<Vec<_>>>().map(|made| self.args.with_tensors(made)))
    }
}

/// Returns every layout of a tensor on a mesh with this many axes.
fn layouts(tensor: &Tensor, axes: usize) -> Vec<Vec<Placement>> {
    let dims = if MOVED.contains(&tensor.dtype()) { tensor.rank() } else { 0 };
    let choices = [Replicate].into_iter().chain((0..dims).map(Shard));
    (0..axes).map(|_| choices.clone()).multi_cartesian_product().collect()
}
