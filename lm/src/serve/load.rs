//! The line of the terminal that tells what a server does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use candle_lm::serve::{RequestQueue, ServeStatus};
use examples::cli;

/// How often it is looked whether the server has ended.
const LOOK: Duration = Duration::from_millis(100);

/// Tells the load as often as `every` says, while there is some, until the server has ended.
pub(super) fn tell(queue: &RequestQueue, is_over: &AtomicBool, every: Duration) {
    let (mut before, mut at) = (queue.status(), Instant::now());
    while !is_over.load(Ordering::Acquire) {
        thread::sleep(LOOK.min(every));
        let (now, passed) = (queue.status(), at.elapsed());
        // A rank that panics does not say that it is over.
        if now.failure.is_some() {
            return;
        }
        if passed < every {
            continue;
        }
        if now.passes > before.passes {
            cli::tell("load", line(&before, &now, passed));
        }
        (before, at) = (now, Instant::now());
    }
}

/// What is done now, and what was since another time.
fn line(before: &ServeStatus, now: &ServeStatus, passed: Duration) -> String {
    let rate = |before: u64, now: u64| now.saturating_sub(before) as f64 / passed.as_secs_f64();
    let read = |status: &ServeStatus| status.prompt_tokens.saturating_sub(status.reused_tokens);
    format!(
        "running={} waiting={} cache={}% prompt_tokens_per_s={:.1} tokens_per_s={:.1}",
        now.running,
        now.waiting,
        100 * now.used_bytes / now.cache_bytes.max(1),
        rate(read(before), read(now)),
        rate(before.written_tokens, now.written_tokens),
    )
}

#[cfg(test)]
mod tests {
    use super::{ServeStatus, line};
    use std::time::Duration;

    #[test]
    fn a_line_has_what_is_now_and_rates_since() {
        let before = ServeStatus {
            prompt_tokens: 100,
            reused_tokens: 90,
            written_tokens: 5,
            ..ServeStatus::default()
        };
        let now = ServeStatus {
            running: 3,
            waiting: 2,
            used_bytes: 50,
            cache_bytes: 200,
            prompt_tokens: 400,
            reused_tokens: 190,
            written_tokens: 30,
            ..ServeStatus::default()
        };
        assert_eq!(
            line(&before, &now, Duration::from_secs(10)),
            "running=3 waiting=2 cache=25% prompt_tokens_per_s=20.0 tokens_per_s=2.5"
        );
    }
}
