//! Memory that the program writes to while a call or a message still needs it.
use super::values::assert_same;
use crate::{Collective, Cut, P2pOp, Pending, RankContext, ReduceOp, Result};
use candle_core::scalar::Scalar;
use candle_core::{DType, Device, Shape, Tensor, Var};

/// The elements for each rank: some that are sent with their header, and some that are sent later, in place.
const LENGTHS: [usize; 3] = [1, 3000, 40_000];

/// Ones, in memory that the program can write to.
struct Writable {
    what: &'static str,
    tensor: Tensor,
    /// Owns the memory.
    var: Var,
}

impl Writable {
    /// Sets all elements to 200.
    fn write(&self) -> Result<()> {
        match self.what {
            "a tensor of its own" => self.tensor.const_set(Scalar::F32(200.0))?,
            _ => self.var.set(&self.var.ones_like()?.affine(200.0, 0.0)?)?,
        }
        Ok(())
    }
}

/// Makes a tensor of this many elements of a variable.
type MakeTensor = fn(&Var, usize) -> candle_core::Result<Tensor>;

/// Returns `len` elements in each kind of memory that a program can write to without `unsafe`.
fn writable(len: usize) -> Result<Vec<Writable>> {
    let ones = |len: usize| Var::ones(len, DType::F32, &Device::Cpu);
    let kinds: [(&'static str, MakeTensor); 6] = [
        ("a variable", |var, _| Ok(var.as_tensor().clone())),
        ("a detached variable", |var, _| Ok(var.as_detached_tensor())),
        ("a view of a variable", |var, len| var.reshape((len, 1))?.squeeze(1)),
        ("a part of a variable", |var, len| var.narrow(0, len, len)),
        ("a part of a detached variable", |var, len| var.as_detached_tensor().narrow(0, 0, len)),
        ("a tensor of its own", |var, _| var.as_tensor().force_contiguous().map(|tensor| tensor.detach())),
    ];
    let made = kinds.into_iter().map(|(what, make)| {
        let var = ones(if what.contains("part") { 2 * len } else { len })?;
        Ok(Writable { what, tensor: make(&var, len)?, var })
    });
    made.collect()
}

/// Checks that all elements are `value`.
fn check(made: &Tensor, value: usize, what: &str) -> Result<()> {
    assert_same(made, &made.ones_like()?.affine(value as f64, 0.0)?.detach(), &format!("{what}, as it was"))
}

/// Each started call uses its tensors as they were when it started.
pub(super) fn started(ctx: &RankContext) -> Result<()> {
    let (g, n) = (ctx.group(), ctx.world_size());
    for per_rank in LENGTHS {
        let (whole, root) = (per_rank * n, n - 1);
        let (cut, pieces) = (Cut::even(0, per_rank, n), Cut::even(0, whole, n));
        let (split, concat) = (Cut::even(1, per_rank, n), Cut::even(0, 1, n));
        // Each rank sends all to the next one.
        let counts: Vec<Vec<usize>> =
            (0..n).map(|s| (0..n).map(|r| if r == (s + 1) % n { whole } else { 0 }).collect()).collect();
        let sum = ReduceOp::Sum;
        // The elements of each result, as ones are reduced or moved, and the collective.
        let collectives = [
            (n, Collective::AllReduce(sum)),
            (n, Collective::Reduce { op: sum, root: 0 }),
            (n, Collective::reduce_scatter(cut.clone(), sum)),
            (n, Collective::ReduceScatter([cut.clone(), cut.clone()].into_iter().collect(), sum)),
            (1, Collective::all_gather(pieces.clone())),
            (1, Collective::AllGather([pieces.clone(), pieces.clone()].into_iter().collect())),
            (1, Collective::Gather { cut: pieces, root }),
            (1, Collective::AllToAll { split, concat }),
            (1, Collective::all_to_all_single(&counts)),
            (1, Collective::Broadcast { root }),
            (1, Collective::Scatter { cut, root }),
        ];
        for memory in writable(whole)? {
            let mut open = Vec::new();
            for (value, collective) in &collectives {
                let x = match collective {
                    Collective::AllToAll { .. } => memory.tensor.reshape((1, whole))?,
                    _ => memory.tensor.clone(),
                };
                let tensors = vec![x.clone(); collective.cuts().len().max(1)];
                let tensors = match collective {
                    Collective::AllToAll { .. } => &tensors[..1],
                    Collective::Scatter { .. } if g.rank() != root => &[],
                    _ => &tensors[..],
                };
                let call = || match collective {
                    Collective::Scatter { .. } => g.call(collective.clone()).of(whole, DType::F32),
                    _ => g.call(collective.clone()),
                };
                open.push((value, collective, call().start_all(tensors)?));
                if collective.all_have_results() && !tensors.is_empty() {
                    let room = |nth| {
                        Tensor::zeros(
                            &collective.output(nth, x.dims(), g.rank())[..],
                            DType::F32,
                            &Device::Cpu,
                        )
                    };
                    let rooms = (0..tensors.len()).map(room).collect::<candle_core::Result<Vec<_>>>()?;
                    let into = rooms.iter().fold(call(), |call, room| call.into(room));
                    open.push((value, collective, into.start_all(tensors)?));
                } else if collective.all_have_results() {
                    open.push((value, collective, call().start_all(tensors)?));
                }
            }
            memory.write()?;
            for (&value, collective, pending) in open {
                let what = format!("{collective:?} of {} with {whole} elements", memory.what);
                pending.wait()?.iter().try_for_each(|made| check(made, value, &what))?;
            }
        }
    }
    Ok(())
}

/// Each message has the elements as they were when it was sent.
pub(super) fn sent(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let (next, before) = ((r + 1) % n, (r + n - 1) % n);
    for len in LENGTHS {
        for memory in writable(len)? {
            let tensor = memory.tensor.clone();
            g.send(&tensor, next)?;
            let started =
                g.call(Collective::Send { to: next, tag: 1 }).start_all(std::slice::from_ref(&tensor))?;
            let batch =
                [tensor.clone(), tensor.clone()].map(|tensor| P2pOp::Send { tensor, to: next, tag: 2 });
            g.batch_send_recv(&batch)?;
            memory.write()?;
            g.barrier()?; // the receivers come later
            for tag in [0, 1, 2, 2] {
                let receive = P2pOp::Recv { shape: Shape::from(len), dtype: DType::F32, from: before, tag };
                let got = g.batch_send_recv(&[receive])?;
                check(&got[0], 1, &format!("{} of {len} elements, sent with tag {tag}", memory.what))?;
            }
            Pending::wait_all([started])?;
        }
    }
    Ok(())
}
