//! Connecting to rank 0.
use super::server::meeting_points;
use super::terms::Terms;
use crate::launch::{LaunchInfo, Secret};
use crate::link::hello::{Hello, HelloReply, Stranger};
use crate::link::key::JobKey;
use crate::link::{Attempts, DeadlineStream, within};
use crate::{Error, Result, printable};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The time limit of one attempt, to connect and to be answered.
const ATTEMPT: Duration = Duration::from_secs(5);

/// Connects to rank 0 until it accepts this process, for at most `limit`, and returns its terms. Rank 0 itself knows its
/// address and key.
pub(super) fn dial(
    info: &LaunchInfo,
    own: Option<(SocketAddr, JobKey)>,
    limit: Duration,
) -> Result<(TcpStream, Terms)> {
    let hello = hello(info)?;
    let mut attempts = Attempts::within(limit);
    loop {
        let last = match attempt(info, own.as_ref(), hello, attempts.end)? {
            Ok(joined) => return Ok(joined),
            Err(last) => last,
        };
        if !attempts.again() {
            return Err(Error::Unreachable(format!(
                "rank {} of {} could not reach rank 0 at {} within {limit:?} ({last}); check that rank 0 runs and has not \
                 ended with an error of its own, and that MASTER_ADDR and MASTER_PORT are right",
                info.rank, info.world_size, info.address
            )));
        }
    }
}

/// Greets another rank 0 at this address, as rank 0 too. If one launcher has started both, that world finds out: the other
/// ranks of this one might join it. Without a launcher, only this process fails.
pub(super) fn call_twin(info: &LaunchInfo) {
    if let (true, Ok(hello)) = (info.secret.is_of_launcher(), hello(info)) {
        let _ = attempt(info, None, hello, within(ATTEMPT));
    }
}

fn hello(info: &LaunchInfo) -> Result<Hello> {
    let number = |n: usize| {
        u32::try_from(n).map_err(|_| Error::Init(format!("{n} is too large for a rank or a size")))
    };
    Ok(Hello { rank: number(info.rank)?, size: number(info.world_size)? })
}

/// Greets rank 0 once. The outer error is final, the inner one may go away.
fn attempt(
    info: &LaunchInfo,
    own: Option<&(SocketAddr, JobKey)>,
    hello: Hello,
    end: Instant,
) -> Result<io::Result<(TcpStream, Terms)>> {
    let (addresses, key) = match own {
        Some((address, key)) => (vec![*address], key.clone()),
        None => {
            // Rank 0 may just be replacing it.
            let secret = match info.secret.of_guest(info)? {
                Ok(secret) => secret,
                Err(error) => return Ok(Err(error)),
            };
            match meeting_points(info) {
                Ok(addresses) => (addresses, info.key(&secret)),
                Err(error) => return Ok(Err(error)),
            }
        }
    };
    let mut last = None;
    // A name may have several addresses, and others may use some of them.
    let mut foreign = None;
    for address in addresses {
        let left = end.saturating_duration_since(Instant::now()).clamp(Attempts::PAUSE.0, ATTEMPT);
        let greeted =
            TcpStream::connect_timeout(&address, left).map_err(Stranger::Unknown).and_then(|stream| {
                let answer =
                    hello.greet(&key, &mut DeadlineStream { stream: &stream, deadline: within(left) })?;
                Ok((stream, answer))
            });
        match greeted {
            Ok((stream, HelloReply::Welcome(text))) => return Ok(Ok((stream, Terms::accept(&text)?))),
            Ok((_, HelloReply::Never(why))) => return Err(Error::Init(printable(&why).into())),
            Ok((_, HelloReply::NotStarted(why))) => return Err(Error::NotStarted(printable(&why).into())),
            Ok((_, HelloReply::Later(why))) => return Ok(Err(io::Error::other(printable(&why)))),
            Err(Stranger::Unknown(error)) if error.kind() == ErrorKind::InvalidData => {
                foreign = Some(format!(
                    "another program answers at {address}; set MASTER_PORT to a free port, equal on all ranks"
                ));
            }
            Err(Stranger::Refused(why)) => {
                let why = printable(&why);
                foreign = Some(format!("what answers at {address} refuses this process: {why}"));
            }
            Err(Stranger::Secret) => {
                let why = format!("the rank 0 at {address} has another secret than this process");
                match info.secret {
                    // This process may have read the one of the world before.
                    Secret::File(_) => {
                        last = Some(io::Error::other(format!("{why}, which is of another job")));
                    }
                    _ => foreign = Some(format!("{why}; it is of another job, or CANDLE_DIST_TOKEN differs")),
                }
            }
            Err(Stranger::Unknown(error)) => last = Some(error),
        }
    }
    match (last, foreign) {
        (None, Some(foreign)) => Err(Error::Init(foreign)),
        (Some(last), None) => Ok(Err(last)),
        // Rank 0 may come to one of the other addresses.
        (Some(last), Some(foreign)) => Ok(Err(io::Error::other(format!("{last}, and {foreign}")))),
        (None, None) => Ok(Err(io::Error::new(ErrorKind::NotFound, "the host has no address"))),
    }
}
