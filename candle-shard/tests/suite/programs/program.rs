//! A random program: leaves in some layouts, ops on them, and a loss.
use super::table::{Call, Content, Entry};
use super::truth;
use candle_core::{DType, Tensor};
use candle_shard::{Placement, Replicate, Shard};
use itertools::Itertools;
use std::fmt;
use test_utils::Dice;
use test_utils::{Lay, lays, values};

/// The meshes of programs; the seed picks one.
const MESHES: [&[usize]; 8] = [&[2], &[3], &[4], &[2, 2], &[5], &[1, 3], &[2, 1], &[1]];

/// Ops of a program, and what may be the largest number of elements of a value.
const STEPS: [usize; 4] = [3, 4, 5, 6];
const MOST_ELEMENTS: usize = 600;

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Source {
    Leaf(usize),
    Step(usize),
}

#[derive(Clone)]
pub(crate) struct Leaf {
    pub(crate) shape: Vec<usize>,
    pub(crate) content: Content,
    pub(crate) lays: Vec<Lay>,
    /// Sizes of its own on an axis.
    pub(crate) sizes: Option<(usize, Vec<usize>)>,
    /// It lies in memory with gaps.
    pub(crate) strided: bool,
    seed: u64,
}

impl Leaf {
    /// The whole tensor.
    pub(crate) fn whole(&self) -> Tensor {
        match self.content {
            Content::Float => values(&self.shape, self.seed, DType::F64),
            Content::Ids(bound) => {
                let mut dice = Dice::new(self.seed);
                let ids = (0..self.shape.iter().product()).map(|_| dice.below(bound) as u32).collect_vec();
                Tensor::from_vec(ids, &self.shape[..], &candle_core::Device::Cpu).unwrap()
            }
        }
    }
}

#[derive(Clone)]
pub(crate) struct Step {
    pub(crate) entry: &'static Entry,
    pub(crate) inputs: Vec<Source>,
    pub(crate) numbers: Vec<usize>,
}

#[derive(Clone)]
pub(crate) struct Program {
    pub(crate) seed: u64,
    pub(crate) mesh: Vec<usize>,
    pub(crate) leaves: Vec<Leaf>,
    pub(crate) steps: Vec<Step>,
    /// The values that the loss sums up, with the layout of their weights.
    pub(crate) loss: Vec<(Source, Vec<Placement>)>,
    /// The last call is one that was made wrong, and not compared with one device.
    pub(crate) wrong: bool,
}

impl Program {
    /// The program of a seed, with what each value is on one device.
    pub(crate) fn new(seed: u64, entries: &[&'static Entry]) -> Self {
        let mut draw = Draw::new(seed);
        let steps = draw.dice.pick(&STEPS);
        while draw.program.steps.len() < steps {
            draw.step(entries);
        }
        draw.losses();
        if draw.dice.once_in(5) {
            draw.spoil();
        }
        draw.program
    }

    /// The weights of a value in the loss.
    pub(crate) fn weights(&self, at: usize, shape: &[usize]) -> Tensor {
        values(shape, 1000 + at as u64, DType::F64)
    }
}

/// A program that is being drawn.
struct Draw {
    dice: Dice,
    program: Program,
    of_leaves: Vec<Tensor>,
    of_steps: Vec<Tensor>,
}

impl Draw {
    fn new(seed: u64) -> Self {
        let mesh = MESHES[seed as usize % MESHES.len()].to_vec();
        let program = Program { seed, mesh, leaves: vec![], steps: vec![], loss: vec![], wrong: false };
        Self { dice: Dice::new(seed), program, of_leaves: vec![], of_steps: vec![] }
    }

    fn value(&self, source: Source) -> &Tensor {
        match source {
            Source::Leaf(at) => &self.of_leaves[at],
            Source::Step(at) => &self.of_steps[at],
        }
    }

    fn leaf(&mut self, shape: &[usize], content: Content) -> Source {
        let (dice, mesh) = (&mut self.dice, &self.program.mesh);
        let choices: Vec<Lay> = match content {
            Content::Float => [lays(shape.len()), vec![Lay::VaryingPartial]].concat(),
            Content::Ids(_) => (0..shape.len()).map(Shard).chain([Replicate]).map(Lay::At).collect(),
        };
        let lays = (0..mesh.len()).map(|_| dice.pick(&choices)).collect_vec();
        let whole = content == Content::Float && lays.iter().all(|lay| !lay.placement().is_partial());
        let cut = lays
            .iter()
            .position(|lay| lay.placement().shard_dim().is_some())
            .filter(|_| whole && dice.once_in(3));
        let sizes = cut.map(|axis| {
            let dim = lays[axis].placement().shard_dim().unwrap();
            let mut sizes = vec![0; mesh[axis]];
            (0..shape[dim]).for_each(|_| sizes[dice.below(mesh[axis])] += 1);
            (axis, sizes)
        });
        let seed = self.program.seed.wrapping_mul(31).wrapping_add(self.program.leaves.len() as u64);
        let strided = content == Content::Float && dice.once_in(3);
        let leaf = Leaf { shape: shape.to_vec(), content, lays, sizes, strided, seed };
        self.of_leaves.push(leaf.whole());
        self.program.leaves.push(leaf);
        Source::Leaf(self.of_leaves.len() - 1)
    }

    /// The values so far, the latest first.
    fn values(&self) -> Vec<Source> {
        let leaves =
            self.program.leaves.iter().enumerate().filter(|(_, leaf)| leaf.content == Content::Float);
        let leaves = leaves.map(|(at, _)| Source::Leaf(at));
        (0..self.of_steps.len()).rev().map(Source::Step).chain(leaves).collect()
    }

