//! Memory that a program writes to, or frees, while calls and messages need it.
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::testing::GROUPS;
use candle_dist::{Collective, Cut, FreeableTensor, ReduceOp, Result, World};
use std::sync::atomic::{AtomicBool, Ordering};
use test_utils::Attacks;

/// Runs a case of the conformance suite on this many threads.
fn case(group: &str, name: &str, ranks: usize) -> Result<(), String> {
    let (_, cases) = GROUPS.iter().find(|(of, _)| *of == group).unwrap();
    let case = cases.iter().find(|case| case.name == name).unwrap();
    World::threads(ranks).run(case.run).map(drop).map_err(|error| error.to_string())
}

#[test]
fn memory_may_change_at_once() {
    let mut attacks = Attacks::new("memory of calls between threads");
    for ranks in 1..4 {
        attacks.attack(format!("started calls on {ranks}"), || {
            case("started", "memory may change while a call is pending", ranks)
        });
    }
    for ranks in 2..4 {
        attacks.attack(format!("messages on {ranks}"), || {
            case("messages", "memory may change as soon as it is sent", ranks)
        });
    }
    attacks.attack("a writer that never stops", || {
        let len = 100_000;
        let sums = World::threads(2).run(|ctx| -> Result<Vec<f32>> {
            let var = Var::ones(len, DType::F32, &Device::Cpu)?;
            let (is_over, other) = (AtomicBool::new(false), 1 - ctx.rank());
            std::thread::scope(|scope| {
                let _ends = Ends(&is_over);
                scope.spawn(|| {
                    for value in (1..3).cycle().take_while(|_| !is_over.load(Ordering::Relaxed)) {
                        var.set(&Tensor::full(value as f32, len, &Device::Cpu).unwrap()).unwrap();
                    }
                });
                let mut torn = Vec::new();
                for _ in 0..100 {
                    let view = var.narrow(0, 1, len - 1)?;
                    let pending = ctx
                        .group()
                        .call(Collective::all_gather(Cut::even(0, view.dims()[0], ctx.group().size())))
                        .start(&view)?;
                    ctx.group().send(&view, other)?;
                    let parts = pending.wait()?.chunk(2, 0)?;
                    for part in [&parts[0], &parts[1], &ctx.group().recv(len - 1, DType::F32, other)?] {
                        torn.push((part.max_all()? - part.min_all()?)?.to_scalar::<f32>()?);
                    }
                }
                Ok(torn)
            })
        });
        let torn: usize = sums.unwrap().iter().flatten().filter(|torn| **torn != 0.0).count();
        if torn == 0 { Ok(()) } else { Err(format!("{torn} tensors are torn")) }
    });
    attacks.attack("memory that is freed", || {
        let sums = World::threads(2).run(|ctx| -> Result<f32> {
            let tensor = FreeableTensor::new(Tensor::ones(50_000, DType::F32, &Device::Cpu)?)?;
            let pending = ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&tensor.tensor()?)?;
            ctx.group().send(&tensor.tensor()?, 1 - ctx.rank())?;
            tensor.free()?;
            let received = ctx.group().recv(50_000, DType::F32, 1 - ctx.rank())?;
            Ok((pending.wait()? + received)?.sum_all()?.to_scalar::<f32>()?)
        });
        if sums.unwrap() == [150_000.0; 2] { Ok(()) } else { Err("other sums") }
    });
    attacks.assert();
}

/// Ends a writer, also when a rank fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
