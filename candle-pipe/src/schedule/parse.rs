//! Parser of actions.
use crate::action::{Action, Compute, Flow, Message, Pass};
use crate::{Error, Result};
use std::str::FromStr;

/// The parts of an action's text before, in and after its name.
struct ActionText<'a> {
    stage: usize,
    name: &'a str,
    microbatch: Option<usize>,
    /// The sign before the other stage of a message, and that stage.
    peer: Option<(char, usize)>,
}

impl FromStr for Action {
    type Err = Error;

    /// Parses the whole text, ignoring surrounding whitespace.
    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim();
        let action = match text.strip_prefix('(') {
            Some(rest) => overlap(rest),
            None => parts(text).and_then(single),
        };
        action.ok_or_else(|| {
            Error::Schedule(format!(
                "{text:?} is no action: write the stage, what it does and the microbatch, such as 2F0, 1SEND_F3, \
                 0UNSHARD or (0F3;7B0)OVERLAP_F_B"
            ))
        })
    }
}

impl TryFrom<String> for Action {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

fn overlap(rest: &str) -> Option<Action> {
    let (forward, backward) = rest.strip_suffix(")OVERLAP_F_B")?.split_once(';')?;
    let compute = |text: &str| match parts(text.trim()).and_then(single) {
        Some(Action::Compute(compute)) => Some(compute),
        _ => None,
    };
    let (forward, backward) = (compute(forward)?, compute(backward)?);
    let fits = forward.makes() == Some(Flow::Activation) && backward.makes() == Some(Flow::Gradient);
    fits.then_some(Action::Overlap([forward, backward]))
}

fn parts(text: &str) -> Option<ActionText<'_>> {
    let (stage, rest) = digits(text);
    let (name, rest) = split(rest, |c| c.is_ascii_uppercase() || c == '_');
    let (microbatch, rest) = digits(rest);
    let microbatch = if microbatch.is_empty() { None } else { Some(microbatch.parse().ok()?) };
    let mut rest = rest.chars();
    let peer = match rest.next() {
        Some(sign) => Some((sign, number(rest.as_str())?)),
        None => None,
    };
    Some(ActionText { stage: number(stage)?, name, microbatch, peer })
}

fn single(parts: ActionText<'_>) -> Option<Action> {
    let ActionText { stage, name, microbatch, peer } = parts;
    let compute = |pass| {
        let compute = Compute { stage, pass, microbatch: microbatch? };
        peer.is_none().then_some(Action::Compute(compute))
    };
    let whole = |action| (microbatch.is_none() && peer.is_none()).then_some(action);
    match name {
        "F" => compute(Pass::Forward),
        "B" => compute(Pass::Backward),
        "I" => compute(Pass::Input),
        "W" => compute(Pass::Weight),
        "SEND_F" => outgoing(Flow::Activation, &parts).map(Action::Send),
        "SEND_B" => outgoing(Flow::Gradient, &parts).map(Action::Send),
        "WAIT_SEND_F" => outgoing(Flow::Activation, &parts).map(Action::WaitSend),
        "WAIT_SEND_B" => outgoing(Flow::Gradient, &parts).map(Action::WaitSend),
        "RECV_F" => incoming(Flow::Activation, &parts).map(Action::Recv),
        "RECV_B" => incoming(Flow::Gradient, &parts).map(Action::Recv),
        "UNSHARD" => whole(Action::Unshard(stage)),
        "RESHARD" => whole(Action::Reshard(stage)),
        "REDUCE_GRAD" => whole(Action::ReduceGrad(stage)),
        "WAIT_REDUCE_GRAD" => whole(Action::WaitReduceGrad(stage)),
        "SHARED_REDUCE" => whole(Action::SharedReduce(stage)),
        _ => None,
    }
}

fn outgoing(flow: Flow, parts: &ActionText<'_>) -> Option<Message> {
    let from = parts.stage;
    let to = match (parts.peer, flow) {
        (None, Flow::Activation) => from.checked_add(1)?,
        (None, Flow::Gradient) => from.checked_sub(1)?,
        (Some(('>', to)), _) => to,
        (Some(_), _) => return None,
    };
    message(flow, from, to, parts)
}

fn incoming(flow: Flow, parts: &ActionText<'_>) -> Option<Message> {
    let to = parts.stage;
    let from = match (parts.peer, flow) {
        (None, Flow::Activation) => to.checked_sub(1)?,
        (None, Flow::Gradient) => to.checked_add(1)?,
        (Some(('<', from)), _) => from,
        (Some(_), _) => return None,
    };
    message(flow, from, to, parts)
}

fn message(flow: Flow, from: usize, to: usize, parts: &ActionText<'_>) -> Option<Message> {
    let forwards = match flow {
        Flow::Activation => from < to,
        Flow::Gradient => to < from,
    };
    forwards.then_some(Message { flow, from, to, microbatch: parts.microbatch? })
}

/// Parses a text that is only a number.
fn number(text: &str) -> Option<usize> {
    // `parse` alone would accept a sign.
    if text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}

fn digits(text: &str) -> (&str, &str) {
    split(text, |c| c.is_ascii_digit())
}

/// Splits off the longest prefix of matching characters.
fn split(text: &str, inside: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !inside(c)).unwrap_or(text.len()))
}
