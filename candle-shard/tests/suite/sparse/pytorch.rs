//! Numbers of PyTorch 2.15: `Embedding(sparse=True)` under its optimizers, and `embedding_renorm_`.

use candle_core::{DType, Device::Cpu, Tensor, Var};
use candle_nn::ParamsAdamW;
use candle_shard::Result;
use candle_shard::sparse::{ParamsAdagrad, ParamsSgd, RowVar, SparseAdagrad, SparseAdamW, SparseSgd};

use crate::sparse::*;

type Table = [[f64; 3]; 5];

fn table(dtype: DType) -> Result<RowVar> {
    let values = Tensor::from_iter((0..15).map(|i| ((i * 7 % 11) as f64 - 5.0) / 4.0), &Cpu)?;
    RowVar::new(Var::from_tensor(&values.reshape((5, 3))?.to_dtype(dtype)?)?)
}

/// Three steps on lists with and without duplicates; row 2 is never looked up.
fn trained(table: &RowVar, mut step: impl FnMut() -> Result<()>) -> Result<Tensor> {
    for (k, rows) in [&[1u32, 3, 1][..], &[3, 0], &[4, 1, 4, 4]].into_iter().enumerate() {
        let weights = (0..rows.len() * 3).map(|i| ((i + k) % 5) as f64 - 1.5);
        let weights = Tensor::from_iter(weights, &Cpu)?.reshape((rows.len(), 3))?;
        (table.lookup(rows)?.sqr()? * weights)?.sum_all()?.backward()?;
        step()?;
    }
    Ok(table.var().as_detached_tensor())
}

#[test]
fn optimizers_take_the_same_steps() -> Result<()> {
    let cases: [(&str, Table); 3] = [("SGD", SGD), ("Adagrad", ADAGRAD), ("SparseAdam", SPARSE_ADAM)];
    for (name, want) in cases {
        let table = table(DType::F64)?;
        let of = vec![table.clone()];
        let got = match name {
            "SGD" => {
                let mut sgd = SparseSgd::new(of, ParamsSgd { lr: 0.1, ..Default::default() })?;
                trained(&table, || sgd.step())?
            }
            "Adagrad" => {
                let params = ParamsAdagrad {
                    lr: 0.1,
                    lr_decay: 0.25,
                    initial_accumulator_value: 0.5,
                    eps: 1e-3,
                    ..Default::default()
                };
                let mut adagrad = SparseAdagrad::new(of, params)?;
                trained(&table, || adagrad.step())?
            }
            _ => {
                // PyTorch adds eps to the root of the biased moment, so it is nothing here.
                let params = ParamsAdamW { lr: 0.1, beta1: 0.8, beta2: 0.9, eps: 1e-300, weight_decay: 0.0 };
                let mut adam = SparseAdamW::new(of, params)?;
                trained(&table, || adam.step())?
            }
        };
        assert_close(&got, &Tensor::new(&want, &Cpu)?, 1e-12, name);
    }
    Ok(())
}

#[test]
fn rows_are_shortened_alike() -> Result<()> {
    for (dtype, p, rows) in RENORMED {
        let table = table(dtype)?;
        table.renorm(&[4, 0, 3, 0], 0.9, p)?;
        let got = table.var().index_select(&Tensor::new(&[0u32, 3, 4], &Cpu)?, 0)?;
        // The 16-bit numbers are PyTorch's own.
        let tolerance = match dtype {
            DType::F64 => 1e-14,
            DType::F32 => 1e-7,
            _ => 0.0,
        };
        assert_close(&got, &Tensor::new(&rows, &Cpu)?, tolerance, &format!("{dtype:?}, p {p}"));
    }
    Ok(())
}

const SGD: Table = [
    [-0.625, 0.65, -0.55],
    [2.275, 0.275, -0.405],
    [1.0, 0.0, -1.0],
    [0.5775, -0.1125, -1.1375],
    [0.35, -0.04999999999999996, 0.625],
];

