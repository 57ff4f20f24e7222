//! Started calls that finish in another order, coalesced calls that differ, and messages with tags.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_dist::{Cause, Collective, Cut, Error, P2pOp, ReduceOp, Result};
use std::time::Duration;
use test_utils::{Ranks, on_ranks};

fn input(rank: usize, shape: &[usize], dtype: DType) -> candle_core::Result<Tensor> {
    let values: Vec<f32> = (0..shape.iter().product()).map(|i| ((i * 7 + rank * 3) % 5 + 1) as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
}

fn assert_same(got: &Tensor, want: &Tensor) {
    let values =
        |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    assert_eq!((got.dims(), got.dtype(), values(got)), (want.dims(), want.dtype(), values(want)));
}

#[test]
fn coalesced_lists_that_differ_are_a_mismatch() {
    let outcome = Ranks::new(2, "lists").run(|ctx| -> Result<()> {
        let shapes: &[usize] = if ctx.rank() == 0 { &[2, 3] } else { &[2, 4] };
        let tensors: Vec<Tensor> =
            shapes.iter().map(|&n| input(0, &[n], DType::F32)).collect::<Result<_, _>>()?;
        ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).run_all(&tensors).map(drop)
    });
    assert!(outcome.unwrap_err().to_string().contains("shape differs"));
}

#[test]
fn pending_calls_may_be_waited_for_in_any_order() {
    for n in 1..=5 {
        on_ranks(n, "pending", move |ctx| -> Result<()> {
            let (g, r) = (ctx.group(), ctx.rank());
            let x = input(r, &[n, 2], DType::F32)?;
            for reverse in [false, true] {
                let mut open = vec![
                    (
                        g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?,
                        g.all_reduce(&x, ReduceOp::Sum)?,
                    ),
                    (
                        g.call(Collective::all_gather(Cut::even(1, x.dims()[1], g.size()))).start(&x)?,
                        g.all_gather(&x, 1)?,
                    ),
                    (
                        g.call(Collective::reduce_scatter(
                            Cut::even(0, x.dims()[0] / g.size(), g.size()),
                            ReduceOp::Avg,
                        ))
                        .start(&x)?,
                        g.reduce_scatter(&x, 0, ReduceOp::Avg)?,
                    ),
                    (
                        g.call(Collective::AllToAll {
                            split: Cut::even(0, x.dims()[0] / g.size(), g.size()),
                            concat: Cut::even(1, x.dims()[1], g.size()),
                        })
                        .start(&x)?,
                        g.all_to_all(&x, 0, 1)?,
                    ),
                    (g.call(Collective::Broadcast { root: 0 }).start(&x)?, g.broadcast(&x, 0)?),
                ];
                // Each rank waits in its own order.
                open.rotate_left(r % 4);
                if reverse != (r % 2 == 0) {
                    open.reverse();
                }
                for (pending, want) in open {
                    assert_same(&pending.wait()?, &want);
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_pending_call_is_ready_when_all_have_started_it() {
    on_ranks(2, "ready", |ctx| -> Result<()> {
        let (g, x) = (ctx.group(), input(0, &[4], DType::F32)?);
        if ctx.rank() == 0 {
            let pending = g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
            assert!(!pending.is_ready()?);
            g.send(&x, 1)?; // only now does rank 1 start
            assert_same(&pending.wait()?, &(x * 2.0)?);
        } else {
            g.recv(4, DType::F32, 0)?;
            let pending = g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
            assert!(pending.is_ready()?);
            pending.wait()?;
        }
        Ok(())
    });
}

#[test]
fn a_variable_may_change_while_a_call_is_pending() {
    on_ranks(3, "variable", |ctx| -> Result<()> {
        let var = Var::ones(1000, DType::F32, &Device::Cpu)?;
        let pending = ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(var.as_tensor())?;
        var.set(&var.zeros_like()?)?;
        assert_same(&pending.wait()?, &(Tensor::ones(1000, DType::F32, &Device::Cpu)? * 3.0)?);
        Ok(())
    });
}

#[test]
fn a_dropped_pending_call_lets_the_others_go_on() {
    on_ranks(3, "dropped", |ctx| -> Result<()> {
        let (g, x) = (ctx.group(), input(0, &[4], DType::F32)?);
        let pending = g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
        if ctx.rank() == 1 {
            drop(pending);
        } else {
            assert_same(&pending.wait()?, &(&x * 3.0)?);
        }
        g.barrier()
    });
}

#[test]
fn waiting_for_a_rank_that_never_starts_is_an_error() {
    let outcome = Ranks::new(2, "never").deadline(Duration::from_secs(5)).run(|ctx| -> Result<()> {
        let x = input(0, &[4], DType::F32)?;
        if ctx.rank() == 0 {
            let error = ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?.wait().unwrap_err();
            assert!(matches!(&error, Error::Group(f) if f.cause == Cause::Returned { rank: 1 }), "{error}");
        }
        Ok(())
    });
    assert!(outcome.is_ok(), "{outcome:?}");
}

#[test]
fn messages_are_told_apart_by_their_tags() {
    for n in 2..=5 {
        on_ranks(n, "tags", move |ctx| -> Result<()> {
            let (g, r) = (ctx.group(), ctx.rank());
            let (next, before) = ((r + 1) % n, (r + n - 1) % n);
            let send = |tag: u32| -> Result<P2pOp> {
                Ok(P2pOp::Send {
                    tensor: input(r + tag as usize, &[tag as usize + 1], DType::I64)?,
                    to: next,
                    tag,
                })
            };
            let recv = |tag: u32| P2pOp::Recv {
                shape: Shape::from(tag as usize + 1),
                dtype: DType::I64,
                from: before,
                tag,
            };
            let got = g.batch_send_recv(&[recv(2), send(0)?, recv(0), send(1)?, send(2)?, recv(1)])?;
            for (tensor, tag) in got.iter().zip([2usize, 0, 1]) {
                assert_same(tensor, &input(before + tag, &[tag + 1], DType::I64)?);
            }
            Ok(())
        });
    }
}
