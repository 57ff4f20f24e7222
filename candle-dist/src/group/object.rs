//! Collectives of values of any type that serde supports.
use super::ProcessGroup;
use crate::backend::Dims;
use crate::call::{Collective, Cut};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use postcard::ser_flavors::Flavor;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The most bytes of one serialized object: 256 MiB. Use tensors for more.
pub const MAX_OBJECT_BYTES: usize = 256 << 20;

/// The contribution of one rank: the bytes of an object, or the reason why there are none.
type Parcel = std::result::Result<Vec<u8>, String>;

/// The longest explanation that is sent, in bytes.
const MAX_REASON: usize = 1 << 10;

/// Collectives of objects, made by [`ProcessGroup::objects`].
///
/// Each of these sends objects in the format of [`postcard`](https://docs.rs/postcard), on the host, in three or four
/// collectives: the type, the sizes, then the bytes. All ranks name the same type. The format has no names, so both
/// ends must be the same program. An object has at most [`MAX_OBJECT_BYTES`]. An object that cannot be sent is the same
/// error on all ranks, and the group stays usable.
#[derive(Debug, Clone, Copy)]
pub struct Objects<'a> {
    group: &'a ProcessGroup,
}

impl ProcessGroup {
    /// Returns the collectives of values of any type that serde supports.
    pub fn objects(&self) -> Objects<'_> {
        Objects { group: self }
    }
}

impl Objects<'_> {
    /// Copies the root's object to every rank; other ranks may give `None`.
    ///
    /// ```
    /// use candle_dist::World;
    /// use std::collections::BTreeMap;
    ///
    /// type Config = BTreeMap<String, f64>;
    /// World::threads(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let mine = (ctx.rank() == 0).then(|| Config::from([("lr".to_string(), 0.1)]));
    ///     let config: Config = ctx.group().objects().broadcast(mine.as_ref(), 0)?;
    ///     assert_eq!(config["lr"], 0.1);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn broadcast<T: Serialize + DeserializeOwned>(&self, object: Option<&T>, root: usize) -> Result<T> {
        const OP: &str = "broadcast_object";
        self.group.check_rank_named(OP, root)?;
        self.same_type::<T>(OP)?;
        let mine = (self.group.rank() == root)
            .then(|| object.map_or(Err("the root must give an object".into()), packed));
        let (size, is_error) = self.announce(OP, root, mine.as_ref())?;
        let bytes = mine.map_or_else(|| vec![0; size], |mine| mine.unwrap_or_else(String::into_bytes));
        let bytes =
            self.group.broadcast(&Tensor::from_vec(bytes, size, &Device::Cpu)?, root)?.to_vec1::<u8>()?;
        match is_error {
            true => Err(self.object_error(OP, root, &bytes)),
            false => self.unpacked(OP, root, &bytes),
        }
    }

    /// Returns every rank's object on every rank, in rank order.
    ///
    /// ```
    /// use candle_dist::World;
    ///
    /// World::threads(3).run(|ctx| -> candle_dist::Result<()> {
    ///     let hosts = ctx.group().objects().all_gather(&(ctx.rank(), format!("host {}", ctx.rank())))?;
    ///     assert_eq!(hosts[2], (2, "host 2".to_string()));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn all_gather<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        const OP: &str = "all_gather_object";
        self.same_type::<T>(OP)?;
        let mine = packed(object);
        let sizes = self.announce_all(OP, &mine)?;
        let bytes = Tensor::new(mine.unwrap_or_default(), &Device::Cpu)?;
        let all =
            self.group.call(Collective::all_gather(Cut::new(0, &sizes))).run(&bytes)?.to_vec1::<u8>()?;
        self.unpacked_all(OP, &sizes, &all)
    }

    /// Returns every rank's object on the root, in rank order; `None` elsewhere.
    ///
    /// An object that the root cannot read is the root's error.
    #[track_caller]
    pub fn gather<T: Serialize + DeserializeOwned>(&self, object: &T, root: usize) -> Result<Option<Vec<T>>> {
        const OP: &str = "gather_object";
        self.group.check_rank_named(OP, root)?;
        self.same_type::<T>(OP)?;
        let mine = packed(object);
        let sizes = self.announce_all(OP, &mine)?;
        let bytes = Tensor::new(mine.unwrap_or_default(), &Device::Cpu)?;
        let Some(all) = self.group.gather(&bytes, 0, &sizes, root)? else { return Ok(None) };
        self.unpacked_all(OP, &sizes, &all.to_vec1::<u8>()?).map(Some)
    }

    /// Returns this rank's object of the root's list, which has one per rank; other ranks may give `None`.
    ///
    /// An object that its rank cannot read is that rank's error.
    #[track_caller]
    pub fn scatter<T: Serialize + DeserializeOwned>(&self, objects: Option<&[T]>, root: usize) -> Result<T> {
        const OP: &str = "scatter_object";
        self.group.check_rank_named(OP, root)?;
        self.same_type::<T>(OP)?;
        let n = self.group.size();
        let (mut sizes, mut mine) = (vec![0i64; n], None);
        if self.group.rank() == root {
            let list = objects.filter(|list| list.len() == n);
            let wrong = || format!("the root must give {n} objects, got {}", objects.map_or(0, <[T]>::len));
            let all = list
                .ok_or_else(wrong)
                .and_then(|list| list.iter().map(packed).collect::<Result<Vec<_>, _>>());
            mine = Some(match all {
                Ok(all) => {
                    sizes = all.iter().map(|bytes| bytes.len() as i64).collect();
                    Ok(all.concat())
                }
                Err(reason) => Err(reason),
            });
        }
        let (size, is_error) = self.announce(OP, root, mine.as_ref())?;
        let bytes = mine.map(|mine| mine.unwrap_or_else(String::into_bytes));
        if is_error {
            let bytes = Tensor::from_vec(bytes.unwrap_or_else(|| vec![0; size]), size, &Device::Cpu)?;
            return Err(self.object_error(OP, root, &self.group.broadcast(&bytes, root)?.to_vec1::<u8>()?));
        }
        let sizes = self.group.broadcast(&Tensor::new(sizes, &Device::Cpu)?, root)?.to_vec1::<i64>()?;
        let sizes: Vec<usize> = sizes.into_iter().map(|size| size as usize).collect();
        let bytes = bytes.map(|bytes| Tensor::from_vec(bytes, size, &Device::Cpu)).transpose()?;
        let piece = self.group.scatter(bytes.as_ref(), (size, DType::U8), 0, &sizes, root)?;
        self.unpacked(OP, root, &piece.to_vec1::<u8>()?)
    }

    /// Fails on all ranks alike unless they name the same type.
    #[track_caller]
    fn same_type<T>(&self, op: &'static str) -> Result<()> {
        self.group.agree(&format!("{op} of {}", std::any::type_name::<T>()))
    }

    /// Sends the size of the root's next data to all ranks, and whether the data is an error text.
    #[track_caller]
    fn announce(&self, op: &'static str, root: usize, mine: Option<&Parcel>) -> Result<(usize, bool)> {
        let head = match mine {
            Some(Ok(bytes)) => [bytes.len() as i64, 0],
            Some(Err(reason)) => [reason.len() as i64, 1],
            None => [0, 0],
        };
        let head = self.group.broadcast(&Tensor::new(&head, &Device::Cpu)?, root)?.to_vec1::<i64>()?;
        match usize::try_from(head[0]) {
            Ok(size) => Ok((size, head[1] == 1)),
            Err(_) => Err(self.object_error(op, root, b"a size below zero")),
        }
    }

    /// Returns the sizes of all ranks' objects, or the first reason why there is none.
    #[track_caller]
    fn announce_all(&self, op: &'static str, mine: &Parcel) -> Result<Dims> {
        let head = match mine {
            Ok(bytes) => [bytes.len() as i64, 0],
            Err(_) => [0, 1],
        };
        let heads = self.group.all_gather(&Tensor::new(&[head], &Device::Cpu)?, 0)?.to_vec2::<i64>()?;
        if let Some(rank) = heads.iter().position(|head| head[1] == 1) {
            let text = mine.as_ref().err().map_or("", String::as_str);
            let texts = self.group.all_gather_text(text)?;
            return Err(self.object_error(op, rank, texts[rank].as_bytes()));
        }
        Ok(heads.iter().map(|head| head[0] as usize).collect())
    }

    /// Makes the error for the object of rank `from`, the same on all ranks.
    fn object_error(&self, op: &'static str, from: usize, reason: &[u8]) -> Error {
        let reason = String::from_utf8_lossy(reason).into_owned();
        Error::InvalidArgument { rank: self.group.ranks()[from], op, reason }
    }

    /// Decodes objects whose bytes are concatenated.
    fn unpacked_all<T: DeserializeOwned>(
        &self,
        op: &'static str,
        sizes: &[usize],
        bytes: &[u8],
    ) -> Result<Vec<T>> {
        let mut at = 0;
        let piece = |(from, &size): (usize, &usize)| {
            let start = at;
            at += size;
            self.unpacked(op, from, &bytes[start..at])
        };
        sizes.iter().enumerate().map(piece).collect()
    }

    fn unpacked<T: DeserializeOwned>(&self, op: &'static str, from: usize, bytes: &[u8]) -> Result<T> {
        let name = std::any::type_name::<T>();
        let read = postcard::take_from_bytes(bytes).map_err(|error| format!("no {name}: {error}"));
        let whole = read.and_then(|(object, rest)| match rest.len() {
            0 => Ok(object),
            left => Err(format!("no {name}: {left} bytes too many")),
        });
        whole.map_err(|reason| self.object_error(op, from, format!("what was sent is {reason}").as_bytes()))
    }
}

