//! Latent attention in both of its forms, against one device.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::comm;
use candle_shard::nn::{
    Adapter, LatentCache, LatentHeads, LatentProjection, Linear, LoraOptions, MeshVarBuilder, Parameters,
    RmsNorm, TextCache, TextTokens, Width,
};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{Attention, DTensor, Replicate, Result, Shard};
use std::collections::HashMap;
use std::sync::Arc;
use test_utils::on_ranks;

const SEED: u64 = 11;
const HIDDEN: usize = 7;
const LATENT: usize = 6;
const COMMON: usize = 2;
const KEY: usize = 4;
const VALUE: usize = 3;
const EPS: f64 = 1e-6;

/// Heads that divide by the ranks and that do not, and fewer than ranks.
const HEADS: [usize; 4] = [4, 3, 5, 1];

/// Latent attention whose common parts are not turned.
struct Layer {
    query: Linear,
    down: Linear,
    norm: RmsNorm,
    up: LatentProjection,
    out: Linear,
}

impl Layer {
    fn new(count: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let heads = LatentHeads { count, key: KEY, value: VALUE };
        Ok(Self {
            query: Linear::new(HIDDEN, Width::new(count, KEY + COMMON), false, &vb.pp("query"))?,
            down: Linear::new(HIDDEN, LATENT + COMMON, false, &vb.pp("down"))?,
            norm: RmsNorm::new(LATENT, EPS, &vb.pp("norm"))?,
            up: LatentProjection::new(LATENT, heads, 1, &vb.pp("up"))?,
            out: Linear::new(Width::new(count, VALUE), HIDDEN, false, &vb.pp("out"))?,
        })
    }

    /// Queries `[batch, heads, tokens, ..]`, latents `[batch, tokens, ..]`, and common parts `[batch, 1, tokens, ..]`.
    fn parts(&self, x: &DTensor) -> Result<[DTensor; 3]> {
        let query = self.query.forward(x)?.split_units(2, KEY + COMMON)?.transpose(1, 2)?;
        let both = self.down.forward(x)?;
        let latents = self.norm.forward(&both.narrow(2, 0, LATENT)?)?;
        Ok([query, latents, both.narrow(2, LATENT, COMMON)?.unsqueeze(1)?])
    }

    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let [query, latents, common] = self.parts(x)?;
        let [key, value] = self.up.expand(&latents, &common)?;
        let rows_first = |x: &DTensor| x.transpose(1, 2);
        let mixed = Attention::default().causal(true).of(
            &rows_first(&query)?,
            &rows_first(&key)?,
            &rows_first(&value)?,
        )?;
        self.out.forward(&mixed.flatten_from(2)?)
    }

    /// New tokens of texts, one behind another, over caches.
    fn decode(&self, x: &DTensor, texts: Vec<TextTokens<'_>>) -> Result<DTensor> {
        let [query, latents, common] = self.parts(x)?;
        let absorbed = self.up.absorb(&query.narrow(3, 0, KEY)?)?;
        let query = DTensor::cat(&[absorbed, query.narrow(3, KEY, COMMON)?], 3)?;
        let keys = DTensor::cat(&[latents.unsqueeze(1)?, common], 3)?;
        let scale = 1.0 / ((KEY + COMMON) as f64).sqrt();
        let attention = Attention::default().causal(true).scale(scale);
        let mixed = attention.of_texts([&query, &keys, &keys.narrow(3, 0, LATENT)?], texts)?;
        self.out.forward(&self.up.values(&mixed)?.flatten_from(2)?)
    }
}

fn plan() -> Plan {
    Plan::new("tp")
        .with("query", ColwiseParallel::default())
        .with("up", ColwiseParallel::default())
        .with("out", RowwiseParallel::default().output(Replicate))
}

/// The values and gradients of one device.
struct Step {
    value: Tensor,
    input_grad: Tensor,
    grads: HashMap<String, Tensor>,
}

fn input() -> Tensor {
    values(&[2, 5, HIDDEN], 8, DType::F64)
}

