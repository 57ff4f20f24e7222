//! Small models of all families in 16 bits against themselves in 32: what a part computes in another dtype than the model's shows here.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_dist::RankContext;
use candle_lm::cache::Cache;
use candle_lm::config::Config;
use candle_lm::files::Files;
use candle_lm::model::Decoder;
use candle_shard::nn::MeshVarBuilder;
use test_utils::on_ranks;

use crate::lm::families::{Family, families, stored};

/// The logits `[tokens, vocabulary]` of what follows each token, computed in a dtype: those of a part at once, and of the others one by one.
fn logits(ctx: &RankContext, path: &Path, prompt: &[u32], dtype: DType) -> anyhow::Result<Tensor> {
    let files = Files::open(path)?;
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let plan = Decoder::plan(&files.config, "tp");
    let vb = MeshVarBuilder::from_weights(files.weights(), 0, &mesh, plan, dtype, &Device::Cpu)?.frozen();
    let model = Decoder::new(&files.config, prompt.len(), &vb)?;
    vb.finish()?;
    let mut cache = Cache::of(&files.config, prompt.len());
    let (first, rest) = prompt.split_at(prompt.len() - 2);
    let mut rows = Vec::new();
    for tokens in [first].into_iter().chain(rest.chunks(1)) {
        let tokens = Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu)?;
        rows.push(model.forward_cached(&tokens, &mut cache)?.squeeze(0)?.to_dtype(DType::F32)?);
    }
    Ok(Tensor::cat(&rows, 0)?)
}

/// The norm of a difference, as a part of that of what is expected.
fn off(got: &Tensor, want: &Tensor) -> f32 {
    let norm = |x: Tensor| x.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
    norm((got - want).unwrap()) / norm(want.clone())
}

#[test]
fn each_family_computes_in_16_bits_what_it_does_in_32_on_every_mesh() {
    let prompt = families().prompt;
    for Family { case, config, .. } in families().models {
        // In bf16 a token may choose another expert, whose score is nearly the same.
        let is_mixture = ["mixture", "moe", "mixtral", "minimax"].iter().any(|name| case.contains(name));
        for (dtype, bound) in [(DType::BF16, if is_mixture { 0.15 } else { 0.05 }), (DType::F16, 0.01)] {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
            let mut tensors = stored(&Config::read(folder.path(), &[]).unwrap());
            tensors.values_mut().for_each(|tensor| *tensor = tensor.to_dtype(dtype).unwrap());
            candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
            let computed = |ranks: usize, dtype: DType| -> Vec<Tensor> {
                let (path, prompt) = (folder.path().to_owned(), prompt.clone());
                on_ranks(ranks, &case, move |ctx| logits(ctx, &path, &prompt, dtype))
            };
            let want = computed(1, DType::F32).swap_remove(0);
            for ranks in 1..=3 {
                let all = computed(ranks, dtype);
                let got = off(&all[0], &want);
                assert!(got < bound, "{case} in {dtype:?} on {ranks} ranks: off by {got} of its norm");
                let same = |logits: &Tensor| logits.to_vec2::<f32>().unwrap();
                assert!(
                    all.iter().all(|logits| same(logits) == same(&all[0])),
                    "{case} in {dtype:?} on {ranks} ranks"
                );
            }
        }
    }
}
