//! Softmax in one launch.
use super::call::{FusedCall, KernelText, Scalar};
use super::run::{made, threads_of_row};
use candle_core::{D, Result, Tensor};
use candle_dist_base::edges;

/// What a mask adds to rows: the sizes of their four leading dims, and by how many of its rows each moves.
pub(crate) type MaskRows = [[usize; 4]; 2];

/// Returns how rows of scores find those of a mask that is broadcast to them; `None` if they have more than four leading dims.
pub(crate) fn mask_rows(x: &[usize], mask: &[usize]) -> Option<MaskRows> {
    let (lead, of_mask) = (&x[..x.len() - 1], &mask[..mask.len() - 1]);
    let mut rows = [[1; 4], [0; 4]];
    let first = 4usize.checked_sub(lead.len())?;
    rows[0][first..].copy_from_slice(lead);
    let mut step = 1;
    for (at, &size) in of_mask.iter().enumerate().rev() {
        let dim = first + lead.len() - of_mask.len() + at;
        rows[1][dim] = if size == 1 { 0 } else { step };
        step *= size;
    }
    Some(rows)
}

/// `softmax(x · scale + mask)` of rows. With `queries`, which are the rows of one matrix of scores, later keys are hidden.
///
/// The mask gets no gradient.
pub(crate) fn softmax(
    name: &'static str,
    x: &Tensor,
    scale: f64,
    queries: Option<usize>,
    mask: Option<(&Tensor, MaskRows)>,
) -> Result<Tensor> {
    let x = x.contiguous()?;
    let mask = match mask {
        Some((mask, rows)) => Some((mask.detach().contiguous()?, rows)),
        None => None,
    };
    let (keys, queries) = (x.dim(D::Minus1)?, queries.unwrap_or(0));
    let [dims, steps] = mask.as_ref().map_or([[1; 4], [0; 4]], |(_, rows)| *rows);
    let counts = [keys, queries].into_iter().chain(dims).chain(steps).map(Scalar::Count);
    let numbers: Vec<Scalar> = counts.chain([Scalar::Real(scale)]).collect();
    let (rows, dtype) = (x.elem_count() / keys, x.dtype());
    let (grid, block) = ([rows, 1], [threads_of_row(keys), 1]);
    let outputs = [Some((x.shape().clone(), dtype))];
    let text = KernelText::Softmax;
    let [out] = made(&FusedCall {
        text,
        op: "softmax",
        dtype,
        grid,
        block,
        inputs: &[Some(&x), mask.as_ref().map(|(mask, _)| mask)],
        outputs: &outputs,
        numbers: &numbers,
    })?;
    if !edges::has_ticket(&[&x]) {
        return Ok(out.into_tensor());
    }
    let input = x.clone();
    edges::record_with_result(name, &[&x], out, move |y, grad| {
        let grad = grad.contiguous()?;
        let numbers = [Scalar::Count(keys), Scalar::Count(queries), Scalar::Real(scale)];
        let inputs = [Some(y), Some(&grad)];
        let op = "softmax_input";
        let [dx] = made(&FusedCall {
            text,
            op,
            dtype,
            grid,
            block,
            inputs: &inputs,
            outputs: &outputs,
            numbers: &numbers,
        })?;
        Ok([edges::keep(&input, dx.into_tensor())?, None, None])
    })
}
