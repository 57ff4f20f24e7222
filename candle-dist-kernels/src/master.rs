//! 32-bit optimizer steps for 16-bit variables.
use candle_core::{DType, Result, Tensor, Var, bail};
use candle_dist_base::{empty, sum_dtype};

use super::convert::to_dtype;

/// Returns a 32-bit copy of a 16-bit variable; `None` for wider ones.
pub fn master_of(var: &Var) -> Result<Option<Var>> {
    match var.dtype() {
        DType::F16 | DType::BF16 => {
            Ok(Some(Var::from_tensor(&empty::compute(&var.as_detached_tensor(), |var| {
                to_dtype(var, DType::F32)
            })?)?))
        }
        _ => Ok(None),
    }
}

/// Checks a gradient of `var` for the optimizer `name`.
///
/// # Errors
/// If the gradient has another shape, or a dtype that gradients of `var` do not have.
pub fn check_gradient(name: &str, var: &Var, grad: &Tensor) -> Result<()> {
    if grad.shape() != var.shape() || ![var.dtype(), sum_dtype(var.dtype())].contains(&grad.dtype()) {
        let (want, got) = (var.shape(), grad.shape());
        bail!("{name}: a gradient {got:?} {:?} of a variable {want:?} {:?}", grad.dtype(), var.dtype());
    }
    Ok(())
}

/// Runs `step` of the optimizer `name` with `grad` on `var`, or on its `master`, and then sets `var` to the rounded
/// master.
///
/// `step` gets the variable to update and a contiguous gradient in its compute dtype: f32 if the variable has 16 bits.
/// `step` does not run for tensors without elements.
///
/// # Errors
/// If the gradient has another shape, or a dtype that gradients of `var` do not have.
pub fn on_master(
    name: &str,
    (var, master): (&Var, Option<&Var>),
    grad: &Tensor,
    step: impl FnOnce(&Var, &Tensor) -> Result<()>,
) -> Result<()> {
    check_gradient(name, var, grad)?;
    if grad.elem_count() == 0 {
        return Ok(());
    }
    if let Some(master) = master {
        follow(master, var)?;
    }
    let stepped = master.unwrap_or(var);
    // Detached, because state that is kept would keep the graph alive.
    step(stepped, &to_dtype(&grad.detach(), sum_dtype(stepped.dtype()))?.contiguous()?)?;
    match master {
        Some(master) => var.set(&to_dtype(&master.as_detached_tensor(), var.dtype())?),
        None => Ok(()),
    }
}

/// Copies elements to `master` that were written to `var` from outside since `var` was rounded from `master`.
fn follow(master: &Var, var: &Var) -> Result<()> {
    let (master_now, var_now) = (master.as_detached_tensor(), var.as_detached_tensor());
    let is_other = to_dtype(&master_now, var.dtype())?.ne(&var_now)?;
    // The host would wait for another device to know whether there is one.
    if var.device().is_cpu() && is_other.to_dtype(DType::U32)?.sum_all()?.to_scalar::<u32>()? == 0 {
        return Ok(());
    }
    master.set(&is_other.where_cond(&var_now.to_dtype(master.dtype())?, &master_now)?)
}
