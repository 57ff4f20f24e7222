//! Bindings to MPI: the functions of `native.c`, with their only callers.
//!
//! Safe functions here may be called by one thread at a time; the backend's lock ensures this. Sends and receives are
//! `unsafe`: MPI uses their memory until [`MpiRequest::test`] says that it is done (see `transfer.rs` and `wire.rs`).
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::ptr::{NonNull, from_mut};

unsafe extern "C" {
    fn candle_mpi_state(started: *mut c_int, ended: *mut c_int) -> c_int;
    fn candle_mpi_start(level: *mut c_int) -> c_int;
    fn candle_mpi_level(level: *mut c_int) -> c_int;
    fn candle_mpi_end() -> c_int;
    fn candle_mpi_world() -> usize;
    fn candle_mpi_read(comm: *const c_void) -> usize;
    fn candle_mpi_place(comm: usize, rank: *mut c_int, size: *mut c_int) -> c_int;
    fn candle_mpi_duplicate(comm: usize, copy: *mut usize, most_tag: *mut c_int) -> c_int;
    fn candle_mpi_free(comm: usize) -> c_int;
    fn candle_mpi_share(
        comm: usize,
        most: c_int,
        ring: usize,
        counts: usize,
        window: *mut usize,
        group: *mut usize,
        rank: *mut c_int,
        size: *mut c_int,
    ) -> c_int;
    fn candle_mpi_avoid_shared_memory() -> c_int;
    fn candle_mpi_segment(window: usize, rank: c_int, data: *mut *mut c_void) -> c_int;
    fn candle_mpi_rank_of(comm: usize, group: usize, rank: c_int, found: *mut c_int) -> c_int;
    fn candle_mpi_unshare(window: usize, group: usize) -> c_int;
    fn candle_mpi_send(
        comm: usize,
        data: *const c_void,
        len: c_int,
        to: c_int,
        tag: c_int,
        made: *mut usize,
    ) -> c_int;
    fn candle_mpi_receive(
        comm: usize,
        data: *mut c_void,
        len: c_int,
        from: c_int,
        tag: c_int,
        made: *mut usize,
    ) -> c_int;
    fn candle_mpi_barrier(comm: usize, made: *mut usize) -> c_int;
    fn candle_mpi_test(request: *mut usize, done: *mut c_int, from: *mut c_int, len: *mut c_int) -> c_int;
    fn candle_mpi_cancel(request: *mut usize) -> c_int;
    fn candle_mpi_error(code: c_int, text: *mut c_char, room: c_int);
}

/// MPI's own text for a failed call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MpiError(String);

impl fmt::Display for MpiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MPI: {}", self.0)
    }
}

impl std::error::Error for MpiError {}

impl MpiError {
    pub(super) fn new(text: &str) -> Self {
        Self(text.to_string())
    }
}

pub(super) type MpiResult<T> = Result<T, MpiError>;

fn check(code: c_int) -> MpiResult<()> {
    if code == 0 {
        return Ok(());
    }
    let mut text: [c_char; 512] = [0; 512];
    // SAFETY: the buffer has the named size, and the text ends with a zero.
    let words = unsafe {
        candle_mpi_error(code, text.as_mut_ptr(), text.len() as c_int);
        CStr::from_ptr(text.as_ptr())
    };
    Err(MpiError(words.to_string_lossy().into_owned()))
}

/// The thread level of MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ThreadLevel {
    Single,
    Funneled,
    Serialized,
    Multiple,
}

impl ThreadLevel {
    const fn of(number: c_int) -> Self {
        match number {
            0 => Self::Single,
            1 => Self::Funneled,
            2 => Self::Serialized,
            _ => Self::Multiple,
        }
    }
}

impl fmt::Display for ThreadLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Single => "MPI_THREAD_SINGLE",
            Self::Funneled => "MPI_THREAD_FUNNELED",
            Self::Serialized => "MPI_THREAD_SERIALIZED",
            Self::Multiple => "MPI_THREAD_MULTIPLE",
        })
    }
}

/// Returns whether MPI was started in this process, and whether it has ended.
pub(super) fn state() -> MpiResult<(bool, bool)> {
    let (mut started, mut ended) = (0, 0);
    // SAFETY: MPI allows both questions at any time and from any thread.
    check(unsafe { candle_mpi_state(&mut started, &mut ended) })?;
    Ok((started != 0, ended != 0))
}

