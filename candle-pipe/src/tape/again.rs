//! Checks that a recomputed stage returns the same results.
use super::{Activation, StageModule};
use crate::graph::Ctx;
use crate::{Error, Result, Value};
use candle_core::Tensor;
use candle_dist::TensorTree;
use candle_dist::bits::{digest, same_elements};

/// The results of a stage: for each output its listing and the contents of its tensors.
pub(super) struct Given(Vec<(String, Vec<Seen>)>);

/// The contents of a tensor.
enum Seen {
    /// A digest, on the CPU, where reading is cheap.
    Digest(u64),
    /// The tensor, on another device, which compares it.
    Kept(Tensor),
}

impl Given {
    pub(super) fn of(outputs: &[Activation]) -> Result<Self> {
        let seen = |tensor: &Tensor| match tensor.device().is_cpu() {
            true => Ok(Seen::Digest(digest(tensor)?)),
            false => Ok(Seen::Kept(tensor.clone())),
        };
        let of = |output: &Activation| {
            let tensors = output.value.tensors().into_iter().map(seen).collect::<Result<_>>()?;
            Ok((output.value.to_string(), tensors))
        };
        outputs.iter().map(of).collect::<Result<_>>().map(Self)
    }

    /// Returns an error if the new outputs differ.
    pub(super) fn check(&self, stage: &StageModule, again: &[Value], ctx: &Ctx) -> Result<()> {
        for ((listing, tensors), (output, value)) in self.0.iter().zip(stage.def().outputs.iter().zip(again)) {
            let mut pairs = tensors.iter().zip(value.tensors());
            let is_same = *listing == value.to_string()
                && pairs.try_fold(true, |same, (seen, t)| seen.is(t).map(|is| same && is))?;
            if !is_same {
                let (index, microbatch, node) =
                    (stage.def().index, ctx.microbatch, stage.maker(output.value).unwrap_or("?"));
                return Err(Error::Pipe(format!(
                    "stage {index}: the second forward pass of microbatch {microbatch}, which Keep::Inputs makes for the \
                     backward pass, gave another value of node {node:?} ({value}) than the first; its gradients would be \
                     those of another function. Draw random numbers by candle_pipe's nn::Dropout or Ctx::random, which draw \
                     the same twice (candle_nn's Dropout does not), or use Keep::Activations; for kernels that are not \
                     deterministic there is Keep::InputsUnchecked"
                )));
            }
        }
        Ok(())
    }
}

impl Seen {
    fn is(&self, tensor: &Tensor) -> Result<bool> {
        Ok(match self {
            Self::Digest(number) => *number == digest(tensor)?,
            Self::Kept(kept) => same_elements(kept, tensor)?,
        })
    }
}

/// Runs the forward pass `run`. Returns an error if it changes variables of the stage.
pub(super) fn leaving_variables<R>(stage: &StageModule, run: impl FnOnce() -> Result<R>) -> Result<R> {
    let digests = || stage.variables().values().map(|variable| Ok(digest(variable)?)).collect::<Result<Vec<u64>>>();
    let before = digests()?;
    let made = run()?;
    let changed =
        stage.variables().iter().zip(before.iter().zip(digests()?)).find(|(_, (before, after))| *before != after);
    match changed {
        None => Ok(made),
        Some(((name, _), _)) => Err(Error::Pipe(format!(
            "stage {}: the forward pass changes the variable {name:?}, as candle_nn's BatchNorm does, and Keep::Inputs would \
             run it twice; use Keep::Activations",
            stage.def().index
        ))),
    }
}
