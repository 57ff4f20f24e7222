//! Parsers for two Slurm variables: host lists and task counts.

/// Returns the first host of a list such as `gpu[01-04,7],login`.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    while let Some(next) = rest.chars().next() {
        match next {
            ',' => break,
            '[' => {
                let (inside, after) = rest[1..].split_once(']')?;
                let first = inside.split([',', '-']).next()?;
                if first.is_empty() || !first.chars().all(|c| c.is_ascii_digit()) {
                    return None;
                }
                host.push_str(first);
                rest = after;
            }
            ']' => return None,
            other => {
                host.push(other);
                rest = &rest[other.len_utf8()..];
            }
        }
    }
    (!host.is_empty()).then_some(host)
}

/// Returns the number of tasks on the `node`-th host of a list such as `2(x3),1`; a single number holds for every host.
pub(super) fn tasks_on_node(list: &str, node: usize) -> Option<usize> {
    if let Ok(every) = list.trim().parse() {
        return Some(every);
    }
    let mut before = 0usize;
    for part in list.trim().split(',') {
        let (tasks, hosts) = match part.split_once("(x") {
            Some((tasks, hosts)) => (tasks, hosts.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        let tasks: usize = tasks.parse().ok()?;
        before = before.checked_add(hosts)?;
        if node < before {
            return Some(tasks);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts() {
        let cases = [
            ("node1", Some("node1")),
            ("node1,node2", Some("node1")),
            ("node[1-3]", Some("node1")),
            ("gpu[007,010-012],login", Some("gpu007")),
            ("r[1-2]n[03-04]-ib,x", Some("r1n03-ib")),
            (" a.b.c ", Some("a.b.c")),
            ("[1-2]", Some("1")),
            ("", None),
            (",a", None),
            ("node[1-3", None),
            ("node]1", None),
            ("node[]", None),
            ("node[a-b]", None),
        ];
        for (list, host) in cases {
            assert_eq!(first_host(list).as_deref(), host, "{list:?}");
        }
    }

    #[test]
    fn tasks() {
        let cases = [
            ("4", 7, Some(4)),
            ("2(x3),1", 0, Some(2)),
            ("2(x3),1", 2, Some(2)),
            ("2(x3),1", 3, Some(1)),
            ("2(x3),1", 4, None),
            ("1,3", 1, Some(3)),
            ("4(x2)", 1, Some(4)),
            ("4(x2", 1, None),
            ("", 0, None),
            ("many", 0, None),
        ];
        for (list, node, tasks) in cases {
            assert_eq!(tasks_on_node(list, node), tasks, "{list:?} {node}");
        }
    }
}
