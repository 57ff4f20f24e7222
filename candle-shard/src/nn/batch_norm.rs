//! Batch norm with statistics over the batch of all ranks.
use crate::nn::{Init, MeshVarBuilder, ModuleT};
use crate::parallel::{LayerKind, ModuleStyle};
use crate::random::Draws;
use crate::{DTensor, Error, Result};
use candle_core::DType;
use candle_nn::BatchNormConfig;

const OP: &str = "batch_norm";

/// Batch norm of `[batch, channels, ..]` (Ioffe & Szegedy 2015) with candle's options. Its statistics are those of one
/// device.
///
/// In training each channel is normalized to mean 0 and variance 1 over the batch of all ranks of the mesh, also if the
/// batch or other dims are sharded. This costs two all_reduces of one number per channel in the forward pass, and two
/// in the backward pass. Running statistics are updated once per batch, and not again when
/// [`recompute`](crate::nn::recompute) runs a segment again. In evaluation the running statistics are used, and
/// nothing is communicated. They are saved and loaded with the parameters, as `running_mean` and `running_var`.
///
/// Under a plan the parameters are sharded with the channels (colwise), or replicated. With
/// [`DataParallel`](candle_dist::DataParallel), which is not an axis of the tensors, each replica normalizes by the statistics of its own
/// rows, and has running statistics of its own unless `with_buffers` has them. In a pipeline a batch is a microbatch: the
/// statistics, and the results, depend on the number of microbatches.
#[derive(Debug, Clone)]
pub struct BatchNorm {
    running_mean: DTensor,
    running_var: DTensor,
    weight_and_bias: Option<(DTensor, DTensor)>,
    config: BatchNormConfig,
    style: ModuleStyle,
}

impl BatchNorm {
    /// Creates a layer with these statistics and parameters, `[channels]` each, outside of any plan. The statistics are
    /// copied, so a training step does not change the tensors that are passed.
    ///
    /// # Errors
    /// If a tensor has another shape, or `eps` is negative.
    pub fn new(
        channels: usize,
        running_mean: &DTensor,
        running_var: &DTensor,
        weight: DTensor,
        bias: DTensor,
        eps: f64,
    ) -> Result<Self> {
        Self::of(channels, [running_mean, running_var], Some((weight, bias)), eps.into())
    }

