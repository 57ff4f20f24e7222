//! What enters the mesh and leaves it: gradients that would be lost, values that would change, ranks that do not agree.
use crate::common::*;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{ReduceOp, World};
use candle_shard::{DTensor, Partial, Replicate, Result, Shard, compare_operands};
use test_utils::{on_ranks, world};

#[test]
fn a_gradient_that_distribute_would_lose_is_refused() {
    on_ranks(2, "lost", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let var = Var::from_tensor(&values(&[4, 3], 1, DType::F64))?;
        for tracked in [var.as_tensor().clone(), (var.as_tensor() * 2.0)?] {
            let text = DTensor::distribute(&tracked, &mesh, &[Shard(0)]).unwrap_err().to_string();
            assert!(
                text.starts_with("distribute: a tensor [4, 3] with a gradient, which would be lost"),
                "{text}"
            );
            let text = DTensor::distribute_from(&tracked, 1, &mesh, &[Shard(0)]).unwrap_err().to_string();
            assert!(text.contains("with a gradient"), "{text}");
        }
        // The two ways that the message names.
        let grads = DTensor::replicated(var.as_tensor(), &mesh)?
            .redistribute(&[Shard(0)])?
            .sqr()?
            .sum_all()?
            .backward()?;
        assert!(distance(grads.get(&var).unwrap(), &(var.as_tensor() * 2.0)?.detach()) < 1e-12);
        DTensor::distribute(&var.as_tensor().detach(), &mesh, &[Shard(0)])?;
        Ok(())
    });
}

#[test]
fn a_leaf_with_a_gradient_is_no_average() {
    on_ranks(2, "average", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let x = values(&[3], 1, DType::F64);
        for op in [ReduceOp::Avg, ReduceOp::Max, ReduceOp::Product] {
            let var = Var::from_tensor(&x)?;
            let text = DTensor::from_local(var.as_tensor().clone(), &mesh, &[Partial(op)], 3)
                .unwrap_err()
                .to_string();
            assert!(text.contains(&format!("P({op}) carries none; detach it")), "{text}");
            DTensor::from_local(x.clone(), &mesh, &[Partial(op)], 3)?.full_tensor()?;
        }
        Ok(())
    });
}

