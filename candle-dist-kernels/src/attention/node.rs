//! The graph node of attention on one device, and the parts of attention that other nodes are made of.
use super::visible::KeyBlock;
use super::{
    AttentionBackward, AttentionDtype, Partial, Scale, SoftmaxNorms, backward, heads::AttentionSizes,
};
use crate::convert::to_dtype;
use crate::real::Real;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp3, DType, Device, Layout, MetalStorage, Result, Shape, Tensor, bail,
};
use candle_dist_base::edges;
use candle_dist_base::{Fresh, Ready};

/// Attention of queries over blocks of keys that follow each other and are all rows of the key and the value.
///
/// The tensors are of one float dtype and on the host; the result has the compute dtype. See
/// [`flash_attn_of_blocks`](crate::parts::flash_attn_of_blocks) for `log_sums`.
pub(crate) fn attend(
    inputs: [&Tensor; 3],
    scale: Scale,
    blocks: Vec<KeyBlock>,
    log_sums: bool,
) -> Result<Tensor> {
    match inputs[0].dtype() {
        DType::F64 => run::<f64>(inputs, scale, blocks, log_sums),
        _ => run::<f32>(inputs, scale, blocks, log_sums),
    }
}

fn run<T: AttentionDtype>(
    inputs: [&Tensor; 3],
    scale: Scale,
    blocks: Vec<KeyBlock>,
    log_sums: bool,
) -> Result<Tensor> {
    let whole = partial_of_blocks::<T>(inputs, scale, &blocks)?;
    with_result(inputs, whole, (scale, log_sums), blocks)
}

/// See [`AttentionDtype`](super::AttentionDtype).
pub(super) fn partial_of_blocks<T: Real>(
    inputs: [&Tensor; 3],
    scale: Scale,
    blocks: &[KeyBlock],
) -> Result<Partial<T>> {
    let [q, k, v] = inputs.map(Tensor::detach);
    let parts = blocks.iter().filter(|block| block.visible.any()).map(|block| {
        let [k, v] = [rows_of(&k, block)?, rows_of(&v, block)?];
        Partial::over([&q, &k, &v], scale, &block.visible)
    });
    join_all(sizes([&q, &k, &v])?, parts, scale)
}

/// See [`AttentionDtype`](super::AttentionDtype).
pub(super) fn with_result<T: AttentionDtype>(
    inputs: [&Tensor; 3],
    whole: Partial<T>,
    (scale, log_sums): (Scale, bool),
    blocks: Vec<KeyBlock>,
) -> Result<Tensor> {
    with_backward("flash_attn", inputs, whole, (scale, log_sums), move |of_rows, inputs, grad| {
        blocks_backward(inputs, grad, of_rows, scale, &blocks)
    })
}

/// Returns a known result of a query, a key and a value as a graph node, perhaps with the logarithms of the sums of each row.
/// `backward` computes the gradients from the norms and the [inner](AttentionBackward::inner) products of the rows, the
/// inputs, and the gradient of the result.
pub fn with_backward<T: AttentionDtype>(
    name: &'static str,
    inputs: [&Tensor; 3],
    whole: Partial<T>,
    (scale, log_sums): (Scale, bool),
    backward: impl Fn((&SoftmaxNorms<T>, &[T]), [&Tensor; 3], &Tensor) -> Result<[Tensor; 3]>
    + Send
    + Sync
    + 'static,
) -> Result<Tensor> {
    let mut shape = [&inputs[0].dims()[..3], &inputs[2].dims()[3..]].concat();
    let width = shape[3];
    let out = if log_sums { whole.beside_log_sums(scale) } else { whole.out };
    shape[3] += usize::from(log_sums);
    let (norms, made) = (whole.norms, Fresh::host(T::to_cpu_storage_owned(out), shape));
    graph_node(name, inputs, made, move |inputs, [out, grad]| {
        let inner = T::inner(out, grad, width)?;
        // Without a width the gradient of the values has no elements, and begins where the memory does.
        let grad = if log_sums { grad.narrow(3, 0, width)?.force_contiguous()? } else { grad.clone() };
        backward((&norms, &inner[..]), inputs, &grad)
    })
}

