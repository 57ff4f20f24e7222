//! Connecting to rank 0.
use super::server::meeting_points;
use crate::launch::LaunchInfo;
use crate::link::hello::{Answer, Hello, MAX_TOKEN};
use crate::link::{Before, within};
use crate::{Error, Result};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// The time limit of one attempt, to connect and to be answered.
const ATTEMPT: Duration = Duration::from_secs(5);
/// The first and the last pause between attempts; pauses grow between them.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// Connects to rank 0 until it accepts this process, for at most `limit`.
pub(super) fn dial(info: &LaunchInfo, own: Option<SocketAddr>, limit: Duration) -> Result<TcpStream> {
    let hello = hello(info)?;
    let end = within(limit);
    let mut pause = PAUSE.0;
    loop {
        let last = match attempt(info, own, &hello, end) {
            Ok((stream, Answer::Welcome)) => return Ok(stream),
            Ok((_, Answer::Never(why))) => return Err(Error::Init(why)),
            Ok((_, Answer::Later(why))) => io::Error::other(why),
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                return Err(Error::Init(format!(
                    "another program answers at {}; set MASTER_PORT to a free port, equal on all ranks",
                    info.address
                )));
            }
            Err(error) => error,
        };
        if Instant::now() + pause >= end {
            return Err(Error::Init(format!(
                "rank {} of {} could not reach rank 0 at {} within {limit:?} ({last}); check that rank 0 runs, and \
                 that MASTER_ADDR and MASTER_PORT are right",
                info.rank, info.world_size, info.address
            )));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSE.1);
    }
}

fn hello(info: &LaunchInfo) -> Result<Hello> {
    let number = |n: usize| u32::try_from(n).map_err(|_| Error::Init(format!("{n} is too large for a rank or a size")));
    if info.token.len() > MAX_TOKEN {
        let len = info.token.len();
        return Err(Error::Init(format!("the token has {len} bytes; set CANDLE_DIST_TOKEN to at most {MAX_TOKEN}")));
    }
    Ok(Hello { rank: number(info.rank)?, size: number(info.world_size)?, token: info.token.as_bytes().to_vec() })
}

/// Greets rank 0 once.
fn attempt(info: &LaunchInfo, own: Option<SocketAddr>, hello: &Hello, end: Instant) -> io::Result<(TcpStream, Answer)> {
    let addresses = own.map_or_else(|| meeting_points(info), |own| Ok(vec![own]))?;
    let mut last = io::Error::new(ErrorKind::NotFound, "the host has no address");
    for address in addresses {
        let left = end.saturating_duration_since(Instant::now()).clamp(PAUSE.0, ATTEMPT);
        let connected = TcpStream::connect_timeout(&address, left).and_then(|stream| {
            stream.set_write_timeout(Some(left))?;
            hello.write(&mut &stream)?;
            let answer = Answer::read(&mut Before { stream: &stream, deadline: within(left) })?;
            Ok((stream, answer))
        });
        match connected {
            Ok(connected) => return Ok(connected),
            Err(error) if error.kind() == ErrorKind::InvalidData => return Err(error),
            Err(error) => last = error,
        }
    }
    Err(last)
}
