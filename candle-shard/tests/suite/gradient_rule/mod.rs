//! The gradient rule, statement by statement.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod failed;
mod recompute;
mod shared;
mod summed;
mod unlike;

use crate::common::*;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, Var};
use candle_dist::{Op, comm};
use candle_shard::nn::{Draws, Dropout, MeshVarBuilder, Mode, backward};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use itertools::Itertools;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use test_utils::on_ranks;

const WORLDS: std::ops::RangeInclusive<usize> = 1..=5;

fn close(error: f64, what: &str) {
    assert!(error <= 1e-11, "{what}: error {error:e}");
}

/// The gradients of a scalar of plain tensors.
fn plain_grads(wholes: &[&Tensor], f: impl Fn(&[Var]) -> candle_core::Result<Tensor>) -> Vec<Tensor> {
    let vars: Vec<Var> = wholes.iter().map(|t| Var::from_tensor(t).unwrap()).collect();
    let grads = f(&vars).unwrap().sum_all().unwrap().backward().unwrap();
    vars.iter().map(|var| grads.get(var).unwrap().clone()).collect()
}

#[test]
fn a_replicated_input_beside_a_sharded_one_gets_the_full_gradient() {
    for world in WORLDS {
        on_ranks(world, "beside", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[world])?;
            let (a, b) = (values(&[5, 3], 1, DType::F64), values(&[5, 3], 2, DType::F64));
            for at in [Shard(0), Shard(1)] {
                let x = Leaf::new(&a, &mesh, &[Lay::At(Replicate)])?;
                let y = Leaf::new(&b, &mesh, &[Lay::At(at)])?;
                let grads = x.tensor.mul(&y.tensor)?.sum_all()?.backward()?;
                close(x.gradient_error(&grads, &b)?, "replicated");
                close(y.gradient_error(&grads, &a)?, "sharded");
            }
            Ok(())
        });
    }
}

#[test]
fn queries_keys_and_values_share_one_backward_all_reduce() {
    for world in 2..=4 {
        on_ranks(world, "qkv", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[world])?;
            let input = values(&[3, 4], 1, DType::F64);
            let weights: Vec<Tensor> = (0..3).map(|i| values(&[7, 4], 10 + i, DType::F64)).collect();
            let leaf = Leaf::new(&input, &mesh, &[Lay::At(Replicate)])?;
            let columns = [Lay::At(Shard(0))];
            let leaves = weights.iter().map(|w| Leaf::new(w, &mesh, &columns)).collect::<Result<Vec<_>>>()?;
            let (loss, forward) = comm::record(|| -> Result<DTensor> {
                let x = leaf.tensor.sqr()?;
                let mut out = leaves.iter().map(|w| x.linear(&w.tensor, None)).collect::<Result<Vec<_>>>()?;
                let v = out.pop().unwrap();
                out[0].mul(&out[1])?.mul(&v)?.sum_all()
            });
            assert_eq!(forward.total(), 0);
            let (grads, backward) = comm::record(|| loss?.backward());
            assert_eq!((backward.total(), backward.get(Op::AllReduce).count), (1, 1), "{backward}");
            let wants = plain_grads(&[&input, &weights[0], &weights[1], &weights[2]], |v| {
                let out = |w: &Tensor| v[0].sqr()?.matmul(&w.t()?);
                (out(&v[1])? * out(&v[2])?)? * out(&v[3])?
            });
            let grads = grads?;
            close(leaf.gradient_error(&grads, &wants[0])?, "input");
            for (leaf, want) in leaves.iter().zip(&wants[1..]) {
                close(leaf.gradient_error(&grads, want)?, "weight");
            }
            Ok(())
        });
    }
}

