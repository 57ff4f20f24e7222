//! Processes that are not of the job, hosts that stall, and texts that steer a terminal.
use super::strangers::{VERSION, greet, hello, proof};
use super::*;
use candle_dist::Cause;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::Instant;
use test_utils::Attacks;

/// Fails unless `held`.
fn check(held: bool, what: impl std::fmt::Debug) -> Result<(), String> {
    if held { Ok(()) } else { Err(format!("{what:?}")) }
}

type Result<T, E = String> = std::result::Result<T, E>;

#[test]
fn nobody_joins_without_the_secret() {
    let mut attacks = Attacks::new("the door");
    let address = &free_address();
    thread::scope(|scope| {
        let first = scope.spawn(|| connect(&options(address, 0, 2)).unwrap());
        while TcpStream::connect(address).is_err() {
            thread::yield_now();
        }
        let me = hello(VERSION, 1, 2);
        for token in ["", "0", "a token of another job, as long", &TOKEN[1..]] {
            attacks.attack(format!("the token {token:?}"), || {
                let (_, answer) = greet(address, &me, token);
                check(answer[8] == 4 && answer.len() == 11, answer)
            });
        }
        attacks.attack("the proof of rank 0's role", || {
            let answer = conversation(address, &me, |challenge| proof(TOKEN, "host", &[&me, challenge]));
            check(answer[8] == 4, answer)
        });
        attacks.attack("the proof of another rank", || {
            let other = hello(VERSION, 0, 2);
            let answer = conversation(address, &me, |challenge| proof(TOKEN, "guest", &[&other, challenge]));
            check(answer[8] == 4, answer)
        });
        attacks.attack("a proof that was right once", || {
            let mut heard = None;
            let mut answers = Vec::new();
            for _ in 0..2 {
                // The first conversation breaks off, so that the seat stays free.
                let answer = conversation(address, &hello(VERSION, 5, 2), |challenge| {
                    heard
                        .get_or_insert_with(|| proof(TOKEN, "guest", &[&hello(VERSION, 5, 2), challenge]))
                        .clone()
                });
                answers.push(answer[8]);
            }
            check(answers == [2, 4], answers)
        });
        attacks.attack("no proof", || {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(&me).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let mut all = Vec::new();
            stream.read_to_end(&mut all).map_err(|error| error.to_string())?;
            check(all.len() == 43, all)
        });
        let second = connect(&options(address, 1, 2)).unwrap();
        second.set("key", b"value").unwrap();
        let first = first.join().unwrap();
        attacks.attack("the world is as ever", || {
            check(first.get("key").is_ok_and(|value| value == b"value"), ())
        });
        drop(second);
        drop(first);
    });
    attacks.assert();
}

/// Greets rank 0, answers its challenge with a proof, and returns the frame that follows.
fn conversation(address: &str, hello: &[u8], proof: impl FnOnce(&[u8]) -> Vec<u8>) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(hello).unwrap();
    let mut challenge = [0; 43];
    stream.read_exact(&mut challenge).unwrap();
    stream.write_all(&proof(&challenge[11..])).unwrap();
    let mut answer = vec![0; 11];
    stream.read_exact(&mut answer).unwrap();
    answer
}

/// What a host that is not rank 0, or not in order, does with a process that greets it.
type Host = fn(&mut TcpStream);

/// Reads a greeting, challenges, and proves that it knows the token, with a code and a text.
fn answer_with(stream: &mut TcpStream, token: &str, code: u8, text: &[u8]) {
    let (mut hello, mut guest) = ([0; 50], [0; 32]);
    stream.read_exact(&mut hello).unwrap();
    let challenge = [9; 32];
    stream.write_all(&[b"\xc4ndlDist\x03\x20\x00", &challenge[..]].concat()).unwrap();
    stream.read_exact(&mut guest).unwrap();
    let len = (text.len() as u16).to_le_bytes();
    let frame = [&b"\xc4ndlDist"[..], &[code], &len, text].concat();
    let mine = proof(token, "host", &[&hello, &challenge, &guest, &frame]);
    let _ = stream.write_all(&[frame, mine].concat());
}

/// Sends heartbeats until the other side ends.
fn beat(stream: &mut TcpStream) {
    while stream.write_all(&[0; 8]).is_ok() {
        thread::sleep(Duration::from_millis(100));
    }
}

