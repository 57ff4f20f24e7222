//! Connections: how many there are, how long they may be silent, and how large their heads are.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Sleep, sleep, timeout};

/// A head that takes longer, or a connection that asks for nothing so long, is ended.
const HEAD: Duration = Duration::from_secs(30);
/// A client that reads nothing so long is gone.
const UNREAD: Duration = Duration::from_secs(30);
/// How long a client has to end its side when a connection ends.
const REST: Duration = Duration::from_millis(500);
/// The most bytes of a head.
const HEAD_BYTES: usize = 32 << 10;
/// The most fields of a head.
const HEAD_FIELDS: usize = 100;

/// Serves one connection to its end, or until the server ends.
pub(super) async fn serve(
    stream: TcpStream,
    router: Router,
    slots: Arc<Semaphore>,
    mut end: watch::Receiver<bool>,
) {
    let Ok(_slot) = slots.try_acquire() else {
        refuse(stream).await;
        return;
    };
    stream.set_nodelay(true).ok();
    let service = TowerToHyperService::new(router);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_FIELDS)
        .serve_connection(PatientStream::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        // What a client does wrong ends its connection alone.
        _ = connection.as_mut() => return,
        _ = end.wait_for(|end| *end) => connection.as_mut().graceful_shutdown(),
    }
    connection.await.ok();
}

/// Answers a connection that is one too many.
async fn refuse(mut stream: TcpStream) {
    const BODY: &str = r#"{"error":{"message":"The server has too many connections.","type":"unavailable_error","param":null,"code":"unavailable"}}"#;
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{BODY}",
        BODY.len()
    );
    timeout(Duration::from_secs(1), stream.write_all(answer.as_bytes())).await.ok();
    timeout(Duration::from_secs(1), stream.shutdown()).await.ok();
}

/// A connection whose writes fail if the client reads nothing for a while. At its end it reads on for a moment: if something is left
/// unread, the system resets it, and the client never learns why it was refused.
struct PatientStream {
    inner: TokioIo<TcpStream>,
    /// When the patience ends, while a write waits.
    patience: Option<Pin<Box<Sleep>>>,
    /// When the connection ends in any case, once this side is shut.
    rest: Option<Pin<Box<Sleep>>>,
}

impl PatientStream {
    fn new(stream: TcpStream) -> Self {
        Self { inner: TokioIo::new(stream), patience: None, rest: None }
    }

    /// Reads until the client ends its side, or the time is over.
    fn drained(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let rest = self.rest.get_or_insert_with(|| Box::pin(sleep(REST)));
        let mut bytes = [0; 4096];
        while rest.as_mut().poll(context).is_pending() {
            let mut buffer = ReadBuf::new(&mut bytes);
            match ready!(Pin::new(&mut self.inner).poll_read(context, buffer.unfilled())) {
                Ok(()) if !buffer.filled().is_empty() => {}
                _ => break,
            }
        }
        Poll::Ready(())
    }

    fn watched<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.patience = None;
            return written;
        }
        let patience = self.patience.get_or_insert_with(|| Box::pin(sleep(UNREAD)));
        ready!(patience.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl Read for PatientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl Write for PatientStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.watched(written, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(context);
        self.watched(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.rest.is_none() {
            let shut = Pin::new(&mut self.inner).poll_shutdown(context);
            ready!(self.watched(shut, context))?;
        }
        self.drained(context).map(Ok)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(context, slices);
        self.watched(written, context)
    }
}
