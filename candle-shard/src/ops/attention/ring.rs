//! Ring attention: keys and values travel, and the next ones are under way while this rank computes.
use super::mask::Mask;
use super::sequence::{AttentionCall, part};
use crate::Result;
use crate::kernels::{self, AttentionDtype, Partial, SoftmaxNorms};
use candle_core::{DType, Tensor};
use candle_dist::{Collective, Pending};
use std::ops::Range;

/// Keys and values on their way.
const KEYS: u32 = 0x5e71;
/// Sums of their gradients on their way.
const SUMS: u32 = 0x5e72;
/// The gradients that a rank returns to the owner of keys and values.
const HOME: u32 = 0x5e73;

/// Returns how far the keys of each rank travel: to the last rank in the ring with a query that sees one of them.
pub(super) fn hops(mask: &Mask, [queries, keys]: [&[Range<usize>]; 2], batch: &Range<usize>) -> Vec<usize> {
    let ranks = keys.len();
    let of_rank = |source: usize| {
        let sees = |&hops: &usize| mask.sees(&queries[(source + hops) % ranks], &keys[source], batch);
        (1..ranks).rev().find(sees).unwrap_or(0)
    };
    (0..ranks).map(of_rank).collect()
}

/// Attention of this rank's queries `[b, q, h, d]`. The result has the dtype of the computation.
pub(super) fn run(call: AttentionCall, inputs: [&Tensor; 3]) -> Result<Tensor> {
    match inputs[0].dtype() {
        DType::F64 => run_in::<f64>(call, inputs),
        _ => run_in::<f32>(call, inputs),
    }
}

fn run_in<T: AttentionDtype>(call: AttentionCall, inputs: [&Tensor; 3]) -> Result<Tensor> {
    let hops = hops(&call.mask, [&call.queries, &call.keys], &call.batch);
    let ring = RingAttention { call, hops };
    let [q, k, v] = inputs.map(Tensor::detach);
    let whole = ring.forward::<T>([&q, &k, &v])?;
    let has_keys = inputs[1].track_op() || inputs[2].track_op();
    let scale = (ring.call.scale, ring.call.log_sums);
    let backward = move |of_rows: (&SoftmaxNorms<T>, &[T]), inputs: [&Tensor; 3], grad: &Tensor| {
        let [q, k, v] = inputs.map(Tensor::detach);
        ring.backward([&q, &k, &v], grad, of_rows, has_keys)
    };
    Ok(kernels::with_backward("ring attention", inputs, whole, scale, backward)?)
}

struct RingAttention {
    call: AttentionCall,
    hops: Vec<usize>,
}

type HopFn<'a> = dyn FnMut(usize, usize, &Tensor) -> candle_core::Result<()> + 'a;

impl RingAttention {
    /// Passes keys and values around, and calls `visit(step, owner, packed)` for those that come here, `[b, k, h, d + v]`.
    ///
    /// The next ones are sent and received meanwhile. The rows of a head follow each other in memory.
    fn rotate(&self, [k, v]: [&Tensor; 2], visit: &mut HopFn<'_>) -> candle_core::Result<()> {
        let mine = Tensor::cat(&[k, v], 3)?.transpose(1, 2)?.contiguous()?;
        let group = &self.call.group;
        // Messages carry no description: this finds ranks that run another layer.
        group.barrier()?;
        let (me, ranks) = (group.rank(), group.size());
        let (next, before) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let (dims, dtype) = (mine.dims().to_vec(), mine.dtype());
        let shape = |owner: usize| {
            let mut shape = dims.clone();
            shape[2] = self.call.keys[owner].len();
            shape
        };
        // Freed when the next ones are here: a rank has those that it uses and those that arrive.
        let (mut held, mut sent) = (Some(mine), Vec::new());
        for step in 0..ranks {
            let owner = (me + ranks - step) % ranks;
            let coming = (owner + ranks - 1) % ranks;
            if let Some(held) = held.as_ref().filter(|_| step < self.hops[owner]) {
                sent.push(
                    group
                        .call(Collective::Send { to: next, tag: KEYS })
                        .owned()
                        .start_all(std::slice::from_ref(held))?,
                );
            }
            let arriving = match step < self.hops[coming] {
                true => Some(
                    group
                        .call(Collective::Recv { from: Some(before), tag: KEYS })
                        .of(shape(coming), dtype)
                        .start(None)?,
                ),
                false => None,
            };
            if let Some(held) = &held {
                visit(step, owner, &held.transpose(1, 2)?)?;
            }
            held = arriving.map(Pending::wait).transpose()?;
        }
        Pending::wait_all(sent)?;
        Ok(())
    }

