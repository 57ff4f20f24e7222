//! The collectors that are open on a thread.
use super::event::{Event, Part};
use crate::call::{Call, Dims, Form};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tracing::debug_span;
use tracing::span::EnteredSpan;

/// A collector of events.
pub(super) trait Collect {
    fn add(&mut self, event: &Event);
}

thread_local! {
    static OPEN: RefCell<Vec<Rc<RefCell<dyn Collect>>>> = const { RefCell::new(Vec::new()) };
}

/// A collector that is open on this thread until it is dropped.
pub(super) struct CommScope<T: 'static>(pub(super) Rc<RefCell<T>>);

impl<T: Collect + Default> CommScope<T> {
    pub(super) fn open() -> Self {
        let collection = Rc::new(RefCell::new(T::default()));
        OPEN.with_borrow_mut(|open| open.push(collection.clone()));
        Self(collection)
    }
}

impl<T> Drop for CommScope<T> {
    fn drop(&mut self) {
        OPEN.with_borrow_mut(|open| {
            open.retain(|other| !std::ptr::addr_eq(Rc::as_ptr(other), Rc::as_ptr(&self.0)));
        });
    }
}

/// A call in progress that is observed. Dropping it ends the call.
pub(crate) struct ObservedCall {
    event: Event,
    _span: EnteredSpan,
}

/// Starts to observe a call of the group of `ranks` whose input on this rank has `bytes` bytes.
///
/// If no collector is open on this thread, and nobody subscribes to spans, this only reads a thread-local and a global.
pub(crate) fn watch(call: &Call, bytes: usize, ranks: &[usize], is_check: bool) -> Option<ObservedCall> {
    let part = match call.form {
        _ if is_check => Part::Check,
        Form::Started => Part::Start,
        _ => Part::Whole,
    };
    watch_part(call, part, bytes, ranks)
}

/// Starts to observe the wait for a started call.
pub(crate) fn watch_wait(call: &Call, ranks: &[usize]) -> Option<ObservedCall> {
    watch_part(call, Part::Wait, 0, ranks)
}

fn watch_part(call: &Call, part: Part, bytes: usize, ranks: &[usize]) -> Option<ObservedCall> {
    let span = debug_span!("communication", op = %call.op(), ?part, ?ranks, peer = call.collective.peer(), bytes, site = %call.site);
    if span.is_disabled() && OPEN.with_borrow(Vec::is_empty) {
        return None;
    }
    let (ranks, start) = (Dims::from_slice(ranks), Instant::now());
    let event = Event {
        op: call.op(),
        part,
        ranks,
        peer: call.collective.peer(),
        bytes,
        start,
        duration: Duration::ZERO,
        site: call.site,
    };
    Some(ObservedCall { event, _span: span.entered() })
}

impl Drop for ObservedCall {
    fn drop(&mut self) {
        self.event.duration = self.event.start.elapsed();
        OPEN.with_borrow(|open| open.iter().for_each(|collection| collection.borrow_mut().add(&self.event)));
    }
}
