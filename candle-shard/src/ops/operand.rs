//! What stands beside a distributed tensor in an op.
use crate::agreement::alike;
use crate::placement::Replicate;
use crate::spec::Spec;
use crate::{DTensor, Result};
use candle_core::{DType, Tensor};
use candle_dist::DeviceMesh;

/// What an op takes beside a [`DTensor`]: another one, a plain tensor that every rank has alike, a number, or the
/// result of an op that gives one of these.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{DTensor, Result, Shard};
///
/// let sums = World::local(2).run(|ctx| -> Result<f32> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let plain = Tensor::ones((3, 2), DType::F32, &Device::Cpu)?;
///     let x = DTensor::distribute(&plain, &mesh, &[Shard(0)])?;
///     let y = (&x + (&x * 2.0))? - &plain; // 1 + 2 - 1, six times
///     y?.maximum(0.5)?.sum_all()?.to_scalar()
/// })?;
/// assert_eq!(sums, [12.0, 12.0]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub trait Operand {
    /// The operand in one of its forms.
    ///
    /// # Errors
    /// That of the op which should have given the operand.
    fn side(&self) -> Result<Side<'_>>;
}

/// The forms of an [`Operand`].
#[derive(Debug, Clone, Copy)]
pub enum Side<'a> {
    /// A distributed tensor on the same mesh.
    Spread(&'a DTensor),
    /// A tensor that every rank has alike.
    Plain(&'a Tensor),
    /// A number, which takes the dtype of the tensors beside it.
    Number(f64),
}

impl Side<'_> {
    /// The dtype, if this is no number.
    pub(super) fn dtype(&self) -> Option<DType> {
        match self {
            Self::Spread(x) => Some(x.dtype()),
            Self::Plain(x) => Some(x.dtype()),
            Self::Number(_) => None,
        }
    }
}

impl Operand for DTensor {
    fn side(&self) -> Result<Side<'_>> {
        Ok(Side::Spread(self))
    }
}

impl Operand for Tensor {
    fn side(&self) -> Result<Side<'_>> {
        Ok(Side::Plain(self))
    }
}

impl<T: Operand + ?Sized> Operand for &T {
    fn side(&self) -> Result<Side<'_>> {
        (**self).side()
    }
}

impl<T: Operand> Operand for Result<T> {
    fn side(&self) -> Result<Side<'_>> {
        match self {
            Ok(operand) => operand.side(),
            Err(error) => Err(error.clone()),
        }
    }
}

macro_rules! numbers {
    ($($t:ty)*) => {
        $(impl Operand for $t {
            fn side(&self) -> Result<Side<'_>> {
                Ok(Side::Number(f64::from(*self)))
            }
        })*
    };
}
numbers!(f64 f32 u8 u32 i32);

impl DTensor {
    /// A tensor that every rank has alike, as the replicated tensor that it is; the graph goes on through it.
    ///
    /// Every rank's gradient is the whole one. Nothing is communicated, and nothing checks that the ranks agree, unless
    /// under [`compare_operands`](crate::compare_operands).
    #[track_caller]
    pub fn replicated(tensor: &Tensor, mesh: &DeviceMesh) -> Result<Self> {
        let spec = Spec::new(mesh, &vec![Replicate; mesh.ndim()], tensor.shape(), tensor.dtype())?;
        alike("replicated", tensor, mesh)?;
        Ok(Self::leaf(tensor.clone(), spec.shared()))
    }

    /// An operand on the mesh of this tensor; a number becomes a scalar of this dtype.
    #[track_caller]
    pub(super) fn beside(&self, side: Side<'_>, dtype: DType) -> Result<Self> {
        match side {
            Side::Spread(x) => Ok(x.clone()),
            Side::Plain(x) => Self::replicated(x, self.mesh()),
            Side::Number(x) => Self::replicated(&Tensor::new(x, self.device())?.to_dtype(dtype)?, self.mesh()),
        }
    }
}
