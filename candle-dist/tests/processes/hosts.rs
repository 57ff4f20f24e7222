//! Trains on two hosts (network namespaces of this machine) and cuts the link between them.
use crate::job::{Outcome, Rank, assert_fine, finish, start_by};
use crate::sum;
use candle_dist::{RankContext, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The host name of rank 0.
const HEAD: &str = "candle-head";

/// The scenario in which all ranks train until something fails.
pub(crate) const TRAINS: &str = "trains";
/// After how much silence a rank counts as lost.
pub(crate) const LOST_AFTER: Duration = Duration::from_secs(2);

/// The variable with the folder in which each rank creates a file once it trains.
const MARKS: &str = "MARKS";
/// Addresses that only the two hosts use.
const ADDRESSES: [&str; 2] = ["10.211.7.1", "10.211.7.2"];
const ADDRESSES_6: [&str; 2] = ["fd00:211:7::1", "fd00:211:7::2"];

/// Trains without end.
pub(crate) fn train(ctx: &RankContext) -> Result<()> {
    for step in 0u64.. {
        sum(ctx, 1000)?;
        if step == 20 {
            let marks = std::env::var(MARKS).unwrap();
            fs::write(Path::new(&marks).join(ctx.rank().to_string()), "").unwrap();
        }
    }
    Ok(())
}

/// Two network namespaces with a link.
struct Hosts {
    names: [String; 2],
    links: [String; 2],
}

impl Hosts {
    /// Returns `None` if this user may not create namespaces, and says so.
    fn or_skip() -> Option<Self> {
        Self::new()
            .map_err(|reason| test_utils::skip(&format!("two hosts need network namespaces, and {reason}")))
            .ok()
    }

    /// Returns the reason if this user may not create namespaces.
    fn new() -> std::result::Result<Self, String> {
        let id = std::process::id();
        let hosts = Self {
            names: ["a", "b"].map(|host| format!("candle-{host}-{id}")),
            links: ["a", "b"].map(|host| format!("c{host}{id}")),
        };
        let [a, b] = &hosts.names;
        let [la, lb] = &hosts.links;
        ip(&["netns", "add", a])?;
        ip(&["netns", "add", b])?;
        ip(&["link", "add", la, "netns", a, "type", "veth", "peer", "name", lb, "netns", b])?;
        for ((name, link), address) in hosts.names.iter().zip(&hosts.links).zip(ADDRESSES) {
            ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", link])?;
            ip(&["-n", name, "link", "set", link, "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(hosts)
    }

    fn cut(&self) {
        ip(&["-n", &self.names[0], "link", "set", &self.links[0], "down"]).unwrap();
    }
}

impl Hosts {
    /// Writes the addresses of [`HEAD`] for each host.
    fn name(&self, of: [&[&str]; 2]) {
        for (name, addresses) in self.names.iter().zip(of) {
            let folder = Path::new("/etc/netns").join(name);
            fs::create_dir_all(&folder).unwrap();
            let lines = addresses.iter().map(|address| format!("{address} {HEAD}\n")).collect::<String>();
            fs::write(folder.join("hosts"), format!("127.0.0.1 localhost\n{lines}")).unwrap();
        }
    }

    /// Starts four ranks, two per host.
    fn start(&self, scenario: &str, master: &str, more: &[(&'static str, String)]) -> Vec<Rank> {
        self.start_first(4, scenario, master, more)
    }

    /// Starts the first `count` of four ranks.
    fn start_first(
        &self,
        count: usize,
        scenario: &str,
        master: &str,
        more: &[(&'static str, String)],
    ) -> Vec<Rank> {
        let command = |rank: usize| {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &self.names[rank / 2]]).arg(std::env::current_exe().unwrap());
            command
        };
        let vars = |rank: usize| {
            let vars = [
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", "4".to_string()),
                ("LOCAL_RANK", (rank % 2).to_string()),
                ("LOCAL_WORLD_SIZE", "2".to_string()),
                ("MASTER_ADDR", master.to_string()),
                ("MASTER_PORT", "29500".to_string()),
                ("TORCHELASTIC_RUN_ID", "two-hosts".to_string()),
                ("CANDLE_DIST_TOKEN", "a token that others cannot guess".to_string()),
            ];
            vars.into_iter().chain(more.iter().cloned()).collect()
        };
        start_by(command, scenario, count, vars)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.names.iter().for_each(|name| _ = fs::remove_dir_all(Path::new("/etc/netns").join(name)));
        // Deleting fails if it was never created.
        self.names.iter().for_each(|name| _ = ip(&["netns", "del", name]));
    }
}

fn ip(args: &[&str]) -> std::result::Result<(), String> {
    let made = Command::new("ip").args(args).output().map_err(|error| format!("ip: {error}"))?;
    match made.status.success() {
        true => Ok(()),
        false => Err(format!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&made.stderr).trim())),
    }
}

/// Returns a new folder.
fn marks() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("two-hosts-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn a_cut_link_between_hosts_is_an_error_on_all_ranks() {
    let Some(hosts) = Hosts::or_skip() else { return };
    let marks = marks();
    let ranks = hosts.start(&format!("{TRAINS}/none"), ADDRESSES[0], &[(MARKS, marks.display().to_string())]);
    let began = Instant::now();
    let all_train = || (0..4).all(|rank| marks.join(rank.to_string()).exists());
    while !all_train() && began.elapsed() < Duration::from_secs(20) {
        sleep(Duration::from_millis(20));
    }
    let is_trained = all_train();
    hosts.cut();
    let outcomes = finish(ranks);
    assert!(is_trained, "all ranks train: {outcomes:#?}");
    fs::remove_dir_all(&marks).unwrap();
    for (rank, outcome) in outcomes.iter().enumerate() {
        let said = outcome.said.as_deref().unwrap_or_default();
        // The ranks on rank 0's host lose one of the other ranks; the others lose rank 0.
        let lost = if rank < 2 { ["rank 2 was lost", "rank 3 was lost"] } else { ["rank 0 was lost"; 2] };
        assert!(
            !outcome.is_success && lost.iter().any(|lost| said.contains(lost)),
            "rank {rank}: {outcomes:#?}"
        );
        assert!(said.contains("no heartbeat for 2s"), "rank {rank}: {outcomes:#?}");
        assert!(!said.contains(&format!("rank {rank}: no answer")), "rank {rank}: {outcomes:#?}");
        // On rank 0's host, the error has the reports of the ranks.
        assert!(rank >= 2 || said.matches("in all_reduce(f32[1000], sum) at").count() == 2, "{outcomes:#?}");
    }
}

#[test]
fn a_host_that_knows_its_own_name_as_a_loopback_address_is_found_by_the_others() {
    let Some(hosts) = Hosts::or_skip() else { return };
    // The others know another address of it.
    let second = "10.211.9.1";
    ip(&["-n", &hosts.names[0], "addr", "add", &format!("{second}/24"), "dev", &hosts.links[0]]).unwrap();
    ip(&["-n", &hosts.names[1], "route", "add", "10.211.9.0/24", "dev", &hosts.links[1]]).unwrap();
    hosts.name([&[ADDRESSES[0]], &[second]]);
    let outcomes = finish(hosts.start("fine/none", HEAD, &[("PATIENCE", "8".to_string())]));
    assert!(outcomes.iter().all(|outcome| outcome.is_success), "{outcomes:#?}");
    // As on Debian: with and without the true address as the second one. The other host knows the true one.
    for own in [&["127.0.1.1", ADDRESSES[0]][..], &[ADDRESSES[0], "127.0.1.1"], &["127.0.1.1"]] {
        hosts.name([own, &[ADDRESSES[0]]]);
        let outcomes = finish(hosts.start("fine/none", HEAD, &[]));
        println!("rank 0 knows its name as {own:?}");
        assert_fine(&outcomes);
    }
}

#[test]
fn hosts_of_ipv6_alone_find_a_host_that_knows_its_own_name_as_a_loopback_address() {
    let Some(hosts) = Hosts::or_skip() else { return };
    for (at, address) in ADDRESSES_6.into_iter().enumerate() {
        let (name, link) = (&hosts.names[at], &hosts.links[at]);
        ip(&["-n", name, "addr", "flush", "dev", link, "scope", "global"]).unwrap();
        ip(&["-n", name, "addr", "add", &format!("{address}/64"), "dev", link, "nodad"]).unwrap();
    }
    for own in [&["127.0.1.1"][..], &["::1"], &["::1", ADDRESSES_6[0]], &[ADDRESSES_6[0]]] {
        hosts.name([own, &[ADDRESSES_6[0]]]);
        let outcomes = finish(hosts.start("fine/none", HEAD, &[("PATIENCE", "8".to_string())]));
        println!("rank 0 knows its name as {own:?}");
        assert_fine(&outcomes);
    }
}

#[test]
fn a_name_that_rank_0_does_not_know_yet_is_waited_for() {
    let Some(hosts) = Hosts::or_skip() else { return };
    hosts.name([&[], &[ADDRESSES[0]]]);
    let ranks = hosts.start("fine/none", HEAD, &[("PATIENCE", "20".to_string())]);
    sleep(Duration::from_secs(2));
    hosts.name([&[ADDRESSES[0]], &[ADDRESSES[0]]]);
    let outcomes = finish(ranks);
    assert_fine(&outcomes);
}

#[test]
fn a_name_whose_first_address_is_taken_is_an_error_and_nobody_joins_the_other_job() {
    let Some(hosts) = Hosts::or_skip() else { return };
    let second = "10.211.7.3";
    ip(&["-n", &hosts.names[0], "addr", "add", &format!("{second}/24"), "dev", &hosts.links[0]]).unwrap();
    let patience = |seconds: u32| ("PATIENCE", seconds.to_string());
    for named in [&[ADDRESSES[0], second][..], &[second, ADDRESSES[0]]] {
        hosts.name([named, named]);
        // Another job, which waits for its ranks.
        let token = ("CANDLE_DIST_TOKEN", "another token that others cannot guess".to_string());
        let other = hosts.start_first(1, "fine/none", ADDRESSES[0], &[patience(8), token]);
        sleep(Duration::from_secs(1));
        let outcomes = finish(hosts.start("fine/none", HEAD, &[patience(3)]));
        let said = |outcome: &Outcome| outcome.said.clone().unwrap_or_default();
        assert!(
            said(&outcomes[0]).contains("port 29500 of candle-head is taken"),
            "{named:?}: {outcomes:#?}"
        );
        assert!(
            outcomes.iter().all(|outcome| said(outcome).starts_with("init: ")),
            "{named:?}: {outcomes:#?}"
        );
        // It waits no longer.
        drop(other);
    }
}
