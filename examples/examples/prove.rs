//! Two models of candle-transformers, ported and proved: the loss, each gradient, two steps of an optimizer and a resumed
//! checkpoint are those of one device on all meshes of up to 4 ranks.
//!
//! The port of Llama is compared with candle-transformers' first.
use candle_core::{DType, Device, Tensor};
use candle_nn::{BatchNormConfig, Conv2dConfig, VarBuilder, VarMap};
use candle_prove::{ModelInput, prove};
use candle_shard::fsdp::FullyShard;
use candle_shard::kernels::RopePairs;
use candle_shard::nn::{self, Embedding, Linear, MeshVarBuilder, Mode, Module, ModuleT, RmsNorm, Width};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{Attention, DTensor, Replicate, Result};
use candle_transformers::models::llama;
use test_utils::values;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = config();
    println!("Llama: largest difference from candle-transformers {:.1e}", difference(&config)?);
    let plan = Plan::new("tp")
        .with("model.layers.*.self_attn.q_proj", ColwiseParallel::default())
        .with("model.layers.*.self_attn.k_proj", ColwiseParallel::default())
        .with("model.layers.*.self_attn.v_proj", ColwiseParallel::default())
        .with("model.layers.*.self_attn.o_proj", RowwiseParallel::default())
        .with("model.layers.*.mlp.gate_proj", ColwiseParallel::default())
        .with("model.layers.*.mlp.up_proj", ColwiseParallel::default())
        .with("model.layers.*.mlp.down_proj", RowwiseParallel::default())
        .with("lm_head", ColwiseParallel::default());
    let llama = prove(move |vb: &MeshVarBuilder| {
        let model = Llama::new(&config, vb)?;
        Ok(move |xs: &[DTensor], _: Mode| model.forward(&xs[0])?.cross_entropy(&xs[1]))
    });
    let ids = Tensor::arange(0u32, 30, &Device::Cpu)?.reshape((5, 6))?;
    let targets = Tensor::from_iter((0..30u32).map(|i| (i * 7 + 3) % 32), &Device::Cpu)?.reshape((5, 6))?;
    let report = llama.input("tokens", &ids).input("targets", &targets).plan(plan).run();
    println!("Llama: {report}");
    report.assert();

    let plan = Plan::new("tp").with("25", ColwiseParallel::default());
    let mixer = prove(|vb: &MeshVarBuilder| {
        let model = ConvMixer::new(vb)?;
        Ok(move |xs: &[DTensor], mode: Mode| model.forward(&xs[0], mode != Mode::Eval)?.cross_entropy(&xs[1]))
    });
    // Batch norm has the statistics of all rows of a mesh and of one pass. Replicas and passes have their own.
    let report = mixer
        .input("images", &values(&[6, 3, 6, 6], 1, DType::F64))
        .input_of(ModelInput::new("labels", &Tensor::new(&[0u32, 3, 1, 4, 2, 0], &Device::Cpu)?))
        .axes(&["fsdp"])
        .passes(&[1])
        .plan(plan)
        .dtypes(&[DType::F64, DType::F32])
        .run();
    println!("ConvMixer: {report}");
    report.assert();
    Ok(())
}

fn config() -> llama::Config {
    llama::Config {
        hidden_size: 16,
        intermediate_size: 20,
        vocab_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 16,
        tie_word_embeddings: false,
    }
}

/// Returns the largest difference between the logits of the port and of candle-transformers, with the same weights.
fn difference(config: &llama::Config) -> Result<f64, Box<dyn std::error::Error>> {
    let map = VarMap::new();
    let theirs = llama::Llama::load(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu), config)?;
    let ids = Tensor::arange(0u32, 6, &Device::Cpu)?.reshape((1, 6))?;
    let mut cache = llama::Cache::new(false, DType::F32, config, &Device::Cpu)?;
    let want = theirs.forward(&ids, 0, &mut cache)?; // of the last token
    let weights: Vec<(String, Tensor)> = map
        .data()
        .lock()
        .map_err(|e| e.to_string())?
        .iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().clone()))
        .collect();
    let config = config.clone();
    let found = candle_dist::World::threads(1).run(move |ctx| -> Result<f64> {
        let mesh = ctx.mesh(&[("tp", 1)])?;
        let vb = MeshVarBuilder::parallelize(weights.clone(), 0, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
        let model = Llama::new(&config, &vb)?;
        vb.finish()?;
        let mine = model.forward(&DTensor::replicated(&ids, &mesh)?)?.full_tensor()?.narrow(1, 5, 1)?.squeeze(1)?;
        Ok(f64::from((mine - &want)?.abs()?.max_all()?.to_scalar::<f32>()?))
    })?;
    Ok(found[0])
}

/// candle-transformers' Llama without a cache, under its names.
struct Llama {
    embed: Embedding,
    blocks: Vec<FullyShard<Block>>,
    norm: RmsNorm,
    head: Linear,
    /// The cosines and sines of all positions.
    rope: [Tensor; 2],
}

struct Block {
    norms: [RmsNorm; 2],
    attention: [Linear; 4],
    mlp: [Linear; 3],
    head_dim: usize,
}

