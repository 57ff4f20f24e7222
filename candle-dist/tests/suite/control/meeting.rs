//! Processes join a world, or all get the same error; values are passed on.
use super::*;
use std::net::TcpStream;
use std::thread;

#[test]
fn worlds_of_any_size_meet_and_share_values() {
    for size in [1, 2, 3, 5] {
        let got = world(size, |control| {
            let (rank, size) = (control.rank(), control.size());
            control.set(&format!("of {rank}"), &[rank as u8]).unwrap();
            (0..size).map(|other| control.get(&format!("of {other}")).unwrap()[0]).collect::<Vec<_>>()
        });
        assert_eq!(got, vec![(0..size as u8).collect::<Vec<_>>(); size]);
    }
}

#[test]
fn a_value_is_waited_for_and_may_be_large() {
    let value = vec![7u8; 16 << 20];
    let got = world(3, |control| {
        if control.rank() == 1 {
            thread::sleep(Duration::from_millis(200));
            control.set("key", &value).unwrap();
        }
        control.get("key").unwrap() == value
    });
    assert_eq!(got, [true; 3]);
}

#[test]
fn keys_and_values_have_bounds() {
    world(1, |control| {
        let errors = [
            control.set(&"k".repeat(4097), &[]),
            control.set("k", &vec![0; (16 << 20) + 1]),
            control.get(&"k".repeat(4097)).map(drop),
        ];
        for error in errors {
            let text = error.unwrap_err().to_string();
            assert!(text.starts_with("rank 0: store: a ") && text.contains("at most"), "{text}");
        }
        control.set("k", &[]).unwrap();
        assert!(control.get("k").unwrap().is_empty(), "the world goes on");
    });
}

#[test]
fn the_order_of_arrival_does_not_matter() {
    let address = free_address();
    let address = &address;
    thread::scope(|scope| {
        for (rank, late) in [(2, 0), (1, 100), (0, 300)] {
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(late));
                connect(&options(address, rank, 3)).unwrap()
            });
        }
    });
}

#[test]
fn ranks_that_do_not_come_are_named_to_all_that_did() {
    let address = free_address();
    let address = &address;
    let texts: Vec<String> = thread::scope(|scope| {
        let come = |rank| {
            scope.spawn(move || {
                let options = options(address, rank, 4).init_timeout(Duration::from_millis(600));
                connect(&options).unwrap_err().to_string()
            })
        };
        [come(0), come(1)].map(|thread| thread.join().unwrap()).to_vec()
    });
    let text = common(&texts);
    assert!(text.starts_with("init: ranks 2, 3 of 4 did not come within 600ms; "), "{text}");
}

/// Rank 0 has not told it yet, and stays for a moment.
#[test]
fn a_process_that_comes_after_a_start_that_failed_hears_why() {
    let start = |ranks: [(usize, u64, &str); 3], patience: Duration| {
        let address = &free_address();
        thread::scope(|scope| {
            let come = |(rank, late, argument): (usize, u64, &str)| {
                let limit = if rank == 2 { Duration::from_secs(5) } else { patience };
                let options = options(address, rank, 3).arguments(&[argument]).init_timeout(limit);
                scope.spawn(move || {
                    thread::sleep(Duration::from_millis(late));
                    connect(&options).unwrap_err().to_string()
                })
            };
            ranks.map(come).map(|thread| thread.join().unwrap())
        })
    };
    // On a busy machine the last one may come when rank 0 has gone.
    let told = |ranks: [(usize, u64, &str); 3], patience: Duration| {
        let heard =
            (0..5).map(|_| start(ranks, patience)).find(|heard| !heard[2].contains("could not reach rank 0"));
        common(&heard.expect("rank 0 has told it in one of five starts"))
    };
    let text = told([(0, 0, "--seed=1"), (1, 0, "--seed=2"), (2, 300, "--seed=1")], Duration::from_secs(30));
    assert!(text.contains("--seed=1"), "{text}");
    let text = told([(0, 0, "a"), (1, 0, "a"), (2, 900, "a")], Duration::from_millis(600));
    assert!(text.starts_with("init: rank 2 of 3 did not come within 600ms; "), "{text}");
}

#[test]
fn an_address_where_nobody_listens_is_named() {
    let address = free_address();
    let options = options(&address, 1, 2).init_timeout(Duration::from_millis(300));
    let text = connect(&options).unwrap_err().to_string();
    assert!(
        text.contains(&format!("rank 1 of 2 could not reach rank 0 at {address} within 300ms")),
        "{text}"
    );
}

#[test]
fn a_taken_port_and_a_foreign_program_are_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let text = connect(&options(&address.to_string(), 0, 2)).unwrap_err().to_string();
    assert!(text.contains(&format!("port {} of 127.0.0.1 is taken", address.port())), "{text}");

    let server = thread::spawn(move || {
        let (mut stream, _): (TcpStream, _) = taken.accept().unwrap();
        std::io::Write::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        stream
    });
    let text = connect(&options(&address.to_string(), 1, 2)).unwrap_err().to_string();
    assert!(text.contains(&format!("another program answers at {address}")), "{text}");
    drop(server.join().unwrap());
}

#[test]
fn rank_0_listens_at_its_own_addresses_only() {
    // 203.0.113.0/24 is reserved for documentation.
    let options = options("203.0.113.1:29500", 0, 2).local(0, 1);
    let text = connect(&options).unwrap_err().to_string();
    assert!(
        text.contains("rank 0 cannot listen at 203.0.113.1, which is not an address of its host"),
        "{text}"
    );
}

#[test]
fn worlds_may_follow_each_other_at_one_address() {
    let address = free_address();
    let address = &address;
    thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || {
                for world in 0..5u8 {
                    let control = connect(&options(address, rank, 3)).unwrap();
                    control.set(&format!("of {rank}"), &[world]).unwrap();
                    // Rank 2 leaves first, and connects again while the others are still in the first world.
                    for other in 0..3 - rank {
                        assert_eq!(control.get(&format!("of {other}")).unwrap(), [world]);
                    }
                }
            });
        }
    });
}

#[test]
fn limits_of_any_length_are_limits() {
    let forever = |options: InitOptions| {
        options.timeout(Duration::MAX).init_timeout(Duration::MAX).lost_after(Duration::MAX)
    };
    world_with(2, forever, |control| {
        control.set("key", &[]).unwrap();
        assert!(control.get("key").unwrap().is_empty());
    });
    let options = options(&free_address(), 1, 2).init_timeout(Duration::ZERO);
    assert!(connect(&options).is_err());
}

/// As those of several agents of torchrun, or of several steps of Slurm.
#[test]
fn a_token_is_enough_for_ranks_with_unlike_names_of_the_job() {
    let address = free_address();
    let address = &address;
    thread::scope(|scope| {
        let come = |rank: usize| {
            scope.spawn(move || {
                let options = options(address, rank, 2);
                let info =
                    LaunchInfo { job: format!("job.{rank}"), ..LaunchInfo::from_env(&options).unwrap() };
                Control::connect(&info, &options).map(drop)
            })
        };
        for rank in [0, 1].map(come) {
            rank.join().unwrap().unwrap();
        }
    });
}
