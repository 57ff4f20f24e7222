//! candle-nn's layers on every mesh, against candle-nn: values, the gradients of inputs and of all parameters, collectives.
mod batch_norm;
mod cases;
mod recurrent;

use crate::common::*;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::comm;
use candle_nn::rnn::{GRUConfig, LSTMConfig, RNN as _};
use candle_nn::{
    BatchNormConfig, Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig, Module as _,
    ModuleT as _, VarBuilder, VarMap,
};
use candle_shard::nn::{self, MeshVarBuilder, Module, ModuleT, Parameters, RNN};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel, SequenceParallel, Style};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use cases::*;
use std::collections::{BTreeMap, HashMap};
use test_utils::on_ranks;

type Here = Box<dyn Fn(&DTensor) -> Result<DTensor>>;
type There = Box<dyn Fn(&Tensor) -> candle_core::Result<Tensor>>;

/// A layer in both forms, for an input of this shape, and the styles that a plan may give it.
struct Case {
    name: &'static str,
    shape: &'static [usize],
    here: fn(&MeshVarBuilder) -> Result<Here>,
    there: fn(VarBuilder<'_>) -> candle_core::Result<There>,
    styles: &'static [Cut],
}

/// How a plan cuts a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Cut {
    Whole,
    Colwise,
    Rowwise,
    Sequence,
}

const ALL: &[Cut] = &[Cut::Whole, Cut::Colwise, Cut::Rowwise];
const BY_CHANNELS: &[Cut] = &[Cut::Whole, Cut::Colwise];
const BY_ROWS: &[Cut] = &[Cut::Whole, Cut::Sequence];

