//! How many of the cores of a host are those of one of its processes.
use std::fs;
use std::path::Path;

/// Returns the cores of one of `ranks` processes of a host, at least one; `None` if the system does not tell which it may use.
pub(super) fn of_process(ranks: usize) -> Option<usize> {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let allowed = allowed()?;
    let cores = share(allowed, online()?.max(1), ranks);
    // A limit of time, which all processes of a container have together.
    Some(if usable < allowed { cores.min(usable / ranks.max(1)).max(1) } else { cores })
}

/// Returns the cores of one of `ranks` processes that may use `allowed` of `online` cores.
///
/// A launcher that binds processes to cores (`mpirun --bind-to core`) has divided these already, and one that binds them to sockets has
/// divided them in part: then several processes have the same ones.
fn share(allowed: usize, online: usize, ranks: usize) -> usize {
    let even = |cores: usize| cores.checked_div(ranks).unwrap_or(cores).max(1);
    if allowed < online { allowed.max(1).min(even(online)) } else { even(allowed) }
}

/// Returns the number of cores that the threads of this process may run on.
fn allowed() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    count(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?)
}

/// Returns the number of cores that processes of this host may be bound to: those of the container, if that has only some.
fn online() -> Option<usize> {
    let host = count(&fs::read_to_string("/sys/devices/system/cpu/online").ok()?)?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(of_container(&groups, Path::new("/sys/fs/cgroup")).map_or(host, |cores| cores.min(host)))
}

/// Returns the number of cores of the control group that `/proc/self/cgroup` names, or of the nearest one around it that says so.
fn of_container(groups: &str, root: &Path) -> Option<usize> {
    let of_line = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (kind, path) = (fields.next()?, fields.next()?);
        let (root, file) = match kind {
            "" => (root.to_owned(), "cpuset.cpus.effective"),
            kinds if kinds.split(',').any(|kind| kind == "cpuset") => {
                (root.join("cpuset"), "cpuset.effective_cpus")
            }
            _ => return None,
        };
        let inside = Path::new(path.trim_start_matches('/'));
        inside.ancestors().find_map(|group| count(&fs::read_to_string(root.join(group).join(file)).ok()?))
    };
    groups.lines().find_map(of_line)
}

/// Returns how many numbers a list such as `0-3,8` has; `None` if it is no such list, or has none.
fn count(list: &str) -> Option<usize> {
    let mut all = 0usize;
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let [first, last] = [first, last].map(|number| number.trim().parse::<usize>().ok());
        all = last?.checked_sub(first?)?.checked_add(1)?.checked_add(all)?;
    }
    Some(all)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{count, of_container, share};
    use std::fs;

    #[test]
    fn what_a_launcher_has_divided_is_not_divided_again() {
        for (what, allowed, online, ranks, want) in [
            ("no binding", 8, 8, 4, 2),
            ("no binding, and more ranks than cores", 2, 2, 4, 1),
            ("mpirun --bind-to core", 1, 8, 4, 1),
            ("mpirun --bind-to core, two ranks", 1, 2, 2, 1),
            ("mpirun --map-by slot:PE=2", 2, 8, 4, 2),
            ("both threads of two cores", 4, 16, 4, 4),
            ("one rank, taskset -c 0-2", 3, 8, 1, 3),
            ("two sockets with two ranks each", 4, 8, 4, 2),
            ("sockets of unlike sizes", 6, 8, 2, 4),
            ("a number that no launcher gives", 3, 8, 0, 3),
        ] {
            assert_eq!(share(allowed, online, ranks), want, "{what}");
        }
    }

    #[test]
    fn lists_of_cores_are_counted() {
        for (list, want) in [
            ("0-3,8,10-11\n", Some(7)),
            ("\t5", Some(1)),
            ("0-0", Some(1)),
            ("", None),
            ("3-1", None),
            ("a-b", None),
            ("0-18446744073709551615", None),
        ] {
            assert_eq!(count(list), want, "{list:?}");
        }
    }

    #[test]
    fn a_container_has_the_cores_of_the_nearest_group_that_says_so() {
        let root = std::env::temp_dir().join(format!("candle-dist-cores-{}", std::process::id()));
        fs::create_dir_all(root.join("job/step")).unwrap();
        fs::create_dir_all(root.join("cpuset/old")).unwrap();
        fs::write(root.join("cpuset.cpus.effective"), "0-63\n").unwrap();
        fs::write(root.join("job/cpuset.cpus.effective"), "4-7\n").unwrap();
        fs::write(root.join("cpuset/old/cpuset.effective_cpus"), "0,2,4\n").unwrap();
        for (groups, want) in [
            ("0::/job/step\n", Some(4)),
            ("0::/elsewhere\n", Some(64)),
            ("9:cpu,cpuset:/old/inner\n0::/\n", Some(3)),
            ("8:memory:/job\n", None),
            ("", None),
        ] {
            assert_eq!(of_container(groups, &root), want, "{groups:?}");
        }
        fs::remove_dir_all(root).unwrap();
    }
}
