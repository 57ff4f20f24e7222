//! A model with adapters at layers of every kind, and the same on one device.
use crate::common::*;
use candle_core::backprop::GradStore;
use candle_core::{D, DType, Device, Tensor, Var};
use candle_dist::{DeviceMesh, RankContext};
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{
    ActiveAdapters, Adapter, Embedding, FusedQkv, Heads, Linear, LoraOptions, MeshVarBuilder, Mode,
    Parameters, recompute,
};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{AttentionMask, DTensor, Placements, Replicate, Result, Shard};
use std::collections::BTreeMap;
use std::sync::Arc;

pub(crate) const WIDTH: usize = 8;
pub(crate) const WORDS: usize = 11;
const INNER: usize = 7;
const DTYPE: DType = DType::F64;
const CPU: Device = Device::Cpu;

/// What is built and how it runs.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) options: LoraOptions,
    pub(crate) heads: Heads,
    /// The table by columns instead of rows.
    pub(crate) by_columns: bool,
    pub(crate) recompute: bool,
    pub(crate) is_in_units: bool,
    pub(crate) mode: Mode,
    /// Modules that are trained themselves.
    pub(crate) trained: Vec<&'static str>,
}

impl Case {
    pub(crate) fn new(options: LoraOptions) -> Self {
        Self {
            options,
            heads: Heads { query: 4, key_value: 2, dim: 2 },
            by_columns: false,
            recompute: false,
            is_in_units: false,
            mode: Mode::Eval,
            trained: Vec::new(),
        }
    }

    pub(crate) fn adapter(&self, name: &str) -> Adapter {
        let table = self.options.clone().bias(false);
        let adapter =
            Adapter::new(name).with("*", self.options.clone()).with("block.*", self.options.clone());
        let adapter = adapter.with("table", table);
        self.trained.iter().fold(adapter, |adapter, module| adapter.train(*module).without(*module))
    }