#[test]
fn a_view_of_a_parameter_is_not_kept_over_an_update() {
    // The rows of the other factor are cut, so a replicated parameter is used through a view.
    for (at, other) in [(Replicate, Shard(0)), (Shard(1), Shard(0)), (Shard(0), Shard(1))] {
        on_ranks(3, "two steps", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[3])?;
            let (mut whole, fixed) = (values(&[4, 5], 1, DType::F64), values(&[3, 4], 2, DType::F64));
            let leaf = Leaf::new(&whole, &mesh, &[Lay::At(at)])?;
            let fixed_here = distribute(&fixed, &mesh, &[other])?;
            for step in 0..3 {
                let loss = fixed_here.matmul(&leaf.tensor)?.sqr()?.sum_all()?;
                let gradient = (fixed.t()?.matmul(&fixed.matmul(&whole)?)? * 2.0)?;
                close(value_error(&loss, &fixed.matmul(&whole)?.sqr()?.sum_all()?)?, &format!("loss {step}"));
                let grads = loss.backward()?;
                close(leaf.gradient_error(&grads, &gradient)?, &format!("gradient {step}"));
                let grad = grads.get(&leaf.var).unwrap();
                // candle has no difference of empty tensors that could be set.
                if grad.elem_count() > 0 {
                    leaf.var.set(&(leaf.var.as_detached_tensor() - (grad * 0.1)?)?)?;
                }
                whole = (whole - (gradient * 0.1)?)?;
            }
            Ok(())
        });
    }
}

#[test]
fn the_number_of_ranks_never_scales_a_gradient() {
    for world in WORLDS {
        on_ranks(world, "seed", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[world])?;
            let whole = values(&[4, 3], 1, DType::F64);
            for lay in
                [Lay::At(Replicate), Lay::Varying, Lay::At(SUM), Lay::At(Shard(0)), Lay::VaryingPartial]
            {
                let leaf = Leaf::new(&whole, &mesh, &[lay])?;
                let sum = leaf.tensor.sum_all()?;
                let want = match lay {
                    Lay::At(Replicate) | Lay::Varying => Replicate,
                    _ => SUM,
                };
                assert_eq!(sum.placements(), [want], "{lay}");
                assert_eq!(sum.is_varying(0), lay == Lay::Varying, "{lay}");
                let ones = whole.ones_like()?;
                close(leaf.gradient_error(&sum.backward()?, &ones)?, &format!("{lay}, as it is"));
                let whole_sum = sum.redistribute(&[Replicate])?;
                close(leaf.gradient_error(&whole_sum.backward()?, &ones)?, &format!("{lay}, replicated"));
                let mean = leaf.tensor.mean_all()?;
                close(leaf.gradient_error(&mean.backward()?, &(ones / 12.0)?)?, &format!("{lay}, mean"));
            }
            Ok(())
        });
    }
}

#[test]
fn a_rank_without_elements_takes_part_in_the_backward_pass() {
    on_ranks(3, "batch of one", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let wholes: Vec<Tensor> = [&[1, 4][..], &[5, 4], &[5], &[5], &[5]]
            .iter()
            .zip(1..)
            .map(|(s, i)| values(s, i, DType::F64))
            .collect();
        let lays = [Shard(0), Replicate, Replicate, Replicate, Replicate].map(Lay::At);
        let leaves = wholes
            .iter()
            .zip(lays)
            .map(|(w, lay)| Leaf::new(w, &mesh, &[lay]))
            .collect::<Result<Vec<_>>>()?;
        let targets = Tensor::new(&[3u32], &Device::Cpu)?;
        let targets = distribute(&targets, &mesh, &[Shard(0)])?;
        let [x, w, b, scale, shift] = [0, 1, 2, 3, 4].map(|i| &leaves[i].tensor);
        let hidden = x.linear(w, Some(b))?.layer_norm(scale, shift, 1e-5)?.gelu_erf()?;
        let loss = hidden.cross_entropy(&targets)?;
        let (grads, counts) = comm::record(|| loss.backward());
        // The four parameters share one.
        assert_eq!((counts.total(), counts.get(Op::AllReduce).count), (1, 1), "{counts}");
        let grads = grads?;
        let vars: Vec<_> = wholes.iter().map(|w| Var::from_tensor(w).unwrap()).collect();
        let hidden = vars[0].matmul(&vars[1].t()?)?.broadcast_add(&vars[2])?;
        let hidden = candle_nn::ops::layer_norm_slow(&hidden, &vars[3], &vars[4], 1e-5)?;
        let hidden = candle_shard::kernels::gelu_erf(&hidden)?;
        let plain = candle_nn::loss::cross_entropy(&hidden, &Tensor::new(&[3u32], &Device::Cpu)?)?;
        close(value_error(&loss, &plain)?, "loss");
        let plain = plain.backward()?;
        for (i, (leaf, var)) in leaves.iter().zip(&vars).enumerate() {
            close(leaf.gradient_error(&grads, plain.get(var).unwrap())?, &format!("leaf {i}"));
        }
        Ok(())
    });
}

