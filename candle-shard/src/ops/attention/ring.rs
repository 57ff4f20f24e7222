//! Ring attention: keys and values travel, and the next ones are under way while this rank computes.
use super::mask::Mask;
use super::sequence::{Call, part};
use crate::Result;
use crate::kernels::{self, Norms, Partial, Real};
use candle_core::{DType, Tensor};
use candle_dist::Pending;
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
pub(super) fn run(call: Call, inputs: [&Tensor; 3]) -> Result<Tensor> {
    match inputs[0].dtype() {
        DType::F64 => run_in::<f64>(call, inputs),
        _ => run_in::<f32>(call, inputs),
    }
}

fn run_in<T: Real>(call: Call, inputs: [&Tensor; 3]) -> Result<Tensor> {
    let hops = hops(&call.mask, [&call.queries, &call.keys], &call.batch);
    let ring = Ring { call, hops };
    let [q, k, v] = inputs.map(Tensor::detach);
    let whole = ring.forward::<T>([&q, &k, &v])?;
    let has_keys = inputs[1].track_op() || inputs[2].track_op();
    let backward = move |norms: &Norms<T>, inputs: [&Tensor; 3], [out, grad]: [&Tensor; 2]| {
        let [q, k, v] = inputs.map(Tensor::detach);
        ring.backward([&q, &k, &v], [&out.detach(), grad], (norms, has_keys))
    };
    Ok(kernels::with_backward("ring attention", inputs, whole, backward)?)
}

struct Ring {
    call: Call,
    hops: Vec<usize>,
}

type Visit<'a> = dyn FnMut(usize, usize, &Tensor) -> candle_core::Result<()> + 'a;

impl Ring {
    /// Passes packed keys and values around, and calls `visit(step, owner, packed)` for those that come here.
    ///
    /// The next ones are sent and received meanwhile.
    fn rotate(&self, mine: Tensor, visit: &mut Visit<'_>) -> candle_core::Result<()> {
        let group = &self.call.group;
        let (me, ranks) = (group.rank(), group.size());
        let (next, before) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let (dims, dtype) = (mine.dims().to_vec(), mine.dtype());
        let shape = |owner: usize| {
            let mut shape = dims.clone();
            shape[1] = self.call.keys[owner].len();
            shape
        };
        // Freed when the next ones are here: a rank has those that it uses and those that arrive.
        let (mut held, mut sent) = (Some(mine), Vec::new());
        for step in 0..ranks {
            let owner = (me + ranks - step) % ranks;
            let coming = (owner + ranks - 1) % ranks;
            if let Some(held) = held.as_ref().filter(|_| step < self.hops[owner]) {
                sent.push(group.send_owned_start(held.clone(), next, KEYS)?);
            }
            let arriving = match step < self.hops[coming] {
                true => Some(group.recv_start(shape(coming), dtype, before, KEYS)?),
                false => None,
            };
            if let Some(held) = &held {
                visit(step, owner, held)?;
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

    fn forward<T: Real>(&self, [q, k, v]: [&Tensor; 3]) -> candle_core::Result<Partial<T>> {
        let query = q.to_dtype(T::DTYPE)?;
        let (dim, width, scale) = (k.dim(3)?, v.dim(3)?, self.call.scale);
        let mut whole: Option<Partial<T>> = None;
        self.rotate(Tensor::cat(&[k, v], 3)?, &mut |_, owner, packed| {
            let packed = packed.to_dtype(T::DTYPE)?;
            let (k, v) = (part(&packed, 3, 0, dim)?, part(&packed, 3, dim, width)?);
            let more = kernels::partial_of_blocks([&query, &k, &v], scale, &self.blocks(owner))?;
            match &mut whole {
                Some(whole) => whole.join(more, scale),
                None => whole = Some(more),
            }
            Ok(())
        })?;
        // This rank's own keys are always visited.
        whole.ok_or_else(|| candle_core::Error::msg("a ring without a step").bt())
    }

    fn backward<T: Real>(
        &self,
        [q, k, v]: [&Tensor; 3],
        [out, grad]: [&Tensor; 2],
        (norms, has_keys): (&Norms<T>, bool),
    ) -> candle_core::Result<[Tensor; 3]> {
        let query = q.to_dtype(T::DTYPE)?;
        let inner = kernels::inner::<T>(out, grad)?;
        let group = &self.call.group;
        let (me, ranks) = (group.rank(), group.size());
        let (next, before) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let (dim, width) = (k.dim(3)?, v.dim(3)?);
        let (mut dq, mut own, mut sent): (Option<Tensor>, Option<Tensor>, _) = (None, None, Vec::new());
        self.rotate(Tensor::cat(&[k, v], 3)?, &mut |step, owner, packed| {
            let sums = match has_keys && step > 1 {
                true => Some(group.recv_start(packed.shape(), T::DTYPE, before, SUMS)?),
                false => None,
            };
            let packed = packed.to_dtype(T::DTYPE)?;
            let (k, v) = (part(&packed, 3, 0, dim)?, part(&packed, 3, dim, width)?);
            let of_rows = (norms, &inner[..]);
            let [of_q, of_k, of_v] =
                kernels::blocks_backward([&query, &k, &v], grad, of_rows, self.call.scale, &self.blocks(owner))?;
            dq = Some(match dq.take() {
                Some(dq) => (dq + of_q)?,
                None => of_q,
            });
            if !has_keys {
                return Ok(());
            }
            let of_keys = Tensor::cat(&[of_k, of_v], 3)?;
            if step == 0 {
                own = Some(of_keys);
                return Ok(());
            }
            let of_keys = match sums {
                Some(sums) => (sums.wait()? + of_keys)?,
                None => of_keys,
            };
            let (to, tag) = if step == self.hops[owner] { (owner, HOME) } else { (next, SUMS) };
            sent.push(group.send_owned_start(of_keys, to, tag)?);
            Ok(())
        })?;
        let dq = dq.map_or_else(|| q.zeros_like(), |dq| dq.to_dtype(q.dtype()))?;
        let Some(own) = own else {
            return Ok([dq, k.zeros_like()?, v.zeros_like()?]);
        };
        let own = match self.hops[me] {
            0 => own,
            hops => {
                let from_others = group.recv_start(own.shape(), T::DTYPE, (me + hops) % ranks, HOME)?.wait()?;
                (own + from_others)?
            }
        };
        Pending::wait_all(sent)?;
        let own = own.to_dtype(k.dtype())?;
        Ok([dq, part(&own, 3, 0, dim)?, part(&own, 3, dim, width)?])
    }
}
