//! candle-nn's layers on every mesh, against candle-nn: values, the gradients of inputs and of all parameters, collectives.
use crate::common::*;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::comm;
use candle_nn::rnn::{GRUConfig, LSTMConfig, RNN as _};
use candle_nn::{
    BatchNormConfig, Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig, Module as _,
    ModuleT as _, VarBuilder, VarMap,
};
use candle_shard::nn::{self, Module, ModuleT, Parameters, RNN, ShardedVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel, Style};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use std::collections::HashMap;
use test_utils::on_ranks;

type Here = Box<dyn Fn(&DTensor) -> Result<DTensor>>;
type There = Box<dyn Fn(&Tensor) -> candle_core::Result<Tensor>>;

/// A layer in both forms, for an input of this shape, and the styles that a plan may give it.
struct Case {
    name: &'static str,
    shape: &'static [usize],
    here: fn(&ShardedVarBuilder) -> Result<Here>,
    there: fn(VarBuilder<'_>) -> candle_core::Result<There>,
    styles: &'static [Cut],
}

/// How a plan cuts a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Cut {
    Whole,
    Colwise,
    Rowwise,
}

const ALL: &[Cut] = &[Cut::Whole, Cut::Colwise, Cut::Rowwise];
const BY_CHANNELS: &[Cut] = &[Cut::Whole, Cut::Colwise];

impl Cut {
    fn plan(self) -> Plan {
        let style: Style = match self {
            Self::Whole => return Plan::new("a"),
            Self::Colwise => ColwiseParallel::default().into(),
            Self::Rowwise => RowwiseParallel::default().into(),
        };
        Plan::new("a").with("layer", style)
    }
}

fn boxed(layer: impl Module + 'static) -> Result<Here> {
    Ok(Box::new(move |x| layer.forward(x)))
}

fn boxed_there(layer: impl candle_nn::Module + 'static) -> candle_core::Result<There> {
    Ok(Box::new(move |x| layer.forward(x)))
}

const LINE: Conv1dConfig = Conv1dConfig { padding: 1, stride: 2, dilation: 1, groups: 1, cudnn_fwd_algo: None };
const IMAGE: Conv2dConfig = Conv2dConfig { padding: 1, stride: 1, dilation: 1, groups: 1, cudnn_fwd_algo: None };
const WIDER_LINE: ConvTranspose1dConfig =
    ConvTranspose1dConfig { padding: 1, output_padding: 1, stride: 2, dilation: 1, groups: 1 };
const WIDER: ConvTranspose2dConfig = ConvTranspose2dConfig { padding: 1, output_padding: 1, stride: 2, dilation: 1 };

/// Lines as images of one row: the gradient of candle's `conv1d` is another.
fn lines(layer: candle_nn::Conv1d) -> candle_core::Result<There> {
    Ok(Box::new(move |x| {
        let padded = x.pad_with_zeros(2, LINE.padding, LINE.padding)?.unsqueeze(2)?;
        let y = padded.conv2d(&layer.weight().unsqueeze(2)?, 0, LINE.stride, LINE.dilation, 1)?.squeeze(2)?;
        let y = layer.bias().map_or(Ok(y.clone()), |bias| y.broadcast_add(&bias.unsqueeze(1)?))?;
        assert!(distance(&y, &layer.forward(&x.detach())?) < 1e-9);
        Ok(y)
    }))
}

fn depthwise() -> Conv2dConfig {
    Conv2dConfig { groups: 4, ..IMAGE }
}

