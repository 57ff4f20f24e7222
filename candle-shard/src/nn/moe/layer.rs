//! The layer: routes tokens, sends them to their experts, and adds the results.
use super::OP;
use super::config::{MoEAxes, MoEConfig};
use super::dispatch::Dispatch;
use super::experts::{ExpertWeights, compute};
use super::load::{self, Load, LoadTable, TokenRanks};
use super::router::{Router, RouterOutput};
use super::shared::SharedExperts;
use super::{capacity, losses};
use crate::kernels;
use crate::layout::{Placement, Replicate, Shard};
use crate::nn::Draws;
use crate::nn::{MeshVarBuilder, Mode};
use crate::parallel::ModuleStyle;
use crate::redistribute::{Target, Targets};
use crate::rules::{self, OpSpec};
use crate::strict::inherent;
use crate::{DTensor, Error, Result, Spec};
use candle_core::{Device, Tensor};
use candle_dist::backend::Dims;
use candle_dist::{ProcessGroup, ReduceOp, TensorTree};
use smallvec::{SmallVec, smallvec};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A mixture of experts: a router sends each token to the best `top_k` of many feed-forward networks (Shazeer et
/// al. 2017), whose results are added with the weights that the router gives them.
///
/// # What is sharded how
///
/// Tokens `[.., width]` may be sharded along any dim but the last, over any axes, in any sizes. The experts are `Shard(0)`
/// on the [expert axis](MoEConfig::expert_axis) and replicated on axes that only cut tokens, over which their gradients are
/// summed. If tokens are sharded on the expert axis too, each goes once to each rank that has one of its experts, and
/// back. If they are replicated there, no tokens travel, and the results are partial sums. The [tensor
/// axis](MoEConfig::tensor_axis) cuts the hidden dim of each expert.
///
/// No token is dropped unless there is a [capacity](MoEConfig::capacity_factor). Values and gradients are those of one
/// device, on any number of ranks, also of ranks without tokens or experts. Sums run in a fixed order.
///
/// Ranks that have the same tokens use the choices of the first one of them. So processors that round unlike choose alike
/// where two scores almost tie.
///
/// # Communication
///
/// Forward, on axes where tokens are replicated: one broadcast of choices. On the axes that cut tokens: one small all_gather of counts. On the expert axis one all_to_all of rows, one of
/// their weights and choices, and one of results. Backward: one all_to_all each of results, weights and rows.
///
/// # Parameters
///
/// `router.weight` `[experts, width]` and perhaps `router.bias` and `router.logit_bias` `[experts]`; `experts.gate_proj`, if experts
/// [have gates](crate::nn::ExpertGate::has_gate), and `experts.up_proj` `[experts, hidden, width]`, `experts.down_proj` `[experts, width,
/// hidden]`, perhaps `experts.{gate_proj,up_proj}_bias` `[experts, hidden]` and `experts.down_proj_bias` `[experts, width]`; with shared experts
/// `shared_experts.{gate_proj,up_proj,down_proj}.weight`, and with a gate of them `shared_expert_gate.weight` `[1, width]`. Experts that files store in blocks stay
/// [quantized](MeshVarBuilder::quantized_block) and get no gradients, unless the tensor axis would cut a block.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::nn::{MoE, MoEConfig, Mode, MeshVarBuilder};
/// use candle_shard::parallel::Plan;
/// use candle_shard::{DTensor, Result, Shard};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("ep", 2)])?;
///     let vb = MeshVarBuilder::fresh(42, &mesh, Plan::new("ep"), DType::F32, &Device::Cpu)?;
///     // 3 experts, 2 on the first rank and 1 on the second.
///     let config = MoEConfig::new(4, 8, 3, 2).expert_axis("ep").balance_weight(0.01);
///     let layer = MoE::new(config, &vb)?;
///     let parameters = vb.finish()?;
///     let x = Tensor::arange(0f32, 20., &Device::Cpu)?.reshape((5, 4))?;
///     let x = DTensor::distribute(&x, &mesh, &[Shard(0)])?; // 3 tokens and 2 tokens
///     let made = layer.forward(&x, Mode::Train { step: 0 })?;
///     assert_eq!((made.output.dims(), made.output.placements()), (&[5, 4][..], &[Shard(0)][..]));
///     assert_eq!(made.load.experts.iter().sum::<usize>(), 5 * 2);
///     let loss = made.output.sqr()?.mean_all()?.add(&made.loss.expect("a balance loss"))?;
///     let grads = parameters.backward(&loss)?;
///     assert!(parameters.iter().all(|parameter| grads.get(&parameter.var).is_some()));
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug, Clone)]
pub struct MoE {
    config: MoEConfig,
    axes: MoEAxes,
    /// The path of the layer; plans have no style for it.
    style: ModuleStyle,
    router: Router,
    experts: ExpertWeights,
    shared: Option<SharedExperts>,
    /// The choices of each expert since the bias was updated.
    counts: Arc<Mutex<Vec<usize>>>,
}