/// The terms of a world, as rank 0 welcomes a process on them.
const TERMS: &[u8] = br#"{"debug":false,"lost_after":{"secs":10,"nanos":0},"switches":[false,false]}"#;

/// Joins a world at a host that does `host` with each process, and returns the error and the seconds that it took.
fn joins(host: Host) -> (String, f64) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let hosts = thread::spawn(move || {
        let mut served = Vec::new();
        while let Ok((mut stream, from)) = listener.accept() {
            if stream.peek(&mut [0]).is_ok_and(|len| len == 0) || from.ip() != address.ip() {
                break;
            }
            served.push(thread::spawn(move || host(&mut stream)));
        }
    });
    let began = Instant::now();
    let options = options(&address.to_string(), 1, 2).init_timeout(Duration::from_secs(1));
    let text = connect(&options).unwrap_err().to_string();
    let seconds = began.elapsed().as_secs_f64();
    // A connection without a byte ends the host.
    drop(TcpStream::connect(address));
    hosts.join().unwrap();
    (text, seconds)
}

#[test]
fn a_host_that_stalls_or_lies_is_an_error_in_time() {
    let mut attacks = Attacks::new("hosts");
    let cases: [(&str, Host, &[&str]); 10] = [
        (
            "welcomes and never starts",
            |it| {
                answer_with(it, TOKEN, 0, TERMS);
                beat(it);
            },
            &["rank 0 has let rank 1 of 2 in"],
        ),
        (
            "welcomes on terms that cannot be read",
            |it| answer_with(it, TOKEN, 0, b"{\"debug\":\"maybe\"}"),
            &["the welcome of rank 0 cannot be read", "the same build"],
        ),
        ("is silent", |it| drop(it.read_to_end(&mut Vec::new())), &["within 1s", "timed out"]),
        (
            "challenges and is silent",
            |it| {
                it.write_all(&[b"\xc4ndlDist\x03\x20\x00", &[9; 32][..]].concat()).unwrap();
                drop(it.read_to_end(&mut Vec::new()));
            },
            &["within 1s", "timed out"],
        ),
        (
            "has another token",
            |it| answer_with(it, "a token of another job, as long", 0, b""),
            &["another secret"],
        ),
        (
            "sends the proof back",
            |it| {
                let mut hello = [0; 50];
                let mut guest = [0; 32];
                it.read_exact(&mut hello).unwrap();
                it.write_all(&[b"\xc4ndlDist\x03\x20\x00", &[9; 32][..]].concat()).unwrap();
                it.read_exact(&mut guest).unwrap();
                let _ = it.write_all(&[&b"\xc4ndlDist\x00\x00\x00"[..], &guest].concat());
            },
            &["another secret"],
        ),
        (
            "welcomes before any proof",
            |it| {
                let _ = it.write_all(b"\xc4ndlDist\x00\x00\x00");
                drop(it.read_to_end(&mut Vec::new()));
            },
            &["another program answers"],
        ),
        (
            "refuses with escapes",
            |it| {
                let _ = it.write_all(b"\xc4ndlDist\x02\x05\x00\x1b[2Jx");
                drop(it.read_to_end(&mut Vec::new()));
            },
            &["refuses this process: \\u{1b}[2Jx"],
        ),
        (
            "refuses with escapes and a proof",
            |it| answer_with(it, TOKEN, 2, b"\x1b]0;x\x07"),
            &["\\u{1b}]0;x\\u{7}"],
        ),
        ("ends the connection", |_| (), &["within 1s"]),
    ];
    // All at once: both sides wait for most of the time.
    thread::scope(|scope| {
        let joined = cases.map(|(name, host, expected)| (name, expected, scope.spawn(move || joins(host))));
        for (name, expected, joined) in joined {
            attacks.attack(format!("a host that {name}"), || {
                let (text, seconds) = joined.join().unwrap();
                let is_clean = !text.contains('\u{1b}') && !text.contains("temporarily unavailable");
                check(
                    is_clean && seconds < 20.0 && expected.iter().all(|part| text.contains(part)),
                    (text, seconds),
                )
            });
        }
    });
    attacks.assert();
}

