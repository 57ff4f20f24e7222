//! Fresh weights for models of candle's layers.
use candle_core::{DType, Device, Shape, Tensor};
use candle_dist::DeviceMesh;
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use candle_shard::Replicate;
use candle_shard::nn::{self, MeshVarBuilder};
use candle_shard::parallel::Plan;
use candle_shard::random::Distribution;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Variables by name, each drawn from the seed and its name.
struct SeededVars {
    seed: u64,
    mesh: DeviceMesh,
    made: Mutex<HashMap<String, Tensor>>,
}

/// Returns a builder of variables that are equal on all ranks. `mesh` has this rank.
pub(super) fn plain_builder(seed: u64, mesh: &DeviceMesh, dtype: DType) -> VarBuilder<'static> {
    let fresh = SeededVars { seed, mesh: mesh.clone(), made: Mutex::default() };
    VarBuilder::from_backend(Box::new(fresh), dtype, Device::Cpu)
}

/// Returns how a value is drawn. Weights that candle draws by their shape are even here: only that runs draw alike matters.
fn init_of(init: Init) -> nn::Init {
    match init {
        Init::Const(value) => nn::Init::Const(value),
        Init::Randn { mean, stdev } => nn::Init::Random(Distribution::Normal { mean, stdev }),
        Init::Uniform { lo, up } => nn::Init::Random(Distribution::Uniform { lo, up }),
        Init::Kaiming { .. } => nn::Init::Random(Distribution::Uniform { lo: -0.5, up: 0.5 }),
    }
}

impl SimpleBackend for SeededVars {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let mut made = self.made.lock();
        if let Some(known) = made.get(name) {
            if (known.shape(), known.dtype()) != (&shape, dtype) {
                let (before, now) = (known.shape(), &shape);
                candle_core::bail!(
                    "parameter {name} is {:?} {before:?}, and is requested again as {dtype:?} {now:?}",
                    known.dtype()
                );
            }
            return Ok(known.clone());
        }
        let draw = || -> candle_shard::Result<Tensor> {
            let vb = MeshVarBuilder::fresh(self.seed, &self.mesh, Plan::none(), dtype, device)?;
            Ok(vb.get(shape, name, init_of(init), Replicate, false)?.to_local().clone())
        };
        let drawn = draw().map_err(candle_core::Error::wrap)?;
        made.insert(name.to_string(), drawn.clone());
        Ok(drawn)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        candle_core::bail!("parameter {name} is requested without its shape")
    }

    /// Returns whether the tensor is there already, as a new `VarMap` does.
    fn contains_tensor(&self, name: &str) -> bool {
        self.made.lock().contains_key(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_dist::World;

    #[test]
    fn a_variable_is_there_once_it_is_made_and_has_one_shape_and_dtype() {
        let done = World::threads(1).run(|ctx| -> candle_shard::Result<()> {
            let vb = plain_builder(3, &ctx.mesh(&[("tp", 1)])?, DType::F64);
            assert!(!vb.contains_tensor("weight"));
            let made = vb.get((2, 3), "weight")?;
            assert!(vb.contains_tensor("weight"));
            assert_eq!(vb.get((2, 3), "weight")?.id(), made.id());
            let other = [vb.get((3, 2), "weight"), vb.to_dtype(DType::F32).get((2, 3), "weight")];
            for refused in other {
                let text = refused.expect_err("another shape or dtype").to_string();
                assert!(text.contains("parameter weight is F64 [2, 3]"), "{text}");
            }
            Ok(())
        });
        done.expect("the world ends well");
    }
}
