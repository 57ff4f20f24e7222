//! Started receives: the n-th one gets the n-th message, in any order of waits.
use super::ProcessGroup;
use crate::backend::Call;
use crate::{Error, Result};
use candle_core::Tensor;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// A started receive.
pub(super) struct PostedReceive {
    pub(super) call: Call,
    /// The thread that started it.
    pub(super) thread: ThreadId,
    /// The memory for the elements, unless they go to a new tensor.
    output: Option<Tensor>,
    received: OnceLock<Tensor>,
}

/// Sender and tag.
type SourceTag = (usize, u32);

type Queues = HashMap<SourceTag, VecDeque<Arc<PostedReceive>>>;

/// The first pause between two checks for messages.
const SHORTEST: Duration = Duration::from_micros(10);

/// The started receives of a group, oldest first; no queue is empty.
#[derive(Default)]
pub(super) struct Posts {
    queues: Mutex<Queues>,
    /// The number of receives, which each receive reads without the lock.
    count: AtomicUsize,
}

impl std::fmt::Debug for Posts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Posts({})", self.count.load(Ordering::Relaxed))
    }
}

impl Posts {
    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Returns whether a started receive has this tag.
    pub(super) fn has_tag(&self, tag: u32) -> bool {
        !self.is_empty() && self.queues.lock().keys().any(|&(_, other)| other == tag)
    }

    fn push(&self, post: &Arc<PostedReceive>) {
        self.queues.lock().entry(post.address()).or_default().push_back(post.clone());
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    fn pop(&self, queues: &mut MutexGuard<'_, Queues>, address: SourceTag) {
        if let Some(queue) = queues.get_mut(&address) {
            self.count.fetch_sub(usize::from(queue.pop_front().is_some()), Ordering::Relaxed);
            if queue.is_empty() {
                queues.remove(&address);
            }
        }
    }
}

impl PostedReceive {
    fn address(&self) -> SourceTag {
        (self.call.collective.peer().unwrap_or(0), self.call.collective.tag())
    }
}

impl ProcessGroup {
    /// Starts a receive behind all others of this sender and tag.
    pub(super) fn post(&self, call: Call, output: Option<Tensor>) -> Result<Arc<PostedReceive>> {
        self.check_dtypes(&call)?;
        self.failure().map_or(Ok(()), |failure| Err(Error::Group(failure)))?;
        let post = Arc::new(PostedReceive {
            call,
            thread: std::thread::current().id(),
            output,
            received: OnceLock::new(),
        });
        self.posts.push(&post);
        Ok(post)
    }

    /// Receives the message of `post`, after those of the receives before it.
    pub(super) fn settle(&self, post: &Arc<PostedReceive>, timeout: Option<Duration>) -> Result<Tensor> {
        let group = match timeout {
            Some(timeout) if self.backend().has_call_timeouts() => &self.with_timeout(timeout)?,
            Some(timeout) => {
                self.poll(timeout, || self.has_come(post))?;
                self
            }
            None => self,
        };
        // Held during the wait, so that one thread at a time waits on this group.
        let mut queues = self.posts.queues.lock();
        loop {
            if let Some(tensor) = post.received.get() {
                return Ok(tensor.clone());
            }
            let first = queues.get(&post.address()).and_then(|queue| queue.front().cloned());
            let Some(first) = first else {
                return Err(Error::Unsupported("a receive without its turn".to_string()));
            };
            let tensor = group.receive_first(&first)?;
            let _ = first.received.set(tensor);
            self.posts.pop(&mut queues, post.address());
        }
    }

    /// Returns whether the message of `post` has arrived, or is known never to arrive.
    pub(super) fn has_come(&self, post: &Arc<PostedReceive>) -> Result<bool> {
        self.failure().map_or(Ok(()), |failure| Err(Error::Group(failure)))?;
        let mut queues = self.posts.queues.lock();
        while post.received.get().is_none() && queues.contains_key(&post.address()) {
            // The message may be the sender's last action, so its end is checked first, then the message.
            let is_gone = self.backend().has_returned(post.address().0);
            if !self.take_first(&mut queues, post.address())? {
                return Ok(is_gone); // the wait fails at once
            }
        }
        Ok(true)
    }

    /// Receives messages of started receives until `ready`, since ranks may wait for these before they free room.
    ///
    /// Returns when no receive is left, or nothing has arrived for `limit`.
    pub(super) fn take_posted(&self, limit: Duration, ready: impl Fn() -> Result<bool>) -> Result<()> {
        let (mut idle, mut pause) = (Instant::now(), SHORTEST);
        while !self.posts.is_empty() && idle.elapsed() < limit && !ready()? {
            let mut queues = self.posts.queues.lock();
            let addresses: Vec<SourceTag> = queues.keys().copied().collect();
            let mut has_taken = false;
            for address in addresses {
                has_taken |= self.take_first(&mut queues, address)?;
            }
            drop(queues);
            if has_taken {
                (idle, pause) = (Instant::now(), SHORTEST);
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Receives the message of the first receive of a queue if it has arrived; returns false if no receive waits there.
    pub(super) fn take_awaited(&self, address: SourceTag) -> Result<bool> {
        Ok(!self.posts.is_empty() && self.take_first(&mut self.posts.queues.lock(), address)?)
    }

    /// Receives the message of the first receive of a queue, if it has arrived.
    fn take_first(&self, queues: &mut MutexGuard<'_, Queues>, address: SourceTag) -> Result<bool> {
        let Some(first) = queues.get(&address).and_then(|queue| queue.front().cloned()) else {
            return Ok(false);
        };
        if self.backend().probe(&first.call)?.is_none() {
            return Ok(false);
        }
        let _ = first.received.set(self.receive_first(&first)?);
        self.posts.pop(queues, address);
        Ok(true)
    }

    /// Receives a message under the lock of the queues. So threads may do it for each other, and none of them is in the call.
    fn receive_first(&self, post: &PostedReceive) -> Result<Tensor> {
        self.pass(post.call.clone(), 0, |backend, call| Ok(backend.recv(call, post.output.as_ref())?.1))
    }
}
