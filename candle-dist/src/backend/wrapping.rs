//! Backends that wrap other backends.
use super::{Backend, Call, Envelope, Results, StartedCall, Tensors};
use crate::{Cause, GroupFailure, Result};
use candle_core::{Device, Tensor};
use std::fmt::Debug;
use std::sync::Arc;

/// A backend that wraps another one, to count, delay or break communication. It calls [`before`](Self::before) and then
/// passes each call to the inner backend.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::backend::{Backend, Call, BackendWrapper};
/// use candle_dist::{Error, ReduceOp, Result, World};
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use std::time::Duration;
///
/// /// Counts the calls of a rank on all of its groups, delays each, and fails at the third.
/// #[derive(Debug)]
/// struct Faulty {
///     inner: Arc<dyn Backend>,
///     calls: Arc<AtomicUsize>,
/// }
///
/// impl BackendWrapper for Faulty {
///     fn inner(&self) -> &Arc<dyn Backend> {
///         &self.inner
///     }
///     fn around(&self, subgroup: Arc<dyn Backend>) -> Arc<dyn Backend> {
///         Arc::new(Self { inner: subgroup, calls: self.calls.clone() })
///     }
///     fn before(&self, call: &Call) -> Result<()> {
///         std::thread::sleep(Duration::from_millis(1));
///         match self.calls.fetch_add(1, Ordering::Relaxed) {
///             2 => Err(Error::Unsupported(format!("the third call, {}, on purpose", call.op()))),
///             _ => Ok(()),
///         }
///     }
/// }
///
/// let world = World::threads(2).wrap_backend(|inner| Arc::new(Faulty { inner, calls: Arc::default() }));
/// let outcome = world.run(|ctx| -> Result<()> {
///     let pair = ctx.group().subgroup(&[1, 0])?;
///     let x = Tensor::new(&[1f32], &Device::Cpu)?;
///     for group in [ctx.group(), &pair, &pair] {
///         group.all_reduce(&x, ReduceOp::Sum)?;
///     }
///     Ok(())
/// });
/// assert!(outcome.unwrap_err().message.contains("the third call, all_reduce, on purpose"));
/// ```
pub trait BackendWrapper: Send + Sync + Debug {
    /// Returns the inner backend.
    fn inner(&self) -> &Arc<dyn Backend>;
    /// Wraps the backend of a subgroup in the same way.
    fn around(&self, subgroup: Arc<dyn Backend>) -> Arc<dyn Backend>;
    /// Called before every collective and message, including started ones.
    ///
    /// # Errors
    /// An error becomes the error of the call, which is then not made. A rank that ends with it stops the world.
    fn before(&self, call: &Call) -> Result<()>;
}

#[doc(hidden)]
pub use self::BackendWrapper as Wrapping;

impl<W: BackendWrapper> Backend for W {
    fn name(&self) -> &'static str {
        self.inner().name()
    }

    fn rank(&self) -> usize {
        self.inner().rank()
    }

    fn ranks(&self) -> &[usize] {
        self.inner().ranks()
    }

    fn device(&self) -> &Device {
        self.inner().device()
    }

    fn run(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Results> {
        self.before(&call)?;
        self.inner().run(call, tensors, outputs)
    }

    fn start(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Box<dyn StartedCall>> {
        self.before(&call)?;
        self.inner().start(call, tensors, outputs)
    }

    fn recv(&self, call: Call, output: Option<&Tensor>) -> Result<(usize, Tensor)> {
        self.before(&call)?;
        self.inner().recv(call, output)
    }

    fn probe(&self, call: &Call) -> Result<Option<Envelope>> {
        self.inner().probe(call)
    }

    fn copies_sent(&self, bytes: usize) -> bool {
        self.inner().copies_sent(bytes)
    }

    fn has_returned(&self, peer: usize) -> bool {
        self.inner().has_returned(peer)
    }

    fn has_call_timeouts(&self) -> bool {
        self.inner().has_call_timeouts()
    }

    fn finish(&self) -> Result<()> {
        self.inner().finish()
    }

    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Backend>> {
        Ok(self.around(self.inner().subgroup(members)?))
    }

    fn stop(&self, cause: Cause) {
        self.inner().stop(cause);
    }

    fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.inner().failure()
    }
}
