//! Where the ranks run and how far they are in the start of MPI, for the error of a start that does not end.
use super::shared;
use crate::control::Control;
use crate::launch::host_name;
use crate::{Cause, Result};
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::time::Duration;

/// The most hosts that an error names.
const MOST_NAMED: usize = 8;

/// What to do when MPI does not connect the ranks.
const NETWORKS: &str = "MPI opens connections of its own, by every network of a \
    host and at any port. Name the network by which these hosts reach each other (Open MPI: mpirun --mca \
    btl_tcp_if_include 10.0.0.0/24 --mca oob_tcp_if_include 10.0.0.0/24; MPICH over UCX: UCX_NET_DEVICES=eth0), let its ports through \
    the firewall (Open MPI: btl_tcp_port_min_v4, btl_tcp_port_range_v4, oob_tcp_dynamic_ipv4_ports), or raise \
    InitOptions::init_timeout (--timeout) if the start only takes longer";

/// What to do when MPI does not let ranks share memory.
const MEMORY: &str = "See that /dev/shm has room, give mpi::Settings::most_sharing 1, or raise InitOptions::init_timeout (--timeout)";

/// The place of a rank, as it tells the others before MPI starts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RankHost {
    pub(super) host: String,
    /// The addresses of this rank and of rank 0 that reached each other.
    ends: [IpAddr; 2],
    /// The bytes that are free for shared memory, if there is a limit.
    pub(super) free: Option<u64>,
}

#[cfg(test)]
impl RankHost {
    /// A place on a host with so much room.
    pub(super) fn of(host: &str, free: Option<u64>) -> Self {
        Self { host: host.into(), ends: [[127, 0, 0, 1].into(); 2], free }
    }
}

/// How far a rank is in the start of MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Milestone {
    /// All ranks are about to start MPI.
    Begun = 1,
    /// MPI has started here.
    Started,
    /// MPI has connected all ranks.
    Connected,
    /// Ranks of a host share memory.
    Sharing,
}

impl Milestone {
    /// Tells the other ranks that this one is so far.
    pub(super) fn tell(self, control: &Control) -> Result<()> {
        control.set(&key("stage", control.rank()), &[self as u8])
    }
}

fn key(what: &str, rank: usize) -> String {
    format!("candle-dist/mpi/{what}/{rank}")
}

/// Tells the other ranks where this one runs, before MPI takes memory there.
pub(super) fn tell(control: &Control) -> Result<()> {
    let place = RankHost { host: host_name(), ends: control.ends(), free: shared::free() };
    // Names and addresses always have a text.
    control.set(&key("place", control.rank()), &serde_json::to_vec(&place).unwrap_or_default())
}

/// Returns the places of the ranks that have told them.
pub(super) fn all(control: &Control) -> Vec<(usize, RankHost)> {
    let place = |rank| Some((rank, serde_json::from_slice(&told(control, "place", rank)?).ok()?));
    (0..control.size()).filter_map(place).collect()
}

/// Returns what a rank has told. After an error the world has stopped, and has its cause.
fn told(control: &Control, what: &str, rank: usize) -> Option<Vec<u8>> {
    control.peek_at_start(&key(what, rank)).ok().flatten()
}

/// Returns the cause when MPI has not started on all ranks within `limit`. It names the ranks that are behind the others. If none is,
/// MPI does not say which of them do not reach each other.
pub(super) fn not_started(control: &Control, limit: Duration) -> Cause {
    let stages =
        (0..control.size()).map(|rank| told(control, "stage", rank).and_then(|told| told.first().copied()));
    let stages = stages.map(Option::unwrap_or_default).collect_vec();
    behind(control.rank(), &all(control), &stages, limit)
}

fn behind(rank: usize, places: &[(usize, RankHost)], stages: &[u8], limit: Duration) -> Cause {
    let furthest = stages.iter().copied().max().unwrap_or_default();
    let (missing, others): (Vec<_>, Vec<_>) = (0..stages.len()).partition(|rank| stages[*rank] < furthest);
    let is_connected = furthest >= Milestone::Connected as u8;
    let Some(first) = missing.first() else {
        let message = match is_connected {
            false => format!(
                "MPI did not connect the ranks within {limit:?}: {}. {NETWORKS}",
                shown(places, places)
            ),
            true => format!(
                "MPI connected the ranks, and did not let those of each host share memory within {limit:?}. {MEMORY}"
            ),
        };
        return Cause::Failed { rank, message };
    };
    let call = match furthest {
        furthest if furthest <= Milestone::Begun as u8 => "the agreement on the start of MPI",
        furthest if furthest == Milestone::Started as u8 => "the start of MPI (MPI_Init_thread)",
        furthest if furthest == Milestone::Connected as u8 => "MPI's first exchange (MPI_Comm_dup)",
        _ => "MPI's allocation of shared memory (MPI_Win_allocate_shared)",
    };
    let late = places.iter().filter(|(rank, _)| missing.contains(rank)).cloned().collect_vec();
    let (noun, advice) = (
        if others.len() == 1 { "rank has" } else { "ranks have" },
        if furthest > Milestone::Connected as u8 { MEMORY } else { NETWORKS },
    );
    let message = format!(
        "{} did not come back from {call} within {limit:?}, as {} other {noun}. See what holds {} up there. {advice}",
        shown(&late, places),
        others.len(),
        if missing.len() == 1 { "it" } else { "them" },
    );
    Cause::Failed { rank: *first, message }
}

