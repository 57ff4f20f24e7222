//! Numbers that the host reads from devices.
use crate::ProcessGroup;
use candle_core::{Result, Tensor, WithDType};
use std::borrow::Cow;

/// Joins the lists if all are on one device, so that the host waits for it once.
fn joined(lists: &[Tensor]) -> Result<Cow<'_, [Tensor]>> {
    let Some(first) = lists.first() else { return Ok(Cow::Borrowed(lists)) };
    Ok(match lists.iter().all(|list| list.device().same_device(first.device())) {
        true => Cow::Owned(vec![Tensor::cat(lists, 0)?]),
        false => Cow::Borrowed(lists),
    })
}

/// Reads lists of numbers one after the other.
pub(super) fn read_all<T: WithDType>(lists: &[Tensor]) -> Result<Vec<T>> {
    Ok(joined(lists)?.iter().map(Tensor::to_vec1).collect::<Result<Vec<_>>>()?.concat())
}

/// Like [`read_all`] for results of calls of a group, by [`ProcessGroup::to_host`].
pub(super) fn read_results<T: WithDType>(group: &ProcessGroup, lists: &[Tensor]) -> crate::Result<Vec<T>> {
    let read = |list| Ok(group.to_host(list)?.to_vec1()?);
    Ok(joined(lists)?.iter().map(read).collect::<crate::Result<Vec<_>>>()?.concat())
}
