//! The context of a rank, which also reports how the rank ended.
use crate::backend::Backend;
use crate::backend::threads::RankGuard;
use crate::control::Control;
use crate::error::{End, cut_trace};
use crate::{DeviceMesh, ProcessGroup, Result, Store};
use candle_core::Device;
use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The context of a rank: its number, its device, and the group of all ranks.
///
/// Dropping it tells the other ranks that this rank has ended.
pub struct RankContext {
    /// Dropped before the group: the backend may end once the other ranks know.
    guard: Guard,
    group: ProcessGroup,
    store: Store,
}

/// Tells the world how its rank ended, even if the rank's thread unwinds.
enum Guard {
    Thread(RankGuard),
    Process(ProcessGuard),
}

/// The guard of a rank that is a process.
struct ProcessGuard {
    control: Arc<Control>,
    backend: Arc<dyn Backend>,
    /// How the rank ended, once the others have been told.
    end: Option<End>,
}

impl ProcessGuard {
    /// Tells the others how this rank ends, does what they still need, and waits until they have ended too. Returns a
    /// failure that its result depends on.
    fn end(&mut self, end: End) -> Result<()> {
        self.tell(end)?;
        self.control.outlast()
    }

    /// Tells the others how this rank ends, and does what they still need.
    fn tell(&mut self, end: End) -> Result<()> {
        // After the goodbye, it would end before it hears of a difference.
        let agreed = if matches!(end, End::Returned) { self.control.agree() } else { Ok(()) };
        self.control.announce(end.clone());
        self.end = Some(end);
        let finished = self.backend.finish();
        agreed.and(finished)
    }
}

impl Drop for ProcessGuard {
    fn drop(&mut self) {
        if self.end.is_none() {
            // A drop cannot return errors.
            let _ = self.tell(End::of_thread());
        }
        self.control.leave(self.end.take().unwrap_or(End::Returned));
    }
}

impl std::fmt::Debug for RankContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RankContext({} of {})", self.rank(), self.world_size())
    }
}

impl RankContext {
    /// Creates the context of a rank that is a thread.
    pub(super) fn of_thread(guard: RankGuard, group: ProcessGroup, store: Store) -> Self {
        Self { guard: Guard::Thread(guard), group, store }
    }

    /// Creates the context of a rank that is a process, once all processes have met.
    pub(super) fn of_process(control: Arc<Control>, group: ProcessGroup) -> Self {
        let (store, group) = (Store::of_process(control.clone()), group.with_switches(control.switches()));
        let backend = group.shared_backend();
        Self { guard: Guard::Process(ProcessGuard { control, backend, end: None }), group, store }
    }

    /// Replaces the backend of the group by `f` of it.
    pub(super) fn map_backend(mut self, f: impl FnOnce(Arc<dyn Backend>) -> Arc<dyn Backend>) -> Self {
        let switches = self.group.switches;
        self.group = ProcessGroup::new(f(self.group.shared_backend())).with_switches(switches);
        self
    }

    /// Returns the number of this rank in the world.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Returns the number of ranks in the world.
    pub fn world_size(&self) -> usize {
        self.group.size()
    }

    /// Returns the device of this rank: the CPU, unless [`World::devices`](crate::World::devices) sets another one.
    pub fn device(&self) -> &Device {
        self.group.device()
    }

    /// Returns the group of all ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the store of small values that the ranks share by name.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Creates a mesh of all ranks; see [`DeviceMesh::new`].
    #[track_caller]
    pub fn mesh(&self, axes: &[(&str, usize)]) -> Result<DeviceMesh> {
        DeviceMesh::new(&self.group, axes)
    }

    /// Runs `f` as this rank and tells the world how it ended. Calls `blame` on a failure before the other ranks wake, with the
    /// rank that caused it.
    ///
    /// A rank that is a process waits until all ranks have ended: `None` is also the result if the
    /// world stops meanwhile.
    pub fn run<T, E: Display>(
        mut self,
        f: impl Fn(&Self) -> Result<T, E>,
        blame: impl Fn(usize, &str),
    ) -> Option<T> {
        let rank = self.rank();
        if let Guard::Thread(guard) = &self.guard {
            guard.settle_thread();
        }
        let span = tracing::debug_span!("rank", rank);
        let (result, end) = match catch_unwind(AssertUnwindSafe(|| span.in_scope(|| f(&self)))) {
            Ok(Ok(value)) => (Some(value), End::Returned),
            Ok(Err(error)) => (None, End::Failed(cut_trace(&format!("{error:#}")).to_string())),
            Err(panic) => (None, End::Panicked(panic_message(&*panic))),
        };
        match &end {
            End::Returned => {}
            // The rank that notices a failure first did not always cause it.
            End::Failed(message) => blame(self.culprit().unwrap_or(rank), message),
            End::Panicked(message) => blame(rank, &format!("panicked: {message}")),
        }
        match &mut self.guard {
            Guard::Thread(guard) => {
                guard.finish(end);
                // What it returns may come from a call that was aborted.
                if result.is_some()
                    && let Err(error) = self.group.backend().finish()
                {
                    blame(self.culprit().unwrap_or(rank), cut_trace(&error.to_string()));
                    return None;
                }
            }
            Guard::Process(guard) => {
                let ended = guard.end(end);
                if let (Some(_), Err(error)) = (&result, ended) {
                    blame(self.culprit().unwrap_or(rank), cut_trace(&error.to_string()));
                    return None;
                }
            }
        }
        result
    }

    /// Returns the rank that stopped the world, if the failure names one.
    fn culprit(&self) -> Option<usize> {
        self.group.failure()?.cause.culprit()
    }
}

/// Returns the message of a caught panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_string(),
        (_, Some(text)) => text.clone(),
        _ => "(a panic without a message)".to_string(),
    }
}
