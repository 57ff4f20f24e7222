//! Checks that a recomputed stage returns the same results.
use super::{Activation, StageModule};
use crate::graph::Ctx;
use crate::{Error, Result, Value};
use candle_core::Tensor;
use candle_dist::TensorTree;
use candle_dist::bits::{digest, same_elements};

/// The results of a stage: for each output its listing and the contents of its tensors.
pub(super) struct Fingerprints(Vec<(String, Vec<Fingerprint>)>);

/// The contents of a tensor.
enum Fingerprint {
    /// A digest, on the CPU, where reading is cheap.
    Digest(u64),
    /// The tensor, on another device, which compares it.
    Tensor(Tensor),
}

impl Fingerprints {
    pub(super) fn of(outputs: &[Activation]) -> Result<Self> {
        let fingerprint = |tensor: &Tensor| match tensor.device().is_cpu() {
            true => Ok(Fingerprint::Digest(digest(tensor)?)),
            false => Ok(Fingerprint::Tensor(tensor.clone())),
        };
        let of = |output: &Activation| {
            let tensors = output.value.tensors().into_iter().map(fingerprint).collect::<Result<_>>()?;
            Ok((output.value.to_string(), tensors))
        };
        outputs.iter().map(of).collect::<Result<_>>().map(Self)
    }

    /// Returns an error if the new outputs differ.
    pub(super) fn check(&self, stage: &StageModule, again: &[Value], ctx: &Ctx) -> Result<()> {
        for ((listing, tensors), (output, value)) in self.0.iter().zip(stage.def().outputs.iter().zip(again))
        {
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
                     the same twice (candle_nn's Dropout does not), ask the scope for variables that a forward pass changes, \
                     or use Keep::Activations; for kernels that are not deterministic there is Keep::InputsUnchecked"
                )));
            }
        }
        Ok(())
    }
}

impl Fingerprint {
    fn is(&self, tensor: &Tensor) -> Result<bool> {
        Ok(match self {
            Self::Digest(number) => *number == digest(tensor)?,
            Self::Tensor(kept) => same_elements(kept, tensor)?,
        })
    }
}
