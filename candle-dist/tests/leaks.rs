//! Memory stays flat over many calls, groups and worlds.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor};
use candle_dist::{Collective, Error, ReduceOp, World};
use test_utils::{on_ranks, stays_flat};

// A single test, because memory is measured for the whole process.
#[test]
fn resident_memory_stays_flat() {
    on_ranks(2, "calls", |ctx| {
        let (g, x) = (ctx.group(), Tensor::ones(16, DType::F32, &Device::Cpu)?);
        let peer = 1 - g.rank();
        stays_flat("all_reduces", 100_000, || g.all_reduce(&x, ReduceOp::Sum).map(drop))?;
        stays_flat("messages", 20_000, || {
            g.send(&x, peer)?;
            g.recv(16, DType::F32, peer).map(drop)
        })
    });
    on_ranks(4, "groups", |ctx| {
        let g = ctx.group();
        let pair = (g.rank() / 2) as u32;
        stays_flat("groups", 5_000, || g.split(Some(pair), 0)?.expect("a color").barrier())?;
        // These groups are never used, and members drop them at different times.
        stays_flat("unused groups", 5_000, || g.subgroup(&[0, 1, 2, 3]).and_then(|_unused| g.barrier()))
    });
    // A world that fails while a member of a group is missing and a message is unread.
    stays_flat("failed worlds", 40, || {
        let outcome = World::threads(2).run(|ctx| match ctx.rank() {
            0 => {
                let group = ctx.group().subgroup(&[0, 1])?;
                group
                    .call(Collective::Send { to: 1, tag: 0 })
                    .owned()
                    .run_all(&[Tensor::ones(100_000, DType::F32, &Device::Cpu)?])
                    .map(drop)?;
                ctx.group().barrier()
            }
            _ => Err(Error::Unsupported("on purpose".to_string())),
        });
        assert_eq!(outcome.unwrap_err().rank, 1);
        Ok::<_, Error>(())
    })
    .unwrap();
    stays_flat("worlds", 1_000, || {
        on_ranks(3, "worlds", |ctx| ctx.group().barrier());
        Ok::<_, Error>(())
    })
    .unwrap();
}