fn cases() -> Vec<Case> {
    let case = |name, shape, here, there, styles| Case { name, shape, here, there, styles };
    vec![
        case(
            "conv1d",
            &[3, 4, 7],
            |vb| boxed(nn::conv1d(4, 6, 3, LINE, vb)?),
            |vb| lines(candle_nn::conv1d(4, 6, 3, LINE, vb)?),
            ALL,
        ),
        case(
            "conv1d_no_bias",
            &[4, 4, 7],
            |vb| boxed(nn::conv1d_no_bias(4, 5, 3, LINE, vb)?),
            |vb| lines(candle_nn::conv1d_no_bias(4, 5, 3, LINE, vb)?),
            ALL,
        ),
        case(
            "conv2d",
            &[5, 4, 4, 3],
            |vb| boxed(nn::conv2d(4, 6, 3, IMAGE, vb)?),
            |vb| boxed_there(candle_nn::conv2d(4, 6, 3, IMAGE, vb)?),
            ALL,
        ),
        case(
            "conv2d_no_bias of channels alone",
            &[2, 4, 3, 3],
            |vb| boxed(nn::conv2d_no_bias(4, 4, 3, depthwise(), vb)?),
            |vb| boxed_there(candle_nn::conv2d_no_bias(4, 4, 3, depthwise(), vb)?),
            &[Cut::Whole],
        ),
        case(
            "conv_transpose1d",
            &[3, 4, 3],
            |vb| boxed(nn::conv_transpose1d(4, 6, 3, WIDER_LINE, vb)?),
            |vb| {
                // candle's has no gradient: lines are images of one row.
                let (lines, bias) = (candle_nn::conv_transpose1d(4, 6, 3, WIDER_LINE, vb.clone())?, vb.get(6, "bias")?);
                let weight = vb.get((4, 6, 3), "weight")?;
                Ok(Box::new(move |x| {
                    let whole = x.unsqueeze(2)?.conv_transpose2d(&weight.unsqueeze(2)?, 0, 0, 2, 1)?.squeeze(2)?;
                    let y = whole.pad_with_zeros(2, 0, 1)?.narrow(2, 1, 6)?.broadcast_add(&bias.reshape((6, 1))?)?;
                    assert!(distance(&y, &lines.forward(&x.detach())?) < 1e-9);
                    Ok(y)
                }))
            },
            ALL,
        ),
        case(
            "conv_transpose2d",
            &[2, 4, 3, 2],
            |vb| boxed(nn::conv_transpose2d(4, 3, 3, WIDER, vb)?),
            |vb| boxed_there(candle_nn::conv_transpose2d(4, 3, 3, WIDER, vb)?),
            ALL,
        ),
        case(
            "conv_transpose2d_no_bias",
            &[1, 2, 3, 3],
            |vb| boxed(nn::conv_transpose2d_no_bias(2, 5, 3, WIDER, vb)?),
            |vb| boxed_there(candle_nn::conv_transpose2d_no_bias(2, 5, 3, WIDER, vb)?),
            ALL,
        ),
        case(
            "group_norm",
            &[3, 8, 2, 3],
            |vb| boxed(nn::group_norm(4, 8, 1e-3, vb)?),
            |vb| boxed_there(candle_nn::group_norm(4, 8, 1e-3, vb)?),
            BY_CHANNELS,
        ),
        case(
            "batch_norm in training",
            &[5, 6, 3],
            |vb| {
                let layer = nn::batch_norm(6, 1e-3, vb)?;
                Ok(Box::new(move |x| x.apply_t(&layer, true)))
            },
            |vb| {
                let layer = candle_nn::batch_norm(6, 1e-3, vb)?;
                Ok(Box::new(move |x| x.apply_t(&layer, true)))
            },
            BY_CHANNELS,
        ),
        case(
            "batch_norm of images, without mean and parameters",
            &[3, 5, 2, 2],
            |vb| {
                let config = BatchNormConfig { affine: false, remove_mean: false, ..Default::default() };
                let layer = nn::batch_norm(5, config, vb)?;
                Ok(Box::new(move |x| layer.forward_train(x)))
            },
            |vb| {
                let config = BatchNormConfig { affine: false, remove_mean: false, ..Default::default() };
                let layer = candle_nn::batch_norm(5, config, vb)?;
                Ok(Box::new(move |x| layer.forward_train(x)))
            },
            BY_CHANNELS,
        ),
        case(
            "batch_norm in evaluation",
            &[4, 6],
            |vb| {
                let layer = nn::batch_norm(6, 1e-3, vb)?;
                Ok(Box::new(move |x| layer.forward_t(x, false)))
            },
            |vb| {
                let layer = candle_nn::batch_norm(6, 1e-3, vb)?;
                Ok(Box::new(move |x| layer.forward_t(x, false)))
            },
            BY_CHANNELS,
        ),
        case(
            "layer_norm_no_bias",
            &[5, 6],
            |vb| boxed(nn::layer_norm_no_bias(6, 1e-3, vb)?),
            |vb| boxed_there(candle_nn::layer_norm_no_bias(6, 1e-3, vb)?),
            &[Cut::Whole],
        ),
        case(
            "prelu of channels",
            &[3, 6, 2],
            |vb| boxed(nn::prelu(Some(6), vb)?),
            |vb| boxed_there(candle_nn::prelu(Some(6), vb)?),
            BY_CHANNELS,
        ),
        case(
            "prelu",
            &[5, 3],
            |vb| boxed(nn::prelu(None, vb)?),
            |vb| boxed_there(candle_nn::prelu(None, vb)?),
            &[Cut::Whole],
        ),
        case(
            "lstm",
            &[5, 3, 4],
            |vb| {
                let layer = nn::lstm(4, 3, LSTMConfig { layer_idx: 1, ..Default::default() }, vb)?;
                Ok(Box::new(move |x| layer.states_to_tensor(&layer.seq(x)?)))
            },
            |vb| {
                let layer = candle_nn::lstm(4, 3, LSTMConfig { layer_idx: 1, ..Default::default() }, vb)?;
                Ok(Box::new(move |x| layer.states_to_tensor(&layer.seq(x)?)))
            },
            &[Cut::Whole],
        ),
        case(
            "gru",
            &[3, 4, 2],
            |vb| {
                let layer = nn::gru(2, 5, GRUConfig::default(), vb)?;
                Ok(Box::new(move |x| layer.states_to_tensor(&layer.seq(x)?)))
            },
            |vb| {
                let layer = candle_nn::gru(2, 5, GRUConfig::default(), vb)?;
                Ok(Box::new(move |x| layer.states_to_tensor(&layer.seq(x)?)))
            },
            &[Cut::Whole],
        ),
        case(
            "seq",
            &[3, 2, 5],
            |vb| {
                let (down, norm) = (nn::conv1d(2, 4, 3, LINE, &vb.pp("0"))?, nn::group_norm(2, 4, 1e-3, &vb.pp("1"))?);
                boxed(nn::seq().add(down).add(norm).add(candle_nn::Activation::Silu).add_fn(DTensor::sqr))
            },
            |vb| {
                let down = lines(candle_nn::conv1d(2, 4, 3, LINE, vb.pp("0"))?)?;
                let norm = candle_nn::group_norm(2, 4, 1e-3, vb.pp("1"))?;
                boxed_there(
                    candle_nn::seq()
                        .add(move |x: &Tensor| down(x))
                        .add(norm)
                        .add(candle_nn::Activation::Silu)
                        .add_fn(|x| x.sqr()),
                )
            },
            &[Cut::Whole],
        ),
    ]
}