/// Keeps an MPI that has not started from shared memory. Returns whether it could be told so.
pub(super) fn avoid_shared_memory() -> bool {
    // SAFETY: MPI allows calls of its tool interface before its start.
    unsafe { candle_mpi_avoid_shared_memory() != 0 }
}

/// Starts MPI for calls from one thread at a time, and returns the provided thread level.
pub(super) fn start() -> MpiResult<ThreadLevel> {
    let mut level = 0;
    // SAFETY: the caller has checked `state`; a second start is an error of MPI and not undefined behavior.
    check(unsafe { candle_mpi_start(&mut level) })?;
    Ok(ThreadLevel::of(level))
}

/// Returns the thread level of a started MPI.
pub(super) fn level() -> MpiResult<ThreadLevel> {
    let mut level = 0;
    // SAFETY: MPI allows the question from any thread between its start and its end.
    check(unsafe { candle_mpi_level(&mut level) })?;
    Ok(ThreadLevel::of(level))
}

/// Ends MPI.
pub(super) fn end() -> MpiResult<()> {
    // SAFETY: the caller has started MPI on this thread, and no request is open.
    check(unsafe { candle_mpi_end() })
}

/// A communicator of a program that has started MPI itself, by any binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Comm(usize);

impl Comm {
    /// Returns the communicator of all ranks, `MPI_COMM_WORLD`.
    #[must_use]
    pub fn world() -> Self {
        // SAFETY: this only reads a constant.
        Self(unsafe { candle_mpi_world() })
    }

    /// The communicator whose C handle, an `MPI_Comm`, lies at `handle`.
    ///
    /// # Safety
    /// `handle` points to an `MPI_Comm` of the MPI that this crate was built with. The communicator has all ranks of
    /// the world and stays until the backend has been started.
    #[must_use]
    pub unsafe fn from_raw(handle: *const c_void) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { candle_mpi_read(handle) })
    }

    /// Returns this process's rank, and the number of ranks.
    pub(super) fn place(self) -> MpiResult<(usize, usize)> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the communicator is valid, and the caller has checked that MPI runs.
        check(unsafe { candle_mpi_place(self.0, &mut rank, &mut size) })?;
        Ok((rank as usize, size as usize))
    }

    /// Duplicates the communicator for private use. All ranks call this, and wait for each other.
    pub(super) fn duplicate(self) -> MpiResult<PrivateComm> {
        let (mut comm, mut most_tag) = (0, 0);
        // SAFETY: as for `place`.
        check(unsafe { candle_mpi_duplicate(self.0, &mut comm, &mut most_tag) })?;
        Ok(PrivateComm { comm, most_tag })
    }
}

/// The backend's own communicator. Its errors are returned as values.
#[derive(Debug)]
pub(super) struct PrivateComm {
    comm: usize,
    /// The largest tag of a message.
    pub(super) most_tag: i32,
}

impl PrivateComm {
    /// Starts to send `len` bytes.
    ///
    /// # Safety
    /// The bytes are not moved or written until the request is done.
    pub(super) unsafe fn send(
        &self,
        data: *const u8,
        len: usize,
        to: usize,
        tag: i32,
    ) -> MpiResult<MpiRequest> {
        let mut request = MpiRequest { handle: 0, open: true };
        // SAFETY: the caller's promise; the backend's lock is held.
        check(unsafe {
            candle_mpi_send(
                self.comm,
                data.cast(),
                len as c_int,
                to as c_int,
                tag,
                from_mut(&mut request.handle),
            )
        })?;
        Ok(request)
    }

    /// Starts to receive at most `len` bytes, from any rank if `from` is `None`.
    ///
    /// # Safety
    /// The bytes are not moved, read or written until the request is done.
    pub(super) unsafe fn receive(
        &self,
        data: *mut u8,
        len: usize,
        from: Option<usize>,
        tag: i32,
    ) -> MpiResult<MpiRequest> {
        let mut request = MpiRequest { handle: 0, open: true };
        let from = from.map_or(-1, |from| from as c_int);
        // SAFETY: the caller's promise; the backend's lock is held.
        check(unsafe {
            candle_mpi_receive(self.comm, data.cast(), len as c_int, from, tag, from_mut(&mut request.handle))
        })?;
        Ok(request)
    }

    /// Duplicates the communicator. All ranks call this, and wait for each other.
    pub(super) fn duplicate(&self) -> MpiResult<Self> {
        Comm(self.comm).duplicate()
    }

