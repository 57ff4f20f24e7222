//! Reports of how ops change the layouts of their inputs, and of all communication.
use crate::layout::{Placements, Spec};
use candle_dist::comm::{Event, Log, Part};
use itertools::Itertools;
use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

/// A report of a closure: one [`ExplainedOp`] per op and per change of layout, in the order in which they ended.
#[derive(Debug, Clone, Default)]
pub struct Explanation {
    /// The ops. Communication outside of any op is in entries called `other`, that of backward passes in `backward`.
    pub ops: Vec<ExplainedOp>,
}

/// The changes of one op to the layouts of its inputs, and its communication.
#[derive(Debug, Clone)]
pub struct ExplainedOp {
    /// The op.
    pub op: &'static str,
    /// Its inputs.
    pub inputs: Vec<ExplainedInput>,
    /// The outputs with their layouts.
    pub outputs: Vec<String>,
    /// The calls that this rank made to lay out the inputs.
    pub input_calls: Vec<Event>,
    /// Its other calls, without those of inner ops.
    pub own_calls: Vec<Event>,
}

/// How one input is brought to the layout that the op's rule requires.
#[derive(Debug, Clone)]
pub struct ExplainedInput {
    /// The input with its layout.
    pub input: String,
    /// Its placements before.
    pub from: Placements,
    /// The placements that the rule requires.
    pub to: Placements,
    /// The collectives that move it, with the axes and the bytes that a rank receives.
    pub moves: Vec<String>,
    /// The bytes that this rank passes to these collectives; zero if an earlier use shares the result.
    pub bytes: usize,
    /// The axes on which its gradient is summed over the ranks in the backward pass.
    pub gradient_sums: Vec<String>,
    /// The layout after the moves.
    pub(crate) laid_out: String,
}

impl ExplainedOp {
    /// Returns the calls that this rank made in the op.
    pub fn calls(&self) -> impl Iterator<Item = &Event> {
        self.input_calls.iter().chain(&self.own_calls).filter(|call| call.is_counted())
    }

    /// Returns whether the op communicates, or sums a gradient in the backward pass.
    pub fn moves(&self) -> bool {
        let moving = |input: &ExplainedInput| !input.moves.is_empty() || !input.gradient_sums.is_empty();
        self.calls().next().is_some() || self.inputs.iter().any(moving)
    }

    /// Returns the bytes that this rank passed to collectives in the op.
    pub fn bytes(&self) -> usize {
        self.calls().map(|call| call.bytes).sum()
    }
}

impl Explanation {
    /// Returns the bytes that this rank passed to collectives, as [`comm::record`](candle_dist::comm::record) counts
    /// them.
    pub fn bytes(&self) -> usize {
        self.ops.iter().map(ExplainedOp::bytes).sum()
    }

    /// Returns the calls of all ops.
    pub fn calls(&self) -> impl Iterator<Item = &Event> {
        self.ops.iter().flat_map(ExplainedOp::calls)
    }
}

/// An explanation under construction.
#[derive(Default)]
struct ExplainState {
    ops: Vec<ExplainedOp>,
    /// The open ops, outermost first, after the frame of calls outside of any op.
    frames: Vec<OpFrame>,
}

/// The calls of one open op; its log pauses while an inner op is open.
struct OpFrame {
    log: Option<Log>,
    input_calls: Vec<Event>,
    own_calls: Vec<Event>,
}

impl OpFrame {
    fn new() -> Self {
        Self { log: Some(Log::start()), input_calls: Vec::new(), own_calls: Vec::new() }
    }

    fn rest(&mut self) {
        let calls = self.log.take().map(Log::finish).unwrap_or_default();
        self.own_calls.extend(calls.into_iter().filter(|call| call.part != Part::Check));
    }

    fn go_on(&mut self) {
        self.log.get_or_insert_with(Log::start);
    }
}

impl ExplainState {
    /// Begins an op.
    fn push(&mut self) {
        self.rest();
        self.frames.push(OpFrame::new());
    }

    /// Ends the innermost op and returns its calls.
    fn pop(&mut self) -> (Vec<Event>, Vec<Event>) {
        let ended = self.frames.pop().map(|mut frame| {
            frame.rest();
            (frame.input_calls, frame.own_calls)
        });
        if let Some(frame) = self.frames.last_mut() {
            frame.go_on();
        }
        ended.unwrap_or_default()
    }

    /// Pauses the innermost op's log; calls outside of ops become an entry.
    fn rest(&mut self) {
        let outside = self.frames.len() == 1;
        let Some(frame) = self.frames.last_mut() else { return };
        frame.rest();
        if outside && !frame.own_calls.is_empty() {
            let (inputs, outputs, input_calls) = (Vec::new(), Vec::new(), Vec::new());
            let own_calls = std::mem::take(&mut frame.own_calls);
            self.ops.push(ExplainedOp { op: "other", inputs, outputs, input_calls, own_calls });
        }
    }
}

