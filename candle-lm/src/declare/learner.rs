//! The model that learns: whole rows, packed documents, or preferences.

use std::sync::Arc;

use candle_core::Tensor;
use candle_dist::ProcessGroup;
use candle_pipe::graph::ValueId;
use candle_pipe::{Error, In, LossReduction, PipeBuilder, Result, stage_op};
use candle_shard::fsdp::FullyShard;
use candle_shard::nn::{self, MeshVarBuilder};
use candle_shard::{CrossEntropy, DTensor, Placement, Placements, Reduction, Replicate};

use super::{Balance, Declaration, LogitsFn, angles, hidden, in_mode, of_documents, with_keys};
use crate::between::BatchAxes;
use crate::cache::SharedKeys;
use crate::config::Config;
use crate::cut::{DecoderPipe, StageCut};
use crate::layer::{DecoderLayer, LayerInputs};
use crate::rope::Angles;

/// The target of a token behind which nothing is to be predicted.
pub const IGNORED: u32 = u32::MAX;

/// The model that learns: its loss is the mean cross entropy of `targets` `[rows, tokens]`, which follow the `tokens`
/// at the same places; all sequences are `length` tokens long.
///
/// With `recompute`, a layer keeps its input alone and computes the rest again in the backward pass.
///
/// In training, mixtures whose config says so add the loss of their balance: that of a microbatch of all ranks, those of the group
/// `replicas` too, which is that of the axis "dp" if the mesh does not have it.
///
/// # Errors
/// If there are more stages than the model can be cut into, or other ones than the layout has.
pub fn learner(
    config: &Config,
    length: usize,
    recompute: bool,
    replicas: Option<&ProcessGroup>,
    cut: &StageCut<'_>,
) -> Result<DecoderPipe> {
    cut.finish(learner_graph(config, length, recompute, replicas), config)
}

/// The model that learns, before it is cut.
pub fn learner_graph(
    config: &Config,
    length: usize,
    recompute: bool,
    replicas: Option<&ProcessGroup>,
) -> PipeBuilder<MeshVarBuilder> {
    declare_learner(config, length, recompute, replicas, Rows::Whole)
}

/// The model that [learns](learner) rows that are packed of documents. A document sees itself alone, and its positions start at 0.
///
/// There are two more inputs. `documents` `[rows, ranks, tokens]` has for each row the positions in their documents, u32: those of this
/// row, and of the rows at the same place of the other ranks of the mesh that have rows of their own, in the order of these. A document
/// begins at each 0, and behind the last one all are [`u32::MAX`]. `ratio` is a number. Targets of [`IGNORED`] do not count: the loss
/// is the sum of the others' cross entropies, divided by the number of all targets, times `ratio`. So it is the mean of those
/// that count in a batch, of which this may be a part, if `ratio` is the number of the batch's targets divided by that of those that count.
///
/// # Errors
/// Those of [`learner`].
pub fn packed_learner(
    config: &Config,
    length: usize,
    recompute: bool,
    replicas: Option<&ProcessGroup>,
    cut: &StageCut<'_>,
) -> Result<DecoderPipe> {
    cut.finish(declare_learner(config, length, recompute, replicas, Rows::Packed), config)
}

/// The model that [learns](packed_learner) which of two answers to a prompt is the better one, by direct preference optimization (Rafailov
/// et al. 2023). Each row has the better answer with its prompt as its first document, and the other one as its second.
///
/// Instead of `ratio` there are `signs` `[rows, tokens]`, f32: β at the targets of the better answer, -β at those of the other one, and 0
/// where no target counts. `margins` `[rows]`, f32, are those of a reference. The output of this name has the model's own: the sum of the
/// signs times the log probabilities of the targets. The loss of a row is `ln(1 + exp(reference - own))`.
///
/// # Errors
/// Those of [`learner`].
pub fn preference_learner(
    config: &Config,
    length: usize,
    recompute: bool,
    replicas: Option<&ProcessGroup>,
    cut: &StageCut<'_>,
) -> Result<DecoderPipe> {
    cut.finish(declare_learner(config, length, recompute, replicas, Rows::Preferences), config)
}

/// What the rows are that a model learns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rows {
    /// One text each.
    Whole,
    /// Documents that do not see each other.
    Packed,
    /// Two answers to a prompt.
    Preferences,
}

fn declare_learner(
    config: &Config,
    length: usize,
    recompute: bool,
    replicas: Option<&ProcessGroup>,
    rows: Rows,
) -> PipeBuilder<MeshVarBuilder> {
    let mut model = Declaration::new(config, BatchAxes::learner(length));
    let (tokens, targets) = (model.g.input("tokens", In::Arg), model.g.input("targets", In::Arg));
    let documents = (rows != Rows::Whole).then(|| model.g.input("documents", In::Arg));
    model.ratio = (rows == Rows::Packed).then(|| model.g.input("ratio", In::Arg));
    let compared = ["signs", "margins"].map(|name| {
        let is_there = rows == Rows::Preferences;
        is_there.then(|| model.g.input(name, In::Arg))
    });
    let h = model.embed(tokens);
    let balanced = config.parts.experts.as_ref().filter(|experts| experts.balance > 0.0);
    let h = match balanced {
        Some(_) => model.balanced_layers(h, documents, length, recompute, replicas),
        None => {
            let parts = config.parts.clone();
            model.layers([h, tokens], documents, length, move |layer, angles, i| {
                // What others use of a layer is kept too.
                learned(layer, angles, recompute && !parts.is_key_source(i))
            })
        }
    };
    let h = model.norm(h, None, |h, _| Ok(h.clone()));
    let loss = match (rows, compared) {
        (Rows::Preferences, [Some(signs), Some(margins)]) => {
            let [loss, margins] = model.head(h, &[targets, signs, margins], preference);
            model.g.output("margins", margins);
            loss
        }
        (Rows::Packed, _) => {
            let [loss] = model.head(h, &[targets], |head, h, others| {
                let sum = ignoring(Reduction::Sum).of_logits(&head(h)?, &others[0])?;
                Ok([sum.affine(1.0 / others[0].elem_count() as f64, 0.0)?])
            });
            loss
        }
        _ => {
            let [loss] =
                model.head(h, &[targets], |head, h, others| Ok([head(h)?.cross_entropy(&others[0])?]));
            loss
        }
    };
    model.g.loss(loss, LossReduction::Mean);
    model.g
}

