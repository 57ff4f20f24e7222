//! The graph node of attention on one device, and the parts of attention that other nodes are made of.
use super::visible::KeyBlock;
use super::{Norms, Partial, backward, heads::Sizes};
use crate::real::Real;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use candle_dist::backend::{Fresh, Ready};

/// Attention of queries over blocks of keys that follow each other and are all rows of the key and the value.
///
/// The tensors are of one compute dtype, f32 or f64, and on the host.
pub(crate) fn attend(inputs: [&Tensor; 3], scale: f64, blocks: Vec<KeyBlock>) -> Result<Tensor> {
    match inputs[0].dtype() {
        DType::F64 => run::<f64>(inputs, scale, blocks),
        _ => run::<f32>(inputs, scale, blocks),
    }
}

fn run<T: Real>(inputs: [&Tensor; 3], scale: f64, blocks: Vec<KeyBlock>) -> Result<Tensor> {
    let whole = partial_of_blocks::<T>(inputs, scale, &blocks)?;
    with_result(inputs, whole, scale, blocks)
}

/// Attention over blocks of keys, without a graph.
pub fn partial_of_blocks<T: Real>(inputs: [&Tensor; 3], scale: f64, blocks: &[KeyBlock]) -> Result<Partial<T>> {
    let [q, k, v] = inputs.map(Tensor::detach);
    let parts = blocks.iter().filter(|block| block.visible.any()).map(|block| {
        let [k, v] = [rows_of(&k, block)?, rows_of(&v, block)?];
        Partial::over([&q, &k, &v], scale, &block.visible)
    });
    join_all(sizes([&q, &k, &v])?, parts, scale)
}

/// Returns a known result over these blocks of keys as a graph node. The norms may be those over more keys; then the
/// gradients are those through these blocks only.
pub fn with_result<T: Real>(
    inputs: [&Tensor; 3],
    whole: Partial<T>,
    scale: f64,
    blocks: Vec<KeyBlock>,
) -> Result<Tensor> {
    let shape = [&inputs[0].dims()[..3], &inputs[2].dims()[3..]].concat();
    let storage = T::to_cpu_storage_owned(whole.out);
    let made = Fresh::host(storage, shape);
    if !inputs.iter().any(|x| x.track_op()) {
        return Ok(made.into_tensor());
    }
    let op = Attend { made: Ready::new(made), norms: whole.norms, scale, blocks };
    inputs[0].apply_op3(inputs[1], inputs[2], op)
}

fn rows_of(x: &Tensor, block: &KeyBlock) -> Result<Tensor> {
    if block.rows.len() == x.dim(1)? {
        return Ok(x.clone());
    }
    // candle panics on views without elements that start behind their memory.
    let start = if block.rows.len() * x.elem_count() == 0 { 0 } else { block.rows.start };
    x.narrow(1, start, block.rows.len())
}

/// Returns the sizes of a query, a key and a value.
///
/// # Errors
/// If they do not fit.
pub fn sizes([q, k, v]: [&Tensor; 3]) -> Result<Sizes> {
    match Sizes::of(q.dims(), k.dims(), v.dims()) {
        Some(sizes) => Ok(sizes),
        None => bail!("flash_attn: query {q:?}, key {k:?}, value {v:?} do not fit"),
    }
}

/// Joins results over different keys, in this order.
pub fn join_all<T: Real>(
    sizes: Sizes,
    parts: impl IntoIterator<Item = Result<Partial<T>>>,
    scale: f64,
) -> Result<Partial<T>> {
    let mut whole: Option<Partial<T>> = None;
    for part in parts {
        match &mut whole {
            Some(whole) => whole.join(part?, scale),
            None => whole = Some(part?),
        }
    }
    Ok(whole.unwrap_or_else(|| Partial::nothing(&sizes)))
}

/// Returns the gradients of the query, the key and the value, whose rows are these blocks. `of_rows` has the norms over
/// all keys and the result of [`inner`].
pub fn blocks_backward<T: Real>(
    [q, k, v]: [&Tensor; 3],
    grad: &Tensor,
    of_rows: (&Norms<T>, &[T]),
    scale: f64,
    blocks: &[KeyBlock],
) -> Result<[Tensor; 3]> {
    let mut dq: Option<Tensor> = None;
    let (mut dk, mut dv) = (Vec::new(), Vec::new());
    for block in blocks {
        let (k, v) = (rows_of(k, block)?, rows_of(v, block)?);
        let [of_q, of_k, of_v] = backward::over([q, &k, &v], grad, of_rows, scale, &block.visible)?;
        dq = Some(match dq {
            Some(dq) => (dq + of_q)?,
            None => of_q,
        });
        dk.push(of_k);
        dv.push(of_v);
    }
    let joined = |parts: &[Tensor], x: &Tensor| match parts {
        [] => x.zeros_like(),
        [part] => Ok(part.clone()),
        parts => Tensor::cat(parts, 1),
    };
    Ok([dq.map_or_else(|| q.zeros_like(), Ok)?, joined(&dk, k)?, joined(&dv, v)?])
}

/// Returns the product of each row of the result over all keys with its gradient.
pub fn inner<T: Real>(out: &Tensor, grad: &Tensor) -> Result<Vec<T>> {
    backward::inner(out, grad)
}

struct Attend<T> {
    made: Ready,
    norms: Norms<T>,
    scale: f64,
    blocks: Vec<KeyBlock>,
}

impl<T: Real> CustomOp3 for Attend<T> {
    fn name(&self) -> &'static str {
        "flash_attn"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.made.cpu()
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let inner = inner::<T>(out, grad)?;
        let of_rows = (&self.norms, &inner[..]);
        let [dq, dk, dv] = blocks_backward([q, k, v], grad, of_rows, self.scale, &self.blocks)?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}