impl Cut {
    fn plan(self) -> Plan {
        let style: Style = match self {
            Self::Whole => return Plan::new("a"),
            Self::Colwise => ColwiseParallel::default().into(),
            Self::Rowwise => RowwiseParallel::default().into(),
            Self::Sequence => SequenceParallel::default().into(),
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
    let of_parameters =
        vars.iter().filter_map(|(name, var)| Some((name.clone(), grads.get(var)?.clone()))).collect();
    Ok(Reference {
        parameters,
        value: value.detach(),
        of_input: grads.get(&x).unwrap().clone(),
        of_parameters,
    })
}

fn builder(
    parameters: &HashMap<String, Tensor>,
    mesh: &candle_dist::DeviceMesh,
    plan: Plan,
) -> Result<MeshVarBuilder> {
    let vb = VarBuilder::from_tensors(parameters.clone(), DType::F64, &device());
    Ok(MeshVarBuilder::from_candle(vb, 1, mesh, plan)?.pp("layer"))
}

/// The layer with its input laid out so: everything that candle-nn gives.
fn check(case: &Case, cut: Cut, mesh: &candle_dist::DeviceMesh, at: &[Placement]) -> Result<()> {
    let plain = values(case.shape, 5, DType::F64);
    let want = reference(case, &plain)?;
    let vb = builder(&want.parameters, mesh, cut.plan())?;
    let (layer, parameters) = ((case.here)(&vb)?, vb.finish()?);
    let (x, var) = distribute(&plain, mesh, at)?.to_var()?;
    let y = layer(&x)?;
    let label = format!("{} {cut:?} of {}", case.name, x.spec());
    let weights = distribute(&values(y.dims(), 99, DType::F64), mesh, &vec![Replicate; mesh.ndim()])?;
    let grads = parameters.backward(&y.mul(&weights)?.sum_all()?)?;
    let close = |what: &str, got: &DTensor, want: &Tensor| -> Result<()> {
        let error = value_error(got, want)?;
        assert!(error < 1e-9, "{label}: {what} is off by {error:e}");
        Ok(())
    };
    close("value", &y, &want.value)?;
    let of_input = DTensor::from_local_with_spec(grads.get(&var).unwrap().clone(), x.spec().clone())?;
    close("gradient of the input", &of_input, &want.of_input)?;
    // A plan may make each gate a parameter of its own, with the rows of one in candle-nn.
    let mut found: BTreeMap<&str, Vec<Tensor>> = BTreeMap::new();
    for parameter in parameters.iter() {
        let Some(grad) = parameter.grad(&grads)? else {
            assert!(parameter.is_frozen(), "{label}: {}", parameter.name);
            continue;
        };
        let whole = match want.of_parameters.contains_key(&parameter.name) {
            true => &parameter.name,
            false => parameter.name.rsplit_once('.').unwrap().0,
        };
        found.entry(whole).or_default().push(grad.full_tensor()?);
    }
    assert_eq!(found.len(), want.of_parameters.len(), "{label}");
    for (name, rows) in found {
        let (got, want) = (Tensor::cat(&rows, 0)?, &want.of_parameters[name]);
        let error = test_utils::distance(&got, want);
        assert!(error < 1e-9, "{label}: {name} is off by {error:e}");
    }
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
    type Built = fn(&MeshVarBuilder) -> Result<()>;
    type BuiltThere = fn(VarBuilder<'_>) -> candle_core::Result<()>;
    // Parameters of so many elements that their sizes hardly depend on the seed, of which candle has none.
    let layers: [(Built, BuiltThere); 6] = [
        (
            |vb| nn::conv1d(4, 1024, 3, LINE, vb).map(drop),
            |vb| candle_nn::conv1d(4, 1024, 3, LINE, vb).map(drop),
        ),
        (
            |vb| nn::conv2d(4, 1024, 3, IMAGE, vb).map(drop),
            |vb| candle_nn::conv2d(4, 1024, 3, IMAGE, vb).map(drop),
        ),
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
            let vb = MeshVarBuilder::fresh(3, &mesh, Plan::new("a"), DType::F64, &device())?;
            here(&vb)?;
            let (ours, theirs) = (vb.finish()?, map.data().lock().unwrap().clone());
            assert_eq!(ours.len(), theirs.len(), "layer {nth}");
            for parameter in ours.iter() {
                let ours = parameter.tensor.detach().full_tensor()?;
                let theirs = theirs[&parameter.name].as_detached_tensor();
                assert_eq!(ours.dims(), theirs.dims(), "{} of layer {nth}", parameter.name);
                let [here, there] = [&ours, &theirs].map(|x| {
                    let square = x.sqr().unwrap();
                    [square.max_all(), square.mean_all()]
                        .map(|x| x.unwrap().to_scalar::<f64>().unwrap().sqrt())
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
            let x = distribute(&plain, &mesh, &[at])?.to_var()?.0;
            assert_eq!(calls(&layer, &parameters, &x)?, want, "{name} {cut:?} of {}", x.spec());
        }
        Ok(())
    });
}

#[test]
fn running_statistics_are_those_of_one_device() {
    const MOMENTUM: BatchNormConfig =
        BatchNormConfig { eps: 1e-5, remove_mean: true, affine: true, momentum: 0.3 };
    for axes in [&[1][..], &[2], &[3], &[4], &[2, 2]] {
        on_ranks(axes.iter().product(), "statistics", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, axes)?;
            let map = VarMap::new();
            let there =
                candle_nn::batch_norm(6, MOMENTUM, VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu))?;
            let fresh = |plan| MeshVarBuilder::fresh(1, &mesh, plan, DType::F64, &device());
            let builders = [fresh(Plan::new("a"))?, fresh(Cut::Colwise.plan())?.pp("layer")];
            let layers =
                [nn::batch_norm(6, MOMENTUM, &builders[0])?, nn::batch_norm(6, MOMENTUM, &builders[1])?];
            for step in 0..3 {
                let x = values(&[5, 6, 2], step, DType::F64);
                there.forward_t(&x, true)?;
                for (layer, at) in layers.iter().zip([0, 1]) {
                    let mut placements = vec![Replicate; axes.len()];
                    placements[0] = Shard(at);
                    let x = distribute(&x, &mesh, &placements)?;
                    // What is computed a second time for its gradients does not move them again.
                    let (x, again) = (x.to_var()?.0, layer.clone());
                    nn::recompute(&x, move |x| again.forward_t(x, true))?.sqr()?.sum_all()?.backward()?;
                }
            }
            let x = values(&[5, 6, 2], 9, DType::F64);
            let want = there.forward_t(&x, false)?;
            for (layer, vb) in layers.iter().zip(&builders) {
                assert!(value_error(layer.running_mean(), there.running_mean())? < 1e-12);
                assert!(value_error(layer.running_var(), there.running_var())? < 1e-12);
                let x = distribute(&x, &mesh, &vec![Shard(0); axes.len()])?;
                assert!(value_error(&layer.forward_t(&x, false)?, &want)? < 1e-12);
                // They are in what is saved, and no optimizer steps them.
                let parameters = vb.finish()?;
                let saved = parameters
                    .named_tensors()
                    .into_iter()
                    .find(|(name, _)| name.ends_with("running_var"))
                    .unwrap();
                assert!(value_error(&saved.1, there.running_var())? < 1e-12);
                assert!(parameters.iter().filter(|p| p.is_frozen()).count() == 2);
            }
            let one = DTensor::ones((1, 6), DType::F64, &device(), &mesh, &vec![Replicate; axes.len()])?;
            assert!(layers[0].forward_t(&one, true).unwrap_err().to_string().contains("more than one"));
            Ok(())
        });
    }
}

#[test]
fn layers_refuse_what_no_rank_could_run() {
    on_ranks(2, "refused", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let vb = |cut: Cut| -> Result<MeshVarBuilder> {
            Ok(MeshVarBuilder::fresh(1, &mesh, cut.plan(), DType::F64, &device())?.pp("layer"))
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
        refused(
            nn::lstm(4, 3, LSTMConfig::default(), &vb(Cut::Rowwise)?).map(|l| format!("{l:?}")),
            "ColwiseParallel",
        );
        refused(
            nn::DynamicTanh::new(4, 0.5, &vb(Cut::Colwise)?).map(|l| format!("{l:?}")),
            "SequenceParallel",
        );
        refused(nn::prelu(None, &vb(Cut::Colwise)?).map(|l| format!("{l:?}")), "one weight");
        refused(nn::group_norm(3, 4, 1e-3, &vb(Cut::Whole)?).map(|l| format!("{l:?}")), "do not divide");
        refused(nn::batch_norm(4, -1.0, &vb(Cut::Whole)?).map(|l| format!("{l:?}")), "expected at least 0");
        let weight = DTensor::ones((3, 2, 3, 3), DType::F64, &device(), &mesh, &[Replicate])?;
        let config = Conv2dConfig { cudnn_fwd_algo: Some(candle_core::conv::CudnnFwdAlgo::Gemm), ..IMAGE };
        let layer = nn::Conv2d::new(weight.clone(), None, config);
        let x = DTensor::ones((1, 2, 4, 4), DType::F64, &device(), &mesh, &[Replicate])?;
        refused(layer.forward(&x).map(|y| y.to_string()), "unsupported");
        let norm = nn::DynamicTanh::new(4, 0.5, &vb(Cut::Whole)?)?;
        let column = DTensor::ones((3, 1), DType::F64, &device(), &mesh, &[Shard(0)])?;
        refused(norm.forward(&column).map(|y| y.to_string()), "f64[3@a, 1]: expected a last dim of 4");
        assert_eq!(nn::Conv2d::new(weight, None, IMAGE).forward(&x)?.dims(), [1, 3, 4, 4]);
        Ok(())
    });
}
