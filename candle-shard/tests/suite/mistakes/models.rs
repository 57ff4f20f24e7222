//! Mistakes in models and their trainings: plans, seeds, names, layers and optimizers.
use super::{Mistake, builder, everywhere, line, of_the_world, on_all_ranks, same};
use candle_core::{DType, Device::Cpu, Tensor};
use candle_nn::ParamsAdamW;
use candle_shard::nn::{
    self, AdamW, FusedQkv, Heads, LayerNorm, Linear, MeshVarBuilder, MoE, MoEConfig, Mode, Module, RNN,
};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{Shard, Weights};
use test_utils::Scratch;

fn colwise() -> Plan {
    Plan::new("tp").with("up", ColwiseParallel::default())
}

const UNLIKE: [Mistake; 8] = [
    (
        "a seed of each rank",
        &["finish: rank 0 has seed 0, and rank 1 has seed 1", "one seed, dtype and plan"],
        |ctx| {
            let vb =
                MeshVarBuilder::fresh(ctx.rank() as u64, &line(ctx, "tp")?, colwise(), DType::F32, &Cpu)?;
            Linear::new(3, 4, true, &vb.pp("up"))?;
            vb.finish().map(drop)
        },
    ),
    ("a dtype of each rank", &["rank 0 has dtype f32, and rank 1 has dtype bf16"], |ctx| {
        let dtype = [DType::F32, DType::BF16][ctx.rank()];
        let vb = MeshVarBuilder::fresh(1, &line(ctx, "tp")?, colwise(), dtype, &Cpu)?;
        Linear::new(3, 4, true, &vb.pp("up"))?;
        vb.finish().map(drop)
    }),
    ("a plan of each rank", &["rank 0 has the line \"up: ", "and rank 1 has the line \"up: "], |ctx| {
        let (rowwise, mesh) = (RowwiseParallel::default(), line(ctx, "tp")?);
        let vb =
            builder(&mesh, if ctx.rank() == 0 { colwise() } else { Plan::new("tp").with("up", rowwise) })?;
        Linear::new(3, 4, true, &vb.pp("up"))?;
        vb.finish().map(drop)
    }),
    (
        "a name of each rank",
        &["rank 0 has the parameter \"layer0.weight\"", "rank 1 has the parameter \"layer1.weight\""],
        |ctx| {
            let vb = builder(&line(ctx, "tp")?, Plan::none())?;
            Linear::new(3, 4, false, &vb.pp(format!("layer{}", ctx.rank())))?;
            vb.finish().map(drop)
        },
    ),
    ("files of each rank", &["rank 0 has parameters of files with the fingerprint"], |ctx| {
        let folder = Scratch::new("unlike");
        let path = folder.path("model.safetensors");
        Tensor::full(ctx.rank() as f32, (4, 3), &Cpu)?.save_safetensors("up.weight", &path)?;
        let (weights, mesh) = (Weights::open(&path)?, line(ctx, "tp")?);
        let vb = MeshVarBuilder::from_weights(weights, 0, &mesh, colwise(), DType::F32, &Cpu)?;
        Linear::new(3, 4, false, &vb.pp("up"))?;
        vb.finish().map(drop)
    }),
    ("tensors that each rank has drawn", &["rank 0 has the tensor \"up.weight\" whose values"], |ctx| {
        let drawn = [("up.weight", Tensor::randn(0f32, 1., (4, 3), &Cpu)?)];
        let vb = MeshVarBuilder::parallelize(drawn, 0, &line(ctx, "tp")?, colwise(), DType::F32, &Cpu)?;
        Linear::new(3, 4, false, &vb.pp("up"))?;
        vb.finish().map(drop)
    }),
    ("a shape of each rank", &["f32[4, 3]", "f32[5, 3]"], |ctx| {
        let vb = builder(&line(ctx, "tp")?, Plan::none())?;
        Linear::new(3, 4 + ctx.rank(), false, &vb.pp("up"))?;
        vb.finish().map(drop)
    }),
    (
        "a layer of one rank",
        &["rank 0 has nothing like it, and rank 1 has the parameter \"up.bias\""],
        |ctx| {
            let vb = builder(&line(ctx, "tp")?, Plan::none())?;
            Linear::new(3, 4, ctx.rank() == 1, &vb.pp("up"))?;
            vb.finish().map(drop)
        },
    ),
];

#[test]
fn models_that_should_be_alike() {
    on_all_ranks(2, &UNLIKE);
}