/// Numbers for all variables of a layer, other ones for each name; variances are positive.
fn fill(map: &VarMap) -> candle_core::Result<HashMap<String, Tensor>> {
    let vars = map.data().lock().unwrap();
    let fill = |(name, var): (&String, &Var)| {
        let seed = name.bytes().fold(7u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let numbers = values(var.dims(), seed, DType::F64);
        let numbers = if name.ends_with("running_var") { (numbers.sqr()? + 0.5)? } else { numbers };
        var.set(&numbers)?;
        Ok((name.clone(), numbers))
    };
    vars.iter().map(fill).collect()
}

/// What candle-nn gives: the parameters, the output, and the gradients of the input and of the parameters.
struct Reference {
    parameters: HashMap<String, Tensor>,
    value: Tensor,
    of_input: Tensor,
    of_parameters: HashMap<String, Tensor>,
}

fn reference(case: &Case, x: &Tensor) -> candle_core::Result<Reference> {
    let map = VarMap::new();
    let vb = || VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu).pp("layer");
    drop((case.there)(vb())?);
    let parameters = fill(&map)?;
    let (layer, x) = ((case.there)(vb())?, Var::from_tensor(x)?);
    let value = layer(&x)?;
    let grads = (&value * values(value.dims(), 99, DType::F64))?.sum_all()?.backward()?;
    let vars = map.data().lock().unwrap();
    let of_parameters = vars.iter().filter_map(|(name, var)| Some((name.clone(), grads.get(var)?.clone()))).collect();
    Ok(Reference { parameters, value: value.detach(), of_input: grads.get(&x).unwrap().clone(), of_parameters })
}

fn builder(
    parameters: &HashMap<String, Tensor>,
    mesh: &candle_dist::DeviceMesh,
    plan: Plan,
) -> Result<ShardedVarBuilder> {
    let vb = VarBuilder::from_tensors(parameters.clone(), DType::F64, &Device::Cpu);
    Ok(ShardedVarBuilder::from_candle(vb, 1, mesh, plan)?.pp("layer"))
}

