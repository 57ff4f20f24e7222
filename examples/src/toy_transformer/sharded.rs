//! Tensor-parallel, context-parallel and expert-parallel training.

use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_dist::RankContext;
use candle_dist::comm::{self, CommCounts};
use candle_nn::Optimizer;
use candle_shard::nn::{MeshVarBuilder, Mode, Parameters};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Error, Placement, Replicate, Result, Shard, TokenOrder, visualize_sharding};
use test_utils::toy::Transformer;

use super::args::{Args, RunName};
use super::corpus::Corpus;
use super::outcome::{Picture, RunOutcome};
use super::training::{Training, optimizer};
use crate::comm::CommStat;
use crate::launch::{Ranks, gather};
use crate::progress::Progress;

/// The weights whose layouts are shown: one for each style.
const SHOWN: [(&str, &str); 5] = [
    ("experts", "layers.0.feed_forward.experts.down_proj"),
    ("colwise", "layers.0.feed_forward.w1.weight"),
    ("rowwise", "layers.0.feed_forward.w2.weight"),
    ("rowwise embedding", "tok_embeddings.weight"),
    ("norm", "layers.0.ffn_norm.weight"),
];

/// How a run cuts the model and its sequences over the ranks of one axis.
struct Cut {
    axis: &'static str,
    ranks: usize,
    plan: Plan,
    /// The placement of tokens and targets, `[batch, sequence]`.
    tokens: Placement,
}

impl Cut {
    fn of(name: RunName, args: &Args) -> Self {
        match name {
            RunName::Cp => {
                Self { axis: "cp", ranks: args.context_parallel(), plan: Plan::new("cp"), tokens: Shard(1) }
            }
            RunName::Ep => {
                Self { axis: "ep", ranks: args.expert_parallel(), plan: Plan::new("ep"), tokens: Shard(0) }
            }
            _ => {
                let plan = Transformer::plan_of(&args.model_args(), "tp", name.is_sequence_parallel());
                Self { axis: "tp", ranks: args.tensor_parallel(), plan, tokens: Replicate }
            }
        }
    }
}

/// Trains the model on the ranks of a run on one axis; rank 0 returns the outcome.
pub fn train(
    name: RunName,
    args: &Args,
    corpus: &Corpus,
    ranks: &Ranks<'_>,
) -> anyhow::Result<Option<RunOutcome>> {
    let outcome = ranks.run(Cut::of(name, args).ranks, |ctx| -> anyhow::Result<_> {
        let mine = train_rank(ctx, name, args, corpus)?;
        let all = gather(ctx.group(), mine.params_per_rank.clone())?;
        Ok(all.map(|all| RunOutcome { params_per_rank: all.concat(), ..mine }))
    })?;
    Ok(outcome.flatten())
}

/// Returns the outcome of one rank, which knows only its own number of parameters.
fn train_rank(ctx: &RankContext, name: RunName, args: &Args, corpus: &Corpus) -> Result<RunOutcome> {
    let Cut { axis, ranks, plan, tokens } = Cut::of(name, args);
    let mesh = ctx.mesh(&[(axis, ranks)])?;
    let vb = MeshVarBuilder::fresh(args.seed, &mesh, plan, DType::F32, ctx.device())?;
    let model = Transformer::new(&args.model_args(), &vb)?;
    let parameters = vb.finish()?;
    let mut optimizer = optimizer(parameters.vars(), args)?;
    let order = (name == RunName::Cp && args.zigzag).then(|| TokenOrder::zigzag(args.seq, ranks));
    let spread = |tensor: &Tensor| match &order {
        Some(order) => order.distribute(tensor, 1, &mesh, &[tokens]),
        None => DTensor::distribute(tensor, &mesh, &[tokens]),
    };
    let forward = |tokens: &DTensor, mode| Ok::<_, Error>(model.run(tokens, order.as_ref(), mode)?.logits);
    let progress =
        if ctx.rank() == 0 { Progress::new(name.as_str(), args.steps) } else { Progress::silent() };

    let mut first_grads = BTreeMap::new();
    let mut comm = CommCounts::default();
    let training = Training::run(args, corpus, ctx.device(), &progress, |step, batch| {
        let (made, counts) = comm::record(|| -> Result<_> {
            let logits = forward(&spread(&batch.tokens)?, Mode::Train { step })?;
            let loss = logits.cross_entropy(&spread(&batch.targets)?)?;
            let mut grads = parameters.backward(&loss)?;
            let first = if step == 0 { whole_grads(&parameters, &grads)? } else { BTreeMap::new() };
            if let Some(norm) = args.clip_norm {
                parameters.clip_grad_norm(norm)?.clip(&parameters.named_vars(), &mut grads)?;
            }
            optimizer.step(&grads)?;
            Ok((loss.full_tensor()?.to_scalar::<f32>()?, first))
        });
        let (loss, first) = made?;
        comm = counts;
        first_grads.extend(first);
        Ok(f64::from(loss))
    })?;
    progress.finish();

    let logits =
        forward(&spread(&corpus.held_out(ctx.device())?.tokens)?, Mode::Eval)?.full_tensor()?.detach();
    let logits = order.as_ref().map_or_else(|| Ok(logits.clone()), |order| order.undo(&logits, 1))?;
    let picture = |(style, weight): &(&str, &str)| {
        let found = parameters.iter().find(|p| p.name == *weight)?;
        Some(
            visualize_sharding(found.tensor.spec())
                .map(|picture| Picture { title: format!("{weight}, {style}"), picture }),
        )
    };
    let pictures = SHOWN.iter().filter_map(picture).collect::<Result<_>>()?;
    Ok(RunOutcome {
        name,
        world: ranks,
        losses: training.losses,
        ms_per_step: training.ms_per_step,
        page_faults_per_step: training.page_faults_per_step,
        logits,
        first_grads,
        params_per_rank: vec![parameters.local_elem_count()],
        comm_per_step: CommStat::all(&comm),
        pictures,
        pipeline: None,
    })
}

/// Returns the gradients by parameter name, each whole and in the global shape.
pub(super) fn whole_grads(parameters: &Parameters, grads: &GradStore) -> Result<BTreeMap<String, Tensor>> {
    let mut whole = BTreeMap::new();
    for p in parameters.iter() {
        if let Some(grad) = p.grad(grads)? {
            // A gradient may keep its graph alive, so only its values are kept.
            whole.insert(p.name.clone(), grad.full_tensor()?.detach());
        }
    }
    Ok(whole)
}
