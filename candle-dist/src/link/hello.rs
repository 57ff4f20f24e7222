//! The greeting, in which a process and rank 0 prove to each other that they are of one job.
//!
//! | from | bytes |
//! |---|---|
//! | process | magic, version, rank, size, a nonce |
//! | rank 0 | a challenge: another nonce |
//! | process | its proof over both |
//! | rank 0 | its answer, and a proof over all of that |
//!
//! Rank 0 proves nothing to a process that has not proved itself, so that strangers get nothing to guess secrets with.
use super::key::{JobKey, PROOF, Role};
use std::io::{self, ErrorKind, Read, Write};

/// The first bytes in both directions, which no other protocol sends.
const MAGIC: [u8; 8] = *b"\xc4ndlDist";
/// The version of the whole protocol.
const VERSION: u16 = 5;
/// The length of a nonce, in bytes.
const NONCE: usize = 32;

type Nonce = [u8; NONCE];

/// Who a process says that it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) rank: u32,
    pub(crate) size: u32,
}

/// Why a process or rank 0 is not one of this job.
#[derive(Debug)]
pub(crate) enum Stranger {
    /// It sent what the protocol does not have, or was too slow. It gets no answer.
    Unknown(io::Error),
    /// It refused this process, with these words, before it had proved anything.
    Refused(String),
    /// It does not know the secret.
    Secret,
}

impl From<io::Error> for Stranger {
    fn from(error: io::Error) -> Self {
        Self::Unknown(error)
    }
}

/// The answer to a process of this job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HelloReply {
    /// The process is in, on these terms.
    Welcome(String),
    /// Refused by this world, but the next world at the same address may accept.
    Later(String),
    Never(String),
    /// The world does not start, for a reason that rank 0 tells all ranks.
    NotStarted(String),
}

/// A process that has proved that it is of this job, and waits for the answer.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) hello: Hello,
    /// What both sides have sent.
    sent: [Vec<u8>; 3],
}

impl Hello {
    fn bytes(self, nonce: &Nonce) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.rank.to_le_bytes());
        bytes.extend_from_slice(&self.size.to_le_bytes());
        bytes.extend_from_slice(nonce);
        bytes
    }

    /// Greets rank 0, and returns its answer.
    pub(crate) fn greet(
        self,
        key: &JobKey,
        stream: &mut (impl Read + Write),
    ) -> Result<HelloReply, Stranger> {
        let hello = self.bytes(&nonce()?);
        stream.write_all(&hello)?;
        let challenge = match HelloFrame::read(stream)? {
            HelloFrame { code: CHALLENGE, text } if text.len() == NONCE => text,
            HelloFrame { code: LATER | NEVER, text } => {
                return Err(Stranger::Refused(String::from_utf8_lossy(&text).into()));
            }
            _ => return Err(Stranger::Unknown(ErrorKind::InvalidData.into())),
        };
        let proof = key.proof(Role::Guest, &[&hello, &challenge]);
        stream.write_all(&proof)?;
        let frame = HelloFrame::read(stream)?;
        if frame.code == SECRET {
            return Err(Stranger::Secret);
        }
        let answer = bytes(stream)?;
        if !key.accepts(&answer, Role::Host, &[&hello, &challenge, &proof, &frame.bytes()?]) {
            return Err(Stranger::Secret);
        }
        let text = || String::from_utf8_lossy(&frame.text).into_owned();
        match frame.code {
            WELCOME => Ok(HelloReply::Welcome(text())),
            LATER => Ok(HelloReply::Later(text())),
            NEVER => Ok(HelloReply::Never(text())),
            NOT_STARTED => Ok(HelloReply::NotStarted(text())),
            _ => Err(Stranger::Unknown(ErrorKind::InvalidData.into())),
        }
    }
}

