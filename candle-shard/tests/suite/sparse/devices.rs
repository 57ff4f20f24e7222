//! Tables on the device of a rank against tables on the host.
use crate::sparse::*;
use candle_core::{DType, Device, Device::Cpu, Tensor, Var};
use candle_dist::empty::{compute, to_host};
use candle_nn::ParamsAdamW;
use candle_shard::Result;
use candle_shard::sparse::{
    ParamsAdagrad, ParamsSgd, RowGrad, RowVar, SparseAdagrad, SparseAdamW, SparseSgd,
};
use test_utils::{device, on_ranks};

/// One of the optimizers.
enum Steps {
    Sgd(SparseSgd),
    Adagrad(SparseAdagrad),
    AdamW(SparseAdamW),
}

impl Steps {
    fn new(kind: usize, table: &RowVar) -> Result<Self> {
        let vars = vec![table.clone()];
        Ok(match kind {
            0 => Self::Sgd(SparseSgd::new(vars, ParamsSgd { lr: 0.1, ..Default::default() })?),
            1 => Self::Adagrad(SparseAdagrad::new(
                vars,
                ParamsAdagrad { lr: 0.1, initial_accumulator_value: 0.3, ..Default::default() },
            )?),
            _ => Self::AdamW(SparseAdamW::new(
                vars,
                ParamsAdamW { lr: 0.05, eps: 1e-3, weight_decay: 0.1, ..Default::default() },
            )?),
        })
    }

    fn step(&mut self) -> Result<()> {
        match self {
            Self::Sgd(sgd) => sgd.step(),
            Self::Adagrad(adagrad) => adagrad.step(),
            Self::AdamW(adam_w) => adam_w.step(),
        }
    }

    fn state(&self) -> Vec<Var> {
        let named = match self {
            Self::Sgd(_) => Vec::new(),
            Self::Adagrad(adagrad) => adagrad.state(),
            Self::AdamW(adam_w) => adam_w.state(),
        };
        named.into_iter().map(|(_, var)| var).collect()
    }
}

/// Rows of 9 with one that occurs often.
fn listed(random: &mut Random, step: usize) -> Vec<u32> {
    match step {
        0 => [random.rows(20, 9), vec![4; 33]].concat(),
        1 => Vec::new(),
        _ => random.rows(3, 9),
    }
}

/// The table after each of some steps, what each lookup found, the gradients, and the states, all on the host.
fn train(table: &Tensor, kind: usize, device: &Device) -> Result<Vec<Tensor>> {
    let (rows, width, dtype) = (table.dim(0)?, table.dim(1)?, table.dtype());
    let mut random = Random::new(12);
    let table = RowVar::new(Var::from_tensor(&table.to_device(device)?)?)?;
    let mut steps = Steps::new(kind, &table)?;
    let mut all = Vec::new();
    for step in 0..3 {
        table.renorm(&[1, 4], 0.9, 2.0)?;
        for _ in 0..2 {
            let ids = listed(&mut random, step);
            let weights = random.tensor(&[ids.len(), width], dtype).to_device(device)?;
            let found = table.lookup_but(ids, Some(7))?;
            all.push(found.detach());
            let numbers = match found.elem_count() {
                0 => compute(&found, |found| found.sum_all())?, // candle's binary ops leave the graph here
                _ => (found.sqr()? * weights)?.sum_all()?,
            };
            numbers.backward()?;
        }
        let grad = table.take_grad()?.expect("a gradient");
        assert!(grad.values().device().same_device(device) && !grad.rows().contains(&7));
        all.extend([Tensor::new(grad.norm()?, &Cpu)?, grad.to_dense(rows)?, grad.values().clone()]);
        table.add_grad(grad.scale(0.5)?)?;
        table.add_grad(grad.scale(0.25)?)?;
        steps.step()?;
        let saved = steps.state().iter().map(|var| to_host(var)).collect::<candle_core::Result<Vec<_>>>()?;
        // Another optimizer goes on from the saved state.
        steps = Steps::new(kind, &table)?;
        for (var, saved) in steps.state().iter().zip(&saved) {
            var.set(&saved.to_device(var.device())?)?;
        }
        all.extend(saved);
        all.push(table.var().copy()?);
    }
    all.into_iter().map(|x| to_host(&x).map_err(Into::into)).collect()
}

#[test]
fn tables_of_a_rank_are_trained_where_they_are() {
    on_ranks(1, "tables on a device", |_| -> Result<()> {
        for (dtype, width, kind) in itertools::iproduct!(DTYPES, [0, 1, 6], 0..3) {
            let table = Random::new(13).tensor(&[9, width], dtype);
            let (got, want) = (train(&table, kind, &device())?, train(&table, kind, &Cpu)?);
            assert_eq!(got.len(), want.len());
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(got.dtype(), want.dtype());
                assert_close(
                    got,
                    want,
                    tolerance(dtype),
                    &format!("number {i} of {dtype:?}, width {width}, kind {kind}"),
                );
            }
        }
        Ok(())
    });
}

#[test]
fn a_gradient_is_put_back_on_the_device_of_its_table_only() {
    on_ranks(1, "gradients of another device", |_| -> Result<()> {
        let table = RowVar::new(Var::zeros((4, 2), DType::F32, &device())?)?;
        let put = |device| table.add_grad(RowGrad::new([3], &Tensor::ones((1, 2), DType::F32, &device)?)?);
        put(device())?;
        match device() {
            Cpu => {}
            _ => assert!(put(Cpu).unwrap_err().to_string().contains("a gradient on Cpu of a table on Cuda")),
        }
        Ok(())
    });
}

#[test]
fn a_row_gradient_has_memory_of_its_own() {
    on_ranks(1, "row gradient", |_| -> Result<()> {
        let values = Var::zeros((2, 3), DType::F32, &device())?;
        let grad = RowGrad::new([0, 1], &values)?;
        values.set(&Tensor::ones((2, 3), DType::F32, &device())?)?;
        assert_eq!(to_host(grad.values())?.to_vec2::<f32>()?, [[0.0; 3]; 2]);
        let strided = Tensor::zeros((3, 2), DType::F32, &device())?;
        assert!(RowGrad::new([0, 1], &strided.t()?)?.values().is_contiguous());
        Ok(())
    });
}
