//! What cannot be done, and what that leaves behind.
use crate::fsdp::harness::*;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Shape, Tensor};
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{Embedding, Linear, MeshVarBuilder, recompute};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Replicate, Result, Shard};
use test_utils::world;

/// An identity without a way back.
pub(crate) struct Broken;

impl CustomOp1 for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        candle_core::bail!("on purpose")
    }
}

#[test]
fn what_cannot_be_sharded_is_told() {
    world(2)
        .run(|ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
            let plain = MeshVarBuilder::fresh(7, &mesh, Plan::new("tp"), DType::F32, ctx.device())?;
            let none = plain.fully_shard("pp", FullyShardOptions::default()).err().unwrap().to_string();
            assert!(none.contains("\"pp\""), "{none}");
            let taken = plain.fully_shard("tp", FullyShardOptions::default()).err().unwrap().to_string();
            assert!(taken.contains("\"tp\"") && taken.contains("is the plan's"), "{taken}");
            let whole = FullyShardOptions::default().param_dtype(DType::U32);
            assert!(
                plain.fully_shard("dp", whole).err().unwrap().to_string().contains("u32, which is no float")
            );

            let vb = plain.fully_shard("dp", FullyShardOptions::default())?;
            let table = FullyShard::new(&vb.pp("table"), |vb| Embedding::new(9, 4, 1.0, vb))?;
            let mut weight = None;
            table.run(|table| {
                weight = Some(table.weight().clone());
                table.forward(&rows(&Tensor::zeros((2, 3), DType::U32, &Device::Cpu)?, &mesh)?)
            })?;
            let tied = FullyShard::new(&vb.pp("head"), |vb| Linear::tied(weight.as_ref().unwrap(), vb));
            let tied = tied.err().unwrap().to_string();
            assert!(tied.contains("head shares a weight of another fully sharded unit"), "{tied}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_pass_that_fails_leaves_nothing_behind() {
    world(2)
        .run(|ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F64, FullyShardOptions::default())?;
            let layers = linears(2, &vb)?;
            let parameters = vb.finish()?;
            let x = rows(&batch(0)?, &mesh)?;
            let run = |x: &DTensor| {
                layers.iter().try_fold(x.clone(), |x, layer| layer.run(|layer| layer.forward(&x)))
            };
            let want = parameters.backward(&run(&x)?.sum_all()?)?;
            // In the forward pass,
            assert!(layers[0].run(|layer| layer.forward(&x)?.narrow(1, 4, 9)).is_err());
            // and in the backward pass, when it has come through the second unit.
            let h = layers[0].run(|layer| layer.forward(&x))?;
            let h = DTensor::from_local_with_spec(h.to_local().apply_op1(Broken)?, h.spec().clone())?;
            let loss = layers[1].run(|layer| layer.forward(&h))?.sum_all()?;
            let error = parameters.backward(&loss).unwrap_err().to_string();
            assert!(error.contains("on purpose"), "{error}");
            let got = parameters.backward(&run(&x)?.sum_all()?)?;
            for p in parameters.iter() {
                let [got, want] = [&got, &want].map(|grads| whole(&p.grad(grads).unwrap().unwrap()).unwrap());
                assert_close(&got, &want, 0.0, &p.name);
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn parameters_that_are_read_outside_of_their_unit_are_an_error() {
    world(2)
        .run(|ctx| -> Result<()> {
            type Operation = fn(&DTensor, &DTensor) -> Result<DTensor>;
            let operations: [(&str, Operation); 21] = [
                ("linear", |w, x| x.linear(w, None)),
                ("transpose", |w, _| w.transpose(0, 1)),
                ("neg", |w, _| w.neg()),
                ("to_dtype", |w, _| w.to_dtype(DType::F64)),
                ("narrow", |w, _| w.narrow(0, 0, 1)?.neg()),
                ("reshape", |w, _| w.flatten_all()?.neg()),
                ("sum", |w, _| w.sum_all()),
                ("max", |w, _| w.max_all()),
                ("add", |w, _| w.add(1.0)),
                ("mul", |w, _| w.mul(w)),
                ("gt", |w, _| w.gt(0.0)),
                ("cat", |w, _| DTensor::cat(&[w, w], 0)),
                ("gelu", |w, _| w.gelu()),
                ("softmax", |w, _| w.softmax(1)),
                ("detached", |w, _| w.detach().neg()),
                ("redistribute", |w, _| w.redistribute(&[Shard(0), Replicate])),
                ("copy", |w, _| w.copy()),
                ("force_contiguous", |w, _| w.force_contiguous()),
                ("contiguous", |w, _| w.contiguous()),
                ("to_var", |w, _| Ok(w.to_var()?.0)),
                ("recompute", |w, _| recompute(w, DTensor::neg)),
            ];
            let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
            for (outputs, options) in [5, 1].into_iter().zip([
                FullyShardOptions::default(),
                FullyShardOptions::default().param_dtype(DType::BF16).prefetch(false),
            ]) {
                let vb = builder(&mesh, DType::F32, options)?;
                let layer =
                    FullyShard::new(&vb.pp("block.3"), |vb| Linear::new(5, outputs, false, &vb.pp("up")))?;
                let x = rows(&batch(0)?.to_dtype(options.param_dtype.unwrap_or(DType::F32))?, &mesh)?;
                let mut kept = None;
                layer.run(|layer| {
                    kept = Some([
                        layer.weight().clone(),
                        layer.weight().transpose(0, 1)?,
                        layer.weight().narrow(0, 0, 1)?,
                    ]);
                    layer.forward(&x)
                })?;
                let kept = kept.unwrap();
                for (name, operation) in operations {
                    let error = operation(&kept[0], &x).err().unwrap_or_else(|| panic!("{name}")).to_string();
                    let want = "block.3.up.weight (of the unit \"block.3\") is read outside of its unit";
                    assert!(error.contains(want), "{name}: {error}");
                }
                for view in &kept[1..] {
                    for failed in [view.neg(), view.contiguous()] {
                        let error = failed.unwrap_err().to_string();
                        assert!(error.contains("block.3.up.weight (of the unit"), "{error}");
                    }
                }
                // A view that was given as a local tensor has lost the name.
                let given =
                    DTensor::from_local_with_spec(kept[0].to_local().clone(), kept[0].spec().clone())?;
                for failed in [
                    given.neg(),
                    given.flatten_all().and_then(|flat| flat.add(1.0)),
                    given.matmul(&given.t()?),
                ] {
                    let error = failed.unwrap_err().to_string();
                    assert!(error.contains("a parameter is read outside of its unit"), "{error}");
                }
                assert!(kept[0].to_local().sum_all().is_err());
                assert!(kept[0].full_tensor().and_then(|whole| Ok(whole.sum_all()?)).is_err());
            }
            Ok(())
        })
        .unwrap();
}
