//! Functions that cut blocks out of tensors and join them.
use crate::Result;
use crate::layout::Block;
use candle_core::{DType, Device, Tensor};
use candle_dist::ProcessGroup;
use std::ops::Range;

/// Copies `block` out of a tensor whose first element has the global index `origin`.
pub(super) fn cut(tensor: &Tensor, origin: &[usize], block: &[Range<usize>]) -> Result<Tensor> {
    Ok(view(tensor, origin, block)?.force_contiguous()?)
}

/// Returns a view of `block` of a tensor whose first element has the global index `origin`.
pub(super) fn view(tensor: &Tensor, origin: &[usize], block: &[Range<usize>]) -> candle_core::Result<Tensor> {
    let mut dims = origin.iter().zip(block).enumerate();
    dims.try_fold(tensor.detach(), |part, (dim, (&at, range))| part.narrow(dim, range.start - at, range.len()))
}

/// Joins blocks that together cover `want`, in new memory.
pub(super) fn joined(want: &Block, dtype: DType, device: &Device, blocks: &[(Tensor, Block)]) -> Result<Tensor> {
    if let [(only, block)] = blocks
        && block == want
    {
        return Ok(only.detach().force_contiguous()?);
    }
    let shape: Vec<usize> = want.iter().map(Range::len).collect();
    let whole = Tensor::zeros(shape, dtype, device)?;
    for (tensor, block) in blocks {
        let starts: Vec<usize> = block.iter().zip(want).map(|(range, want)| range.start - want.start).collect();
        write(&whole, &tensor.detach().contiguous()?, &starts)?;
    }
    Ok(whole)
}

/// Returns a tensor that was received, on this device: over NCCL it arrives on the rank's GPU.
pub(super) fn arrived(group: &ProcessGroup, tensor: &Tensor, device: &Device) -> Result<Tensor> {
    if device.is_cpu() { Ok(group.to_host(tensor)?) } else { Ok(tensor.to_device(device)?) }
}

/// Writes `part` over the elements of `whole` that begin at `starts`; both are contiguous.
pub(super) fn write(whole: &Tensor, part: &Tensor, starts: &[usize]) -> candle_core::Result<()> {
    if part.elem_count() == 0 {
        return Ok(());
    }
    let cut: Vec<usize> = (0..starts.len()).filter(|&dim| whole.dims()[dim] != part.dims()[dim]).collect();
    match cut[..] {
        // candle writes a range of one dim in one call.
        [] => whole.flatten_all()?.slice_set(&part.flatten_all()?, 0, 0),
        [dim] => whole.slice_set(part, dim, starts[dim]),
        // With several dims cut, write row by row of the first dim.
        _ => (0..part.dims()[0]).try_for_each(|row| write(&whole.get(starts[0] + row)?, &part.get(row)?, &starts[1..])),
    }
}