const ADAGRAD: Table = [
    [-1.1705197728699523, 0.572319112632886, -0.5461347497148363],
    [1.3906801535469169, 0.2721926320461607, -0.638891815456011],
    [1.0, 0.0, -1.0],
    [0.676028314681318, -0.1540048203831241, -1.2900636737354316],
    [0.4397340728059283, -0.4341558986643014, 1.183766477391627],
];

const SPARSE_ADAM: Table = [
    [-1.1734219513772766, 0.5765780486227234, -0.5765780486227234],
    [1.4370766963551993, 0.31746753128341937, -0.5795126548538296],
    [1.0, 0.0, -1.0],
    [0.6105322856764194, -0.07632434356313064, -1.3350839053630055],
    [0.43253246871658063, -0.43253246871658063, 1.1825324687165806],
];

/// Dtype, norm type, and rows 0, 3 and 4 with a bound of 0.9.
const RENORMED: [(DType, f64, [[f64; 3]; 3]); 11] = [
    (
        DType::F64,
        0.0,
        [
            [-0.37499998750000046, 0.1499999950000002, -0.1499999950000002],
            [0.2249999925000003, -0.0749999975000001, -0.37499998750000046],
            [0.1499999950000002, -0.1499999950000002, 0.37499998750000046],
        ],
    ),
    (
        DType::F64,
        0.5,
        [
            [-0.17544467692716711, 0.07017787077086685, -0.07017787077086685],
            [0.10939055229926198, -0.036463517433087324, -0.1823175871654366],
            [0.07017787077086685, -0.07017787077086685, 0.17544467692716711],
        ],
    ),
    (
        DType::F64,
        1.0,
        [
            [-0.4999999777777788, 0.19999999111111152, -0.19999999111111152],
            [0.2999999866666673, -0.09999999555555576, -0.4999999777777788],
            [0.19999999111111152, -0.19999999111111152, 0.4999999777777788],
        ],
    ),
    (
        DType::F64,
        2.0,
        [
            [-0.7833493972551896, 0.3133397589020758, -0.3133397589020758],
            [0.45638326669625817, -0.15212775556541938, -0.7606387778270969],
            [0.3133397589020758, -0.3133397589020758, 0.7833493972551896],
        ],
    ),
    (
        DType::F64,
        3.0,
        [
            [-0.8645818406053296, 0.34583273624213184, -0.34583273624213184],
            [0.5048161667381827, -0.16827205557939426, -0.8413602778969713],
            [0.34583273624213184, -0.34583273624213184, 0.8645818406053296],
        ],
    ),
    (
        DType::F64,
        f64::INFINITY,
        [
            [-0.8999999280000058, 0.3599999712000023, -0.3599999712000023],
            [0.5399999568000035, -0.17999998560000116, -0.8999999280000058],
            [0.3599999712000023, -0.3599999712000023, 0.8999999280000058],
        ],
    ),
    (DType::F64, f64::NEG_INFINITY, [[-1.25, 0.5, -0.5], [0.75, -0.25, -1.25], [0.5, -0.5, 1.25]]),
    (DType::F64, -1.0, [[-1.25, 0.5, -0.5], [0.75, -0.25, -1.25], [0.5, -0.5, 1.25]]),
    (
        DType::F32,
        2.0,
        [
            [-0.7833493947982788, 0.3133397698402405, -0.3133397698402405],
            [0.45638322830200195, -0.15212774276733398, -0.7606387138366699],
            [0.3133397698402405, -0.3133397698402405, 0.7833493947982788],
        ],
    ),
    (
        DType::F16,
        2.0,
        [
            [-0.783203125, 0.313232421875, -0.313232421875],
            [0.456298828125, -0.152099609375, -0.7607421875],
            [0.313232421875, -0.313232421875, 0.783203125],
        ],
    ),
    (
        DType::BF16,
        2.0,
        [[-0.78125, 0.3125, -0.3125], [0.45703125, -0.15234375, -0.76171875], [0.3125, -0.3125, 0.78125]],
    ),
];
