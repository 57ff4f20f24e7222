//! Converts plain arguments to all their possible layouts.
use candle_core::{DType, Tensor};
use candle_dist::DeviceMesh;
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use itertools::{Itertools, MultiProduct};
use std::vec::IntoIter;

/// The dtypes that the converter shards.
const MOVED: [DType; 7] = [DType::F32, DType::F64, DType::F16, DType::BF16, DType::U8, DType::U32, DType::I64];

/// Converts the tensor arguments of an op to distributed ones, once for every combination of layouts.
///
/// On each axis of the mesh, a tensor is replicated, or cut on one of its dims, evenly or not. A tensor of another
/// dtype than f32, f64, f16, bf16, u8, u32 and i64 is always replicated, and counts as a miss.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use test_utils::{DTensorConverter, on_ranks};
///
/// on_ranks(2, "add", |ctx| -> candle_shard::Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let x = Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((3, 2))?;
///     let mut converter = DTensorConverter::new(&mesh, &[x.clone(), x.clone()]);
///     for args in &mut converter {
///         let args = args?;
///         let sum = args[0].add(&args[1])?.full_tensor()?;
///         assert_eq!(sum.to_vec2::<f32>()?, (&x * 2.0)?.to_vec2::<f32>()?);
///     }
///     assert!(converter.successful());
///     assert_eq!(converter.hits(), 9 * 2); // three layouts each, two tensors
///     Ok(())
/// });
/// ```
#[derive(Debug)]
pub struct DTensorConverter {
    mesh: DeviceMesh,
    args: Vec<Tensor>,
    /// One layout per argument, with one placement per axis.
    layouts: MultiProduct<IntoIter<Vec<Placement>>>,
    hits: usize,
    misses: usize,
}

impl DTensorConverter {
    /// Returns all combinations for `args`, which must be equal on all ranks, on `mesh`.
    pub fn new(mesh: &DeviceMesh, args: &[Tensor]) -> Self {
        let layouts = args.iter().map(|arg| layouts(arg, mesh.ndim()).into_iter()).multi_cartesian_product();
        Self { mesh: mesh.clone(), args: args.to_vec(), layouts, hits: 0, misses: 0 }
    }

    /// Returns how often a tensor was converted so far.
    pub fn hits(&self) -> usize {
        self.hits
    }

    /// Returns how often a tensor could only be replicated so far.
    pub fn misses(&self) -> usize {
        self.misses
    }

    /// Returns whether something was converted and nothing was missed.
    pub fn successful(&self) -> bool {
        self.hits > 0 && self.misses == 0
    }
}

impl Iterator for DTensorConverter {
    type Item = Result<Vec<DTensor>>;

    fn next(&mut self) -> Option<Self::Item> {
        let layouts = self.layouts.next()?;
        let misses = self.args.iter().filter(|arg| !MOVED.contains(&arg.dtype())).count();
        self.misses += misses;
        self.hits += self.args.len() - misses;
        let pairs = self.args.iter().zip(layouts);
        Some(pairs.map(|(arg, layout)| DTensor::distribute(arg, &self.mesh, &layout)).collect())
    }
}

/// Returns every layout of a tensor on a mesh with this many axes.
fn layouts(tensor: &Tensor, axes: usize) -> Vec<Vec<Placement>> {
    let dims = if MOVED.contains(&tensor.dtype()) { tensor.rank() } else { 0 };
    let choices = [Replicate].into_iter().chain((0..dims).map(Shard));
    (0..axes).map(|_| choices.clone()).multi_cartesian_product().collect()
}
