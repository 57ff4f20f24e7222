//! Layers of quantized weights against one device: values, gradients, and the bytes that a rank holds.

use crate::common::*;
use crate::gguf::{QUANTIZED, quantized, save};
use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use candle_shard::kernels::{QuantizedMatrix, quantized_linear};
use candle_shard::nn::{
    FusedQkv, Heads, Linear, MeshVarBuilder, QuantizedEmbedding, QuantizedLinear, QuantizedQkv, Width,
};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Replicate, Result, Shard, Weights};
use std::path::Path;
use std::sync::{Arc, Mutex};
use test_utils::{Ranks, Scratch, on_ranks, skip_among_processes};

const CPU: Device = Device::Cpu;

fn builder(path: &Path, mesh: &candle_dist::DeviceMesh, plan: Plan) -> Result<MeshVarBuilder> {
    MeshVarBuilder::from_weights(Weights::open(path)?, 0, mesh, plan, DType::F32, &CPU)
}

fn list(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Types that weights are stored in.
fn of_weights() -> impl Iterator<Item = GgmlDType> {
    QUANTIZED.into_iter().filter(|&dtype| QuantizedMatrix::takes(dtype))
}

/// The product on one device.
fn product(weight: &QTensor, x: &Tensor) -> Tensor {
    let copy = QStorage::from_data(weight.data().unwrap(), &CPU, weight.dtype()).unwrap();
    let weight = QuantizedMatrix::new(QTensor::new(copy, weight.shape()).unwrap()).unwrap();
    quantized_linear(x, &[&weight]).unwrap()
}

#[test]
fn a_weight_cut_by_rows_gives_the_bits_of_one_device() {
    let folder = Scratch::new("quantized-rows");
    for dtype in of_weights() {
        for rows in [3, 16, 37, 64] {
            let path = folder.path(format!("{dtype:?}-{rows}.gguf"));
            let whole = Arc::new(quantized((rows, 512), dtype));
            save(&path, &[], &[("up.weight", &whole)]);
            let x = values(&[2, 3, 512], 3, DType::F32);
            let want = product(&whole, &x);
            let of_candle = QMatMul::from_arc(whole.clone()).unwrap().forward(&x).unwrap();
            assert_near(&list(&want), &list(&of_candle), 2e-2);
            let dense = whole.dequantize(&CPU).unwrap();
            for ranks in 1..=5 {
                let (path, x, want, dense) = (path.clone(), x.clone(), want.clone(), dense.clone());
                let size = whole.storage_size_in_bytes();
                on_ranks(ranks, "quantized rows", move |ctx| -> Result<()> {
                    let mesh = mesh(ctx, &[ranks])?;
                    let plan = Plan::new("a").with("up", ColwiseParallel::default());
                    let layer =
                        QuantizedLinear::new(512, rows, false, &builder(&path, &mesh, plan)?.pp("up"))?;
                    let (x, var) = DTensor::distribute(&x, &mesh, &[Replicate])?.to_var()?;
                    let y = layer.forward(&x)?;
                    assert_eq!(y.placements(), [Shard(2)]);
                    assert_eq!(list(&y.full_tensor()?), list(&want), "{dtype:?} {rows} rows on {ranks}");
                    // At most the rows of its share and those that make up a tile.
                    assert!(
                        layer.bytes() <= size.div_ceil(rows) * (rows.div_ceil(ranks) + 16),
                        "{}",
                        layer.bytes()
                    );
                    let grads = y.sqr()?.sum_all()?.backward()?;
                    let ones =
                        (want.affine(2.0, 0.0)?.reshape(((), rows))?.matmul(&dense)?).reshape((2, 3, 512))?;
                    assert_near(&list(grads.get(&var).unwrap()), &list(&ones), 1e-4);
                    Ok(())
                });
            }
        }
    }
}

fn assert_near(got: &[f32], want: &[f32], relative: f32) {
    assert_eq!(got.len(), want.len());
    let most = want.iter().fold(1e-6f32, |most, x| most.max(x.abs()));
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= relative * most, "{got} instead of {want}");
    }
}

