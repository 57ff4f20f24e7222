//! Rotary positions in one launch.
use super::call::{FusedCall, KernelText, Scalar};
use super::run::{made, node, threads_of_each};
use candle_core::{Layout, Result, Tensor, bail};
use candle_dist_base::{Fresh, edges};

/// Rotates rows `[b, .., s, d]`, or back. The tables are `[1 or b, s, d/2]`. Pairs are neighbors, or a half apart.
pub(crate) fn rope(x: &Tensor, tables: [&Tensor; 2], are_neighbors: bool) -> Result<Tensor> {
    // Tables whose rows lie in one line are read where they are; both have the same strides.
    let fits = |table: &Tensor| table.stride()[2] == 1 && table.stride() == tables[0].stride();
    let tables = tables.map(|table| if fits(table) { Ok(table.clone()) } else { table.contiguous() });
    let [cos, sin] = tables;
    let (cos, sin) = (cos?, sin?);
    let (cos, sin) =
        if cos.stride() == sin.stride() { (cos, sin) } else { (cos.contiguous()?, sin.contiguous()?) };
    let input = if strides(x.layout()).is_some() { x.clone() } else { x.contiguous()? };
    let made = turned(&input, [&cos, &sin], are_neighbors, 1.0)?;
    let variable = input.clone();
    node("rope", &[&input], made, move |grad| {
        let dx = turned(&grad.contiguous()?, [&cos, &sin], are_neighbors, -1.0)?.into_tensor();
        Ok([edges::keep(&variable, dx)?, None, None])
    })
}

/// The sizes and strides of a layout as `[batch, heads, tokens, elements]`; `None` if it is none.
fn strides(layout: &Layout) -> Option<([usize; 4], [usize; 4])> {
    let (dims, strides) = (layout.dims(), layout.stride());
    let [tokens, width] = *dims.last_chunk::<2>()?;
    let [of_token, of_element] = *strides.last_chunk::<2>()?;
    let (lead, lead_strides) = (&dims[..dims.len() - 2], &strides[..dims.len() - 2]);
    let (batch, of_batch) =
        lead.first().zip(lead_strides.first()).map_or((1, 0), |(&dim, &stride)| (dim, stride));
    // The dims between, as one.
    let (mut heads, mut of_head) = (1, None);
    for (&dim, &stride) in lead.iter().zip(lead_strides).skip(1).rev().filter(|(dim, _)| **dim != 1) {
        if *of_head.get_or_insert(stride) * heads != stride {
            return None;
        }
        heads *= dim;
    }
    Some(([batch, heads, tokens, width], [of_batch, of_head.unwrap_or(0), of_token, of_element]))
}

fn turned(x: &Tensor, [cos, sin]: [&Tensor; 2], are_neighbors: bool, sign: f64) -> Result<Fresh> {
    let Some(([_, heads, tokens, width], [of_batch, of_head, of_token, of_element])) = strides(x.layout())
    else {
        bail!("rope: the dims of {:?} are not evenly spaced", x.layout());
    };
    let half = width / 2;
    let of_table = if cos.dim(0)? == 1 { 0 } else { cos.stride()[0] };
    let step = if are_neighbors { 1 } else { half };
    let count = x.elem_count() / 2;
    let (grid, block) = threads_of_each(count);
    let counts = [
        count,
        heads,
        tokens,
        half,
        of_batch,
        of_head,
        of_token,
        of_element,
        of_table,
        cos.stride()[1],
        // Halves of two elements are neighbors.
        step,
    ];
    let numbers: Vec<Scalar> = counts.into_iter().map(Scalar::Count).chain([Scalar::Real(sign)]).collect();
    let [out] = made(&FusedCall {
        text: KernelText::Rope,
        op: "rope",
        dtype: x.dtype(),
        grid,
        block,
        inputs: &[Some(x), Some(cos), Some(sin)],
        outputs: &[Some((x.shape().clone(), x.dtype()))],
        numbers: &numbers,
    })?;
    Ok(out)
}
