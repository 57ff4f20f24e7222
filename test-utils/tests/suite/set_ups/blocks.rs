//! Random models as layers and as pipelines.
use super::codes::CodedMlp;
use super::model::{Block, Cut, Head, Layer, Loss, Model, OptimizerKind};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::rnn::{GRUConfig, LSTMConfig};
use candle_nn::{BatchNormConfig, ParamsAdamW};
use candle_pipe::graph::{Scope, ValueId};
use candle_pipe::{Ctx, In, LossReduction, PipeBuilder, Value};
use candle_shard::fsdp::FullyShard;
use candle_shard::nn::{
    self, ActiveAdapters, Adagrad, AdamW, Adapter, BatchNorm, Dropout, Embedding, Init, LayerNorm, Linear,
    MeshVarBuilder, MoE, MoEConfig, Mode, ModuleT, Muon, Optimizer, ParamGroup, Parameters, ParamsAdagrad,
    ParamsMuon, ParamsSgd, RNN, RmsNorm, Sgd, Width, recompute,
};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel, SequenceParallel};
use candle_shard::sparse::RowVar;
use candle_shard::{Attention, DTensor, EmbeddingOptions, Placement, Replicate, Result, Shard};
use std::collections::HashMap;
use std::sync::Arc;

/// What norms add to variances. Dropout leaves rows of nearly equal elements, whose roundings a norm would make large.
pub(super) const EPS: f64 = 0.1;

/// The computation of a block: from hidden states, and those of an earlier block, to hidden states and a loss.
type Run = Arc<dyn Fn(&DTensor, Option<&DTensor>, Mode) -> Result<(DTensor, Option<DTensor>)> + Send + Sync>;

impl Model {
    /// Returns the plan on the axis `tp`.
    pub(crate) fn plan(&self) -> Plan {
        let is_sequence = self.more.is_some_and(|more| more.sequence);
        let output = is_sequence.then_some(Shard(1));
        let mut plan = with(Plan::new("tp"), "embedding".into(), self.embedding, output);
        if let Head::Linear(cut) = self.head {
            plan = with(plan, "head".into(), cut, None);
        }
        for (at, block) in self.blocks.iter().enumerate() {
            match block.layer {
                Layer::Mlp { up, down, .. } => {
                    plan = with(plan, format!("blocks.{at}.up"), up, None);
                    plan = with(plan, format!("blocks.{at}.down"), down, output);
                }
                Layer::Attention { cut: true } => {
                    plan = with(plan, format!("blocks.{at}.w?"), Cut::Columns, None);
                    plan = with(plan, format!("blocks.{at}.out"), Cut::Rows, output);
                }
                Layer::Coded { up, down, .. } => {
                    plan = with(plan, format!("blocks.{at}.up"), up, Some(Replicate));
                    plan = with(plan, format!("blocks.{at}.down"), down, output.or(Some(Replicate)));
                }
                Layer::Lstm { cut: true } => plan = with(plan, format!("blocks.{at}"), Cut::Columns, None),
                Layer::Norm | Layer::RmsNorm if is_sequence => {
                    plan = plan.with(format!("blocks.{at}"), SequenceParallel::default());
                }
                _ => {}
            }
        }
        plan
    }

    /// Returns the optimizer of these parameters, if it is not that of proofs.
    pub(crate) fn optimizer(&self, of: &Parameters) -> Result<Box<dyn Optimizer>> {
        let rule = self.more.map_or(OptimizerKind::AdamW, |more| more.optimizer);
        let adam_w = |of: &Parameters, lr| {
            let params = ParamsAdamW { lr, beta2: 0.95, eps: 1e-2, ..ParamsAdamW::default() };
            ParamGroup::new(of, params).with_master_weights()
        };
        let (matrices, others) = of.partition(|p| p.tensor.rank() == 2 && p.name != "embedding.weight");
        Ok(match rule {
            OptimizerKind::AdamW => Box::new(AdamW::from_groups([adam_w(of, 0.05)])?),
            OptimizerKind::Groups => {
                Box::new(AdamW::from_groups([adam_w(&matrices, 0.05), adam_w(&others, 0.02)])?)
            }
            OptimizerKind::Momentum => {
                let params = ParamsSgd { lr: 0.05, momentum: 0.9, nesterov: true, ..ParamsSgd::default() };
                Box::new(Sgd::from_groups([ParamGroup::new(of, params).with_master_weights()])?)
            }
            OptimizerKind::Adagrad => {
                let params = ParamsAdagrad { lr: 0.05, lr_decay: 0.1, eps: 1e-2, ..ParamsAdagrad::default() };
                Box::new(Adagrad::from_groups([ParamGroup::new(of, params).with_master_weights()])?)
            }
            OptimizerKind::Muon => {
                // A large `eps`, so that small gradients of roundings stay small.
                let params = ParamsMuon { lr: 0.05, eps: 0.5, dtype: DType::F64, ..ParamsMuon::default() };
                let muon = Muon::from_groups([ParamGroup::new(&matrices, params).with_master_weights()])?;
                Box::new(muon.with_adam_w(AdamW::from_groups([adam_w(&others, 0.05)])?)?)
            }
        })
    }

