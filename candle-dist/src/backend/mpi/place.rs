//! Where the ranks run, for the error of a start in which MPI does not connect them.
use crate::control::Control;
use crate::launch::host_name;
use crate::{Cause, Result};
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::time::Duration;

/// The most hosts that an error names.
const MOST_NAMED: usize = 8;

/// The place of a rank, as it tells the others before MPI starts.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Place {
    host: String,
    /// The addresses of this rank and of rank 0 that reached each other.
    ends: [IpAddr; 2],
}

fn key(rank: usize) -> String {
    format!("candle-dist/mpi/place/{rank}")
}

/// Tells the other ranks where this one runs.
pub(super) fn tell(control: &Control) -> Result<()> {
    let place = Place { host: host_name(), ends: control.ends() };
    // Names and addresses always have a text.
    control.set(&key(control.rank()), &serde_json::to_vec(&place).unwrap_or_default())
}

/// Returns the cause when MPI has not connected the ranks within `limit`, or has connected them and goes no further. MPI does not
/// say which of them do not reach each other.
pub(super) fn not_started(control: &Control, limit: Duration, is_connected: bool) -> Cause {
    // After an error the world has stopped, and has its cause.
    let told = (0..control.size()).map_while(|rank| control.get_within(&key(rank), Duration::ZERO).ok());
    let place = |(rank, told): (usize, Option<Vec<u8>>)| Some((rank, serde_json::from_slice(&told?).ok()?));
    let places = told.enumerate().filter_map(place).collect_vec();
    let message = match is_connected {
        false => text(&places, limit),
        true => format!(
            "MPI connected the ranks, and did not let those of each host share memory within {limit:?}; see that /dev/shm has \
             room, give mpi::Settings::most_sharing 1, or raise InitOptions::init_timeout (--timeout)"
        ),
    };
    Cause::Failed { rank: control.rank(), message }
}

fn text(places: &[(usize, Place)], limit: Duration) -> String {
    // Rank 0 is at the address at which the other hosts reached it.
    let first = places.iter().map(|(_, place)| place.ends[1]).find(|address| !address.is_loopback());
    let address = |rank: usize, place: &Place| match place.ends[0] {
        own if rank > 0 && !own.is_loopback() => Some(own),
        _ => first.filter(|_| place.host == places[0].1.host),
    };
    let hosts = places.iter().into_group_map_by(|(_, place)| &place.host);
    let hosts = hosts.into_iter().sorted_by_key(|(_, ranks)| ranks.first().map(|(rank, _)| *rank));
    let shown = |(host, ranks): (&String, Vec<&(usize, Place)>)| {
        let at = ranks.iter().find_map(|(rank, place)| address(*rank, place));
        let at = at.map_or(String::new(), |at| format!(" at {at}"));
        let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
        format!("{noun} {} on {host}{at}", ranks.iter().map(|(rank, _)| rank).format(", "))
    };
    let (count, named) = (hosts.len(), hosts.take(MOST_NAMED).map(shown).join("; "));
    let more = count.saturating_sub(MOST_NAMED);
    let more = if more == 0 { String::new() } else { format!("; and {more} more hosts") };
    format!(
        "MPI did not connect the ranks within {limit:?}: {named}{more}. MPI opens connections of its own, by every network of a \
         host and at any port. Name the network by which these hosts reach each other (Open MPI: mpirun --mca \
         btl_tcp_if_include 10.0.0.0/24 --mca oob_tcp_if_include 10.0.0.0/24; MPICH over UCX: UCX_NET_DEVICES=eth0), let its ports through \
         the firewall (Open MPI: btl_tcp_port_min_v4, btl_tcp_port_range_v4, oob_tcp_dynamic_ipv4_ports), or raise \
         InitOptions::init_timeout (--timeout) if the start only takes longer"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_and_addresses_of_all_ranks_are_named() {
        let place = |rank: usize, host: &str, own: [u8; 4], first: [u8; 4]| {
            (rank, Place { host: host.into(), ends: [own.into(), first.into()] })
        };
        let local = [127, 0, 0, 1];
        let places = [
            place(0, "head", local, local),
            place(1, "head", local, local),
            place(2, "node", [10, 0, 0, 2], [10, 0, 0, 1]),
        ];
        let said = text(&places, Duration::from_secs(60));
        assert!(
            said.contains("within 60s: ranks 0, 1 on head at 10.0.0.1; rank 2 on node at 10.0.0.2. MPI "),
            "{said}"
        );
        let said = text(&places[..2], Duration::from_secs(60));
        assert!(said.contains("within 60s: ranks 0, 1 on head. MPI "), "{said}");
        let many = (0..20).map(|rank| place(rank, &format!("n{rank}"), [10, 0, 0, rank as u8], [10, 0, 0, 0]));
        let said = text(&many.collect_vec(), Duration::from_secs(60));
        assert!(said.contains("; rank 7 on n7 at 10.0.0.7; and 12 more hosts. MPI "), "{said}");
    }
}
