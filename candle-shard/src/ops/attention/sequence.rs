//! Attention of tensors that are sharded along the sequence.
use super::mask::Mask;
use super::options::{Attention, ContextWay};
use super::{all_heads, heads, ring};
use crate::kernels::{self, Scale};
use crate::layout::{Replicate, Shard, Spec};
use crate::redistribute::{Target, Targets};
use crate::rules::{self, OpSpec};
use crate::{DTensor, Error, Placement, Result};
use candle_core::{DType, Tensor};
use candle_dist::backend::Dims;
use candle_dist::functional::Step;
use candle_dist::{Cut, ProcessGroup};
use smallvec::smallvec;
use std::ops::Range;

/// The most bytes of keys and values that are gathered at once where a ring would move as many.
const MOST_GATHERED: usize = 16 << 20;

/// One call: how its tensors lie on the group of ranks that share a sequence.
pub(super) struct AttentionCall {
    pub(super) group: ProcessGroup,
    pub(super) mask: Mask,
    pub(super) scale: Scale,
    pub(super) log_sums: bool,
    /// The rows of the queries and of the keys on each rank of the axis.
    pub(super) queries: Vec<Range<usize>>,
    pub(super) keys: Vec<Range<usize>>,
    /// The elements of the batch on this rank.
    pub(super) batch: Range<usize>,
}

/// Returns the only axis that shards the rows of `x`, of more than one rank.
fn row_axis(x: &DTensor) -> Option<usize> {
    let mut axes = x.sharded_axes(1).filter(|&axis| x.mesh().shape()[axis] > 1);
    axes.next().filter(|_| axes.next().is_none())
}

/// Runs attention over a sequence axis; `None` if the tensors have no such layout.
///
/// The query is `[b, q, h, d]` or `[b, q, g, group, d]`.
#[track_caller]
pub(super) fn run(
    options: &Attention,
    [q, k, v]: [&DTensor; 3],
    (mask, scale): (&Mask, Scale),
) -> Result<Option<DTensor>> {
    if q.mesh() != k.mesh() || q.mesh() != v.mesh() {
        return Ok(None);
    }
    match [q, k, v].map(row_axis) {
        [Some(axis), Some(of_k), Some(of_v)] if (axis, axis) == (of_k, of_v) => {
            run_sharded(options, axis, [q, k, v], (mask, scale)).map(Some)
        }
        _ => match key_axis([q, k, v]).filter(|&axis| q.device().is_cpu() && joins(axis, [q, k, v])) {
            Some(axis) => run_joined(options, axis, [q, k, v], (mask, scale)).map(Some),
            None => Ok(None),
        },
    }
}

/// Returns the axis on which keys and values are sharded along the sequence and queries are replicated, if there is one.
fn key_axis([q, k, v]: [&DTensor; 3]) -> Option<usize> {
    if q.mesh() != k.mesh() || q.mesh() != v.mesh() {
        return None;
    }
    let has_rows = q.sharded_axes(1).any(|axis| q.mesh().shape()[axis] > 1);
    let fits = |axis: &usize| !has_rows && row_axis(v) == Some(*axis) && q.placements()[*axis] == Replicate;
    row_axis(k).filter(fits)
}

/// Returns whether queries meet the keys of other ranks by the nature of this call: such keys are all that must move.
///
/// Then it does not depend on the length of the sequence, by which the way is chosen, whether a call is strict.
pub(super) fn is_inherent(inputs: [&DTensor; 3]) -> Result<bool> {
    match key_axis(inputs) {
        Some(axis) => Ok(!OpSpec::of_rows(&Attention::default(), axis, inputs, false)?.communicates),
        None => Ok(false),
    }
}

/// Returns whether partial results of replicated queries are fewer bytes than the keys and values.
fn joins(axis: usize, [q, k, v]: [&DTensor; 3]) -> bool {
    let ranks = q.mesh().shape()[axis];
    let heads: usize = q.dims()[2..q.rank() - 1].iter().product();
    let results = q.dims()[1] * heads * (v.dims()[3] + 2);
    let keys = k.dims()[1].div_ceil(ranks) * k.dims()[2] * (k.dims()[3] + v.dims()[3]);
    results < keys
}

/// The name of the op in explanations and in the cache of op specs.
const fn name(way: ContextWay) -> &'static str {
    match way {
        ContextWay::Gather => "flash_attn by gather",
        ContextWay::Ring => "flash_attn by ring",
        ContextWay::Heads => "flash_attn by heads",
    }
}

#[track_caller]
fn run_sharded(
    options: &Attention,
    axis: usize,
    inputs: [&DTensor; 3],
    (mask, scale): (&Mask, Scale),
) -> Result<DTensor> {
    let way = choose(options, axis, inputs, mask)?;
    let op_spec = || OpSpec::of_rows(options, axis, inputs, true);
    let attributes = [usize::from(options.log_sums)];
    let mut made = rules::run_with(name(way), &attributes, &inputs, &op_spec, &|x, outs| {
        let call = AttentionCall::new(options, axis, x, (mask, scale))?;
        let out = call.run(way, x)?;
        let out = kernels::convert(&out, outs[0].dtype())?;
        Ok(smallvec![kernels::reshape(&out, outs[0].local_shape().as_slice())?])
    })?;
    Ok(made.remove(0))
}

