//! The arguments of the processes of a job, which must be alike: otherwise each rank would compute something else.
use super::limits::clipped;
use crate::launch::InitOptions;
use itertools::{EitherOrBoth, Itertools};
use sha2::{Digest, Sha256};

/// The variable that allows unlike arguments.
const UNLIKE: &str = "CANDLE_DIST_UNLIKE_ARGUMENTS";
/// The most bytes of arguments that are sent; of longer ones only a digest is.
const MAX_SENT: usize = 64 << 10;
/// The most bytes of an argument in an error.
const MAX_SHOWN: usize = 100;

/// Returns the arguments of this process, each as a quoted text. `None` if they may be unlike those of others.
pub(super) fn own(options: &InitOptions) -> Option<Vec<String>> {
    if std::env::var(UNLIKE).is_ok_and(|value| value.trim() == "1") {
        return None;
    }
    let own = match &options.arguments {
        Some(arguments) => arguments.iter().map(|argument| format!("{argument:?}")).collect_vec(),
        // Bytes that are no text are quoted too.
        None => std::env::args_os().skip(1).map(|argument| format!("{argument:?}")).collect_vec(),
    };
    if own.iter().map(String::len).sum::<usize>() <= MAX_SENT {
        return Some(own);
    }
    let mut hash = Sha256::new();
    own.iter().for_each(|argument| hash.update(argument));
    Some(vec![format!("({} arguments with the SHA-256 digest {:x})", own.len(), hash.finalize())])
}

/// Returns the error if a rank has other arguments than rank 0.
pub(super) fn difference(rank: usize, theirs: Option<&[String]>, ours: Option<&[String]>) -> Option<String> {
    let (theirs, ours) = (theirs?, ours?);
    let at = theirs.iter().zip_longest(ours).position(|pair| !matches!(pair, EitherOrBoth::Both(a, b) if a == b))?;
    // With the flag before a value.
    let shown = |all: &[String]| match all.get(at) {
        Some(_) => all[at.saturating_sub(1)..=at].iter().map(|text| clipped(text.clone(), MAX_SHOWN)).join(" "),
        None => format!("only {} arguments", all.len()),
    };
    Some(format!(
        "rank {rank} was started with other arguments than rank 0: it has {}, and rank 0 has {}; start all ranks with the \
         same ones, or set {UNLIKE}=1 if they may be unlike",
        shown(theirs),
        shown(ours)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_told_with_the_flag_before_it() {
        let list = |text: &str| text.split(' ').map(str::to_string).collect_vec();
        let told = |theirs: &str, ours: &str| difference(2, Some(&list(theirs)), Some(&list(ours)));
        assert_eq!(told("train --seed 1", "train --seed 1"), None);
        let text = told("train --seed 2 --x", "train --seed 1 --y").unwrap_or_default();
        assert!(
            text.contains("rank 2 was started") && text.contains("it has --seed 2, and rank 0 has --seed 1"),
            "{text}"
        );
        let text = told("train", "train --seed 1").unwrap_or_default();
        assert!(text.contains("it has only 1 arguments, and rank 0 has train --seed"), "{text}");
        assert_eq!(difference(1, None, Some(&list("a"))), None);
        assert_eq!(difference(1, Some(&list("a")), None), None);
    }

    #[test]
    fn long_arguments_are_compared_by_a_digest() {
        let of = |last: &str| own(&InitOptions::new().arguments(&[&"x".repeat(MAX_SENT), last]));
        assert_eq!(of("a"), of("a"));
        assert_ne!(of("a"), of("b"));
        assert!(of("a").is_some_and(|own| own.len() == 1 && own[0].len() < 200));
    }
}
