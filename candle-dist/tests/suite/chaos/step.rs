//! One communication call: the properties that ranks must agree on, its execution, and its expected result.
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{Collective, Cut, ProcessGroup, ReduceOp, Result};
use test_utils::over_nccl;

/// The kinds of steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    /// A send to the next rank, then a receive from the previous one.
    Ring,
    Barrier,
    Agree,
    /// The creation of subgroups, which later steps may use.
    Split,
}

const WHAT: [What; 12] = [
    What::AllReduce,
    What::AllGather,
    What::ReduceScatter,
    What::AllToAll,
    What::Broadcast,
    What::Reduce,
    What::Gather,
    What::Scatter,
    What::Ring,
    What::Barrier,
    What::Agree,
    What::Split,
];
/// The number of kinds of steps.
pub(crate) const KINDS: usize = WHAT.len();
const DTYPES: [DType; 7] =
    [DType::U8, DType::U32, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64];
/// Reductions of integers and of floats.
const INTS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product, ReduceOp::Xor];
const FLOATS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product, ReduceOp::Avg];

/// How a step is called. Some kinds do not support all ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    New,
    InPlace,
    /// Started, and waited for at once.
    Started,
    /// Two tensors in one call.
    Coalesced,
}

/// The name of the way in errors.
pub(crate) const FORM: &str = "form (into new memory, in place, started, or monitored)";

/// A size that makes tensors too large for a backend's eager messages.
const LARGE: usize = 22_000;

/// The numbers that determine a step: kind, slot, dtype and reduction, form, data.
pub(crate) type Raw = (usize, usize, usize, usize, usize);

/// One communication of one rank.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) what: What,
    /// The group: 0 is the world, and `i` the result of the program's `i`-th split.
    pub(crate) slot: usize,
    pub(crate) dtype: DType,
    pub(crate) reduce: ReduceOp,
    /// Determines the shape, the dims, the sizes, the root and the way.
    pub(crate) form: usize,
    /// Determines the elements and the view.
    pub(crate) data: usize,
}

/// The result of a step: a shape and its values, row by row.
pub(crate) type Values = (Vec<usize>, Vec<f64>);

impl Step {
    /// Creates a step on the world's group or, in some cases, on a group of one of `splits` earlier splits.
    pub(crate) fn new((what, slot, kind, form, data): Raw, splits: usize) -> Self {
        let dtype = DTYPES[kind % DTYPES.len()];
        let reductions = if dtype.is_int() { INTS } else { FLOATS };
        let reduce = match reductions[kind / DTYPES.len() % reductions.len()] {
            // NCCL has none of it.
            ReduceOp::Xor if over_nccl() => ReduceOp::Max,
            reduce => reduce,
        };
        Self { what: WHAT[what], slot: slot % (splits + 1), dtype, reduce, form, data }
    }

    /// Returns the sizes of the pieces of a cut dim: even, uneven, some empty, one owner, all empty.
    fn sizes(&self, n: usize) -> Vec<usize> {
        (0..n)
            .map(|r| match self.form % 5 {
                0 => 2,
                1 => r * 2 % 3 + 1,
                2 => r,
                3 => 3 * usize::from(r == 0),
                _ => 0,
            })
            .collect()
    }

    fn is_even(&self) -> bool {
        self.form.is_multiple_of(5)
    }

    /// Returns the dim that is cut, and for all_to_all the dim that is joined.
    fn dims(&self) -> (usize, usize) {
        let dim = self.form / 5 % 3;
        (dim, (dim + 1) % 3)
    }

    pub(crate) fn root(&self, n: usize) -> usize {
        self.form / 15 % n
    }

    fn way(&self) -> Way {
        let way = [Way::New, Way::InPlace, Way::Started, Way::Coalesced][self.form / 120 % 4];
        match (self.what, way) {
            (What::AllReduce | What::Broadcast, way) => way,
            (What::AllGather | What::ReduceScatter, Way::Started | Way::Coalesced) if self.is_even() => way,
            _ => Way::New,
        }
    }

