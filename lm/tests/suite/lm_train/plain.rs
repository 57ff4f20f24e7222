//! A Llama or a mixture of experts on one device in plain candle, made of ops that all have gradients.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Device, Result, Tensor, Var, safetensors};
use candle_lm::config::Config;
use candle_lm::config::experts::Experts;
use candle_lm::config::parts::QkNorm;
use candle_lm::declare::IGNORED;
use candle_lm::train::data::SequenceBatch;
use candle_lm::train::job::Job;
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use candle_shard::nn::Heads;

pub(crate) struct Plain {
    config: Config,
    vars: BTreeMap<String, Var>,
}

impl Plain {
    pub(crate) fn new(config: &Config, model: &Path) -> Self {
        let tensors = safetensors::load(model.join("model.safetensors"), &Device::Cpu).unwrap();
        let vars = tensors.into_iter().map(|(name, tensor)| (name, Var::from_tensor(&tensor).unwrap()));
        Self { config: config.clone(), vars: vars.collect() }
    }

    /// The mean loss of a step's batch.
    fn loss(&self, job: &Job, step: usize) -> Result<Tensor> {
        self.loss_of(&job.text.batch(&job.recipe, step, &Device::Cpu)?)
    }

    fn loss_of(&self, batch: &SequenceBatch) -> Result<Tensor> {
        if let Some(positions) = &batch.positions {
            return self.loss_of_documents(batch, &positions.to_vec2()?);
        }
        let logits = self.logits(&batch.tokens)?.flatten_to(1)?;
        candle_nn::loss::cross_entropy(&logits, &batch.targets.flatten_all()?)
    }

    /// The mean loss of the targets that count, of documents that are each computed alone.
    fn loss_of_documents(&self, batch: &SequenceBatch, positions: &[Vec<u32>]) -> Result<Tensor> {
        let (mut sum, mut counted) = (Tensor::new(0f32, &Device::Cpu)?, 0);
        for (row, positions) in positions.iter().enumerate() {
            let end = positions.iter().position(|&at| at == u32::MAX).unwrap_or(positions.len());
            let starts: Vec<usize> = (0..end).filter(|&at| positions[at] == 0).chain([end]).collect();
            for document in starts.windows(2) {
                let part =
                    |x: &Tensor| x.narrow(0, row, 1)?.narrow(1, document[0], document[1] - document[0]);
                let logits = self.logits(&part(&batch.tokens)?)?.squeeze(0)?;
                let losses = (candle_nn::ops::log_softmax(&logits, D::Minus1)? * -1.0)?;
                for (at, target) in
                    part(&batch.targets)?.squeeze(0)?.to_vec1::<u32>()?.into_iter().enumerate()
                {
                    if target != IGNORED {
                        sum = (sum + losses.get(at)?.narrow(0, target as usize, 1)?.squeeze(0)?)?;
                        counted += 1;
                    }
                }
            }
        }
        sum / f64::from(counted)
    }

    /// The mean loss of all sequences of the text that follow each other.
    pub(crate) fn loss_of_all(&self, job: &Job) -> Result<f64> {
        let length = job.recipe.seq_len;
        let all: Vec<usize> = (0..job.text.sequences(length)).collect();
        let loss = self.loss_of(&job.text.pick(&all, length, &Device::Cpu)?)?;
        Ok(f64::from(loss.to_scalar::<f32>()?))
    }

    /// The gradients of the first step by parameter.
    pub(crate) fn first_gradients(&self, job: &Job) -> BTreeMap<String, Vec<f32>> {
        let grads = self.loss(job, 0).unwrap().backward().unwrap();
        let whole =
            |name: &String| grads.get(&self.vars[name]).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let of_tensor = |name: String| {
            let parts = self.config.unstacked(&name).unwrap_or_else(|| vec![self.config.stored_name(&name)]);
            (name, parts.iter().flat_map(whole).collect::<Vec<f32>>())
        };
        self.config.tensors().into_iter().map(|(name, _)| of_tensor(name)).collect()
    }

    /// The losses of all steps.
    pub(crate) fn losses(&self, job: &Job) -> Result<Vec<f64>> {
        let weight_decay = job.recipe.weight_decay;
        let params = ParamsAdamW { lr: 0.0, beta1: 0.9, beta2: 0.95, eps: 1e-5, weight_decay };
        let mut optimizer = AdamW::new(self.vars.values().cloned().collect(), params)?;
        let mut step = |step: usize| -> Result<f64> {
            let loss = self.loss(job, step)?;
            let mut grads = loss.backward()?;
            self.clip(&mut grads, job.recipe.clip_norm)?;
            optimizer.set_learning_rate(job.recipe.rate.at(step));
            optimizer.step(&grads)?;
            Ok(f64::from(loss.to_scalar::<f32>()?))
        };
        job.steps().map(&mut step).collect()
    }

    fn clip(&self, grads: &mut GradStore, most: f64) -> Result<()> {
        let square =
            |var: &Var| grads.get(var).unwrap().sqr()?.sum_all()?.to_dtype(DType::F64)?.to_scalar::<f64>();
        let norm = self.vars.values().map(square).sum::<Result<f64>>()?.sqrt();
        assert!(norm > most, "the bound does nothing");
        for var in self.vars.values() {
            let grad = grads.remove(var).unwrap();
            grads.insert(var, (grad * (most / norm))?);
        }
        Ok(())
    }

    fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, length) = tokens.dims2()?;
        let table = self.get("model.embed_tokens");
        let mut h = table.index_select(&tokens.flatten_all()?, 0)?.reshape((batch, length, ()))?;
        for i in 0..self.config.num_hidden_layers {
            let at = |name: &str| format!("model.layers.{i}.{name}");
            h = (&h + self.attention(&self.norm(&h, &at("input_layernorm"))?, &at("self_attn"))?)?;
            let x = self.norm(&h, &at("post_attention_layernorm"))?;
            h = (h + match self.config.parts.experts(i) {
                None => self.gated(
                    &x,
                    ["gate_proj", "up_proj", "down_proj"].map(|name| at(&format!("mlp.{name}"))),
                )?,
                Some(experts) => self.experts(&x, experts, i)?,
            })?;
        }
        let head = if self.config.tie_word_embeddings { "model.embed_tokens" } else { "lm_head" };
        self.linear(&self.norm(&h, "model.norm")?, head)
    }

    fn gated(&self, x: &Tensor, [gate, up, down]: [String; 3]) -> Result<Tensor> {
        self.linear(&(self.linear(x, &gate)?.silu()? * self.linear(x, &up)?)?, &down)
    }

    /// All experts on all tokens, with weights of zero where they were not chosen.
    fn experts(&self, x: &Tensor, experts: &Experts, layer: usize) -> Result<Tensor> {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let scores = candle_nn::ops::softmax(&self.linear(x, &at(experts.names.router))?, D::Minus1)?;
        let chosen = scores.detach().flatten_to(1)?.to_vec2::<f32>()?.into_iter().flat_map(|row| {
            let rank = move |i: usize| row.iter().filter(|&&other| other > row[i]).count();
            (0..experts.count).map(move |i| if rank(i) < experts.chosen { 1f32 } else { 0.0 })
        });
        let weights = (&scores * Tensor::from_iter(chosen, &Device::Cpu)?.reshape(scores.shape())?)?;
        let weights = match experts.normalize {
            true => weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?,
            false => weights,
        };
        let mut sum = x.zeros_like()?;
        for expert in 0..experts.count {
            let name = |name: &str| at(&format!("{}.{expert}.{name}", experts.names.experts));
            let made = self.gated(x, experts.names.layers.map(name))?;
            sum = (sum + made.broadcast_mul(&weights.narrow(D::Minus1, expert, 1)?)?)?;
        }
        Ok(sum)
    }

    fn attention(&self, x: &Tensor, at: &str) -> Result<Tensor> {
        let Heads { query, key_value, dim } = self.config.heads();
        let (batch, length, _) = x.dims3()?;
        let heads = |name: &str, count: usize| {
            self.linear(x, &format!("{at}.{name}"))?
                .reshape((batch, length, count, dim))?
                .transpose(1, 2)?
                .contiguous()
        };
        let copies = |x: Tensor| {
            let wide = x.unsqueeze(2)?.broadcast_as((batch, key_value, query / key_value, length, dim))?;
            wide.contiguous()?.reshape((batch, query, length, dim))
        };
        let normed = |x: Tensor, name: &str| match self.config.parts.qk_norm {
            QkNorm::Head => self.norm(&x, &format!("{at}.{name}")),
            _ => Ok(x),
        };
        let q = self.turned(&normed(heads("q_proj", query)?, "q_norm")?)?;
        let k = copies(self.turned(&normed(heads("k_proj", key_value)?, "k_norm")?)?)?;
        let v = copies(heads("v_proj", key_value)?)?;
        let later =
            (0..length * length).map(|i| if i % length > i / length { f32::NEG_INFINITY } else { 0.0 });
        let mask = Tensor::from_iter(later, &Device::Cpu)?.reshape((length, length))?;
        let scores = (q.matmul(&k.t()?)? / (dim as f64).sqrt())?.broadcast_add(&mask)?;
        let mixed = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
        self.linear(&mixed.transpose(1, 2)?.flatten_from(2)?, &format!("{at}.o_proj"))
    }

    /// Each half of the last dim, turned against the other by an angle that grows with the position.
    fn turned(&self, x: &Tensor) -> Result<Tensor> {
        let (_, _, length, dim) = x.dims4()?;
        let angle = |i: usize| {
            let (position, pair) = (i / (dim / 2), i % (dim / 2));
            position as f64 * self.config.rope_theta.powf(-2.0 * pair as f64 / dim as f64)
        };
        let table = |f: fn(f64) -> f64| {
            let values = (0..length * dim / 2).map(|i| f(angle(i)) as f32);
            Tensor::from_iter(values, &Device::Cpu)?.reshape((length, dim / 2))
        };
        let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
        let (a, b) = (x.narrow(3, 0, dim / 2)?, x.narrow(3, dim / 2, dim / 2)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        Tensor::cat(&[first, second], 3)
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let size = (x.sqr()?.mean_keepdim(D::Minus1)? + self.config.rms_norm_eps)?.sqrt()?;
        x.broadcast_div(&size)?.broadcast_mul(self.get(name))
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        x.contiguous()?.broadcast_matmul(&self.get(name).t()?)
    }

    fn get(&self, name: &str) -> &Tensor {
        self.vars[&format!("{name}.weight")].as_tensor()
    }
}
