//! The decoder declared as a pipeline whose stages are cut over other mesh axes.
//!
//! It has a node for the table, for each layer, for the last norm and for the output layer. Between nodes are tensors that
//! are whole, but that each rank of a model that learns has its rows of the batch on the axes "dp" and "ep", and its tokens
//! of each row on the axis "cp", as far as the mesh has them: see `between`.
//!
//! Layers, the table and the output layer are units, whose parameters a builder may shard fully over "dp".

mod learner;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_dist::{ProcessGroup, empty};
use candle_pipe::graph::{Ctx, ValueId};
use candle_pipe::{Error, In, PipeBuilder, Result, Share, StageOp, Value, stage_op};
use candle_shard::fsdp::FullyShard;
use candle_shard::nn::{ActiveAdapters, Embedding, Linear, MeshVarBuilder, Mode};
use candle_shard::parallel::LayerKind;
use candle_shard::{DTensor, Placements, Replicate};

use crate::balance;
use crate::between::BatchAxes;
use crate::cache::{self, Cache, LayerKeys, LayerTokens, SeenKeys, SharedKeys};
use crate::config::Config;
use crate::config::parts::LayerEmbeddingSizes;
use crate::config::tensors::LAYER_EMBEDDINGS;
use crate::cut::{DecoderPipe, StageCut};
use crate::layer::{DecoderLayer, LayerInputs};
use crate::layer_embeddings::{self, LayerEmbeddings};
use crate::model::{embedded, finished, losses};
use crate::norm::Norm;
use crate::projection::{Projection, TokenTable};
use crate::rope::{Angles, PackedRows};
use crate::step::{self, SlotTokens, wanted_adapters, wanted_rows};

pub use learner::{IGNORED, learner, learner_graph, packed_learner, preference_learner};

/// The name of the table, which a tied output layer has in common with the input.
const TABLE: &str = "model.embed_tokens.weight";

/// The model that writes: `logits` `[rows, vocabulary]` of what follows new tokens of texts, for the rows of a step, whose
/// tokens are `[1, tokens]` and whose spans are packed in a row. Each of `slots` texts has up to `longest`
/// tokens, and takes memory for `block` of them at a time.
///
/// # Errors
/// If there are more stages than the model can be cut into, or other ones than the layout has.
pub fn writer(
    config: &Config,
    [slots, longest, block]: [usize; 3],
    cache: Option<DType>,
    cut: &StageCut<'_>,
) -> Result<DecoderPipe> {
    let mut model = Declaration::new(config, BatchAxes::WHOLE);
    let (tokens, spans) = (model.g.input("tokens", In::Arg), model.g.input("spans", In::Arg));
    let h = model.embed(tokens);
    let sizes = config.clone();
    let h = model.layers([h, tokens], Some(spans), longest, move |layer, angles, i| {
        let slot = |_| Cache::of_layer(&sizes, i, angles.positions()).with_block(block).with_dtype(cache);
        let slots: RefCell<Vec<Cache>> = RefCell::new((0..slots).map(slot).collect());
        move |h: &DTensor, spans: Option<&Tensor>, beside: LayerInputs<'_>| {
            let (slots, spans) = (&mut slots.borrow_mut()[..], &step::unpack(spans)?[..]);
            cache::begin(slots, spans)?;
            let turns = cache::turns(slots, 0, spans);
            let made = layer.run(|layer| with_keys(layer, h, &angles, Some(turns), beside))?;
            cache::advance(slots, spans);
            Ok(made)
        }
    });
    // Only what follows the wanted tokens of each text is computed.
    let h = model.norm(h, Some(spans), wanted_rows);
    let [logits] = model.head(h, &[spans], |head, h, others| {
        let spans = step::unpack(Some(others[0].to_local()))?;
        Ok([wanted_adapters(&spans).run(|| head(h))?.squeeze(0)?])
    });
    model.g.output("logits", logits);
    cut.finish(model.g, config)
}