    /// Returns the shape of all pieces together.
    fn whole(&self, n: usize) -> [usize; 3] {
        let (total, (cut, join)) = (self.sizes(n).iter().sum(), self.dims());
        let mut shape = [2 + self.form / 60 % 2, 2, 3];
        if self.form / 480 == 29 {
            shape[(join + 1) % 3] = LARGE;
        }
        shape[cut] = total;
        if self.what == What::AllToAll {
            shape[join] = total;
        }
        shape
    }

    /// Returns the shape of the input of member `r` of `n`.
    fn given(&self, r: usize, n: usize) -> [usize; 3] {
        let mut shape = self.whole(n);
        match self.what {
            What::AllGather | What::Gather => shape[self.dims().0] = self.sizes(n)[r],
            What::AllToAll => shape[self.dims().1] = self.sizes(n)[r],
            _ => {}
        }
        shape
    }

    /// Returns member `r`'s element at `at`: a small whole number, exact in every dtype.
    fn element(&self, r: usize, at: [usize; 3]) -> f64 {
        ((self.data * 7 + r * 5 + at[0] * 3 + at[1] * 2 + at[2]) % 3 + 1) as f64
    }

    /// Returns the input of member `r` of `n`, in some cases as a view that is not contiguous.
    fn input(&self, r: usize, n: usize) -> Result<Tensor> {
        let [a, b, c] = self.given(r, n);
        if self.data.is_multiple_of(2) {
            return Ok(tensor(values([a, b, c], |at| self.element(r, at)), self.dtype)?);
        }
        let turned = values([c, b, a], |[k, j, i]| self.element(r, [i, j, k]));
        Ok(tensor(turned, self.dtype)?.permute((2, 1, 0))?)
    }

    /// Returns the color of member `r`. In one form of split, some member gets no group.
    fn color(&self, r: usize) -> Option<u32> {
        match self.form % 4 {
            0 => Some((r % 2) as u32),
            1 => Some((r / 2) as u32),
            2 => (r != self.form / 4 % 3).then_some(0),
            _ => Some(0),
        }
    }

    fn key(&self, r: usize) -> i64 {
        if (self.form / 12).is_multiple_of(2) { 0 } else { -(r as i64) }
    }

    /// Returns the members of the group that member `r` of `n` gets from a split, as ranks of the old group.
    pub(crate) fn members(&self, r: usize, n: usize) -> Option<Vec<usize>> {
        let color = self.color(r)?;
        let mut members: Vec<usize> = (0..n).filter(|&m| self.color(m) == Some(color)).collect();
        members.sort_by_key(|&m| (self.key(m), m));
        Some(members)
    }

