//! The server of rank 0: accepts processes of the job and drops all other connections.
use super::dial::call_twin;
use super::hub::ControlHub;
use crate::launch::{InitOptions, JobSecret, LaunchInfo, Secret};
use crate::link::hello::Guest;
use crate::link::key::JobKey;
use crate::link::{Attempts, DeadlineStream, within};
use crate::{Error, Result};
use itertools::Itertools;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The time limit for a greeting.
const GREETING: Duration = Duration::from_secs(2);
/// The maximum number of connections that have not proved that they are of this job. The oldest one is dropped for a new one.
const STRANGERS: usize = 64;
/// The stack size of a thread that reads a greeting.
const STACK_BYTES: usize = 128 << 10;
/// The pause when the system runs out of connections.
const EXHAUSTED: Duration = Duration::from_millis(50);

/// The server of rank 0.
#[derive(Debug)]
pub(super) struct ControlServer {
    hub: Arc<ControlHub>,
    is_over: Arc<AtomicBool>,
    /// Where it listens, with the thread that accepts there.
    doors: Vec<(SocketAddr, JoinHandle<()>)>,
}

impl ControlServer {
    /// Listens where the processes of the world look for rank 0; see [`open`].
    pub(super) fn start(info: &LaunchInfo, options: &InitOptions) -> Result<Self> {
        let failed = |error: std::io::Error| Error::Init(format!("rank 0 cannot start its threads: {error}"));
        let deadline = within(options.init_timeout);
        let listeners = listen(info, options.init_timeout)?;
        // After the port, which only one of two jobs at an address gets.
        let JobSecret { bytes, file } = info.secret.of_host(info)?;
        let key = info.key(&bytes);
        let hub = Arc::new(ControlHub::new(info, key, file, options));
        let is_over = Arc::new(AtomicBool::new(false));
        let (watched, limit) = (hub.clone(), options.init_timeout);
        let supervisor = thread::Builder::new().name("candle-dist supervisor".into());
        supervisor.spawn(move || watched.supervise(limit, deadline)).map_err(failed)?;
        let door = Arc::new(Door { hub: hub.clone(), strangers: Mutex::default() });
        let mut server = Self { hub, is_over, doors: Vec::new() };
        for listener in listeners {
            let address = listener.local_addr().map_err(failed)?;
            let (door, closed) = (door.clone(), server.is_over.clone());
            let acceptor = thread::Builder::new().name("candle-dist door".into());
            let door = acceptor.spawn(move || door.keep(&listener, &closed)).map_err(failed)?;
            server.doors.push((within_reach(address), door));
        }
        Ok(server)
    }

    /// Returns the address and the key with which this process joins too.
    pub(super) fn own(&self) -> (SocketAddr, JobKey) {
        (self.doors[0].0, self.hub.key().clone())
    }

    /// Waits until all processes have ended, but at most for `farewell` after a failure.
    pub(super) fn finish(&self, farewell: Duration) {
        self.hub.stay();
        self.hub.finish(farewell);
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        self.hub.finish(Duration::ZERO);
        self.is_over.store(true, Ordering::Release);
        for (address, door) in self.doors.drain(..) {
            // Wakes the accepting thread. When it has ended, the port is free again.
            if TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok() {
                let _ = door.join();
            }
        }
    }
}

/// Returns the address at which this process reaches a listener.
fn within_reach(mut address: SocketAddr) -> SocketAddr {
    let here: IpAddr =
        if address.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
    if address.ip().is_unspecified() {
        address.set_ip(here);
    }
    address
}