/// The layer with its input laid out so: everything that candle-nn gives.
fn check(case: &Case, cut: Cut, mesh: &candle_dist::DeviceMesh, at: &[Placement]) -> Result<()> {
    let plain = values(case.shape, 5, DType::F64);
    let want = reference(case, &plain)?;
    let vb = builder(&want.parameters, mesh, cut.plan())?;
    let (layer, parameters) = ((case.here)(&vb)?, vb.finish()?);
    let (x, var) = DTensor::distribute(&plain, mesh, at)?.to_var()?;
    let y = layer(&x)?;
    let label = format!("{} {cut:?} of {}", case.name, x.spec());
    let weights = DTensor::distribute(&values(y.dims(), 99, DType::F64), mesh, &vec![Replicate; mesh.ndim()])?;
    let grads = parameters.backward(&y.mul(&weights)?.sum_all()?)?;
    let close = |what: &str, got: &DTensor, want: &Tensor| -> Result<()> {
        let error = value_error(got, want)?;
        assert!(error < 1e-9, "{label}: {what} is off by {error:e}");
        Ok(())
    };
    close("value", &y, &want.value)?;
    let of_input = DTensor::from_local_with_spec(grads.get(&var).unwrap().clone(), x.spec().clone())?;
    close("gradient of the input", &of_input, &want.of_input)?;
    let mut compared = 0;
    for parameter in parameters.iter() {
        match want.of_parameters.get(&parameter.name) {
            Some(want) => close(&parameter.name, &parameter.grad(&grads)?.unwrap(), want)?,
            None => {
                assert!(parameter.is_frozen() && grads.get(&parameter.var).is_none(), "{label}: {}", parameter.name);
            }
        }
        compared += usize::from(!parameter.is_frozen());
    }
    assert_eq!(compared, want.of_parameters.len(), "{label}");
    Ok(())
}