    /// Returns ids and targets.
    pub(crate) fn tokens(&self, first: usize) -> Tensor {
        let ids = (0..self.rows * self.len).map(|i| ((i * 5 + first) % self.vocab) as u32);
        Tensor::from_iter(ids, &Device::Cpu).and_then(|ids| ids.reshape((self.rows, self.len))).unwrap()
    }

    fn embedding(&self, vb: &MeshVarBuilder) -> Result<Embedding> {
        let options = EmbeddingOptions::default().max_norm(self.limited.then_some(1.0));
        let vb = &self.adapted(vb)?;
        Embedding::with_options(self.vocab, self.width, 0.7, options, vb)
    }

    fn head(&self, vb: &MeshVarBuilder) -> Result<Linear> {
        Linear::new(self.width, self.vocab, true, &self.adapted(vb)?)
    }

    /// A builder of the table or the head, with its adapter.
    fn adapted(&self, vb: &MeshVarBuilder) -> Result<MeshVarBuilder> {
        let Some(options) = &self.ends else { return Ok(vb.clone()) };
        let name = vb.full_name("weight");
        let path = name.trim_end_matches(".weight");
        vb.with_adapters([Adapter::new("one").with(path, options.clone())])
    }

    /// Builds all layers, for the loss of a batch.
    pub(crate) fn build(
        &self,
        vb: &MeshVarBuilder,
    ) -> Result<impl Fn(&[DTensor], Mode) -> Result<DTensor> + use<>> {
        let embedding = self.embedding(&vb.pp("embedding"))?;
        let head = match self.head {
            Head::Tied => None,
            Head::Linear(_) => Some(self.head(&vb.pp("head"))?),
        };
        let mut runs: Vec<Run> = Vec::new();
        for (at, block) in self.blocks.iter().enumerate() {
            runs.push(match block.layer {
                Layer::Again(of) => runs[of].clone(),
                _ => self.block(block, &vb.pp(format!("blocks.{at}")))?,
            });
        }
        let this = self.clone();
        let gain = self.has(&Layer::Gain).then(|| self.gain(vb)).transpose()?;
        Ok(move |xs: &[DTensor], mode: Mode| {
            let mut h = embedding.forward(&xs[0])?;
            let (mut history, mut losses) = (Vec::new(), Vec::new());
            for (block, run) in this.blocks.iter().zip(&runs) {
                let earlier = match block.layer {
                    Layer::Skip(of) | Layer::Cross(of) => Some(&history[of]),
                    Layer::Rows => Some(&xs[0]),
                    Layer::Gain => gain.as_ref(),
                    _ => None,
                };
                let (made, loss) = run(&h, earlier, mode)?;
                losses.extend(loss);
                history.push(made.clone());
                h = made;
            }
            let logits = match &head {
                Some(head) => head.forward(&h)?,
                None => h.linear(embedding.weight(), None)?,
            };
            let mut total = this.mean(&logits, &xs[1])?;
            for loss in losses {
                total = total.add(&loss.to_dtype(total.dtype())?)?;
            }
            Ok(total)
        })
    }

    fn attention(&self) -> Attention {
        let options = Attention::default();
        self.more.map_or(options.clone(), |more| options.causal(more.causal).way(more.way))
    }

    fn experts(&self, loss: bool) -> MoEConfig {
        let config = MoEConfig::new(self.width, 6, 3, 2).balance_weight(if loss { 0.1 } else { 0.0 });
        let Some(more) = self.more else { return config };
        let config = if more.spread { config.expert_axis("ep") } else { config };
        if more.cut_experts { config.tensor_axis("tp") } else { config }
    }

    pub(crate) fn has(&self, layer: &Layer) -> bool {
        self.blocks.iter().any(|block| block.layer == *layer)
    }