#[test]
fn a_weight_cut_by_blocks_of_columns_differs_by_the_order_of_sums_alone() {
    let folder = Scratch::new("quantized-columns");
    for dtype in of_weights() {
        let path = folder.path(format!("{dtype:?}.gguf"));
        let whole = Arc::new(quantized((32, 768), dtype));
        save(&path, &[], &[("down.weight", &whole)]);
        let x = values(&[4, 768], 5, DType::F32);
        // Activations are rounded in blocks too, which no cut here divides.
        let want = product(&whole, &x);
        let dense = whole.dequantize(&CPU).unwrap();
        for ranks in 1..=5 {
            let (path, x, want, dense) = (path.clone(), x.clone(), want.clone(), dense.clone());
            on_ranks(ranks, "quantized columns", move |ctx| -> Result<()> {
                let mesh = mesh(ctx, &[ranks])?;
                let plan = Plan::new("a").with("down", RowwiseParallel::default());
                let vb = builder(&path, &mesh, plan)?.pp("down");
                let block = vb.quantized_block("weight").unwrap();
                let layer = QuantizedLinear::new(Width::new(768 / block, block), 32, false, &vb)?;
                let (x, var) = DTensor::distribute(&x, &mesh, &[Replicate])?.to_var()?;
                let y = layer.forward(&x)?;
                assert_eq!(y.placements(), [Replicate]);
                assert_near(&list(y.to_local()), &list(&want), 1e-5);
                let grads = y.sum_all()?.backward()?;
                let sums = Tensor::ones((4, 32), DType::F32, &CPU)?.matmul(&dense)?;
                assert_near(&list(grads.get(&var).unwrap()), &list(&sums), 1e-5);
                Ok(())
            });
        }
    }
}

#[test]
fn a_table_is_looked_up_and_multiplied_in_its_blocks() {
    let folder = Scratch::new("quantized-table");
    let path = folder.path("w.gguf");
    let whole = Arc::new(quantized((11, 64), GgmlDType::Q8_0));
    save(&path, &[], &[("words.weight", &whole)]);
    let ids = Tensor::new(&[[0u32, 10, 3], [7, 7, 5]], &CPU).unwrap();
    let rows = QTensor::embedding(&whole, &ids).unwrap();
    let logits = product(&whole, &rows);
    for ranks in 1..=5 {
        let (path, ids, rows, logits) = (path.clone(), ids.clone(), rows.clone(), logits.clone());
        on_ranks(ranks, "quantized table", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[ranks])?;
            let whole = RowwiseParallel::default().output(Replicate);
            let plan = Plan::new("a").with("words", whole).with("head", ColwiseParallel::default());
            let vb = builder(&path, &mesh, plan)?;
            let words = QuantizedEmbedding::new(11, 64, &vb.pp("words"))?;
            let head = QuantizedLinear::tied(&words, &vb.pp("head"))?;
            let found = words.forward(&DTensor::distribute(&ids, &mesh, &[Replicate])?)?;
            assert_eq!(list(found.to_local()), list(&rows));
            assert_eq!(list(&head.forward(&found)?.full_tensor()?), list(&logits));
            let wrong = DTensor::distribute(&Tensor::new(&[11u32], &CPU)?, &mesh, &[Replicate])?;
            assert!(words.forward(&wrong).unwrap_err().to_string().contains("id 11"));
            Ok(())
        });
    }
}

