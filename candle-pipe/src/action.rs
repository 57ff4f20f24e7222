//! The actions of a rank.
use std::fmt;
use std::slice;

/// A computation of a stage for a microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pass {
    /// The outputs: `F`.
    Forward,
    /// The gradients of the inputs and of the parameters together: `B`.
    Backward,
    /// Only the gradients of the inputs: `I`.
    Input,
    /// The gradients of the parameters, after `I`: `W`.
    Weight,
}

/// A pass of a stage over a microbatch, such as `2F0`: stage 2, forward, microbatch 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Compute {
    /// The stage, counted from the start of the model.
    pub stage: usize,
    /// The computation.
    pub pass: Pass,
    /// The microbatch.
    pub microbatch: usize,
}

/// The content of a message between stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub enum Flow {
    /// Values, sent to a later stage: `F`.
    Activation,
    /// Gradients of values, sent back to the stage that computed the values: `B`.
    Gradient,
}

/// A message from one stage to another on a different rank.
///
/// Stages on one rank that use values of the same stage share one message, which names the first of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Message {
    /// The content.
    pub flow: Flow,
    /// The stage that computed the content.
    pub from: usize,
    /// The stage that needs the content.
    pub to: usize,
    /// The microbatch of the content.
    pub microbatch: usize,
}

/// The way of a message from stage to stage: the flow, the sender and the receiver. Messages of one way are
/// usually alike.
pub(crate) type StageRoute = (Flow, usize, usize);

impl Message {
    /// Returns the way of this message, which that of every microbatch has too.
    pub(crate) fn way(self) -> StageRoute {
        (self.flow, self.from, self.to)
    }

    /// Returns whether `compute` produces the content of this message.
    pub(crate) fn is_made_by(&self, compute: Compute) -> bool {
        (self.from, self.microbatch, Some(self.flow)) == (compute.stage, compute.microbatch, compute.makes())
    }
}

/// One entry of the action list of a rank.
///
/// [`Display`](fmt::Display) writes an action as PyTorch's text, and [`FromStr`](std::str::FromStr) reads all of these
/// texts. A message between stages that are not neighbors ends with the other stage: `0SEND_F3>2` goes from stage 0 to
/// stage 2, which has `2RECV_F3<0`.
///
/// | text | action |
/// |---|---|
/// | `2F0` `2B0` `2I0` `2W0` | [`Compute`](Self::Compute) of stage 2 and microbatch 0 |
/// | `(0F3;7B0)OVERLAP_F_B` | [`Overlap`](Self::Overlap) |
/// | `1SEND_F3` `2RECV_F3` `2SEND_B3` `1RECV_B3` | [`Send`](Self::Send) and [`Recv`](Self::Recv) of stages 1 and 2 |
/// | `1WAIT_SEND_F3` | [`WaitSend`](Self::WaitSend) |
/// | `1UNSHARD` `1RESHARD` `1REDUCE_GRAD` `1WAIT_REDUCE_GRAD` | for the parameters of stage 1 |
/// | `0SHARED_REDUCE` | [`SharedReduce`](Self::SharedReduce) of group 0 |
///
/// ```
/// use candle_pipe::schedule::{Action, Compute, Pass};
///
/// let action: Action = "2F0".parse()?;
/// assert_eq!(action, Action::Compute(Compute { stage: 2, pass: Pass::Forward, microbatch: 0 }));
/// assert!("2F0xyz".parse::<Action>().is_err());
/// # Ok::<(), candle_pipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Action {
    /// One computation.
    Compute(Compute),
    /// A forward and a backward that do not depend on each other, so that they may overlap.
    Overlap([Compute; 2]),
    /// Starts a send.
    Send(Message),
    /// Starts a receive.
    Recv(Message),
    /// Waits for a send.
    WaitSend(Message),
    /// Gathers the sharded parameters of a stage.
    Unshard(usize),
    /// Frees the gathered parameters of a stage.
    Reshard(usize),
    /// Starts to reduce the gradients of a stage over the replicas of the model.
    ReduceGrad(usize),
    /// Waits until the gradients of a stage are reduced.
    WaitReduceGrad(usize),
    /// Sums the gradients of a group of parameters that several stages share.
    SharedReduce(usize),
}

impl Action {
    /// Returns the passes of this action: none, one or two.
    pub fn computes(&self) -> &[Compute] {
        match self {
            Self::Compute(compute) => slice::from_ref(compute),
            Self::Overlap(pair) => pair,
            _ => &[],
        }
    }
}

impl Action {
    /// Returns the microbatch of a computation or a message; `None` for others, and for a pair of computations.
    pub(crate) fn microbatch(&self) -> Option<usize> {
        match self {
            Self::Compute(compute) => Some(compute.microbatch),
            Self::Send(message) | Self::Recv(message) | Self::WaitSend(message) => Some(message.microbatch),
            _ => None,
        }
    }
}

impl Compute {
    /// Returns what this computation produces for other stages, if anything.
    pub(crate) fn makes(self) -> Option<Flow> {
        match self.pass {
            Pass::Forward => Some(Flow::Activation),
            Pass::Backward | Pass::Input => Some(Flow::Gradient),
            Pass::Weight => None,
        }
    }

    /// Returns whether this is the last pass of the stage over the microbatch.
    pub(crate) fn is_last(self) -> bool {
        matches!(self.pass, Pass::Backward | Pass::Weight)
    }
}

impl Message {
    /// Returns whether the message goes to the next or to the previous stage.
    fn between_neighbors(self) -> bool {
        match self.flow {
            Flow::Activation => self.from.checked_add(1) == Some(self.to),
            Flow::Gradient => self.to.checked_add(1) == Some(self.from),
        }
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "F",
            Self::Backward => "B",
            Self::Input => "I",
            Self::Weight => "W",
        })
    }
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Activation => "F",
            Self::Gradient => "B",
        })
    }
}

impl fmt::Display for Compute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.pass, self.microbatch)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Compute(compute) => compute.fmt(f),
            Self::Overlap([forward, backward]) => write!(f, "({forward};{backward})OVERLAP_F_B"),
            Self::Send(message) => sent(f, "SEND", message),
            Self::WaitSend(message) => sent(f, "WAIT_SEND", message),
            Self::Recv(message) => {
                let Message { flow, from, to, microbatch } = message;
                write!(f, "{to}RECV_{flow}{microbatch}")?;
                if message.between_neighbors() { Ok(()) } else { write!(f, "<{from}") }
            }
            Self::Unshard(stage) => write!(f, "{stage}UNSHARD"),
            Self::Reshard(stage) => write!(f, "{stage}RESHARD"),
            Self::ReduceGrad(stage) => write!(f, "{stage}REDUCE_GRAD"),
            Self::WaitReduceGrad(stage) => write!(f, "{stage}WAIT_REDUCE_GRAD"),
            Self::SharedReduce(group) => write!(f, "{group}SHARED_REDUCE"),
        }
    }
}

fn sent(f: &mut fmt::Formatter<'_>, name: &str, message: Message) -> fmt::Result {
    let Message { flow, from, to, microbatch } = message;
    write!(f, "{from}{name}_{flow}{microbatch}")?;
    if message.between_neighbors() { Ok(()) } else { write!(f, ">{to}") }
}

impl From<Action> for String {
    fn from(action: Action) -> Self {
        action.to_string()
    }
}
