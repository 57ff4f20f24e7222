//! send, recv and batches of them.
use super::Case;
use super::values::{DTYPES, LENGTHS, assert_same, input};
use candle_core::{DType, Shape};
use candle_dist::{Message, RankContext, Result};

pub(crate) const CASES: &[Case] = &[
    Case { name: "a ring: sends do not wait, and order is kept", least: 2, run: ring },
    Case { name: "sends never wait, however much is unread", least: 2, run: unread },
    Case { name: "messages of every dtype and length in order", least: 2, run: lengths },
    Case { name: "messages are told apart by their tags", least: 2, run: tags },
    Case { name: "messages pass collectives", least: 2, run: passing },
];

/// The ranks behind and before this one.
fn neighbours(ctx: &RankContext) -> (usize, usize) {
    let (r, n) = (ctx.rank(), ctx.world_size());
    ((r + 1) % n, (r + n - 1) % n)
}

fn ring(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbours(ctx));
    g.send(&input(r, &[2, 3], DType::BF16)?.t()?, next)?;
    g.send_owned(input(r + 10, &[1], DType::F64)?, next)?;
    let first = g.recv((3, 2), DType::BF16, before)?;
    assert_same(&first, &input(before, &[2, 3], DType::BF16)?.t()?.contiguous()?, "first")?;
    assert_same(&g.recv(1, DType::F64, before)?, &input(before + 10, &[1], DType::F64)?, "second")?;
    g.barrier()
}

/// More than any transport takes eagerly, both ways, before anybody receives.
fn unread(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbours(ctx));
    for i in 0..48 {
        g.send_owned(input(r + i, &[1 << 18], DType::F32)?, next)?;
    }
    for i in 0..48 {
        let got = g.recv(1 << 18, DType::F32, before)?;
        assert_same(&got, &input(before + i, &[1 << 18], DType::F32)?, &format!("message {i}"))?;
    }
    g.barrier()
}

fn lengths(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbours(ctx));
    for dtype in DTYPES {
        // Large and small ones in turn, so that small ones could overtake.
        let lengths = LENGTHS.into_iter().rev().chain(LENGTHS).chain([0]);
        for (i, len) in lengths.clone().enumerate() {
            g.send_owned(input(r + i, &[len], dtype)?, next)?;
        }
        for (i, len) in lengths.enumerate() {
            let got = g.recv(len, dtype, before)?;
            assert_same(&got, &input(before + i, &[len], dtype)?, &format!("message {i}, {len} {dtype:?}"))?;
        }
    }
    Ok(())
}

fn tags(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbours(ctx));
    let tensor = |rank: usize, tag: u32| input(rank + tag as usize, &[tag as usize * 7000 + 1], DType::I64);
    let send = |tag: u32| -> Result<Message> { Ok(Message::Send { tensor: tensor(r, tag)?, to: next, tag }) };
    let recv = |tag: u32| -> Result<Message> {
        Ok(Message::Recv { shape: Shape::from(tag as usize * 7000 + 1), dtype: DType::I64, from: before, tag })
    };
    let got = g.batch_send_recv(&[recv(2)?, send(0)?, recv(0)?, send(1)?, send(2)?, recv(1)?])?;
    for (got, tag) in got.iter().zip([2, 0, 1]) {
        assert_same(got, &tensor(before, tag)?, &format!("tag {tag}"))?;
    }
    // Any tag there is.
    let last = g.batch_send_recv(&[
        Message::Send { tensor: tensor(r, 0)?, to: next, tag: u32::MAX },
        Message::Recv { shape: Shape::from(1), dtype: DType::I64, from: before, tag: u32::MAX },
    ])?;
    assert_same(&last[0], &tensor(before, 0)?, "the last tag")
}

fn passing(ctx: &RankContext) -> Result<()> {
    let (g, r, (next, before)) = (ctx.group(), ctx.rank(), neighbours(ctx));
    for len in LENGTHS {
        g.send_owned(input(r, &[len], DType::F32)?, next)?;
        g.barrier()?;
        let halves = g.split(Some((r % 2) as u32), 0)?.expect("a color");
        halves.barrier()?;
        assert_same(&g.recv(len, DType::F32, before)?, &input(before, &[len], DType::F32)?, "a message")?;
    }
    Ok(())
}
