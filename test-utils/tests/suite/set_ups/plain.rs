//! Random models of candle's layers, as pipelines.
use super::blocks::EPS;
use super::model::{Head, Layer, Loss, Model};
use candle_core::{DType, Module, ModuleT, Tensor, Var};
use candle_nn::{BatchNormConfig, Init, VarBuilder};
use candle_pipe::graph::ValueId;
use candle_pipe::nn::Dropout;
use candle_pipe::{Ctx, In, PipeBuilder, Result, Value};
use candle_shard::sparse::RowVar;
use std::sync::Arc;

type Vb = VarBuilder<'static>;

/// The computation of a block: from hidden states, and another value, to hidden states.
type Run = Arc<dyn Fn(&Tensor, Option<&Tensor>, &Ctx) -> Result<Tensor> + Send + Sync>;

impl Model {
    /// Declares the model as a pipeline over a `VarBuilder`. Blocks that candle does not have are identities.
    pub(crate) fn declare_plain(&self) -> PipeBuilder<Vb> {
        let mut g = PipeBuilder::<Vb>::new();
        let (tokens, targets) = (g.input("tokens", In::Arg), g.input("targets", In::Arg));
        let (vocab, width) = (self.vocab, self.width);
        let table = move |vb: &Vb| Ok(vb.get_with_hints((vocab, width), "weight", spread())?);
        let table = g.shared_module("embedding", table);
        let embed = |table: &Tensor, xs: &[Value], _: &Ctx| Ok(looked_up(table, xs[0].tensor()?)?.into());
        let mut h = g.call_with(table, "embed", embed, [tokens]);
        let gain = self.has(&Layer::Gain).then(|| {
            g.parameter("gain", self.share, move |vb| {
                Ok(vb.get_with_hints(width, "gain", Init::Const(1.5))?)
            })
        });
        let (mut history, mut modules): (Vec<ValueId>, Vec<_>) = (Vec::new(), Vec::new());
        for (at, block) in self.blocks.iter().enumerate() {
            let other = match block.layer {
                Layer::Skip(of) | Layer::Cross(of) => Some(history[of]),
                Layer::Rows => Some(tokens),
                Layer::Gain => gain,
                _ => None,
            };
            let module = match block.layer {
                Layer::Again(of) => modules[of],
                _ => {
                    let (this, layer) = (self.clone(), block.layer.clone());
                    g.shared_module(&format!("blocks.{at}"), move |vb| this.plain_layer(&layer, at, vb))
                }
            };
            modules.push(module);
            let f = |run: &Run, xs: &[Value], ctx: &Ctx| {
                let other = xs.get(1).map(|value| value.tensor()).transpose()?;
                Ok(run(xs[0].tensor()?, other, ctx)?.into())
            };
            h = g.call_with(module, &format!("call.{at}"), f, [h].into_iter().chain(other));
            history.push(h);
        }
        let logits = match self.head {
            Head::Tied => {
                let product = |table: &Tensor, xs: &[Value], _: &Ctx| {
                    Ok(xs[0].tensor()?.broadcast_matmul(&table.t()?)?.into())
                };
                g.call_with(table, "logits", product, [h])
            }
            Head::Linear(_) => {
                g.module("head", move |vb| Ok(candle_pipe::nn::linear(width, vocab, vb.clone())?), [h])
            }
        };
        let square = self.loss == Loss::MeanSquare;
        let mean = move |xs: &[Value]| -> Result<Tensor> {
            let logits = xs[0].tensor()?;
            let wide = if logits.dtype() == DType::BF16 { DType::F32 } else { logits.dtype() };
            let logits = logits.to_dtype(wide)?;
            match square {
                true => Ok(logits.sqr()?.mean_all()?),
                false => Ok(candle_nn::loss::cross_entropy(
                    &logits.flatten_to(1)?,
                    &xs[1].tensor()?.flatten_all()?,
                )?),
            }
        };
        self.loss.declare(&mut g, mean, [logits, targets]);
        g
    }