impl Guest {
    /// Reads a greeting, as rank 0. A process of another version or secret is told so.
    pub(crate) fn receive(key: &JobKey, stream: &mut (impl Read + Write)) -> Result<Self, Stranger> {
        if bytes::<8>(stream)? != MAGIC {
            return Err(Stranger::Unknown(ErrorKind::InvalidData.into()));
        }
        let theirs = u16::from_le_bytes(bytes(stream)?);
        if theirs != VERSION {
            let text = format!(
                "this process has version {theirs} of the protocol and rank 0 version {VERSION}; run the same build on all \
                 hosts"
            );
            stream.write_all(&HelloFrame { code: NEVER, text: text.clone().into() }.bytes()?)?;
            // Closing with unread bytes would reset the connection, before the other side has read this.
            let _ = io::copy(stream, &mut io::sink());
            return Err(Stranger::Refused(text));
        }
        let hello =
            Hello { rank: u32::from_le_bytes(bytes(stream)?), size: u32::from_le_bytes(bytes(stream)?) };
        let greeting = hello.bytes(&bytes(stream)?);
        let challenge = nonce()?;
        stream.write_all(&HelloFrame { code: CHALLENGE, text: challenge.into() }.bytes()?)?;
        let proof: [u8; PROOF] = bytes(stream)?;
        if !key.accepts(&proof, Role::Guest, &[&greeting, &challenge]) {
            stream.write_all(&HelloFrame { code: SECRET, text: Vec::new() }.bytes()?)?;
            return Err(Stranger::Secret);
        }
        Ok(Self { hello, sent: [greeting, challenge.to_vec(), proof.to_vec()] })
    }

    /// Sends the answer, with a proof that it comes from rank 0.
    pub(crate) fn answer(&self, key: &JobKey, answer: &HelloReply, to: &mut impl Write) -> io::Result<()> {
        let (code, text) = match answer {
            HelloReply::Welcome(text) => (WELCOME, text.as_str()),
            HelloReply::Later(text) => (LATER, text.as_str()),
            HelloReply::Never(text) => (NEVER, text.as_str()),
            HelloReply::NotStarted(text) => (NOT_STARTED, text.as_str()),
        };
        let mut frame = HelloFrame { code, text: text.into() }.bytes()?;
        let [hello, challenge, proof] = &self.sent;
        let answer = key.proof(Role::Host, &[hello, challenge, proof, &frame]);
        frame.extend_from_slice(&answer);
        to.write_all(&frame)
    }
}

const WELCOME: u8 = 0;
const LATER: u8 = 1;
const NEVER: u8 = 2;
const CHALLENGE: u8 = 3;
/// The process does not know the secret.
const SECRET: u8 = 4;
/// The world does not start; the text is the reason.
const NOT_STARTED: u8 = 5;

/// What rank 0 sends. Versions before 3 read it too.
struct HelloFrame {
    code: u8,
    text: Vec<u8>,
}

impl HelloFrame {
    fn bytes(&self) -> io::Result<Vec<u8>> {
        let mut bytes = MAGIC.to_vec();
        bytes.push(self.code);
        bytes.extend_from_slice(&u16::try_from(self.text.len()).map_err(io::Error::other)?.to_le_bytes());
        bytes.extend_from_slice(&self.text);
        Ok(bytes)
    }

    /// Reads a frame. The error is `InvalidData` if another program sent it.
    fn read(from: &mut impl Read) -> io::Result<Self> {
        if bytes::<8>(from)? != MAGIC {
            return Err(ErrorKind::InvalidData.into());
        }
        let [code] = bytes(from)?;
        let mut text = vec![0; usize::from(u16::from_le_bytes(bytes(from)?))];
        from.read_exact(&mut text)?;
        Ok(Self { code, text })
    }
}

fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; NONCE];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

