//! What is stated for any numbers of ranks and microbatches.
use super::{close, schedule, simulated};

/// `(P-1)(F+B)/v` and the like: the idle time of each rank in a step.
#[test]
fn idle_times() {
    type Form = fn(f64, f64, [f64; 3]) -> f64;
    let staircase: Form = |ranks, turns, [f, i, w]| (ranks - 1.0) * (f + i + w) / turns;
    let split: Form = |ranks, turns, [f, i, w]| (ranks - 1.0) * (f + i - w) / turns;
    let cases: &[(&str, &[usize], Form)] = &[
        ("gpipe", &[1], staircase),
        ("1f1b", &[1], staircase),
        ("eager-1f1b", &[1], staircase),
        ("looped-bfs", &[1, 2, 3], staircase),
        ("interleaved-1f1b", &[1, 2, 3], staircase),
        ("zb-h1", &[1], split),
        ("interleaved-zb", &[1, 2, 3], split),
        ("zb-h2", &[1], |ranks, _, [f, ..]| (ranks - 1.0) * f),
        ("zbv", &[2], |ranks, _, [f, ..]| (ranks - 1.0) * f / 2.0),
    ];
    for &(name, turns, form) in cases {
        for ranks in 1..=8 {
            for &turns in turns {
                let schedule = schedule(name, ranks, 4 * ranks, turns);
                let times = [1.0; 3];
                let want = form(ranks as f64, turns as f64, times);
                for idle in simulated(&schedule, times, 0.0).idle() {
                    close(idle, want, 1e-9, &format!("{name}, {ranks} ranks, {turns} stages a rank"));
                }
            }
        }
    }
}

/// The same where the costs differ, for the schedules whose form holds then.
#[test]
fn idle_times_of_costs_that_differ() {
    let times = [1.0, 1.25, 0.75];
    for (name, want) in [("gpipe", 3.0), ("1f1b", 3.0), ("interleaved-1f1b", 1.5), ("zb-h1", 1.5)] {
        let turns = if name == "interleaved-1f1b" { 2 } else { 1 };
        for ranks in 2..=6 {
            for idle in simulated(&schedule(name, ranks, 3 * ranks, turns), times, 0.0).idle() {
                close(idle, want * (ranks as f64 - 1.0), 1e-9, name);
            }
        }
    }
}

/// Messages that arrive late cost an eager schedule their own time once in each direction, and others a part of each
/// microbatch.
#[test]
fn eager_forwards_hide_messages() {
    let idle = |name: &str, ranks: usize, latency: f64| {
        let idle = simulated(&schedule(name, ranks, 8 * ranks, 1), [1.0; 3], latency).idle();
        idle.into_iter().fold(0.0, f64::max)
    };
    for ranks in 2..=8 {
        for latency in [0.05, 0.2, 0.5] {
            let got = idle("eager-1f1b", ranks, latency);
            close(
                got,
                (ranks as f64 - 1.0) * (3.0 + 2.0 * latency),
                1e-9,
                &format!("{ranks} ranks, {latency}"),
            );
            assert!(got < idle("1f1b", ranks, latency), "{ranks} ranks, {latency}");
        }
    }
}

/// The most that the worst rank holds.
#[test]
fn peaks() {
    type Form = fn(usize, usize, usize) -> f64;
    let cases: &[(&str, &[usize], Form)] = &[
        ("gpipe", &[1], |_, microbatches, _| microbatches as f64),
        ("1f1b", &[1], |ranks, microbatches, _| ranks.min(microbatches) as f64),
        ("eager-1f1b", &[1], |ranks, _, _| 2.0 * ranks as f64 - 1.0),
        ("looped-bfs", &[1, 2, 3], |_, microbatches, _| microbatches as f64),
        ("interleaved-1f1b", &[1, 2, 3], |ranks, _, turns| {
            ranks as f64 + (ranks as f64 - 1.0) / turns as f64
        }),
        ("zb-h1", &[1], |ranks, _, _| ranks as f64),
        ("zb-h2", &[1], |ranks, _, _| 2.0 * ranks as f64 - 1.0),
        ("interleaved-zb", &[1, 2, 3], |ranks, _, _| ranks as f64),
        ("zbv", &[2], |ranks, _, _| ranks as f64),
        ("v-half", &[2], |ranks, _, _| ((ranks + 2) / 2) as f64),
        ("v-min", &[2], |ranks, _, _| ((ranks + 4) / 3) as f64),
    ];
    for &(name, turns, form) in cases {
        for ranks in 1..=12 {
            for &turns in turns {
                let microbatches = 2 * ranks;
                let peaks =
                    simulated(&schedule(name, ranks, microbatches, turns), [1.0; 3], 0.0).peak_activations();
                let worst = peaks.into_iter().fold(0.0, f64::max);
                let want = form(ranks, microbatches, turns);
                assert_eq!(
                    worst, want,
                    "{name}, {ranks} ranks, {microbatches} microbatches, {turns} stages a rank"
                );
            }
        }
    }
}

/// The schedules of little memory hold no more for few microbatches, and their bubbles are below half and two thirds of
/// that of 1F1B where the memory of their sizes allows it.
#[test]
fn little_memory() {
    for (name, peak, part) in [("v-half", 2, 0.5), ("v-min", 3, 2.0 / 3.0)] {
        for ranks in 1..=16 {
            for microbatches in [1, 2, 3, ranks, 2 * ranks + 1, 32] {
                let timeline = simulated(&schedule(name, ranks, microbatches, 2), [1.0; 3], 0.0);
                let most = ((ranks + if peak == 2 { 2 } else { 4 }) / peak) as f64;
                let what = format!("{name}, {ranks} ranks, {microbatches} microbatches");
                assert!(timeline.peak_activations().iter().all(|&held| held <= most), "{what}");
                if microbatches >= ranks {
                    let of_1f1b = 3.0 * (ranks as f64 - 1.0);
                    let idle = timeline.idle().into_iter().fold(0.0, f64::max);
                    // A rank number that the paper's offsets must pause for costs a few units more.
                    assert!(idle <= part * of_1f1b + 1.5, "{what}: {idle} of {of_1f1b}");
                }
            }
        }
    }
}