#[test]
fn a_weight_that_is_used_twice_gets_both_gradients() {
    let ids: Vec<u32> = vec![0, 5, 2, 2];
    for world in WORLDS {
        for at in [Shard(0), Shard(1), Replicate] {
            let ids = ids.clone();
            on_ranks(world, "tied", move |ctx| -> Result<()> {
                let mesh = mesh(ctx, &[world])?;
                let table = values(&[6, 4], 1, DType::F64);
                let leaf = Leaf::new(&table, &mesh, &[Lay::At(at)])?;
                let ids = Tensor::new(&ids[..], &Device::Cpu)?;
                let rows = leaf.tensor.embedding(&distribute(&ids, &mesh, &[Replicate])?)?;
                let out = rows.tanh()?.linear(&leaf.tensor, None)?;
                let w = values(&[4, 6], 2, DType::F64);
                let loss = out.mul(&distribute(&w, &mesh, &[Replicate])?)?.sum_all()?;
                let want =
                    plain_grads(&[&table], |v| v[0].index_select(&ids, 0)?.tanh()?.matmul(&v[0].t()?)? * &w);
                close(leaf.gradient_error(&loss.backward()?, &want[0])?, &format!("{at}"));
                Ok(())
            });
        }
    }
}

#[test]
fn data_and_tensor_parallel_axes_together() {
    let inner: [(Placement, Placement); 3] =
        [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate, Replicate)];
    for (up_at, down_at) in inner {
        for dp in [[2, 2], [2, 3], [3, 2]] {
            on_ranks(dp[0] * dp[1], "dp x tp", move |ctx| -> Result<()> {
                let mesh = mesh(ctx, &dp)?;
                let wholes = [
                    values(&[5, 4], 1, DType::F64),
                    values(&[7, 4], 2, DType::F64),
                    values(&[7], 3, DType::F64),
                    values(&[3, 7], 4, DType::F64),
                ];
                let bias_at = if up_at == Shard(0) { Shard(0) } else { Replicate };
                let lays =
                    [[Shard(0), Replicate], [Replicate, up_at], [Replicate, bias_at], [Replicate, down_at]];
                let leaf = |i: usize| Leaf::new(&wholes[i], &mesh, &lays[i].map(Lay::At));
                let leaves = [leaf(0)?, leaf(1)?, leaf(2)?, leaf(3)?];
                let hidden =
                    leaves[0].tensor.linear(&leaves[1].tensor, Some(&leaves[2].tensor))?.gelu_erf()?;
                let loss = hidden.linear(&leaves[3].tensor, None)?.sqr()?.mean_all()?;
                let grads = loss.backward()?;
                let wants = plain_grads(&[&wholes[0], &wholes[1], &wholes[2], &wholes[3]], |v| {
                    let hidden = v[0].matmul(&v[1].t()?)?.broadcast_add(&v[2])?;
                    candle_shard::kernels::gelu_erf(&hidden)?.matmul(&v[3].t()?)?.sqr()? / 15.0
                });
                for (i, (leaf, want)) in leaves.iter().zip(&wants).enumerate() {
                    close(leaf.gradient_error(&grads, want)?, &format!("{up_at}, leaf {i}"));
                }
                Ok(())
            });
        }
    }
}

