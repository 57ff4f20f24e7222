//! Errors of ranks: whether they are refusals, and their reasons without places.
use candle_dist::Cause;
use std::fmt;

/// An error of a rank.
#[derive(Debug, Clone)]
pub(super) struct RankFailure {
    pub(super) text: String,
    pub(super) root: FailureSource,
}

/// Where an error comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FailureSource {
    /// The library refuses the request.
    Refusal,
    /// An op of candle failed.
    Candle,
    /// Another rank failed, and told this one.
    Told,
    /// Another rank ended, ranks wait for each other, or their calls differ.
    Lost,
}

impl From<candle_pipe::Error> for RankFailure {
    fn from(error: candle_pipe::Error) -> Self {
        Self { text: error.to_string(), root: root_of(&error) }
    }
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl RankFailure {
    /// Returns the first line without places.
    pub(super) fn reason(&self) -> &str {
        without_places(self.text.lines().next().unwrap_or_default())
    }
}

fn root_of(error: &candle_pipe::Error) -> FailureSource {
    use candle_pipe::Error;
    match error {
        Error::Node { error, .. } | Error::Action { error, .. } => root_of(error),
        Error::Dist(error) | Error::Shard(candle_shard::Error::Dist(error)) => of_dist(error),
        Error::Candle(error) | Error::Shard(candle_shard::Error::Candle(error)) => of_candle(error),
        _ => FailureSource::Refusal,
    }
}

fn of_dist(error: &candle_dist::Error) -> FailureSource {
    match error {
        candle_dist::Error::Candle(error) => of_candle(error),
        candle_dist::Error::Group(failure) => match failure.cause {
            Cause::Failed { .. } => FailureSource::Told,
            _ => FailureSource::Lost,
        },
        _ => FailureSource::Refusal,
    }
}

fn of_candle(error: &candle_core::Error) -> FailureSource {
    use candle_core::Error;
    match error {
        Error::WithBacktrace { inner, .. } | Error::Context { inner, .. } | Error::WithPath { inner, .. } => {
            of_candle(inner)
        }
        // Ops of candle wrap no errors; the libraries wrap theirs.
        Error::Wrapped(_) => FailureSource::Refusal,
        _ => FailureSource::Candle,
    }
}

/// Returns an error without the places at its start, such as `rank 1: `, `node "up": ` and
/// `0F0 (stage 0, forward of microbatch 0): `.
fn without_places(mut text: &str) -> &str {
    while let Some(rest) = after_rank(text).or_else(|| after_node(text)).or_else(|| after_action(text)) {
        text = rest;
    }
    text
}

fn after_rank(text: &str) -> Option<&str> {
    const AGREED: [&str; 2] = [" cannot run the step: ", " cannot be a replica: "];
    let (is_agreed, rank) = text.strip_prefix("pipe: ").map_or((false, text), |rest| (true, rest));
    let rank = rank.strip_prefix("rank ")?;
    let rest = rank.trim_start_matches(|c: char| c.is_ascii_digit());
    if rest.len() == rank.len() {
        return None;
    }
    let ends: &[&str] = if is_agreed { &AGREED } else { &[": ", " failed: "] };
    ends.iter().find_map(|end| rest.strip_prefix(end))
}

fn after_node(text: &str) -> Option<&str> {
    let name = text.strip_prefix("node \"")?;
    name.split_once("\": ").map(|(_, rest)| rest)
}

/// Actions begin with a stage, or with the computations that they overlap.
fn after_action(text: &str) -> Option<&str> {
    let (action, rest) = text.split_once(": ")?;
    let (name, computes) = action.split_once(' ').unwrap_or((action, ""));
    let is_action = name.starts_with(|c: char| c.is_ascii_digit() || c == '(')
        && name.contains(|c: char| c.is_ascii_uppercase())
        && name.chars().all(|c| c.is_ascii_digit() || c.is_ascii_uppercase() || "_<>;()".contains(c));
    let has_computes = computes.is_empty() || (computes.starts_with("(stage ") && computes.ends_with(')'));
    (is_action && has_computes).then_some(rest)
}

/// Returns the reason that all errors have, if they have one.
pub(super) fn one_reason<'a>(failures: &[&'a RankFailure]) -> Option<&'a str> {
    let reason = failures.first()?.reason();
    failures.iter().all(|failure| failure.reason() == reason).then_some(reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(lines: &[&str]) -> Option<String> {
        let failures: Vec<RankFailure> = lines
            .iter()
            .map(|line| RankFailure { text: (*line).to_string(), root: FailureSource::Refusal })
            .collect();
        one_reason(&failures.iter().collect::<Vec<_>>()).map(str::to_string)
    }

    #[test]
    fn a_reason_is_what_follows_the_places_of_all_errors() {
        let one = |lines: &[&str], reason: &str| assert_eq!(told(lines).as_deref(), Some(reason));
        one(&["rank 0: node \"a\": too wide", "rank 1 failed: too wide"], "too wide");
        one(&["no rows", "no rows"], "no rows");
        one(
            &[
                "rank 1 failed: rank 1: 0F0 (stage 0, forward of microbatch 0): node \"a\": up: too wide",
                "up: too wide",
            ],
            "up: too wide",
        );
        one(
            &[
                "rank 0: (0F1;0B0)OVERLAP_F_B (stage 0, forward of microbatch 1) (stage 0, backward of microbatch 0): odd",
                "odd",
            ],
            "odd",
        );
        one(
            &["pipe: rank 1 cannot run the step: microbatches: odd", "microbatches: odd"],
            "microbatches: odd",
        );
        assert_eq!(told(&["rank 0: too wide", "rank 1: too long"]), None);
        assert_eq!(told(&["up: too wide", "down: too wide"]), None);
        // Ends alone are no reason.
        let [a, z] = [
            "node \"a\": dtype mismatch in matmul, lhs: F32, rhs: BF16",
            "node \"z\": dtype mismatch in add, lhs: F64, rhs: BF16",
        ];
        assert_eq!(told(&[a, z]), None);
        assert_eq!(told(&[]), None);
    }

    #[test]
    fn errors_of_candle_are_no_refusals() {
        let candle = || candle_core::Error::Msg("no such dim".into());
        let shard = candle_shard::Error::from(candle());
        assert_eq!(root_of(&candle_pipe::Error::from(candle())), FailureSource::Candle);
        let node = candle_pipe::Error::Node { node: "a".into(), error: Box::new(shard.into()) };
        assert_eq!(root_of(&node), FailureSource::Candle);
        let refused = candle_shard::Error::Plan("no such layer".into());
        assert_eq!(root_of(&refused.clone().into()), FailureSource::Refusal);
        assert_eq!(
            root_of(&candle_pipe::Error::from(candle_core::Error::from(refused))),
            FailureSource::Refusal
        );
    }
}
