//! Attention by its definition on one device, and a comparison of all results with it.
use candle_core::{D, DType, Device, Tensor, Var};
use candle_dist::DeviceMesh;
use candle_shard::{Attention, Placement, Replicate, Result, Shard, Spec};
use test_utils::{Lay, Leaf, distribute, value_error, values};

/// Batch, heads, key heads, dim, width.
pub(crate) type Heads = [usize; 5];

/// Which keys a query sees, pair by pair.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pairs {
    pub(crate) causal: bool,
    pub(crate) window: Option<usize>,
    /// The positions of a chunk, from the first position of a document on.
    pub(crate) chunk: Option<usize>,
    /// The document of each row of each sequence; `None` belongs to no document.
    pub(crate) documents: Vec<Vec<Option<usize>>>,
    /// The cap of the scores.
    pub(crate) cap: Option<f64>,
    /// Whether each head has a sink.
    pub(crate) sinks: bool,
}

impl Pairs {
    fn sees(&self, element: usize, (i, j): (usize, usize), (queries, keys): (usize, usize)) -> bool {
        let (at, j) = (i as i64 + keys as i64 - queries as i64, j as i64);
        let causal = !self.causal || j <= at;
        let window = self.window.is_none_or(|window| (at - j).abs() < window as i64);
        let documents = self.documents.get(element % self.documents.len().max(1));
        let chunk = self.chunk.is_none_or(|chunk| {
            let of = |at: usize| {
                let first = documents.and_then(|rows| rows.iter().position(|other| *other == rows[at]));
                (at - first.unwrap_or(0)) / chunk
            };
            at >= 0 && of(at as usize) == of(j as usize)
        });
        causal && window && chunk && documents.is_none_or(|of| of[i].is_some() && of[i] == of[j as usize])
    }
}

/// The result and the gradients of query, key and value, where the loss is the sum of the result times `weights`.
pub(crate) struct Truth {
    pub(crate) inputs: [Tensor; 3],
    pub(crate) weights: Tensor,
    pub(crate) value: Tensor,
    pub(crate) grads: [Tensor; 3],
    /// The sinks and their gradient, if there are some.
    pub(crate) sinks: Option<[Tensor; 2]>,
}

/// Computes attention by its definition, with all scores in memory.
pub(crate) fn truth(
    [batch, heads, kv_heads, dim, width]: Heads,
    (queries, keys): (usize, usize),
    (pairs, scale): (&Pairs, f64),
    dtype: DType,
) -> candle_core::Result<Truth> {
    let of = |shape: [usize; 4], seed| values(&shape, seed, dtype);
    let inputs = [
        of([batch, queries, heads, dim], 1),
        of([batch, keys, kv_heads, dim], 2),
        of([batch, keys, kv_heads, width], 3),
    ];
    let weights = of([batch, queries, heads, width], 4);
    let vars = [Var::from_tensor(&inputs[0])?, Var::from_tensor(&inputs[1])?, Var::from_tensor(&inputs[2])?];
    let group = heads / kv_heads;
    let heads_first = |x: &Tensor, group: usize| -> candle_core::Result<Tensor> {
        let (b, t, g, d) = x.dims4()?;
        x.transpose(1, 2)?.unsqueeze(2)?.broadcast_as((b, g, group, t, d))?.reshape((b, g * group, t, d))
    };
    let [q, k, v] = [heads_first(&vars[0], 1)?, heads_first(&vars[1], group)?, heads_first(&vars[2], group)?];
    let seen = (0..batch).flat_map(|b| {
        (0..queries)
            .flat_map(move |i| (0..keys).map(move |j| u8::from(pairs.sees(b, (i, j), (queries, keys)))))
    });
    let seen = Tensor::from_iter(seen, &Device::Cpu)?.reshape((batch, 1, queries, keys))?;
    let scores = (q.matmul(&k.t()?.contiguous()?)? * scale)?;
    let scores = match pairs.cap {
        Some(cap) => ((scores / cap)?.tanh()? * cap)?,
        None => scores,
    };
    let seen = seen.broadcast_as(scores.shape())?;
    let hidden = Tensor::new(-1e30, &Device::Cpu)?.to_dtype(dtype)?.broadcast_as(scores.shape())?;
    let scores = seen.where_cond(&scores, &hidden)?;
    let sinks = pairs.sinks.then(|| Var::from_tensor(&values(&[heads], 5, dtype))).transpose()?;
    let weighted = match &sinks {
        None => candle_nn::ops::softmax(&scores, D::Minus1)?,
        Some(sinks) => {
            let column = sinks.reshape((1, heads, 1, 1))?.broadcast_as((batch, heads, queries, 1))?;
            candle_nn::ops::softmax(&Tensor::cat(&[&scores, &column], 3)?, D::Minus1)?.narrow(3, 0, keys)?
        }
    };
    let weighted = seen.where_cond(&weighted, &weighted.zeros_like()?)?;
    let value = weighted.matmul(&v.contiguous()?)?.transpose(1, 2)?;
    let grads = (&value * &weights)?.sum_all()?.backward()?;
    let grad = |i: usize| grads.get(&vars[i]).cloned().map_or_else(|| vars[i].zeros_like(), Ok);
    let of_sinks = |sinks: &Var| -> candle_core::Result<[Tensor; 2]> {
        let grad = grads.get(sinks).cloned().map_or_else(|| sinks.zeros_like(), Ok)?;
        Ok([sinks.as_detached_tensor(), grad])
    };
    let sinks = sinks.as_ref().map(of_sinks).transpose()?;
    let grads = [grad(0)?, grad(1)?, grad(2)?];
    Ok(Truth { inputs, weights, value: value.detach().contiguous()?, grads, sinks })
}

