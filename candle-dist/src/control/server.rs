//! The server of rank 0: accepts processes of the job and drops all other connections.
use super::hub::Hub;
use crate::launch::{InitOptions, LaunchInfo};
use crate::link::hello::Hello;
use crate::link::{Before, within};
use crate::{Error, Result};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The time limit for a greeting.
const GREETING: Duration = Duration::from_secs(2);
/// The maximum number of connections without a complete greeting. The oldest one is dropped for a new one.
const STRANGERS: usize = 64;
/// The stack size of a thread that reads a greeting.
const STACK_BYTES: usize = 128 << 10;
/// The pause when the system runs out of connections.
const EXHAUSTED: Duration = Duration::from_millis(50);

/// The server of rank 0.
#[derive(Debug)]
pub(super) struct Server {
    hub: Arc<Hub>,
    address: SocketAddr,
    is_over: Arc<AtomicBool>,
    door: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at the world's address, on that interface only.
    pub(super) fn start(info: &LaunchInfo, options: &InitOptions) -> Result<Self> {
        let failed = |error: std::io::Error| Error::Init(format!("rank 0 cannot start its threads: {error}"));
        let listener = listen(info)?;
        let address = listener.local_addr().map_err(failed)?;
        let hub = Arc::new(Hub::new(info.world_size, &info.token, options.is_debug()));
        let is_over = Arc::new(AtomicBool::new(false));
        let (watched, limit) = (hub.clone(), options.init_timeout);
        let supervisor = thread::Builder::new().name("candle-dist supervisor".into());
        supervisor.spawn(move || watched.supervise(limit)).map_err(failed)?;
        let door = Door { hub: hub.clone(), silence: options.lost_after, strangers: Mutex::default() };
        let (door, closed) = (Arc::new(door), is_over.clone());
        let acceptor = thread::Builder::new().name("candle-dist door".into());
        let door = acceptor.spawn(move || door.keep(&listener, &closed)).map_err(failed)?;
        Ok(Self { hub, address, is_over, door: Some(door) })
    }

    /// Returns the address at which this process reaches the server.
    pub(super) fn address(&self) -> SocketAddr {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(Ipv4Addr::LOCALHOST.into());
        }
        address
    }

    /// Waits until all processes have ended, but at most for `farewell` after a failure.
    pub(super) fn finish(&self, farewell: Duration) {
        self.hub.stay();
        self.hub.finish(farewell);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.hub.finish(Duration::ZERO);
        self.is_over.store(true, Ordering::Release);
        // Wakes the accepting thread. When it has ended, the port is free again.
        let woken = TcpStream::connect_timeout(&self.address(), Duration::from_secs(1)).is_ok();
        if let (true, Some(door)) = (woken, self.door.take()) {
            let _ = door.join();
        }
    }
}

/// Binds the address that the launcher set.
fn listen(info: &LaunchInfo) -> Result<TcpListener> {
    let (host, port) = info.address.rsplit_once(':').unwrap_or((&info.address, ""));
    let failed = |error: std::io::Error| {
        Error::Init(match error.kind() {
            ErrorKind::AddrInUse => format!(
                "port {port} of {host} is taken by another program or job; set MASTER_PORT to another one, equal on all \
                 ranks"
            ),
            ErrorKind::AddrNotAvailable => format!(
                "rank 0 cannot listen at {host}, which is not an address of its host; set MASTER_ADDR to an address of the \
                 host that rank 0 runs on"
            ),
            _ => format!("rank 0 cannot listen at {}: {error}; correct MASTER_ADDR and MASTER_PORT", info.address),
        })
    };
    let addresses = meeting_points(info).map_err(failed)?;
    TcpListener::bind(&addresses[..]).map_err(failed)
}

/// Returns the possible addresses of rank 0, as this host resolves them.
pub(super) fn meeting_points(info: &LaunchInfo) -> io::Result<Vec<SocketAddr>> {
    Ok(beyond_loopback(info, info.address.to_socket_addrs()?.collect()))
}

/// Removes loopback addresses: many hosts resolve their own name to one, which other hosts cannot reach.
fn beyond_loopback(info: &LaunchInfo, mut addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    if !info.spans_hosts() {
        return addresses;
    }
    let is_local = |address: &SocketAddr| address.ip().to_canonical().is_loopback();
    if info.rank == 0 && addresses.iter().all(is_local) {
        // Only the other hosts know the reachable address, so listen on all interfaces.
        addresses.iter_mut().for_each(|address| address.set_ip(Ipv4Addr::UNSPECIFIED.into()));
    } else if !addresses.iter().all(is_local) {
        addresses.retain(|address| !is_local(address));
    }
    addresses
}

/// The accepting side of the server.
struct Door {
    hub: Arc<Hub>,
    silence: Duration,
    /// Connections without a complete greeting, oldest first.
    strangers: Mutex<VecDeque<(u64, TcpStream)>>,
}

impl Door {
    fn keep(self: Arc<Self>, listener: &TcpListener, is_over: &AtomicBool) {
        let mut id = 0u64;
        for accepted in listener.incoming() {
            if is_over.load(Ordering::Acquire) {
                return;
            }
            let Ok(stream) = accepted else {
                thread::sleep(EXHAUSTED);
                continue;
            };
            id += 1;
            let Ok(held) = stream.try_clone() else { continue };
            let mut strangers = self.strangers.lock();
            strangers.push_back((id, held));
            if strangers.len() > STRANGERS
                && let Some((_, oldest)) = strangers.pop_front()
            {
                let _ = oldest.shutdown(Shutdown::Both);
            }
            drop(strangers);
            let door = self.clone();
            let greeter = thread::Builder::new().name("candle-dist greeter".into()).stack_size(STACK_BYTES);
            if greeter.spawn(move || door.greet(id, stream)).is_err() {
                // The connection closes, and a process of this job tries again.
                self.forget(id);
            }
        }
    }

    fn forget(&self, id: u64) {
        self.strangers.lock().retain(|(other, _)| *other != id);
    }

    fn greet(&self, id: u64, stream: TcpStream) {
        let hello = Hello::read(&mut Before { stream: &stream, deadline: within(GREETING) });
        self.forget(id);
        // If the answer does not arrive, the other side tries again.
        let _ = stream.set_write_timeout(Some(GREETING));
        let _ = match hello {
            Ok(hello) => self.hub.admit(&hello, stream, self.silence),
            Err(stranger) => match stranger.answer() {
                Some(answer) => answer.write(&mut &stream),
                None => Ok(()),
            },
        };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn loopback_addresses_are_for_worlds_of_one_host() {
        let info = |rank, local_size| LaunchInfo {
            rank,
            world_size: 4,
            local_rank: 0,
            local_size,
            address: "head:29500".into(),
            token: String::new(),
            share_gpus: false,
            has_mpi: false,
        };
        let of =
            |list: &[&str]| list.iter().map(|ip| format!("{ip}:29500").parse().unwrap()).collect::<Vec<SocketAddr>>();
        let all = ["127.0.1.1", "10.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[fd00::1]"];
        for rank in [0, 1] {
            assert_eq!(beyond_loopback(&info(rank, 4), of(&all)), of(&all));
            assert_eq!(beyond_loopback(&info(rank, 2), of(&all)), of(&["10.0.0.1", "[fd00::1]"]));
        }
        assert_eq!(beyond_loopback(&info(0, 2), of(&["127.0.1.1"])), of(&["0.0.0.0"]));
        // On the same host as rank 0, which also listens there.
        assert_eq!(beyond_loopback(&info(1, 2), of(&["127.0.1.1"])), of(&["127.0.1.1"]));
    }
}