/// The result of a [`MoE`] layer.
#[derive(Debug, Clone, TensorTree)]
#[non_exhaustive]
pub struct MoEOutput {
    /// The tokens after the layer, in the shape and layout of the input.
    pub output: DTensor,
    /// The sum of the auxiliary losses, if there are any, to be added to the loss of the model.
    pub loss: Option<DTensor>,
    /// The work of experts and ranks.
    #[tensor_tree(keep)]
    pub load: Load,
}

impl MoE {
    /// Builds a layer at the builder's path.
    ///
    /// # Errors
    /// If the options contradict each other or do not fit the mesh; the error is the same on all ranks.
    pub fn new(config: MoEConfig, vb: &MeshVarBuilder) -> Result<Self> {
        config.check()?;
        let axes = config.axes(vb.mesh())?;
        let router = Router::new(&config, &vb.pp("router"))?;
        let experts = ExpertWeights::new(&config, &axes, &vb.pp("experts"))?;
        let shared =
            (config.shared_hidden > 0).then(|| SharedExperts::new(&config, &axes, vb)).transpose()?;
        let counts = Arc::new(Mutex::new(vec![0; config.experts]));
        Ok(Self { config, axes, style: vb.unstyled(), router, experts, shared, counts })
    }

    /// Returns the options.
    pub fn config(&self) -> &MoEConfig {
        &self.config
    }

    /// Maps tokens `[.., width]` to tokens of the same shape and layout. Partial tokens are summed first.
    ///
    /// In training, the choices count for [`update_bias`](Self::update_bias).
    ///
    /// # Errors
    /// The same one on all ranks: if the input is no float tensor `[.., width]` on the mesh of the layer, or the router's
    /// scores of a token are not numbers. The latter error names the token.
    #[track_caller]
    pub fn forward(&self, x: &DTensor, mode: Mode) -> Result<MoEOutput> {
        self.forward_by(x, x, mode)
    }