/// Attention of replicated queries: each rank computes over its keys, and the results are joined.
#[track_caller]
fn run_joined(
    options: &Attention,
    axis: usize,
    inputs: [&DTensor; 3],
    (mask, scale): (&Mask, Scale),
) -> Result<DTensor> {
    let op_spec = || OpSpec::of_rows(options, axis, inputs, false);
    let attributes = [usize::from(options.log_sums)];
    let mut made = rules::run_with("flash_attn by joining", &attributes, &inputs, &op_spec, &|x, outs| {
        let call = AttentionCall::new(options, axis, x, (mask, scale))?;
        // Each rank has the gradient of the query through its own keys.
        let query = match x[0].is_varying(axis) {
            true => x[0].to_local().clone(),
            false => Step::ToVarying.apply(x[0].to_local(), &call.group)?,
        };
        let out = call.joined([&query, x[1].to_local(), x[2].to_local()])?;
        // The gradient of a varying result is a share on each rank, and all keys need the whole.
        let varies = inputs.iter().any(|x| x.varying() & (1 << axis) != 0);
        let out = if varies { Step::ToVarying.apply(&out, &call.group)? } else { out };
        let out = kernels::convert(&out, outs[0].dtype())?;
        Ok(smallvec![kernels::reshape(&out, outs[0].local_shape().as_slice())?])
    })?;
    Ok(made.remove(0))
}

impl OpSpec {
    /// The op spec for attention whose keys, and if `queries` also its queries, are sharded along the sequence on `axis`.
    fn of_rows(options: &Attention, axis: usize, inputs: [&DTensor; 3], queries: bool) -> Result<Self> {
        rules::check_meshes("flash_attn", &inputs)?;
        let [q, k, v] = inputs;
        let one_head = k.dims()[2] < q.dims()[2];
        let (mut of_q, mut of_k) = (Targets::new(), Targets::new());
        for other in 0..q.mesh().ndim() {
            if other == axis {
                let of = |x: &DTensor| Target { placement: Shard(1), sizes: x.spec().sizes(axis).cloned() };
                of_q.push(if queries { of(q) } else { Target::from(Replicate) });
                of_k.push(of(k));
                continue;
            }
            let at = |placement: Placement| inputs.iter().find(|x| x.placements()[other] == placement);
            let cut = [Shard(0), Shard(2)].into_iter().find_map(|at_dim| at(at_dim).map(|x| (at_dim, x)));
            let (placement, sizes) = match cut {
                // The one key head would be cut.
                Some((Shard(2), x)) if one_head && x.dims()[2] != q.dims()[2] => (Replicate, None),
                Some((at_dim, x)) => {
                    let outermost = of_q.iter().all(|outer| outer.placement != at_dim);
                    (at_dim, x.spec().sizes(other).filter(|_| outermost).cloned())
                }
                None => (Replicate, None),
            };
            of_q.push(Target { placement, sizes: sizes.clone() });
            let of_keys = if one_head && placement == Shard(2) { Replicate } else { placement };
            of_k.push(Target { placement: of_keys, sizes: if of_keys == placement { sizes } else { None } });
        }
        let mut shape = Dims::from_slice(q.dims());
        let (width, dtype) = options.result(v.dims()[3], q.dtype());
        shape[q.rank() - 1] = width;
        let outs = [(shape, dtype)];
        let mut op_spec = Self::laid(&inputs, [of_q.clone(), of_k.clone(), of_k], &of_q, &outs)?;
        // A rank without queries may have keys for the others.
        op_spec.nothing = false;
        Ok(op_spec)
    }
}

/// Chooses the way that moves the fewest bytes, or checks the one that is asked for.
fn choose(options: &Attention, axis: usize, [q, k, v]: [&DTensor; 3], mask: &Mask) -> Result<ContextWay> {
    let ranks = q.mesh().shape()[axis];
    let (rows, keys) = (rows_of(q.spec(), axis), rows_of(k.spec(), axis));
    let is_even = rows == keys;
    match options.way {
        Some(ContextWay::Heads) if !is_even => {
            let (q, k) = (q.spec(), k.spec());
            return Error::op(
                "flash_attn",
                format!(
                    "the way Heads for query {q} and key {k} with unlike shards of their rows; use Ring or Gather"
                ),
            );
        }
        Some(way) => return Ok(way),
        None => {}
    }
    let heads: usize = q.dims()[2..q.rank() - 1].iter().product();
    let (kv_heads, dim, width) = (k.dims()[2], k.dims()[3], v.dims()[3]);
    let of_row = kv_heads * (dim + width);
    let gathered = k.dims()[1] * of_row * (ranks - 1);
    let batch = 0..q.dims()[0];
    let hops = ring::hops(mask, [&rows, &keys], &batch);
    let ring: usize = keys.iter().zip(&hops).map(|(keys, hops)| keys.len() * hops * of_row).sum();
    // Where another axis cuts the heads, each of its ranks has about this many.
    let others = q.sharded_axes(2).map(|axis| q.mesh().shape()[axis]).product::<usize>().max(1);
    let copies = kv_heads.max(ranks * others);
    let swapped = k.dims()[1] * (heads * (dim + width) + copies * (dim + width)) / ranks * (ranks - 1);
    let bytes = gathered * q.dims()[0] * q.dtype().size_in_bytes();
    // With a gradient, gathered and swapped tensors go back once. Keys travel around again, with sums of their gradients.
    let [gathered, ring, swapped] = match [q, k, v].iter().any(|x| x.tracked()) {
        true => [2 * gathered, 3 * ring, 2 * swapped],
        false => [gathered, ring, swapped],
    };
    Ok(if is_even && heads / others >= ranks && swapped < gathered.min(ring) {
        ContextWay::Heads
    } else if q.device().is_cpu() && (ring < gathered || bytes > MOST_GATHERED) {
        ContextWay::Ring
    } else {
        ContextWay::Gather
    })
}

