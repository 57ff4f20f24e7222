//! Recomputed segments: their gradients, their memory, and the numbers that they draw.
use super::*;

#[test]
fn nested_recomputations_find_every_part_of_a_gradient() {
    on_ranks(2, "nested", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 2)])?;
        let (x, var) =
            distribute(&Tensor::new(&[1f64, 2.0], &Device::Cpu)?, &mesh, &[Replicate])?.to_var()?;
        let cube = candle_shard::nn::recompute(&x.affine(1.0, 0.0)?, |x| {
            let captured = x.clone();
            candle_shard::nn::recompute(&x.sqr()?, move |square| square.mul(&captured))
        })?;
        let grads = cube.sum_all()?.backward()?;
        assert_eq!(grads.get(&var).expect("a gradient").to_vec1::<f64>()?, [3.0, 12.0]);
        Ok(())
    });
}

#[test]
fn a_segment_that_draws_anew_is_refused() {
    on_ranks(2, "drawn anew", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 2)])?;
        let (x, _) = distribute(&values(&[4, 8], 1, DType::F64), &mesh, &[Shard(0)])?.to_var()?;
        let drop = |x: &DTensor| {
            let dropped = candle_nn::ops::dropout(x.to_local(), 0.5)?;
            DTensor::from_local_with_spec(dropped, x.spec().clone())
        };
        let loss = candle_shard::nn::recompute(&x, drop)?.to_local().sum_all()?;
        let said = candle_shard::nn::backward(&loss).unwrap_err().to_string();
        assert!(said.contains("recompute: the segment gave other numbers"), "{said}");
        Ok(())
    });
}

/// How many graphs hold a probe, and how many did at most.
#[derive(Default)]
struct Held {
    now: AtomicUsize,
    most: AtomicUsize,
}

/// An op that changes nothing and tells how long graphs hold it.
struct Probe(Arc<Held>);

impl Probe {
    fn new(held: &Arc<Held>) -> Self {
        let now = held.now.fetch_add(1, Ordering::Relaxed) + 1;
        held.most.fetch_max(now, Ordering::Relaxed);
        Self(held.clone())
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::Relaxed);
    }
}

impl CustomOp1 for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(grad.clone()))
    }
}

#[test]
fn of_recomputed_segments_in_a_row_one_at_a_time_has_its_graph() {
    for (is_recomputed, most) in [(false, 4), (true, 1)] {
        on_ranks(1, "in a row", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("a", 1)])?;
            let whole = |seed| distribute(&values(&[2, 3], seed, DType::F64), &mesh, &[Replicate])?.to_var();
            let ((mut x, _), held) = (whole(1)?, Arc::<Held>::default());
            for seed in 2..6 {
                // The weight's gradient is a product with what the probe gives.
                let ((weight, _), held) = (whole(seed)?, held.clone());
                let segment = move |x: &DTensor| {
                    let probed = x.to_local().apply_op1(Probe::new(&held))?;
                    DTensor::from_local_with_spec(probed, x.spec().clone())?.mul(&weight)
                };
                x = if is_recomputed { candle_shard::nn::recompute(&x, segment)? } else { segment(&x)? };
            }
            let grads = x.sum_all()?.backward()?;
            assert_eq!(held.most.load(Ordering::Relaxed), most, "recomputed: {is_recomputed}");
            drop((x, grads));
            assert_eq!(held.now.load(Ordering::Relaxed), 0);
            Ok(())
        });
    }
}

#[test]
fn a_second_run_that_panics_does_not_draw_for_later_ones() {
    on_ranks(2, "draws after a panic", |ctx| -> Result<()> {
        let vb = MeshVarBuilder::fresh(1, &mesh(ctx, &[2])?, Plan::new("a"), DType::F32, &device())?;
        let dropout = Dropout::new(0.5, &vb);
        let x = DTensor::ones(64, DType::F32, &device(), vb.mesh(), &[Replicate])?;
        let run = || -> Result<Vec<f32>> {
            Ok(dropout.forward(&x, Mode::Train { step: 0 })?.to_local().to_vec1()?)
        };
        let (first, draws) = Draws::of(run)?;
        let panics = || draws.again(|| -> Result<()> { panic!("on purpose") });
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).unwrap_err();
        assert_ne!(run()?, first);
        assert_eq!(draws.again(run)?, first);
        Ok(())
    });
}

#[test]
fn a_segment_may_capture_the_results_of_other_layers_and_units() {
    use crate::fsdp::harness::{batch, linears, rows};
    use candle_shard::fsdp::FullyShardOptions;
    for (world, dtype, tolerance) in
        [(1, DType::F64, 1e-12), (2, DType::F64, 1e-12), (3, DType::F64, 1e-12), (2, DType::BF16, 5e-2)]
    {
        on_ranks(world, &format!("captured, {dtype:?}"), move |ctx| -> Result<()> {
            let run = |is_recomputed: bool| -> Result<Vec<Vec<f64>>> {
                let mesh = ctx.mesh(&[("dp", world), ("tp", 1)])?;
                let vb = MeshVarBuilder::fresh(7, &mesh, Plan::new("tp"), dtype, &device())?;
                let vb = vb.fully_shard("dp", FullyShardOptions::default())?;
                let layers: Vec<_> = linears(4, &vb)?.into_iter().map(Arc::new).collect();
                let parameters = vb.finish()?;
                let x = rows(&batch(0)?, &mesh)?.to_dtype(dtype)?;
                let through = |layer: usize, x: &DTensor| layers[layer].run(|layer| layer.forward(x));
                let first = through(0, &x)?;
                // The results of a unit, and of an op behind it, are captured and used elsewhere too.
                let memory = through(1, &first)?;
                let turned = memory.tanh()?;
                let (layer, captured) = (layers[2].clone(), (memory.clone(), turned.clone()));
                let segment = move |x: &DTensor| {
                    let (layer, (memory, turned), around) = (layer.clone(), captured.clone(), x.clone());
                    let inner = move |x: &DTensor| {
                        layer.run(|layer| layer.forward(x))?.mul(&memory)?.add(&around)?.add(&turned)
                    };
                    if is_recomputed {
                        candle_shard::nn::recompute(&x.tanh()?, inner)
                    } else {
                        inner(&x.tanh()?)
                    }
                };
                let y = if is_recomputed {
                    candle_shard::nn::recompute(&first, segment)?
                } else {
                    segment(&first)?
                };
                let y = through(3, &y.add(&memory)?.add(&turned.sqr()?)?)?;
                let grads = parameters.backward(&y.to_dtype(DType::F64)?.sqr()?.mean_all()?)?;
                let of = |p: &candle_shard::nn::Parameter| {
                    let grad = p.grad(&grads)?.expect("a gradient").full_tensor()?;
                    Ok(grad.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
                };
                parameters.iter().map(of).collect()
            };
            for (got, want) in run(true)?.iter().flatten().zip(run(false)?.iter().flatten()) {
                assert!(
                    (got - want).abs() <= tolerance * (1.0 + want.abs()),
                    "{got}, without recomputation {want}"
                );
            }
            Ok(())
        });
    }
}