fn bytes<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Cursor;
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    /// One end of a conversation: what the other one says, and a record of what this one said.
    struct Script(Cursor<Vec<u8>>, Vec<u8>);

    impl Script {
        fn new(says: &[u8]) -> Self {
            Self(Cursor::new(says.to_vec()), Vec::new())
        }
    }

    impl Read for Script {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.read(buffer)
        }
    }

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Lets a process with one key greet a rank 0 with another one.
    fn meet(
        keys: [&JobKey; 2],
        answer: &HelloReply,
    ) -> (Result<HelloReply, Stranger>, Result<Guest, Stranger>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut accepted = listener.accept().unwrap().0;
        thread::scope(|scope| {
            let guest = scope.spawn(move || Hello { rank: 1, size: 2 }.greet(keys[0], &mut stream));
            let received = Guest::receive(keys[1], &mut accepted);
            if let Ok(guest) = &received {
                guest.answer(keys[1], answer, &mut accepted).unwrap();
            }
            drop(accepted);
            (guest.join().unwrap(), received)
        })
    }

    #[test]
    fn processes_of_one_job_meet_and_others_do_not() {
        let key = JobKey::new(b"secret", "job");
        for answer in [
            HelloReply::Welcome("terms".into()),
            HelloReply::Later("soon".into()),
            HelloReply::Never("no".into()),
            HelloReply::NotStarted("off".into()),
        ] {
            let (heard, guest) = meet([&key, &key], &answer);
            assert_eq!(heard.unwrap(), answer);
            assert_eq!(guest.unwrap().hello, Hello { rank: 1, size: 2 });
        }
        for other in
            [JobKey::new(b"secrets", "job"), JobKey::new(b"secret", "job.1"), JobKey::new(b"", "job")]
        {
            for keys in [[&key, &other], [&other, &key]] {
                let (heard, guest) = meet(keys, &HelloReply::Welcome(String::new()));
                assert!(matches!((heard, guest), (Err(Stranger::Secret), Err(Stranger::Secret))));
            }
        }
    }

    #[test]
    fn what_was_heard_before_proves_nothing() {
        let key = JobKey::new(b"secret", "job");
        // A process that replays a greeting meets another challenge.
        let mut first = Script::new(&[]);
        assert!(Hello { rank: 1, size: 2 }.greet(&key, &mut first).is_err());
        let greeting = first.1;
        let challenge = HelloFrame { code: CHALLENGE, text: vec![7; NONCE] }.bytes().unwrap();
        let proof = key.proof(Role::Guest, &[&greeting, &challenge[11..]]);
        let replayed = Guest::receive(&key, &mut Script::new(&[&greeting[..], &proof].concat()));
        assert!(matches!(replayed, Err(Stranger::Secret)));
        // A rank 0 that does not know the secret can only send proofs back.
        let welcome = HelloFrame { code: WELCOME, text: Vec::new() }.bytes().unwrap();
        let mut reflected = Script::new(&[&challenge[..], &welcome, &proof].concat());
        assert!(matches!(Hello { rank: 1, size: 2 }.greet(&key, &mut reflected), Err(Stranger::Secret)));
    }

    #[test]
    fn a_changed_answer_is_no_answer() {
        let key = JobKey::new(b"secret", "job");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut accepted = listener.accept().unwrap().0;
        thread::scope(|scope| {
            let guest = scope.spawn(|| Hello { rank: 1, size: 2 }.greet(&key, &mut stream));
            let received = Guest::receive(&key, &mut accepted).unwrap();
            let mut answer = Vec::new();
            received.answer(&key, &HelloReply::Never("no".into()), &mut answer).unwrap();
            answer[8] = WELCOME;
            accepted.write_all(&answer).unwrap();
            assert!(matches!(guest.join().unwrap(), Err(Stranger::Secret)));
        });
    }

    #[test]
    fn another_version_is_told_so() {
        let mut bytes = Hello { rank: 0, size: 1 }.bytes(&[0; NONCE]);
        bytes[MAGIC.len()] = 9;
        let mut script = Script::new(&bytes);
        let stranger = Guest::receive(&JobKey::new(b"", ""), &mut script).unwrap_err();
        assert!(matches!(stranger, Stranger::Refused(text) if text.contains("version 9")));
        let told =
            Hello { rank: 0, size: 1 }.greet(&JobKey::new(b"", ""), &mut Script::new(&script.1)).unwrap_err();
        assert!(matches!(told, Stranger::Refused(text) if text.contains("version 9")));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_stranger(bytes: Vec<u8>, has_magic: bool) {
            let bytes = if has_magic { [&MAGIC[..], &bytes].concat() } else { bytes };
            let key = JobKey::new(b"secret", "job");
            let hello = Hello { rank: 0, size: 1 };
            prop_assert!(Guest::receive(&key, &mut Script::new(&bytes)).is_err());
            prop_assert!(hello.greet(&key, &mut Script::new(&bytes)).is_err());
        }
    }
}