    /// Like [`new`](Self::new), without weight and bias.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn new_no_bias(
        channels: usize,
        running_mean: &DTensor,
        running_var: &DTensor,
        eps: f64,
    ) -> Result<Self> {
        Self::of(channels, [running_mean, running_var], None, eps.into())
    }

    /// Like [`new`](Self::new), with the weight of a batch in the running statistics, 0.1 otherwise.
    ///
    /// # Errors
    /// Those of [`new`](Self::new), and if the momentum is not in `[0, 1]`.
    pub fn new_with_momentum(
        channels: usize,
        running_mean: &DTensor,
        running_var: &DTensor,
        weight: DTensor,
        bias: DTensor,
        eps: f64,
        momentum: f64,
    ) -> Result<Self> {
        let config = BatchNormConfig { momentum, ..eps.into() };
        Self::of(channels, [running_mean, running_var], Some((weight, bias)), config)
    }

    /// Like [`new_with_momentum`](Self::new_with_momentum), without weight and bias.
    ///
    /// # Errors
    /// Those of [`new_with_momentum`](Self::new_with_momentum).
    pub fn new_no_bias_with_momentum(
        channels: usize,
        running_mean: &DTensor,
        running_var: &DTensor,
        eps: f64,
        momentum: f64,
    ) -> Result<Self> {
        Self::of(channels, [running_mean, running_var], None, BatchNormConfig { momentum, ..eps.into() })
    }

    fn of(
        channels: usize,
        running: [&DTensor; 2],
        weight_and_bias: Option<(DTensor, DTensor)>,
        config: BatchNormConfig,
    ) -> Result<Self> {
        check(&config)?;
        let learned = weight_and_bias.iter().flat_map(|(weight, bias)| [weight, bias]);
        if let Some(other) = running.into_iter().chain(learned).find(|x| x.dims() != [channels]) {
            return Error::op(OP, format!("{} for {channels} channels; give [{channels}]", other.spec()));
        }
        let [running_mean, running_var] = running.map(|x| x.detach().resolve_partial()?.copy());
        let config = BatchNormConfig { affine: weight_and_bias.is_some(), ..config };
        let (running_mean, running_var, style) = (running_mean?, running_var?, ModuleStyle::default());
        Ok(Self { running_mean, running_var, weight_and_bias, config, style })
    }

    /// Returns the running mean of each channel.
    pub fn running_mean(&self) -> &DTensor {
        &self.running_mean
    }

    /// Returns the running variance of each channel.
    pub fn running_var(&self) -> &DTensor {
        &self.running_var
    }

    /// Returns the number that is added to variances.
    pub fn eps(&self) -> f64 {
        self.config.eps
    }

    /// Returns the weight of a batch in the running statistics.
    pub fn momentum(&self) -> f64 {
        self.config.momentum
    }

    /// Returns the weight and bias of each channel, if they are learned.
    pub fn weight_and_bias(&self) -> Option<(&DTensor, &DTensor)> {
        self.weight_and_bias.as_ref().map(|(weight, bias)| (weight, bias))
    }

    /// Normalizes `x` by the statistics of this batch, and updates the running statistics.
    ///
    /// # Errors
    /// If `x` is not `[batch, channels, ..]`, or has fewer than two elements per channel, so that there is no variance.
    pub fn forward_train(&self, x: &DTensor) -> Result<DTensor> {
        let x = self.laid_out(x)?;
        let others: Vec<usize> = (0..x.rank()).filter(|&d| d != 1).collect();
        let count: usize = others.iter().map(|&d| x.dims()[d]).product();
        if count < 2 {
            return Error::op(
                OP,
                format!("{} has {count} elements a channel; train on more than one", x.spec()),
            );
        }
        let wide = wide(&x)?;
        let mean_of = |x: &DTensor| x.mean_keepdim(&others[..])?.resolve_partial();
        let mean = self.config.remove_mean.then(|| mean_of(&wide)).transpose()?;
        let centered = match &mean {
            Some(mean) => wide.sub(mean)?,
            None => wide,
        };
        let variance = mean_of(&centered.sqr()?)?;
        if !Draws::are_repeated() {
            if let Some(mean) = &mean {
                self.follow(&self.running_mean, mean, 1.0)?;
            }
            self.follow(&self.running_var, &variance, count as f64 / (count as f64 - 1.0))?;
        }
        self.finished(&centered.div(&variance.add(self.config.eps)?.sqrt()?)?, x.dtype())
    }

    fn forward_eval(&self, x: &DTensor) -> Result<DTensor> {
        let x = self.laid_out(x)?;
        let centered = wide(&x)?.sub(per_channel(&wide(&self.running_mean)?, x.rank())?)?;
        let variance = per_channel(&wide(&self.running_var)?, x.rank())?;
        self.finished(&centered.div(variance.add(self.config.eps)?.sqrt()?)?, x.dtype())
    }

    fn laid_out(&self, x: &DTensor) -> Result<DTensor> {
        let channels = self.running_mean.dims()[0];
        if x.rank() < 2 || x.dims()[1] != channels {
            return Error::op(OP, format!("an input {}: expected [batch, {channels}, ..]", x.spec()));
        }
        x.check_float(OP)?;
        let [x] = self.style.inputs_of(LayerKind::Channels, [x])?;
        x.resolve_partial()
    }

    /// Updates running statistics by those of a batch multiplied by `times`.
    fn follow(&self, running: &DTensor, of_batch: &DTensor, times: f64) -> Result<()> {
        let momentum = self.config.momentum;
        let towards = of_batch.detach().reshape(running.dims())?.affine(momentum * times, 0.0)?;
        let moved = running.to_dtype(towards.dtype())?.affine(1.0 - momentum, 0.0)?.add(&towards)?;
        running.overwrite(&moved.to_dtype(running.dtype())?)
    }

    fn finished(&self, normal: &DTensor, dtype: DType) -> Result<DTensor> {
        let mut y = normal.to_dtype(dtype)?;
        if let Some((weight, bias)) = &self.weight_and_bias {
            y = y.mul(per_channel(weight, y.rank())?)?.add(per_channel(bias, y.rank())?)?;
        }
        let [y] = self.style.outputs([&y])?;
        Ok(y)
    }
}

fn check(config: &BatchNormConfig) -> Result<()> {
    let (eps, momentum) = (config.eps, config.momentum);
    if eps >= 0.0 && (0.0..=1.0).contains(&momentum) {
        return Ok(());
    }
    Error::op(OP, format!("eps {eps} and momentum {momentum}: expected at least 0, and one in [0, 1]"))
}

/// Converts to the dtype in which statistics are computed.
fn wide(x: &DTensor) -> Result<DTensor> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.to_dtype(DType::F32),
        _ => Ok(x.clone()),
    }
}

/// Reshapes `[channels]` so that it broadcasts to `[batch, channels, ..]`.
fn per_channel(x: &DTensor, rank: usize) -> Result<DTensor> {
    let mut shape = vec![1; rank];
    shape[1] = x.dims()[0];
    x.reshape(shape)
}

impl ModuleT for BatchNorm {
    fn forward_t(&self, x: &DTensor, train: bool) -> Result<DTensor> {
        if train { self.forward_train(x) } else { self.forward_eval(x) }
    }
}

/// Builds a [`BatchNorm`] at the builder's path with `running_mean`, `running_var` and, if they are learned, `weight`
/// and `bias`.
///
/// # Errors
/// If `eps` is negative, or the momentum is not in `[0, 1]`.
pub fn batch_norm(
    channels: usize,
    config: impl Into<BatchNormConfig>,
    vb: &MeshVarBuilder,
) -> Result<BatchNorm> {
    let config = config.into();
    check(&config)?;
    let style = vb.style();
    let layout = style.layout(LayerKind::Channels)?;
    let running_mean = vb.buffer(channels, "running_mean", 0.0, layout.weight)?;
    let running_var = vb.buffer(channels, "running_var", 1.0, layout.weight)?;
    let learned = || {
        let weight = vb.get(channels, "weight", Init::Const(1.0), layout.weight, layout.varying)?;
        Ok::<_, Error>((
            weight,
            vb.get(channels, "bias", Init::Const(0.0), layout.bias, layout.varying_bias)?,
        ))
    };
    let weight_and_bias = config.affine.then(learned).transpose()?;
    Ok(BatchNorm { running_mean, running_var, weight_and_bias, config, style })
}
