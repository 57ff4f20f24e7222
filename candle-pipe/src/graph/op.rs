//! The computation of a node.
use super::MaskedRows;
use crate::{Result, Value};
use candle_core::{DType, Device, Tensor};
use candle_dist_kernels::random::{Distribution, Stream, sample_full};
use candle_nn::ModuleT;
use std::ops::Range;

/// The context of one run of a node: microbatch, device, step and mode.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Ctx {
    /// The stage's device, for tensors that a node creates.
    pub device: Device,
    /// The dtype of the stage's parameters.
    pub dtype: DType,
    /// The microbatch.
    pub microbatch: usize,
    /// The rows of the batch that the microbatch holds.
    pub rows: Range<usize>,
    /// The training step, which is folded into random streams.
    pub step: u64,
    /// Whether the model trains, so that dropout is active.
    pub training: bool,
    /// The microbatch's own rows, if it has the shape of the whole batch.
    pub masked: Option<MaskedRows>,
}

impl Ctx {
    /// Creates the context of the first microbatch and step, in training, for these rows of the batch.
    pub fn new(device: &Device, dtype: DType, rows: Range<usize>) -> Self {
        Self { device: device.clone(), dtype, microbatch: 0, rows, step: 0, training: true, masked: None }
    }

    /// Creates random numbers for a tensor of shape `dims` whose first dim goes along the rows of the batch.
    ///
    /// The numbers of a row are those that it has in the whole batch, so the cut into microbatches does not change
    /// them. The first dim may have several entries per row, such as the tokens of a sequence.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_pipe::Ctx;
    /// use candle_pipe::random::{Distribution, Stream};
    ///
    /// let ctx = |rows| Ctx::new(&Device::Cpu, DType::F32, rows);
    /// let (stream, even) = (Stream::new(42, "noise"), Distribution::Uniform { lo: 0.0, up: 1.0 });
    /// let whole = ctx(0..5).random(stream, even, &[5, 2], DType::F32)?;
    /// let last = ctx(3..5).random(stream, even, &[2, 2], DType::F32)?;
    /// assert_eq!(last.to_vec2::<f32>()?, whole.narrow(0, 3, 2)?.to_vec2::<f32>()?);
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the first dim is not a multiple of the number of rows.
    pub fn random(&self, stream: Stream, dist: Distribution, dims: &[usize], dtype: DType) -> Result<Tensor> {
        self.sample(stream.fold(self.step), dist, dims, dtype)
    }

    /// Like [`random`](Self::random), from the stream of this step.
    pub(crate) fn sample(
        &self,
        stream: Stream,
        dist: Distribution,
        dims: &[usize],
        dtype: DType,
    ) -> Result<Tensor> {
        let of_rows = stream.of_rows(self.rows.start, Some(self.rows.len()), dims);
        let stream =
            of_rows.map_err(|error| crate::Error::Pipe(candle_dist::without_trace(&error).to_string()))?;
        Ok(sample_full(stream, dist, dims, dtype, &self.device)?)
    }

    /// Returns the mode of candle-shard's layers: evaluation, or training with the masks of the microbatch's rows.
    ///
    /// In a node it is `Mode::Train`: layers know the node's rows, also where a tensor has several entries for each row.
    /// Elsewhere it names the first row, and entries of dim 0 are rows.
    #[cfg(feature = "shard")]
    pub fn mode(&self) -> candle_shard::nn::Mode {
        use candle_shard::nn::{Draws, Mode};
        match self.training {
            false => Mode::Eval,
            true if Draws::rows().as_ref() == Some(&self.rows) => Mode::Train { step: self.step },
            true => Mode::TrainRows { step: self.step, first_row: self.rows.start },
        }
    }
}

/// The computation of a node.
///
/// candle's modules implement it, with one tensor in and one out; [`stage_op`] makes one from a closure.
pub trait StageOp {
    /// Returns the node's outputs.
    ///
    /// # Errors
    /// If the inputs are not those that the node expects.
    fn forward(&self, inputs: &[Value], ctx: &Ctx) -> Result<Vec<Value>>;

    /// Returns the numbers of inputs and outputs, if the type alone determines them. A declaration with other numbers
    /// is refused.
    fn arity() -> Option<(usize, usize)>
    where
        Self: Sized,
    {
        None
    }
}

impl<M: ModuleT> StageOp for M {
    fn arity() -> Option<(usize, usize)> {
        Some((1, 1))
    }

    fn forward(&self, inputs: &[Value], ctx: &Ctx) -> Result<Vec<Value>> {
        let [x] = inputs else {
            return Err(crate::Error::Pipe(format!(
                "a module takes one tensor, {} values were given",
                inputs.len()
            )));
        };
        Ok(vec![self.forward_t(x.tensor()?, ctx.training)?.into()])
    }
}

/// Makes a computation from a closure, for modules with other than one tensor in and one out.
///
/// ```
/// use candle_pipe::{Result, StageOp, Value, stage_op};
///
/// let swap = stage_op(|xs, _ctx| Ok(vec![xs[1].clone(), xs[0].clone()]));
/// # let _ = swap;
/// ```
pub fn stage_op<F: Fn(&[Value], &Ctx) -> Result<Vec<Value>>>(f: F) -> impl StageOp {
    Closure(f)
}

struct Closure<F>(F);

impl<F: Fn(&[Value], &Ctx) -> Result<Vec<Value>>> StageOp for Closure<F> {
    fn forward(&self, inputs: &[Value], ctx: &Ctx) -> Result<Vec<Value>> {
        (self.0)(inputs, ctx)
    }
}
