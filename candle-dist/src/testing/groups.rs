//! Groups of some ranks in any order.
use super::Case;
use super::values::{assert_same, input};
use crate::backend::{Call, Form, Tensors};
use crate::{Collective, Error, ProcessGroup, RankContext, ReduceOp, Result};
use candle_core::{DType, Device, Tensor};
use std::time::Duration;

pub(super) const CASES: &[Case] = &[
    Case { name: "split counts ranks in the order of keys", least: 1, run: split },
    Case { name: "only members make a group, as often as they like", least: 2, run: members },
    Case { name: "groups that overlap do not meet", least: 2, run: overlapping },
    Case { name: "several groups of the same ranks do not meet", least: 2, run: twins },
    Case { name: "a monitored barrier lets all pass", least: 1, run: monitored },
    Case { name: "monitored barriers of several threads on one group", least: 2, run: monitored_by_threads },
    Case { name: "meshes, and text from rank to rank", least: 1, run: meshes },
];

fn split(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let half = g.split(Some((r % 2) as u32), -(r as i64))?.expect("every rank gave a color");
    let members: Vec<usize> = (0..n).rev().filter(|member| member % 2 == r % 2).collect();
    assert_eq!(half.ranks(), members);
    assert_eq!(half.ranks()[half.rank()], r);
    let sum = half.all_reduce(&Tensor::new(r as f32, &Device::Cpu)?, ReduceOp::Sum)?.to_scalar::<f32>()?;
    assert_eq!(sum, members.iter().sum::<usize>() as f32);
    assert_eq!(g.split((r > 0).then_some(0), 0)?.is_some(), r > 0);
    g.barrier()
}

fn members(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let (first, last) = (n - 2, n - 1);
    if r >= first {
        for round in 0..20 {
            let pair = g.subgroup(&[last, first])?;
            assert_eq!((pair.size(), pair.rank(), pair.ranks()), (2, last - r, &[last, first][..]));
            assert_same(
                &pair.broadcast(&input(r, &[3], DType::F32)?, 1)?,
                &input(first, &[3], DType::F32)?,
                "pair",
            )?;
            if round % 3 == 0 {
                pair.barrier()?;
            }
        }
    } else {
        assert!(g.subgroup(&[first, last]).expect_err("not a member").to_string().contains("only members"));
    }
    g.barrier()
}

fn overlapping(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    // Each rank is in a group with the next rank and in one with the previous rank. Odd ranks reverse the order.
    let mut starts = [r, (r + n - 1) % n];
    if r % 2 == 1 {
        starts.reverse();
    }
    let pairs: Vec<_> =
        starts.into_iter().map(|s| Ok((s, g.subgroup(&[s, (s + 1) % n])?))).collect::<Result<_>>()?;
    for len in [3, 40_000] {
        let mine = input(r, &[len], DType::F32)?;
        let open = pairs
            .iter()
            .map(|(s, pair)| Ok((s, pair.call(Collective::AllReduce(ReduceOp::Sum)).start(&mine)?)));
        for (s, pending) in open.collect::<Result<Vec<_>>>()? {
            let want = (input(*s, &[len], DType::F32)? + input((s + 1) % n, &[len], DType::F32)?)?;
            assert_same(&pending.wait()?, &want, &format!("{s} and the next"))?;
        }
    }
    g.barrier()
}

fn twins(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let all: Vec<usize> = (0..n).collect();
    let (one, two) = (g.subgroup(&all)?, g.subgroup(&all)?);
    let (next, before) = ((r + 1) % n, (r + n - 1) % n);
    two.send(&input(r + 1, &[4], DType::F32)?, next)?;
    one.send(&input(r, &[4], DType::F32)?, next)?;
    let later = two.call(Collective::AllReduce(ReduceOp::Max)).start(&input(r, &[5], DType::U32)?)?;
    let sum = one.all_reduce(&input(r, &[2], DType::F32)?, ReduceOp::Sum)?;
    assert_eq!(sum.dims(), [2]);
    assert_same(&one.recv(4, DType::F32, before)?, &input(before, &[4], DType::F32)?, "one")?;
    assert_same(&two.recv(4, DType::F32, before)?, &input(before + 1, &[4], DType::F32)?, "two")?;
    assert_eq!(later.wait()?.dims(), [5]);
    Ok(())
}

fn meshes(ctx: &RankContext) -> Result<()> {
    let (r, n) = (ctx.rank(), ctx.world_size());
    let rows = if n % 2 == 0 { 2 } else { 1 };
    let mesh = ctx.mesh(&[("rows", rows), ("columns", n / rows)])?;
    for axis in ["columns", "rows"] {
        let group = mesh.axis_group(axis)?;
        let ranks = group.all_gather(&Tensor::new(&[r as u32], &Device::Cpu)?, 0)?.to_vec1::<u32>()?;
        assert_eq!(ranks, group.ranks().iter().map(|&rank| rank as u32).collect::<Vec<_>>());
    }
    let texts = ctx.group().all_gather_text(&"x".repeat(r * 3000))?;
    assert!(texts.iter().enumerate().all(|(rank, text)| text.len() == rank * 3000));
    ctx.group().agree("the same")
}

/// Returns whether the backend has monitored barriers. If not, all ranks must get the same error.
fn monitors(g: &ProcessGroup) -> Result<bool> {
    let came = match g.call(Collective::Barrier).monitored(Duration::from_secs(60)).run_all(&[]).map(drop) {
        Err(Error::Unsupported(_)) => false,
        other => other.map(|()| true)?,
    };
    g.agree(&format!("monitored barriers: {came}"))?;
    Ok(came)
}

fn monitored(ctx: &RankContext) -> Result<()> {
    if !monitors(ctx.group())? {
        return Ok(());
    }
    let (g, x) = (ctx.group(), input(ctx.rank(), &[4], DType::F32)?);
    for round in 0..3 {
        g.call(Collective::Barrier).monitored(Duration::from_secs(60)).run_all(&[])?;
        let pending = g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
        g.split(Some((ctx.rank() % 2) as u32), round)?
            .expect("a color")
            .call(Collective::Barrier)
            .monitored(Duration::from_secs(60))
            .run_all(&[])?;
        pending.wait()?;
    }
    Ok(())
}

fn monitored_by_threads(ctx: &RankContext) -> Result<()> {
    let g = ctx.group();
    if !monitors(g)? {
        return Ok(());
    }
    g.barrier()?;
    // A group refuses threads that call at the same time; its backend has no such guard, and must keep its rounds in order.
    let call = || Call {
        form: Form::Monitored,
        timeout: Some(Duration::from_secs(20)),
        ..Call::new(Collective::Barrier)
    };
    let barrier = || g.backend().run(call(), Tensors::new(), Tensors::new()).map(drop);
    std::thread::scope(|scope| {
        let come = || (0..100).try_for_each(|_| barrier());
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(come)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    g.barrier()
}
