//! What ops do to the layouts of their inputs, and what that moves.
use crate::placement::Placements;
use crate::redistribute::conversion_cost;
use crate::rules::Plan;
use crate::{DTensor, Placement};
use itertools::Itertools;
use std::cell::{Cell, RefCell};
use std::fmt;

/// What the ops of a closure did: one [`Step`] each, in order.
#[derive(Debug, Clone, Default)]
pub struct Explanation {
    /// The ops.
    pub steps: Vec<Step>,
}

/// What one op did to the layouts of its inputs.
#[derive(Debug, Clone)]
pub struct Step {
    /// The op.
    pub op: &'static str,
    /// Its inputs.
    pub inputs: Vec<Conversion>,
    /// The outputs with their layouts.
    pub outputs: Vec<String>,
}

/// How one input was brought to the layout that the op's rule asks for.
#[derive(Debug, Clone)]
pub struct Conversion {
    /// The input with its layout.
    pub input: String,
    /// Where it was.
    pub from: Placements,
    /// Where the rule wants it.
    pub to: Placements,
    /// The bytes that a rank receives for it in the forward pass, at most; less if an earlier use shares the result.
    pub bytes: usize,
    /// The axes on which its gradient is added up over the ranks in the backward pass.
    pub gradient_sums: Vec<String>,
}

impl Explanation {
    /// The bytes that a rank receives in the forward pass, at most.
    pub fn bytes(&self) -> usize {
        self.steps.iter().flat_map(|step| &step.inputs).map(|input| input.bytes).sum()
    }
}

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
    static STEPS: RefCell<Vec<Step>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` and tells what each op in it chose and what that moves.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{DTensor, Result, Shard, explain};
///
/// World::local(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let x = Tensor::ones((4, 6), DType::F32, &Device::Cpu)?;
///     let x = DTensor::distribute(&x, &mesh, &[Shard(1)])?;
///     let (out, explanation) = explain(|| x.causal_softmax(1.0));
///     out?;
///     assert_eq!(explanation.steps[0].op, "causal_softmax");
///     assert!(explanation.bytes() > 0, "{explanation}");
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub fn explain<R>(f: impl FnOnce() -> R) -> (R, Explanation) {
    /// Puts an enclosing `explain` back, also when `f` panics.
    struct Outer(bool, Vec<Step>);
    impl Drop for Outer {
        fn drop(&mut self) {
            ON.set(self.0);
            STEPS.replace(std::mem::take(&mut self.1));
        }
    }
    let mut outer = Outer(ON.replace(true), STEPS.take());
    let result = f();
    let steps = STEPS.take();
    if outer.0 {
        outer.1.extend(steps.iter().cloned());
    }
    (result, Explanation { steps })
}

/// Notes what an op does, if somebody asked.
pub(crate) fn note(op: &'static str, inputs: &[&DTensor], plan: &Plan) {
    if !ON.get() {
        return;
    }
    let names = |axes: u32| {
        let mesh = inputs[0].mesh();
        mesh.names().iter().enumerate().filter(|(axis, _)| axes & (1 << axis) != 0).map(|(_, n)| n.clone()).collect()
    };
    let convert = |(input, lay): (&&DTensor, &crate::rules::Lay)| {
        let to: Placements = lay.targets.iter().map(|target| target.placement).collect();
        let moved = |axis: usize| conversion_cost(input.spec(), axis, to[axis]).unwrap_or(0);
        let views = (0..to.len()).filter(|&axis| to[axis] == Placement::Replicate && input.tracked());
        let sums: u32 = views.map(|axis| 1 << axis).sum::<u32>() & plan.vary & !input.varying();
        Conversion {
            input: input.spec().to_string(),
            from: Placements::from_slice(input.placements()),
            bytes: (0..to.len()).map(moved).sum(),
            to,
            gradient_sums: names(sums),
        }
    };
    let inputs_of = inputs.iter().zip(&plan.inputs).map(convert).collect();
    let outputs = plan.outs.iter().map(|out| out.to_string()).collect();
    STEPS.with_borrow_mut(|steps| steps.push(Step { op, inputs: inputs_of, outputs }));
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.steps.iter().try_for_each(|step| writeln!(f, "{step}"))?;
        write!(f, "{} bytes received by a rank at most", self.bytes())
    }
}

impl fmt::Display for Step {
    /// For example `matmul -> f32[4, 4] P(sum)@tp`, and a line for each input.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.op, self.outputs.join(", "))?;
        for input in &self.inputs {
            write!(f, "\n    {}", input.input)?;
            if input.from != input.to {
                write!(f, " -> ({}), {} bytes", input.to.iter().join(", "), input.bytes)?;
            }
            if !input.gradient_sums.is_empty() {
                write!(f, ", gradient summed over {}", input.gradient_sums.join(", "))?;
            }
        }
        Ok(())
    }
}