const PLANS: [Mistake; 12] = [
    ("a typo in a plan", &["\"layer.*.up\" on axis \"tp\" matched no module"], |ctx| {
        let plan = Plan::new("tp").with("layer.*.up", ColwiseParallel::default());
        let vb = builder(&line(ctx, "tp")?, plan)?;
        Linear::new(3, 4, true, &vb.pp("layers.0.up"))?;
        vb.finish().map(drop)
    }),
    ("the name of another axis in a plan", &["\"tp\"", "dp"], |ctx| {
        builder(&line(ctx, "dp")?, colwise()).map(drop)
    }),
    ("an axis that the mesh lacks", &["model"], |ctx| Ok(line(ctx, "tp")?.axis("model").map(drop)?)),
    ("a mesh of another size", &["3"], |ctx| Ok(ctx.mesh(&[("tp", 3)]).map(drop)?)),
    ("two layers without names", &["parameter weight is built twice", "vb.pp(..)"], |ctx| {
        let vb = builder(&line(ctx, "tp")?, Plan::none())?;
        Linear::new(3, 4, true, &vb)?;
        Linear::new(4, 3, true, &vb).map(drop)
    }),
    ("a style for linear layers on a norm", &["does not apply to a Norm"], |ctx| {
        let plan = Plan::new("tp").with("norm", ColwiseParallel::default());
        LayerNorm::new(4, 1e-5, &builder(&line(ctx, "tp")?, plan)?.pp("norm")).map(drop)
    }),
    (
        "inputs of another width",
        &["linear: input f32[4, 3]", "called at ", "models.rs:", "in layer up"],
        |ctx| {
            let vb = builder(&line(ctx, "tp")?, Plan::none())?;
            let up = Linear::new(5, 4, true, &vb.pp("up"))?;
            up.forward(&everywhere(vb.mesh(), &same(&[4, 3])?)?).map(drop)
        },
    ),
    ("images with other channels", &["conv2d: ", "models.rs:", "in layer stem"], |ctx| {
        let vb = builder(&line(ctx, "tp")?, Plan::none())?;
        let stem = nn::conv2d(3, 4, 3, Default::default(), &vb.pp("stem"))?;
        stem.forward(&everywhere(vb.mesh(), &same(&[2, 5, 6, 6])?)?).map(drop)
    }),
    ("a state of another width", &["lstm: an input f32[2, 3]", "models.rs:", "in layer encoder"], |ctx| {
        let vb = builder(&line(ctx, "tp")?, Plan::none())?;
        let encoder = nn::lstm(4, 5, Default::default(), &vb.pp("encoder"))?;
        let x = everywhere(vb.mesh(), &same(&[2, 3])?)?;
        encoder.step(&x, &encoder.zero_state(&x)?).map(drop)
    }),
    ("heads of another width", &["linear: input f32[1, 4, 5]", "models.rs:", "in layer attention"], |ctx| {
        let vb = builder(&line(ctx, "tp")?, Plan::none())?;
        let heads = Heads { query: 4, key_value: 2, dim: 2 };
        let qkv = FusedQkv::new(8, heads, false, &vb.pp("attention"))?;
        qkv.forward(&everywhere(vb.mesh(), &same(&[1, 4, 5])?)?).map(drop)
    }),
    ("tokens of another width", &["moe: ", "models.rs:", "in layer experts"], |ctx| {
        let vb = builder(&line(ctx, "tp")?, Plan::none())?;
        let experts = MoE::new(MoEConfig::new(4, 8, 3, 2), &vb.pp("experts"))?;
        experts.forward(&everywhere(vb.mesh(), &same(&[5, 3])?)?, Mode::Eval).map(drop)
    }),
    (
        "rows that are cut before a norm",
        &["layer_norm: ", "would move by all_to_all over tp", "models.rs:"],
        |ctx| {
            let vb = builder(&line(ctx, "tp")?, Plan::none())?;
            let norm = LayerNorm::new(4, 1e-5, &vb.pp("norm"))?;
            let x = candle_shard::DTensor::distribute(&same(&[4, 4])?, vb.mesh(), &[Shard(1)])?;
            candle_shard::strict(|| norm.forward(&x)).map(drop)
        },
    ),
];

#[test]
fn plans_names_and_layers() {
    on_all_ranks(2, &PLANS);
}

const TRAININGS: [Mistake; 2] = [
    ("a backward pass of a vector", &["backward"], |ctx| {
        let vb = builder(&line(ctx, "tp")?, colwise())?;
        let up = Linear::new(3, 4, true, &vb.pp("up"))?;
        let y = up.forward(&everywhere(vb.mesh(), &same(&[4, 3])?)?)?;
        vb.finish()?.backward(&y).map(drop)
    }),
    ("the same parameter twice in an optimizer", &["up.weight"], |ctx| {
        let vb = builder(&line(ctx, "tp")?, colwise())?;
        Linear::new(3, 4, false, &vb.pp("up"))?;
        let (parameters, params) = (vb.finish()?, ParamsAdamW::default());
        let mut optimizer = AdamW::new(&parameters, params.clone())?;
        optimizer.add_group(candle_shard::nn::ParamGroup::new(&parameters, params))
    }),
];

