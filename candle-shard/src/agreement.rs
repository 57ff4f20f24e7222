//! Exchange of values, and agreement on one result, among ranks.
use crate::layout::Spec;
use crate::{Error, Result, scoped};
use candle_core::{Device, Tensor};
use candle_dist::bits::digest;
use candle_dist::switch::Switch;
use candle_dist::{DeviceMesh, ProcessGroup};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::cell::Cell;
use std::panic::Location;

thread_local! {
    static COMPARED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`, in which tensors that must be equal on every rank are compared at each use.
///
/// These are the operands of [`DTensor::replicated`](crate::DTensor::replicated), of operators with plain tensors and
/// numbers, and of [`DTensor::distribute`](crate::DTensor::distribute), the plain inputs that a layer of a plan takes as
/// replicated, and the tensors of a [moved model](crate::nn::MeshVarBuilder::parallelize). A comparison hashes the elements
/// and costs one collective of 8 bytes per rank, which [counts](candle_dist::comm::record) exclude. If ranks differ, all of them
/// return the same error. Every rank must call it.
///
/// Without it the ranks compare the tensors of `distribute` on the first use of each line of source with each shape and
/// dtype, and in debug builds at each use; operands and plain inputs without gradient on the first use of each line or layer; and no
/// tensors of a moved model. `CANDLE_DIST_DEBUG=1` compares all of them in all worlds of a program; in a world of processes, that of
/// rank 0 counts.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{DTensor, Result, compare_operands};
///
/// let failed = World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     (0..2).try_for_each(|step| {
///         let mine = Tensor::new(&[(step * ctx.rank()) as f32], &Device::Cpu)?; // alike in the first step only
///         compare_operands(|| DTensor::replicated(&mine, &mesh)).map(drop)
///     })
/// });
/// assert!(failed.unwrap_err().to_string().contains("rank 0 has f32[1]"));
/// ```
pub fn compare_operands<R>(f: impl FnOnce() -> R) -> R {
    scoped::with(&COMPARED, true, f)
}

/// When tensors that must be equal on all ranks are compared, if not at each use.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Frequency {
    /// On the first use of each line with each shape and dtype; in debug builds, at each use.
    PerShape,
    /// On the first use of each line, if the tensor has no gradient: values that ranks compute may differ in their last bits.
    PerLine,
    /// Never.
    OnDemand,
}

/// Refuses a tensor that is not equal on all ranks of the mesh, if the comparison is due.
///
/// `of` is the name of the tensor or the path of the layer; empty if it has none.
#[track_caller]
pub(crate) fn alike(
    op: &'static str,
    of: &str,
    frequency: Frequency,
    tensor: &Tensor,
    mesh: &DeviceMesh,
) -> Result<()> {
    if mesh.size() == 1 {
        return Ok(());
    }
    let (group, site) = (mesh.group()?, Location::caller());
    let is_due = || match frequency {
        Frequency::PerShape => {
            cfg!(debug_assertions) || group.is_first((op, of, site, tensor.dims(), tensor.dtype()))
        }
        Frequency::PerLine => !tensor.track_op() && group.is_first((op, of, site)),
        Frequency::OnDemand => false,
    };
    if !COMPARED.get() && !mesh.is_on(Switch::Debug) && !is_due() {
        return Ok(());
    }
    let text =
        format!("{}{:?} with the hash {:016x}", tensor.dtype().as_str(), tensor.dims(), digest(tensor)?);
    let compared =
        group.with_description(format!("the comparison of what {op} gets on each rank")).compare(&text)?;
    let Some(texts) = compared else { return Ok(()) };
    let other = texts.iter().position(|text| *text != texts[0]).unwrap_or_default();
    let ranks = group.ranks();
    let of = if of.is_empty() { String::new() } else { format!("{of}: ") };
    Error::op(
        op,
        format!(
            "{of}rank {} has {}, and rank {} has {}, at {}:{}; all ranks must give the same tensor, of which each keeps its part, and \
             several tensors in the same order, which a HashMap does not keep. If each rank draws its own data, give all ranks the same \
             tensor, take one rank's with DTensor::distribute_from, or join each rank's own rows with DTensor::from_local",
            ranks[0],
            texts[0],
            ranks[other],
            texts[other],
            site.file(),
            site.line()
        ),
    )
}

