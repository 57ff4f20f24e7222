//! Results in given memory.
use super::Case;
use super::lacks::reduced_dtypes;
use super::values::{LENGTHS, assert_same, cuts, input, reduced, start};
use crate::{Collective, Cut, Error, Pending, ProcessGroup, RankContext, ReduceOp, Result};
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
    for dtype in reduced_dtypes(ctx.group()) {
        for sizes in cuts(n) {
            for dim in 0..3 {
                let mut shape = [3, 2, 4];
                shape[dim] = sizes.iter().sum();
                let whole = input(9, &shape, dtype)?;
                let out = room(&whole)?;
                let mine = whole.narrow(dim, start(&sizes, r), sizes[r])?;
                g.call(Collective::all_gather(Cut::new(dim, &sizes))).into(&out).run(&mine)?;
                assert_same(&out, &whole, &format!("all_gather {dim} {sizes:?} {dtype:?}"))?;

                let want =
                    reduced(n, &shape, dtype, ReduceOp::Sum)?.narrow(dim, start(&sizes, r), sizes[r])?;
                let out = room(&want)?;
                g.call(Collective::reduce_scatter(Cut::new(dim, &sizes), ReduceOp::Sum))
                    .into(&out)
                    .run(&input(r, &shape, dtype)?)?;
                assert_same(&out, &want.contiguous()?, &format!("reduce_scatter {dim} {sizes:?} {dtype:?}"))?;
            }
        }
        let x = input(r, &[n * 2, n * 3], dtype)?;
        for (split, concat) in [(0, 1), (1, 0)] {
            let want = g.all_to_all(&x, split, concat)?;
            let out = room(&want)?;
            g.call(Collective::AllToAll {
                split: Cut::even(split, x.dims()[split] / g.size(), g.size()),
                concat: Cut::even(concat, x.dims()[concat], g.size()),
            })
            .into(&out)
            .run(&x)?;
            assert_same(&out, &want.contiguous()?, &format!("all_to_all {split} {concat} {dtype:?}"))?;
        }
        let counts: Vec<Vec<usize>> = (0..n).map(|s| (0..n).map(|to| (s + to * to) % 3).collect()).collect();
        let x = input(r, &[counts[r].iter().sum(), 2], dtype)?;
        let want = g.all_to_all_single(&x, &counts)?;
        let out = room(&want)?;
        g.call(Collective::all_to_all_single(&counts)).into(&out).run(&x)?;
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
            g.call(Collective::all_gather(Cut::even(
                0,
                input(r + round, &[len], DType::F32)?.dims()[0],
                g.size(),
            )))
            .into(&whole)
            .run(&input(r + round, &[len], DType::F32)?)?;
            let all =
                (0..n).map(|rank| input(rank + round, &[len], DType::F32)).collect::<Result<Vec<_>>>()?;
            assert_same(&whole, &Tensor::cat(&all, 0)?, "all_gather")?;
            g.call(Collective::reduce_scatter(
                Cut::even(0, whole.dims()[0] / g.size(), g.size()),
                ReduceOp::Avg,
            ))
            .into(&piece)
            .run(whole.as_tensor())?;
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
        g.call(Collective::all_gather(Cut::even(0, x.dims()[0], g.size()))).into(&outs[0]).start(&x)?,
        g.call(Collective::reduce_scatter(Cut::even(0, x.dims()[0] / g.size(), g.size()), ReduceOp::Max))
            .into(&outs[1])
            .start(&x)?,
        g.call(Collective::AllToAll {
            split: Cut::even(0, x.dims()[0] / g.size(), g.size()),
            concat: Cut::even(1, x.dims()[1], g.size()),
        })
        .into(&outs[2])
        .start(&x)?,
    ];
    open.rotate_left(r % 3);
    Pending::wait_all(open)?;
    let mut pairs = outs.iter().zip(&wants);
    pairs.try_for_each(|(out, want)| assert_same(out, &want.contiguous()?, "a started call"))
}

