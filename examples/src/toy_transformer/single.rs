//! Training on one device, in plain candle with fused kernels.

use std::collections::BTreeMap;

use candle_core::{DType, Device};
use candle_dist::ClipGradNorm;
use candle_nn::Optimizer;
use test_utils::reference::{Arithmetic, Mode, Transformer};

use super::args::{Args, RunName};
use super::corpus::Corpus;
use super::outcome::RunOutcome;
use super::training::{Training, optimizer};
use crate::progress::Progress;

/// Trains the reference model on a device.
pub fn train(args: &Args, corpus: &Corpus, device: &Device) -> anyhow::Result<RunOutcome> {
    let model = Transformer::computing(Arithmetic::Fused, &args.model_args(), DType::F32, device)?;
    let mut optimizer = optimizer(model.vars().iter().map(|(_, var)| var.clone()).collect(), args)?;
    let mut first_grads = BTreeMap::new();
    let progress = Progress::new(RunName::Single.as_str(), args.steps);
    let training = Training::run(args, corpus, device, &progress, |step, batch| {
        let logits = model.forward(&batch.tokens, Mode::Train { step })?;
        let loss = model.loss(&logits, &batch.targets)?;
        let mut grads = loss.backward()?;
        if step == 0 {
            for (name, var) in model.vars() {
                if let Some(grad) = grads.get(var) {
                    // A gradient may keep its graph alive, so only its values are kept.
                    first_grads.insert(name.clone(), grad.detach());
                }
            }
        }
        if let Some(norm) = args.clip_norm {
            ClipGradNorm::new(norm).clip(model.vars(), &mut grads)?;
        }
        optimizer.step(&grads)?;
        Ok(f64::from(loss.to_scalar::<f32>()?))
    })?;
    progress.finish();
    Ok(RunOutcome {
        name: RunName::Single,
        world: 1,
        losses: training.losses,
        ms_per_step: training.ms_per_step,
        page_faults_per_step: training.page_faults_per_step,
        logits: model.forward(&corpus.held_out(device)?.tokens, Mode::Eval)?.detach(),
        first_grads,
        params_per_rank: vec![model.vars().iter().map(|(_, var)| var.elem_count()).sum()],
        comm_per_step: Vec::new(),
        pictures: Vec::new(),
        pipeline: None,
    })
}