#[test]
fn a_gathered_tensor_is_used_differently_along_any_axis() {
    on_ranks(6, "gathered", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2, 3])?;
        let (a, b) = (values(&[5, 4], 1, DType::F64), values(&[4, 7], 2, DType::F64));
        let wants = plain_grads(&[&a, &b], |v| v[0].matmul(&v[1])?.sqr());
        let layouts = on_axes(&[Shard(0), Shard(1), Replicate].map(Lay::At), 2);
        for (from, beside) in layouts.iter().cartesian_product(&layouts) {
            let (x, w) = (Leaf::new(&a, &mesh, from)?, Leaf::new(&b, &mesh, beside)?);
            let whole = x.tensor.redistribute(&[Replicate, Replicate])?;
            let loss = whole.matmul(&w.tensor)?.sqr()?.sum_all()?;
            let (grads, counts) = comm::record(|| loss.backward());
            let grads = grads?;
            let what = format!("{} beside {}: {counts}", x.tensor.spec(), w.tensor.spec());
            close(x.gradient_error(&grads, &wants[0])?, &what);
            close(w.gradient_error(&grads, &wants[1])?, &what);
        }
        Ok(())
    });
}

/// A zero-copy view of a parameter sees its updates, and so must whatever is computed from the view.
#[test]
fn views_of_parameters_held_over_steps_are_never_stale() {
    on_ranks(2, "held views", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 2)])?;
        let ones = |shape: (usize, usize)| Tensor::ones(shape, DType::F64, &Device::Cpu);
        let (w, var) = distribute(&ones((4, 3))?, &mesh, &[Replicate])?.to_var()?;
        let held = [w.t()?, w.reshape((3, 4))?, w.permute((1, 0))?, w.t()?.narrow(0, 0, 3)?];
        let x = distribute(&ones((2, 3))?, &mesh, &[Shard(0)])?;
        for (value, want) in [(1.0, 24.0), (0.0, 0.0), (2.0, 48.0)] {
            var.set(&(ones((4, 3))? * value)?.to_device(var.device())?)?;
            for view in &held {
                let y = x.matmul(view)?.sum_all()?;
                assert_eq!(y.full_tensor()?.to_scalar::<f64>()?, want);
                assert!(y.backward()?.get(&var).is_some());
            }
        }
        Ok(())
    });
}

#[test]
fn a_varying_tensor_leaves_the_mesh_with_its_gradient_right() {
    on_ranks(3, "full_tensor of varying", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 3)])?;
        let w = distribute(&Tensor::new(&[2f64], &Device::Cpu)?, &mesh, &[Replicate])?;
        let (w, var) = w.to_var()?;
        let y = w.varying_on(0)?.affine(3.0, 0.0)?;
        let grads = y.full_tensor()?.sum_all()?.backward()?;
        let share = grads.get(&var).expect("a gradient");
        let whole = ctx.group().all_reduce(share, candle_dist::ReduceOp::Sum)?;
        assert!((whole.to_vec1::<f64>()?[0] - 3.0).abs() < 1e-12);
        Ok(())
    });
}

#[test]
fn gathers_and_sums_are_shared_by_several_uses() {
    on_ranks(2, "shared steps", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 2)])?;
        let put = |shape: (usize, usize), p| {
            distribute(&Tensor::ones(shape, DType::F64, &Device::Cpu)?, &mesh, &[p])?.to_var()
        };
        let ((x, _), (w, _)) = (put((4, 6), Shard(0))?, put((6, 6), Shard(0))?);
        let x = x.affine(2.0, 0.0)?;
        let (loss, forward) = candle_dist::comm::record(|| -> Result<DTensor> {
            let (q, k, v) = (x.linear(&w, None)?, x.linear(&w, None)?, x.linear(&w, None)?);
            q.add(&k)?.add(&v)?.sum_all()
        });
        let loss = loss?;
        let (grads, backward) = candle_dist::comm::record(|| loss.backward());
        grads?;
        use candle_dist::Op::{AllGather, AllReduce, ReduceScatter};
        assert_eq!((forward.get(AllGather).count, forward.total()), (1, 1), "{forward}");
        assert_eq!((backward.get(ReduceScatter).count, backward.get(AllReduce).count), (1, 0), "{backward}");
        Ok(())
    });
}
