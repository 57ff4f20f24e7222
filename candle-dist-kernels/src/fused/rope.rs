//! Rotary positions of one or two tensors in one launch.
use super::call::{FusedCall, KernelText, Scalar};
use super::run::{node, node_of_two, threads_of_each};
use candle_core::{Layout, Result, Shape, Tensor, bail};
use candle_dist_base::{Fresh, edges};

/// The tables `[1 or b, s, d/2]` of cosines and of sines, and whether the elements of a pair are neighbors, or a half apart.
#[derive(Clone)]
struct TurnAngles {
    tables: [Tensor; 2],
    are_neighbors: bool,
}

/// Rotates rows `[b, .., s, d]`, or back. The tables are `[1 or b, s, d/2]`. Pairs are neighbors, or a half apart.
pub(crate) fn rope(x: &Tensor, tables: [&Tensor; 2], are_neighbors: bool) -> Result<Tensor> {
    let (angles, input) = (TurnAngles::new(tables, are_neighbors)?, evenly_spaced(x)?);
    let heads = [HeadOrder::Heads; 2];
    let [Some(made), None] = turned([Some(&input), None], heads, &angles, 1.0)? else {
        bail!("rope: no result")
    };
    let variable = input.clone();
    node("rope", &[&input], made, move |grad| {
        let order = HeadOrder::of(&variable);
        let [dx, _] = turned([Some(&grad.contiguous()?), None], [order; 2], &angles, -1.0)?;
        let kept = |dx| edges::keep(&variable, order.view(dx)?);
        Ok([dx.map(kept).transpose()?.flatten(), None, None])
    })
}

/// Rotates the rows of two tensors, whose batch, rows and widths are alike.
pub(crate) fn rope_both(
    [x, y]: [&Tensor; 2],
    tables: [&Tensor; 2],
    are_neighbors: bool,
) -> Result<[Tensor; 2]> {
    let angles = TurnAngles::new(tables, are_neighbors)?;
    let inputs = [evenly_spaced(x)?, evenly_spaced(y)?];
    let heads = [HeadOrder::Heads; 2];
    let [Some(of_x), Some(of_y)] = turned(inputs.each_ref().map(Some), heads, &angles, 1.0)? else {
        bail!("rope: no result")
    };
    let variables = inputs.clone();
    node_of_two("rope", &inputs.each_ref(), [of_x, of_y], move |grads| {
        let orders = variables.each_ref().map(HeadOrder::of);
        let wanted = |which: usize| {
            let grad = grads[which].filter(|_| variables[which].track_op());
            grad.map(evenly_spaced).transpose()
        };
        let (of_x, of_y) = (wanted(0)?, wanted(1)?);
        let turned = turned([of_x.as_ref(), of_y.as_ref()], orders, &angles, -1.0)?;
        let mut kept = edges::Grads::default();
        for (at, (turned, variable)) in turned.into_iter().zip(&variables).enumerate() {
            kept[at] = match turned {
                Some(dx) => edges::keep(variable, orders[at].view(dx)?)?,
                // The loss does not depend on this one, whose own inputs need a gradient.
                None if variable.track_op() && !variable.is_variable() => Some(variable.zeros_like()?),
                None => None,
            };
        }
        Ok(kept)
    })
}

/// How the rows of a result follow each other in its memory.
#[derive(Clone, Copy, PartialEq)]
enum HeadOrder {
    /// The tokens of a head.
    Heads,
    /// The heads of a token, as a projection makes them. The result is `[b, s, heads, d]`.
    Tokens,
}

impl HeadOrder {
    /// The order of a tensor, whose gradient is then dense for what made it.
    fn of(x: &Tensor) -> Self {
        let is_turned = x.rank() == 4 && !x.is_contiguous();
        match is_turned && x.layout().transpose(1, 2).is_ok_and(|layout| layout.is_contiguous()) {
            true => Self::Tokens,
            false => Self::Heads,
        }
    }

    /// The result as `[b, .., s, d]`.
    fn view(self, made: Fresh) -> Result<Tensor> {
        match self {
            Self::Heads => Ok(made.into_tensor()),
            Self::Tokens => made.into_tensor().transpose(1, 2),
        }
    }
}

impl TurnAngles {
    /// Tables whose rows lie in one line are read where they are; both have the same strides.
    fn new(tables: [&Tensor; 2], are_neighbors: bool) -> Result<Self> {
        let fits = |table: &Tensor| table.stride()[2] == 1 && table.stride() == tables[0].stride();
        let tables = tables.map(|table| if fits(table) { Ok(table.clone()) } else { table.contiguous() });
        let [cos, sin] = tables;
        let (cos, sin) = (cos?, sin?);
        let tables =
            if cos.stride() == sin.stride() { [cos, sin] } else { [cos.contiguous()?, sin.contiguous()?] };
        Ok(Self { tables, are_neighbors })
    }
}

fn evenly_spaced(x: &Tensor) -> Result<Tensor> {
    if strides(x.layout()).is_some() { Ok(x.clone()) } else { x.contiguous() }
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

/// The rows of tensors, turned by the angles times `sign`, in these orders.
fn turned(
    tensors: [Option<&Tensor>; 2],
    orders: [HeadOrder; 2],
    angles: &TurnAngles,
    sign: f64,
) -> Result<[Option<Fresh>; 2]> {
    let Some(first) = tensors.into_iter().flatten().next() else { return Ok([None, None]) };
    let Some(([_, _, tokens, width], _)) = strides(first.layout()) else {
        bail!("rope: the dims of {:?} are not evenly spaced", first.layout());
    };
    let mut counts = Vec::with_capacity(21);
    for (x, order) in tensors.into_iter().zip(orders) {
        let rows = match x {
            None => [0; 8],
            Some(x) => {
                let Some(([_, heads, ..], [of_batch, of_head, of_token, of_element])) = strides(x.layout())
                else {
                    bail!("rope: the dims of {:?} are not evenly spaced", x.layout());
                };
                let [to_head, to_token] = match order {
                    HeadOrder::Heads => [tokens * width, width],
                    HeadOrder::Tokens => [width, heads * width],
                };
                [x.elem_count() / 2, heads, of_batch, of_head, of_token, of_element, to_head, to_token]
            }
        };
        counts.extend(rows);
    }
    let ([cos, sin], half) = (&angles.tables, width / 2);
    let of_table = if cos.dim(0)? == 1 { 0 } else { cos.stride()[0] };
    // Halves of two elements are neighbors.
    let step = if angles.are_neighbors { 1 } else { half };
    let (grid, block) = threads_of_each(counts[0] + counts[8]);
    counts.extend([tokens, half, of_table, cos.stride()[1], step]);
    let numbers: Vec<Scalar> = counts.into_iter().map(Scalar::Count).chain([Scalar::Real(sign)]).collect();
    let shape = |(x, order): (Option<&Tensor>, HeadOrder)| {
        x.map(|x| match (order, x.dims()) {
            (HeadOrder::Tokens, &[b, heads, s, d]) => (Shape::from((b, s, heads, d)), x.dtype()),
            _ => (x.shape().clone(), x.dtype()),
        })
    };
    let outputs = [0, 1].map(|at| shape((tensors[at], orders[at])));
    let call = FusedCall {
        text: KernelText::Rope,
        op: "rope",
        dtype: first.dtype(),
        grid,
        block,
        inputs: &[tensors[0], tensors[1], Some(cos), Some(sin)],
        outputs: &outputs,
        numbers: &numbers,
    };
    let mut made = call.run()?.into_iter();
    Ok(tensors.map(|x| x.and_then(|_| made.next())))
}
