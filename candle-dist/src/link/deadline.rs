//! Deadlines that cannot overflow, and reading until a deadline.
use std::io::{self, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Longer than any wait, and short enough to be added to any time.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Returns the time `limit` from now.
pub(crate) fn within(limit: Duration) -> Instant {
    Instant::now() + limit.min(FOREVER)
}

/// Reads from a stream until a deadline, even if bytes arrive slowly.
pub(crate) struct Before<'a> {
    pub(crate) stream: &'a TcpStream,
    pub(crate) deadline: Instant,
}

impl Read for Before<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        (&mut &*self.stream).read(buffer)
    }
}