    /// Starts a barrier of all ranks.
    pub(super) fn barrier(&self) -> MpiResult<MpiRequest> {
        let mut request = MpiRequest { handle: 0, open: true };
        // SAFETY: the communicator is valid; the backend's lock is held.
        check(unsafe { candle_mpi_barrier(self.comm, from_mut(&mut request.handle)) })?;
        Ok(request)
    }

    /// Allocates memory that up to `most` ranks of a host share: each has a segment with `ring` bytes for each of them.
    /// The first `counts` bytes of each ring are zeroed. All ranks call this, and wait for each other.
    ///
    /// There is room for it. Returns `None` if no other rank shares memory with this one.
    pub(super) fn share(&self, most: usize, ring: usize, counts: usize) -> MpiResult<Option<MpiWindow>> {
        let (mut window, mut group, mut rank, mut size) = (0, 0, 0, 0);
        let most = c_int::try_from(most.max(1)).unwrap_or(c_int::MAX);
        // SAFETY: the communicator is valid; the caller is the only thread that uses MPI.
        check(unsafe {
            candle_mpi_share(self.comm, most, ring, counts, &mut window, &mut group, &mut rank, &mut size)
        })?;
        let window = MpiWindow { handle: window, group, rank: rank as usize, size: size as usize };
        Ok((window.handle != 0).then_some(window))
    }

    /// Returns the rank here of a rank of a window.
    pub(super) fn rank_of(&self, window: &MpiWindow, rank: usize) -> MpiResult<usize> {
        let mut found = -1;
        // SAFETY: both communicators are valid.
        check(unsafe { candle_mpi_rank_of(self.comm, window.group, rank as c_int, &mut found) })?;
        usize::try_from(found).map_err(|_| MpiError::new("a rank that shares memory is unknown"))
    }

    /// Frees the communicator; no message may be in flight on it.
    pub(super) fn free(self) -> MpiResult<()> {
        // SAFETY: the communicator is valid and belongs to the backend.
        check(unsafe { candle_mpi_free(self.comm) })
    }
}

/// Memory that ranks of a host share, with a segment for each.
#[derive(Debug)]
pub(super) struct MpiWindow {
    handle: usize,
    group: usize,
    /// This rank among those that share the memory.
    pub(super) rank: usize,
    /// The number of these ranks.
    pub(super) size: usize,
}

impl MpiWindow {
    /// Returns the address of a rank's segment, which is aligned for atomics.
    pub(super) fn segment(&self, rank: usize) -> MpiResult<NonNull<u8>> {
        let mut data = std::ptr::null_mut();
        // SAFETY: the window is valid.
        check(unsafe { candle_mpi_segment(self.handle, rank as c_int, &mut data) })?;
        let data = NonNull::new(data.cast::<u8>()).filter(|data| data.cast::<u64>().is_aligned());
        data.ok_or_else(|| MpiError::new("shared memory that is not aligned"))
    }

    /// Frees the memory. All ranks that share it call this, and wait for each other.
    pub(super) fn free(self) -> MpiResult<()> {
        // SAFETY: window and group are valid and belong to the backend, which uses the memory no longer.
        check(unsafe { candle_mpi_unshare(self.handle, self.group) })
    }
}

/// The result of a receive.
#[derive(Debug, Clone, Copy)]
pub(super) struct MpiStatus {
    pub(super) from: usize,
    pub(super) len: usize,
}

/// A message in flight. Dropping it loses track of it: its memory must then never be freed.
#[derive(Debug)]
pub(super) struct MpiRequest {
    handle: usize,
    open: bool,
}

impl MpiRequest {
    /// A message that is never done.
    #[cfg(test)]
    pub(super) const fn unanswered() -> Self {
        Self { handle: 0, open: true }
    }

    /// Drives MPI; returns the result once this message is done. It means nothing for a send.
    pub(super) fn test(&mut self) -> MpiResult<Option<MpiStatus>> {
        let (mut done, mut from, mut len) = (c_int::from(!self.open), 0, 0);
        if self.open {
            // SAFETY: the request is open; the backend's lock is held.
            check(unsafe { candle_mpi_test(from_mut(&mut self.handle), &mut done, &mut from, &mut len) })?;
            self.open = done == 0;
        }
        Ok((done != 0).then_some(MpiStatus { from: from as usize, len: len as usize }))
    }

    /// Cancels a receive without a message.
    pub(super) fn cancel(mut self) -> MpiResult<()> {
        if self.open {
            // SAFETY: as for `test`; canceling a receive needs no other rank.
            check(unsafe { candle_mpi_cancel(from_mut(&mut self.handle)) })?;
        }
        Ok(())
    }
}
