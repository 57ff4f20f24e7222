//! Steps of 32 bits for variables of 16.
use candle_core::{DType, Result, Tensor, Var, bail};
use candle_dist::sum_dtype;

/// A 32-bit copy of a variable of 16 bits; `None` for wider ones.
pub(crate) fn master_of(var: &Var) -> Result<Option<Var>> {
    match var.dtype() {
        DType::F16 | DType::BF16 => Ok(Some(Var::from_tensor(&var.as_detached_tensor().to_dtype(DType::F32)?)?)),
        _ => Ok(None),
    }
}

/// Runs `step` of the optimizer `name` with `grad` on `var`, or on its `master`; then `var` is the rounded copy of it.
///
/// `step` gets what it changes and a contiguous gradient, which has the dtype of that, or f32 where that has 16 bits and
/// `wide` is set. It does not run for tensors without elements.
///
/// # Errors
/// If the gradient has another shape, or a dtype that gradients of `var` do not have.
pub(crate) fn on_master(
    name: &str,
    (var, master): (&Var, Option<&Var>),
    grad: &Tensor,
    wide: bool,
    step: impl FnOnce(&Var, &Tensor) -> Result<()>,
) -> Result<()> {
    if grad.shape() != var.shape() || ![var.dtype(), sum_dtype(var.dtype())].contains(&grad.dtype()) {
        let (want, got) = (var.shape(), grad.shape());
        bail!("{name}: a gradient {got:?} {:?} of a variable {want:?} {:?}", grad.dtype(), var.dtype());
    }
    if grad.elem_count() == 0 {
        return Ok(());
    }
    if let Some(master) = master {
        follow(master, var)?;
    }
    let stepped = master.unwrap_or(var);
    let dtype = if wide { sum_dtype(stepped.dtype()) } else { stepped.dtype() };
    // Detached from the graph: what is kept would keep it.
    step(stepped, &grad.detach().to_dtype(dtype)?.contiguous()?)?;
    match master {
        Some(master) => var.set(&master.as_detached_tensor().to_dtype(var.dtype())?),
        None => Ok(()),
    }
}

/// Takes over what was put into `var` from outside since it was rounded from `master`.
fn follow(master: &Var, var: &Var) -> Result<()> {
    let (master_now, var_now) = (master.as_detached_tensor(), var.as_detached_tensor());
    let is_other = master_now.to_dtype(var.dtype())?.ne(&var_now)?;
    if is_other.to_dtype(DType::U32)?.sum_all()?.to_scalar::<u32>()? == 0 {
        return Ok(());
    }
    master.set(&is_other.where_cond(&var_now.to_dtype(master.dtype())?, &master_now)?)
}
