//! The thread of connections.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use candle_lm::serve::RequestQueue;
use tokio::runtime::Builder;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep};

use super::access::Access;
use super::connection;
use super::model::ServedModel;
use super::otlp::SpanCounts;
use super::parameters::ServeLimits;
use super::routes::{self, FrontState};

/// How a server listens, and whom it answers.
#[derive(Clone, Debug)]
pub struct FrontOptions {
    /// Who may ask.
    pub access: Access,
    /// What a request may ask for.
    pub limits: ServeLimits,
    /// The most connections.
    pub connections: usize,
    /// How long requests may go on after the signal to end.
    pub drain: Duration,
    /// Whether each request has a line in the log.
    pub logs: bool,
    /// What becomes of spans, if a collector gets them.
    pub spans: Option<Arc<SpanCounts>>,
}

/// The most bodies that wait to be read.
const BODIES: usize = 64;
/// How often the signal to end is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// How long clients have to read what is left when the engine has ended.
const LINGER: Duration = Duration::from_secs(2);

/// The thread of connections, which hands requests to a queue.
///
/// It has one thread for all connections, and one that reads bodies. Neither computes with the model, and no rank waits for them.
#[derive(Debug)]
pub struct Front {
    address: SocketAddr,
    end: watch::Sender<bool>,
    thread: JoinHandle<()>,
}

impl Front {
    /// Answers the connections of `listener`. When `stop` is set, new requests are refused, and the others have [`FrontOptions::drain`]
    /// to end.
    ///
    /// # Errors
    /// If the system refuses a thread, or what the runtime needs.
    pub fn start(
        listener: TcpListener,
        model: &'static ServedModel,
        queue: RequestQueue,
        stop: Arc<AtomicBool>,
        options: FrontOptions,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
        let (connections, drain) = (options.connections, options.drain);
        let state = FrontState::new(model, queue.clone(), options, BODIES)?;
        let (end, ended) = watch::channel(false);
        let run = move || {
            runtime.block_on(async move {
                let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
                let router = routes::router(Arc::new(state));
                let slots = Arc::new(Semaphore::new(connections));
                tokio::spawn(watch_signal(queue, stop, drain));
                let mut over = ended.clone();
                loop {
                    let accepted = tokio::select! {
                        accepted = listener.accept() => accepted,
                        _ = over.wait_for(|over| *over) => break,
                    };
                    match accepted {
                        Ok((stream, _)) => {
                            tokio::spawn(connection::serve(
                                stream,
                                router.clone(),
                                slots.clone(),
                                ended.clone(),
                            ));
                        }
                        // No files are left, for example: connections that end give some back.
                        Err(_) => sleep(LOOK).await,
                    }
                }
                drop(listener);
                let until = Instant::now() + LINGER;
                while slots.available_permits() < connections && Instant::now() < until {
                    sleep(Duration::from_millis(5)).await;
                }
            });
        };
        let thread = thread::Builder::new().name("lm http".into()).spawn(run)?;
        Ok(Self { address, end, thread })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends when the engine has ended: clients have a moment to read what is left.
    pub fn finish(self) {
        self.end.send(true).ok();
        self.thread.join().ok();
    }
}

/// Waits for the signal to end.
async fn watch_signal(queue: RequestQueue, stop: Arc<AtomicBool>, drain: Duration) {
    while !stop.load(Ordering::Acquire) {
        sleep(LOOK).await;
    }
    queue.drain();
    sleep(drain).await;
    queue.stop();
}