fn plain_step(count: usize) -> candle_core::Result<Step> {
    let draw = |name: &str, rows: usize, columns: usize| {
        let bound = 1.0 / (columns as f64).sqrt();
        let even = Distribution::Uniform { lo: -bound, up: bound };
        let whole = sample_full(Stream::new(SEED, name), even, &[rows, columns], DType::F64, &Device::Cpu)?;
        Ok::<_, candle_core::Error>((name.to_string(), Var::from_tensor(&whole)?))
    };
    let vars = [
        draw("query.weight", count * (KEY + COMMON), HIDDEN)?,
        draw("down.weight", LATENT + COMMON, HIDDEN)?,
        draw("up.weight", count * (KEY + VALUE), LATENT)?,
        draw("out.weight", HIDDEN, count * VALUE)?,
        ("norm.weight".to_string(), Var::ones(LATENT, DType::F64, &Device::Cpu)?),
    ];
    let [query, down, up, out, norm] = &vars;
    let x = Var::from_tensor(&input())?;
    let (batch, tokens, _) = x.dims3()?;
    let heads =
        |y: Tensor, width: usize| y.reshape((batch, tokens, count, width))?.transpose(1, 2)?.contiguous();
    let q = heads(x.broadcast_matmul(&query.1.t()?)?, KEY + COMMON)?;
    let both = x.broadcast_matmul(&down.1.t()?)?;
    let latents = both.narrow(2, 0, LATENT)?;
    let mean = (latents.sqr()?.mean_keepdim(2)? + EPS)?.sqrt()?;
    let latents = latents.broadcast_div(&mean)?.broadcast_mul(&norm.1)?;
    let common = both.narrow(2, LATENT, COMMON)?.unsqueeze(1)?;
    let common = common.broadcast_as((batch, count, tokens, COMMON))?.contiguous()?;
    let made = heads(latents.broadcast_matmul(&up.1.t()?)?, KEY + VALUE)?;
    let k = Tensor::cat(&[made.narrow(3, 0, KEY)?, common], 3)?;
    let v = made.narrow(3, KEY, VALUE)?.contiguous()?;
    let hidden: Vec<f64> =
        (0..tokens * tokens).map(|i| if i % tokens > i / tokens { f64::NEG_INFINITY } else { 0.0 }).collect();
    let hidden = Tensor::from_vec(hidden, (tokens, tokens), &Device::Cpu)?;
    let scores = (q.matmul(&k.t()?.contiguous()?)? / ((KEY + COMMON) as f64).sqrt())?;
    let weights = candle_nn::ops::softmax(&scores.broadcast_add(&hidden)?, 3)?;
    let mixed = weights.matmul(&v)?.transpose(1, 2)?.contiguous()?.reshape((batch, tokens, count * VALUE))?;
    let value = mixed.broadcast_matmul(&out.1.t()?)?;
    let grads = value.sqr()?.mean_all()?.backward()?;
    let named = vars.iter().map(|(name, var)| (name.clone(), grads.get(var).unwrap().clone()));
    Ok(Step { value: value.detach(), input_grad: grads.get(&x).unwrap().clone(), grads: named.collect() })
}

fn compare(layer: &Layer, parameters: &Parameters, lays: &[Lay], step: &Step) -> Result<()> {
    let mesh = layer.up.weight().mesh();
    let leaf = Leaf::new(&input(), mesh, lays)?;
    let y = layer.forward(&leaf.tensor)?;
    assert!(distance(&y.full_tensor()?, &step.value) < 1e-11);
    let grads = parameters.backward(&y.sqr()?.mean_all()?)?;
    assert!(leaf.gradient_error(&grads, &step.input_grad)? < 1e-11);
    assert_eq!(parameters.len(), step.grads.len());
    for parameter in parameters.iter() {
        let error = distance(&parameter.grad(&grads)?.unwrap().full_tensor()?, &step.grads[&parameter.name]);
        assert!(error < 1e-11, "{}: {error:e}", parameter.name);
    }
    Ok(())
}

