//! Mistakes with checkpoints.
use super::{all_say, builder, line, same};
use candle_core::{DType, Device::Cpu};
use candle_dist::{RankContext, World};
use candle_shard::nn::{Linear, MeshVarBuilder, Parameters};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Replicate, Result, Shard, Weights, checkpoint};
use test_utils::Scratch;

/// A layer of this name and width.
fn model(ctx: &RankContext, name: &str, width: usize) -> Result<Parameters> {
    let vb = builder(&line(ctx, "tp")?, Plan::none())?;
    Linear::new(3, width, false, &vb.pp(name))?;
    vb.finish()
}

fn save(folder: &std::path::Path, ctx: &RankContext, parameters: &Parameters) -> Result<()> {
    checkpoint::save(folder, &line(ctx, "tp")?, &parameters.named_tensors())
}

#[test]
fn a_save_on_rank_0_only() {
    let scratch = Scratch::new("mistake-rank-0");
    let folder = scratch.path("model");
    let ran = World::threads(2).run(|ctx| -> Result<()> {
        let parameters = model(ctx, "up", 4)?;
        if ctx.rank() == 0 { save(&folder, ctx, &parameters) } else { Ok(()) }
    });
    let text = ran.unwrap_err().to_string();
    assert!(text.contains("rank 1 returned while other ranks wait for it"), "{text}");
    assert!(Weights::open(&folder).is_err(), "half of a checkpoint");
}

#[test]
fn another_model() {
    let scratch = Scratch::new("mistake-model");
    let folder = scratch.path("model");
    World::threads(2).run(|ctx| save(&folder, ctx, &model(ctx, "up", 4)?)).unwrap();
    all_say(2, "a checkpoint of another model", &["down.weight"], |ctx| model(ctx, "down", 4)?.load(&folder));
    all_say(2, "a checkpoint of another size", &["up.weight", "[4, 3]", "[5, 3]"], |ctx| {
        model(ctx, "up", 5)?.load(&folder)
    });
    all_say(2, "a builder of another model's files", &["down.weight"], |ctx| {
        let weights = Weights::open(&folder)?;
        let vb = MeshVarBuilder::from_weights(weights, 0, &line(ctx, "tp")?, Plan::none(), DType::F32, &Cpu)?;
        Linear::new(3, 4, false, &vb.pp("down")).map(drop)
    });
    all_say(2, "a folder that is not there", &["nowhere"], |ctx| {
        model(ctx, "up", 4)?.load(scratch.path("nowhere"))
    });
}

#[test]
fn unlike_names_and_folders() {
    let scratch = Scratch::new("mistake-names");
    all_say(2, "a name of each rank", &["layer0"], |ctx| {
        let mesh = line(ctx, "tp")?;
        let x = DTensor::distribute(&same(&[4, 3])?, &mesh, &[Shard(0)])?;
        checkpoint::save(scratch.path("names"), &mesh, &[(format!("layer{}", ctx.rank()), x)])
    });
    all_say(2, "a folder of each rank", &["folder"], |ctx| {
        let mesh = line(ctx, "tp")?;
        let x = DTensor::distribute(&same(&[4, 3])?, &mesh, &[Shard(0)])?;
        checkpoint::save(scratch.path(format!("{}", ctx.rank())), &mesh, &[("x", x)])
    });
    all_say(2, "a sum that nobody reduced", &["redistribute it first"], |ctx| {
        let mesh = line(ctx, "tp")?;
        let x = DTensor::distribute(&same(&[4, 3])?, &mesh, &[Shard(0)])?.sum(0)?;
        checkpoint::save(scratch.path("sum"), &mesh, &[("x", x)])
    });
}

/// Each stage on a mesh of its own, one after the other.
#[test]
fn stages_one_after_the_other_in_one_folder() {
    let scratch = Scratch::new("mistake-stages");
    let folder = scratch.path("model");
    let stage = |ctx: &RankContext, nth: usize| -> Result<()> {
        let mesh = ctx.mesh(&[("pp", 2), ("tp", 1)])?;
        let here = mesh.axis("tp")?; // this rank alone
        let vb = MeshVarBuilder::fresh(1, &here, Plan::none(), DType::F32, &Cpu)?;
        Linear::new(3, 4, false, &vb.pp(format!("layers.{nth}")))?;
        let saved = match ctx.rank() == nth {
            true => checkpoint::save(&folder, &here, &vb.finish()?.named_tensors()),
            false => Ok(()),
        };
        mesh.group()?.barrier()?;
        saved
    };
    World::threads(2).run(|ctx| stage(ctx, 0)).unwrap();
    let text = World::threads(2).run(|ctx| stage(ctx, 1)).unwrap_err().to_string();
    let parts = [
        "has a checkpoint of other tensors, such as \"layers.0.weight\"",
        "\"layers.1.weight\"",
        "save_stages",
    ];
    parts.iter().for_each(|part| assert!(text.contains(part), "{text}"));
    assert_eq!(
        Weights::open(&folder).unwrap().shape("layers.0.weight").unwrap(),
        [4, 3],
        "the first one is still there"
    );
    // A larger or a smaller checkpoint of the same model replaces it.
    let with = |ctx: &RankContext, names: &[&str]| -> Result<()> {
        let mesh = line(ctx, "tp")?;
        let x = DTensor::distribute(&same(&[4, 3])?, &mesh, &[Replicate])?;
        checkpoint::save(&folder, &mesh, &names.iter().map(|name| (*name, x.clone())).collect::<Vec<_>>())
    };
    World::threads(2).run(|ctx| with(ctx, &["layers.0.weight", "optimizer"])).unwrap();
    World::threads(2).run(|ctx| with(ctx, &["layers.0.weight"])).unwrap();
    assert!(Weights::open(&folder).unwrap().shape("optimizer").is_err());
}
