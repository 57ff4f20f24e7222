//! Programs with mistakes, each with the error that names it.
use candle_dist::{RankContext, World};
use std::fmt::Display;
use std::sync::Mutex;

/// The name of a mistake, the parts of the text that names it, and the program with it.
pub type Mistake<E> = (&'static str, &'static [&'static str], fn(&RankContext) -> Result<(), E>);

/// Runs a program on `ranks` ranks. Each of them must get an error with these parts.
///
/// # Panics
/// If a rank gets no error, or another one.
pub fn all_say<E: Display + Send>(
    ranks: usize,
    name: &str,
    parts: &[&str],
    program: impl Fn(&RankContext) -> Result<(), E> + Sync,
) {
    let texts = Mutex::new(vec![None; ranks]);
    let ran = World::threads(ranks).run(|ctx| {
        let ended = program(ctx);
        texts.lock().expect("no rank panics here")[ctx.rank()] =
            ended.as_ref().err().map(ToString::to_string);
        ended
    });
    assert!(ran.is_err(), "{name} is silent");
    for (rank, text) in texts.into_inner().expect("no rank panics here").into_iter().enumerate() {
        let text = text.unwrap_or_else(|| panic!("{name} is silent on rank {rank}"));
        parts.iter().for_each(|part| assert!(text.contains(part), "{name}, rank {rank}, {part:?}: {text}"));
    }
}

/// Runs each program on `ranks` ranks. Each rank must get an error with the parts of the mistake.
///
/// # Panics
/// If a rank gets no error, or another one.
pub fn on_all_ranks<E: Display + Send>(ranks: usize, mistakes: &[Mistake<E>]) {
    mistakes.iter().for_each(|(name, parts, program)| all_say(ranks, name, parts, program));
}

/// Runs each program on 2 ranks. One of them may end well. The error of the world must have the parts of the mistake.
///
/// # Panics
/// If there is no error, or another one.
pub fn of_the_world<E: Display + Send>(mistakes: &[Mistake<E>]) {
    for (name, parts, program) in mistakes {
        let error = World::threads(2).run(program).err().unwrap_or_else(|| panic!("{name} is silent"));
        let text = error.to_string();
        parts.iter().for_each(|part| assert!(text.contains(part), "{name}, {part:?}: {text}"));
    }
}