/// The model that scores: `sum`, the sum of the cross entropies of `targets` `[1, last]`, which follow the last of
/// `tokens` `[1, tokens]`; there are up to `longest` tokens.
///
/// # Errors
/// If there are more stages than the model can be cut into, or other ones than the layout has.
pub fn scorer(config: &Config, longest: usize, cut: &StageCut<'_>) -> Result<DecoderPipe> {
    let mut model = Declaration::new(config, BatchAxes::WHOLE);
    let (tokens, targets) = (model.g.input("tokens", In::Arg), model.g.input("targets", In::Arg));
    let h = model.embed(tokens);
    let h = model.layers([h, tokens], None, longest, |layer, angles, _| {
        move |h: &DTensor, _: Option<&Tensor>, beside: LayerInputs<'_>| {
            layer.run(|layer| with_keys(layer, h, &angles, None, beside))
        }
    });
    let h = model.norm(h, None, |h, _| Ok(h.clone()));
    let [sum] =
        model.head(h, &[targets], |head, h, others| Ok([losses(h, &others[0], head)?.reshape((1,))?]));
    model.g.output("sum", sum);
    cut.finish(model.g, config)
}

/// A model that is being declared.
struct Declaration {
    config: Config,
    g: PipeBuilder<MeshVarBuilder>,
    /// The table, if the output layer has it too.
    tied: Option<ValueId>,
    between: BatchAxes,
    balance: Option<Balance>,
    /// The factor of the loss of the tokens.
    ratio: Option<ValueId>,
}

/// What the end of a model adds to its loss in training.
#[derive(Clone)]
struct Balance {
    /// The sums of the routers.
    sums: ValueId,
    /// The layers with experts.
    layers: usize,
    factor: f64,
    replicas: Option<ProcessGroup>,
}

impl Declaration {
    fn new(config: &Config, between: BatchAxes) -> Self {
        let mut g = PipeBuilder::new();
        let sizes = config.clone();
        // The nodes that use it have adapters of their own.
        let build = move |vb: &MeshVarBuilder| Ok(table(&sizes, &vb.without_adapters())?.weight().clone());
        let tied = config.tie_word_embeddings.then(|| g.parameter(TABLE, Share::Replicate, build));
        Self { config: config.clone(), g, tied, between, balance: None, ratio: None }
    }

    /// From tokens to hidden states.
    fn embed(&mut self, tokens: ValueId) -> ValueId {
        let (config, is_tied, between) = (self.config.clone(), self.tied.is_some(), self.between);
        let build = move |vb: &MeshVarBuilder| {
            let own = (!is_tied)
                .then(|| FullyShard::new(vb, |vb| TokenTable::new(config.vocab_size, config.hidden_size, vb)))
                .transpose()?;
            if is_tied {
                vb.build_tied_adapters(LayerKind::Embedding, [config.vocab_size, config.hidden_size])?;
            }
            let (config, vb) = (config.clone(), vb.clone());
            Ok(stage_op(move |xs, _| {
                let tokens = between.enter_tokens(&xs[0], vb.mesh())?;
                let h = match &own {
                    Some(own) => own.run(|own| own.forward(&tokens))?,
                    None => Embedding::tied(xs[xs.len() - 1].dtensor()?, &vb)?.forward(&tokens)?,
                };
                Ok(vec![between.leave(&embedded(h, &config)?)?])
            }))
        };
        self.g.module("model.embed_tokens", build, [tokens].into_iter().chain(self.tied))
    }

