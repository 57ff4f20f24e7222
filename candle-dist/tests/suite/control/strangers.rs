//! Other connections to rank 0 are dropped or get a reason, and do not disturb the world.
use super::*;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// The first bytes in both directions.
const MAGIC: &[u8; 8] = b"\xc4ndlDist";

/// Returns a greeting as it is sent.
fn hello(version: u16, rank: u32, size: u32, token: &[u8]) -> Vec<u8> {
    let (version, len) = (version.to_le_bytes(), (token.len() as u16).to_le_bytes());
    [&MAGIC[..], &version, &rank.to_le_bytes(), &size.to_le_bytes(), &len, token].concat()
}

/// Sends `bytes` and reads until the other side closes.
fn answer(address: &str, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        // The connection was closed while some of our bytes were unread.
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        result => drop(result.expect("the server closes the connection")),
    }
    answer
}

/// Disturbs rank 0 while it waits for rank 1, and again after both have joined. The world must still work.
fn undisturbed(disturb: impl Fn(&str)) {
    let address = free_address();
    let address = &address;
    thread::scope(|scope| {
        let come = |rank| scope.spawn(move || connect(&options(address, rank, 2).token("right")).unwrap());
        let first = come(0);
        while TcpStream::connect(address).is_err() {
            thread::yield_now();
        }
        disturb(address);
        let second = come(1).join().unwrap();
        disturb(address);
        let first = first.join().unwrap();
        second.set("key", b"value").unwrap();
        assert_eq!(first.get("key").unwrap(), b"value");
        assert!(first.failure().is_none() && second.failure().is_none());
        drop(second); // says goodbye, and rank 0 waits for that
        drop(first);
    });
}

#[test]
fn garbage_is_dropped_without_an_answer() {
    let cases: [&[u8]; 6] = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        &[0xff; 4096],
        &[0; 64],
        // A token above the maximum length.
        &[&MAGIC[..], &[2, 0], &[0; 8], &[0xff; 2], &[b'x'; 2000]].concat(),
        b"\xc4ndlDisT",
    ];
    undisturbed(|address| {
        for bytes in cases {
            assert!(answer(address, bytes).is_empty());
        }
    });
}

#[test]
fn silent_and_slow_connections_neither_hold_nor_block() {
    undisturbed(|address| {
        // More than may wait at once, so the oldest are dropped.
        let mut idle: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
        let mut slow = TcpStream::connect(address).unwrap();
        for byte in &hello(2, 1, 2, b"right")[..10] {
            let _ = slow.write_all(&[*byte]);
            thread::sleep(Duration::from_millis(5));
        }
        for stream in &mut idle[..100] {
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "dropped");
        }
    });
}

#[test]
fn a_greeting_that_trickles_is_cut_off() {
    undisturbed(|address| {
        let mut slow = TcpStream::connect(address).unwrap();
        let is_cut = hello(2, 1, 2, &[b'x'; 1000]).chunks(1).any(|byte| {
            thread::sleep(Duration::from_millis(10));
            slow.write_all(byte).is_err()
        });
        assert!(is_cut, "a thousand bytes at this pace take ten seconds");
    });
}

#[test]
fn processes_of_other_jobs_versions_and_sizes_are_told_so() {
    let cases = [
        (hello(2, 1, 2, b"wrong"), "another token"),
        (hello(2, 1, 2, b""), "another token"),
        (hello(2, 1, 2, b"right and more"), "another token"),
        (hello(7, 1, 2, b"right"), "version 7"),
        (hello(2, 1, 3, b"right"), "counts 3 ranks and rank 0 counts 2"),
        (hello(2, 2, 2, b"right"), "rank 2 of 2"),
        (hello(2, u32::MAX, 2, b"right"), "of 2; ranks go from 0 to 1"),
        (hello(2, 0, 2, b"right"), "rank 0 is here already"),
    ];
    let have_met = AtomicBool::new(false);
    undisturbed(|address| {
        // A second rank 0 is refused only after the first one has joined, so this comes last.
        let known = cases.len() - usize::from(!have_met.swap(true, Ordering::Relaxed));
        for (bytes, expected) in &cases[..known] {
            let answer = answer(address, bytes);
            assert!(answer.starts_with(MAGIC));
            let text = String::from_utf8_lossy(&answer[11..]);
            assert!(text.contains(expected) && !text.contains('\n'), "{text}");
        }
    });
}

#[test]
fn refusals_are_errors_of_the_refused() {
    let address = free_address();
    let address = &address;
    thread::scope(|scope| {
        let [first, second] = [0, 1].map(|rank| scope.spawn(move || connect(&options(address, rank, 2)).unwrap()));
        let (first, second) = (first.join().unwrap(), second.join().unwrap());
        let refused = |options: InitOptions| connect(&options).unwrap_err().to_string();
        assert!(refused(options(address, 1, 2)).contains("init: rank 1 is here already"));
        assert!(refused(options(address, 1, 2).token("wrong")).contains("CANDLE_DIST_TOKEN"));
        assert!(refused(options(address, 2, 3)).contains("counts 3 ranks and rank 0 counts 2"));
        assert!(refused(options(address, 1, 2).token(&"x".repeat(1025))).contains("at most 1024"));
        drop(second);
        let text = refused(options(address, 1, 2).init_timeout(Duration::from_millis(300)));
        assert!(text.contains("within 300ms (rank 1 was here and has left; "), "{text}");
        drop(first);
    });
}

#[test]
fn a_process_that_sends_what_cannot_be_read_is_lost_and_harms_nobody_else() {
    let frames: [Vec<u8>; 4] = [
        vec![0xff; 8],
        [5u32.to_le_bytes(), 0u32.to_le_bytes()].concat().into_iter().chain(*b"{bad}").collect(),
        [2u32.to_le_bytes(), u32::MAX.to_le_bytes()].concat(),
        [0u32.to_le_bytes(), 1u32.to_le_bytes()].concat().into_iter().chain([0]).collect(),
    ];
    for frame in frames {
        let address = free_address();
        let address = &address;
        thread::scope(|scope| {
            let come = |rank| scope.spawn(move || heard(&connect(&options(address, rank, 3)).unwrap()));
            let others = [0, 2].map(come);
            while TcpStream::connect(address).is_err() {
                thread::yield_now();
            }
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(&hello(2, 1, 3, b"")).unwrap();
            let mut welcome = [0; 11];
            stream.read_exact(&mut welcome).unwrap();
            assert_eq!(welcome[8..], [0; 3]);
            // The message that all ranks have joined.
            stream.read_exact(&mut [0; 8]).unwrap();
            stream.write_all(&frame).unwrap();
            let text = common(&others.map(|thread| thread.join().unwrap()));
            assert!(text.starts_with("rank 1 was lost: it sent unreadable data"), "{text}");
        });
    }
}
