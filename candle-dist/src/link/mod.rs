//! A connection with heartbeats in both directions. One thread writes messages and heartbeats, another one reads.
mod deadline;
pub(crate) mod frame;
pub(crate) mod hello;
pub(crate) mod key;
mod silence;

pub(crate) use deadline::{Attempts, DeadlineStream, within};

use serde::Serialize;
use serde::de::DeserializeOwned;
use silence::PatientStream;
use std::io::{self, ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The number of heartbeats per silence limit, and of waits for them.
const SIGNS: u32 = 5;
/// The maximum time between two heartbeats, and so between the times at which two processes find that a third one is silent.
const MAX_INTERVAL: Duration = Duration::from_millis(250);
/// The minimum silence limit.
pub(crate) const MIN_SILENCE: Duration = Duration::from_millis(100);
/// The description of a closed connection, the same for either side and any way of closing.
pub(crate) const CLOSED: &str = "its connection closed without a goodbye";

/// An event of a connection.
pub(crate) enum LinkEvent<M> {
    /// A message with its payload.
    Message(M, Vec<u8>),
    /// The last event, with the reason of the end. If the other side was silent, it may only be frozen: it gets what is
    /// sent until the connection is closed, when it wakes.
    Ended(String),
}

/// The queue of outgoing messages. Sending never blocks.
#[derive(Debug)]
pub(crate) struct Outbox<M>(Sender<OutboxItem<M>>);

/// A message with its payload, or `None` to end the connection.
type OutboxItem<M> = Option<(M, Arc<[u8]>)>;

impl<M> Clone for Outbox<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<M> Outbox<M> {
    /// Sends a message without payload. If the connection has ended, its reader already knows.
    pub(crate) fn send(&self, message: M) {
        self.send_with(message, Arc::default());
    }

    /// Sends a message with a payload.
    pub(crate) fn send_with(&self, message: M, payload: Arc<[u8]>) {
        let _ = self.0.send(Some((message, payload)));
    }

    /// Closes the connection after all messages are sent.
    pub(crate) fn close(&self) {
        let _ = self.0.send(None);
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Link<M> {
    pub(crate) outbox: Outbox<M>,
    writer: JoinHandle<()>,
}

impl<M: Serialize + Send + 'static> Link<M> {
    /// Starts the reader and the writer, which first sends `opening`. The connection ends after `silence` without a heartbeat;
    /// then `on` or its caller closes the outbox. On an error, nothing is sent.
    ///
    /// Heartbeats come from the writer, which holds no lock and computes nothing. Time that this process did not get counts
    /// for nobody's silence.
    pub(crate) fn start<I: DeserializeOwned>(
        stream: TcpStream,
        silence: Duration,
        opening: Vec<u8>,
        mut on: impl FnMut(LinkEvent<I>) + Send + 'static,
    ) -> io::Result<Self> {
        let silence = silence.max(MIN_SILENCE);
        let tick = (silence / SIGNS).min(MAX_INTERVAL);
        stream.set_nodelay(true)?;
        let closing = stream.try_clone()?;
        let mut writing = PatientStream::new(stream.try_clone()?, silence, tick)?;
        let mut reading = PatientStream::new(stream.try_clone()?, silence, tick)?;
        let (sender, inbox) = channel();
        let (begin, begins) = channel::<Vec<u8>>();
        let writer = thread::Builder::new().name("candle-dist writer".into()).spawn(move || {
            // The reader does not start.
            let Ok(opening) = begins.recv() else { return };
            // An error here closes the stream, which the reader notices.
            // The first heartbeat comes at once, so that those after it need nothing that is not there.
            let _ = writing.write_all(&[&opening[..], &frame::PING].concat());
            let _ = write_all(&mut writing, &inbox, tick);
            let _ = stream.shutdown(Shutdown::Both);
        })?;
        thread::Builder::new().name("candle-dist reader".into()).spawn(move || {
            let why = loop {
                match frame::read(&mut reading) {
                    Ok(Some((message, payload))) => on(LinkEvent::Message(message, payload)),
                    Ok(None) => {
                        let _ = closing.shutdown(Shutdown::Both);
                        break CLOSED.to_string();
                    }
                    Err(error) if error.kind() == ErrorKind::TimedOut => {
                        break format!("no heartbeat for {silence:?}");
                    }
                    Err(error) => {
                        let _ = closing.shutdown(Shutdown::Both);
                        break describe(&error);
                    }
                }
            };
            on(LinkEvent::Ended(why));
        })?;
        let _ = begin.send(opening);
        Ok(Self { outbox: Outbox(sender), writer })
    }

    /// Closes the connection and returns when all messages are sent.
    pub(crate) fn finish(self) {
        self.outbox.close();
        let _ = self.writer.join();
    }
}

fn write_all<M: Serialize>(
    stream: &mut PatientStream,
    inbox: &Receiver<OutboxItem<M>>,
    interval: Duration,
) -> io::Result<()> {
    loop {
        match inbox.recv_timeout(interval) {
            Ok(Some((message, payload))) => frame::write(stream, &message, &payload)?,
            Err(RecvTimeoutError::Timeout) => stream.write_all(&frame::PING)?,
            Ok(None) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

fn describe(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::InvalidData => format!("it sent unreadable data ({error})"),
        _ => CLOSED.to_string(),
    }
}