#[test]
fn layers_are_those_of_candle_nn() {
    for axes in [&[1][..], &[2], &[3], &[4], &[2, 2]] {
        on_ranks(axes.iter().product(), "layers", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, axes)?;
            for case in cases() {
                let choices: Vec<_> = (0..case.shape.len()).map(Shard).chain([Replicate]).collect();
                for &cut in case.styles {
                    let layouts = on_axes(&choices, axes.len());
                    // On two axes every third layout, so that the batch and channels are cut together, too.
                    for at in layouts.iter().step_by(if axes.len() > 1 { 3 } else { 1 }) {
                        check(&case, cut, &mesh, at)?;
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn fresh_parameters_are_distributed_as_candles_are() {
    type Built = fn(&ShardedVarBuilder) -> Result<()>;
    type BuiltThere = fn(VarBuilder<'_>) -> candle_core::Result<()>;
    // Parameters of so many elements that their sizes hardly depend on the seed, of which candle has none.
    let layers: [(Built, BuiltThere); 6] = [
        (|vb| nn::conv1d(4, 1024, 3, LINE, vb).map(drop), |vb| candle_nn::conv1d(4, 1024, 3, LINE, vb).map(drop)),
        (|vb| nn::conv2d(4, 1024, 3, IMAGE, vb).map(drop), |vb| candle_nn::conv2d(4, 1024, 3, IMAGE, vb).map(drop)),
        (
            |vb| nn::conv_transpose1d(4, 1024, 3, WIDER_LINE, vb).map(drop),
            |vb| candle_nn::conv_transpose1d(4, 1024, 3, WIDER_LINE, vb).map(drop),
        ),
        (
            |vb| nn::conv_transpose2d(4, 1024, 3, WIDER, vb).map(drop),
            |vb| candle_nn::conv_transpose2d(4, 1024, 3, WIDER, vb).map(drop),
        ),
        (
            |vb| nn::lstm(4, 128, LSTMConfig::default(), vb).map(drop),
            |vb| candle_nn::lstm(4, 128, LSTMConfig::default(), vb).map(drop),
        ),
        (
            |vb| nn::prelu(Some(9), vb).and(nn::gru(8, 128, GRUConfig::default(), &vb.pp("gru"))).map(drop),
            |vb| {
                candle_nn::prelu(Some(9), vb.clone())?;
                candle_nn::gru(8, 128, GRUConfig::default(), vb.pp("gru")).map(drop)
            },
        ),
    ];
    on_ranks(2, "fresh", move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        for (nth, (here, there)) in layers.into_iter().enumerate() {
            let map = VarMap::new();
            there(VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu))?;
            let vb = ShardedVarBuilder::fresh(3, &mesh, Plan::new("a"), DType::F64, &Device::Cpu)?;
            here(&vb)?;
            let (ours, theirs) = (vb.finish()?, map.data().lock().unwrap().clone());
            assert_eq!(ours.len(), theirs.len(), "layer {nth}");
            for parameter in ours.iter() {
                let ours = parameter.tensor.detach().full_tensor()?;
                let theirs = theirs[&parameter.name].as_detached_tensor();
                assert_eq!(ours.dims(), theirs.dims(), "{} of layer {nth}", parameter.name);
                let [here, there] = [&ours, &theirs].map(|x| {
                    let square = x.sqr().unwrap();
                    [square.max_all(), square.mean_all()].map(|x| x.unwrap().to_scalar::<f64>().unwrap().sqrt())
                });
                // Normal numbers have no largest one, but far more than even ones of the same size.
                for ((ours, theirs), within) in here.into_iter().zip(there).zip([0.4, 0.15]) {
                    let label = format!("{} of layer {nth}: {ours} and {theirs}", parameter.name);
                    assert!((ours - theirs).abs() <= within * theirs, "{label}");
                }
            }
        }
        Ok(())
    });
}

/// The numbers of calls forward and backward.
fn calls(layer: &Here, parameters: &Parameters, x: &DTensor) -> Result<[usize; 2]> {
    let (y, forward) = comm::record(|| layer(x));
    let loss = y?.sqr()?.sum_all()?;
    let (grads, backward) = comm::record(|| parameters.backward(&loss));
    grads?;
    Ok([forward.total(), backward.total()])
}

#[test]
fn layers_communicate_what_they_must() {
    // Of an input cut so, whose layer is cut so: calls forward, and backward with a gradient of the input.
    let counts: [(&str, Cut, Placement, [usize; 2]); 12] = [
        ("conv2d", Cut::Whole, Shard(0), [0, 1]),
        ("conv2d", Cut::Colwise, Replicate, [0, 1]),
        ("conv2d", Cut::Rowwise, Shard(1), [1, 0]),
        ("conv_transpose2d", Cut::Whole, Shard(0), [0, 1]),
        ("conv2d_no_bias of channels alone", Cut::Whole, Shard(1), [0, 1]),
        ("group_norm", Cut::Whole, Shard(0), [0, 1]),
        ("group_norm", Cut::Colwise, Shard(1), [0, 0]),
        ("batch_norm in training", Cut::Whole, Shard(0), [2, 3]),
        ("batch_norm in training", Cut::Colwise, Shard(1), [0, 0]),
        ("batch_norm in evaluation", Cut::Whole, Shard(0), [0, 1]),
        ("prelu of channels", Cut::Colwise, Shard(1), [0, 0]),
        ("lstm", Cut::Whole, Shard(0), [0, 1]),
    ];
    on_ranks(2, "calls", move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        for (name, cut, at, want) in counts {
            let case = cases().into_iter().find(|case| case.name == name).unwrap();
            let plain = values(case.shape, 5, DType::F64);
            let vb = builder(&reference(&case, &plain)?.parameters, &mesh, cut.plan())?;
            let (layer, parameters) = ((case.here)(&vb)?, vb.finish()?);
            let x = DTensor::distribute(&plain, &mesh, &[at])?.to_var()?.0;
            assert_eq!(calls(&layer, &parameters, &x)?, want, "{name} {cut:?} of {}", x.spec());
        }
        Ok(())
    });
}

#[test]
fn running_statistics_are_those_of_one_device() {
    const MOMENTUM: BatchNormConfig = BatchNormConfig { eps: 1e-5, remove_mean: true, affine: true, momentum: 0.3 };
    for axes in [&[1][..], &[2], &[3], &[4], &[2, 2]] {
        on_ranks(axes.iter().product(), "statistics", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, axes)?;
            let map = VarMap::new();
            let there = candle_nn::batch_norm(6, MOMENTUM, VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu))?;
            let fresh = |plan| ShardedVarBuilder::fresh(1, &mesh, plan, DType::F64, &Device::Cpu);
            let builders = [fresh(Plan::new("a"))?, fresh(Cut::Colwise.plan())?.pp("layer")];
            let layers = [nn::batch_norm(6, MOMENTUM, &builders[0])?, nn::batch_norm(6, MOMENTUM, &builders[1])?];
            for step in 0..3 {
                let x = values(&[5, 6, 2], step, DType::F64);
                there.forward_t(&x, true)?;
                for (layer, at) in layers.iter().zip([0, 1]) {
                    let mut placements = vec![Replicate; axes.len()];
                    placements[0] = Shard(at);
                    let x = DTensor::distribute(&x, &mesh, &placements)?;
                    // What is computed a second time for its gradients does not move them again.
                    let (x, again) = (x.to_var()?.0, layer.clone());
                    nn::checkpoint(&x, move |x| again.forward_t(x, true))?.sqr()?.sum_all()?.backward()?;
                }
            }
            let x = values(&[5, 6, 2], 9, DType::F64);
            let want = there.forward_t(&x, false)?;
            for (layer, vb) in layers.iter().zip(&builders) {
                assert!(value_error(layer.running_mean(), there.running_mean())? < 1e-12);
                assert!(value_error(layer.running_var(), there.running_var())? < 1e-12);
                let x = DTensor::distribute(&x, &mesh, &vec![Shard(0); axes.len()])?;
                assert!(value_error(&layer.forward_t(&x, false)?, &want)? < 1e-12);
                // They are in what is saved, and no optimizer steps them.
                let parameters = vb.finish()?;
                let saved =
                    parameters.named_tensors().into_iter().find(|(name, _)| name.ends_with("running_var")).unwrap();
                assert!(value_error(&saved.1, there.running_var())? < 1e-12);
                assert!(parameters.iter().filter(|p| p.is_frozen()).count() == 2);
            }
            let one = DTensor::ones((1, 6), DType::F64, &Device::Cpu, &mesh, &vec![Replicate; axes.len()])?;
            assert!(layers[0].forward_t(&one, true).unwrap_err().to_string().contains("more than one"));
            Ok(())
        });
    }
}