/// Binds the address that the launcher set. If it is a name, this host may have several of its addresses: others try any
/// of them first, so all are bound, and all must be free.
fn listen(info: &LaunchInfo, limit: Duration) -> Result<Vec<TcpListener>> {
    let (host, port) = info.address.rsplit_once(':').unwrap_or((&info.address, ""));
    let failed = |error: std::io::Error| {
        Error::Init(match error.kind() {
            ErrorKind::AddrInUse => {
                call_twin(info);
                format!(
                    "port {port} of {host} is taken by another program or job; set MASTER_PORT to another one, equal on \
                     all ranks"
                )
            }
            ErrorKind::AddrNotAvailable => format!(
                "rank 0 cannot listen at {host}, which is not an address of its host; set MASTER_ADDR to an address of the \
                 host that rank 0 runs on"
            ),
            _ => format!(
                "rank 0 cannot listen at {}: {error}; correct MASTER_ADDR and MASTER_PORT",
                info.address
            ),
        })
    };
    bind(named(info, limit)?).map_err(failed)
}

/// Looks the address up until it has one, as others do: a host may run before its name is known.
fn named(info: &LaunchInfo, limit: Duration) -> Result<Vec<SocketAddr>> {
    let mut attempts = Attempts::within(limit);
    loop {
        let last = match info.address.to_socket_addrs() {
            Ok(addresses) => return open(info, addresses.collect()),
            Err(last) => last,
        };
        if !attempts.again() {
            let host = info.address.rsplit_once(':').map_or("", |(host, _)| host);
            return Err(Error::Init(format!(
                "rank 0 finds no address of {host} within {limit:?} ({last}); correct MASTER_ADDR, or let the host of rank 0 \
                 know the name (/etc/hosts, DNS)"
            )));
        }
    }
}

/// Binds all addresses that are of this host.
fn bind(addresses: Vec<SocketAddr>) -> io::Result<Vec<TcpListener>> {
    let (mut listeners, mut last) = (Vec::new(), None);
    for address in addresses.into_iter().map(canonical).unique() {
        match listener(address) {
            Ok(listener) => listeners.push(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse => return Err(error),
            // Of another host, or of a family that this host lacks.
            Err(error) => last = Some(error),
        }
    }
    match (listeners.is_empty(), last) {
        (false, _) => Ok(listeners),
        (true, last) => Err(last.unwrap_or_else(|| ErrorKind::AddrNotAvailable.into())),
    }
}

/// Binds an address of IPv6 for IPv6 only, whatever the system's default: the port of IPv4 is bound, or taken, apart from it.
#[cfg(unix)]
fn listener(address: SocketAddr) -> io::Result<TcpListener> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};
    const WAITING: i32 = 128;
    let SocketAddr::V6(address) = address else { return TcpListener::bind(address) };
    let socket = socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_ipv6_v6only(&socket, true)?;
    // As the standard library does: a port whose connections have just ended is free.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address)?;
    listen(&socket, WAITING)?;
    Ok(socket.into())
}

#[cfg(not(unix))]
fn listener(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address)
}

/// Returns an address without the IPv6 form of IPv4, which would be bound twice. Others keep their scope.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, address.port()),
        IpAddr::V6(_) => address,
    }
}