    /// Builds the parameter of all blocks that multiply by it.
    fn gain(&self, vb: &MeshVarBuilder) -> Result<DTensor> {
        vb.get(self.width, "gain", Init::Const(1.5), Replicate, false)
    }

    fn mean(&self, logits: &DTensor, targets: &DTensor) -> Result<DTensor> {
        match self.loss {
            Loss::MeanSquare => logits.to_dtype(wide(logits))?.sqr()?.mean_all(),
            _ => logits.cross_entropy(targets),
        }
    }

    /// Builds a block that is no other one's.
    fn block(&self, block: &Block, vb: &MeshVarBuilder) -> Result<Run> {
        let vb = if block.frozen { vb.frozen() } else { vb.clone() };
        let vb = match &block.adapter {
            Some(options) => {
                let adapter = Adapter::new("one").with(vb.full_name("*"), options.clone());
                vb.with_adapters([adapter.with(vb.full_name("*.*"), options.clone())])?
            }
            None => vb,
        };
        let is_of_units = matches!(block.layer, Layer::Unordered(_));
        let run = match block.unit && !is_of_units {
            false => self.layer(&block.layer, &vb)?,
            true => {
                let unit =
                    FullyShard::new(&vb, |vb| Ok((self.layer(&block.layer, vb)?, vb.compute_dtype())))?;
                let unit = Arc::new(unit);
                let run: Run = Arc::new(move |x, earlier, mode| {
                    let (made, loss) = unit.run(|(run, dtype)| {
                        let earlier = earlier.map(|earlier| earlier.to_dtype(*dtype)).transpose()?;
                        run(&x.to_dtype(*dtype)?, earlier.as_ref(), mode)
                    })?;
                    Ok((made.to_dtype(x.dtype())?, loss))
                });
                run
            }
        };
        let run: Run = match &block.adapter {
            Some(_) => Arc::new(move |x, earlier, mode| {
                ActiveAdapters::current().mode(mode).run(|| run(x, earlier, mode))
            }),
            None => run,
        };
        if !block.recompute || matches!(block.layer, Layer::Experts { loss: true }) {
            return Ok(run);
        }
        Ok(Arc::new(move |x, earlier, mode| {
            let (run, earlier) = (run.clone(), earlier.cloned());
            Ok((recompute(x, move |x| Ok(run(x, earlier.as_ref(), mode)?.0))?, None))
        }))
    }