/// Returns whether an op cut indices that were passed whole, so that only some ranks would see an invalid one.
///
/// In this case the whole tensor is checked first: all ranks see the same first invalid index, and their world
/// continues.
pub(crate) fn was_cut(given: &Spec, laid: &Spec) -> bool {
    !is_cut(given) && is_cut(laid)
}

/// Returns whether a rank has only a piece of a tensor in this layout.
fn is_cut(spec: &Spec) -> bool {
    let mut axes = spec.placements().iter().zip(spec.mesh().shape());
    axes.any(|(placement, &n)| n > 1 && placement.shard_dim().is_some())
}

/// Returns the error for an invalid index in a tensor of layout `data`.
///
/// If the tensor is whole on every rank, all of them see the index. If it is in pieces, one rank may see it, or several
/// ranks see different ones: the first that stops the world sends its error to all.
pub(crate) fn refuse_data<T>(op: &'static str, reason: String, data: &Spec) -> Result<T> {
    if is_cut(data) {
        let group = data.mesh().group()?;
        group.fail(&format!("{op}: {reason}"));
        if let Some(failure) = group.failure() {
            return Err(candle_dist::Error::Group(failure).into());
        }
    }
    Error::op(op, reason)
}

/// Returns this rank's result if all ranks succeed; otherwise the error of the first failed rank, on all of them.
pub(crate) fn agreed<T>(group: &ProcessGroup, op: &'static str, result: Result<T>) -> Result<T> {
    let text = result.as_ref().err().map(Error::to_string).unwrap_or_default();
    let texts = group.all_gather_text(&text)?;
    match group.ranks().iter().zip(&texts).find(|(_, text)| !text.is_empty()) {
        Some((rank, text)) => Error::op(op, format!("rank {rank}: {text}")),
        None => result,
    }
}

/// How often ranks read again that have read unlike checkpoints.
const READS: usize = 10;

/// Like [`agreed`], of what `read` returns, with a number that tells a checkpoint from others. Ranks whose numbers differ read again,
/// because another program may have replaced the checkpoint between them.
pub(crate) fn agreed_on<T>(
    group: &ProcessGroup,
    op: &'static str,
    read: impl Fn() -> Result<(T, Option<u64>)>,
) -> Result<T> {
    for _ in 0..READS {
        let made = read();
        let identity = made.as_ref().ok().and_then(|(_, identity)| *identity).unwrap_or(0) as i64;
        let told = Tensor::new(&[i64::from(made.is_err()), identity], &Device::Cpu)?;
        let all = group.all_gather(&told, 0)?.to_vec1::<i64>()?;
        if all.iter().step_by(2).any(|&has_failed| has_failed != 0) {
            return agreed(group, op, made.map(|(read, _)| read));
        }
        if all.chunks(2).all(|told| told[1] == identity) {
            return made.map(|(read, _)| read);
        }
    }
    Error::op(
        op,
        "ranks read unlike checkpoints; give one folder to all of them, and load when no program saves there",
    )
}

/// Returns every rank's value on every rank, in rank order.
pub(crate) fn told<T: Serialize + DeserializeOwned>(
    op: &'static str,
    group: &ProcessGroup,
    mine: &T,
) -> Result<Vec<T>> {
    let failed =
        |error: serde_json::Error| Error::Op { op, reason: format!("a message between ranks ({error})") };
    let texts = group.all_gather_text(&serde_json::to_string(mine).map_err(failed)?)?;
    texts.iter().map(|text| serde_json::from_str(text).map_err(failed)).collect()
}
