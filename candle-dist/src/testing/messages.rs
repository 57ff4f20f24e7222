//! send, recv and batches of them.
use super::Case;
use super::lacks::dtypes;
use super::values::{LENGTHS, assert_same, input};
use super::written;
use crate::backend::Envelope;
use crate::{Collective, CollectiveCall, Error, P2pOp, Pending, ProcessGroup, RankContext, Result};
use candle_core::{DType, Device, Shape, Tensor};
use std::time::{Duration, Instant};

pub(super) const CASES: &[Case] = &[
    Case { name: "a ring: sends do not wait, and order is kept", least: 2, run: ring },
    Case { name: "sends never wait, however much is unread", least: 2, run: unread },
    Case { name: "messages of every dtype and length in order", least: 2, run: lengths },
    Case { name: "messages are told apart by their tags", least: 2, run: tags },
    Case { name: "messages pass collectives", least: 2, run: passing },
    Case { name: "started messages keep their order, however they are waited for", least: 2, run: started },
    Case { name: "a started receive is ready when its message is there", least: 2, run: ready },
    Case { name: "a dropped receive takes its message", least: 2, run: dropped },
    Case { name: "a probe passes over what started receives await", least: 2, run: awaited },
    Case { name: "memory may change as soon as it is sent", least: 2, run: written::sent },
    Case { name: "messages from any rank, and what is known of them before", least: 2, run: any },
];

/// Returns the previous and the next rank.
fn neighbors(ctx: &RankContext) -> (usize, usize) {
    let (r, n) = (ctx.rank(), ctx.world_size());
    ((r + 1) % n, (r + n - 1) % n)
}

fn ring(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbors(ctx));
    g.send(&input(r, &[2, 3], DType::BF16)?.t()?, next)?;
    g.call(Collective::Send { to: next, tag: 0 }).owned().run_all(&[input(r + 10, &[1], DType::F64)?])?;
    let first = g.recv((3, 2), DType::BF16, before)?;
    assert_same(&first, &input(before, &[2, 3], DType::BF16)?.t()?.contiguous()?, "first")?;
    assert_same(&g.recv(1, DType::F64, before)?, &input(before + 10, &[1], DType::F64)?, "second")?;
    g.barrier()
}

/// More data than any transport sends eagerly, in both directions, before any rank receives.
fn unread(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbors(ctx));
    for i in 0..48 {
        drop(g.call(Collective::Send { to: next, tag: 0 }).owned().start_all(&[input(
            r + i,
            &[1 << 18],
            DType::F32,
        )?])?);
    }
    for i in 0..48 {
        let got = g.recv(1 << 18, DType::F32, before)?;
        assert_same(&got, &input(before + i, &[1 << 18], DType::F32)?, &format!("message {i}"))?;
    }
    g.barrier()
}

fn lengths(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbors(ctx));
    for dtype in dtypes(ctx.group()) {
        // Large and small messages alternate, so that small ones could overtake.
        let lengths = LENGTHS.into_iter().rev().chain(LENGTHS).chain([0]);
        for (i, len) in lengths.clone().enumerate() {
            g.call(Collective::Send { to: next, tag: 0 }).owned().run_all(&[input(r + i, &[len], dtype)?])?;
        }
        for (i, len) in lengths.enumerate() {
            let got = g.recv(len, dtype, before)?;
            assert_same(&got, &input(before + i, &[len], dtype)?, &format!("message {i}, {len} {dtype:?}"))?;
        }
    }
    Ok(())
}

fn tags(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbors(ctx));
    let tensor = |rank: usize, tag: u32| input(rank + tag as usize, &[tag as usize * 7000 + 1], DType::I64);
    let send = |tag: u32| -> Result<P2pOp> { Ok(P2pOp::Send { tensor: tensor(r, tag)?, to: next, tag }) };
    let recv = |tag: u32| -> Result<P2pOp> {
        Ok(P2pOp::Recv { shape: Shape::from(tag as usize * 7000 + 1), dtype: DType::I64, from: before, tag })
    };
    let got = g.batch_send_recv(&[recv(2)?, send(0)?, recv(0)?, send(1)?, send(2)?, recv(1)?])?;
    for (got, tag) in got.iter().zip([2, 0, 1]) {
        assert_same(got, &tensor(before, tag)?, &format!("tag {tag}"))?;
    }
    // Any tag is allowed.
    let last = g.batch_send_recv(&[
        P2pOp::Send { tensor: tensor(r, 0)?, to: next, tag: u32::MAX },
        P2pOp::Recv { shape: Shape::from(1), dtype: DType::I64, from: before, tag: u32::MAX },
    ])?;
    assert_same(&last[0], &tensor(before, 0)?, "the last tag")
}