    pub(crate) fn plan(&self) -> Plan {
        let plan = Plan::new("tp")
            .with("block", ColwiseParallel::default())
            .with("block.o", RowwiseParallel::default().output(Replicate))
            .with("up", ColwiseParallel::default())
            .with("down", RowwiseParallel::default().output(Replicate))
            .with("head", ColwiseParallel::default().output(Replicate));
        match self.by_columns {
            true => plan.with("table", ColwiseParallel::default().output(Replicate)),
            false => plan.with("table", RowwiseParallel::default().output(Replicate)),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Layers {
    qkv: FusedQkv,
    o: Linear,
    up: Linear,
    down: Linear,
    free: Linear,
}

impl Layers {
    fn new(case: &Case, vb: &MeshVarBuilder) -> Result<Self> {
        let qkv = FusedQkv::with_names(WIDTH, case.heads, 1, true, ["q", "k", "v"], &vb.pp("block"))?;
        Ok(Self {
            o: Linear::new(qkv.width(), WIDTH, false, &vb.pp("block.o"))?,
            qkv,
            up: Linear::new(WIDTH, INNER, true, &vb.pp("up"))?,
            down: Linear::new(INNER, WIDTH, true, &vb.pp("down"))?,
            free: Linear::new(WIDTH, WIDTH, true, &vb.pp("free"))?,
        })
    }

    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let [q, k, v] = self.qkv.forward(x)?;
        let mixed = q.scaled_dot_product_attention(&k, &v, AttentionMask::Causal, None)?;
        let x = x.add(&self.o.forward(&mixed.transpose(1, 2)?.flatten_from(2)?)?)?;
        self.free.forward(&x.add(&self.down.forward(&self.up.forward(&x)?.gelu()?)?)?)
    }
}

/// A model on a mesh.
pub(crate) struct Model {
    table: Embedding,
    layers: Arc<FullyShard<Arc<Layers>>>,
    head: Linear,
    case: Case,
}

impl Model {
    pub(crate) fn new(case: &Case, vb: &MeshVarBuilder) -> Result<Self> {
        Ok(Self {
            table: Embedding::new(WORDS, WIDTH, 1.0, &vb.pp("table"))?,
            layers: Arc::new(FullyShard::new(vb, |vb| Ok(Arc::new(Layers::new(case, vb)?)))?),
            head: Linear::new(WIDTH, WORDS, false, &vb.pp("head"))?,
            case: case.clone(),
        })
    }

    /// The logits of `ids` `[batch, tokens]`.
    pub(crate) fn logits(&self, ids: &DTensor) -> Result<DTensor> {
        let x = self.table.forward(ids)?;
        let x = self.layers.run(|layers| match self.case.recompute {
            true => {
                let layers = layers.clone();
                recompute(&x, move |x| layers.forward(x))
            }
            false => layers.forward(&x),
        })?;
        self.head.forward(&x)
    }

    pub(crate) fn loss(&self, ids: &DTensor) -> Result<DTensor> {
        let logits = self.logits(ids)?;
        logits.sqr()?.mul(&logits)?.mean_all()
    }
}

pub(crate) fn ids() -> Tensor {
    let ids: Vec<u32> = (0..12).map(|i| (i * 7 + 3) % WORDS as u32).collect();
    Tensor::from_vec(ids, (4, 3), &CPU).unwrap()
}

/// The values of a parameter, by its name. Those of factors that begin with zeros would hide faults.
pub(crate) fn value(name: &str, dims: &[usize]) -> Tensor {
    let seed = name.bytes().fold(7u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    (values(dims, seed, DTYPE) * 0.3).unwrap()
}

/// Gives the factors of adapters values that are not zero.
pub(crate) fn fill(parameters: &Parameters) -> Result<()> {
    let is_factor = |name: &str| name.contains("lora_") && !name.contains("magnitude");
    for parameter in parameters.iter().filter(|parameter| is_factor(&parameter.name)) {
        if parameter.var.elem_count() > 0 {
            let whole = value(&parameter.name, parameter.tensor.dims()).to_dtype(parameter.var.dtype())?;
            parameter.var.set(&block(&whole, parameter.tensor.spec())?.contiguous()?)?;
        }
    }
    Ok(())
}

/// What a step computes: the loss, and the gradients by name.
#[derive(Debug, Clone)]
pub(crate) struct StepValues {
    pub(crate) loss: f64,
    pub(crate) grads: BTreeMap<String, Vec<f64>>,
    /// The parameters, whole.
    pub(crate) values: BTreeMap<String, Tensor>,
}

pub(crate) fn builder(case: &Case, mesh: &DeviceMesh) -> Result<MeshVarBuilder> {
    let vb = MeshVarBuilder::fresh(5, mesh, case.plan(), DTYPE, &CPU)?;
    let vb = if case.is_in_units { vb.fully_shard("dp", FullyShardOptions::default())? } else { vb };
    vb.with_adapters([case.adapter("mine")])
}

/// A step on the mesh `("dp", "tp")`.
pub(crate) fn step(case: &Case, ctx: &RankContext, [dp, tp]: [usize; 2]) -> Result<StepValues> {
    let mesh = ctx.mesh(&[("dp", dp), ("tp", tp)])?;
    let vb = builder(case, &mesh)?;
    let model = Model::new(case, &vb)?;
    let parameters = vb.finish()?;
    fill(&parameters)?;
    let ids = DTensor::distribute(&ids(), &mesh, &[Shard(0), Replicate])?;
    let (loss, grads) = ActiveAdapters::all().mode(case.mode).run(|| -> Result<_> {
        let loss = model.loss(&ids)?;
        let grads = parameters.backward(&loss)?;
        Ok((loss, grads))
    })?;
    results(&parameters, &loss, &grads)
}

pub(crate) fn results(parameters: &Parameters, loss: &DTensor, grads: &GradStore) -> Result<StepValues> {
    let (mut of_names, mut all) = (BTreeMap::new(), BTreeMap::new());
    for parameter in parameters.iter() {
        let spec = parameter.tensor.spec().clone();
        let whole = |local: Tensor| DTensor::from_local_with_spec(local, spec.clone())?.full_tensor();
        all.insert(parameter.name.clone(), whole(parameter.var.as_tensor().detach())?);
        let is_trained = !parameter.is_frozen();
        let grad = grads.get(&parameter.var);
        assert!(is_trained || grad.is_none(), "{} is frozen and has a gradient", parameter.name);
        if is_trained {
            let grad = match grad {
                Some(grad) => grad.to_dtype(DTYPE)?,
                None => {
                    assert_eq!(parameter.var.elem_count(), 0, "{} has no gradient", parameter.name);
                    parameter.var.zeros_like()?
                }
            };
            of_names.insert(parameter.name.clone(), whole(grad)?.flatten_all()?.to_vec1()?);
        }
    }
    let loss = loss.redistribute(&Placements::from_elem(Replicate, 2))?.to_scalar::<f64>()?;
    Ok(StepValues { loss, grads: of_names, values: all })
}

/// The same model in plain candle.
pub(crate) struct Reference<'a> {
    case: &'a Case,
    values: &'a BTreeMap<String, Tensor>,
    pub(crate) trained: BTreeMap<String, Var>,
}

impl<'a> Reference<'a> {
    pub(crate) fn new(case: &'a Case, of: &'a StepValues) -> Self {
        let var = |name: &String| (name.clone(), Var::from_tensor(&of.values[name]).unwrap());
        Self { case, values: &of.values, trained: of.grads.keys().map(var).collect() }
    }

    fn get(&self, name: &str) -> Option<Tensor> {
        let trained = self.trained.get(name).map(|var| var.as_tensor().clone());
        trained.or_else(|| self.values.get(name).cloned())
    }

    /// A linear layer whose weight is `W + scale·B·A`.
    fn linear(&self, x: &Tensor, name: &str) -> candle_core::Result<Tensor> {
        let weight = self.get(&format!("{name}.weight")).unwrap();
        let bias = self.get(&format!("{name}.bias"));
        let weight = match self.get(&format!("{name}.lora_A.mine.weight")) {
            None => weight,
            Some(a) => {
                let b = self.get(&format!("{name}.lora_B.mine.weight")).unwrap();
                let sum = (weight + (b.matmul(&a)? * self.case.options.scale())?)?;
                match self.get(&format!("{name}.lora_magnitude_vector.mine.weight")) {
                    None => sum,
                    Some(magnitude) => {
                        let norms = sum.detach().sqr()?.sum_keepdim(1)?.sqrt()?;
                        sum.broadcast_div(&norms)?.broadcast_mul(&magnitude.unsqueeze(1)?)?
                    }
                }
            }
        };
        let y = x.broadcast_matmul(&weight.t()?)?;
        let y = bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(&bias))?;
        match self.get(&format!("{name}.lora_B.mine.bias")) {
            None => Ok(y),
            Some(bias) => y.broadcast_add(&(bias * self.case.options.scale())?),
        }
    }

    pub(crate) fn loss(&self) -> candle_core::Result<Tensor> {
        let Heads { query, key_value, dim } = self.case.heads;
        let ids = ids();
        let (batch, tokens) = ids.dims2()?;
        let rows = |table: &Tensor| table.index_select(&ids.flatten_all()?, 0)?.reshape((batch, tokens, ()));
        let x = rows(&self.get("table.weight").unwrap())?;
        let x = match self.get("table.lora_embedding_A.mine") {
            None => x,
            Some(a) => {
                let b = self.get("table.lora_embedding_B.mine").unwrap();
                let added = (a.t()?.matmul(&b.t()?)? * self.case.options.scale())?;
                let table = (self.get("table.weight").unwrap() + added)?;
                match self.get("table.lora_magnitude_vector.mine.weight") {
                    None => rows(&table)?,
                    Some(magnitude) => {
                        let norms = table.detach().sqr()?.sum_keepdim(0)?.sqrt()?;
                        rows(&table.broadcast_div(&norms)?.broadcast_mul(&magnitude)?)?
                    }
                }
            }
        };
        let heads = |y: Tensor, count: usize| {
            let y = y.reshape((batch, tokens, count, 1, dim))?;
            let y = y.broadcast_as((batch, tokens, count, query / count, dim))?;
            y.reshape((batch, tokens, query, dim))?.transpose(1, 2)?.contiguous()
        };
        let q = heads(self.linear(&x, "block.q")?, query)?;
        let k = heads(self.linear(&x, "block.k")?, key_value)?;
        let v = heads(self.linear(&x, "block.v")?, key_value)?;
        let scores = (q.matmul(&k.t()?)? / (dim as f64).sqrt())?;
        let mask: Vec<f64> =
            (0..tokens * tokens).map(|i| if i % tokens > i / tokens { -1e30 } else { 0.0 }).collect();
        let mask = Tensor::from_vec(mask, (tokens, tokens), &CPU)?;
        let scores = scores.broadcast_add(&mask)?;
        let scores = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
        let weights = scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)?;
        let mixed = weights.matmul(&v)?.transpose(1, 2)?.reshape((batch, tokens, query * dim))?;
        let x = (&x + self.linear(&mixed, "block.o")?)?;
        let up = exact_gelu(&self.linear(&x, "up")?)?;
        let x = self.linear(&(&x + self.linear(&up, "down")?)?, "free")?;
        let logits = self.linear(&x, "head")?;
        (logits.sqr()? * &logits)?.mean_all()
    }
}
