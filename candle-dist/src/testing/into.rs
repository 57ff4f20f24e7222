//! Results in given memory.
use super::Case;
use super::lacks::dtypes;
use super::values::{LENGTHS, assert_same, cuts, input, reduced, start};
use crate::backend::{Op, Tensors};
use crate::{Error, Pending, ProcessGroup, RankContext, ReduceOp, Result, backend::Call};
use candle_core::{DType, Device, Tensor, Var};

pub(super) const CASES: &[Case] = &[
    Case { name: "results go to given memory as they go to new memory", least: 1, run: same_as_new },
    Case { name: "given memory of every length, again and again", least: 1, run: lengths },
    Case { name: "started calls write to given memory", least: 1, run: started },
    Case { name: "messages go to given memory", least: 2, run: messages },
    Case { name: "one rank gives memory and another does not", least: 2, run: mixed },
    Case { name: "memory that cannot take the result is refused", least: 1, run: refused },
    Case { name: "results of coalesced calls go to given memory", least: 2, run: coalesced },
];

/// Returns memory for a tensor like `like`, with wrong values, in the middle of a larger storage.
fn room(like: &Tensor) -> Result<Tensor> {
    let whole = Tensor::ones(like.elem_count() + 8, DType::F32, &Device::Cpu)?.to_dtype(like.dtype())?;
    Ok(whole.narrow(0, 5, like.elem_count())?.reshape(like.shape())?)
}

fn same_as_new(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    for dtype in dtypes(ctx.group()) {
        for sizes in cuts(n) {
            for dim in 0..3 {
                let mut shape = [3, 2, 4];
                shape[dim] = sizes.iter().sum();
                let whole = input(9, &shape, dtype)?;
                let out = room(&whole)?;
                let mine = whole.narrow(dim, start(&sizes, r), sizes[r])?;
                g.all_gather_uneven_into(&out, &mine, dim, &sizes)?;
                assert_same(&out, &whole, &format!("all_gather {dim} {sizes:?} {dtype:?}"))?;

                let want = reduced(n, &shape, dtype, ReduceOp::Sum)?.narrow(dim, start(&sizes, r), sizes[r])?;
                let out = room(&want)?;
                g.reduce_scatter_uneven_into(&out, &input(r, &shape, dtype)?, dim, &sizes, ReduceOp::Sum)?;
                assert_same(&out, &want.contiguous()?, &format!("reduce_scatter {dim} {sizes:?} {dtype:?}"))?;
            }
        }
        let x = input(r, &[n * 2, n * 3], dtype)?;
        for (split, concat) in [(0, 1), (1, 0)] {
            let want = g.all_to_all(&x, split, concat)?;
            let out = room(&want)?;
            g.all_to_all_into(&out, &x, split, concat)?;
            assert_same(&out, &want.contiguous()?, &format!("all_to_all {split} {concat} {dtype:?}"))?;
        }
        let counts: Vec<Vec<usize>> = (0..n).map(|s| (0..n).map(|to| (s + to * to) % 3).collect()).collect();
        let x = input(r, &[counts[r].iter().sum(), 2], dtype)?;
        let want = g.all_to_all_single(&x, &counts)?;
        let out = room(&want)?;
        g.all_to_all_single_into(&out, &x, &counts)?;
        assert_same(&out, &want, &format!("all_to_all_single {dtype:?}"))?;
    }
    Ok(())
}

fn lengths(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    for len in LENGTHS {
        let whole = Var::zeros(n * len, DType::F32, &Device::Cpu)?;
        let piece = Tensor::zeros(len, DType::F32, &Device::Cpu)?;
        for round in 0..3 {
            g.all_gather_into(&whole, &input(r + round, &[len], DType::F32)?, 0)?;
            let all = (0..n).map(|rank| input(rank + round, &[len], DType::F32)).collect::<Result<Vec<_>>>()?;
            assert_same(&whole, &Tensor::cat(&all, 0)?, "all_gather")?;
            g.reduce_scatter_into(&piece, &whole, 0, ReduceOp::Avg)?;
            assert_same(&piece, &all[r], "the average of equal tensors")?;
        }
    }
    Ok(())
}

fn started(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let x = input(r, &[n * 2, n], DType::F32)?;
    let wants = [g.all_gather(&x, 0)?, g.reduce_scatter(&x, 0, ReduceOp::Max)?, g.all_to_all(&x, 0, 1)?];
    let outs = wants.iter().map(room).collect::<Result<Vec<_>>>()?;
    let mut open = vec![
        g.all_gather_into_start(&outs[0], &x, 0)?,
        g.reduce_scatter_into_start(&outs[1], &x, 0, ReduceOp::Max)?,
        g.all_to_all_into_start(&outs[2], &x, 0, 1)?,
    ];
    open.rotate_left(r % 3);
    Pending::wait_all(open)?;
    let mut pairs = outs.iter().zip(&wants);
    pairs.try_for_each(|(out, want)| assert_same(out, &want.contiguous()?, "a started call"))
}