#[test]
fn trainings() {
    on_all_ranks(2, &TRAININGS);
}

const ALONE: [Mistake; 3] = [
    ("one rank completes its model", &["finish"], |ctx| {
        let vb = builder(&line(ctx, "tp")?, colwise())?;
        Linear::new(3, 4, true, &vb.pp("up"))?;
        if ctx.rank() == 0 { vb.finish().map(drop) } else { Ok(()) }
    }),
    ("one rank runs a layer", &["all_reduce"], |ctx| {
        let plan = Plan::new("tp").with("down", RowwiseParallel::default());
        let vb = builder(&line(ctx, "tp")?, plan)?;
        let down = Linear::new(4, 4, true, &vb.pp("down"))?;
        let x = everywhere(vb.mesh(), &same(&[2, 4])?)?;
        vb.finish()?;
        if ctx.rank() == 0 { down.forward(&x).map(drop) } else { Ok(()) }
    }),
    ("one rank clips its gradients", &["all_reduce"], |ctx| {
        let vb = builder(&line(ctx, "tp")?, colwise())?;
        let up = Linear::new(3, 4, true, &vb.pp("up"))?;
        let parameters = vb.finish()?;
        let loss = up.forward(&everywhere(vb.mesh(), &same(&[2, 3])?)?)?.sqr()?.mean_all()?;
        let mut grads = parameters.backward(&loss)?;
        let mut optimizer = AdamW::new(&parameters, ParamsAdamW::default())?;
        if ctx.rank() == 1 {
            parameters.clip(&mut grads, 1.0)?;
        }
        optimizer.step(&grads)
    }),
];

#[test]
fn steps_of_one_rank() {
    of_the_world(&ALONE);
}

/// Runs this test program again as [`as_child`], and returns what it prints on stderr.
fn child(how: &str) -> String {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["mistakes::models::as_child", "--exact", "--nocapture", "--test-threads", "1"]);
    let output = command.env("MISTAKE", how).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// A program without a logger, whose mistake is none of an op.
#[test]
fn as_child() {
    let Ok(how) = std::env::var("MISTAKE") else { return };
    let run = |ctx: &candle_dist::RankContext| -> candle_shard::Result<()> {
        let plan = Plan::new("tp").with("layer.*.up", ColwiseParallel::default());
        let vb = builder(&line(ctx, "tp")?, if how == "move" { Plan::none() } else { plan })?;
        let up = Linear::new(4, 4, true, &vb.pp("layers.0.up"))?;
        let norm = LayerNorm::new(4, 1e-5, &vb.pp("norm"))?;
        let x = candle_shard::DTensor::distribute(&same(&[4, 4])?, vb.mesh(), &[Shard(1)])?;
        match how.as_str() {
            "move" => norm.forward(&x).map(drop),
            "constants" => {
                vb.built().backward(&everywhere(vb.mesh(), &same(&[4, 4])?)?.mean_all()?).map(drop)
            }
            "another" => {
                let other = builder(vb.mesh(), Plan::none())?;
                let loss = Linear::new(4, 4, true, &other)?.forward(&x)?.mean_all()?;
                vb.built().backward(&loss).map(drop)
            }
            "unused" => {
                let mut optimizer = AdamW::new(&vb.built(), ParamsAdamW::default())?;
                optimizer.step(&candle_core::backprop::GradStore::default())
            }
            "finished" => vb.finish().map(drop).or(Ok(())),
            "failed" => Linear::new(4, 4, true, &vb.pp("layers.0.up")).map(drop).or(Ok(())),
            _ => up.forward(&x).map(drop),
        }
    };
    candle_dist::World::threads(2).run(run).unwrap();
}

#[test]
fn what_is_no_error_is_a_warning_without_a_logger_too() {
    let said = child("unfinished");
    let want = "warning: \"layer.*.up\" in the plan for axis \"tp\" matched no module of the model, and nobody called";
    assert_eq!(said.matches(want).count(), 1, "{said}");
    for known in ["finished", "failed"] {
        let said = child(known);
        assert!(!said.contains("matched no module"), "{known}: {said}");
    }
    for (mistake, parts) in [
        ("constants", ["warning: backward: the loss depends on no variable", "so there is no gradient"]),
        (
            "another",
            [
                "warning: Parameters::backward: the loss depends on none of these parameters",
                "such as \"layers.0.up.",
            ],
        ),
        ("unused", ["warning: a step of AdamW changes nothing", "such as \"layers.0.up."]),
    ] {
        let said = child(mistake);
        parts.iter().for_each(|part| assert!(said.contains(part), "{part}: {said}"));
    }
    let said = child("move");
    let parts =
        ["warning: layer_norm at ", "models.rs:", "would move by all_to_all over tp", "candle_shard::strict"];
    parts.iter().for_each(|part| assert!(said.contains(part), "{part}: {said}"));
}