    fn layer(&self, layer: &Layer, vb: &MeshVarBuilder) -> Result<Run> {
        let width = self.width;
        /// A block without a loss of its own.
        fn run(
            f: impl Fn(&DTensor, Option<&DTensor>, Mode) -> Result<DTensor> + Send + Sync + 'static,
        ) -> Result<Run> {
            Ok(Arc::new(move |x, earlier, mode| Ok((f(x, earlier, mode)?, None))))
        }
        match layer {
            Layer::Mlp { bias, .. } => {
                let up = Linear::new(width, 6, *bias, &vb.pp("up"))?;
                let down = Linear::new(6, width, *bias, &vb.pp("down"))?;
                run(move |x, _, _| x.add(&down.forward(&up.forward(x)?.gelu_erf()?)?))
            }
            Layer::Norm => {
                let norm = LayerNorm::new(width, EPS, vb)?;
                run(move |x, _, _| norm.forward(x))
            }
            Layer::RmsNorm => {
                let norm = RmsNorm::new(width, EPS, vb)?;
                run(move |x, _, _| norm.forward(x))
            }
            Layer::BatchNorm => {
                let config = BatchNormConfig { eps: EPS, ..BatchNormConfig::default() };
                let norm: BatchNorm = nn::batch_norm(width, config, vb)?;
                run(move |x, _, mode| {
                    norm.forward_t(&x.transpose(1, 2)?, mode != Mode::Eval)?.transpose(1, 2)
                })
            }
            Layer::Dropout => {
                let dropout = Dropout::new(0.3, vb);
                run(move |x, _, mode| dropout.forward(x, mode))
            }
            Layer::Attention { .. } => {
                let heads = Width::new(2, width / 2);
                let [q, k, v] = ["wq", "wk", "wv"].map(|name| Linear::new(width, heads, false, &vb.pp(name)));
                let (q, k, v, out) = (q?, k?, v?, Linear::new(heads, width, false, &vb.pp("out"))?);
                let options = self.attention();
                run(move |x, _, _| x.add(&out.forward(&attend(&options, [&q, &k, &v], x, x)?)?))
            }
            Layer::Cross(_) => {
                let [q, k, v] = ["wq", "wk", "wv"].map(|name| Linear::new(width, width, false, &vb.pp(name)));
                let (q, k, v) = (q?, k?, v?);
                let options = self.attention();
                run(move |x, memory, _| x.add(&attend(&options, [&q, &k, &v], x, memory.unwrap_or(x))?))
            }
            Layer::Lstm { .. } => {
                let lstm = nn::lstm(width, width, LSTMConfig::default(), vb)?;
                run(move |x, _, _| lstm.states_to_tensor(&lstm.seq(x)?))
            }
            Layer::Gru => {
                let gru = nn::gru(width, width, GRUConfig::default(), vb)?;
                run(move |x, _, _| {
                    let states = gru.seq(x)?;
                    DTensor::stack(&states.iter().map(|state| &state.h).collect::<Vec<_>>(), 1)
                })
            }
            Layer::Conv => {
                let config = candle_nn::Conv1dConfig { padding: 1, ..Default::default() };
                let conv = nn::conv1d(width, width, 3, config, &vb.pp("conv"))?;
                run(move |x, _, _| nn::Module::forward(&conv, &x.transpose(1, 2)?)?.transpose(1, 2))
            }
            Layer::Experts { loss } => {
                let experts = MoE::new(self.experts(*loss), vb)?;
                Ok(Arc::new(move |x, _, mode| {
                    let made = experts.forward(x, mode)?;
                    Ok((x.add(&made.output)?, made.loss))
                }))
            }
            Layer::Scale { dims } => {
                let scale = vb.get(vec![1; *dims], "scale", Init::Const(1.5), Replicate, false)?;
                run(move |x, _, _| x.mul(&scale))
            }
            Layer::Skip(_) => {
                run(|x, earlier, _| earlier.map_or_else(|| Ok(x.clone()), |earlier| x.add(earlier)))
            }
            Layer::Unordered(layers) => {
                // In a unit, each is a unit of its own.
                let layer = |i| FullyShard::new(&vb.pp(i), |vb| Linear::new(width, width, false, vb));
                let layers = (0..*layers).map(layer);
                let (layers, mesh) = (layers.collect::<Result<Vec<_>>>()?, vb.mesh());
                let is_cut = |axis: &str| mesh.axis_index(axis).is_ok_and(|at| mesh.shape()[at] > 1);
                // The ranks that share a unit run units in one order.
                let first = match is_cut("fsdp") || is_cut("data") {
                    true => mesh.local_rank("tp")?,
                    false => mesh.group()?.rank(),
                };
                run(move |x, _, _| {
                    // Sums of the same terms; each rank begins with another one.
                    let n = layers.len();
                    let mut terms: Vec<Option<DTensor>> = vec![None; n];
                    for i in (0..n).map(|i| (i + first) % n) {
                        terms[i] = Some(layers[i].run(|layer| layer.forward(x))?);
                    }
                    terms.into_iter().flatten().try_fold(x.clone(), |sum, term| sum.add(&term))
                })
            }
            Layer::Nested => {
                let (norm, dtype) = (LayerNorm::new(width, EPS, &vb.pp("norm"))?, vb.compute_dtype());
                let inner = FullyShard::new(&vb.pp("inner"), |vb| {
                    let (up, down) = (
                        Linear::new(width, 6, true, &vb.pp("up"))?,
                        Linear::new(6, width, true, &vb.pp("down"))?,
                    );
                    Ok((up, down, vb.compute_dtype()))
                })?;
                let inner = Arc::new(inner);
                run(move |x, _, _| {
                    let inner = inner.clone();
                    let made = recompute(&norm.forward(&x.to_dtype(dtype)?)?, move |h| {
                        let made = inner.run(|(up, down, dtype)| {
                            let h = h.to_dtype(*dtype)?;
                            h.add(&down.forward(&up.forward(&h)?.gelu_erf()?)?)
                        })?;
                        made.to_dtype(h.dtype())
                    })?;
                    made.to_dtype(x.dtype())
                })
            }
            Layer::Rows => {
                let table = vb.get((self.vocab, width), "table", Init::Const(0.5), Replicate, false)?;
                let table = RowVar::new(Var::from_tensor(table.to_local())?)?;
                run(move |x, ids, _| x.add(&looked_up(&table, ids.unwrap_or(x))?))
            }
            Layer::Gain => {
                // In both orders.
                let is_second = self.seed.is_multiple_of(2);
                run(move |x, gain, _| match gain {
                    Some(gain) if is_second => x.mul(gain),
                    Some(gain) => gain.mul(x),
                    None => Ok(x.clone()),
                })
            }
            Layer::Coded { kind, .. } => {
                let coded = CodedMlp::new(*kind, vb)?;
                run(move |x, _, _| coded.forward(x))
            }
            Layer::Again(_) | Layer::Late(_) => run(|x, _, _| Ok(x.clone())),
        }
    }