/// The rows of queries and of keys on each rank; the default sizes if there are none.
pub(crate) type Cuts<'a> = [Option<&'a [usize]>; 2];

/// Returns how `[batch, rows, ..]` lies: rows on the last axis of the mesh, the batch on another one.
pub(crate) fn placements(mesh: &DeviceMesh) -> Vec<Placement> {
    (0..mesh.ndim()).map(|axis| Shard(usize::from(axis + 1 == mesh.ndim()))).collect()
}

/// Runs attention of sequence shards, and returns the largest error of the result and of the gradients.
pub(crate) fn errors(truth: &Truth, options: &Attention, mesh: &DeviceMesh, [q, k]: Cuts<'_>) -> Result<f64> {
    let at = placements(mesh);
    let ordered =
        |x: &Tensor| options.order.as_ref().map_or_else(|| Ok(x.clone()), |order| order.apply(x, 1));
    let leaf = |i: usize, sizes: Option<&[usize]>| -> Result<Leaf> {
        let whole = ordered(&truth.inputs[i])?;
        let spec = Spec::new(mesh, &at, whole.shape(), whole.dtype())?
            .with_sizes(mesh.ndim() - 1, sizes.map(Into::into))?;
        Leaf::with_spec(&whole, spec, &at.iter().copied().map(Lay::At).collect::<Vec<_>>())
    };
    let leaves = [leaf(0, q)?, leaf(1, k)?, leaf(2, k)?];
    let options = options.clone().log_sums(truth.sinks.is_some());
    let mut out = options.of(&leaves[0].tensor, &leaves[1].tensor, &leaves[2].tensor)?;
    let everywhere = vec![Replicate; mesh.ndim()];
    let sinks = truth.sinks.as_ref().map(|[sinks, _]| {
        let spec = Spec::new(mesh, &everywhere, sinks.shape(), sinks.dtype())?;
        Leaf::with_spec(sinks, spec, &vec![Lay::At(Replicate); mesh.ndim()])
    });
    let sinks = sinks.transpose()?;
    if let Some(sinks) = &sinks {
        out = out.with_sinks(&sinks.tensor, truth.value.dtype())?;
    }
    assert_eq!(out.placements(), at);
    let mut worst = value_error(&out, &ordered(&truth.value)?)?;
    let weights = distribute(&ordered(&truth.weights)?, mesh, &vec![Replicate; mesh.ndim()])?;
    let grads = out.mul(&weights)?.sum_all()?.backward()?;
    if let (Some(leaf), Some([_, grad])) = (&sinks, &truth.sinks) {
        worst = worst.max(leaf.gradient_error(&grads, grad)?);
    }
    for (leaf, grad) in leaves.iter().zip(&truth.grads) {
        worst = worst.max(leaf.gradient_error(&grads, &ordered(grad)?)?);
    }
    Ok(worst)
}

/// The difference that rounding may cause.
pub(crate) fn allowed(dtype: DType) -> f64 {
    if dtype == DType::F64 { 1e-12 } else { 1e-5 }
}
