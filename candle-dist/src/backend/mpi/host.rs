//! The room in the shared memory of each host: for letters, and for what MPI takes itself.
use super::native::avoid_shared_memory;
use super::place::RankHost;
use super::shared::bytes;
use crate::{Error, Result};
use itertools::Itertools;
use serde::{Deserialize, Serialize};

/// What MPI may take for each rank of a host that has several: Open MPI has segments of 4 MiB and some bytes, and UCX about 4.1 MiB.
/// It takes them as it needs them, and a process that finds no page any more ends by a signal.
const OF_MPI: u64 = 17 << 18;

/// A host whose shared memory has too little room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Shortage {
    host: String,
    /// The first of its ranks, and their number.
    first: usize,
    ranks: usize,
    free: u64,
    needed: u64,
}

/// Returns the hosts that have too little room. The ranks of a host share letters in parts of up to `most_sharing`.
pub(super) fn shortages(places: &[(usize, RankHost)], most_sharing: usize) -> Result<Vec<u8>> {
    serde_json::to_vec(&found(places, most_sharing)).map_err(unreadable)
}

fn found(places: &[(usize, RankHost)], most_sharing: usize) -> Vec<Shortage> {
    let hosts = places.iter().into_group_map_by(|(_, place)| &place.host);
    let shortage = |(host, ranks): (&String, Vec<&(usize, RankHost)>)| {
        // Where no rank sees a limit, there is none.
        let free = ranks.iter().filter_map(|(_, place)| place.free).min()?;
        let of_mpi = if ranks.len() > 1 { OF_MPI * ranks.len() as u64 } else { 0 };
        let needed = of_mpi + bytes(ranks.len(), most_sharing);
        let first = ranks.first()?.0;
        (needed > free).then(|| Shortage { host: host.clone(), first, ranks: ranks.len(), free, needed })
    };
    hosts.into_iter().filter_map(shortage).sorted_by_key(|shortage| shortage.first).collect()
}

impl Shortage {
    /// Returns that of a host, by what rank 0 has found.
    pub(super) fn on(host: &str, found: &[u8]) -> Result<Option<Self>> {
        let found: Vec<Self> = serde_json::from_slice(found).map_err(unreadable)?;
        Ok(found.into_iter().find(|shortage| shortage.host == host))
    }

    /// Keeps MPI from shared memory, before it starts. The first rank of the host says so.
    pub(super) fn avoid(&self, rank: usize) {
        let Self { first, ranks, free, needed, .. } = self;
        let then = match avoid_shared_memory() {
            true => "so messages go another way; give it more (docker run --shm-size) to make them faster",
            false => {
                "so small messages go another way, and MPI may end for want of it; give it more (docker run --shm-size)"
            }
        };
        if rank == *first {
            let (free, needed) = (free >> 10, needed >> 10);
            eprintln!(
                "note: shared memory on this host (/dev/shm) has {free} KiB left, and MPI and small messages of {ranks} ranks want \
                 {needed} KiB, {then}"
            );
        }
    }
}

fn unreadable(error: serde_json::Error) -> Error {
    Error::Unsupported(format!(
        "the room in shared memory cannot be read ({error}); run the same build on all hosts"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn places(hosts: &[(&str, Option<u64>)]) -> Vec<(usize, RankHost)> {
        hosts.iter().enumerate().map(|(rank, (host, free))| (rank, RankHost::of(host, *free))).collect()
    }

    #[test]
    fn a_host_needs_room_for_letters_and_for_what_mpi_takes() {
        let short = |places: &[(usize, RankHost)]| {
            found(places, 16).iter().map(|short| (short.first, short.ranks, short.free / MIB)).collect_vec()
        };
        // The 64 MiB of a container suffice for 12 ranks, and 5 MiB for none but one.
        assert_eq!(short(&places(&[("a", Some(64 * MIB)); 12])), []);
        assert_eq!(short(&places(&[("a", Some(64 * MIB)); 13])), [(0, 13, 64)]);
        assert_eq!(short(&places(&[("a", Some(5 * MIB)), ("b", Some(5 * MIB))])), []);
        // The least that a rank sees counts, and each host by itself.
        let (some, none) = (Some(64 * MIB), None);
        let mixed =
            [("a", none), ("b", some), ("a", none), ("b", Some(8 * MIB)), ("c", Some(0)), ("c", none)];
        assert_eq!(short(&places(&mixed)), [(1, 2, 8), (4, 2, 0)]);
    }

    #[test]
    fn letters_need_room_for_each_pair_that_shares() {
        let mib = |ranks, most| bytes(ranks, most) as f64 / MIB as f64;
        assert!(
            (mib(16, 16) - 16.0).abs() < 0.1
                && (mib(32, 16) - 32.0).abs() < 0.2
                && (mib(4, 2) - 0.5).abs() < 0.1
        );
        assert_eq!([bytes(8, 1), bytes(1, 16), bytes(0, 16)], [0; 3]);
        assert_eq!(bytes(17, 16), bytes(16, 16), "the last one shares with nobody");
    }
}
