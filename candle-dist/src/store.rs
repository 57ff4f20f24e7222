//! Values that the ranks of a world share by name.
use crate::backend::threads::WorldState;
use crate::control::{Control, check_sizes};
use crate::link::within;
use crate::values::{ChangeEffects, ChangeOutcome, OWN, ValueChange, Values};
use crate::{Cause, Error, Result};
use parking_lot::{Condvar, Mutex};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a waiting thread checks whether its world has failed.
const TICK: Duration = Duration::from_millis(20);

/// A key-value store shared by the ranks of a world. Values have at most 16 MiB, keys less than 4 KiB, and all together at
/// most 1 GiB.
///
/// Every change is atomic. In a world of processes, rank 0 holds the values, and a call costs a round trip to it.
/// Values last as long as the world; [`delete`](Self::delete) those that are no longer needed. Each rank may use the
/// store at any time and from any number of threads. Send tensors through a [`ProcessGroup`](crate::ProcessGroup)
/// instead.
///
/// ```
/// use candle_dist::{Result, World};
///
/// let tickets = World::threads(3).run(|ctx| -> Result<i64> {
///     let store = ctx.store();
///     store.set(&format!("name of {}", ctx.rank()), b"anna")?;
///     assert_eq!(store.get("name of 2")?, b"anna");
///     store.add("tickets", 1)
/// })?;
/// assert_eq!(tickets.iter().sum::<i64>(), 1 + 2 + 3);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
///
/// Every call fails if the world has failed, or if a key or value is too long. A value that finds no room is refused: nothing
/// changes, and the error says how much the ranks have set that have set the most.
#[derive(Debug, Clone)]
pub struct Store(StoreKind);

#[derive(Debug, Clone)]
enum StoreKind {
    Threads { rank: usize, shared: Arc<SharedValues> },
    Processes(Arc<Control>),
}

/// The values of a world of threads.
pub(crate) struct SharedValues {
    world: Arc<WorldState>,
    values: Mutex<Values<()>>,
    changed: Condvar,
}

impl fmt::Debug for SharedValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedValues({:?})", self.values)
    }
}

impl SharedValues {
    pub(crate) fn new(world: &Arc<WorldState>) -> Arc<Self> {
        Arc::new(Self { world: world.clone(), values: Mutex::default(), changed: Condvar::new() })
    }

    /// Waits for the value; `None` after `limit`.
    fn wait(&self, key: &str, limit: Duration) -> Result<Option<Vec<u8>>> {
        let deadline = within(limit);
        let mut values = self.values.lock();
        loop {
            self.world.check()?;
            if let Some(value) = values.peek(key) {
                return Ok(Some(value.to_vec()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.changed.wait_for(&mut values, left.min(TICK));
        }
    }

    fn change(
        &self,
        rank: usize,
        key: &str,
        change: &ValueChange,
        bytes: &[u8],
    ) -> Result<(ChangeOutcome, Vec<u8>)> {
        self.world.check()?;
        let ChangeEffects { outcome, bytes, woken } =
            self.values.lock().change(key.to_string(), change, bytes, rank);
        if woken.is_some() {
            self.changed.notify_all();
        }
        Ok((outcome, bytes.to_vec()))
    }
}

impl Store {
    pub(crate) fn of_thread(rank: usize, shared: Arc<SharedValues>) -> Self {
        Self(StoreKind::Threads { rank, shared })
    }

    pub(crate) fn of_process(control: Arc<Control>) -> Self {
        Self(StoreKind::Processes(control))
    }

    /// Sets a value, and replaces an existing one.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        match self.change(key, &ValueChange::Set, value)? {
            (ChangeOutcome::Stored, _) => Ok(()),
            other => Err(self.unexpected(other.0)),
        }
    }

    /// Returns the value. Waits until a rank sets it.
    ///
    /// # Errors
    /// After the timeout of the world, which also stops the world.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        let key = self.named(key, 0)?;
        match &self.0 {
            StoreKind::Processes(control) => control.get(&key),
            StoreKind::Threads { rank, shared } => {
                let after = shared.world.timeout();
                shared
                    .wait(&key, after)?
                    .ok_or_else(|| shared.world.fail(Cause::TimedOut { rank: *rank, after }))
            }
        }
    }

    /// Returns the value, or `None` if no rank sets it within `limit`. A limit of zero returns the current value.
    pub fn get_within(&self, key: &str, limit: Duration) -> Result<Option<Vec<u8>>> {
        let key = self.named(key, 0)?;
        match &self.0 {
            StoreKind::Processes(control) => control.get_within(&key, limit),
            StoreKind::Threads { shared, .. } => shared.wait(&key, limit),
        }
    }

    /// Deletes a value. Returns whether there was one.
    pub fn delete(&self, key: &str) -> Result<bool> {
        match self.change(key, &ValueChange::Delete, &[])? {
            (ChangeOutcome::Deleted(was), _) => Ok(was),
            other => Err(self.unexpected(other.0)),
        }
    }

    /// Adds to a counter, which starts at 0, and returns the sum.
    ///
    /// The value is the sum as eight little-endian bytes ([`i64::to_le_bytes`]).
    ///
    /// # Errors
    /// If the value is not a counter, or the sum overflows `i64`; the value is then unchanged.
    pub fn add(&self, key: &str, n: i64) -> Result<i64> {
        match self.change(key, &ValueChange::Add(n), &[])? {
            (ChangeOutcome::Sum(sum), _) => Ok(sum),
            other => Err(self.unexpected(other.0)),
        }
    }

    /// Sets the value to `new` if it is `expected`, where `None` means no value. Returns the previous value.
    ///
    /// The value was set if the previous value equals `expected`. `expected` and `new` have at most 16 MiB together.
    pub fn compare_and_set(&self, key: &str, expected: Option<&[u8]>, new: &[u8]) -> Result<Option<Vec<u8>>> {
        let bytes = [expected.unwrap_or_default(), new].concat();
        match self.change(key, &ValueChange::Swap { expected: expected.map(<[u8]>::len) }, &bytes)? {
            (ChangeOutcome::Before(was), bytes) => Ok(was.then_some(bytes)),
            other => Err(self.unexpected(other.0)),
        }
    }

    fn change(&self, key: &str, change: &ValueChange, bytes: &[u8]) -> Result<(ChangeOutcome, Vec<u8>)> {
        let key = self.named(key, bytes.len())?;
        match &self.0 {
            StoreKind::Processes(control) => control.change(&key, change, bytes),
            StoreKind::Threads { rank, shared } => shared.change(*rank, &key, change, bytes),
        }
    }

    /// Returns the key within the namespace of programs, if the key and a value of `len` bytes are not too long.
    fn named(&self, key: &str, len: usize) -> Result<String> {
        let key = format!("{OWN}{key}");
        check_sizes(self.rank(), &key, len)?;
        Ok(key)
    }

    fn rank(&self) -> usize {
        match &self.0 {
            StoreKind::Threads { rank, .. } => *rank,
            StoreKind::Processes(control) => control.rank(),
        }
    }

    fn unexpected(&self, outcome: ChangeOutcome) -> Error {
        let reason = match outcome {
            ChangeOutcome::Refused(why) => why.replacen(&format!("\"{OWN}"), "\"", 1),
            other => format!("an unexpected answer: {other:?}"),
        };
        Error::InvalidArgument { rank: self.rank(), op: "store", reason }
    }
}