    /// Declares the model as a pipeline.
    pub(crate) fn declare(&self) -> PipeBuilder<MeshVarBuilder> {
        let mut g = PipeBuilder::<MeshVarBuilder>::new();
        let (tokens, targets) = (g.input("tokens", In::Arg), g.input("targets", In::Arg));
        let this = self.clone();
        // The embedding knows its mesh, for the inputs of the pipeline.
        let table = g.shared_module("embedding", move |vb: &MeshVarBuilder| {
            Ok((this.embedding(vb)?, vb.mesh().clone()))
        });
        let embed = |(table, mesh): &(Embedding, _), xs: &[Value], _: &Ctx| {
            Ok(table.forward(&rows(&xs[0], mesh)?)?.into())
        };
        let mut h = g.call_with(table, "embed", embed, [tokens]);
        let (mut history, mut losses): (Vec<ValueId>, Vec<ValueId>) = (Vec::new(), Vec::new());
        let mut shared = HashMap::new();
        let this = self.clone();
        let gain = self
            .has(&Layer::Gain)
            .then(|| g.parameter("gain", self.share, move |vb: &MeshVarBuilder| Ok(this.gain(vb)?)));
        for (at, block) in self.blocks.iter().enumerate() {
            let name = format!("call.{at}");
            let earlier = match block.layer {
                Layer::Skip(of) | Layer::Cross(of) => Some(history[of]),
                Layer::Rows => Some(tokens),
                Layer::Gain => gain,
                _ => None,
            };
            if let Layer::Late(from) = block.layer {
                h = late(&mut g, at, h, from);
                history.push(h);
                continue;
            }
            let module = match block.layer {
                Layer::Again(of) => shared[&of],
                _ => {
                    let (this, block) = (self.clone(), block.clone());
                    g.shared_module(&format!("blocks.{at}"), move |vb: &MeshVarBuilder| {
                        Ok(this.block(&block, vb)?)
                    })
                }
            };
            shared.insert(at, module);
            let is_rows = block.layer == Layer::Rows;
            let f = move |run: &Run, xs: &[Value], ctx: &Ctx| {
                let x = xs[0].dtensor()?;
                let earlier = match xs.get(1) {
                    Some(ids) if is_rows => Some(rows(ids, x.mesh())?),
                    Some(value) => Some(value.on(x.mesh())?),
                    None => None,
                };
                let (made, loss) = run(x, earlier.as_ref(), ctx.mode())?;
                let loss = loss.map_or(Value::None, Value::from);
                Ok(Value::Tuple(vec![made.into(), loss]))
            };
            let both = g.call_with(module, &name, f, [h].into_iter().chain(earlier));
            h = g.func(&format!("hidden.{at}"), |xs, _| Ok(xs[0].at(0)?.clone()), [both]);
            if block.layer == (Layer::Experts { loss: true }) {
                losses.push(g.func(&format!("loss.{at}"), |xs, _| Ok(xs[0].at(1)?.clone()), [both]));
            }
            history.push(h);
        }
        let logits = match self.head {
            Head::Tied => g.call_with(
                table,
                "logits",
                |(table, _), xs, _| Ok(xs[0].dtensor()?.linear(table.weight(), None)?.into()),
                [h],
            ),
            Head::Linear(_) => {
                let this = self.clone();
                let head = g.shared_module("head", move |vb: &MeshVarBuilder| Ok(this.head(vb)?));
                g.call_with(head, "logits", |head, xs, _| Ok(head.forward(xs[0].dtensor()?)?.into()), [h])
            }
        };
        let this = self.clone();
        let mean = move |xs: &[Value]| {
            let logits = xs[0].dtensor()?;
            let mut total = this.mean(logits, &rows(&xs[1], logits.mesh())?)?;
            for loss in &xs[2..] {
                total = total.add(&loss.dtensor()?.to_dtype(total.dtype())?)?;
            }
            candle_pipe::Result::Ok(total.full_tensor()?)
        };
        self.loss.declare(&mut g, mean, [logits, targets].into_iter().chain(losses));
        g
    }
}

