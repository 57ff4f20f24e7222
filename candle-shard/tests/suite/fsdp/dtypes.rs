//! Units that compute in another dtype than their parameters are stored in.
use crate::fsdp::harness::*;
use candle_core::{DType, Tensor};
use candle_nn::rnn::{GRUConfig, LSTMConfig};
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{
    GRU, Init, LSTM, LayerNorm, Linear, MeshVarBuilder, Module, RNN, RmsNorm, batch_norm, conv1d, group_norm,
    prelu,
};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Replicate, Result};
use test_utils::{has_ranks, world};

/// What a unit computes from `[7, 5]`.
type Layer = Box<dyn Fn(&DTensor) -> Result<DTensor>>;
/// How it is built.
type Build = fn(&MeshVarBuilder) -> Result<Layer>;

const LAYERS: [(&str, Build); 10] = [
    ("linears", |vb| {
        let up = Linear::new(5, 6, true, &vb.pp("up"))?;
        let down = Linear::new(6, 5, true, &vb.pp("down"))?;
        Ok(Box::new(move |x| down.forward(&up.forward(x)?.gelu()?)))
    }),
    ("scale", |vb| {
        let scale = vb.get((), "scale", Init::Const(0.75), Replicate, false)?;
        Ok(Box::new(move |x| x.mul(&scale)))
    }),
    ("layer norm", |vb| {
        let norm = LayerNorm::new(5, 1e-5, vb)?;
        Ok(Box::new(move |x| norm.forward(x)))
    }),
    ("rms norm", |vb| {
        let norm = RmsNorm::new(5, 1e-5, vb)?;
        Ok(Box::new(move |x| norm.forward(x)))
    }),
    ("group norm", |vb| {
        let norm = group_norm(1, 5, 1e-5, vb)?;
        Ok(Box::new(move |x| norm.forward(&x.unsqueeze(2)?)))
    }),
    ("batch norm", |vb| {
        let norm = batch_norm(5, 1e-5, vb)?;
        Ok(Box::new(move |x| norm.forward_train(x)))
    }),
    ("convolution", |vb| {
        let conv = conv1d(5, 4, 1, candle_nn::Conv1dConfig::default(), vb)?;
        Ok(Box::new(move |x| conv.forward(&x.unsqueeze(2)?)))
    }),
    ("prelu", |vb| {
        let layer = prelu(None, vb)?;
        Ok(Box::new(move |x| layer.forward(x)))
    }),
    ("lstm", |vb| {
        let layer = LSTM::new(1, 3, LSTMConfig::default(), vb)?;
        Ok(Box::new(move |x| layer.states_to_tensor(&layer.seq(&x.unsqueeze(2)?)?)))
    }),
    ("gru", |vb| {
        let layer = GRU::new(1, 3, GRUConfig::default(), vb)?;
        Ok(Box::new(move |x| layer.states_to_tensor(&layer.seq(&x.unsqueeze(2)?)?)))
    }),
];

/// The values of a layer and the gradients of its parameters.
fn run(axes: &[(&str, usize)], build: Build, computed: DType) -> Vec<(Vec<f64>, Values)> {
    let ranks = axes.iter().map(|(_, size)| size).product();
    let results = world(ranks).run(|ctx| -> Result<_> {
        let mesh = ctx.mesh(axes)?;
        let plan = Plan::new("tp")
            .with("up", ColwiseParallel::default())
            .with("down", RowwiseParallel::default().output(Replicate));
        let vb = MeshVarBuilder::fresh(7, &mesh, plan, DType::F32, ctx.device())?;
        let vb = fully_shard(&vb, FullyShardOptions::default().param_dtype(computed))?;
        let unit = FullyShard::new(&vb, build)?;
        let parameters = vb.built();
        let x = batch(0)?.to_dtype(computed)?.to_device(ctx.device())?;
        let x = DTensor::distribute(&x, &mesh, &by_rows(&mesh))?;
        let made = unit.run(|layer| layer(&x))?;
        assert_eq!(made.dtype(), computed);
        let weights =
            Tensor::arange(0f32, made.elem_count() as f32, ctx.device())?.cos()?.reshape(made.dims())?;
        let loss = made.to_dtype(DType::F32)?.mul(DTensor::replicated(&weights, &mesh)?)?.sum_all()?;
        let grads = parameters.backward(&loss)?;
        let mut all = Values::new();
        for p in parameters.iter().filter(|p| !p.is_frozen()) {
            assert_eq!(p.var.dtype(), DType::F32);
            let grad = p.grad(&grads)?.unwrap_or_else(|| panic!("{} has no gradient", p.name));
            all.insert(p.name.clone(), whole(&grad)?);
        }
        Ok((whole(&made)?, all))
    });
    results.unwrap()
}

#[test]
fn every_parameter_of_a_unit_computes_in_its_dtype() {
    let meshes: [&[(&str, usize)]; 7] = [
        &[("dp", 1), ("tp", 1)],
        &[("dp", 2), ("tp", 1)],
        &[("dp", 3), ("tp", 1)],
        &[("dp", 1), ("tp", 2)],
        &[("dp", 2), ("tp", 2)],
        &[("tp", 2), ("dp", 2)],
        &[("dp", 2), ("cp", 2), ("tp", 1)],
    ];
    for (name, build) in LAYERS {
        let (values, grads) = run(&[("dp", 1), ("tp", 1)], build, DType::F32).remove(0);
        // candle has no convolutions in bf16 on the host.
        let computed = if name == "convolution" { DType::F16 } else { DType::BF16 };
        for axes in meshes.iter().filter(|axes| has_ranks(axes.iter().map(|(_, size)| size).product())) {
            for (got, found) in run(axes, build, computed) {
                assert_close(&got, &values, 0.05, &format!("{name} on {axes:?}"));
                assert!(found.keys().eq(grads.keys()));
                for (of, want) in &grads {
                    assert_close(&found[of], want, 0.1, &format!("gradient of {of} of {name} on {axes:?}"));
                }
            }
        }
    }
}

#[test]
fn the_gradient_of_a_parameter_that_is_only_cast_has_its_dtype() {
    let dtypes = world(1).run(|ctx| -> Result<Vec<DType>> {
        let mesh = ctx.mesh(&[("dp", 1), ("tp", 1)])?;
        let vb = builder(&mesh, DType::F64, FullyShardOptions::default().param_dtype(DType::BF16))?;
        let unit = FullyShard::new(&vb, |vb| {
            let scale = vb.get((), "scale", Init::Const(0.75), Replicate, false)?;
            Ok((scale, Linear::new(5, 5, false, vb)?))
        })?;
        let parameters = vb.finish()?;
        let x = rows(&batch(0)?.to_dtype(DType::BF16)?, &mesh)?;
        let loss = unit.run(|(scale, layer)| layer.forward(&x.mul(scale)?))?.sum_all()?;
        let grads = parameters.backward(&loss)?;
        Ok(parameters.iter().map(|p| grads.get(&p.var).unwrap().dtype()).collect())
    });
    assert_eq!(dtypes.unwrap(), [[DType::F64; 2]]);
}