    /// The embeddings that each layer has of tokens, whose first hidden states are `h`; none if layers have none.
    fn layer_embeddings(&mut self, h: ValueId, tokens: ValueId) -> Vec<ValueId> {
        let Some(LayerEmbeddingSizes { width, .. }) = self.config.parts.layer_embeddings else {
            return Vec::new();
        };
        let ([table, projection, norm], between) = (LAYER_EMBEDDINGS, self.between);
        let config = self.config.clone();
        let build = move |vb: &MeshVarBuilder| {
            let (own, mesh) =
                (FullyShard::new(vb, |vb| LayerEmbeddings::table(&config, vb))?, vb.mesh().clone());
            Ok(stage_op(move |xs, ctx| {
                let tokens = between.enter_tokens(&xs[0], &mesh)?;
                let rows = in_mode(ctx, between, &tokens, || {
                    Ok::<_, Error>(own.run(|table| table.forward(&tokens))?)
                })?;
                Ok(vec![between.leave(&rows)?])
            }))
        };
        let rows = self.g.module(table, build, [tokens]);
        let config = self.config.clone();
        let build = move |vb: &MeshVarBuilder| {
            let own = FullyShard::new(vb, |vb| LayerEmbeddings::projection(&config, vb))?;
            Ok(hidden(vb, between, move |h, _| own.run(|projection| Ok(vec![projection.forward(h)?]))))
        };
        let projected = self.g.module(projection, build, [h]);
        let config = self.config.clone();
        let build = move |vb: &MeshVarBuilder| {
            let (norm, mesh) = (Norm::new(width, &config, vb)?, vb.mesh().clone());
            let config = config.clone();
            Ok(stage_op(move |xs, _| {
                let [rows, projected] = [between.enter(&xs[0], &mesh)?, between.enter(&xs[1], &mesh)?];
                Ok(vec![between.leave(&layer_embeddings::joined(&config, &norm, &rows, &projected)?)?])
            }))
        };
        let all = self.g.module(norm, build, [rows, projected]);
        let of_layer = |i: usize| {
            let part = move |xs: &[Value], _: &Ctx| {
                let all = xs[0].tensor()?;
                let (rows, tokens, _) = all.dims3()?;
                // candle panics on views without elements that start behind their memory.
                Ok(match all.elem_count() {
                    0 => empty::zeros_of(&[all], (rows, tokens, width), all.dtype())?,
                    _ => all.narrow(2, i * width, width)?.contiguous()?,
                }
                .into())
            };
            self.g.func(&format!("model.per_layer_input_{i}"), part, [all])
        };
        (0..self.config.num_hidden_layers).map(of_layer).collect()
    }

