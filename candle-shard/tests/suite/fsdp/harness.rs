//! A model of units, its training, and how results are compared.
use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, RankContext, World};
use candle_nn::ParamsAdamW;
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{AdamW, LayerNorm, Linear, MeshVarBuilder, recompute};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use std::collections::BTreeMap;
use std::sync::Arc;
use test_utils::{has_ranks, world};

pub(crate) const DIM: usize = 6;
pub(crate) const LAYERS: usize = 3;

/// What is trained, and how.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Case {
    pub(crate) options: FullyShardOptions,
    /// Recompute within a unit, or a unit within what is recomputed.
    pub(crate) recompute: Option<Recompute>,
    /// The last layer is the first once more.
    pub(crate) shared: bool,
    pub(crate) clip: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Recompute {
    Within,
    Around,
}

#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) norm: LayerNorm,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

impl Layer {
    pub(crate) fn new(vb: &MeshVarBuilder) -> Result<Self> {
        Ok(Self {
            norm: LayerNorm::new(DIM, 1e-5, &vb.pp("norm"))?,
            up: Linear::new(DIM, 7, true, &vb.pp("up"))?,
            down: Linear::new(7, DIM, true, &vb.pp("down"))?,
        })
    }

    pub(crate) fn forward(&self, x: &DTensor) -> Result<DTensor> {
        x.add(&self.down.forward(&self.up.forward(&self.norm.forward(x)?)?.gelu()?)?)
    }
}

pub(crate) struct Model {
    pub(crate) embed: Linear,
    pub(crate) layers: Vec<Arc<FullyShard<Arc<Layer>>>>,
    pub(crate) head: FullyShard<Linear>,
}

impl Model {
    pub(crate) fn new(vb: &MeshVarBuilder) -> Result<Self> {
        let layer = |i: usize| {
            FullyShard::new(&vb.pp("layers").pp(i), |vb| Ok(Arc::new(Layer::new(vb)?))).map(Arc::new)
        };
        Ok(Self {
            embed: Linear::new(5, DIM, true, &vb.pp("embed"))?, // in no unit
            layers: (0..LAYERS).map(layer).collect::<Result<_>>()?,
            head: FullyShard::new(&vb.pp("head"), |vb| Linear::new(DIM, 2, false, vb))?,
        })
    }

    pub(crate) fn plan() -> Plan {
        Plan::new("tp")
            .with("layers.*.up", ColwiseParallel::default())
            .with("layers.*.down", RowwiseParallel::default().output(Replicate))
    }

    pub(crate) fn loss(&self, x: &DTensor, case: Case) -> Result<DTensor> {
        let mut x = self.embed.forward(x)?;
        let again = case.shared.then(|| &self.layers[0]);
        for layer in self.layers.iter().chain(again) {
            x = match case.recompute {
                None => layer.run(|layer| layer.forward(&x))?,
                Some(Recompute::Within) => layer.run(|layer| {
                    let layer = layer.clone();
                    recompute(&x, move |x| layer.forward(x))
                })?,
                Some(Recompute::Around) => {
                    let layer = layer.clone();
                    recompute(&x, move |x| layer.run(|layer| layer.forward(x)))?
                }
            };
        }
        self.head.run(|head| head.forward(&x))?.sqr()?.mean_all()
    }
}

pub(crate) type Values = BTreeMap<String, Vec<f64>>;

