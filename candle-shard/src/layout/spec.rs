//! The full description of a distributed tensor: mesh, placements, global shape, dtype.
use super::axes::Axes;
use super::placement::{Placement, Placements, Replicate, Shard};
use crate::{Error, Result};
use candle_core::{DType, Shape};
use candle_dist::backend::Dims;
use candle_dist::{Cut, DeviceMesh};
use itertools::Itertools;
use rustc_hash::FxHashSet;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

/// Explicit piece sizes of a dim, one per rank of the axis.
pub type Sizes = Arc<[usize]>;

/// The layout of a tensor with a global shape and dtype on a mesh; equal on every rank.
///
/// A dim of size `n` on an axis of `k` ranks is cut as `torch.chunk` does: pieces of `ceil(n / k)`, the last ones
/// smaller or empty. Several axes may cut one dim, outer axis first. The outermost axis of a dim may have explicit
/// sizes instead.
///
/// An empty piece begins where the previous piece ends, within the part that the outer axes leave, so the blocks of all
/// ranks are contiguous. PyTorch uses the size of the whole dim there; no elements lie at either place.
#[derive(Clone, PartialEq)]
pub struct Spec {
    mesh: DeviceMesh,
    placements: Placements,
    /// The axes on which it is not `Replicate`.
    cut: Axes,
    sizes: SmallVec<[Option<Sizes>; 3]>,
    shape: Dims,
    dtype: DType,
}

/// Returns the sizes of the pieces of a dim of size `n` on `k` ranks: `ceil(n / k)` until the dim is used up.
///
/// ```
/// assert_eq!(candle_shard::chunk_sizes(5, 4).as_slice(), [2, 2, 1, 0]);
/// ```
pub fn chunk_sizes(n: usize, k: usize) -> Dims {
    let chunk = n.div_ceil(k.max(1));
    (0..k).map(|r| chunk.min(n.saturating_sub(chunk * r))).collect()
}

impl Spec {
    /// Creates a layout with pieces of the default sizes.
    ///
    /// # Errors
    /// If the number of placements is not the number of axes, a sharded dim does not exist, or the whole tensor has more
    /// bytes than can be counted.
    pub fn new(
        mesh: &DeviceMesh,
        placements: &[Placement],
        shape: impl Into<Shape>,
        dtype: DType,
    ) -> Result<Self> {
        let shape = shape.into();
        if mesh.ndim() > Axes::BITS as usize {
            return Err(Error::Layout(format!(
                "{mesh} has {} axes; at most {} are possible",
                mesh.ndim(),
                Axes::BITS
            )));
        }
        if placements.len() != mesh.ndim() {
            let (p, axes) = (placements.iter().join(", "), mesh.ndim());
            return Err(Error::Layout(format!(
                "placements [{p}] for {mesh}, which has {axes} axes; give one for each"
            )));
        }
        if let Some(dim) = placements.iter().filter_map(|p| p.shard_dim()).find(|&d| d >= shape.rank()) {
            let dims = shape.dims();
            return Err(Error::Layout(format!(
                "S({dim}) for a tensor of shape {dims:?}, which has no dim {dim}; shard a dim below {}",
                dims.len()
            )));
        }
        let count = |bytes: usize, &size: &usize| {
            bytes.checked_mul(size).filter(|&bytes| bytes <= isize::MAX as usize)
        };
        let dims = shape.dims();
        if !dims.contains(&0) && dims.iter().try_fold(dtype.size_in_bytes().max(1), count).is_none() {
            let dtype = dtype.as_str();
            return Err(Error::Layout(format!(
                "{dtype}{dims:?} is more than memory holds; choose smaller sizes"
            )));
        }
        Ok(Self {
            mesh: mesh.clone(),
            placements: Placements::from_slice(placements),
            cut: cut_axes(placements),
            sizes: placements.iter().map(|_| None).collect(),
            shape: Dims::from_slice(shape.dims()),
            dtype,
        })
    }