fn passing(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbors(ctx));
    for len in LENGTHS {
        g.call(Collective::Send { to: next, tag: 0 }).owned().run_all(&[input(r, &[len], DType::F32)?])?;
        g.barrier()?;
        let halves = g.split(Some((r % 2) as u32), 0)?.expect("a color");
        halves.barrier()?;
        assert_same(&g.recv(len, DType::F32, before)?, &input(before, &[len], DType::F32)?, "a message")?;
    }
    Ok(())
}

fn started(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbors(ctx));
    for len in LENGTHS {
        for tag in [0, 7] {
            let receives = (0..3)
                .map(|_| g.call(Collective::Recv { from: Some(before), tag }).of(len, DType::F32).start(None))
                .collect::<Result<Vec<_>>>()?;
            let sends = (0..4).map(|i| {
                g.call(Collective::Send { to: next, tag }).start_all(std::slice::from_ref(&input(
                    r + i,
                    &[len],
                    DType::F32,
                )?))
            });
            Pending::wait_all(sends.collect::<Result<Vec<_>>>()?)?;
            // A blocking receive comes after those that were started.
            let last = g.batch_send_recv(&[P2pOp::Recv {
                shape: len.into(),
                dtype: DType::F32,
                from: before,
                tag,
            }])?;
            assert_same(&last[0], &input(before + 3, &[len], DType::F32)?, "the last")?;
            for (i, receive) in receives.into_iter().enumerate().rev() {
                assert_same(&receive.wait()?, &input(before + i, &[len], DType::F32)?, "a started one")?;
            }
        }
    }
    Ok(())
}

/// A receive of any rank.
fn any_sender(g: &ProcessGroup, tag: u32) -> CollectiveCall<'_> {
    g.call(Collective::Recv { from: None, tag })
}

/// Runs `f`, unless the backend does not support it, which it must report on all ranks.
fn where_there_is(g: &ProcessGroup, f: impl FnOnce() -> Result<()>) -> Result<()> {
    match any_sender(g, 0).probe() {
        Err(Error::Unsupported(text)) => {
            assert!(text.contains("cannot probe"), "{text}");
            let (error, next) =
                (any_sender(g, 0).of(1, DType::F32).receive().unwrap_err(), (g.rank() + 1) % g.size());
            assert!(matches!(error, Error::Unsupported(_)), "{error}");
            let receive =
                g.call(Collective::Recv { from: Some(next), tag: 9 }).of(1, DType::F32).start(None)?;
            assert!(matches!(receive.is_ready(), Err(Error::Unsupported(_))));
            g.call(Collective::Send { to: (g.rank() + g.size() - 1) % g.size(), tag: 9 })
                .start_all(std::slice::from_ref(&Tensor::new(&[1f32], &Device::Cpu)?))?
                .wait()?;
            receive.wait().map(drop)
        }
        Err(other) => Err(other),
        Ok(_) => f(),
    }
}