fn messages(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let (next, before) = ((r + 1) % n, (r + n - 1) % n);
    for dtype in dtypes(ctx.group()) {
        for len in LENGTHS.into_iter().chain([0]) {
            let want = input(before, &[len], dtype)?;
            let (first, second) = (room(&want)?, room(&want)?);
            for tag in [0, 3] {
                g.send_start(&input(r, &[len], dtype)?, next, tag)?.wait()?;
            }
            let pending = g.recv_into_start(&second, before, 3)?;
            g.recv_into(&first, before, 0)?;
            pending.wait()?;
            assert_same(&first, &want, "a message")?;
            assert_same(&second, &want, "a message that was waited for")?;
        }
    }
    // A tensor that is passed on may come back to its own memory.
    let mine = input(r, &[100], DType::F32)?;
    g.send_owned(mine.clone(), next)?;
    let back = g.recv(100, DType::F32, before)?;
    g.send_owned(back.clone(), before)?;
    g.recv_into(&mine, next, 0)?;
    assert_same(&mine, &input(r, &[100], DType::F32)?, "there and back")
}

fn mixed(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let x = input(r, &[40_000], DType::F32)?;
    let want = (0..n).map(|rank| input(rank, &[40_000], DType::F32)).collect::<Result<Vec<_>>>()?;
    let want = Tensor::cat(&want, 0)?;
    let out = room(&want)?;
    for giver in 0..n {
        match r == giver {
            true => g.all_gather_into(&out, &x, 0)?,
            false => assert_same(&g.all_gather(&x, 0)?, &want, "in new memory")?,
        }
        match r == giver {
            true => g.all_gather_into_start(&out, &x, 0)?.wait()?,
            false => assert_same(&g.all_gather_start(&x, 0)?.wait()?, &want, "started")?,
        }
    }
    assert_same(&out, &want, "in given memory")
}

type Wrong = (&'static str, fn(&ProcessGroup, &Tensor, usize) -> Result<()>);

const WRONG: [Wrong; 7] = [
    ("[2, 3]", |g, x, n| g.all_gather_into(&Tensor::zeros((2 * n, 4), DType::F32, x.device())?, x, 0)),
    ("got f64", |g, x, n| g.all_gather_into(&Tensor::zeros((2 * n, 3), DType::F64, x.device())?, x, 0)),
    ("not contiguous", |g, x, n| g.all_gather_into(&Tensor::zeros((3, 2 * n), DType::F32, x.device())?.t()?, x, 0)),
    ("memory of the input", |g, x, n| {
        let whole = Tensor::zeros((2 * n, 3), DType::F32, x.device())?;
        g.all_gather_into(&whole, &whole.narrow(0, 0, 2)?, 0)
    }),
    ("part of a graph", |g, x, n| {
        let whole = Var::zeros((2 * n, 3), DType::F32, x.device())?;
        g.all_gather_into(&(whole.as_tensor() * 2.0)?, x, 0)
    }),
    ("dim 3", |g, x, _| g.all_to_all_into(x, x, 3, 0)),
    ("part of a graph", |g, x, _| match g.size() {
        1 => Err(Error::Invalid { op: "recv", reason: "part of a graph, with nobody to send it".to_string() }),
        n => {
            let var = Var::zeros(3, DType::F32, x.device())?;
            g.recv_into(&(var.as_tensor() * 2.0)?, (g.rank() + 1) % n, 0)
        }
    }),
];

fn refused(ctx: &RankContext) -> Result<()> {
    let x = input(0, &[2, 3], DType::F32)?;
    for (i, (text, call)) in WRONG.into_iter().enumerate() {
        // The expected result depends on the size of the world.
        let text = if i == 0 { format!("[{}, 3]", 2 * ctx.world_size()) } else { text.to_string() };
        let error = call(ctx.group(), &x, ctx.world_size()).expect_err("wrong memory").to_string();
        assert!(error.contains(&text), "{error} without {text}");
        ctx.group().barrier()?;
    }
    Ok(())
}

/// Calls the backend, which accepts several outputs.
fn coalesced(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let tensors: Tensors = [input(r, &[3], DType::F32)?, input(r, &[2, 2], DType::F32)?].into_iter().collect();
    let wants = g.all_gather_coalesced(&tensors, 0)?;
    let outs = wants.iter().map(room).collect::<Result<Vec<_>>>()?;
    let call = Call {
        dims: [0, 0].into_iter().collect(),
        sizes: [vec![3; n], vec![2; n]].into_iter().map(|sizes| sizes.into_iter().collect()).collect(),
        ..Call::on(Op::AllGather, &tensors[0], &[0]).with_rest(&tensors[1..])
    };
    g.backend().run_into(call, tensors, &outs)?;
    outs.iter().zip(&wants).try_for_each(|(out, want)| assert_same(out, want, "one of two"))
}
