//! Other connections to rank 0 are dropped or get a reason, and do not disturb the world.
use super::*;
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// The first bytes in both directions.
const MAGIC: &[u8; 8] = b"\xc4ndlDist";
/// The version of the protocol.
pub(super) const VERSION: u16 = 5;
/// The length of what rank 0 sends before a text.
const FRAME: usize = 11;

/// Returns a greeting as it is sent.
pub(super) fn hello(version: u16, rank: u32, size: u32) -> Vec<u8> {
    [&MAGIC[..], &version.to_le_bytes(), &rank.to_le_bytes(), &size.to_le_bytes(), &[7; 32]].concat()
}

/// Returns the proof that a side of the job without a name knows the token.
pub(super) fn proof(token: &str, role: &str, sent: &[&[u8]]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&Sha256::digest(token)).unwrap();
    for part in [&b"candle-dist"[..], b"", role.as_bytes()].iter().chain(sent) {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac.finalize().into_bytes().to_vec()
}

/// Greets rank 0 and proves with a token. Returns the stream, and rank 0's answer with its proof.
pub(super) fn greet(address: &str, hello: &[u8], token: &str) -> (TcpStream, Vec<u8>) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(hello).unwrap();
    let mut challenge = vec![0; FRAME + 32];
    if stream.read_exact(&mut challenge[..FRAME]).is_err() || challenge[8] != 3 {
        return (stream, challenge);
    }
    stream.read_exact(&mut challenge[FRAME..]).unwrap();
    let guest = proof(token, "guest", &[hello, &challenge[FRAME..]]);
    stream.write_all(&guest).unwrap();
    let mut answer = vec![0; FRAME];
    stream.read_exact(&mut answer).unwrap();
    let mut text = vec![0; usize::from(u16::from_le_bytes([answer[9], answer[10]]))];
    stream.read_exact(&mut text).unwrap();
    answer.extend(text);
    if ![3, 4].contains(&answer[8]) {
        let mut host = vec![0; 32];
        stream.read_exact(&mut host).unwrap();
        assert_eq!(
            host,
            proof(token, "host", &[hello, &challenge[FRAME..], &guest, &answer]),
            "rank 0 proves itself too"
        );
    }
    (stream, answer)
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
        let come = |rank| scope.spawn(move || connect(&options(address, rank, 2)).unwrap());
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
        // A greeting that is cut off by other bytes.
        &[&MAGIC[..2], &[2, 0], &[0; 8], &[0xff; 2], &[b'x'; 2000]].concat(),
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
        for byte in &hello(VERSION, 1, 2)[..10] {
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
        let is_cut = hello(VERSION, 1, 2).chunks(1).any(|byte| {
            thread::sleep(Duration::from_millis(150));
            slow.write_all(byte).is_err()
        });
        assert!(is_cut, "fifty bytes at this pace take seven seconds");
    });
}

#[test]
fn processes_of_other_jobs_versions_and_sizes_are_told_so() {
    let cases = [
        (hello(2, 1, 2), TOKEN, "version 2"),
        (hello(7, 1, 2), TOKEN, "version 7"),
        (hello(VERSION, 1, 3), TOKEN, "counts 3 ranks and rank 0 counts 2"),
        (hello(VERSION, 2, 2), TOKEN, "rank 2 of 2"),
        (hello(VERSION, u32::MAX, 2), TOKEN, "of 2; ranks go from 0 to 1"),
        // Not even the reason.
        (hello(VERSION, 1, 3), "a token of another job, as long", ""),
        (hello(VERSION, 1, 2), "", ""),
        (hello(VERSION, 0, 2), TOKEN, "rank 0 is here already"),
    ];
    let have_met = AtomicBool::new(false);
    undisturbed(|address| {
        // A second rank 0 is refused only after the first one has joined, so this comes last.
        let known = cases.len() - usize::from(!have_met.swap(true, Ordering::Relaxed));
        for (hello, token, expected) in &cases[..known] {
            let (mut stream, mut answer) = greet(address, hello, token);
            if expected.starts_with("version") {
                answer.truncate(FRAME);
                stream.read_to_end(&mut answer).unwrap();
            }
            assert!(answer.starts_with(MAGIC));
            let text = String::from_utf8_lossy(&answer[FRAME..]);
            assert!(text.contains(expected) && !text.contains('\n'), "{text}");
            assert_eq!(expected.is_empty(), answer[8] == 4 && text.is_empty(), "{expected} {answer:?}");
        }
    });
}

#[test]
fn refusals_are_errors_of_the_refused() {
    let address = free_address();
    let address = &address;
    thread::scope(|scope| {
        let [first, second] =
            [0, 1].map(|rank| scope.spawn(move || connect(&options(address, rank, 2)).unwrap()));
        let (first, second) = (first.join().unwrap(), second.join().unwrap());
        let refused = |options: InitOptions| connect(&options).unwrap_err().to_string();
        assert!(refused(options(address, 1, 2)).contains("init: rank 1 is here already"));
        assert!(refused(options(address, 1, 2).token(&"x".repeat(3000))).contains("CANDLE_DIST_TOKEN"));
        assert!(refused(options(address, 2, 3)).contains("counts 3 ranks and rank 0 counts 2"));
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
            let (mut stream, welcome) = greet(address, &hello(VERSION, 1, 3), TOKEN);
            assert_eq!(welcome[8], 0, "a welcome");
            let arguments = b"{\"Arguments\":null}";
            let lengths = [arguments.len() as u32, 0].map(u32::to_le_bytes).concat();
            stream.write_all(&[&lengths[..], arguments].concat()).unwrap();
            // The message that all ranks have joined.
            stream.read_exact(&mut [0; 8]).unwrap();
            stream.write_all(&frame).unwrap();
            let text = common(&others.map(|thread| thread.join().unwrap()));
            assert!(text.starts_with("rank 1 was lost: it sent unreadable data"), "{text}");
        });
    }
}
