//! Experts that were saved on one mesh load on another.
use super::harness::{Routing, TRAIN, build, config, truth};
use candle_core::{DType, Tensor};
use candle_shard::{Result, Shard, checkpoint};
use test_utils::{Scratch, distance, on_ranks};

#[test]
fn experts_of_one_mesh_load_on_another() {
    let scratch = Scratch::of_ranks("moe-checkpoint");
    let path = scratch.path("saved");
    let options = |sizes: Option<Vec<usize>>| config(5, 2).bias(true).shared_hidden(3).expert_sizes(sizes);
    let saved = path.clone();
    on_ranks(3, "save", move |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("ep", 3)])?;
        let config = options(Some(vec![3, 0, 2]));
        let one = truth(&config, &[9, 6], Routing::Random, DType::F64)?;
        let (layer, parameters) = build(&config, &mesh, &one)?;
        layer.forward(&test_utils::distribute(&one.x, &mesh, &[Shard(0)])?, TRAIN)?;
        layer.update_bias(0.25, None)?;
        checkpoint::save(&saved, &mesh, &parameters.named_tensors())?;
        Ok(())
    });
    let outputs = [[1, 1], [2, 1], [2, 2], [4, 1]].map(|[ep, tp]| {
        let path = path.clone();
        let made = on_ranks(ep * tp, "load", move |ctx| -> Result<Tensor> {
            let mesh = ctx.mesh(&[("ep", ep), ("tp", tp)])?;
            let config = options(None).tensor_axis("tp");
            let one = truth(&config, &[9, 6], Routing::Random, DType::F64)?;
            let (layer, parameters) = build(&config, &mesh, &one)?;
            for parameter in parameters.iter() {
                parameter.var.set(&parameter.var.zeros_like()?)?;
            }
            parameters.load(&path)?;
            for parameter in parameters.iter().filter(|p| p.name == "router.bias") {
                assert!(parameter.var.to_vec1::<f64>()?.contains(&0.25));
            }
            let x = test_utils::distribute(&one.x, &mesh, &[Shard(0), candle_shard::Replicate])?;
            layer.forward(&x, TRAIN)?.output.full_tensor()
        });
        made.into_iter().next().unwrap()
    });
    assert!(outputs.iter().all(|output| distance(output, &outputs[0]) < 1e-12));
    assert!(outputs[0].abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap() > 0.0);
}