    /// A value of this shape: an earlier one, or a new leaf.
    fn input(&mut self, shape: &[usize], content: Content) -> Source {
        let fits = |&source: &Source| content == Content::Float && self.value(source).dims() == shape;
        let known = self.values().into_iter().filter(fits).collect_vec();
        if known.is_empty() || self.dice.once_in(3) {
            return self.leaf(shape, content);
        }
        self.dice.pick(&known)
    }

    /// A first input for an op, and a call that fits it.
    fn first(&mut self, entry: &Entry) -> Option<(Source, Call)> {
        let known =
            self.values().into_iter().filter(|&x| entry.dims.contains(&self.value(x).rank())).collect_vec();
        for _ in 0..2 {
            if !known.is_empty() {
                let source = self.dice.pick(&known[..known.len().min(3)]);
                let shape = self.value(source).dims().to_vec();
                if let Some(call) = (entry.call)(&mut self.dice, &shape) {
                    return Some((source, call));
                }
            }
        }
        if !known.is_empty() && !self.dice.once_in(4) {
            return None;
        }
        let rank = entry.dims.start() + self.dice.below(entry.dims.end() - entry.dims.start() + 1);
        let shape: Vec<usize> = (0..rank).map(|_| self.dice.size()).collect();
        let call = (entry.call)(&mut self.dice, &shape)?;
        Some((self.leaf(&shape, Content::Float), call))
    }

    /// Draws a call; one that one device cannot do, or only up to rounding, is forgotten.
    fn step(&mut self, entries: &[&'static Entry]) {
        let entry = self.dice.pick(entries);
        let before = self.of_leaves.len();
        if let Some((first, Call { others, numbers })) = self.first(entry) {
            let others = others.iter().map(|(shape, content)| self.input(shape, *content)).collect_vec();
            let inputs = [vec![first], others].concat();
            let values = inputs.iter().map(|&source| self.value(source).clone()).collect_vec();
            let made = truth::steady(entry, &values, &numbers);
            if let Some(made) =
                made.filter(|made| made.rank() <= 4 && (1..=MOST_ELEMENTS).contains(&made.elem_count()))
            {
                self.of_steps.push(made);
                self.program.steps.push(Step { entry, inputs, numbers });
                return;
            }
        }
        self.of_leaves.truncate(before);
        self.program.leaves.truncate(before);
    }

    /// The last value and some of the others are in the loss.
    fn losses(&mut self) {
        let last = self.of_steps.len() - 1;
        for at in 0..=last {
            if at == last || self.dice.once_in(3) {
                let rank = self.of_steps[at].rank();
                let choices = (0..rank).map(Shard).chain([Replicate]).collect_vec();
                let axes = self.program.mesh.len();
                let weights = (0..axes).map(|_| self.dice.pick(&choices)).collect();
                self.program.loss.push((Source::Step(at), weights));
            }
        }
    }

    /// Makes the last call a wrong one: another input or number. Calls with indexes keep their tables, since an index that
    /// is outside of one stops the world.
    fn spoil(&mut self) {
        let program = &mut self.program;
        let values =
            (0..program.leaves.len()).map(Source::Leaf).chain((0..program.steps.len() - 1).map(Source::Step));
        let values = values.collect_vec();
        let is_ids = |source: Source, program: &Program| match source {
            Source::Leaf(at) => program.leaves[at].content != Content::Float,
            Source::Step(_) => false,
        };
        let last = program.steps.len() - 1;
        let ids = program.steps[last].inputs.iter().position(|&input| is_ids(input, program));
        let step = &mut program.steps[last];
        if let Some(at) = ids {
            step.inputs[at] = step.inputs[0];
        } else if !step.numbers.is_empty() && self.dice.once_in(2) {
            let at = self.dice.below(step.numbers.len());
            step.numbers[at] = self.dice.pick(&[0, 1, 2, 3, 5, 7, 11]);
        } else {
            let at = self.dice.below(step.inputs.len());
            step.inputs[at] = self.dice.pick(&values);
        }
        program.loss.retain(|(source, _)| *source != Source::Step(last));
        program.wrong = true;
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leaf(at) => write!(f, "x{at}"),
            Self::Step(at) => write!(f, "y{at}"),
        }
    }
}

impl fmt::Display for Program {
    /// For example `y0 = softmax(x0; 1)`, one line for each leaf and step in use.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "program {} on a mesh {:?}", self.seed, self.mesh)?;
        for (at, leaf) in self.leaves.iter().enumerate() {
            let Leaf { shape, content, lays, sizes, strided, .. } = leaf;
            write!(f, "  x{at} = {content:?} {shape:?} as ({})", lays.iter().join(", "))?;
            if let Some((axis, sizes)) = sizes {
                write!(f, ", in pieces {sizes:?} on axis {axis}")?;
            }
            writeln!(f, "{}", if *strided { ", strided" } else { "" })?;
        }
        for (at, Step { entry, inputs, numbers }) in self.steps.iter().enumerate() {
            let wrong = if self.wrong && at + 1 == self.steps.len() { " (made wrong)" } else { "" };
            writeln!(
                f,
                "  y{at} = {}({}; {}){wrong}",
                entry.name,
                inputs.iter().join(", "),
                numbers.iter().join(", ")
            )?;
        }
        let term =
            |(source, at): &(Source, Vec<Placement>)| format!("{source} · w({})", at.iter().join(", "));
        write!(f, "  loss = {}", self.loss.iter().map(term).join(" + "))
    }
}