/// Waits for `what`, with a time limit.
fn soon(what: impl Fn() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !what()? {
        assert!(began.elapsed() < Duration::from_secs(60), "it never comes");
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

fn ready(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbors(ctx));
    where_there_is(g, || {
        let (first, second) = (
            g.call(Collective::Recv { from: Some(before), tag: 1 }).of(2, DType::F32).start(None)?,
            g.call(Collective::Recv { from: Some(before), tag: 1 }).of(2, DType::F32).start(None)?,
        );
        g.barrier()?;
        assert!(!first.is_ready()? && !second.is_ready()?);
        g.barrier()?;
        g.call(Collective::Send { to: next, tag: 1 })
            .start_all(std::slice::from_ref(&input(r, &[2], DType::F32)?))?
            .wait()?;
        soon(|| first.is_ready())?;
        assert!(!second.is_ready()?);
        g.barrier()?;
        g.call(Collective::Send { to: next, tag: 1 })
            .start_all(std::slice::from_ref(&input(r + 1, &[2], DType::F32)?))?
            .wait()?;
        assert_same(
            &second.wait_timeout(Duration::from_secs(60))?,
            &input(before + 1, &[2], DType::F32)?,
            "second",
        )?;
        assert_same(&first.wait()?, &input(before, &[2], DType::F32)?, "first")
    })
}

fn awaited(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbors(ctx));
    where_there_is(g, || {
        for from in [None, Some(before)] {
            let first =
                g.call(Collective::Recv { from: Some(before), tag: 3 }).of(2, DType::F32).start(None)?;
            g.call(Collective::Send { to: next, tag: 3 })
                .start_all(std::slice::from_ref(&input(r, &[2], DType::F32)?))?
                .wait()?;
            g.barrier()?;
            assert_eq!(
                g.call(Collective::Recv { from, tag: 3 }).probe()?,
                None,
                "the message is that of the receive that was started"
            );
            g.barrier()?;
            g.call(Collective::Send { to: next, tag: 3 })
                .start_all(std::slice::from_ref(&input(r + 1, &[2], DType::F32)?))?
                .wait()?;
            g.barrier()?;
            assert_eq!(
                g.call(Collective::Recv { from, tag: 3 }).probe()?.map(|envelope| envelope.from),
                Some(before),
                "nobody awaits the second"
            );
            assert_same(
                &any_sender(g, 3).of(2, DType::F32).receive()?.1,
                &input(before + 1, &[2], DType::F32)?,
                "the second",
            )?;
            assert_same(&first.wait()?, &input(before, &[2], DType::F32)?, "the first")?;
            g.barrier()?;
        }
        Ok(())
    })
}

fn dropped(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbors(ctx));
    drop(g.call(Collective::Recv { from: Some(before), tag: 0 }).of(2, DType::F32).start(None)?);
    for i in 0..2 {
        g.send(&input(r + i, &[2], DType::F32)?, next)?;
    }
    assert_same(
        &g.recv(2, DType::F32, before)?,
        &input(before + 1, &[2], DType::F32)?,
        "the second message",
    )?;
    g.barrier()
}

fn any(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    where_there_is(g, || {
        for to in 0..n {
            if r != to {
                for part in 0..2 {
                    g.call(Collective::Send { to, tag: 5 })
                        .start_all(std::slice::from_ref(&input(r + part, &[r + 1], DType::I64)?))?
                        .wait()?;
                }
            }
        }
        let mut parts = vec![0; n];
        for _ in 0..2 * (n - 1) {
            soon(|| Ok(any_sender(g, 5).probe()?.is_some()))?;
            let Some(Envelope { from, tag, dtype, shape }) = any_sender(g, 5).probe()? else {
                unreachable!()
            };
            let one_sender = |tag| g.call(Collective::Recv { from: Some(from), tag });
            assert_eq!((tag, dtype, shape.dims()), (5, DType::I64, &[from + 1][..]));
            assert_eq!(one_sender(5).probe()?.map(|envelope| envelope.from), Some(from));
            assert_eq!(one_sender(6).probe()?, None);
            let (sender, got) = any_sender(g, 5).of(from + 1, DType::I64).receive()?;
            assert_eq!(sender, from);
            assert_same(
                &got,
                &input(from + parts[from], &[from + 1], DType::I64)?,
                "from anybody, in order",
            )?;
            parts[from] += 1;
        }
        g.barrier()?; // the messages below are not among those that others still await above
        let pending =
            g.call(Collective::Recv { from: Some((r + 1) % n), tag: 5 }).of(1, DType::I64).start(None)?;
        let text = any_sender(g, 5).of(1, DType::I64).receive().unwrap_err().to_string();
        assert!(text.contains("that were started come first"), "{text}");
        g.call(Collective::Send { to: (r + n - 1) % n, tag: 5 })
            .start_all(std::slice::from_ref(&input(0, &[1], DType::I64)?))?
            .wait()?;
        pending.wait()?;
        assert_eq!(any_sender(g, 5).probe()?, None);
        g.barrier()
    })
}