    /// Returns the same layout with explicit piece sizes on one axis; `None` restores the default ones.
    ///
    /// # Errors
    /// If the axis does not shard a dim, if it is not the outermost one that shards the dim, or if the sizes do not cut
    /// the dim.
    pub fn with_sizes(mut self, axis: usize, sizes: Option<Sizes>) -> Result<Self> {
        if axis >= self.placements.len() {
            let axes = self.mesh.ndim();
            return Err(Error::Layout(format!(
                "sizes for axis {axis} of {self}, which has no axis {axis}; name one below {axes}"
            )));
        }
        let Some(sizes) = sizes else {
            self.sizes[axis] = None;
            return Ok(self);
        };
        let Some(dim) = self.placements[axis].shard_dim() else {
            let at = self.placements[axis];
            return Err(Error::Layout(format!(
                "sizes {sizes:?} for axis {axis} of {self}, which is {at}, not a shard; give sizes to shards only"
            )));
        };
        if self.placements[..axis].contains(&Shard(dim)) {
            return Err(Error::Layout(format!(
                "sizes {sizes:?} for axis {axis} of {self}: only the outermost axis that shards dim {dim} takes sizes"
            )));
        }
        let (len, n) = (self.shape[dim], self.mesh.shape()[axis]);
        let sum = sizes.iter().try_fold(0, |sum: usize, &size| sum.checked_add(size));
        if sizes.len() != n || sum != Some(len) {
            return Err(Error::Layout(format!(
                "sizes {sizes:?} do not cut dim {dim} of size {len} into {n} pieces; give {n} that add up to {len}"
            )));
        }
        self.sizes[axis] = (sizes[..] != chunk_sizes(len, n)[..]).then_some(sizes);
        Ok(self)
    }

    /// Returns this spec in memory that all equal specs of this thread share, so that specs are compared by address.
    pub(crate) fn shared(self) -> Arc<Self> {
        /// The most specs kept; beyond that the cache is cleared, and equal specs may have different addresses.
        const MOST: usize = 4096;
        thread_local! {
            static KNOWN: RefCell<FxHashSet<SpecKey>> = RefCell::default();
        }
        KNOWN.with_borrow_mut(|known| {
            let spec = SpecKey(Arc::new(self));
            if let Some(known) = known.get(&spec) {
                return known.0.clone();
            }
            if known.len() >= MOST {
                known.clear();
            }
            let shared = spec.0.clone();
            known.insert(spec);
            shared
        })
    }

    /// Returns a layout on the same mesh and with the same dtype, with other placements and another shape.
    pub(crate) fn derive(&self, placements: &[Placement], shape: &[usize]) -> Result<Self> {
        Self::new(&self.mesh, placements, shape, self.dtype)
    }

