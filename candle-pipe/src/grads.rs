//! Sums of gradients over several passes.
use crate::Result;
use candle_core::backprop::GradStore;
use candle_dist::add_grad;

/// Adds the gradients of a pass to the sums of earlier ones, which are f32 for 16-bit parameters.
pub(crate) fn add(sums: &mut GradStore, grads: &GradStore) -> Result<()> {
    for &id in grads.get_ids() {
        if let Some(grad) = grads.get_id(id) {
            let sum = add_grad(sums.get_id(id), grad)?;
            sums.insert_id(id, sum);
        }
    }
    Ok(())
}
