//! The outer optimizer's state of one parameter.
use super::options::LocalSgdOptions;
use crate::{Result, sum_dtype};
use candle_core::{DType, Tensor, Var};

/// A parameter with what the outer optimizer keeps for it.
#[derive(Debug, Clone)]
pub(super) struct OuterParameter {
    pub(super) name: String,
    pub(super) var: Var,
    /// The 32-bit copy that the inner optimizer updates instead.
    pub(super) master: Option<Var>,
    /// The value after the last outer step, which is the same on all replicas. It is wide: f32 for 16-bit floats.
    pub(super) value: Tensor,
    /// The sum of earlier changes, if there is a momentum.
    pub(super) momentum: Option<Tensor>,
}

impl OuterParameter {
    pub(super) fn new(name: String, var: Var, has_momentum: bool) -> Result<Self> {
        let value = wide_copy(&var)?;
        let momentum = has_momentum.then(|| value.zeros_like()).transpose()?;
        Ok(Self { name, var, master: None, value, momentum })
    }

    /// Returns whether this rank has no element of it. Then nothing is computed or sent.
    pub(super) fn is_empty(&self) -> bool {
        self.var.elem_count() == 0
    }

    /// Takes the master weight of the inner optimizer.
    ///
    /// Where the parameter was written to since the master was, the master follows, as optimizers have it.
    pub(super) fn set_master(&mut self, master: &Var) -> Result<()> {
        if !self.is_empty() {
            let (var, rounded) = (self.var.as_detached_tensor(), master.to_dtype(self.var.dtype())?);
            let followed =
                var.eq(&rounded)?.where_cond(&master.as_detached_tensor(), &var.to_dtype(master.dtype())?)?;
            master.set(&followed)?;
        }
        self.master = Some(master.clone());
        Ok(())
    }

    /// Begins with the present value.
    pub(super) fn reset(&mut self) -> Result<()> {
        self.value = wide_copy(self.inner())?;
        Ok(())
    }

    /// Returns what the inner optimizer updates.
    pub(super) fn inner(&self) -> &Var {
        self.master.as_ref().unwrap_or(&self.var)
    }

    /// Returns the dtype in which changes travel.
    pub(super) fn wire_dtype(&self, options: &LocalSgdOptions) -> DType {
        options.reduce_dtype.unwrap_or(self.value.dtype())
    }

    /// Returns how far this replica has gone down since the last outer step: the pseudo-gradient.
    ///
    /// It begins at the rounded value, which is what the replica began with. What the rounding took is kept in the wide value.
    pub(super) fn change(&self, options: &LocalSgdOptions) -> Result<Tensor> {
        let (now, wide) = (self.inner().as_detached_tensor(), self.value.dtype());
        let began = self.value.to_dtype(now.dtype())?.to_dtype(wide)?;
        Ok((began - now.to_dtype(wide)?)?.to_dtype(self.wire_dtype(options))?)
    }

    /// Makes the outer step by the mean of the changes, and leaves this replica with its result, merged with its own value.
    pub(super) fn step(&mut self, mean: &Tensor, merge_weight: f64, options: &LocalSgdOptions) -> Result<()> {
        let mean = mean.to_dtype(self.value.dtype())?;
        let moved = match &self.momentum {
            None => mean,
            Some(momentum) => {
                let momentum = (momentum.affine(options.momentum, 0.0)? + &mean)?;
                let moved = (mean + momentum.affine(options.momentum, 0.0)?)?;
                self.momentum = Some(momentum);
                moved
            }
        };
        self.value = (&self.value - moved.affine(options.lr, 0.0)?)?;
        let own = self.inner().as_detached_tensor();
        let merged = match merge_weight {
            0.0 => self.value.clone(),
            share => {
                let own = own.to_dtype(self.value.dtype())?;
                (self.value.affine(1.0 - share, 0.0)? + own.affine(share, 0.0)?)?
            }
        };
        if let Some(master) = &self.master {
            master.set(&merged.to_dtype(master.dtype())?)?;
        }
        Ok(self.var.set(&merged.to_dtype(self.var.dtype())?)?)
    }
}

/// Returns the value of a variable in memory of its own, wide enough for sums.
fn wide_copy(var: &Var) -> Result<Tensor> {
    let value = var.as_detached_tensor();
    Ok(match sum_dtype(value.dtype()) {
        dtype if value.elem_count() == 0 => Tensor::zeros(value.shape(), dtype, value.device())?,
        dtype if dtype == value.dtype() => value.force_contiguous()?,
        dtype => value.to_dtype(dtype)?,
    })
}
