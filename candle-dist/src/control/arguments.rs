//! The arguments of the processes of a job, which must be alike: otherwise each rank would compute something else.
use super::limits::clipped;
use crate::launch::InitOptions;
use itertools::{EitherOrBoth, Itertools};
use sha2::{Digest, Sha256};

/// The variable that allows unlike arguments.
const UNLIKE: &str = "CANDLE_DIST_UNLIKE_ARGUMENTS";
/// The most arguments that are compared one by one; more are compared as one.
const MOST: usize = 1024;
/// The most bytes of an argument in an error.
const MAX_SHOWN: usize = 100;

/// Returns the arguments of this process, each as a quoted text. `None` if they may be unlike those of others.
pub(super) fn own(options: &InitOptions) -> Option<Vec<String>> {
    if std::env::var(UNLIKE).is_ok_and(|value| value.trim() == "1") {
        return None;
    }
    let own = match &options.arguments {
        Some(arguments) => arguments.iter().map(|argument| format!("{argument:?}")).collect_vec(),
        // A process that no launcher tells its rank may have it as an argument.
        None if options.explicit.is_some() => return None,
        // Bytes that are no text are quoted too.
        None => std::env::args_os().skip(1).map(|argument| format!("{argument:?}")).collect_vec(),
    };
    if own.len() <= MOST {
        return Some(own);
    }
    Some(vec![format!(
        "({} arguments with the digest {})",
        own.len(),
        digest(&own.iter().format(" ").to_string())
    )])
}

/// Returns what other processes get of arguments: they may have secrets, and the connection is not encrypted.
pub(super) fn digests(own: &[String]) -> Vec<String> {
    own.iter().map(|argument| digest(argument)).collect()
}

fn digest(text: &str) -> String {
    Sha256::digest(text).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the error if a rank has other arguments than rank 0, from its digests and the texts of rank 0.
pub(super) fn difference(rank: usize, theirs: Option<&[String]>, ours: Option<&[String]>) -> Option<String> {
    let (theirs, ours) = (theirs?, ours?);
    let known = digests(ours);
    let at = theirs
        .iter()
        .zip_longest(&known)
        .position(|pair| !matches!(pair, EitherOrBoth::Both(a, b) if a == b))?;
    let count =
        |all: &[String]| format!("only {} argument{}", all.len(), if all.len() == 1 { "" } else { "s" });
    let shown = match ours.get(at) {
        Some(argument) => {
            // With the flag before a value, and nothing else.
            let flag =
                at.checked_sub(1).map(|before| &ours[before]).filter(|before| before.starts_with("\"-"));
            flag.into_iter().chain([argument]).map(|text| clipped(text.clone(), MAX_SHOWN)).join(" ")
        }
        None => count(ours),
    };
    let other = match (theirs.get(at), ours.get(at)) {
        (Some(_), Some(_)) => "another one".to_string(),
        (Some(_), None) => "more".to_string(),
        (None, _) => count(theirs),
    };
    Some(format!(
        "rank {rank} was started with other arguments than rank 0: rank 0 has {shown}, and rank {rank} has {other}; start all \
         ranks with the same ones, name those that must be alike with InitOptions::arguments, or set {UNLIKE}=1 if they may \
         be unlike"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Vec<String> {
        text.split(' ').map(|argument| format!("{argument:?}")).collect()
    }

    #[test]
    fn the_first_difference_is_told_with_the_flag_before_it() {
        let told = |theirs: &str, ours: &str| difference(2, Some(&digests(&list(theirs))), Some(&list(ours)));
        assert_eq!(told("train --seed 1", "train --seed 1"), None);
        for (theirs, ours, expected) in [
            (
                "train --seed 2 --x",
                "train --seed 1 --y",
                r#"rank 0 has "--seed" "1", and rank 2 has another one; "#,
            ),
            ("train b", "train a", r#"rank 0 has "a", and rank 2 has another one; "#),
            ("train", "train --seed 1", r#"rank 0 has "--seed", and rank 2 has only 1 argument; "#),
            ("train --seed", "train", "rank 0 has only 1 argument, and rank 2 has more; "),
        ] {
            let text = told(theirs, ours).unwrap_or_default();
            assert!(text.starts_with("rank 2 was started") && text.contains(expected), "{text}");
        }
        assert_eq!(difference(1, None, Some(&list("a"))), None);
        assert_eq!(difference(1, Some(&digests(&list("a"))), None), None);
    }

    #[test]
    fn the_texts_of_arguments_are_not_sent() {
        let sent = digests(&list("--password hunter2"));
        assert!(sent.len() == 2 && sent.iter().all(|digest| digest.len() == 16), "{sent:?}");
    }

    #[test]
    fn many_arguments_are_compared_as_one() {
        let of = |last: &str| own(&InitOptions::new().arguments(&[&["x"; MOST][..], &[last]].concat()));
        assert_eq!(of("a"), of("a"));
        assert_ne!(of("a"), of("b"));
        assert!(of("a").is_some_and(|own| own.len() == 1 && own[0].len() < 200));
    }

    #[test]
    fn a_program_that_knows_its_rank_may_have_it_as_an_argument() {
        let explicit = InitOptions::explicit("127.0.0.1:29500", 1, 2);
        assert_eq!(own(&explicit), None);
        assert_eq!(own(&explicit.arguments(&["a"])), Some(list("a")));
    }
}
