//! Compares each collective on the GPU with the same collective on the host.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_dist::backend::{Call, Tensors};
use candle_dist::{Collective, Cut, P2pOp, ProcessGroup, ReduceOp, World};

use super::Ranks;

const DTYPES: [DType; 7] =
    [DType::U8, DType::U32, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64];
const REDUCTIONS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

/// The result of a call.
type Found = (String, Vec<usize>, Vec<f64>);

/// Compares all calls on the ranks with those on the same number of host ranks.
pub(super) fn check(ranks: &Ranks) -> Result<String> {
    let n = ranks.world_size();
    let expected = World::threads(n).run(|ctx| all(ctx.group(), &Device::Cpu))?;
    let found = ranks.run(|ctx| Ok(all(ctx.group(), ctx.device())?))?;
    for ((rank, expected), found) in expected.iter().enumerate().skip(ranks.first()).zip(&found) {
        ensure!(
            expected.len() == found.len(),
            "rank {rank} made {} calls, not {}",
            found.len(),
            expected.len()
        );
        for (expected, found) in expected.iter().zip(found) {
            ensure!(expected == found, "rank {rank} found {found:?}, the host {expected:?}");
        }
    }
    Ok(format!("{} calls alike on {} of {n} ranks", found[0].len(), found.len()))
}

/// Runs all calls on two threads that share the device. It loads the kernels that the calls need.
pub(super) fn warm_up(device: &Device) -> Result<()> {
    World::threads(2).devices(std::slice::from_ref(device)).run(|ctx| all(ctx.group(), device))?;
    Ok(())
}

/// Returns small integers: exact in each dtype, even when they are added, multiplied or averaged over few ranks.
fn input(rank: usize, dims: &[usize], dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
    let count: usize = dims.iter().product();
    let values: Vec<f32> = (0..count).map(|i| ((i * 7 + rank * 3) % 3 + 1) as f32).collect();
    Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

struct Calls<'a> {
    group: &'a ProcessGroup,
    device: &'a Device,
    found: Vec<Found>,
}