#[test]
fn values_and_gradients_equal_one_device_on_all_meshes() {
    for count in HEADS {
        let step = Arc::new(plain_step(count).unwrap());
        let [whole, rows, tokens] = [Replicate, Shard(0), Shard(1)].map(Lay::At);
        type Axes = &'static [(&'static str, usize)];
        let meshes: [(Axes, Vec<Lay>); 8] = [
            (&[("tp", 1)], vec![whole]),
            (&[("tp", 2)], vec![whole]),
            (&[("tp", 3)], vec![whole]),
            (&[("tp", 4)], vec![whole]),
            (&[("dp", 2), ("tp", 2)], vec![rows, whole]),
            (&[("cp", 2), ("tp", 1)], vec![tokens, whole]),
            (&[("cp", 2), ("tp", 2)], vec![tokens, whole]),
            (&[("cp", 3), ("tp", 1)], vec![tokens, whole]),
        ];
        for (axes, lays) in meshes {
            let (step, axes) = (step.clone(), axes.to_vec());
            let world = axes.iter().map(|(_, n)| n).product();
            on_ranks(world, &format!("{count} heads on {axes:?}"), move |ctx| -> Result<()> {
                let mesh = ctx.mesh(&axes)?;
                let vb = MeshVarBuilder::fresh(SEED, &mesh, plan(), DType::F64, &device())?;
                let layer = Layer::new(count, &vb)?;
                compare(&layer, &vb.finish()?, &lays, &step)
            });
        }
    }
}

/// New tokens of each of two texts in each step.
const STEPS: [[usize; 2]; 4] = [[3, 0], [1, 4], [1, 1], [2, 1]];

/// The tokens `[1, tokens, hidden]` of a text.
fn text(which: usize, tokens: usize) -> Tensor {
    values(&[1, tokens, HIDDEN], 20 + which as u64, DType::F64)
}

/// Compares texts that are decoded together, over caches of latents, with each text at once in the expanded form.
fn decodes(layer: &Layer, calls: usize) -> Result<()> {
    let mesh = layer.up.weight().mesh().clone();
    let lengths = [0, 1].map(|which| STEPS.iter().map(|step| step[which]).sum::<usize>());
    let mut want = Vec::new();
    for (which, length) in lengths.into_iter().enumerate() {
        want.push(layer.forward(&distribute(&text(which, length), &mesh, &[Replicate])?)?.full_tensor()?);
    }
    let (mut caches, mut seen) = ([LatentCache::new(2, 3), LatentCache::new(2, 3)], [0, 0]);
    for step in STEPS {
        let mut parts = Vec::new();
        for (which, tokens) in step.into_iter().enumerate().filter(|(_, tokens)| *tokens > 0) {
            parts.push(text(which, lengths[which]).narrow(1, seen[which], tokens)?);
        }
        let x = distribute(&Tensor::cat(&parts, 1)?, &mesh, &[Replicate])?;
        let texts = caches.iter_mut().zip(step).filter(|(_, tokens)| *tokens > 0);
        let texts = texts.map(|(cache, tokens)| TextTokens { tokens, cache: TextCache::Latent(cache) });
        let texts: Vec<_> = texts.collect();
        let (y, sent) = comm::record(|| layer.decode(&x, texts));
        assert!(sent.total() <= calls, "{sent}");
        let (y, mut start) = (y?.full_tensor()?, 0);
        for (which, tokens) in step.into_iter().enumerate() {
            let error = match tokens {
                0 => 0.0,
                _ => distance(&y.narrow(1, start, tokens)?, &want[which].narrow(1, seen[which], tokens)?),
            };
            assert!(error < 1e-12, "text {which}, token {}: {error:e}", seen[which]);
            (start, seen[which]) = (start + tokens, seen[which] + tokens);
            assert_eq!(caches[which].current_seq_len(), seen[which]);
        }
    }
    Ok(())
}

#[test]
fn caches_of_latents_give_what_the_expanded_form_gives() {
    for count in HEADS {
        for world in 1..=4 {
            on_ranks(world, &format!("{count} heads on {world}"), move |ctx| -> Result<()> {
                let mesh = ctx.mesh(&[("tp", world)])?;
                let vb = MeshVarBuilder::fresh(SEED, &mesh, plan(), DType::F64, &device())?.frozen();
                let layer = Layer::new(count, &vb)?;
                vb.finish()?;
                // The sum of the output layer.
                decodes(&layer, 1)
            });
        }
    }
}