#[test]
fn heads_are_cut_as_those_of_floats_and_shared_where_there_are_few_of_them() {
    let folder = Scratch::new("quantized-heads");
    for (query, key_value) in [(6, 6), (6, 3), (9, 3), (4, 1), (4, 2)] {
        for with_bias in [false, true] {
            let (dim, hidden) = (32, 64);
            let path = folder.path(format!("{query}-{key_value}-{with_bias}.gguf"));
            let weight = |heads: usize| quantized((heads * dim, hidden), GgmlDType::Q4_1);
            let bias = |heads: usize| {
                QTensor::quantize(&values(&[heads * dim], heads as u64, DType::F32), GgmlDType::F32).unwrap()
            };
            let (q, k, v, o) = (
                weight(query),
                weight(key_value),
                weight(key_value),
                quantized((hidden, query * dim), GgmlDType::Q8_0),
            );
            let (qb, kb) = (bias(query), bias(key_value));
            let tensors = [
                ("q.weight", &q),
                ("k.weight", &k),
                ("v.weight", &v),
                ("o.weight", &o),
                ("q.bias", &qb),
                ("k.bias", &kb),
                ("v.bias", &kb),
            ];
            save(&path, &[], &tensors);
            let x = values(&[2, 3, hidden], 1, DType::F32);
            for ranks in 1..=5 {
                let (path, x) = (path.clone(), x.clone());
                on_ranks(ranks, "quantized heads", move |ctx| -> Result<()> {
                    let mesh = mesh(ctx, &[ranks])?;
                    let heads = Heads { query, key_value, dim };
                    let plan = Plan::new("a")
                        .with("at", ColwiseParallel::default())
                        .with("at.*", ColwiseParallel::default());
                    let weights = || Weights::open(&path)?.rename(|name| format!("at.{name}"));
                    let vb = |plan: Plan| {
                        MeshVarBuilder::from_weights(weights()?, 0, &mesh, plan, DType::F32, &CPU)
                    };
                    let mut held = Vec::new();
                    // The latter have one layer of keys and values.
                    for names in [["q", "k", "v"], ["q", "k", "k"]] {
                        let quantized = QuantizedQkv::with_names(
                            hidden,
                            heads,
                            32,
                            with_bias,
                            names,
                            &vb(plan.clone())?.pp("at"),
                        )?;
                        let dense = FusedQkv::with_names(
                            hidden,
                            heads,
                            1,
                            with_bias,
                            names,
                            &vb(plan.clone())?.pp("at"),
                        )?;
                        assert_eq!(quantized.width(), dense.width());
                        held.push(quantized.bytes());
                        let (x, var) = DTensor::distribute(&x, &mesh, &[Replicate])?.to_var()?;
                        let loss = |parts: &[DTensor; 3]| -> Result<DTensor> {
                            let squares: Vec<DTensor> =
                                parts.iter().map(|part| part.sqr()?.sum_all()).collect::<Result<_>>()?;
                            squares[0].add(&squares[1])?.add(&squares[2])
                        };
                        let (got, want) = (quantized.forward(&x)?, dense.forward(&x)?);
                        for (got, want) in got.iter().zip(&want) {
                            assert_eq!((got.dims(), got.placements()), (want.dims(), want.placements()));
                            assert_near(&list(&got.full_tensor()?), &list(&want.full_tensor()?), 2e-2);
                        }
                        let of = |parts| -> Result<Vec<f32>> {
                            Ok(list(loss(parts)?.backward()?.get(&var).unwrap()))
                        };
                        assert_near(&of(&got)?, &of(&want)?, 3e-2);
                    }
                    assert!(held[0] == 0 || held[1] < held[0], "{held:?}");
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn a_wrong_id_on_some_ranks_is_one_error_on_all() {
    if skip_among_processes("it collects errors in memory of all ranks") {
        return;
    }
    let folder = Scratch::new("quantized-ids");
    let path = folder.path("w.gguf");
    save(&path, &[], &[("t.weight", &quantized((8, 64), GgmlDType::Q8_0))]);
    let errors: Arc<Mutex<Vec<String>>> = Arc::default();
    let heard = errors.clone();
    let outcome = Ranks::new(4, "wrong ids").run(move |ctx| -> Result<()> {
        let found = || -> Result<Tensor> {
            let mesh = mesh(ctx, &[2, 2])?;
            let plan = Plan::new("b").with("t", RowwiseParallel::default());
            let table = QuantizedEmbedding::new(8, 64, &builder(&path, &mesh, plan)?.pp("t"))?;
            // The id of the first rank of the first axis, which stops the world. Every call of the others fails then.
            let ids = Tensor::new(&[[8u32, 1], [2, 3]], &CPU)?;
            let whole = table.forward(&DTensor::distribute(&ids, &mesh, &[Replicate; 2])?);
            assert!(whole.unwrap_err().to_string().contains("id 8 is not a row"));
            table.forward(&DTensor::distribute(&ids, &mesh, &[Shard(0), Replicate])?)?.full_tensor()
        };
        let error = found().unwrap_err().to_string();
        heard.lock().unwrap().push(error);
        Ok(())
    });
    drop(outcome);
    let errors = errors.lock().unwrap();
    assert_eq!(errors.len(), 4);
    assert!(
        errors.iter().all(|error| error == &errors[0] && error.contains("id 8 is not a row")),
        "{errors:?}"
    );
}

#[test]
fn operands_that_do_not_fit_are_one_error_on_all_ranks() {
    let folder = Scratch::new("quantized-operands");
    let path = folder.path("w.gguf");
    let uneven = quantized((4, 128), GgmlDType::Q8_0);
    save(&path, &[], &[("w.weight", &uneven), ("t.weight", &quantized((8, 64), GgmlDType::Q8_0))]);
    let errors = on_ranks(3, "operands", move |ctx| -> Result<Vec<String>> {
        let ring = mesh(ctx, &[3])?;
        let plan = Plan::new("a").with("w", RowwiseParallel::default());
        let vb = builder(&path, &ring, plan)?;
        let split = QuantizedLinear::new(Width::new(8, 16), 4, false, &vb.pp("w")).unwrap_err();
        let layer = QuantizedLinear::new(64, 8, false, &vb.pp("t"))?;
        let one_row = Tensor::ones((1, 64), DType::F64, &CPU)?;
        let wide = layer.forward(&DTensor::distribute(&one_row, &ring, &[Shard(0)])?).unwrap_err();
        let elsewhere =
            DTensor::distribute(&one_row.to_dtype(DType::F32)?, &mesh(ctx, &[1, 3])?, &[Replicate; 2])?;
        let far = layer.forward(&elsewhere).unwrap_err();
        Ok([split, wide, far].map(|error| error.to_string()).to_vec())
    });
    assert!(errors.iter().all(|of_rank| *of_rank == errors[0]), "{errors:?}");
    for (error, text) in
        errors[0].iter().zip(["in units of 16 split one", "expected f32, f16 or bf16", "another mesh"])
    {
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn tables_of_16_bit_dtypes_share_no_plan() {
    let folder = Scratch::new("quantized-halves");
    let path = folder.path("w.gguf");
    save(&path, &[], &[("t.weight", &quantized((8, 64), GgmlDType::Q8_0))]);
    on_ranks(2, "halves", move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let ids = DTensor::distribute(&Tensor::new(&[1u32, 2], &CPU)?, &mesh, &[Replicate])?;
        for dtype in [DType::F16, DType::BF16] {
            let plan = Plan::new("a").with("t", RowwiseParallel::default());
            let vb = MeshVarBuilder::from_weights(Weights::open(&path)?, 0, &mesh, plan, dtype, &CPU)?;
            let rows = QuantizedEmbedding::new(8, 64, &vb.pp("t"))?.forward(&ids)?;
            assert_eq!((rows.dtype(), rows.to_local().dtype()), (dtype, dtype));
        }
        Ok(())
    });
}

#[test]
fn layers_that_cannot_be_built_say_why() {
    let folder = Scratch::new("quantized-refused");
    let path = folder.path("w.gguf");
    let plain = QTensor::quantize(&values(&[4, 256], 1, DType::F32), GgmlDType::F32).unwrap();
    let of_inputs = quantized((4, 256), GgmlDType::Q8K);
    let weight = quantized((4, 768), GgmlDType::Q4K);
    save(&path, &[], &[("w.weight", &weight), ("plain.weight", &plain), ("inputs.weight", &of_inputs)]);
    on_ranks(2, "refused", move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let plan = Plan::new("a").with("w", RowwiseParallel::default());
        let vb = builder(&path, &mesh, plan)?;
        let said = |made: Result<QuantizedLinear>| made.unwrap_err().to_string();
        assert!(said(QuantizedLinear::new(768, 5, false, &vb.pp("w"))).contains("[4, 768]"));
        assert!(said(QuantizedLinear::new(256, 4, false, &vb.pp("plain"))).contains("not quantized"));
        assert!(said(QuantizedLinear::new(768, 4, false, &vb.pp("w"))).contains("blocks of 256 columns"));
        assert!(
            said(QuantizedLinear::new(256, 4, false, &vb.pp("inputs"))).contains("nothing is multiplied")
        );
        assert_eq!(vb.pp("inputs").quantized_block("weight"), None);
        let fresh = MeshVarBuilder::fresh(1, &mesh, Plan::new("a"), DType::F32, &CPU)?;
        assert!(said(QuantizedLinear::new(768, 4, false, &fresh.pp("w"))).contains("only weights in files"));
        assert_eq!(
            (vb.pp("w").quantized_block("weight"), vb.pp("plain").quantized_block("weight")),
            (Some(256), None)
        );
        // The same weight as floats may be cut anywhere.
        assert_eq!(Linear::new(768, 4, false, &vb.pp("w"))?.placements(), [Shard(1)]);
        Ok(())
    });
}