impl Loss {
    /// Declares the loss of a graph, from the mean over the targets, which are its second input.
    pub(super) fn declare<B: Scope>(
        self,
        g: &mut PipeBuilder<B>,
        mean: impl Fn(&[Value]) -> candle_pipe::Result<Tensor> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
    ) {
        match self {
            Self::Counted => g.loss_counted(
                move |xs, _| {
                    let count = xs[1].tensor()?.elem_count();
                    Ok(((mean(xs)? * count as f64)?, (count as i64).into()))
                },
                inputs,
            ),
            Self::Sum => {
                let sum = move |xs: &[Value]| Ok((mean(xs)? * xs[1].tensor()?.dim(0)? as f64)?);
                g.loss_fn(move |xs, _| sum(xs), inputs, LossReduction::Sum)
            }
            _ => g.loss_fn(move |xs, _| mean(xs), inputs, LossReduction::Mean),
        };
    }
}

/// Cuts a layer, with this placement of its output if there is one.
fn with(plan: Plan, name: String, cut: Cut, output: Option<Placement>) -> Plan {
    match (cut, output) {
        (Cut::Columns, output) => plan.with(name, ColwiseParallel::default().output(output)),
        (Cut::Rows, Some(output)) => plan.with(name, RowwiseParallel::default().output(output)),
        (Cut::Rows, None) => plan.with(name, RowwiseParallel::default()),
        (Cut::Whole, _) => plan,
    }
}

fn attend(options: &Attention, [q, k, v]: [&Linear; 3], x: &DTensor, memory: &DTensor) -> Result<DTensor> {
    let heads = |layer: &Linear, of: &DTensor| {
        let (rows, len, width) = of.dims3()?;
        layer.forward(of)?.reshape((rows, len, 2, width / 2))
    };
    let [q, k, v] = [heads(q, x)?, heads(k, memory)?, heads(v, memory)?];
    // A way is one of tokens that one axis shards.
    let cuts = q.placements().iter().filter(|placement| **placement == Shard(1)).count();
    let is_cut =
        cuts == 1 && x.dims()[1] > 1 && [&k, &v].iter().all(|other| other.placements() == q.placements());
    options.clone().way(options.way.filter(|_| is_cut)).of(&q, &k, &v)?.reshape(x.dims())
}

/// Returns an input of a pipeline with its rows and tokens on the axes that shard them.
fn rows(value: &Value, mesh: &candle_dist::DeviceMesh) -> candle_pipe::Result<DTensor> {
    let places: Vec<_> = mesh
        .names()
        .iter()
        .map(|name| match name.as_str() {
            "data" | "fsdp" | "ep" => Shard(0),
            "cp" => Shard(1),
            _ => Replicate,
        })
        .collect();
    Ok(DTensor::distribute(value.tensor()?, mesh, &places)?)
}

/// Returns the rows of a table that ids have, in the layout of the ids.
fn looked_up(table: &RowVar, ids: &DTensor) -> Result<DTensor> {
    let width = table.var().dims()[1];
    let local = ids.to_local();
    let found = table.lookup(local.flatten_all()?.to_vec1::<u32>()?)?;
    let found = found.reshape([local.dims(), &[width]].concat())?;
    DTensor::from_local(found, ids.mesh(), ids.placements(), [ids.dims(), &[width]].concat())
}

/// Adds a buffer in evaluation. The rank with the first row of the batch sets it in training, from a step on.
fn late(g: &mut PipeBuilder<MeshVarBuilder>, at: usize, h: ValueId, from: u64) -> ValueId {
    let buffer = |vb: &MeshVarBuilder| {
        let buffer = vb.frozen().get(1, "buffer", Init::Const(0.0), Replicate, false)?;
        let var = Var::from_tensor(buffer.to_local())?;
        Ok((buffer, var))
    };
    let module = g.shared_module(&format!("blocks.{at}"), buffer);
    let f = move |(buffer, var): &(DTensor, Var), xs: &[Value], ctx: &Ctx| {
        let x = xs[0].dtensor()?;
        if !ctx.training {
            return Ok(x.add(buffer)?.into());
        }
        if ctx.rows.start == 0 && ctx.step >= from {
            // The same again where a stage computes twice.
            var.set(&var.as_detached_tensor().affine(0.0, 0.1 * (ctx.step + 1) as f64)?)?;
        }
        Ok(x.into())
    };
    g.call_with(module, &format!("call.{at}"), f, [h])
}

fn wide(x: &DTensor) -> DType {
    if matches!(x.dtype(), DType::F16 | DType::BF16) { DType::F32 } else { x.dtype() }
}