fn messages(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let (next, before) = ((r + 1) % n, (r + n - 1) % n);
    for dtype in reduced_dtypes(ctx.group()) {
        for len in LENGTHS.into_iter().chain([0]) {
            let want = input(before, &[len], dtype)?;
            let (first, second) = (room(&want)?, room(&want)?);
            for tag in [0, 3] {
                g.call(Collective::Send { to: next, tag })
                    .start_all(std::slice::from_ref(&input(r, &[len], dtype)?))?
                    .wait()?;
            }
            let pending =
                g.call(Collective::Recv { from: Some(before), tag: 3 }).into(&second).start(None)?;
            g.call(Collective::Recv { from: Some(before), tag: 0 }).into(&first).run(None)?;
            pending.wait()?;
            assert_same(&first, &want, "a message")?;
            assert_same(&second, &want, "a message that was waited for")?;
        }
    }
    // A tensor that is passed on may come back to its own memory.
    let mine = input(r, &[100], DType::F32)?;
    g.call(Collective::Send { to: next, tag: 0 }).owned().run_all(std::slice::from_ref(&mine))?;
    let back = g.recv(100, DType::F32, before)?;
    g.call(Collective::Send { to: before, tag: 0 }).owned().run_all(std::slice::from_ref(&back))?;
    g.call(Collective::Recv { from: Some(next), tag: 0 }).into(&mine).run(None)?;
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
            true => g
                .call(Collective::all_gather(Cut::even(0, x.dims()[0], g.size())))
                .into(&out)
                .run(&x)
                .map(drop)?,
            false => assert_same(&g.all_gather(&x, 0)?, &want, "in new memory")?,
        }
        match r == giver {
            true => g
                .call(Collective::all_gather(Cut::even(0, x.dims()[0], g.size())))
                .into(&out)
                .start(&x)?
                .wait()
                .map(drop)?,
            false => assert_same(
                &g.call(Collective::all_gather(Cut::even(0, x.dims()[0], g.size()))).start(&x)?.wait()?,
                &want,
                "started",
            )?,
        }
    }
    assert_same(&out, &want, "in given memory")
}

type BadOutput = (&'static str, fn(&ProcessGroup, &Tensor, usize) -> Result<()>);

const WRONG: [BadOutput; 7] = [
    ("[2, 3]", |g, x, n| {
        g.call(Collective::all_gather(Cut::even(0, x.dims()[0], g.size())))
            .into(&Tensor::zeros((2 * n, 4), DType::F32, x.device())?)
            .run(x)
            .map(drop)
    }),
    ("got f64", |g, x, n| {
        g.call(Collective::all_gather(Cut::even(0, x.dims()[0], g.size())))
            .into(&Tensor::zeros((2 * n, 3), DType::F64, x.device())?)
            .run(x)
            .map(drop)
    }),
    ("not contiguous", |g, x, n| {
        g.call(Collective::all_gather(Cut::even(0, x.dims()[0], g.size())))
            .into(&Tensor::zeros((3, 2 * n), DType::F32, x.device())?.t()?)
            .run(x)
            .map(drop)
    }),
    ("memory of the input", |g, x, n| {
        let whole = Tensor::zeros((2 * n, 3), DType::F32, x.device())?;
        g.call(Collective::all_gather(Cut::even(0, 2, g.size())))
            .into(&whole)
            .run(&whole.narrow(0, 0, 2)?)
            .map(drop)
    }),
    ("part of a graph", |g, x, n| {
        let whole = Var::zeros((2 * n, 3), DType::F32, x.device())?;
        g.call(Collective::all_gather(Cut::even(0, x.dims()[0], g.size())))
            .into(&(whole.as_tensor() * 2.0)?)
            .run(x)
            .map(drop)
    }),
    ("dim 3", |g, x, _| {
        g.call(Collective::AllToAll {
            split: Cut::even(3, 1, g.size()),
            concat: Cut::even(0, x.dims()[0], g.size()),
        })
        .into(x)
        .run(x)
        .map(drop)
    }),
    ("part of a graph", |g, x, _| match g.size() {
        1 => {
            Err(Error::Invalid { op: "recv", reason: "part of a graph, with nobody to send it".to_string() })
        }
        n => {
            let var = Var::zeros(3, DType::F32, x.device())?;
            g.call(Collective::Recv { from: Some((g.rank() + 1) % n), tag: 0 })
                .into(&(var.as_tensor() * 2.0)?)
                .run(None)
                .map(drop)
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

fn coalesced(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let tensors = [input(r, &[3], DType::F32)?, input(r, &[2, 2], DType::F32)?];
    let gather = Collective::AllGather([3, 2].into_iter().map(|len| Cut::even(0, len, n)).collect());
    let wants = g.call(gather.clone()).run_all(&tensors)?;
    let outs = wants.iter().map(room).collect::<Result<Vec<_>>>()?;
    g.call(gather).into(&outs[0]).into(&outs[1]).run_all(&tensors)?;
    outs.iter().zip(&wants).try_for_each(|(out, want)| assert_same(out, want, "one of two"))
}
