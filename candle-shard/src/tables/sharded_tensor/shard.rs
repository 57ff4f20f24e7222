//! Conversion of whole tensors to sharded ones.
use super::metadata::Layout;
use super::{ShardedTensor, pieces};
use crate::agreement;
use crate::tables::sharding_spec::ShardingSpec;
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use candle_dist::{Message, ProcessGroup};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

const OP: &str = "ShardedTensor::shard";

/// A rank's arguments, exchanged before the data moves.
#[derive(Serialize, Deserialize, PartialEq)]
struct Told {
    spec: String,
    src_rank: usize,
    /// Shape and dtype of the whole tensor, from the source rank.
    whole: Option<(Vec<usize>, String)>,
}

impl ShardedTensor {
    /// Shards the tensor of rank `src_rank` of the group; other ranks may pass `None`, and their tensors are not read.
    ///
    /// The ranks first compare their arguments; then each shard is sent only to its rank. The result is a leaf without
    /// gradient, which shares no memory with the tensor.
    ///
    /// # Errors
    /// On every rank alike: if ranks pass different specs or sources, if the source is outside the group or passes no
    /// tensor, or if the spec does not fit the tensor or the group.
    pub fn shard<'a>(
        tensor: impl Into<Option<&'a Tensor>>,
        spec: impl Into<ShardingSpec>,
        src_rank: usize,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let (tensor, spec) = (tensor.into(), spec.into());
        let whole = tensor.filter(|_| group.rank() == src_rank);
        let told = Told {
            spec: spec.to_string(),
            src_rank,
            whole: whole.map(|whole| (whole.dims().to_vec(), whole.dtype().as_str().into())),
        };
        let (dims, dtype) = source(&told, group)?;
        let layout = Layout::new(spec, &dims, dtype, group)?;
        let device = tensor.map_or(&Device::Cpu, Tensor::device);
        layout.check_device(OP, device)?;
        scattered(layout, whole, src_rank, device)
    }

    /// Shards a tensor that is equal on every rank; nothing is communicated.
    ///
    /// The result is a leaf without gradient, which shares no memory with the tensor.
    ///
    /// # Errors
    /// If the spec does not fit the tensor or the group.
    pub fn distribute(tensor: &Tensor, spec: impl Into<ShardingSpec>, group: &ProcessGroup) -> Result<Self> {
        let layout = Layout::new(spec.into(), tensor.dims(), tensor.dtype(), group)?;
        layout.check_device("ShardedTensor::distribute", tensor.device())?;
        let origin = vec![0; tensor.rank()];
        Self::build(layout, tensor.device(), |shard| pieces::cut(tensor, &origin, &shard.block()))
    }
}

/// Returns shape and dtype of the source's tensor, if all ranks pass the same spec and source.
fn source(told: &Told, group: &ProcessGroup) -> Result<(Vec<usize>, DType)> {
    let all = agreement::told(OP, group, told)?;
    let first = &all[0];
    let differs = all.iter().position(|told| (&told.spec, told.src_rank) != (&first.spec, first.src_rank));
    if let Some(rank) = differs {
        let (here, there) = (format!("{} from rank {}", all[rank].spec, all[rank].src_rank), &first.spec);
        let reason = format!("rank {rank} of the group shards in {here}, and rank 0 in {there} from rank");
        return Error::op(OP, format!("{reason} {}; name the same", first.src_rank));
    }
    let Some(source) = all.get(first.src_rank) else {
        let (rank, last) = (first.src_rank, group.size() - 1);
        return Error::op(OP, format!("src_rank {rank} is outside the group; its ranks are 0 to {last}"));
    };
    let dtype = |name: &String| name.parse::<DType>().ok();
    match source.whole.as_ref().and_then(|(dims, name)| Some((dims.clone(), dtype(name)?))) {
        Some(whole) => Ok(whole),
        None => Error::op(OP, format!("rank {} of the group, the source, passes no tensor; pass one", first.src_rank)),
    }
}

/// Sends the shards from the rank that has the whole tensor.
pub(super) fn scattered(
    layout: Arc<Layout>,
    whole: Option<&Tensor>,
    src_rank: usize,
    device: &Device,
) -> Result<ShardedTensor> {
    let (group, dtype, origin) = (&layout.group, layout.metadata.dtype, vec![0; layout.metadata.dims.len()]);
    let (mut messages, tag) = (Vec::new(), 0);
    if let Some(whole) = whole {
        // Both sides follow the order of the spec, so the messages between two ranks need no tags.
        for shard in layout.metadata.shards.iter().filter(|shard| !shard.is_empty()) {
            if let Some(to) = shard.rank().filter(|&rank| rank != src_rank) {
                messages.push(Message::Send { tensor: pieces::view(whole, &origin, &shard.block())?, to, tag });
            }
        }
    } else {
        for shard in layout.mine().filter(|shard| !shard.is_empty()) {
            let shape = Shape::from(&shard.sizes[..]);
            messages.push(Message::Recv { shape, dtype, from: src_rank, tag });
        }
    }
    let mut received = group.batch_send_recv(&messages)?.into_iter();
    ShardedTensor::build(layout.clone(), device, |shard| match (whole, shard.is_empty()) {
        (Some(whole), _) => pieces::cut(whole, &origin, &shard.block()),
        (None, false) => match received.next() {
            Some(tensor) => pieces::arrived(group, &tensor, device),
            None => Error::op(OP, format!("nothing arrived for shard {shard}; make the same calls on all ranks")),
        },
        (None, true) => Ok(Tensor::zeros(&shard.sizes[..], dtype, device)?),
    })
}
