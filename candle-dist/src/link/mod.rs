//! A connection that both ends keep alive: one thread writes what is sent, or signs of life; another one reads.
mod deadline;
pub(crate) mod frame;
pub(crate) mod hello;

pub(crate) use deadline::{Before, within};

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// How many signs of life fit into the time after which their lack counts.
const SIGNS: u32 = 5;
/// The longest time between two signs of life.
const MAX_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest time after which silence counts.
pub(crate) const MIN_SILENCE: Duration = Duration::from_millis(100);
/// What a closed connection is called, on whichever side and however it closed.
pub(crate) const CLOSED: &str = "its connection closed without a goodbye";

/// What a connection brings.
pub(crate) enum Event<M> {
    /// A message and its bytes.
    Message(M, Vec<u8>),
    /// The last event: why nothing more comes.
    Ended(String),
}

/// Where messages are put to be sent; never waits.
#[derive(Debug)]
pub(crate) struct Outbox<M>(Sender<Outgoing<M>>);

/// A message with its bytes, or the end of the connection.
type Outgoing<M> = Option<(M, Arc<[u8]>)>;

impl<M> Clone for Outbox<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<M> Outbox<M> {
    /// Sends a message without bytes; if the connection has ended, its reader has been told.
    pub(crate) fn send(&self, message: M) {
        self.send_with(message, Arc::default());
    }

    /// Sends a message with bytes.
    pub(crate) fn send_with(&self, message: M, payload: Arc<[u8]>) {
        let _ = self.0.send(Some((message, payload)));
    }

    /// Closes the connection once all is sent.
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
    /// Starts to read and write; after `silence` without a sign of life the connection counts as ended.
    pub(crate) fn start<I: DeserializeOwned>(
        stream: TcpStream,
        silence: Duration,
        mut on: impl FnMut(Event<I>) + Send + 'static,
    ) -> io::Result<Self> {
        let silence = silence.max(MIN_SILENCE);
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(silence))?;
        stream.set_write_timeout(Some(silence))?;
        let mut reading = stream.try_clone()?;
        let (sender, inbox) = channel();
        let writer = thread::Builder::new().name("candle-dist writer".into()).spawn(move || {
            // An error here ends the connection, which the reader notices.
            let _ = write_all(&stream, &inbox, (silence / SIGNS).min(MAX_INTERVAL));
            let _ = stream.shutdown(Shutdown::Both);
        })?;
        thread::Builder::new().name("candle-dist reader".into()).spawn(move || {
            let why = loop {
                match frame::read(&mut reading) {
                    Ok(Some((message, payload))) => on(Event::Message(message, payload)),
                    Ok(None) => break CLOSED.to_string(),
                    Err(error) => break describe(&error, silence),
                }
            };
            let _ = reading.shutdown(Shutdown::Both);
            on(Event::Ended(why));
        })?;
        Ok(Self { outbox: Outbox(sender), writer })
    }

    /// Closes the connection and returns when all is sent.
    pub(crate) fn finish(self) {
        self.outbox.close();
        let _ = self.writer.join();
    }
}

fn write_all<M: Serialize>(
    mut stream: &TcpStream,
    inbox: &Receiver<Outgoing<M>>,
    interval: Duration,
) -> io::Result<()> {
    loop {
        match inbox.recv_timeout(interval) {
            Ok(Some((message, payload))) => frame::write(&mut stream, &message, &payload)?,
            Err(RecvTimeoutError::Timeout) => stream.write_all(&frame::PING)?,
            Ok(None) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

fn describe(error: &io::Error, silence: Duration) -> String {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => format!("no sign of life for {silence:?}"),
        ErrorKind::InvalidData => format!("it sent what cannot be read ({error})"),
        _ => CLOSED.to_string(),
    }
}