pub(crate) fn whole(tensor: &DTensor) -> Result<Vec<f64>> {
    Ok(tensor.detach().full_tensor()?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

pub(crate) fn batch(step: usize) -> candle_core::Result<Tensor> {
    Tensor::arange(0f64, 35.0, &Device::Cpu)?.affine(0.7, step as f64)?.sin()?.reshape((7, 5))
}

/// Shards fully over the axes `dp` and `cp`, as far as the mesh has them.
pub(crate) fn fully_shard(vb: &MeshVarBuilder, options: FullyShardOptions) -> Result<MeshVarBuilder> {
    let mut axes = ["dp", "cp"].into_iter().filter(|axis| vb.mesh().names().iter().any(|name| name == axis));
    axes.try_fold(vb.clone(), |vb, axis| vb.fully_shard(axis, options))
}

/// Rows on all axes but `tp`.
pub(crate) fn by_rows(mesh: &DeviceMesh) -> Vec<Placement> {
    mesh.names().iter().map(|name| if name == "tp" { Replicate } else { Shard(0) }).collect()
}

/// Losses, first gradients and last parameters of three steps.
pub(crate) fn train(
    ctx: &RankContext,
    axes: &[(&str, usize)],
    case: Case,
) -> Result<(Vec<f64>, Values, Values)> {
    let mesh = ctx.mesh(axes)?;
    let vb = MeshVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, ctx.device())?;
    let vb = fully_shard(&vb, case.options)?;
    let model = Model::new(&vb)?;
    let parameters = vb.finish()?;
    let mut optimizer = AdamW::new(&parameters, ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() })?;
    let (mut losses, mut first) = (Vec::new(), Values::new());
    for step in 0..3 {
        let loss = model.loss(
            &DTensor::distribute(&batch(step)?.to_device(ctx.device())?, &mesh, &by_rows(&mesh))?,
            case,
        )?;
        let mut grads = parameters.backward(&loss)?;
        for p in parameters.iter().filter(|_| step == 0) {
            first.insert(p.name.clone(), whole(&p.grad(&grads)?.unwrap())?);
        }
        if let Some(norm) = case.clip {
            parameters.clip_grad_norm(norm)?.clip(&parameters.named_vars(), &mut grads)?;
        }
        optimizer.step(&grads)?;
        losses.push(loss.to_scalar::<f64>()?);
    }
    let values = parameters.iter().map(|p| Ok((p.name.clone(), whole(&p.tensor)?))).collect::<Result<_>>()?;
    Ok((losses, first, values))
}

pub(crate) fn assert_close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= tolerance * want.abs().max(1.0), "{what}: {got} for {want}");
    }
}

/// Trains on one device and on each mesh.
pub(crate) fn compare(meshes: &[&[(&str, usize)]], case: Case, tolerance: f64) {
    let plain = Case { options: FullyShardOptions::default(), ..case };
    let alone = World::threads(1).run(|ctx| train(ctx, &[("dp", 1), ("tp", 1)], plain)).unwrap().remove(0);
    for &axes in meshes {
        let ranks = axes.iter().map(|(_, size)| size).product();
        if !has_ranks(ranks) {
            continue;
        }
        for (losses, grads, values) in world(ranks).run(|ctx| train(ctx, axes, case)).unwrap() {
            assert_close(&losses, &alone.0, tolerance, &format!("losses on {axes:?}, {case:?}"));
            for (of, got, want) in [("gradient", &grads, &alone.1), ("value", &values, &alone.2)] {
                assert!(got.keys().eq(want.keys()));
                for (name, want) in want {
                    assert_close(
                        &got[name],
                        want,
                        tolerance,
                        &format!("{of} of {name} on {axes:?}, {case:?}"),
                    );
                }
            }
        }
    }
}

/// A builder on the axes, fully sharding over `dp`, in `dtype`.
pub(crate) fn builder(mesh: &DeviceMesh, dtype: DType, options: FullyShardOptions) -> Result<MeshVarBuilder> {
    MeshVarBuilder::fresh(7, mesh, Plan::new("tp"), dtype, device(mesh))?.fully_shard("dp", options)
}

/// Returns the whole values on the host.
pub(crate) fn on_host(tensor: &DTensor) -> Result<Tensor> {
    Ok(tensor.detach().full_tensor()?.to_device(&Device::Cpu)?)
}

/// The device of this rank.
fn device(mesh: &DeviceMesh) -> &Device {
    mesh.axis_group("dp").unwrap().device()
}

/// This rank's rows of a batch, on a mesh of `dp` and `tp`.
pub(crate) fn rows(tensor: &Tensor, mesh: &DeviceMesh) -> Result<DTensor> {
    DTensor::distribute(&tensor.to_device(device(mesh))?, mesh, &[Shard(0), Replicate])
}

/// Some units in a row, each a linear layer of 5 by 5.
pub(crate) fn linears(count: usize, vb: &MeshVarBuilder) -> Result<Vec<FullyShard<Linear>>> {
    (0..count).map(|i| FullyShard::new(&vb.pp(i), |vb| Linear::new(5, 5, true, vb))).collect()
}