/// Returns where rank 0 listens, by the addresses that its host has for the job's. For a job of several hosts, a name of this
/// host stands for all of its interfaces, by IPv4 and by IPv6: other hosts may know other addresses of it, and many hosts know
/// their own name as a loopback address.
///
/// Without a secret it listens only at the addresses that its host has for the name.
///
/// # Errors
/// If these are loopback addresses, which other hosts do not reach.
fn open(info: &LaunchInfo, addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>> {
    let (host, port) = info.address.rsplit_once(':').unwrap_or_default();
    let is_name = host.trim_matches(['[', ']']).parse::<IpAddr>().is_err();
    let is_here = |address: &SocketAddr| TcpListener::bind(SocketAddr::new(address.ip(), 0)).is_ok();
    if !(is_name && info.spans_hosts() && addresses.iter().any(is_here)) {
        return Ok(addresses);
    }
    if info.secret == Secret::Absent {
        let addresses = beyond_loopback(info, addresses);
        return match addresses.iter().all(|address| address.ip().to_canonical().is_loopback()) {
            false => Ok(addresses),
            true => Err(Error::Init(format!(
                "rank 0's host knows {host} as a loopback address only, and without a secret rank 0 does not listen on all \
                 interfaces; set MASTER_ADDR to an address of that host that the others reach, or CANDLE_DIST_TOKEN"
            ))),
        };
    }
    let all: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    Ok(all.map(|ip| SocketAddr::new(ip, port.parse().unwrap_or(0))).to_vec())
}

/// Returns the possible addresses of rank 0, as this host resolves them.
pub(super) fn meeting_points(info: &LaunchInfo) -> io::Result<Vec<SocketAddr>> {
    Ok(beyond_loopback(info, info.address.to_socket_addrs()?.collect()))
}

/// Removes loopback addresses if others remain: they lead to another host's rank 0 only on that host.
fn beyond_loopback(info: &LaunchInfo, mut addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let is_local = |address: &SocketAddr| address.ip().to_canonical().is_loopback();
    if info.spans_hosts() && !addresses.iter().all(is_local) {
        addresses.retain(|address| !is_local(address));
    }
    addresses
}

/// The accepting side of the server.
struct Door {
    hub: Arc<ControlHub>,
    /// Connections that have not proved that they are of this job, oldest first.
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

    /// Ends that a connection is a stranger's, and returns whether it was not dropped before.
    fn forget(&self, id: u64) -> bool {
        let mut strangers = self.strangers.lock();
        let before = strangers.len();
        strangers.retain(|(other, _)| *other != id);
        strangers.len() < before
    }

    fn greet(&self, id: u64, stream: TcpStream) {
        let guest = Guest::receive(
            self.hub.key(),
            &mut DeadlineStream { stream: &stream, deadline: within(GREETING) },
        );
        // Dropped for others, the connection is closed, and a process of this job tries again. Its rank would be
        // lost if it were let in.
        let is_open = self.forget(id);
        // If a refusal does not arrive, the other side tries again. If a welcome does not, it is lost.
        if let (Ok(guest), true) = (guest, is_open) {
            let _ = stream.set_write_timeout(Some(GREETING));
            let _ = self.hub.admit(&guest, stream);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::link::hello::Hello;

    fn info(rank: usize, local_size: usize) -> LaunchInfo {
        LaunchInfo {
            rank,
            world_size: 4,
            local_rank: 0,
            local_size,
            address: "head:29500".into(),
            job: String::new(),
            secret: Secret::Token("a token that others cannot guess".into()),
            share_gpus: false,
            has_mpi: false,
        }
    }

    #[test]
    fn a_process_is_not_let_in_on_a_connection_that_was_dropped_for_others() {
        let options = InitOptions::explicit("127.0.0.1:1", 0, 4);
        let key = JobKey::new(b"a token that others cannot guess", "");
        let hub = Arc::new(ControlHub::new(&info(0, 4), key.clone(), None, &options));
        let door = Arc::new(Door { hub, strangers: Mutex::default() });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        for is_dropped in [true, false] {
            let key = key.clone();
            let guest = thread::spawn(move || {
                let stream = TcpStream::connect(address).unwrap();
                let mut stream = DeadlineStream { stream: &stream, deadline: within(GREETING) };
                Hello { rank: 1, size: 4 }.greet(&key, &mut stream).is_ok()
            });
            let (stream, _) = listener.accept().unwrap();
            if !is_dropped {
                door.strangers.lock().push_back((7, stream.try_clone().unwrap()));
            }
            door.clone().greet(7, stream);
            assert_eq!(guest.join().unwrap(), !is_dropped);
        }
    }

    #[test]
    fn loopback_addresses_are_for_worlds_of_one_host() {
        let of = |list: &[&str]| {
            list.iter().map(|ip| format!("{ip}:29500").parse().unwrap()).collect::<Vec<SocketAddr>>()
        };
        let all = ["127.0.1.1", "10.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[fd00::1]"];
        for rank in [0, 1] {
            assert_eq!(beyond_loopback(&info(rank, 4), of(&all)), of(&all));
            assert_eq!(beyond_loopback(&info(rank, 2), of(&all)), of(&["10.0.0.1", "[fd00::1]"]));
        }
        // On the same host as rank 0, which also listens there.
        assert_eq!(beyond_loopback(&info(1, 2), of(&["127.0.1.1"])), of(&["127.0.1.1"]));
        // What is no address of this host is told so, and a job of one host is not open to others.
        let every = of(&["0.0.0.0", "[::]"]);
        for (own, local_size, listens) in [
            (&["127.0.1.1"][..], 2, &every),
            (&["127.0.1.1", "203.0.113.1"], 2, &every),
            (&["203.0.113.1"], 2, &of(&["203.0.113.1"])),
            (&["127.0.1.1"], 4, &of(&["127.0.1.1"])),
        ] {
            assert_eq!(&open(&info(0, local_size), of(own)).unwrap(), listens, "{own:?}");
        }
        let given = LaunchInfo { address: "127.0.0.1:29500".into(), ..info(0, 2) };
        assert_eq!(
            open(&given, of(&["127.0.0.1"])).unwrap(),
            of(&["127.0.0.1"]),
            "an address is what it says"
        );
        let open_to_all = LaunchInfo { secret: Secret::Absent, ..info(0, 2) };
        assert_eq!(open(&open_to_all, of(&["127.0.1.1", "10.0.0.1"])).unwrap(), of(&["10.0.0.1"]));
        let text = open(&open_to_all, of(&["127.0.1.1"])).unwrap_err().to_string();
        assert!(text.contains("as a loopback address only") && text.contains("CANDLE_DIST_TOKEN"), "{text}");
    }

    #[test]
    fn an_address_of_ipv6_keeps_its_scope() {
        let scoped: SocketAddr = "[fe80::1%3]:29500".parse().unwrap();
        assert_eq!(canonical(scoped), scoped);
        assert_eq!(canonical("[::ffff:10.0.0.1]:29500".parse().unwrap()), "10.0.0.1:29500".parse().unwrap());
    }

    #[test]
    fn all_addresses_of_a_name_are_bound_or_none() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let at = |ips: &[&str]| {
            ips.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), port)).collect::<Vec<_>>()
        };
        let has_6 = TcpListener::bind("[::1]:0").is_ok();
        // 203.0.113.0/24 is reserved for documentation.
        for (ips, bound) in [
            (&["127.0.0.1"][..], 1),
            (&["127.0.0.1", "127.0.0.2"], 2),
            (&["127.0.0.1", "::ffff:127.0.0.1"], 1),
            (&["203.0.113.1", "127.0.0.2"], 1),
            (&["0.0.0.0", "::"], 1 + usize::from(has_6)),
            (&["::", "0.0.0.0"], 1 + usize::from(has_6)),
        ] {
            assert_eq!(bind(at(ips)).unwrap().len(), bound, "{ips:?}");
        }
        for taken in ["127.0.0.1", "127.0.0.2"] {
            let _taken = TcpListener::bind(at(&[taken])[0]).unwrap();
            let error = bind(at(&["127.0.0.1", "127.0.0.2"])).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::AddrInUse, "{taken}");
        }
        for taken in ["127.0.0.1", "0.0.0.0", "::1", "::"].into_iter().take(if has_6 { 4 } else { 2 }) {
            let _taken = listener(at(&[taken])[0]).unwrap();
            let error = bind(at(&["0.0.0.0", "::"])).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::AddrInUse, "{taken}");
        }
        assert_eq!(bind(at(&["203.0.113.1"])).unwrap_err().kind(), ErrorKind::AddrNotAvailable);
        assert!(bind(Vec::new()).is_err());
    }
}