    /// Like [`forward`](Self::forward), with experts that are chosen by the tokens `by`, of the same layout, and compute from `x`. The width of
    /// `by` may be [another one](MoEConfig::router_width).
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward), of both.
    #[track_caller]
    pub fn forward_by(&self, x: &DTensor, by: &DTensor, mode: Mode) -> Result<MoEOutput> {
        self.style.layer(|| {
            self.check(x, self.config.width)?;
            self.check(by, self.config.by_width())?;
            if !are_alike(x.spec(), by.spec()) {
                return Error::op(
                    OP,
                    format!("an input {} that is routed by {}; expected one layout", x.spec(), by.spec()),
                );
            }
            let (config, top_k, last) = (&self.config, self.config.top_k, x.rank() - 1);
            let place = |axis: usize, at: Placement| match at {
                Shard(dim) if dim < last && self.axes.tensor != Some(axis) => at,
                _ => Replicate,
            };
            let laid = inherent(|| x.placed(place))?;
            let routed = self.router.route(config, &inherent(|| by.placed(place))?)?;
            let ranks = TokenRanks::of(laid.spec(), &self.router.weight)?;
            let mut kept = routed.chosen.clone();
            if let Some(factor) = config.capacity_factor {
                capacity::drop_choices(&mut kept, (config.experts, top_k), factor, &ranks)?;
            }
            let choices = (&routed.chosen[..], &kept[..], top_k);
            let LoadTable { counts, load } =
                load::exchange(choices, routed.invalid, &ranks, (&self.axes, laid.spec()))?;
            if mode != Mode::Eval && config.bias && !Draws::are_repeated() {
                self.counts().iter_mut().zip(&load.experts).for_each(|(sum, count)| *sum += count);
            }
            let mut output = self.run(&laid, &routed, (&kept, counts))?;
            if let Some(shared) = &self.shared {
                output = output.add(&shared.forward(&laid)?)?;
            }
            let target = |mut target: Target| {
                if target.placement.is_partial() {
                    target.placement = Replicate;
                }
                target
            };
            let targets: Targets = x.targets().into_iter().map(target).collect();
            let output = inherent(|| output.to_targets(&targets, 0))?;
            let loss = losses::of(config, &routed, &load)?;
            Ok(MoEOutput { output, loss, load })
        })
    }

    fn check(&self, x: &DTensor, width: usize) -> Result<()> {
        let weight = &self.router.weight;
        if x.mesh() != weight.mesh() {
            return Error::op(
                OP,
                format!("an input on {}, a layer on {}; redistribute it", x.mesh(), weight.mesh()),
            );
        }
        if x.rank() < 2 || x.dims().last() != Some(&width) || x.dtype() != weight.dtype() {
            let dtype = weight.dtype().as_str();
            return Error::op(
                OP,
                format!("an input {}: expected {dtype}[.., {width}] with at least 2 dims", x.spec()),
            );
        }
        x.check_float(OP)
    }

    /// Runs the experts. The result is partial on the tensor axis, and on the expert axis if tokens are replicated there.
    #[track_caller]
    fn run(
        &self,
        x: &DTensor,
        routed: &RouterOutput,
        (kept, counts): (&[u32], Option<Vec<Vec<usize>>>),
    ) -> Result<DTensor> {
        let inputs: SmallVec<[&DTensor; 8]> =
            [x, &routed.weights].into_iter().chain(self.experts.tensors()).collect();
        let mesh = x.mesh();
        let attributes = [self.axes.experts, self.axes.tensor].map(|axis| axis.map_or(0, |axis| axis + 1));
        let op_spec = || {
            rules::check_meshes(OP, &inputs)?;
            let mut out = x.targets();
            for axis in [self.axes.experts, self.axes.tensor].into_iter().flatten() {
                if mesh.shape()[axis] > 1 && x.placements()[axis] == Replicate {
                    out[axis] = Placement::PARTIAL_SUM.into();
                }
            }
            let own = self.experts.tensors().iter().map(DTensor::targets);
            let targets = [x.targets(), x.targets()].into_iter().chain(own);
            let mut made = OpSpec::laid(&inputs, targets, &out, &[(Dims::from_slice(x.dims()), x.dtype())])?;
            // A rank without tokens may have experts for the others.
            made.nothing = false;
            Ok(made)
        };
        let exchange = match (counts, self.axes.experts) {
            (Some(counts), Some(axis)) => {
                let group = mesh.axis_group(axis)?.clone();
                Some((self.router.weight.described(group, 1 << axis), counts))
            }
            _ => None,
        };
        let me = self.axes.experts.map_or(0, |axis| mesh.coordinate()[axis]);
        let dispatch = Dispatch::new((kept, self.config.top_k), &self.axes, me, exchange)?;
        let mut made = rules::run_with(OP, &attributes, &inputs, &op_spec, &|laid, outs| {
            let tokens = kept.len() / self.config.top_k;
            let flat = |x: &DTensor, width: usize| x.to_local().contiguous()?.reshape((tokens, width));
            let arrived =
                dispatch.send(&flat(&laid[0], self.config.width)?, &flat(&laid[1], self.config.top_k)?)?;
            let made = compute(&arrived, &self.experts, &laid[2..])?;
            let made = dispatch.bring_back(&kernels::convert(&made, x.dtype())?)?;
            Ok(smallvec![made.reshape(outs[0].local_shape().as_slice())?])
        })?;
        Ok(made.remove(0))
    }

    /// Moves the bias of each expert by `rate`: up if it was chosen less often than the mean since the last call in
    /// training, down if more often (Wang et al. 2024, arXiv:2408.15664). Call it once a step.
    ///
    /// Counts are sums over all tokens of the mesh. Give the group of `replicas` if there are some outside of it, as with
    /// [`DataParallel`](candle_dist::DataParallel). All ranks move alike.
    ///
    /// # Errors
    /// If the layer has no bias, or the rate is not a finite number.
    pub fn update_bias(&self, rate: f64, replicas: Option<&ProcessGroup>) -> Result<()> {
        let Some(bias) = &self.router.bias else {
            return Error::op(OP, "update_bias of a layer without a bias; build it with MoEConfig::bias");
        };
        if !rate.is_finite() {
            return Error::op(OP, format!("update_bias by {rate}: expected a finite number, such as 0.001"));
        }
        let mut counts = self.counts();
        let mut sums: Vec<f64> = counts.iter().map(|&count| count as f64).collect();
        if let Some(group) = replicas {
            let mine = Tensor::from_vec(sums, counts.len(), &Device::Cpu)?;
            let group = bias.described(group.clone(), 0);
            sums = group.all_reduce(&mine, ReduceOp::Sum)?.to_vec1()?;
        }
        let mean = sums.iter().sum::<f64>() / sums.len() as f64;
        let sign = |&count: &f64| if count == mean { 0.0 } else { (mean - count).signum() };
        let step = Tensor::from_iter(sums.iter().map(|count| rate * sign(count)), bias.device())?;
        bias.overwrite(&bias.add(&step.to_dtype(bias.dtype())?)?)?;
        counts.fill(0);
        Ok(())
    }

    fn counts(&self) -> MutexGuard<'_, Vec<usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether tokens of two widths lie alike.
fn are_alike(one: &Spec, other: &Spec) -> bool {
    let tokens = |spec: &Spec| spec.dims()[..spec.dims().len() - 1].to_vec();
    let sizes = |spec: &Spec| -> Vec<_> {
        (0..spec.placements().len()).map(|axis| spec.sizes(axis).cloned()).collect()
    };
    tokens(one) == tokens(other) && one.placements() == other.placements() && sizes(one) == sizes(other)
}
