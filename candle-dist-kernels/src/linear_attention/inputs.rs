use std::sync::Arc;

use candle_core::{D, DType, Result, Tensor, bail};
use candle_dist_base::empty;

use super::scan::StateScan;
use super::sizes::ScanSizes;
use crate::{check_dtype, compute_dtype};

/// What a scan is given.
pub(super) struct ScanInputs<'a> {
    pub(super) q: &'a Tensor,
    pub(super) k: &'a Tensor,
    pub(super) v: &'a Tensor,
    /// The logarithms of decays, behind the shares of corrections where tokens correct the state.
    pub(super) gates: &'a [&'a Tensor],
    pub(super) state: Option<&'a Tensor>,
    pub(super) history: Option<Arc<[u32]>>,
}

impl ScanInputs<'_> {
    /// The sizes, and the first state in the dtype of the computation.
    ///
    /// # Errors
    /// If inputs do not fit.
    pub(super) fn checked(&self, op: &'static str) -> Result<(ScanSizes, Option<Tensor>)> {
        let Self { q, k, v, gates, state, history } = self;
        let wide = compute_dtype(op, q)?;
        [*k, *v].iter().chain(*gates).try_for_each(|x| check_dtype(op, q, x))?;
        let Some(sizes) = ScanSizes::of([*q, *k, *v], gates, *state, history.as_deref()) else {
            bail!(
                "{op}: {:?}, {:?}, {:?}, gates {:?}, state {:?} do not fit",
                q.shape(),
                k.shape(),
                v.shape(),
                gates.iter().map(|gate| gate.shape()).collect::<Vec<_>>(),
                state.map(Tensor::shape)
            );
        };
        let state = state.map(|state| state.detach().to_dtype(wide)?.contiguous()).transpose()?;
        Ok((sizes, state))
    }

    pub(super) fn is_composed(&self, sizes: ScanSizes) -> bool {
        !self.q.device().is_cpu() || sizes.is_empty()
    }

    /// The results, and the last states.
    pub(super) fn scan<const CORRECTS: bool>(
        &self,
        op: &'static str,
        state: Option<Tensor>,
        sizes: ScanSizes,
    ) -> Result<(Tensor, Tensor)> {
        // A node of the graph has three inputs.
        let wide = compute_dtype(op, self.v)?;
        let keys = Tensor::cat(&[self.q, self.k], D::Minus1)?.to_dtype(wide)?.contiguous()?;
        let gates = Tensor::cat(self.gates, D::Minus1)?.to_dtype(wide)?.contiguous()?;
        let inputs = [&keys, &self.v.to_dtype(wide)?.contiguous()?, &gates];
        let scan = StateScan::<CORRECTS> { sizes, state, history: self.history.clone() };
        let (y, state) = match wide {
            DType::F64 => scan.node::<f64>(op, inputs)?,
            _ => scan.node::<f32>(op, inputs)?,
        };
        Ok((y.to_dtype(self.v.dtype())?, state))
    }

    /// The results and the states of inputs without elements.
    pub(super) fn of_nothing(&self, state: Option<&Tensor>, sizes: ScanSizes) -> Result<(Tensor, Tensor)> {
        let all: Vec<&Tensor> =
            [self.q, self.k, self.v].into_iter().chain(self.gates.iter().copied()).collect();
        let state = match state {
            Some(state) => state.clone(),
            None => Tensor::zeros(sizes.state(), compute_dtype("scan", self.v)?, self.v.device())?,
        };
        Ok((empty::zeros_of(&all, self.v.shape(), self.v.dtype())?, state))
    }
}