/// Returns what was made of three inputs, such as a query, a key and a value, as a graph node, if one of them needs a gradient.
pub(crate) fn graph_node(
    name: &'static str,
    inputs: [&Tensor; 3],
    made: Fresh,
    backward: impl Fn([&Tensor; 3], [&Tensor; 2]) -> Result<[Tensor; 3]> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !inputs.iter().any(|x| x.track_op()) {
        return Ok(made.into_tensor());
    }
    edges::apply3(inputs[0], inputs[1], inputs[2], Attend { name, made: Ready::new(made), backward })
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
pub fn sizes([q, k, v]: [&Tensor; 3]) -> Result<AttentionSizes> {
    match AttentionSizes::of(q.dims(), k.dims(), v.dims()) {
        Some(sizes) => Ok(sizes),
        None => bail!("flash_attn: query {q:?}, key {k:?}, value {v:?} do not fit"),
    }
}

/// Joins results over different keys, in this order.
pub fn join_all<T: Real>(
    sizes: AttentionSizes,
    parts: impl IntoIterator<Item = Result<Partial<T>>>,
    scale: Scale,
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
/// all keys and what [`backward::inner`] returns.
fn blocks_backward<T: Real>(
    [q, k, v]: [&Tensor; 3],
    grad: &Tensor,
    of_rows: (&SoftmaxNorms<T>, &[T]),
    scale: Scale,
    blocks: &[KeyBlock],
) -> Result<[Tensor; 3]> {
    let batch = sizes([q, k, v])?.batch;
    let mut of_query = vec![T::zero(); q.elem_count()];
    let mut of_keys = vec![T::zero(); k.elem_count() + v.elem_count()];
    let (norms, inner) = of_rows;
    AttentionBackward { query: q, grad, norms, inner, scale }.add(
        [k, v],
        blocks,
        &mut of_query,
        &mut of_keys,
    )?;
    let dq = Tensor::from_vec(of_query, q.shape(), &Device::Cpu)?;
    let len = of_keys.len().checked_div(batch).unwrap_or(0);
    let [dk, dv] =
        split_sums(Tensor::from_vec(of_keys, (batch, len), &Device::Cpu)?, [k.shape(), v.shape()])?;
    Ok([dq, dk, dv])
}

impl<T: Real> AttentionBackward<'_, T> {
    /// Adds the gradients through blocks of the rows of a key and a value: that of the query to `of_query`, and those of the
    /// key and the value to `of_keys`. For each element of the batch `of_keys` has that of the key, then that of the value.
    pub(super) fn add(
        &self,
        [k, v]: [&Tensor; 2],
        blocks: &[KeyBlock],
        of_query: &mut [T],
        of_keys: &mut [T],
    ) -> Result<()> {
        blocks.iter().filter(|block| block.visible.any()).try_for_each(|block| {
            let (k, v) = (rows_of(k, block)?, rows_of(v, block)?);
            backward::over(self, [&k, &v], (block.rows.start, &block.visible), of_query, of_keys)
        })
    }
}

/// Returns the gradients of a key and a value of these shapes, from the sums `[batch, len]` of [`AttentionDtype::add_gradients`](super::AttentionDtype::add_gradients).
pub fn split_sums(sums: Tensor, [k, v]: [&Shape; 2]) -> Result<[Tensor; 2]> {
    let batch = k.dims().first().copied().unwrap_or(0);
    let of_element = |shape: &Shape| shape.elem_count().checked_div(batch).unwrap_or(0);
    let (of_k, of_v) = (of_element(k), of_element(v));
    // candle panics on views without elements that start behind their memory.
    let start = if of_v * batch == 0 { 0 } else { of_k };
    let part = |start: usize, len: usize, shape: &Shape| {
        sums.narrow(1, start, len)?.force_contiguous()?.reshape(shape)
    };
    Ok([part(0, of_k, k)?, part(start, of_v, v)?])
}

struct Attend<B> {
    name: &'static str,
    made: Ready,
    backward: B,
}

impl<B> CustomOp3 for Attend<B>
where
    B: Fn([&Tensor; 3], [&Tensor; 2]) -> Result<[Tensor; 3]> + Send + Sync,
{
    fn name(&self) -> &'static str {
        self.name
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

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.made.cuda()
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.made.metal()
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dq, dk, dv] = (self.backward)([q, k, v], [out, grad])?;
        Ok((
            Some(to_dtype(&dq, q.dtype())?),
            Some(to_dtype(&dk, k.dtype())?),
            Some(to_dtype(&dv, v.dtype())?),
        ))
    }
}
