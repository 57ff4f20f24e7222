//! How long the other side of a connection has been silent, as far as this side could have heard it.
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The time without a sign of life on one side of a connection.
///
/// A process that gets no time, because its host is paused or overloaded, hears nothing meanwhile, and so do the others on
/// that host. So a wait that takes far longer than asked for counts only in part.
#[derive(Debug)]
struct Silence {
    limit: Duration,
    /// How long one wait is to take.
    tick: Duration,
    lasted: Duration,
}

impl Silence {
    /// Adds a wait in which nothing came. Returns whether the limit is reached.
    fn waited(&mut self, took: Duration) -> bool {
        self.lasted = self.lasted.saturating_add(took.min(self.tick * 2));
        self.lasted >= self.limit
    }
}

/// A stream whose reads and writes end with `TimedOut` when the other side has neither sent nor taken anything for a while.
#[derive(Debug)]
pub(crate) struct PatientStream {
    stream: TcpStream,
    silence: Silence,
}

impl PatientStream {
    /// Waits for at most `limit`, in waits of a `tick` each.
    pub(crate) fn new(stream: TcpStream, limit: Duration, tick: Duration) -> io::Result<Self> {
        stream.set_read_timeout(Some(tick))?;
        stream.set_write_timeout(Some(tick))?;
        Ok(Self { stream, silence: Silence { limit, tick, lasted: Duration::ZERO } })
    }

    /// Repeats `once` until it moves bytes, or fails, or the other side has been silent too long.
    fn repeat(&mut self, mut once: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize> {
        loop {
            let began = Instant::now();
            match once(&self.stream) {
                // The system interrupts a wait when a stopped process goes on.
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) =>
                {
                    if self.silence.waited(began.elapsed()) {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                moved => {
                    self.silence.lasted = Duration::ZERO;
                    return moved;
                }
            }
        }
    }
}

impl Read for PatientStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.repeat(|mut stream| stream.read(buffer))
    }
}

impl Write for PatientStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.repeat(|mut stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// The waits of a connection that counts as lost after ten seconds.
    fn silence() -> Silence {
        let second = Duration::from_secs(1);
        Silence { limit: second * 10, tick: second, lasted: Duration::ZERO }
    }

    #[test]
    fn a_side_that_says_nothing_is_silent_after_the_limit() {
        let mut silence = silence();
        let waits = (1..).find(|_| silence.waited(Duration::from_millis(1001))).unwrap();
        assert_eq!(waits, 10);
    }

    /// Neither a pause of the whole host, nor a processor that others use, says anything of the other side.
    #[test]
    fn a_wait_in_which_this_process_got_no_time_is_no_silence() {
        let mut silence = silence();
        assert!(!silence.waited(Duration::from_secs(3600)));
        let waits = (1..).find(|_| silence.waited(Duration::from_secs(1))).unwrap();
        assert_eq!(waits, 8, "a side that stays silent is found all the same");
    }

    #[test]
    fn a_byte_ends_the_silence() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let tick = Duration::from_millis(20);
        let mut patient = PatientStream::new(listener.accept().unwrap().0, tick * 5, tick).unwrap();
        patient.silence.waited(tick);
        other.write_all(b"x").unwrap();
        assert_eq!(patient.read(&mut [0; 8]).unwrap(), 1);
        assert_eq!(patient.silence.lasted, Duration::ZERO);
        assert_eq!(patient.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(patient.silence.lasted >= tick * 5);
    }
}