/// Encodes an object, if it can be sent.
fn packed<T: Serialize>(object: &T) -> Parcel {
    postcard::serialize_with_flavor(object, BoundedBuffer(Vec::new())).map_err(|error| {
        let name = std::any::type_name::<T>();
        let mut reason = match error {
            postcard::Error::SerializeBufferFull => {
                format!("{name} takes more than {MAX_OBJECT_BYTES} bytes")
            }
            error => format!("{name} cannot be sent: {error}"),
        };
        let end = (0..=MAX_REASON.min(reason.len())).rev().find(|&at| reason.is_char_boundary(at));
        reason.truncate(end.unwrap_or(0));
        reason
    })
}

/// Collects the bytes of an object, at most [`MAX_OBJECT_BYTES`].
struct BoundedBuffer(Vec<u8>);

impl Flavor for BoundedBuffer {
    type Output = Vec<u8>;

    fn try_extend(&mut self, data: &[u8]) -> postcard::Result<()> {
        if data.len() > MAX_OBJECT_BYTES - self.0.len() {
            return Err(postcard::Error::SerializeBufferFull);
        }
        self.0.extend_from_slice(data);
        Ok(())
    }

    fn try_push(&mut self, data: u8) -> postcard::Result<()> {
        self.try_extend(&[data])
    }

    fn finalize(self) -> postcard::Result<Vec<u8>> {
        Ok(self.0)
    }
}
