//! Deadlines that cannot overflow, and a stream that keeps one.
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

/// Longer than any wait, and short enough to be added to any time.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Returns the time `limit` from now.
pub(crate) fn within(limit: Duration) -> Instant {
    Instant::now() + limit.min(FOREVER)
}

/// Attempts at what may succeed later, with pauses that grow, until a deadline.
pub(crate) struct Attempts {
    pub(crate) end: Instant,
    pause: Duration,
}

impl Attempts {
    /// The first and the last pause.
    pub(crate) const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

    pub(crate) fn within(limit: Duration) -> Self {
        Self { end: within(limit), pause: Self::PAUSE.0 }
    }

    /// Waits for the next attempt. Returns false if there is no time for one.
    pub(crate) fn again(&mut self) -> bool {
        if Instant::now() + self.pause >= self.end {
            return false;
        }
        thread::sleep(self.pause);
        self.pause = (self.pause * 2).min(Self::PAUSE.1);
        true
    }
}

/// Reads from and writes to a stream until a deadline, even if bytes move slowly.
pub(crate) struct DeadlineStream<'a> {
    pub(crate) stream: &'a TcpStream,
    pub(crate) deadline: Instant,
}

impl DeadlineStream<'_> {
    fn left(&self) -> io::Result<Duration> {
        match self.deadline.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(ErrorKind::TimedOut.into()),
            left => Ok(left),
        }
    }
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        (&mut &*self.stream).read(buffer).map_err(timed_out)
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        (&mut &*self.stream).write(bytes).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Names a timeout what it is: the system calls it a resource that is temporarily unavailable.
fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock { ErrorKind::TimedOut.into() } else { error }
}