thread_local! {
    static STATE: RefCell<Option<ExplainState>> = const { RefCell::new(None) };
}

/// Runs `f` and reports how each op in it laid out its inputs and what was sent.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::{World, comm};
/// use candle_shard::{DTensor, Result, Shard, explain};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let x = Tensor::ones((4, 6), DType::F32, &Device::Cpu)?;
///     let x = DTensor::distribute(&x, &mesh, &[Shard(1)])?;
///     let ((out, explanation), counts) = comm::record(|| explain(|| x.causal_softmax(1.0)));
///     out?;
///     assert_eq!(explanation.ops[0].op, "causal_softmax");
///     assert_eq!(explanation.ops[0].inputs[0].bytes, 4 * 3 * 4, "{explanation}"); // its half is gathered
///     assert_eq!(explanation.bytes(), counts.total_bytes());
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub fn explain<R>(f: impl FnOnce() -> R) -> (R, Explanation) {
    /// Restores an enclosing `explain`, even if `f` panics.
    struct Outer(Option<ExplainState>);
    impl Drop for Outer {
        fn drop(&mut self) {
            if let Some(frame) = self.0.as_mut().and_then(|state| state.frames.last_mut()) {
                frame.go_on();
            }
            STATE.replace(self.0.take());
        }
    }
    let mut outer = Outer(STATE.take());
    outer.0.iter_mut().for_each(ExplainState::rest);
    let mut state = ExplainState::default();
    state.push();
    STATE.replace(Some(state));
    let result = f();
    let mut state = STATE.take().unwrap_or_default();
    state.rest();
    let ops = state.ops;
    if let Some(outer) = &mut outer.0 {
        outer.ops.extend(ops.iter().cloned());
    }
    (result, Explanation { ops })
}

/// An op that is recorded until it is dropped.
pub(crate) struct OpGuard {
    op: &'static str,
    inputs: Vec<ExplainedInput>,
    outputs: Vec<String>,
}

/// Begins an op, if an explanation is being recorded.
pub(crate) fn open(op: &'static str) -> Option<OpGuard> {
    let asked = STATE.with_borrow_mut(|state| state.as_mut().map(ExplainState::push).is_some());
    asked.then(|| OpGuard { op, inputs: Vec::new(), outputs: Vec::new() })
}

impl OpGuard {
    /// Records how the inputs are laid out, and the calls that move them.
    pub(crate) fn note<'s>(
        &mut self,
        inputs: impl IntoIterator<Item = ExplainedInput>,
        outputs: impl IntoIterator<Item = &'s Arc<Spec>>,
    ) {
        self.inputs.extend(inputs);
        self.outputs.extend(outputs.into_iter().map(|out| out.to_string()));
    }

    /// Records that the inputs are laid out.
    pub(crate) fn laid_out(&mut self) {
        STATE.with_borrow_mut(|state| {
            if let Some(frame) = state.as_mut().and_then(|state| state.frames.last_mut()) {
                frame.rest();
                frame.input_calls = std::mem::take(&mut frame.own_calls);
                frame.go_on();
            }
        });
    }
}

impl Drop for OpGuard {
    fn drop(&mut self) {
        let (inputs, outputs) = (std::mem::take(&mut self.inputs), std::mem::take(&mut self.outputs));
        STATE.with_borrow_mut(|state| {
            let Some(state) = state else { return };
            let (input_calls, own_calls) = state.pop();
            state.ops.push(ExplainedOp { op: self.op, inputs, outputs, input_calls, own_calls });
        });
    }
}

impl fmt::Display for Explanation {
    /// Prints the ops that move something, now or in the backward pass; `{:#}` prints all of them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_whole = f.alternate();
        let mut listed = self.ops.iter().filter(|op| is_whole || op.moves());
        listed.try_for_each(|op| writeln!(f, "{op}"))?;
        write!(f, "{} bytes passed to collectives by this rank", self.bytes())
    }
}

impl fmt::Display for ExplainedOp {
    /// Prints the op with its outputs, for example `matmul -> f32[4, 4] P(sum)@tp`, then a line per input and one for
    /// the calls.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.op)?;
        if !self.outputs.is_empty() {
            write!(f, " -> {}", self.outputs.join(", "))?;
        }
        for input in &self.inputs {
            write!(f, "\n    {}", input.input)?;
            if input.laid_out != input.input {
                write!(f, " -> {}", input.laid_out)?;
            }
            input.moves.iter().try_for_each(|name| write!(f, ", {name}"))?;
            if !input.gradient_sums.is_empty() {
                write!(f, ", gradient summed over {}", input.gradient_sums.join(", "))?;
            }
        }
        let calls = self.calls().map(|call| format!("{} of {} bytes", call.op, call.bytes)).join(", ");
        if calls.is_empty() { Ok(()) } else { write!(f, "\n    sent: {calls}") }
    }
}
