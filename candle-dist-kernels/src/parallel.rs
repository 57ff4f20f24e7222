//! Work on candle's threads.
//!
//! rayon and candle's `with_threadpool` are generic: each closure that they are given compiles thousands of lines of
//! them again. Here they get a closure of one type.
use candle_core::utils::{get_num_threads, with_threadpool};
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Returns `run` of each part with its number, in order; computed by candle's threads, if the work is worth it.
///
/// All parts run, also after one whose result is an error.
pub(super) fn map<P: Send, R: Send>(
    is_worth_it: bool,
    parts: impl Iterator<Item = P>,
    run: impl Fn(usize, P) -> R + Sync,
) -> Vec<R> {
    if is_worth_it && get_num_threads() > 1 {
        on_threads(parts, run)
    } else {
        parts.enumerate().map(|(i, part)| run(i, part)).collect()
    }
}

fn on_threads<P: Send, R: Send>(
    parts: impl Iterator<Item = P>,
    run: impl Fn(usize, P) -> R + Sync,
) -> Vec<R> {
    // A part and its result are touched by one thread at a time, so no lock is ever waited for.
    let slots: Vec<_> = parts.map(|part| Mutex::new((Some(part), None))).collect();
    for_each(slots.len(), &|i| {
        let mut slot = slots[i].lock().unwrap_or_else(PoisonError::into_inner);
        slot.1 = slot.0.take().map(|part| run(i, part));
    });
    slots.into_iter().filter_map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner).1).collect()
}

/// Calls `run` with each number below `count`, on candle's threads.
fn for_each(count: usize, run: &(dyn Fn(usize) + Sync)) {
    with_threadpool(|| (0..count).into_par_iter().for_each(run));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_is_taken_once_and_results_are_in_order() {
        let mut numbers: Vec<usize> = (0..1000).collect();
        let add = |i: usize, part: &mut [usize]| {
            part.iter_mut().for_each(|number| *number += 1);
            (i, part[0])
        };
        let wanted = |added: usize| (0..1000).step_by(7).map(|at| at + added).enumerate().collect::<Vec<_>>();
        assert_eq!(on_threads(numbers.chunks_mut(7), add), wanted(1));
        assert_eq!(map(true, numbers.chunks_mut(7), add), wanted(2));
        assert_eq!(map(false, numbers.chunks_mut(7), add), wanted(3));
        assert_eq!(numbers, (3..1003).collect::<Vec<_>>());
        assert!(on_threads(std::iter::empty::<usize>(), |_, part| part).is_empty());
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        let panicked = std::panic::catch_unwind(|| on_threads(0..10, |_, part| assert_ne!(part, 5)));
        assert!(panicked.is_err());
    }
}