#[test]
fn layers_refuse_what_no_rank_could_run() {
    on_ranks(2, "refused", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let vb = |cut: Cut| -> Result<ShardedVarBuilder> {
            Ok(ShardedVarBuilder::fresh(1, &mesh, cut.plan(), DType::F64, &Device::Cpu)?.pp("layer"))
        };
        let refused = |made: Result<String>, why: &str| {
            let error = made.unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        let shown = |layer: Result<nn::Conv2d>| layer.map(|layer| format!("{layer:?}"));
        refused(shown(nn::conv2d(4, 4, 3, depthwise(), &vb(Cut::Colwise)?)), "no style cuts");
        refused(
            shown(nn::conv2d(4, 6, 3, Conv2dConfig { groups: 3, ..IMAGE }, &vb(Cut::Whole)?)),
            "expected a divisor",
        );
        refused(nn::lstm(4, 3, LSTMConfig::default(), &vb(Cut::Colwise)?).map(|l| format!("{l:?}")), "layer");
        refused(nn::prelu(None, &vb(Cut::Colwise)?).map(|l| format!("{l:?}")), "one weight");
        refused(nn::group_norm(3, 4, 1e-3, &vb(Cut::Whole)?).map(|l| format!("{l:?}")), "do not divide");
        refused(nn::batch_norm(4, -1.0, &vb(Cut::Whole)?).map(|l| format!("{l:?}")), "expected at least 0");
        let weight = DTensor::ones((3, 2, 3, 3), DType::F64, &Device::Cpu, &mesh, &[Replicate])?;
        let config = Conv2dConfig { cudnn_fwd_algo: Some(candle_core::conv::CudnnFwdAlgo::Gemm), ..IMAGE };
        let layer = nn::Conv2d::new(weight.clone(), None, config);
        let x = DTensor::ones((1, 2, 4, 4), DType::F64, &Device::Cpu, &mesh, &[Replicate])?;
        refused(layer.forward(&x).map(|y| y.to_string()), "unsupported");
        assert_eq!(nn::Conv2d::new(weight, None, IMAGE).forward(&x)?.dims(), [1, 3, 4, 4]);
        Ok(())
    });
}