    fn plain_layer(&self, layer: &Layer, at: usize, vb: &Vb) -> Result<Run> {
        let width = self.width;
        fn run(
            f: impl Fn(&Tensor, Option<&Tensor>, &Ctx) -> Result<Tensor> + Send + Sync + 'static,
        ) -> Result<Run> {
            Ok(Arc::new(f))
        }
        let linear = |inputs, outputs, name: &str| candle_pipe::nn::linear(inputs, outputs, vb.pp(name));
        match layer {
            Layer::Mlp { .. } => {
                let (up, down) = (linear(width, 6, "up")?, linear(6, width, "down")?);
                run(move |x, _, _| Ok((x + down.forward(&up.forward(x)?.gelu_erf()?)?)?))
            }
            Layer::Norm => {
                // candle's own kernel has no f64.
                let scale = vb.get_with_hints(width, "weight", Init::Const(1.0))?;
                run(move |x, _, _| {
                    let x = x.broadcast_sub(&x.mean_keepdim(2)?)?;
                    let spread = (x.sqr()?.mean_keepdim(2)? + EPS)?.sqrt()?;
                    Ok(x.broadcast_div(&spread)?.broadcast_mul(&scale)?)
                })
            }
            Layer::BatchNorm => {
                let config = BatchNormConfig { eps: EPS, ..BatchNormConfig::default() };
                let norm = candle_nn::batch_norm(width, config, vb.clone())?;
                run(move |x, _, ctx| {
                    Ok(norm.forward_t(&x.transpose(1, 2)?.contiguous()?, ctx.training)?.transpose(1, 2)?)
                })
            }
            Layer::Dropout => {
                let dropout = Dropout::new(0.3, self.seed, &format!("blocks.{at}"))?;
                // A shared module asks for a parameter.
                let scale = vb.get_with_hints(1, "scale", Init::Const(1.0))?;
                run(move |x, _, ctx| Ok(dropout.forward(x, ctx)?.broadcast_mul(&scale)?))
            }
            Layer::Attention { .. } | Layer::Cross(_) => {
                let (q, k, v) =
                    (linear(width, width, "wq")?, linear(width, width, "wk")?, linear(width, width, "wv")?);
                run(move |x, memory, _| {
                    let memory = memory.unwrap_or(x);
                    let scores = q.forward(x)?.matmul(&k.forward(memory)?.transpose(1, 2)?.contiguous()?)?;
                    Ok((x + candle_nn::ops::softmax(&scores, 2)?.matmul(&v.forward(memory)?)?)?)
                })
            }
            Layer::Rows => {
                let table = RowVar::new(Var::from_tensor(&vb.get_with_hints(
                    (self.vocab, width),
                    "table",
                    spread(),
                )?)?)?;
                run(move |x, ids, _| {
                    let found = table.lookup(ids.unwrap_or(x).flatten_all()?.to_vec1::<u32>()?)?;
                    Ok((x + found.reshape(x.shape())?)?)
                })
            }
            Layer::Late(from) => {
                let (from, buffer) =
                    (*from, Var::from_tensor(&vb.get_with_hints(1, "buffer", Init::Const(0.0))?)?);
                run(move |x, _, ctx| {
                    if !ctx.training {
                        return Ok(x.broadcast_add(&buffer.as_detached_tensor())?);
                    }
                    if ctx.rows.start == 0 && ctx.step >= from {
                        // The same again where a stage computes twice.
                        buffer.set(&buffer.as_detached_tensor().affine(0.0, 0.1 * (ctx.step + 1) as f64)?)?;
                    }
                    Ok(x.clone())
                })
            }
            _ => {
                let scale = vb.get_with_hints(1, "scale", Init::Const(1.5))?;
                let is_skip = matches!(layer, Layer::Skip(_));
                run(move |x, other, _| match other {
                    Some(other) if is_skip => Ok((x + other.broadcast_mul(&scale)?)?),
                    Some(gain) => Ok(x.broadcast_mul(gain)?.broadcast_mul(&scale)?),
                    None => Ok(x.broadcast_mul(&scale)?),
                })
            }
        }
    }
}

fn spread() -> Init {
    Init::Uniform { lo: -0.7, up: 0.7 }
}

fn looked_up(table: &Tensor, ids: &Tensor) -> candle_core::Result<Tensor> {
    let found = table.index_select(&ids.flatten_all()?, 0)?;
    found.reshape([ids.dims(), &[table.dim(1)?]].concat())
}
