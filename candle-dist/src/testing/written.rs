//! Memory that the program writes to while a call or a message still needs it.
use super::values::assert_same;
use crate::functional::Cut;
use crate::{Message, Pending, RankContext, ReduceOp, Result};
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
type Make = fn(&Var, usize) -> candle_core::Result<Tensor>;

/// Returns `len` elements in each kind of memory that a program can write to without `unsafe`.
fn writable(len: usize) -> Result<Vec<Writable>> {
    let ones = |len: usize| Var::ones(len, DType::F32, &Device::Cpu);
    let kinds: [(&'static str, Make); 6] = [
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
        let (sizes, whole) = (vec![per_rank; n], per_rank * n);
        // Each rank sends all to the next one.
        let counts: Vec<Vec<usize>> =
            (0..n).map(|s| (0..n).map(|r| if r == (s + 1) % n { whole } else { 0 }).collect()).collect();
        for memory in writable(whole)? {
            let x = &memory.tensor;
            let wide = x.reshape((1, whole))?;
            let cut = [(x.clone(), Cut::new(0, &sizes))];
            let all = [(x.clone(), Cut::new(0, &vec![whole; n]))];
            let [joined, piece, exchanged] =
                [whole * n, per_rank, whole].map(|len| Tensor::zeros(len, DType::F32, &Device::Cpu));
            let (joined, piece, exchanged) = (joined?, piece?, exchanged?.reshape((n, per_rank))?);
            let one = [
                ("all_reduce", n, g.all_reduce_start(x, ReduceOp::Sum)?),
                ("all_gather", 1, g.all_gather_start(x, 0)?),
                ("all_gather_uneven", 1, g.all_gather_uneven_start(x, 0, &vec![whole; n])?),
                ("reduce_scatter", n, g.reduce_scatter_start(x, 0, ReduceOp::Sum)?),
                ("reduce_scatter_uneven", n, g.reduce_scatter_uneven_start(x, 0, &sizes, ReduceOp::Sum)?),
                ("all_to_all", 1, g.all_to_all_start(&wide, 1, 0)?),
                ("all_to_all_uneven", 1, g.all_to_all_uneven_start(&wide, (1, &sizes), (0, &vec![1; n]))?),
                ("all_to_all_single", 1, g.all_to_all_single_start(x, &counts)?),
                ("broadcast", 1, g.broadcast_start(x, n - 1)?),
                ("scatter", 1, g.scatter_start(Some(x), (whole, DType::F32), 0, &sizes, n - 1)?),
            ];
            let of_root = [
                ("reduce", n, g.reduce_start(x, 0, ReduceOp::Sum)?),
                ("gather", 1, g.gather_start(x, 0, &vec![whole; n], n - 1)?),
            ];
            let several = [
                ("all_reduce_coalesced", n, g.all_reduce_coalesced_start(&[x.clone(), x.clone()], ReduceOp::Sum)?),
                ("broadcast_coalesced", 1, g.broadcast_coalesced_start(std::slice::from_ref(x), n - 1)?),
                ("all_gather_coalesced", 1, g.all_gather_coalesced_start(&all)?),
                ("reduce_scatter_coalesced", n, g.reduce_scatter_coalesced_start(&cut, ReduceOp::Sum)?),
            ];
            let into = [
                ("all_gather_into", 1, &joined, g.all_gather_into_start(&joined, x, 0)?),
                ("reduce_scatter_into", n, &piece, g.reduce_scatter_into_start(&piece, x, 0, ReduceOp::Sum)?),
                ("all_to_all_into", 1, &exchanged, g.all_to_all_into_start(&exchanged, &wide, 1, 0)?),
            ];
            memory.write()?;
            let named = |call: &str| format!("{call} of {} with {whole} elements", memory.what);
            for (call, value, pending) in one {
                check(&pending.wait()?, value, &named(call))?;
            }
            for (call, value, pending) in of_root {
                pending.wait()?.map_or(Ok(()), |made| check(&made, value, &named(call)))?;
            }
            for (call, value, pending) in several {
                pending.wait()?.iter().try_for_each(|made| check(made, value, &named(call)))?;
            }
            for (call, value, output, pending) in into {
                pending.wait()?;
                check(output, value, &named(call))?;
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
            let started = g.send_start(&tensor, next, 1)?;
            let batch = [tensor.clone(), tensor.clone()].map(|tensor| Message::Send { tensor, to: next, tag: 2 });
            g.batch_send_recv(&batch)?;
            memory.write()?;
            g.barrier()?; // the receivers come later
            for tag in [0, 1, 2, 2] {
                let receive = Message::Recv { shape: Shape::from(len), dtype: DType::F32, from: before, tag };
                let got = g.batch_send_recv(&[receive])?;
                check(&got[0], 1, &format!("{} of {len} elements, sent with tag {tag}", memory.what))?;
            }
            Pending::wait_all([started])?;
        }
    }
    Ok(())
}
