//! Ranks that use variables in unlike orders, or use different ones.
use super::*;
use candle_core::backprop::GradStore;
use candle_dist::DeviceMesh;
use candle_shard::nn::{Linear, Parameter, Parameters, recompute};
use std::collections::BTreeMap;
use std::ops::Range;
use test_utils::world;

const LAYERS: usize = 4;

/// Layers of one shape, and what they are made of.
struct Model {
    layers: Vec<Arc<Linear>>,
    parameters: Parameters,
}

impl Model {
    fn new(seed: u64, mesh: &DeviceMesh, dtype: DType) -> Result<Self> {
        let plan = Plan::new(mesh.names()[0].as_str());
        let vb = MeshVarBuilder::fresh(seed, mesh, plan, dtype, &device())?;
        let layers =
            (0..LAYERS).map(|i| Linear::new(3, 3, true, &vb.pp(i)).map(Arc::new)).collect::<Result<_>>()?;
        Ok(Self { layers, parameters: vb.finish()? })
    }

    /// The sum of what the layers in `order` make of `x`, each with a weight of its own.
    fn loss(&self, x: &DTensor, order: &[usize], again: bool) -> Result<DTensor> {
        let mut sum = x.sum_all()?;
        for &i in order {
            let layer = self.layers[i].clone();
            let of = move |x: &DTensor| layer.forward(x)?.tanh();
            let made = if again { recompute(x, of)? } else { of(x)? };
            sum = sum.add(made.sum_all()?.mul((i + 1) as f64)?)?;
        }
        Ok(sum)
    }

    /// The gradients of one device, where the layers of `uses` get these rows.
    fn want(&self, whole: &Tensor, uses: &[(usize, Range<usize>)]) -> Result<BTreeMap<String, Tensor>> {
        let full = |p: &Parameter| -> Result<(String, Var)> {
            let whole = p.tensor.detach().full_tensor()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
            Ok((p.name.clone(), Var::from_tensor(&whole)?))
        };
        let vars = self.parameters.iter().map(full).collect::<Result<BTreeMap<_, _>>>()?;
        let mut sum = Tensor::new(0f64, &Device::Cpu)?;
        for (i, rows) in uses.iter().filter(|(_, rows)| !rows.is_empty()) {
            let x = whole.narrow(0, rows.start, rows.len())?;
            let y =
                x.matmul(&vars[&format!("{i}.weight")].t()?)?.broadcast_add(&vars[&format!("{i}.bias")])?;
            sum = (sum + (y.tanh()?.sum_all()? * (*i + 1) as f64)?)?;
        }
        let grads = sum.backward()?;
        let is_used = |name: &str| uses.iter().any(|(i, _)| name.starts_with(&format!("{i}.")));
        let used = vars.iter().filter(|(name, _)| is_used(name));
        used.map(|(name, var)| {
            Ok((name.clone(), grads.get(var).map_or_else(|| var.zeros_like(), |g| Ok(g.clone()))?))
        })
        .collect()
    }

    /// Compares all gradients, and that there is none where none is expected.
    fn check(&self, grads: &GradStore, want: &BTreeMap<String, Tensor>, what: &str) -> Result<()> {
        for p in self.parameters.iter() {
            let Some(got) = p.grad(grads)? else {
                assert!(!want.contains_key(&p.name), "{what}: {} has no gradient", p.name);
                continue;
            };
            let got = got.full_tensor()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
            let want = want.get(&p.name).unwrap_or_else(|| panic!("{what}: {} has a gradient", p.name));
            let most = if p.tensor.dtype() == DType::F64 { 1e-11 } else { 0.1 };
            assert!(distance(&got, want) <= most, "{what}: {} {got} for {want}", p.name);
        }
        Ok(())
    }
}

/// The rows of a batch of five on rank `r` of `n`.
fn rows(n: usize, r: usize) -> Range<usize> {
    let size = 5usize.div_ceil(n);
    (r * size).min(5)..((r + 1) * size).min(5)
}