#[test]
fn what_was_read_of_a_parameter_stays_after_a_step() {
    for world in [1, 2] {
        on_ranks(world, "read", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[world])?;
            let whole = values(&[4, 3], 1, DType::F64);
            for at in [Replicate, Shard(0)] {
                let (leaf, var) = DTensor::distribute(&whole, &mesh, &[at])?.to_var()?;
                let read =
                    [leaf.full_tensor()?, leaf.detach().full_tensor()?, leaf.reshape(12)?.full_tensor()?];
                let grads = leaf.full_tensor()?.sqr()?.sum_all()?.backward()?;
                assert!(distance(grads.get(&var).unwrap(), &block(&(&whole * 2.0)?, leaf.spec())?) < 1e-12);
                var.set(&var.zeros_like()?)?;
                for read in read {
                    assert_eq!(distance(&read.reshape((4, 3))?.detach(), &whole), 0.0, "{at} on {world}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_result_cannot_be_made_to_vary() {
    on_ranks(2, "vary", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let (leaf, _) =
            DTensor::distribute(&values(&[4, 3], 1, DType::F64), &mesh, &[Replicate])?.to_var()?;
        for result in
            [leaf.affine(2.0, 0.0)?, leaf.t()?, leaf.redistribute(&[Shard(0)])?.redistribute(&[Replicate])?]
        {
            let text = result.varying_on(0).unwrap_err().to_string();
            assert!(text.contains("is the result of an op") && text.contains("let the leaves"), "{text}");
        }
        assert!(leaf.clone().varying_on(0)?.is_varying(0));
        leaf.affine(2.0, 0.0)?.detach().varying_on(0).map(drop)
    });
}

#[test]
fn operands_that_differ_are_found() {
    type Operation = fn(&DTensor, &Tensor) -> Result<DTensor>;
    // Debug builds compare what is distributed at each use, and operands on the first use of a line.
    let uses: [(Operation, bool); 4] = [
        (|x, plain| x.mul(plain), false),
        (|x, plain| (x + plain)? - plain, false),
        (|x, plain| DTensor::distribute(plain, x.mesh(), &[Shard(0)]), cfg!(debug_assertions)),
        (|x, plain| DTensor::replicated(plain, x.mesh()), false),
    ];
    for (operation, is_always_compared) in uses {
        for (first, asked) in [(true, false), (false, false), (false, true)] {
            let ran = world(2).run(|ctx| -> Result<()> {
                let mesh = mesh(ctx, &[2])?;
                let x = DTensor::ones(4, DType::F64, &Device::Cpu, &mesh, &[Shard(0)])?;
                let (same, mine) = (Tensor::ones(4, DType::F64, &Device::Cpu)?, ctx.rank() as f64);
                let mine = Tensor::full(mine, 4, &Device::Cpu)?;
                let uses = if first { vec![mine] } else { vec![same, mine] };
                uses.iter().try_for_each(|plain| match asked {
                    true => compare_operands(|| operation(&x, plain)).map(drop),
                    false => operation(&x, plain).map(drop),
                })
            });
            let is_found = first || asked || is_always_compared;
            assert_eq!(ran.is_err(), is_found, "{first} {asked}");
            let text = ran.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(
                !is_found || text.contains("give the same tensor") && text.contains("f64[4] with the hash"),
                "{text}"
            );
        }
    }
}

#[test]
fn unlike_bad_indexes_on_two_ranks_are_one_error() {
    type Lookup = fn(&DTensor, &DTensor) -> Result<DTensor>;
    let uses: [(&str, Lookup); 6] = [
        ("embedding", |x, ids| x.embedding(&ids.flatten_all()?)),
        ("index_select", |x, ids| x.index_select(&ids.flatten_all()?, 0)),
        ("gather", |x, ids| x.gather(ids, 0)),
        ("scatter_add", |x, ids| x.scatter_add(ids, &x.zeros_like()?.narrow(0, 0, 4)?, 0)),
        ("index_add", |x, ids| x.index_add(&ids.get_on_dim(1, 0)?, &x.narrow(0, 0, 4)?, 0)),
        ("cross_entropy", |x, ids| x.narrow(0, 0, 4)?.cross_entropy(&ids.get_on_dim(1, 0)?)),
    ];
    for (name, lookup) in uses {
        let texts = std::sync::Mutex::new(Vec::new());
        let ran = World::threads(2).run(|ctx| -> Result<()> {
            let mesh = mesh(ctx, &[2])?;
            let x = DTensor::distribute(&values(&[6, 3], 1, DType::F64), &mesh, &[Replicate])?;
            let ids = Tensor::new(&[[1u32, 1, 1], [70, 1, 1], [2, 2, 2], [80, 0, 0]], &Device::Cpu)?;
            let ids = DTensor::distribute(&ids, &mesh, &[Shard(0)])?;
            let error = lookup(&x, &ids).unwrap_err();
            texts.lock().unwrap().push(error.to_string());
            Err(error)
        });
        ran.unwrap_err();
        let texts = texts.into_inner().unwrap();
        assert_eq!(texts[0], texts[1], "{name}");
        let bad = ["70", "80"].iter().filter(|bad| texts[0].contains(&format!(" {bad} is outside"))).count();
        assert!(bad == 1 && texts[0].contains(name), "{texts:?}");
        // Of indexes that all ranks see the error is theirs, and the world goes on.
        on_ranks(2, "seen", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[2])?;
            let x = DTensor::distribute(&values(&[6, 3], 1, DType::F64), &mesh, &[Replicate])?;
            let ids = DTensor::distribute(&Tensor::full(70u32, (4, 3), &Device::Cpu)?, &mesh, &[Replicate])?;
            let text = lookup(&x, &ids).unwrap_err().to_string();
            assert!(text.starts_with(name) && text.contains(" 70 is outside"), "{text}");
            Ok(mesh.group()?.barrier()?)
        });
    }
}
