//! Uses of one replicated weight share one backward all_reduce.
use super::*;

#[test]
fn all_uses_of_a_replicated_weight_share_one_backward_all_reduce() {
    for world in 1..=4 {
        on_ranks(world, "recurrent", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[world])?;
            let (input, weight, bias) =
                (values(&[5, 3], 1, DType::F64), values(&[3, 3], 2, DType::F64), values(&[3], 3, DType::F64));
            let recurrent = |steps: usize| -> Result<(usize, usize)> {
                let x = Leaf::new(&input, &mesh, &[Lay::At(Shard(0))])?;
                let [w, b] =
                    [&weight, &bias].map(|whole| Leaf::new(whole, &mesh, &[Lay::At(Replicate)]).unwrap());
                let plain = plain_grads(&[&input, &weight, &bias], |v| {
                    (0..steps).try_fold(v[0].as_tensor().clone(), |h, _| {
                        h.matmul(&v[1].t()?)?.broadcast_add(&v[2])?.tanh()
                    })
                });
                let run = || {
                    (0..steps).try_fold(x.tensor.clone(), |h, _| h.linear(&w.tensor, Some(&b.tensor))?.tanh())
                };
                let loss = run()?.sum_all()?;
                let (grads, counts) = comm::record(|| loss.backward());
                let grads = grads?;
                for (leaf, want) in [&x, &w, &b].into_iter().zip(&plain) {
                    close(leaf.gradient_error(&grads, want)?, "recurrent");
                }
                // A step in place between two passes is seen by the next.
                w.var.set(&(w.var.as_detached_tensor() * 2.0)?)?;
                let twice = [input.clone(), (&weight * 2.0)?, bias.clone()];
                let plain =
                    plain_grads(&twice.each_ref(), |v| v[0].matmul(&v[1].t()?)?.broadcast_add(&v[2])?.tanh());
                let grads = x.tensor.linear(&w.tensor, Some(&b.tensor))?.tanh()?.sum_all()?.backward()?;
                close(w.gradient_error(&grads, &plain[1])?, "after a step in place");
                // candle's own backward pass sums each use by itself.
                let local = x
                    .tensor
                    .linear(&w.tensor, Some(&b.tensor))?
                    .tanh()?
                    .sum_all()?
                    .full_tensor()?
                    .backward()?;
                close(w.gradient_error(&local, &plain[1])?, "in candle's own pass");
                Ok((counts.get(Op::AllReduce).count, counts.total()))
            };
            let once = if world == 1 { 0 } else { 1 };
            for steps in [1, 2, 7] {
                assert_eq!(recurrent(steps)?, (once, once), "{steps} steps");
            }
            Ok(())
        });
    }
}

#[test]
fn uses_that_differ_on_two_axes_share_one_all_reduce_on_each() {
    on_ranks(4, "recurrent on two axes", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2, 2])?;
        let (input, weight) = (values(&[5, 3], 1, DType::F64), values(&[3, 3], 2, DType::F64));
        let x = Leaf::new(&input, &mesh, &[Lay::At(Shard(0)), Lay::At(Shard(0))])?;
        let w = Leaf::new(&weight, &mesh, &[Lay::At(Replicate), Lay::At(Replicate)])?;
        let plain = plain_grads(&[&input, &weight], |v| {
            (0..4).try_fold(v[0].as_tensor().clone(), |h, _| h.matmul(&v[1].t()?)?.tanh())
        });
        let loss = (0..4).try_fold(x.tensor.clone(), |h, _| h.linear(&w.tensor, None)?.tanh())?.sum_all()?;
        let (grads, counts) = comm::record(|| loss.backward());
        let grads = grads?;
        close(x.gradient_error(&grads, &plain[0])?, "input");
        close(w.gradient_error(&grads, &plain[1])?, "weight");
        assert_eq!((counts.get(Op::AllReduce).count, counts.total()), (2, 2), "{counts}");
        Ok(())
    });
}

#[test]
fn views_of_a_replicated_weight_share_one_backward_all_reduce() {
    for axes in [&[1][..], &[2], &[3], &[4], &[2, 2]] {
        on_ranks(axes.iter().product(), "views", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, axes)?;
            let (input, weight, bias) = (
                values(&[5, 3], 1, DType::F64),
                values(&[3, 3], 2, DType::F64),
                values(&[1, 6], 3, DType::F64),
            );
            let lays = |lay| vec![Lay::At(lay); axes.len()];
            let x = Leaf::new(&input, &mesh, &lays(Shard(0)))?;
            let [w, b] = [&weight, &bias].map(|whole| Leaf::new(whole, &mesh, &lays(Replicate)).unwrap());
            let plain = plain_grads(&[&input, &weight, &bias], |v| {
                (0..4).try_fold(v[0].as_tensor().clone(), |h, _| {
                    let bias = v[2].narrow(1, 2, 3)?.squeeze(0)?;
                    h.matmul(&v[1].t()?)?.broadcast_add(&bias)?.matmul(&v[1].t()?.contiguous()?)?.tanh()
                })
            });
            let run = || {
                (0..4).try_fold(x.tensor.clone(), |h, _| {
                    let bias = b.tensor.narrow(1, 2, 3)?.squeeze(0)?;
                    h.matmul(&w.tensor.t()?)?.add(&bias)?.matmul(&w.tensor.t()?.contiguous()?)?.tanh()
                })
            };
            let loss = run()?.sum_all()?;
            let (grads, counts) = comm::record(|| loss.backward());
            let local = run()?.sum_all()?.full_tensor()?.backward()?;
            for grads in [grads?, local] {
                for (leaf, want) in [&x, &w, &b].into_iter().zip(&plain) {
                    close(leaf.gradient_error(&grads, want)?, "views");
                }
            }
            let once = axes.iter().filter(|&&size| size > 1).count();
            assert_eq!((counts.get(Op::AllReduce).count, counts.total()), (once, once), "{counts}");
            // A step in place between two passes is seen by the next.
            w.var.set(&(w.var.as_detached_tensor() * 2.0)?)?;
            let plain = plain_grads(&[&input, &(&weight * 2.0)?], |v| v[0].matmul(&v[1].t()?)?.sqr());
            let grads = x.tensor.matmul(&w.tensor.t()?)?.sqr()?.sum_all()?.backward()?;
            close(w.gradient_error(&grads, &plain[1])?, "after a step in place");
            Ok(())
        });
    }
}