    fn blocks(&self, owner: usize) -> Vec<kernels::KeyBlock> {
        let call = &self.call;
        call.mask.blocks(&call.queries[call.group.rank()], &call.keys[owner], &call.batch)
    }

    fn forward<T: AttentionDtype>(&self, [q, k, v]: [&Tensor; 3]) -> candle_core::Result<Partial<T>> {
        let (dim, width, scale) = (k.dim(3)?, v.dim(3)?, self.call.scale);
        let mut whole: Option<Partial<T>> = None;
        self.rotate([k, v], &mut |_, owner, packed| {
            let (k, v) = (part(packed, 3, 0, dim)?, part(packed, 3, dim, width)?);
            let more = T::partial_of_blocks([q, &k, &v], scale, &self.blocks(owner))?;
            match &mut whole {
                Some(whole) => whole.join(more, scale),
                None => whole = Some(more),
            }
            Ok(())
        })?;
        // This rank's own keys are always visited.
        whole.ok_or_else(|| candle_core::Error::msg("a ring without a step").bt())
    }

    /// The sums of the gradients of keys and values travel one step behind these. A rank adds to the sums that come, so it
    /// holds one block of them beside those of its own keys.
    fn backward<T: AttentionDtype>(
        &self,
        [q, k, v]: [&Tensor; 3],
        grad: &Tensor,
        (norms, inner): (&SoftmaxNorms<T>, &[T]),
        has_keys: bool,
    ) -> candle_core::Result<[Tensor; 3]> {
        let work = kernels::AttentionBackward { query: q, grad, norms, inner, scale: self.call.scale };
        let group = &self.call.group;
        let (me, ranks) = (group.rank(), group.size());
        let (next, before) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let (batch, kv_heads, dim, width) = (k.dim(0)?, k.dim(2)?, k.dim(3)?, v.dim(3)?);
        let shape = |owner: usize| (batch, self.call.keys[owner].len() * kv_heads * (dim + width));
        let (mut of_query, mut own, mut sent) = (vec![T::zero(); q.elem_count()], None, Vec::new());
        self.rotate([k, v], &mut |step, owner, packed| {
            let sums = match has_keys && step > 1 {
                true => group
                    .call(Collective::Recv { from: Some(before), tag: SUMS })
                    .of(shape(owner), T::DTYPE)
                    .start(None)?
                    .wait()?,
                false => Tensor::zeros(shape(owner), T::DTYPE, k.device())?,
            };
            let keys = [&part(packed, 3, 0, dim)?, &part(packed, 3, dim, width)?];
            T::add_gradients(&work, keys, &self.blocks(owner), &mut of_query, &sums)?;
            if step == 0 {
                own = Some(sums);
            } else if has_keys {
                let (to, tag) = if step == self.hops[owner] { (owner, HOME) } else { (next, SUMS) };
                sent.push(group.call(Collective::Send { to, tag }).owned().start_all(&[sums])?);
            }
            Ok(())
        })?;
        let dq = Tensor::from_vec(of_query, q.shape(), q.device())?.to_dtype(q.dtype())?;
        let Some(own) = own.filter(|_| has_keys) else {
            return Ok([dq, k.zeros_like()?, v.zeros_like()?]);
        };
        let own = match self.hops[me] {
            0 => own,
            hops => {
                let from_others = group
                    .call(Collective::Recv { from: Some((me + hops) % ranks), tag: HOME })
                    .of(shape(me), T::DTYPE)
                    .start(None)?
                    .wait()?;
                (own + from_others)?
            }
        };
        Pending::wait_all(sent)?;
        let [dk, dv] = kernels::split_sums(own, [k.shape(), v.shape()])?;
        Ok([dq, dk.to_dtype(k.dtype())?, dv.to_dtype(k.dtype())?])
    }
}
