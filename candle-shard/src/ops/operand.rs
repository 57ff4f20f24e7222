//! The other operand of an op on a distributed tensor.
use crate::agreement::{Frequency, alike};
use crate::layout::{Replicate, Spec};
use crate::{DTensor, Result};
use candle_core::{DType, Tensor};
use candle_dist::DeviceMesh;

/// The other operand of an op: a [`DTensor`], a plain tensor that is equal on every rank, a number, or the result of an
/// op that returns one of these.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{DTensor, Result, Shard};
///
/// let sums = World::threads(2).run(|ctx| -> Result<f32> {
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
    /// Returns the operand in one of its forms.
    ///
    /// # Errors
    /// The error of the op that failed to produce the operand.
    fn side(&self) -> Result<Side<'_>>;
}

/// The forms of an [`Operand`].
#[derive(Debug, Clone, Copy)]
pub enum Side<'a> {
    /// A distributed tensor on the same mesh.
    Spread(&'a DTensor),
    /// A plain tensor that is equal on every rank.
    Plain(&'a Tensor),
    /// A number. It has the dtype of the other operand.
    Number(f64),
}

impl Side<'_> {
    /// Returns the dtype, unless this is a number.
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
    /// Makes a replicated tensor of a plain tensor that is equal on every rank. Gradients flow through it.
    ///
    /// Every rank's gradient is the whole one. No element is sent. All ranks of the mesh call it: they compare hashes of tensors
    /// without gradient on the first use of each line of source, and others under [`compare_operands`](crate::compare_operands).
    ///
    /// # Errors
    /// If the ranks' tensors differ where they are compared.
    #[track_caller]
    pub fn replicated(tensor: &Tensor, mesh: &DeviceMesh) -> Result<Self> {
        Self::everywhere(tensor, mesh, Frequency::PerLine)
    }

    /// Makes a replicated tensor, which is compared with this frequency.
    #[track_caller]
    pub(super) fn everywhere(tensor: &Tensor, mesh: &DeviceMesh, frequency: Frequency) -> Result<Self> {
        let spec = Spec::new(mesh, &vec![Replicate; mesh.ndim()], tensor.shape(), tensor.dtype())?;
        alike("replicated", "", frequency, tensor, mesh)?;
        Ok(Self::leaf(tensor.clone(), spec.shared()))
    }

    /// Returns the operand as a tensor on this tensor's mesh; a number becomes a scalar of dtype `dtype`.
    #[track_caller]
    pub(super) fn beside(&self, side: Side<'_>, dtype: DType) -> Result<Self> {
        match side {
            Side::Spread(x) => Ok(x.clone()),
            Side::Plain(x) => Self::replicated(x, self.mesh()),
            Side::Number(x) => {
                let number = Tensor::new(x, self.device())?.to_dtype(dtype)?;
                Self::everywhere(&number, self.mesh(), Frequency::OnDemand)
            }
        }
    }
}