    /// Adds all layers behind the first hidden states of `tokens`. `run` makes a function of each layer and its number. The function takes
    /// hidden states, what says which texts they belong to, and what the layer has beside, and returns what [`with_keys`] does.
    fn layers<F, R>(
        &mut self,
        [mut h, tokens]: [ValueId; 2],
        texts: Option<ValueId>,
        longest: usize,
        run: F,
    ) -> ValueId
    where
        F: Fn(FullyShard<Arc<DecoderLayer>>, Angles, usize) -> R + Clone + Send + Sync + 'static,
        R: Fn(&DTensor, Option<&Tensor>, LayerInputs<'_>) -> candle_shard::Result<Vec<DTensor>> + 'static,
    {
        let embeddings = self.layer_embeddings(h, tokens);
        let mut keys = BTreeMap::<usize, [ValueId; 2]>::new();
        for i in 0..self.config.num_hidden_layers {
            let (config, run, between) = (self.config.clone(), run.clone(), self.between);
            let own = embeddings.get(i).copied();
            let (has_texts, has_embeddings) = (texts.is_some(), own.is_some());
            let (source, is_source) = (config.parts.key_source(i), config.parts.is_key_source(i));
            let build = move |vb: &MeshVarBuilder| {
                let layer = FullyShard::new(vb, |vb| Ok(Arc::new(DecoderLayer::new(&config, i, vb)?)))?;
                let run = run(layer, angles(&config, longest, between, vb)?, i);
                let mesh = vb.mesh().clone();
                Ok(stage_op(move |xs, ctx| {
                    let h = between.enter(&xs[0], &mesh)?;
                    let mut others = xs[1..].iter();
                    let mut next = |is_there: bool| if is_there { others.next() } else { None };
                    let texts = next(has_texts).map(|texts| texts.tensor()).transpose()?;
                    let own = next(has_embeddings).map(|own| between.enter(own, &mesh)).transpose()?;
                    let mut keys = SharedKeys::new();
                    if let (Some(source), Some(k), Some(v)) =
                        (source, next(source.is_some()), next(source.is_some()))
                    {
                        let enter = |x: &Value| Ok::<_, Error>(between.enter(x, &mesh)?.transpose(1, 2)?);
                        keys.insert(
                            source,
                            LayerKeys { new: [enter(k)?, enter(v)?], seen: SeenKeys::Untold },
                        );
                    }
                    let beside = LayerInputs { embeddings: own.as_ref(), keys: &mut keys };
                    let made = in_mode(ctx, between, &h, || Ok::<_, Error>(run(&h, texts, beside)?))?;
                    made.iter().map(|made| between.leave(made)).collect()
                }))
            };
            let (name, others) = (format!("model.layers.{i}"), source.and_then(|source| keys.get(&source)));
            let others = others.copied().into_iter().flatten();
            let inputs: Vec<ValueId> = [h].into_iter().chain(texts).chain(own).chain(others).collect();
            if is_source {
                let [states, k, v] = self.g.module_many(&name, build, inputs);
                keys.insert(i, [k, v]);
                h = states;
            } else {
                h = self.g.module(&name, build, inputs);
            }
        }
        h
    }

    /// The last norm, of the hidden states that `wanted` leaves of those of texts.
    fn norm(
        &mut self,
        h: ValueId,
        spans: Option<ValueId>,
        wanted: fn(&DTensor, &[SlotTokens]) -> candle_shard::Result<DTensor>,
    ) -> ValueId {
        let (config, between) = (self.config.clone(), self.between);
        let build = move |vb: &MeshVarBuilder| {
            let norm = Norm::new(config.hidden_size, &config, vb)?;
            Ok(hidden(vb, between, move |h, spans| {
                Ok(vec![norm.forward(&wanted(h, &step::unpack(spans)?)?)?])
            }))
        };
        self.g.module("model.norm", build, [h].into_iter().chain(spans))
    }

    /// What `end` makes of hidden states, with a function that computes their logits in f32, and of `others`, which are tokens of rows, or
    /// numbers of them.
    fn head<const N: usize>(&mut self, h: ValueId, others: &[ValueId], end: OutputFn<N>) -> [ValueId; N] {
        let (config, is_tied, last, between) =
            (self.config.clone(), self.tied.is_some(), others.len(), self.between);
        let balance = self.balance.clone();
        let (ratio, sums) = (self.ratio, balance.as_ref().map(|balance| balance.sums));
        let build = move |vb: &MeshVarBuilder| {
            let own = |vb: &_| Projection::new(config.hidden_size, config.vocab_size, false, vb);
            let own = (!is_tied).then(|| FullyShard::new(vb, own)).transpose()?;
            if is_tied {
                vb.build_tied_adapters(LayerKind::Linear, [config.vocab_size, config.hidden_size])?;
            }
            let (config, vb, balance) = (config.clone(), vb.clone(), balance.clone());
            Ok(stage_op(move |xs, ctx| {
                let h = between.enter(&xs[0], vb.mesh())?;
                let enter = |x: &Value| match x.tensor()?.rank() {
                    1 => between.enter(x, vb.mesh()),
                    _ => between.enter_tokens(x, vb.mesh()),
                };
                let others: Vec<DTensor> = xs[1..=last].iter().map(enter).collect::<Result<_>>()?;
                let end = |head: &Projection| {
                    let made =
                        end(&|h| finished(head.forward(h)?.to_dtype(DType::F32)?, &config), &h, &others);
                    made.map(Vec::from)
                };
                let mut made = in_mode(ctx, between, &h, || match &own {
                    Some(own) => Ok::<_, Error>(own.run(end)?),
                    None => Ok(end(&Projection::Dense(Linear::tied(xs[xs.len() - 1].dtensor()?, &vb)?))?),
                })?;
                if ratio.is_some() {
                    made[0] = made[0].affine(xs[last + 1].float()?, 0.0)?;
                }
                if let Some(Balance { layers, factor, replicas, .. }) =
                    balance.as_ref().filter(|_| ctx.training)
                {
                    let sums = &xs[last + 1 + usize::from(ratio.is_some())];
                    let sums = BatchAxes::WHOLE.enter(sums, vb.mesh())?;
                    let rows = layers * others[0].elem_count();
                    let whole = Placements::from_elem(Replicate, sums.mesh().ndim());
                    let added = balance::loss(&sums, rows, *factor, replicas.as_ref())?;
                    made[0] = made[0].redistribute(&whole)?.add(&added)?;
                }
                made.iter().map(|made| between.leave(made)).collect()
            }))
        };
        let inputs = [h].into_iter().chain(others.iter().copied()).chain(ratio).chain(sums).chain(self.tied);
        self.g.module_many("lm_head", build, inputs)
    }
}

/// What the last node makes of the output layer, hidden states and other inputs.
type OutputFn<const N: usize> = fn(&LogitsFn<'_>, &DTensor, &[DTensor]) -> candle_shard::Result<[DTensor; N]>;

/// What computes the logits of hidden states.
type LogitsFn<'a> = dyn Fn(&DTensor) -> candle_shard::Result<DTensor> + 'a;

/// Returns the angles of a layer for `longest` tokens, in the order in which nodes pass tokens on.
fn angles(config: &Config, longest: usize, between: BatchAxes, vb: &MeshVarBuilder) -> Result<Angles> {
    let angles = Angles::new(config, longest, vb)?;
    Ok(match between.order(vb.mesh())? {
        Some(order) => angles.in_order(order),
        None => angles,
    })
}

/// Returns the angles for rows that are packed of documents, if they are.
fn of_documents(angles: &Angles, documents: Option<&Tensor>) -> candle_shard::Result<Angles> {
    let packed = documents.map(PackedRows::read).transpose()?;
    Ok(packed.map_or_else(|| angles.clone(), |packed| angles.of_packed(packed)))
}

/// The states behind a layer, and its keys and values `[batch, tokens, heads, dim]`, if others use them. They leave a unit as its results.
fn with_keys(
    layer: &DecoderLayer,
    h: &DTensor,
    angles: &Angles,
    turns: Option<Vec<LayerTokens<'_>>>,
    LayerInputs { embeddings, keys }: LayerInputs<'_>,
) -> candle_shard::Result<Vec<DTensor>> {
    let before: Vec<usize> = keys.keys().copied().collect();
    let mut made = vec![layer.forward(h, angles, turns, LayerInputs { embeddings, keys })?];
    for (_, own) in keys.iter().filter(|(layer, _)| !before.contains(layer)) {
        for x in &own.new {
            made.push(x.transpose(1, 2)?);
        }
    }
    Ok(made)
}

/// The table of the input.
fn table(config: &Config, vb: &MeshVarBuilder) -> candle_shard::Result<Embedding> {
    Embedding::new(config.vocab_size, config.hidden_size, 1.0, vb)
}

/// Runs `f`, which computes from hidden states `h`, with adapters that drop out if the model learns: at each row of the batch and each
/// position as on one rank.
fn in_mode<R, E: From<Error>>(
    ctx: &Ctx,
    between: BatchAxes,
    h: &DTensor,
    f: impl FnOnce() -> std::result::Result<R, E>,
) -> std::result::Result<R, E> {
    let mode = match ctx.mode() {
        // The tensor has the rows of all replicas of its mesh, one rank's behind another's.
        Mode::Train { step } | Mode::TrainRows { step, .. } => {
            let before = h.spec().local_block().first().map_or(0, |rows| rows.start);
            Mode::TrainRows { step, first_row: ctx.rows.start.saturating_sub(before) }
        }
        Mode::Eval => Mode::Eval,
    };
    ActiveAdapters::current().mode(mode).token_order(between.order(h.mesh())?).run(f)
}

/// A node from hidden states, and perhaps what says which texts they belong to, to hidden states.
fn hidden<F>(vb: &MeshVarBuilder, between: BatchAxes, f: F) -> impl StageOp + use<F>
where
    F: Fn(&DTensor, Option<&Tensor>) -> candle_shard::Result<Vec<DTensor>> + 'static,
{
    let mesh = vb.mesh().clone();
    stage_op(move |xs, ctx| {
        let texts = xs.get(1).map(|texts| texts.tensor()).transpose()?;
        let h = between.enter(&xs[0], &mesh)?;
        let made = in_mode(ctx, between, &h, || Ok::<_, Error>(f(&h, texts)?))?;
        made.iter().map(|made| between.leave(made)).collect()
    })
}