    /// Returns the same layout with another dtype, such as that of an optimizer's state.
    pub fn with_dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// Sets the placement of one axis without a check of the dim.
    pub(crate) fn place(&mut self, axis: usize, placement: Placement, sizes: Option<Sizes>) {
        self.placements[axis] = placement;
        self.cut = cut_axes(&self.placements);
        self.sizes[axis] = sizes;
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Returns the placement on each axis, outermost first.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// Returns the axes on which this is not `Replicate`.
    pub(crate) fn cut_axes(&self) -> Axes {
        self.cut
    }

    /// Returns the explicit sizes on an axis, if they are not the default ones.
    pub fn sizes(&self, axis: usize) -> Option<&Sizes> {
        self.sizes[axis].as_ref()
    }

    /// Returns the global shape.
    pub fn dims(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the most bytes that one rank holds, with default sizes.
    pub(crate) fn local_bytes(&self) -> usize {
        let pieces = (0..self.mesh.ndim()).filter(|&a| self.placements[a].shard_dim().is_some());
        let parts: usize = pieces.map(|a| self.mesh.shape()[a]).product();
        self.shape.iter().product::<usize>().div_ceil(parts) * self.dtype.size_in_bytes()
    }

    /// Returns the shape of this rank's shard.
    pub fn local_shape(&self) -> Dims {
        self.block_at(self.mesh.coordinate()).iter().map(Range::len).collect()
    }

    /// Returns this rank's shard as one range of global indices per dim.
    pub fn local_block(&self) -> SmallVec<[Range<usize>; 6]> {
        self.block_at(self.mesh.coordinate())
    }

    /// Returns the shard of the rank at `coordinate` as one range of global indices per dim.
    pub fn block_at(&self, coordinate: &[usize]) -> SmallVec<[Range<usize>; 6]> {
        let mut block: SmallVec<[Range<usize>; 6]> = self.shape.iter().map(|&n| 0..n).collect();
        for (axis, &at) in coordinate.iter().enumerate() {
            if let Shard(dim) = self.placements[axis] {
                let range = &mut block[dim];
                let (start, len) = self.piece(axis, range.len(), at);
                *range = range.start + start..range.start + start + len;
            }
        }
        block
    }

    /// Returns start and length of piece `at` of an axis that cuts `len` elements.
    fn piece(&self, axis: usize, len: usize, at: usize) -> (usize, usize) {
        match &self.sizes[axis] {
            Some(sizes) => (sizes[..at].iter().sum(), sizes[at]),
            None => {
                let chunk = len.div_ceil(self.mesh.shape()[axis]);
                let start = (chunk * at).min(len);
                (start, chunk.min(len - start))
            }
        }
    }

    /// Returns how an axis that shards `dim` cuts the part that the outer axes leave to this rank.
    pub(crate) fn cut(&self, axis: usize, dim: usize) -> Cut {
        if let Some(sizes) = &self.sizes[axis] {
            return Cut::new(dim, sizes);
        }
        let mut len = self.shape[dim];
        for outer in (0..axis).filter(|&a| self.placements[a] == Shard(dim)) {
            len = self.piece(outer, len, self.mesh.coordinate()[outer]).1;
        }
        Cut::new(dim, &chunk_sizes(len, self.mesh.shape()[axis]))
    }

    /// Returns how several axes, the innermost ones that shard `dim`, together cut the part that the others leave to
    /// this rank.
    pub(crate) fn joint_cut(&self, axes: &[usize], dim: usize) -> Cut {
        let mut at = self.mesh.coordinate().to_vec();
        let places = axes.iter().map(|&axis| 0..self.mesh.shape()[axis]).multi_cartesian_product();
        let size = |place: Vec<usize>| {
            axes.iter().zip(place).for_each(|(&axis, i)| at[axis] = i);
            self.block_at(&at)[dim].len()
        };
        Cut::new(dim, &places.map(size).collect::<Dims>())
    }
}

/// Returns the axes on which these placements are not `Replicate`.
fn cut_axes(placements: &[Placement]) -> Axes {
    let cut = placements.iter().enumerate().filter(|(_, placement)| **placement != Replicate);
    cut.map(|(axis, _)| 1 << axis).sum()
}

/// A spec that is looked up by its contents. Meshes are equal only if they are identical: the groups of another world
/// may no longer exist.
struct SpecKey(Arc<Spec>);

impl PartialEq for SpecKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.mesh.is_same(&other.0.mesh) && self.0 == other.0
    }
}

impl Eq for SpecKey {}

impl Hash for SpecKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.0.placements, &self.0.sizes, &self.0.shape, self.0.dtype).hash(state);
    }
}

impl fmt::Display for Spec {
    /// Prints each dim with the axes that cut it, outermost first, for example `f32[8@dp, 16@tp]`; other axes
    /// replicate. Explicit sizes follow their axis, `8@dp(3+5)`, and partial axes follow the shape,
    /// `f32[8, 16] P(sum)@tp`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = || self.mesh.names().iter().zip(&self.placements).zip(&self.sizes);
        write!(f, "{}[", self.dtype.as_str())?;
        for (dim, n) in self.shape.iter().enumerate() {
            write!(f, "{}{n}", if dim > 0 { ", " } else { "" })?;
            for ((name, _), sizes) in axes().filter(|((_, placement), _)| **placement == Shard(dim)) {
                write!(f, "@{name}")?;
                if let Some(sizes) = sizes {
                    write!(f, "({})", sizes.iter().join("+"))?;
                }
            }
        }
        f.write_str("]")?;
        let mut partial = axes().filter(|((_, placement), _)| placement.is_partial());
        partial.try_for_each(|((name, placement), _)| write!(f, " {placement}@{name}"))
    }
}

impl fmt::Debug for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