impl Calls<'_> {
    fn note(&mut self, name: impl Into<String>, made: &Tensor) -> candle_dist::Result<()> {
        let values = made.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?;
        self.found.push((name.into(), made.dims().to_vec(), values));
        Ok(())
    }

    fn input(&self, dims: &[usize], dtype: DType) -> candle_core::Result<Tensor> {
        input(self.group.rank(), dims, dtype, self.device)
    }

    /// Makes the calls of each dtype: all reductions, and the ops that only move data.
    fn of_dtype(&mut self, dtype: DType) -> candle_dist::Result<()> {
        let (g, n) = (self.group, self.group.size());
        let x = self.input(&[2 * n, 3 * n], dtype)?;
        for op in REDUCTIONS {
            if op == ReduceOp::Avg && (dtype.is_int() || !n.is_power_of_two()) {
                continue;
            }
            self.note(format!("all_reduce {op} {dtype:?}"), &g.all_reduce(&x, op)?)?;
            self.note(format!("reduce_scatter {op} {dtype:?}"), &g.reduce_scatter(&x, 1, op)?)?;
            let uneven: Vec<usize> = (0..n).map(|r| if r == 0 { 2 * n } else { 0 }).collect();
            self.note(
                "reduce_scatter_uneven",
                &g.call(Collective::reduce_scatter(Cut::new(0, &uneven), op)).run(&x)?,
            )?;
            if let Some(made) = g.reduce(&x, n - 1, op)? {
                self.note(format!("reduce {op} {dtype:?}"), &made)?;
            }
        }
        for dim in 0..2 {
            self.note(format!("all_gather {dim} {dtype:?}"), &g.all_gather(&x, dim)?)?;
            let sizes: Vec<usize> = (0..n).collect();
            let mut dims = [2, 3];
            dims[dim] = g.rank();
            let piece = self.input(&dims, dtype)?;
            self.note(
                format!("all_gather_uneven {dim} {dtype:?}"),
                &g.call(Collective::all_gather(Cut::new(dim, &sizes))).run(&piece)?,
            )?;
            if let Some(made) = g.gather(&piece, dim, &sizes, 0)? {
                self.note(format!("gather {dim} {dtype:?}"), &made)?;
            }
            self.note(format!("all_to_all {dim} {dtype:?}"), &g.all_to_all(&x, dim, 1 - dim)?)?;
            let sizes: Vec<usize> = (0..n).map(|r| if r == 0 { x.dims()[dim] } else { 0 }).collect();
            let made = g.scatter(Some(&x), (x.shape(), dtype), dim, &sizes, n - 1)?;
            self.note(format!("scatter {dim} {dtype:?}"), &made)?;
        }
        let counts: Vec<Vec<usize>> = (0..n).map(|s| (0..n).map(|r| (s + 2 * r) % 3).collect()).collect();
        let rows = self.input(&[counts[g.rank()].iter().sum(), 5], dtype)?;
        self.note(format!("all_to_all_single {dtype:?}"), &g.all_to_all_single(&rows, &counts)?)?;
        for root in 0..n {
            self.note(format!("broadcast {root} {dtype:?}"), &g.broadcast(&x.t()?, root)?)?;
        }
        let var = Var::from_tensor(&x)?;
        g.call(Collective::AllReduce(ReduceOp::Sum)).in_place(&var)?;
        self.note(format!("all_reduce_in_place {dtype:?}"), &var)?;
        g.call(Collective::Broadcast { root: n - 1 }).in_place(&var)?;
        self.note(format!("broadcast_in_place {dtype:?}"), &var)
    }

    /// Makes the calls that do not depend on the dtype.
    fn of_forms(&mut self) -> candle_dist::Result<()> {
        let (g, n) = (self.group, self.group.size());
        let (x, empty) = (self.input(&[n, 4], DType::F32)?, self.input(&[0, 4], DType::F32)?);
        self.note("all_reduce of nothing", &g.all_reduce(&empty, ReduceOp::Sum)?)?;
        self.note("all_gather of nothing", &g.all_gather(&empty, 1)?)?;
        let whole = self.input(&[n], DType::I64)?;
        for made in g.call(Collective::AllReduce(ReduceOp::Sum)).run_all(&[x.clone(), whole])? {
            self.note("all_reduce_coalesced", &made)?;
        }
        let (first, second) = (
            g.call(Collective::AllReduce(ReduceOp::Max)).start(&x)?,
            g.call(Collective::all_gather(Cut::even(1, x.dims()[1], g.size()))).start(&x)?,
        );
        self.note("second", &second.wait()?)?;
        self.note("first", &first.wait()?)?;
        drop(g.call(Collective::Broadcast { root: 0 }).start(&x)?);
        if n > 1 {
            // Around the ring. Tags are received in another order than they were sent.
            let (to, from) = ((g.rank() + 1) % n, (g.rank() + n - 1) % n);
            let send = |tag| P2pOp::Send { tensor: x.clone(), to, tag };
            let receive = |tag| P2pOp::Recv { shape: Shape::from((n, 4)), dtype: DType::F32, from, tag };
            for made in g.batch_send_recv(&[send(1), send(2), receive(2), receive(1)])? {
                self.note("recv", &made)?;
            }
        }
        g.barrier()?;
        g.agree("the same words")?;
        let half = g.split(Some((g.rank() % 2) as u32), -(g.rank() as i64))?;
        if let Some(half) = half {
            self.note("all_gather in a half", &half.all_gather(&x, 0)?)?;
        }
        self.note("text", &Tensor::new(g.all_gather_text("word")?.len() as u32, &Device::Cpu)?)
    }

    /// Calls the backend directly in a group of one, because `ProcessGroup` makes no call there.
    fn of_engine(&mut self) -> candle_dist::Result<()> {
        for dtype in DTYPES {
            let x = self.input(&[5, 3], dtype)?;
            let call = Call::on(Collective::AllReduce(ReduceOp::Sum), &x);
            let made = self.group.backend().run(call, [x].into_iter().collect(), Tensors::new())?;
            made.into_iter()
                .try_for_each(|made| self.note(format!("engine {dtype:?}"), &made.into_tensor()))?;
        }
        Ok(())
    }
}

/// Makes all calls of one rank.
fn all(group: &ProcessGroup, device: &Device) -> candle_dist::Result<Vec<Found>> {
    let mut calls = Calls { group, device, found: Vec::new() };
    if group.size() == 1 {
        calls.of_engine()?;
    }
    DTYPES.into_iter().try_for_each(|dtype| calls.of_dtype(dtype))?;
    calls.of_forms()?;
    Ok(calls.found)
}