#[test]
fn adapters_of_the_weight_change_both_forms_alike() {
    for dora in [false, true] {
        for world in 1..=3 {
            on_ranks(world, &format!("{dora} on {world}"), move |ctx| -> Result<()> {
                let mesh = ctx.mesh(&[("tp", world)])?;
                let build = |adapters: Vec<Adapter>| {
                    let vb = MeshVarBuilder::fresh(SEED, &mesh, plan(), DType::F64, &device())?;
                    let vb = if adapters.is_empty() { vb } else { vb.with_adapters(adapters)? }.frozen();
                    let layer = Layer::new(3, &vb)?;
                    let parameters = vb.finish()?;
                    // Fresh ones add nothing.
                    for b in parameters.iter().filter(|parameter| parameter.name.contains("lora_B")) {
                        b.var.set(&b.var.ones_like()?)?;
                    }
                    Ok::<_, candle_shard::Error>(layer)
                };
                let options = LoraOptions::new(2).alpha(3.0).dora(dora);
                let adapted = build(vec![Adapter::new("one").with("up", options)])?;
                let x = distribute(&text(0, 4), &mesh, &[Replicate])?;
                let [adapted_y, plain_y] =
                    [adapted.forward(&x)?.full_tensor()?, build(vec![])?.forward(&x)?.full_tensor()?];
                assert!(distance(&adapted_y, &plain_y) > 1e-3);
                // Magnitudes of rows may lie in other sizes than the rows.
                decodes(&adapted, if dora { 5 } else { 1 })
            });
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused_alike() {
    let said = on_ranks(2, "refused", |ctx| -> Result<Vec<String>> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let vb = MeshVarBuilder::fresh(SEED, &mesh, plan(), DType::F64, &device())?;
        let heads = LatentHeads { count: 3, key: KEY, value: VALUE };
        let of = |shape: &[usize]| distribute(&values(shape, 1, DType::F64), &mesh, &[Replicate]);
        let mut said = Vec::new();
        let none = LatentHeads { value: 0, ..heads };
        for (heads, together) in [(none, 1), (heads, 2), (heads, 0)] {
            said.push(LatentProjection::new(LATENT, heads, together, &vb.pp("up")).unwrap_err().to_string());
        }
        let up = LatentProjection::new(LATENT, heads, 3, &vb.pp("up"))?;
        let latents = of(&[1, 4, LATENT])?;
        for common in [of(&[1, 1, 3, COMMON])?, of(&[1, 3, 4, COMMON])?, of(&[1, 4, COMMON])?] {
            said.push(up.expand(&latents, &common).unwrap_err().to_string());
        }
        said.push(up.absorb(&of(&[1, 3, 4, KEY + 1])?).unwrap_err().to_string());
        // Values that would not be in the keys.
        let attention = Attention::default().causal(true);
        let mut cache = LatentCache::new(2, 4);
        let texts = vec![TextTokens { tokens: 2, cache: TextCache::Latent(&mut cache) }];
        let [q, k, v] = [of(&[1, 3, 2, 4])?, of(&[1, 1, 2, 4])?, of(&[1, 1, 2, 5])?];
        said.push(attention.of_texts([&q, &k, &v], texts).unwrap_err().to_string());
        assert_eq!(cache.current_seq_len(), 0);
        Ok(said)
    });
    let words = [
        "values of 0",
        "2 heads together",
        "0 heads together",
        "expected [batch, tokens, 6] and [batch, 1, tokens, common]",
        "expected [batch, tokens, 6]",
        "expected [batch, tokens, 6]",
        "index 'k'",
        "first elements of keys",
    ];
    assert_eq!(said[0].len(), words.len());
    for (said, word) in said[0].iter().zip(words) {
        assert!(said.contains(word), "{said}: want {word}");
    }
    assert_eq!(said[0], said[1]);
}