/// The loss of targets that are not [`IGNORED`].
fn ignoring(reduction: Reduction) -> CrossEntropy {
    CrossEntropy { ignore_index: Some(i64::from(IGNORED)), reduction, ..CrossEntropy::default() }
}

/// The loss of preferences, and by how much the better answers are preferred; `others` are targets, signs and the margins of a reference.
fn preference(head: &LogitsFn<'_>, h: &DTensor, others: &[DTensor]) -> candle_shard::Result<[DTensor; 2]> {
    let losses = ignoring(Reduction::None).of_logits(&head(h)?, &others[0])?;
    let parts = losses.mul(&others[1])?.sum(1)?.neg()?;
    let is_of_rows = |placement: &Placement| placement.shard_dim().is_some();
    let whole: Placements =
        parts.placements().iter().map(|at| if is_of_rows(at) { *at } else { Replicate }).collect();
    let margins = parts.redistribute(&whole)?;
    let gained = margins.sub(&others[2])?;
    let loss = gained.bce_with_logits_loss(&gained.detach().ones_like()?, Reduction::Mean)?;
    Ok([loss, margins.detach()])
}

impl Declaration {
    /// Adds all layers of a model that learns the balance of its experts.
    fn balanced_layers(
        &mut self,
        mut h: ValueId,
        documents: Option<ValueId>,
        length: usize,
        recompute: bool,
        replicas: Option<&ProcessGroup>,
    ) -> ValueId {
        for i in 0..self.config.num_hidden_layers {
            let (config, between, name) = (self.config.clone(), self.between, format!("model.layers.{i}"));
            let Some(experts) = self.config.parts.experts(i) else {
                let build = move |vb: &MeshVarBuilder| {
                    let layer = FullyShard::new(vb, |vb| Ok(Arc::new(DecoderLayer::new(&config, i, vb)?)))?;
                    let run = learned(layer, angles(&config, length, between, vb)?, recompute);
                    Ok(hidden(vb, between, move |h, documents| {
                        run(h, documents, LayerInputs { embeddings: None, keys: &mut SharedKeys::new() })
                    }))
                };
                h = self.g.module(&name, build, [h].into_iter().chain(documents));
                continue;
            };
            let (factor, is_packed) = (experts.balance, documents.is_some());
            let build = move |vb: &MeshVarBuilder| {
                let layer = FullyShard::new(vb, |vb| Ok(Arc::new(DecoderLayer::balanced(&config, i, vb)?)))?;
                let (angles, mesh) = (angles(&config, length, between, vb)?, vb.mesh().clone());
                Ok(stage_op(move |xs, ctx| {
                    let h = between.enter(&xs[0], &mesh)?;
                    let documents = is_packed.then(|| xs[1].tensor()).transpose()?;
                    let angles = of_documents(&angles, documents)?;
                    let run = || Ok::<_, Error>(layer.run(|layer| layer.with_sums(&h, &angles, recompute))?);
                    let [h, mut sums] = in_mode(ctx, between, &h, run)?;
                    if let Some(before) = xs.get(1 + usize::from(is_packed)) {
                        sums = BatchAxes::WHOLE.enter(before, &mesh)?.add(&sums)?;
                    }
                    Ok(vec![between.leave(&h)?, BatchAxes::WHOLE.leave(&sums)?])
                }))
            };
            let before = self.balance.as_ref().map(|balance| balance.sums);
            let [states, sums] =
                self.g.module_many(&name, build, [h].into_iter().chain(documents).chain(before));
            h = states;
            let layers = self.balance.as_ref().map_or(0, |balance| balance.layers) + 1;
            self.balance = Some(Balance { sums, layers, factor, replicas: replicas.cloned() });
        }
        h
    }
}

/// A layer that learns.
fn learned(
    layer: FullyShard<Arc<DecoderLayer>>,
    angles: Angles,
    recompute: bool,
) -> impl Fn(&DTensor, Option<&Tensor>, LayerInputs<'_>) -> candle_shard::Result<Vec<DTensor>> {
    // A unit around what is recomputed gathers once in the backward pass.
    move |h, documents, beside| {
        let angles = of_documents(&angles, documents)?;
        layer.run(|layer| match recompute {
            true => {
                let (own, LayerInputs { embeddings, keys }) = (layer.clone(), beside);
                // Each backward pass of a segment goes through the graph of all that it captures: nothing from outside may be.
                let made = match keys.is_empty() {
                    true => nn::recompute(h, move |h| own.computed(h, &angles, None, &mut SharedKeys::new())),
                    false => {
                        nn::recompute(&layer.mixed(h, &angles, None, keys)?, move |mixed| own.fed(mixed))
                    }
                };
                Ok(vec![layer.ended(&made?, embeddings)?])
            }
            false => with_keys(layer, h, &angles, None, beside),
        })
    }
}
