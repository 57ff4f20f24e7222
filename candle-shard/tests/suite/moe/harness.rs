//! A layer on one device and on a mesh, and the comparison of all results.
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::DeviceMesh;
use candle_shard::nn::{MeshVarBuilder, MoE, MoEConfig, MoEOutput, Mode, Parameters};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Placement, Replicate, Result, Spec};
use std::collections::BTreeMap;
use test_utils::reference_moe::{Made, Moe};
use test_utils::{block, distance, value_error, values};

pub(crate) const WIDTH: usize = 6;
pub(crate) const HIDDEN: usize = 5;
pub(crate) const TRAIN: Mode = Mode::Train { step: 0 };

/// Options with experts on the axis `ep`.
pub(crate) fn config(experts: usize, top_k: usize) -> MoEConfig {
    MoEConfig::new(WIDTH, HIDDEN, experts, top_k).expert_axis("ep")
}

/// Which experts the tokens prefer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Routing {
    /// What random weights prefer.
    Random,
    /// All tokens have the same first choices.
    OneSided,
}

/// Makes all tokens prefer the first experts: the first column of tokens is 1, and that of the router's weight falls.
fn one_sided(x: &Tensor, weight: &Var) -> candle_core::Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let first = |column: &Tensor, rest: &Tensor| Tensor::cat(&[column, &rest.narrow(1, 1, width - 1)?], 1);
    let experts = weight.dim(0)?;
    let falling = Tensor::arange_step(0.0, -3.0 * experts as f64, -3.0, x.device())?.reshape((experts, 1))?;
    let small = (weight.as_detached_tensor() * 0.1)?;
    weight.set(&first(&falling.to_dtype(x.dtype())?, &small)?)?;
    first(&Tensor::ones((rows, 1), x.dtype(), x.device())?, x)
}

/// The results and gradients of one device; the loss is the sum of the output times `up`, plus the auxiliary losses.
pub(crate) struct Truth {
    pub(crate) x: Tensor,
    pub(crate) up: Tensor,
    pub(crate) made: Made,
    pub(crate) of_x: Tensor,
    pub(crate) grads: BTreeMap<String, Tensor>,
    pub(crate) weight: Tensor,
}

pub(crate) fn truth(
    config: &MoEConfig,
    shape: &[usize],
    routing: Routing,
    dtype: DType,
) -> candle_core::Result<Truth> {
    biased_truth(config, shape, routing, dtype, &vec![0.0; config.experts])
}

/// Like [`truth`], with a bias of the choice.
pub(crate) fn biased_truth(
    config: &MoEConfig,
    shape: &[usize],
    routing: Routing,
    dtype: DType,
    bias: &[f64],
) -> candle_core::Result<Truth> {
    let mut layer = Moe::new(config, 3, dtype, &Device::Cpu)?;
    layer.set_bias(bias.into());
    let flat =
        values(shape, 1, dtype).reshape((shape[..shape.len() - 1].iter().product::<usize>(), WIDTH))?;
    let router = &layer.vars()[0].1;
    let flat = if routing == Routing::OneSided { one_sided(&flat, router)? } else { flat };
    let x = Var::from_tensor(&flat.reshape(shape)?)?;
    let up = values(shape, 2, dtype);
    let made = layer.forward(&x)?;
    let mut loss = (&made.output * &up)?.sum_all()?;
    if let Some(more) = &made.loss {
        loss = (loss + more)?;
    }
    let grads = loss.backward()?;
    let grad = |var: &Var| grads.get(var).cloned().map_or_else(|| var.zeros_like(), Ok);
    let of_parameters = layer.vars().iter().map(|(name, var)| Ok((name.clone(), grad(var)?)));
    let weight = router.as_detached_tensor().copy()?;
    let (of_x, grads) = (grad(&x)?, of_parameters.collect::<candle_core::Result<_>>()?);
    Ok(Truth { x: x.as_detached_tensor(), up, made, of_x, grads, weight })
}

/// Builds the layer with the same parameters as [`truth`].
pub(crate) fn build(config: &MoEConfig, mesh: &DeviceMesh, truth: &Truth) -> Result<(MoE, Parameters)> {
    let plan = Plan::new(mesh.names()[0].as_str());
    let vb = MeshVarBuilder::fresh(3, mesh, plan, truth.x.dtype(), &test_utils::device())?;
    let layer = MoE::new(config.clone(), &vb)?;
    let parameters = vb.finish()?;
    for parameter in parameters.iter().filter(|p| p.name == "router.weight") {
        parameter.var.set(&truth.weight.to_device(parameter.var.device())?)?;
    }
    Ok((layer, parameters))
}

/// Runs the layer on tokens in this layout, and returns the largest error of output, auxiliary loss and all gradients.
pub(crate) fn errors(config: &MoEConfig, truth: &Truth, spec: Spec) -> Result<(f64, MoEOutput)> {
    let mesh = spec.mesh().clone();
    let (layer, parameters) = build(config, &mesh, truth)?;
    errors_of(&layer, &parameters, truth, spec)
}

pub(crate) fn errors_of(
    layer: &MoE,
    parameters: &Parameters,
    truth: &Truth,
    spec: Spec,
) -> Result<(f64, MoEOutput)> {
    let mesh = spec.mesh().clone();
    let local = block(&truth.x, &spec)?.force_contiguous()?.to_device(&test_utils::device())?;
    let (x, var) = DTensor::from_local_with_spec(local, spec.clone())?.to_var()?;
    let made = layer.forward(&x, TRAIN)?;
    assert_eq!((made.output.spec(), &made.load.experts), (&spec, &truth.made.counts));
    let mut worst = value_error(&made.output, &truth.made.output)?;
    let up = test_utils::distribute(&truth.up, &mesh, &vec![Replicate; mesh.ndim()])?;
    let mut loss = made.output.mul(&up)?.sum_all()?;
    assert_eq!(made.loss.is_some(), truth.made.loss.is_some());
    if let (Some(more), Some(want)) = (&made.loss, &truth.made.loss) {
        worst = worst.max(distance(&more.full_tensor()?, want));
        loss = loss.add(more)?;
    }
    let grads = parameters.backward(&loss)?;
    for parameter in parameters.iter().filter(|p| !p.is_frozen()) {
        let got = parameter.grad(&grads)?.unwrap_or_else(|| panic!("no gradient of {}", parameter.name));
        let error = distance(got.to_local(), &block(&truth.grads[&parameter.name], got.spec())?);
        worst = worst.max(error);
    }
    let of_x = grads.get(&var).cloned().map_or_else(|| var.zeros_like(), Ok)?;
    worst = worst.max(distance(&of_x, &block(&truth.of_x, &spec)?));
    Ok((worst, made))
}

/// The layout of tokens with these placements, with given sizes on the first axis.
pub(crate) fn tokens(
    mesh: &DeviceMesh,
    truth: &Truth,
    at: &[Placement],
    sizes: Option<&[usize]>,
) -> Result<Spec> {
    Spec::new(mesh, at, truth.x.shape(), truth.x.dtype())?.with_sizes(0, sizes.map(Into::into))
}

/// The difference that rounding may cause.
pub(crate) fn allowed(dtype: DType) -> f64 {
    if dtype == DType::F64 { 1e-12 } else { 1e-5 }
}
