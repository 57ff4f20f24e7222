//! Tensors built in place: each rank builds its own shard, and nothing is communicated.
use super::given::placed;
use crate::layout::{Placement, Placements, Replicate, Spec};
use crate::random::{Distribution, Stream, sample};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Device, FloatDType, Shape, Tensor, WithDType};
use candle_dist::{DeviceMesh, empty};

impl DTensor {
    /// Creates a tensor of zeros.
    ///
    /// Like the other factories, it takes candle's arguments, followed by the layout.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist::World;
    /// use candle_shard::random::Stream;
    /// use candle_shard::{DTensor, Result, Shard};
    ///
    /// let held = World::threads(2).run(|ctx| -> Result<usize> {
    ///     let (mesh, cpu) = (ctx.mesh(&[("tp", 2)])?, Device::Cpu);
    ///     let ids = DTensor::arange(0u32, 5, &cpu, &mesh, &[Shard(0)])?; // 0, 1, 2 and 3, 4
    ///     let noise = DTensor::randn(0f32, 1., (5, 2), &cpu, &mesh, &[Shard(0)], Stream::new(42, "noise"))?;
    ///     assert_eq!(noise.add(&DTensor::zeros((5, 2), DType::F32, &cpu, &mesh, &[Shard(0)])?)?.dims(), [5, 2]);
    ///     Ok(ids.to_local().elem_count())
    /// })?;
    /// assert_eq!(held, [3, 2]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn zeros(
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        made(placed(mesh, placements, shape, dtype)?, |spec| {
            Tensor::zeros(spec.local_shape().as_slice(), dtype, device)
        })
    }

    /// Creates a tensor of ones.
    pub fn ones(
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        made(placed(mesh, placements, shape, dtype)?, |spec| {
            empty::ones(spec.local_shape().as_slice(), dtype, device)
        })
    }

    /// Creates a tensor with the same value everywhere.
    pub fn full<T: WithDType>(
        value: T,
        shape: impl Into<Shape>,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        let spec = placed(mesh, placements, shape, T::DTYPE)?;
        made(spec, |spec| empty::full(value, spec.local_shape().as_slice(), T::DTYPE, device))
    }

    /// Creates the one-dimensional tensor `start`, `start + 1`, and so on below `end`.
    pub fn arange<T: WithDType>(
        start: T,
        end: T,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        let len = end.to_f64() - start.to_f64();
        if !len.is_finite() {
            return Error::op("arange", format!("{start}..{end}: expected finite numbers"));
        }
        let spec = placed(mesh, placements, len.ceil().max(0.0) as usize, T::DTYPE)?;
        made(spec, |spec| {
            let held = spec.local_block()[0].clone();
            let len = held.len();
            Tensor::from_vec(held.map(|i| start + T::from_f64(i as f64)).collect::<Vec<T>>(), len, device)
        })
    }

    /// Creates the one-dimensional tensor `start`, `start + step`, and so on before `end`. A negative step counts down.
    ///
    /// As in candle, each number is the rounded sum of the previous one and `step`.
    ///
    /// # Errors
    /// If a number is not finite, or the step is zero or too small to lead to the end.
    pub fn arange_step<T: WithDType>(
        start: T,
        end: T,
        step: T,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        let (by, last) = (step.to_f64(), end.to_f64());
        let refuse = |why: &str| Error::op("arange_step", format!("{start}..{end} by {step}: {why}"));
        if by == 0.0 || ![by, last, start.to_f64()].iter().all(|number| number.is_finite()) {
            return refuse("expected finite numbers, and a step that is not zero");
        }
        let is_before = |at: f64| if by > 0.0 { at < last } else { at > last };
        let (mut numbers, mut at) = (Vec::new(), start);
        while is_before(at.to_f64()) {
            numbers.push(at);
            if !is_before(at.to_f64() + by) {
                break; // the next number may be outside of the dtype
            }
            if at + step == at {
                return refuse("the step is too small to change the numbers on the way; choose a larger one");
            }
            at += step;
        }
        let spec = placed(mesh, placements, numbers.len(), T::DTYPE)?;
        made(spec, |spec| {
            let held = numbers[spec.local_block()[0].clone()].to_vec();
            let len = held.len();
            Tensor::from_vec(held, len, device)
        })
    }

    /// Creates the identity matrix `[n, n]`.
    pub fn eye(
        n: usize,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        square(placed(mesh, placements, (n, n), dtype)?, device, |i, j| i == j)
    }

    /// Creates the matrix `[n, n]` with ones on and below the diagonal, and zeros above.
    pub fn tril2(
        n: usize,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        square(placed(mesh, placements, (n, n), dtype)?, device, |i, j| i >= j)
    }

    /// Creates the matrix `[n, n]` with ones on and above the diagonal, and zeros below.
    pub fn triu2(
        n: usize,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        square(placed(mesh, placements, (n, n), dtype)?, device, |i, j| i <= j)
    }

    /// Creates random numbers of `stream`, uniform over `[lo, up)` and bit-equal on every mesh.
    pub fn rand<T: FloatDType>(
        lo: T,
        up: T,
        shape: impl Into<Shape>,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
        stream: Stream,
    ) -> Result<Self> {
        let even = Distribution::Uniform { lo: lo.to_f64(), up: up.to_f64() };
        sampled(placed(mesh, placements, shape, T::DTYPE)?, even, device, stream)
    }

    /// Creates random numbers of `stream`, normally distributed and bit-equal on every mesh.
    pub fn randn<T: FloatDType>(
        mean: T,
        stdev: T,
        shape: impl Into<Shape>,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
        stream: Stream,
    ) -> Result<Self> {
        let normal = Distribution::Normal { mean: mean.to_f64(), stdev: stdev.to_f64() };
        sampled(placed(mesh, placements, shape, T::DTYPE)?, normal, device, stream)
    }

    /// Creates zeros with the layout of this tensor, replicated where it is partial.
    pub fn zeros_like(&self) -> Result<Self> {
        made(self.spec_like()?, |spec| {
            Tensor::zeros(spec.local_shape().as_slice(), spec.dtype(), self.device())
        })
    }

    /// Creates ones with the layout of this tensor, replicated where it is partial.
    pub fn ones_like(&self) -> Result<Self> {
        made(self.spec_like()?, |spec| {
            empty::ones(spec.local_shape().as_slice(), spec.dtype(), self.device())
        })
    }

    /// Creates a tensor with one value everywhere, rounded to the dtype of this tensor, and its layout, replicated
    /// where it is partial.
    pub fn full_like(&self, value: f64) -> Result<Self> {
        made(self.spec_like()?, |spec| {
            empty::full(value, spec.local_shape().as_slice(), spec.dtype(), self.device())
        })
    }

    /// Creates random numbers as [`rand`](Self::rand) does, with the layout of this tensor, replicated where it is
    /// partial.
    pub fn rand_like(&self, lo: f64, up: f64, stream: Stream) -> Result<Self> {
        sampled(self.spec_like()?, Distribution::Uniform { lo, up }, self.device(), stream)
    }

    /// Creates random numbers as [`randn`](Self::randn) does, with the layout of this tensor, replicated where it is
    /// partial.
    pub fn randn_like(&self, mean: f64, stdev: f64, stream: Stream) -> Result<Self> {
        sampled(self.spec_like()?, Distribution::Normal { mean, stdev }, self.device(), stream)
    }

    /// Returns the layout of this tensor with partial placements replaced by replicated ones.
    fn spec_like(&self) -> Result<Spec> {
        let resolved = self.placements().iter().map(|&p| if p.is_partial() { Replicate } else { p });
        let mut spec = self.spec().derive(&resolved.collect::<Placements>(), self.dims())?;
        for axis in 0..self.placements().len() {
            spec = spec.with_sizes(axis, self.spec().sizes(axis).cloned())?;
        }
        Ok(spec)
    }
}

fn made(spec: Spec, local: impl FnOnce(&Spec) -> candle_core::Result<Tensor>) -> Result<DTensor> {
    let local = local(&spec)?;
    Ok(DTensor::leaf(local, spec.shared()))
}

/// Creates a matrix with ones where `is_one(row, column)` holds, and zeros elsewhere.
fn square(spec: Spec, device: &Device, is_one: impl Fn(usize, usize) -> bool) -> Result<DTensor> {
    made(spec, |spec| {
        let (block, shape, is_one) = (spec.local_block(), spec.local_shape(), &is_one);
        let row = |i| block[1].clone().map(move |j| u8::from(is_one(i, j)));
        let ones: Vec<u8> = block[0].clone().flat_map(row).collect();
        Tensor::from_vec(ones, shape.as_slice(), device)?.to_dtype(spec.dtype())
    })
}

fn sampled(spec: Spec, dist: Distribution, device: &Device, stream: Stream) -> Result<DTensor> {
    made(spec, |spec| sample(stream, dist, spec.dims(), &spec.local_block(), spec.dtype(), device))
}