/// Returns the rows of each rank of the axis.
fn rows_of(spec: &Spec, axis: usize) -> Vec<Range<usize>> {
    let mut start = 0;
    let rows = |&size: &usize| {
        start += size;
        start - size..start
    };
    spec.cut(axis, 1).sizes.iter().map(rows).collect()
}

impl AttentionCall {
    /// Describes the call for the query, the key and the value in `x`.
    fn new(options: &Attention, axis: usize, x: &[DTensor], (mask, scale): (&Mask, Scale)) -> Result<Self> {
        let (q, k) = (&x[0], &x[1]);
        let group = DTensor::described_by(x, q.mesh().axis_group(axis)?.clone(), 1 << axis);
        let queries = match q.placements()[axis] {
            Replicate => vec![0..q.dims()[1]; group.size()],
            _ => rows_of(q.spec(), axis),
        };
        let keys = rows_of(k.spec(), axis);
        let batch = q.spec().local_block()[0].clone();
        let log_sums = options.log_sums;
        Ok(Self { group, mask: mask.clone(), scale, log_sums, queries, keys, batch })
    }

    /// Runs the local computation. The result has the dtype of the computation.
    fn run(self, way: ContextWay, x: &[DTensor]) -> Result<Tensor> {
        let query = x[0].to_local();
        let query = all_heads(query)?;
        let (key, value) = (x[1].to_local(), x[2].to_local());
        if !query.device().is_cpu() && way == ContextWay::Ring {
            return Error::op("flash_attn", "the way Ring for tensors on a device; use Gather or Heads");
        }
        match way {
            ContextWay::Gather => self.gathered([&query, key, value]),
            ContextWay::Ring => ring::run(self, [&query, key, value]),
            ContextWay::Heads => heads::run(&self, [&query, key, value]),
        }
    }

    fn mine(&self) -> &Range<usize> {
        &self.queries[self.group.rank()]
    }

    fn gathered(&self, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
        let cut = Cut::new(1, &self.keys.iter().map(Range::len).collect::<Dims>());
        let all = Step::AllGather { cut, varying: true }.apply(&Tensor::cat(&[k, v], 3)?, &self.group)?;
        let (k, v) = (part(&all, 3, 0, k.dim(3)?)?, part(&all, 3, k.dim(3)?, v.dim(3)?)?);
        let keys = 0..self.keys.last().map_or(0, |last| last.end);
        let blocks = self.mask.blocks(self.mine(), &keys, &self.batch);
        Ok(kernels::flash_attn_of_blocks([q, &k, &v], self.scale, blocks, self.log_sums)?)
    }

    fn joined(&self, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
        let q = all_heads(q)?;
        match q.dtype() {
            DType::F64 => self.joined_in::<f64>([&q, k, v]),
            _ => self.joined_in::<f32>([&q, k, v]),
        }
    }

    fn joined_in<T: kernels::AttentionDtype>(&self, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
        let blocks = self.mask.blocks(self.mine(), &self.keys[self.group.rank()], &self.batch);
        let own = T::partial_of_blocks([q, k, v], self.scale, &blocks)?.pack();
        let len = own.len();
        let packed = self.group.all_gather(&Tensor::from_vec(own, (1, len), q.device())?, 0)?;
        let width = v.dim(3)?;
        let parts =
            packed.to_vec2::<T>()?.into_iter().map(|packed| Ok(kernels::Partial::unpack(&packed, width)));
        let whole = kernels::join_all(kernels::sizes([q, k, v])?, parts, self.scale)?;
        Ok(T::with_result([q, k, v], whole, (self.scale, self.log_sums), blocks)?)
    }
}

/// Like `narrow`, on which candle panics for views without elements that start behind their memory.
pub(super) fn part(x: &Tensor, dim: usize, start: usize, len: usize) -> Result<Tensor> {
    let start = if len * x.elem_count() == 0 { 0 } else { start };
    Ok(x.narrow(dim, start, len)?)
}
