//! Numbers that the host reads from devices.
use candle_core::{Result, Tensor, WithDType};

/// Reads lists of numbers one after the other. The host waits for a device once, if all are on the same.
pub(super) fn read_all<T: WithDType>(lists: &[Tensor]) -> Result<Vec<T>> {
    let Some(first) = lists.first() else { return Ok(Vec::new()) };
    if lists.iter().all(|list| list.device().same_device(first.device())) {
        return Tensor::cat(lists, 0)?.to_vec1();
    }
    Ok(lists.iter().map(Tensor::to_vec1).collect::<Result<Vec<_>>>()?.concat())
}