/// Names ranks with their hosts and addresses. `all` are the places of all ranks.
fn shown(places: &[(usize, RankHost)], all: &[(usize, RankHost)]) -> String {
    // Rank 0 is at the address at which the other hosts reached it.
    let first = all.iter().map(|(_, place)| place.ends[1]).find(|address| !address.is_loopback());
    let address = |rank: usize, place: &RankHost| match place.ends[0] {
        own if rank > 0 && !own.is_loopback() => Some(own),
        _ => first.filter(|_| place.host == all[0].1.host),
    };
    let hosts = places.iter().into_group_map_by(|(_, place)| &place.host);
    let hosts = hosts.into_iter().sorted_by_key(|(_, ranks)| ranks.first().map(|(rank, _)| *rank));
    let of_host = |(host, ranks): (&String, Vec<&(usize, RankHost)>)| {
        let at = ranks.iter().find_map(|(rank, place)| address(*rank, place));
        let at = at.map_or(String::new(), |at| format!(" at {at}"));
        let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
        format!("{noun} {} on {host}{at}", ranks.iter().map(|(rank, _)| rank).format(", "))
    };
    let (count, named) = (hosts.len(), hosts.take(MOST_NAMED).map(of_host).join("; "));
    let more = count.saturating_sub(MOST_NAMED);
    let more = if more == 0 { String::new() } else { format!("; and {more} more hosts") };
    format!("{named}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_and_addresses_of_all_ranks_are_named() {
        let place = |rank: usize, host: &str, own: [u8; 4], first: [u8; 4]| {
            (rank, RankHost { host: host.into(), ends: [own.into(), first.into()], free: None })
        };
        let local = [127, 0, 0, 1];
        let places = [
            place(0, "head", local, local),
            place(1, "head", local, local),
            place(2, "node", [10, 0, 0, 2], [10, 0, 0, 1]),
        ];
        let said = |places: &[(usize, RankHost)], stages: &[Milestone]| {
            let stages = stages.iter().map(|stage| *stage as u8).collect_vec();
            let cause = behind(0, places, &stages, Duration::from_secs(60));
            (cause.culprit(), cause.to_string())
        };
        let (_, text) = said(&places, &[Milestone::Begun; 3]);
        assert!(
            text.contains("within 60s: ranks 0, 1 on head at 10.0.0.1; rank 2 on node at 10.0.0.2. MPI "),
            "{text}"
        );
        let (_, text) = said(&places[..2], &[Milestone::Started; 2]);
        assert!(text.contains("within 60s: ranks 0, 1 on head. MPI "), "{text}");
        // Those that are behind, whoever says it.
        for (stages, culprit, parts) in [
            (
                [Milestone::Started, Milestone::Begun, Milestone::Begun],
                1,
                [
                    "rank 1 on head at 10.0.0.1; rank 2 on node at 10.0.0.2 did not come",
                    "MPI_Init_thread",
                    "as 1 other rank has",
                ],
            ),
            (
                [Milestone::Connected, Milestone::Connected, Milestone::Started],
                2,
                [
                    "rank 2 on node at 10.0.0.2 did not come back",
                    "MPI_Comm_dup",
                    "within 60s, as 2 other ranks have",
                ],
            ),
            (
                [Milestone::Sharing, Milestone::Connected, Milestone::Sharing],
                1,
                ["rank 1 on head", "MPI_Win_allocate_shared", "/dev/shm"],
            ),
        ] {
            let (found, text) = said(&places, &stages);
            assert!(found == Some(culprit) && parts.iter().all(|part| text.contains(part)), "{text}");
        }
        let many =
            (0..20).map(|rank| place(rank, &format!("n{rank}"), [10, 0, 0, rank as u8], [10, 0, 0, 0]));
        let (_, text) = said(&many.collect_vec(), &[Milestone::Begun; 20]);
        assert!(text.contains("; rank 7 on n7 at 10.0.0.7; and 12 more hosts. MPI "), "{text}");
    }
}
