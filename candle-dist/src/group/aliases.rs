//! Former names of calls, which stay for one version.
use super::ProcessGroup;
use crate::Result;
use crate::backend::Envelope;
use crate::call::Collective;
use candle_core::{DType, Shape, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Former names of calls on a [`ProcessGroup`]; the prelude has them.
pub trait ProcessGroupAliases {
    /// The former name of [`Objects::broadcast`](crate::Objects::broadcast).
    #[deprecated(since = "0.1.0", note = "use `group.objects().broadcast(..)`")]
    fn broadcast_object<T: Serialize + DeserializeOwned>(&self, object: Option<&T>, root: usize)
    -> Result<T>;

    /// The former name of [`Objects::all_gather`](crate::Objects::all_gather).
    #[deprecated(since = "0.1.0", note = "use `group.objects().all_gather(..)`")]
    fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>>;

    /// The former name of [`Objects::gather`](crate::Objects::gather).
    #[deprecated(since = "0.1.0", note = "use `group.objects().gather(..)`")]
    fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>>;

    /// The former name of [`Objects::scatter`](crate::Objects::scatter).
    #[deprecated(since = "0.1.0", note = "use `group.objects().scatter(..)`")]
    fn scatter_object<T: Serialize + DeserializeOwned>(
        &self,
        objects: Option<&[T]>,
        root: usize,
    ) -> Result<T>;

    /// The former name of [`CollectiveCall::receive`](crate::CollectiveCall::receive).
    #[deprecated(
        since = "0.1.0",
        note = "use `group.call(Collective::Recv { from: None, tag }).of(..).receive()`"
    )]
    fn recv_any(&self, shape: impl Into<Shape>, dtype: DType, tag: u32) -> Result<(usize, Tensor)>;

    /// The former name of [`CollectiveCall::probe`](crate::CollectiveCall::probe).
    #[deprecated(since = "0.1.0", note = "use `group.call(Collective::Recv { from, tag }).probe()`")]
    fn probe(&self, from: Option<usize>, tag: u32) -> Result<Option<Envelope>>;
}

impl ProcessGroupAliases for ProcessGroup {
    #[track_caller]
    fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        object: Option<&T>,
        root: usize,
    ) -> Result<T> {
        self.objects().broadcast(object, root)
    }

    #[track_caller]
    fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        self.objects().all_gather(object)
    }

    #[track_caller]
    fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>> {
        self.objects().gather(object, root)
    }

    #[track_caller]
    fn scatter_object<T: Serialize + DeserializeOwned>(
        &self,
        objects: Option<&[T]>,
        root: usize,
    ) -> Result<T> {
        self.objects().scatter(objects, root)
    }

    #[track_caller]
    fn recv_any(&self, shape: impl Into<Shape>, dtype: DType, tag: u32) -> Result<(usize, Tensor)> {
        self.call(Collective::Recv { from: None, tag }).of(shape, dtype).receive()
    }

    #[track_caller]
    fn probe(&self, from: Option<usize>, tag: u32) -> Result<Option<Envelope>> {
        self.call(Collective::Recv { from, tag }).probe()
    }
}