impl Llama {
    fn new(config: &llama::Config, vb: &MeshVarBuilder) -> Result<Self> {
        let (width, head_dim) = (config.hidden_size, config.hidden_size / config.num_attention_heads);
        let block = |i: usize| {
            FullyShard::new(&vb.pp("model.layers").pp(i), |vb| {
                let (of_attention, of_mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
                let (q, kv) = (
                    Width::new(config.num_attention_heads, head_dim),
                    Width::new(config.num_key_value_heads, head_dim),
                );
                let to = |name: &str, heads| Linear::new(width, heads, false, &of_attention.pp(name));
                let up = |name: &str| Linear::new(width, config.intermediate_size, false, &of_mlp.pp(name));
                let norm = |name: &str| RmsNorm::new(width, config.rms_norm_eps, &vb.pp(name));
                Ok(Block {
                    norms: [norm("input_layernorm")?, norm("post_attention_layernorm")?],
                    attention: [
                        to("q_proj", q)?,
                        to("k_proj", kv)?,
                        to("v_proj", kv)?,
                        Linear::new(q, width, false, &of_attention.pp("o_proj"))?,
                    ],
                    mlp: [
                        up("gate_proj")?,
                        up("up_proj")?,
                        Linear::new(config.intermediate_size, width, false, &of_mlp.pp("down_proj"))?,
                    ],
                    head_dim,
                })
            })
        };
        let angles = |i: usize| {
            let pairs = (0..head_dim / 2).map(move |pair| (2 * pair) as f32 / head_dim as f32);
            pairs.map(move |power| i as f32 / config.rope_theta.powf(power))
        };
        let angles: Vec<f32> = (0..config.max_position_embeddings).flat_map(angles).collect();
        let angles = Tensor::from_vec(angles, (config.max_position_embeddings, head_dim / 2), vb.device())?;
        Ok(Self {
            embed: Embedding::new(config.vocab_size, width, 0.5, &vb.pp("model.embed_tokens"))?,
            blocks: (0..config.num_hidden_layers).map(block).collect::<Result<_>>()?,
            norm: RmsNorm::new(width, config.rms_norm_eps, &vb.pp("model.norm"))?,
            head: Linear::new(width, config.vocab_size, false, &vb.pp("lm_head"))?,
            rope: [angles.cos()?.to_dtype(vb.dtype())?, angles.sin()?.to_dtype(vb.dtype())?],
        })
    }

    /// Returns the logits of tokens `[batch, sequence]`.
    fn forward(&self, tokens: &DTensor) -> Result<DTensor> {
        let mut h = self.embed.forward(tokens)?;
        for block in &self.blocks {
            h = block.run(|block| block.forward(&h, &self.rope))?;
        }
        self.head.forward(&self.norm.forward(&h)?)
    }
}

impl Block {
    fn forward(&self, x: &DTensor, rope: &[Tensor; 2]) -> Result<DTensor> {
        // A unit may compute in another dtype than the model.
        let dtype = self.mlp[0].weight().dtype();
        let (h, everywhere) = (x.to_dtype(dtype)?, vec![Replicate; x.mesh().ndim()]);
        let [cos, sin] = rope;
        let [cos, sin] = [cos, sin].map(|angles| DTensor::distribute(&angles.to_dtype(dtype)?, x.mesh(), &everywhere));
        let (cos, sin, y, [q, k, v, out]) = (cos?, sin?, self.norms[0].forward(&h)?, &self.attention);
        let heads = |layer: &Linear| {
            let of = layer.forward(&y)?;
            let (rows, len, width) = of.dims3()?;
            of.reshape((rows, len, width / self.head_dim, self.head_dim))
        };
        let turned = |x: DTensor| x.transpose(1, 2)?.rope(&cos, &sin, 0, RopePairs::Halves)?.transpose(1, 2);
        let mixed = Attention::default().causal(true).of(&turned(heads(q)?)?, &turned(heads(k)?)?, &heads(v)?)?;
        let h = h.add(&out.forward(&mixed.reshape(y.dims())?)?)?;
        let (y, [gate, up, down]) = (self.norms[1].forward(&h)?, &self.mlp);
        let h = h.add(&down.forward(&gate.forward(&y)?.silu()?.mul(&up.forward(&y)?)?)?)?;
        h.to_dtype(x.dtype())
    }
}

/// candle-transformers' ConvMixer in a small size, in training too.
struct ConvMixer {
    patches: nn::Conv2d,
    norm: nn::BatchNorm,
    blocks: Vec<(nn::Conv2d, nn::BatchNorm, nn::Conv2d, nn::BatchNorm)>,
    classes: Linear,
}

impl ConvMixer {
    fn new(vb: &MeshVarBuilder) -> Result<Self> {
        let width = 8;
        let norm = |vb: &MeshVarBuilder| {
            nn::batch_norm(width, BatchNormConfig { eps: 1e-2, ..BatchNormConfig::default() }, vb)
        };
        let block = |i: usize| {
            let vb = vb.pp(3 + i);
            let (inner, deep) = (vb.pp("0.fn"), Conv2dConfig { groups: width, padding: 1, ..Default::default() });
            Ok((
                nn::conv2d(width, width, 3, deep, &inner.pp(0))?,
                norm(&inner.pp(2))?,
                nn::conv2d(width, width, 1, Conv2dConfig::default(), &vb.pp(1))?,
                norm(&vb.pp(3))?,
            ))
        };
        Ok(Self {
            patches: nn::conv2d(3, width, 2, Conv2dConfig { stride: 2, ..Default::default() }, &vb.pp(0))?,
            norm: norm(&vb.pp(2))?,
            blocks: (0..2).map(block).collect::<Result<_>>()?,
            classes: Linear::new(width, 5, true, &vb.pp(25))?,
        })
    }

    /// Returns the logits of images `[batch, 3, height, width]`.
    fn forward(&self, images: &DTensor, train: bool) -> Result<DTensor> {
        let mut h = self.norm.forward_t(&self.patches.forward(images)?.gelu_erf()?, train)?;
        for (deep, first, wide, second) in &self.blocks {
            let y = h.add(&first.forward_t(&deep.forward(&h)?.gelu_erf()?, train)?)?;
            h = second.forward_t(&wide.forward(&y)?.gelu_erf()?, train)?;
        }
        self.classes.forward(&h.mean(3)?.mean(2)?)
    }
}