#[test]
fn texts_of_other_ranks_cannot_steer_a_terminal() {
    let mut attacks = Attacks::new("texts of ranks");
    let evil = "\u{1b}[2J\u{9b}31m\r\u{7}rank 0 is fine\u{202e}";
    let text = || evil.to_string();
    let fails = [
        ("fails", Cause::Failed { rank: 1, message: text() }),
        ("panics", Cause::Panicked { rank: 1, message: text() }),
        ("is lost", Cause::Lost { rank: 1, how: text() }),
    ];
    for (name, cause) in fails {
        attacks.attack(format!("a rank that {name}"), || {
            let texts = world(2, |control| {
                if control.rank() == 1 {
                    drop(control.fail(cause.clone()));
                }
                heard(&control)
            });
            check(
                texts
                    .iter()
                    .all(|text| !text.chars().any(|c| c.is_control() && c != '\n') && text.contains("u{1b}")),
                texts,
            )
        });
    }
    attacks.attack("a key", || {
        let texts = world(2, |control| {
            let options = Duration::from_millis(200);
            if control.rank() == 1 {
                drop(control.get_within(evil, options));
                drop(control.fail(Cause::Deadlock));
            }
            heard(&control)
        });
        check(texts.iter().all(|text| !text.contains('\u{1b}')), texts)
    });
    attacks.assert();
}

#[test]
fn ranks_with_unlike_arguments_do_not_start() {
    let mut attacks = Attacks::new("arguments");
    let start = |of: fn(usize) -> Vec<&'static str>| -> Vec<String> {
        let address = &free_address();
        thread::scope(|scope| {
            let come = |rank| {
                scope.spawn(move || match connect(&options(address, rank, 3).arguments(&of(rank))) {
                    Ok(_) => "fine".to_string(),
                    Err(error) => error.to_string(),
                })
            };
            let threads = [0, 1, 2].map(come);
            threads.map(|thread| thread.join().unwrap()).to_vec()
        })
    };
    attacks.attack("another value", || {
        let texts = start(|rank| vec!["train", "--seed", if rank == 1 { "2" } else { "1" }]);
        let expected = "than rank 0: rank 0 has \"--seed\" \"1\", and rank 1 has another one; ";
        // Rank 2 may come when rank 0 has left.
        check(texts[..2].iter().all(|text| text.contains(expected)) && texts[2] != "fine", texts)
    });
    attacks.attack("one more", || {
        let texts = start(|rank| if rank == 0 { vec!["--x"] } else { vec![] });
        check(texts.iter().all(|text| text != "fine"), texts)
    });
    attacks.attack("escapes", || {
        let texts = start(|rank| if rank == 2 { vec!["\u{1b}[2J"] } else { vec![] });
        check(texts.iter().all(|text| text != "fine" && !text.contains('\u{1b}')), texts)
    });
    attacks.attack("the same ones", || {
        let texts = start(|_| vec!["--seed", "1"]);
        check(texts.iter().all(|text| text == "fine"), texts)
    });
    attacks.assert();
}

#[test]
fn a_name_with_two_addresses_is_one_place() {
    let addresses: Vec<SocketAddr> = "localhost:0".to_socket_addrs().unwrap().collect();
    if addresses.len() < 2 || addresses.iter().any(|address| TcpListener::bind(address).is_err()) {
        return test_utils::skip(&format!("localhost has one address here: {addresses:?}"));
    }
    let mut attacks = Attacks::new("names");
    for address in &addresses {
        attacks.attack(format!("another program at {}", address.ip()), || {
            let taken = TcpListener::bind(address).unwrap();
            let port = taken.local_addr().unwrap().port();
            let text = connect(&options(&format!("localhost:{port}"), 0, 2)).unwrap_err().to_string();
            check(text.contains(&format!("port {port} of localhost is taken")), text)
        });
        attacks.attack(format!("peers that know {} only", address.ip()), || {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let whole = format!("localhost:{port}");
            let one = SocketAddr::new(address.ip(), port).to_string();
            let met = thread::scope(|scope| {
                let ranks = [whole, one].into_iter().enumerate();
                let ranks =
                    ranks.map(|(rank, at)| scope.spawn(move || connect(&options(&at, rank, 2)).map(drop)));
                ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
            });
            check(met.iter().all(|met| met.is_ok()), met)
        });
    }
    attacks.assert();
}
