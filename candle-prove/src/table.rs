//! Gradients that tables keep by rows, as dense ones.
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_dist::rows;

/// Returns the gradient that a table keeps by rows, `None` if this is no such table or it has none.
pub(super) fn dense_rows(table: &Var) -> candle_core::Result<Option<Tensor>> {
    let Some((rows, values)) = rows::of(table.id()).map(|gradient| gradient.rows()).transpose()?.flatten()
    else {
        return Ok(None);
    };
    let zeros = Tensor::zeros(table.shape(), values.dtype(), table.device())?;
    if rows.is_empty() {
        return Ok(Some(zeros));
    }
    Ok(Some(zeros.index_add(&Tensor::new(rows, table.device())?, &values, 0)?))
}

/// Moves the gradient that a table keeps by rows to a store, for an optimizer of dense ones.
pub(super) fn take_rows(table: &Var, grads: &mut GradStore) -> candle_core::Result<()> {
    let Some(grad) = dense_rows(table)? else { return Ok(()) };
    let none = Tensor::zeros((0, grad.dim(1)?), grad.dtype(), grad.device())?;
    grads.insert(table, grad);
    rows::of(table.id()).map_or(Ok(()), |gradient| gradient.replace(Vec::new(), none))
}