#[test]
fn layers_in_unlike_orders_get_the_gradients_of_one_device() {
    for axes in [&[1][..], &[2], &[3], &[4], &[5], &[2, 2]] {
        on_ranks(axes.iter().product(), "orders", move |ctx| -> Result<()> {
            for dtype in [DType::F64, DType::BF16] {
                let mesh = mesh(ctx, axes)?;
                let models = [Model::new(7, &mesh, dtype)?, Model::new(8, &mesh, dtype)?];
                let whole = values(&[5, 3], 1, DType::F64);
                let x = distribute(&whole.to_dtype(dtype)?, &mesh, &vec![Shard(0); axes.len()])?;
                let mut order: Vec<usize> = (0..LAYERS).collect();
                order.rotate_left(ctx.rank() % LAYERS);
                if ctx.rank() % 2 == 1 {
                    order.reverse();
                }
                let uses: Vec<_> = (0..LAYERS).map(|i| (i, 0..5)).collect();
                for again in [false, true] {
                    let one = models[0].loss(&x, &order, again)?;
                    let (grads, counts) = comm::record(|| one.backward());
                    models[0].check(&grads?, &models[0].want(&whole, &uses)?, "one builder")?;
                    let once = axes.iter().filter(|&&size| size > 1).count();
                    assert_eq!((counts.get(Op::AllReduce).count, counts.total()), (once, once), "{counts}");
                    let first = ctx.rank() % 2;
                    let [one, other] = [first, 1 - first].map(|i| models[i].loss(&x, &order, again));
                    let grads = one?.add(other?)?.backward()?;
                    for model in &models {
                        model.check(&grads, &model.want(&whole, &uses)?, "two builders")?;
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn layers_that_only_some_ranks_use_get_the_gradients_of_one_device() {
    for n in 1..=5 {
        on_ranks(n, "subsets", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[n])?;
            let model = Model::new(7, &mesh, DType::F64)?;
            let whole = values(&[5, 3], 1, DType::F64);
            let x = distribute(&whole, &mesh, &[Shard(0)])?;
            // What each rank uses; in later passes also what none has used before.
            type Uses = fn(usize) -> Vec<usize>;
            let passes: [Uses; 5] = [
                |rank| if rank == 0 { vec![1] } else { vec![0] },
                |rank| vec![rank % 2],
                |rank| if rank == 0 { vec![2, 0] } else { vec![0, 1] },
                |rank| if rank % 2 == 0 { vec![1] } else { vec![2, 1] },
                |_| vec![2],
            ];
            for (pass, uses) in passes.iter().enumerate() {
                let loss = model.loss(&x, &uses(ctx.rank()), false)?;
                let want: Vec<_> =
                    (0..n).flat_map(|r| uses(r).into_iter().map(move |i| (i, rows(n, r)))).collect();
                model.check(&loss.backward()?, &model.want(&whole, &want)?, &format!("pass {pass}"))?;
            }
            Ok(())
        });
    }
}

#[test]
fn variables_without_names_are_summed_in_the_order_of_their_creation() {
    for n in 2..=4 {
        on_ranks(n, "leaves", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[n])?;
            let whole = values(&[5, 3], 1, DType::F64);
            let x = distribute(&whole, &mesh, &[Shard(0)])?;
            let weights: Vec<Tensor> = (0..3).map(|i| values(&[3, 3], 10 + i, DType::F64)).collect();
            let leaves = weights
                .iter()
                .map(|w| Leaf::new(w, &mesh, &[Lay::At(Replicate)]))
                .collect::<Result<Vec<_>>>()?;
            let plain = plain_grads(&weights.iter().collect::<Vec<_>>(), |v| {
                let of = |i: usize| whole.matmul(&v[i].t()?)?.tanh()?.sum_all()? * (i + 1) as f64;
                (of(0)? + of(1)?)? + of(2)?
            });
            let mut loss = x.sum_all()?;
            for i in (0..3).map(|i| (i + ctx.rank()) % 3) {
                loss =
                    loss.add(x.linear(&leaves[i].tensor, None)?.tanh()?.sum_all()?.mul((i + 1) as f64)?)?;
            }
            let (grads, counts) = comm::record(|| loss.backward());
            let grads = grads?;
            for (leaf, want) in leaves.iter().zip(&plain) {
                close(leaf.gradient_error(&grads, want)?, "leaves");
            }
            assert_eq!((counts.get(Op::AllReduce).count, counts.total()), (1, 1), "{counts}");
            Ok(())
        });
    }
}

#[test]
fn different_variables_without_names_are_an_error_on_all_ranks() {
    for (n, in_candles_pass) in [(2, false), (3, false), (2, true), (3, true)] {
        let texts = on_ranks(n, "different leaves", move |ctx| -> Result<String> {
            let mesh = mesh(ctx, &[n])?;
            let x = distribute(&values(&[5, 3], 1, DType::F64), &mesh, &[Shard(0)])?;
            let leaf = |i: u64| Leaf::new(&values(&[3, 3], 10 + i, DType::F64), &mesh, &[Lay::At(Replicate)]);
            let leaves = [leaf(0)?, leaf(1)?];
            // The last rank uses another one.
            let mine = &leaves[usize::from(ctx.rank() + 1 == n)].tensor;
            let loss = x.linear(mine, None)?.tanh()?.sum_all()?;
            let failed = match in_candles_pass {
                false => loss.backward().unwrap_err().to_string(),
                true => loss.full_tensor()?.backward().unwrap_err().to_string(),
            };
            // The world goes on.
            mesh.group()?.barrier()?;
            Ok(failed)
        });
        for text in &texts {
            assert!(text.contains("gradients of different variables of the shape [3, 3]"), "{text}");
            assert!(text.contains("MeshVarBuilder"), "{text}");
        }
    }
}

/// Their values say nothing, so their numbers decide.
#[test]
fn different_variables_of_equal_values_are_an_error_on_all_ranks() {
    for (n, in_candles_pass) in [(2, false), (3, false), (2, true)] {
        let texts = on_ranks(n, "different zeros", move |ctx| -> Result<String> {
            let mesh = mesh(ctx, &[n])?;
            let x = distribute(&values(&[5, 3], 1, DType::F64), &mesh, &[Shard(0)])?;
            let zeros = Tensor::zeros((3, 3), DType::F64, &Device::Cpu)?;
            let leaf = || Leaf::new(&zeros, &mesh, &[Lay::At(Replicate)]);
            let (first, second) = (leaf()?, leaf()?);
            // A variable that only one rank makes, in another layout, changes nothing.
            if ctx.rank() == 0 {
                DTensor::zeros(2, DType::F64, ctx.device(), &mesh, &[Replicate])?.to_var()?;
            }
            let pass = |mine: &DTensor| {
                let loss = x.linear(mine, None)?.tanh()?.sum_all()?;
                match in_candles_pass {
                    false => loss.backward(),
                    true => Ok(loss.full_tensor()?.backward()?),
                }
            };
            let failed = pass(if ctx.rank() == 0 { &first.tensor } else { &second.tensor });
            let failed = failed.unwrap_err().to_string();
            // The world goes on, and one variable is summed.
            assert!(pass(&second.tensor)?.get(&second.var).is_some());
            Ok(failed)
        });
        for text in &texts {
            assert!(text.contains("gradients of different variables of the shape [3, 3]"), "{text}");
        }
    }
}

#[test]
fn a_rank_that_uses_nothing_is_an_error_on_all_ranks() {
    let model = |ctx: &candle_dist::RankContext| Model::new(7, &mesh(ctx, &[2])?, DType::F64);
    let failed = world(2).run(|ctx| -> Result<()> {
        let model = model(ctx)?;
        let x = distribute(
            &values(&[5, 3], 1, DType::F64),
            model.parameters.iter().next().unwrap().tensor.mesh(),
            &[Shard(0)],
        )?;
        let loss = model.loss(&x, if ctx.rank() == 0 { &[1] } else { &[] }, false)?;
        loss.backward()?;
        loss.to_scalar::<f64>().map(drop)
    });
    let text = failed.unwrap_err().to_string();
    assert!(text.contains("gradients of 0.bias and 7 more"), "{text}");
}

#[test]
fn in_candles_own_pass_unlike_orders_are_an_error() {
    let failed = world(2).run(|ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let model = Model::new(7, &mesh, DType::F64)?;
        let x = distribute(&values(&[5, 3], 1, DType::F64), &mesh, &[Shard(0)])?;
        let order = if ctx.rank() == 0 { [0, 1] } else { [1, 0] };
        let loss = model.loss(&x, &order, false)?.full_tensor()?;
        loss.backward()?;
        Ok(())
    });
    let text = failed.unwrap_err().to_string();
    assert!(text.contains("description differs") && text.contains("the gradient of"), "{text}");
}

#[test]
fn parameters_that_were_built_in_unlike_orders_are_reduced_by_name() {
    for n in 2..=4 {
        on_ranks(n, "reduce", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[n])?;
            let plan = Plan::new(mesh.names()[0].as_str());
            let vb = MeshVarBuilder::fresh(7, &mesh, plan, DType::F64, &device())?;
            let init = candle_shard::nn::Init::Const(0.5);
            let mut weights = BTreeMap::new();
            for i in (0..3).map(|i| (i + ctx.rank()) % 3) {
                weights.insert(i, vb.pp(i).get((3, 3), "weight", init, Replicate, true)?);
            }
            let parameters = vb.finish()?;
            let x = distribute(&values(&[5, 3], 1, DType::F64), &mesh, &[Shard(0)])?;
            let mut loss = x.sum_all()?;
            for (i, weight) in weights.iter().filter(|(i, _)| **i < 2) {
                loss = loss.add(x.linear(weight, None)?.sum_all()?.mul((i + 1) as f64)?)?;
            }
            let grads = parameters.backward(&loss)?;
            let column = values(&[5, 3], 1, DType::F64).sum(0)?;
            for p in parameters.iter() {
                let i: usize = p.name[..1].parse().unwrap();
                let Some(got) = p.grad(&grads)? else {
                    assert_eq!(i, 2, "{}", p.name);
                    continue;
                };
                let got = got.full_tensor()?.to_device(&Device::Cpu)?;
                let want = (column.broadcast_as((3, 3))? * (i + 1) as f64)?;
                close(distance(&got, &want), &p.name);
            }
            Ok(())
        });
    }
}