    /// Returns the properties that the ranks of a group must agree on, in the order in which differences are reported.
    pub(crate) fn signature(&self, n: usize) -> [(&'static str, String); 9] {
        use What::*;
        let (what, way) = (self.what, self.way());
        let ((cut, join), sizes) = (self.dims(), self.sizes(n));
        let mut shape = self.whole(n).map(|d| d.to_string()).to_vec();
        match what {
            AllGather if way == Way::Coalesced => shape[cut] = sizes[0].to_string(),
            AllGather | Gather => shape[cut] = "?".into(),
            AllToAll => shape[join] = "?".into(),
            Barrier | Agree => shape.clear(),
            Split => shape = vec!["?".into(), "2".into()],
            _ => {}
        }
        if way == Way::Coalesced {
            shape.extend(self.given(0, n).map(|d| format!("then {d}")));
        }
        let op = match what {
            Split => AllGather,
            Agree => Barrier,
            other => other,
        };
        let dtype = match what {
            Split => Some(DType::I64),
            Barrier | Agree => None,
            _ => Some(self.dtype),
        };
        let reduce = matches!(what, AllReduce | ReduceScatter | Reduce).then_some(self.reduce);
        let root = matches!(what, Broadcast | Reduce | Gather | Scatter).then(|| self.root(n));
        let (dims, cuts) = match what {
            AllGather | ReduceScatter if way == Way::Coalesced => (vec![cut; 2], vec![sizes.clone(), sizes]),
            AllGather | Gather | ReduceScatter | Scatter => (vec![cut], vec![sizes]),
            AllToAll => (vec![cut, join], vec![sizes.clone(), sizes]),
            Split => (vec![0], vec![vec![1; n]]),
            _ => (vec![], vec![]),
        };
        let note = (what == Agree).then(|| self.note());
        [
            ("op", format!("{op:?}")),
            ("dtype", format!("{dtype:?}")),
            ("shape", format!("{shape:?}")),
            ("reduction", format!("{reduce:?}")),
            ("root", format!("{root:?}")),
            ("dim", format!("{dims:?}")),
            ("sizes", format!("{cuts:?}")),
            (FORM, format!("{:?}", if way == Way::Coalesced { Way::New } else { way })),
            ("description", format!("{note:?}")),
        ]
    }

    /// Makes a call in another way than the plain one.
    fn perform_in_a_way(&self, way: Way, g: &ProcessGroup) -> Result<Tensor> {
        let (r, n) = (g.rank(), g.size());
        let (x, cut, root) = (self.input(r, n)?, self.dims().0, self.root(n));
        if way == Way::InPlace {
            let var = Var::from_tensor(&x)?;
            match self.what {
                What::Broadcast => g.call(Collective::Broadcast { root }).in_place(&var)?,
                _ => g.call(Collective::AllReduce(self.reduce)).in_place(&var)?,
            }
            return Ok(var.as_detached_tensor());
        }
        if way == Way::Started {
            let pending = match self.what {
                What::Broadcast => g.call(Collective::Broadcast { root }).start(&x)?,
                What::AllGather => {
                    g.call(Collective::all_gather(Cut::even(cut, x.dims()[cut], g.size()))).start(&x)?
                }
                What::ReduceScatter => g
                    .call(Collective::reduce_scatter(
                        Cut::even(cut, x.dims()[cut] / g.size(), g.size()),
                        self.reduce,
                    ))
                    .start(&x)?,
                _ => g.call(Collective::AllReduce(self.reduce)).start(&x)?,
            };
            pending.is_ready()?;
            return pending.wait();
        }
        let both = [x.clone(), x];
        let mut made = match self.what {
            What::Broadcast => g.call(Collective::Broadcast { root }).run_all(&both)?,
            What::AllGather => {
                let pieces = Cut::even(cut, both[0].dims()[cut], g.size());
                g.call(Collective::AllGather([pieces.clone(), pieces].into_iter().collect()))
                    .run_all(&both)?
            }
            What::ReduceScatter => {
                let pieces = Cut::even(cut, both[0].dims()[cut] / g.size(), g.size());
                let cuts = [pieces.clone(), pieces].into_iter().collect();
                g.call(Collective::ReduceScatter(cuts, self.reduce)).run_all(&both)?
            }
            _ => g.call(Collective::AllReduce(self.reduce)).run_all(&both)?,
        };
        Ok(made.swap_remove(1))
    }

    fn note(&self) -> String {
        format!("plan {}", self.form % 3)
    }

    /// Makes the call and returns its result, if any. The group of a split goes to `made`.
    pub(crate) fn perform(
        &self,
        g: &ProcessGroup,
        made: &mut Option<ProcessGroup>,
    ) -> Result<Option<Tensor>> {
        let (r, n) = (g.rank(), g.size());
        let ((cut, join), sizes, root) = (self.dims(), self.sizes(n), self.root(n));
        let x = || self.input(r, n);
        if self.way() != Way::New {
            return self.perform_in_a_way(self.way(), g).map(Some);
        }
        match self.what {
            What::AllReduce => g.all_reduce(&x()?, self.reduce).map(Some),
            What::AllGather if self.is_even() => g.all_gather(&x()?, cut).map(Some),
            What::AllGather => g.call(Collective::all_gather(Cut::new(cut, &sizes))).run(&x()?).map(Some),
            What::ReduceScatter if self.is_even() => g.reduce_scatter(&x()?, cut, self.reduce).map(Some),
            What::ReduceScatter => {
                g.call(Collective::reduce_scatter(Cut::new(cut, &sizes), self.reduce)).run(&x()?).map(Some)
            }
            What::AllToAll if self.is_even() => g.all_to_all(&x()?, cut, join).map(Some),
            What::AllToAll => g
                .call(Collective::AllToAll { split: Cut::new(cut, &sizes), concat: Cut::new(join, &sizes) })
                .run(&x()?)
                .map(Some),
            What::Broadcast => g.broadcast(&x()?, root).map(Some),
            What::Reduce => g.reduce(&x()?, root, self.reduce),
            What::Gather => g.gather(&x()?, cut, &sizes, root),
            What::Scatter => {
                let given = (r == root).then(x).transpose()?;
                g.scatter(given.as_ref(), (&self.whole(n)[..], self.dtype), cut, &sizes, root).map(Some)
            }
            What::Ring if n == 1 => Ok(None),
            What::Ring => {
                g.send(&x()?, (r + 1) % n)?;
                g.recv(&self.whole(n)[..], self.dtype, (r + n - 1) % n).map(Some)
            }
            What::Barrier => g.barrier().map(|()| None),
            What::Agree => g.agree(&self.note()).map(|()| None),
            What::Split => {
                *made = g.split(self.color(r), self.key(r))?;
                Ok(None)
            }
        }
    }

    /// Computes the result of member `r` from the definition. `steps` are those of all members, in group order.
    pub(crate) fn expected(&self, r: usize, steps: &[&Step]) -> Option<Values> {
        let n = steps.len();
        let (whole, sizes, (cut, join)) = (self.whole(n), self.sizes(n), self.dims());
        let start = |r: usize| sizes[..r].iter().sum::<usize>();
        // The member whose piece contains index `i` of a dim that is joined.
        let owner = |i: usize| (0..n).rfind(|&m| start(m) <= i && sizes[m] > 0).unwrap_or(0);
        let moved = |mut at: [usize; 3], dim: usize, to: usize| {
            at[dim] = to;
            at
        };
        let piece = moved(whole, cut, sizes[r]);
        let joined = |at: [usize; 3], dim: usize| {
            let from = owner(at[dim]);
            steps[from].element(from, moved(at, dim, at[dim] - start(from)))
        };
        let reduced = |at: [usize; 3]| {
            let all = (0..n).map(|m| steps[m].element(m, at));
            match self.reduce {
                ReduceOp::Sum => all.sum(),
                ReduceOp::Avg => all.sum::<f64>() / n as f64,
                ReduceOp::Min => all.fold(f64::INFINITY, f64::min),
                ReduceOp::Max => all.fold(f64::NEG_INFINITY, f64::max),
                ReduceOp::Product => all.product(),
                ReduceOp::And => all.fold(u64::MAX, |a, b| a & b as u64) as f64,
                ReduceOp::Or => all.fold(0, |a, b| a | b as u64) as f64,
                ReduceOp::Xor => all.fold(0, |a, b| a ^ b as u64) as f64,
                ReduceOp::PreMulSum(factor) => all.map(|x| x * factor.value()).sum(),
            }
        };
        let root = self.root(n);
        let shift = |at: [usize; 3]| moved(at, cut, at[cut] + start(r));
        match self.what {
            What::AllReduce => Some(values(whole, reduced)),
            What::Reduce => (r == root).then(|| values(whole, reduced)),
            What::ReduceScatter => Some(values(piece, |at| reduced(shift(at)))),
            What::AllGather => Some(values(whole, |at| joined(at, cut))),
            What::Gather => (r == root).then(|| values(whole, |at| joined(at, cut))),
            What::AllToAll => Some(values(piece, |at| joined(shift(at), join))),
            What::Broadcast => Some(values(whole, |at| steps[root].element(root, at))),
            What::Scatter => Some(values(piece, |at| steps[root].element(root, shift(at)))),
            What::Ring | What::Barrier | What::Agree | What::Split => None,
        }
    }

    /// Returns the result of a ring: the whole tensor of member `from`.
    pub(crate) fn sent(&self, from: usize, n: usize) -> Values {
        values(self.whole(n), |at| self.element(from, at))
    }

    /// Converts `wanted` to a tensor of this step's dtype.
    pub(crate) fn as_tensor(&self, wanted: &Values) -> candle_core::Result<Tensor> {
        tensor(wanted.clone(), self.dtype)
    }
}

fn values(shape: [usize; 3], element: impl Fn([usize; 3]) -> f64) -> Values {
    let [a, b, c] = shape;
    let places = (0..a).flat_map(|i| (0..b).flat_map(move |j| (0..c).map(move |k| [i, j, k])));
    (shape.to_vec(), places.map(element).collect())
}

fn tensor((shape, values): Values, dtype: DType) -> candle_core::Result<Tensor> {
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
}
