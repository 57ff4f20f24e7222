//! Proofs of models, and that a proof finds faults.
use candle_core::{DType, Device, Tensor};
use candle_pipe::schedule::ScheduleKind;
use candle_prove::{ModelInput, Proof, prove};
use candle_shard::fsdp::FullyShard;
use candle_shard::nn::{LayerNorm, Linear, MeshVarBuilder, Mode, recompute};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Replicate, Result};
use std::sync::Arc;
use test_utils::model_args::ModelArgs;
use test_utils::toy::{Transformer, TransformerPipe};
use test_utils::{Scratch, values};

fn plan() -> Plan {
    Plan::new("tp").with("up", ColwiseParallel::default()).with("down", RowwiseParallel::default())
}

fn mlp(vb: &MeshVarBuilder) -> Result<impl Fn(&DTensor) -> Result<DTensor> + use<>> {
    let (up, down) = (Linear::new(4, 6, true, &vb.pp("up"))?, Linear::new(6, 4, true, &vb.pp("down"))?);
    Ok(move |x: &DTensor| down.forward(&up.forward(x)?.gelu()?))
}

fn tokens(rows: usize, len: usize, vocab: u32, first: u32) -> Tensor {
    let ids = (0..(rows * len) as u32).map(|i| (i * 7 + first) % vocab);
    Tensor::from_iter(ids, &Device::Cpu).unwrap().reshape((rows, len)).unwrap()
}

#[test]
fn an_mlp_is_proved() {
    let model = |vb: &MeshVarBuilder| {
        let mlp = mlp(vb)?;
        Ok(move |xs: &[DTensor], _: Mode| mlp(&xs[0])?.sub(&xs[1])?.sqr()?.mean_all())
    };
    let report = prove(model)
        .input("x", &values(&[7, 4], 1, DType::F64))
        .input("y", &values(&[7, 4], 2, DType::F64))
        .plan(plan())
        .run();
    report.assert();
    assert!(report.right > 20 && report.to_string().ends_with("wrong 0 refused 0"), "{report}");
}

/// The mesh has no other axis.
#[test]
fn units_are_proved_without_a_plan() {
    let model = |vb: &MeshVarBuilder| {
        let unit = |name: &str| FullyShard::new(&vb.pp(name), mlp);
        let (first, second) = (unit("first")?, unit("second")?);
        Ok(move |xs: &[DTensor], _: Mode| {
            second.run(|mlp| mlp(&first.run(|mlp| mlp(&xs[0]))?))?.sub(&xs[1])?.sqr()?.mean_all()
        })
    };
    let report = prove(model)
        .axes(&["fsdp"])
        .ranks(5)
        .dtypes(&[DType::F64])
        .input("x", &values(&[7, 4], 1, DType::F64))
        .input("y", &values(&[7, 4], 2, DType::F64))
        .run();
    report.assert();
    assert!(report.right > 4 && report.refused.is_empty(), "{report}");
}

#[test]
fn a_mean_over_the_rows_of_a_rank_is_found() {
    // The mean of what this rank has is no mean of the batch.
    let model = |vb: &MeshVarBuilder| {
        let mlp = mlp(vb)?;
        Ok(move |xs: &[DTensor], _: Mode| {
            let y = mlp(&xs[0])?.sqr()?;
            let mean = y.to_local().mean_all()?;
            DTensor::replicated(&mean, y.mesh())
        })
    };
    let report =
        prove(model).axes(&["fsdp", "tp"]).input("x", &values(&[6, 4], 1, DType::F64)).plan(plan()).run();
    let (smallest, why) = report.smallest.as_ref().unwrap();
    assert_eq!((smallest.ranks(), smallest.size_of("fsdp")), (2, 2), "{report}");
    assert!(why.contains("loss in step 0"), "{why}");
    assert!(report.to_string().contains(".only(\"fsdp=2 f64 batch="), "{report}");
}

#[test]
fn a_function_is_proved_and_its_first_wrong_op_named() {
    let report = prove(|xs: &[DTensor]| xs[0].matmul(&xs[1])?.causal_softmax(0.5)?.sqr()?.sum_all())
        .input("x", &values(&[5, 4], 1, DType::F64))
        .input_of(ModelInput::new("w", &values(&[4, 5], 2, DType::F64)).rows(None))
        .run();
    report.assert();
    let wrong = |xs: &[DTensor]| {
        let y = xs[0].relu()?;
        let far = y.mesh().size() as f64;
        y.affine(far, 0.0)?.sqr()?.sum_all()
    };
    let report = prove(wrong).input("x", &values(&[5, 4], 1, DType::F64)).run();
    let (smallest, why) = report.smallest.as_ref().unwrap();
    assert_eq!(smallest.ranks(), 2);
    assert!(why.contains("result of op 1, affine at") && why.contains("prove/mod.rs"), "{why}");
}

/// A rank without rows has the graph of the others: its passes leave units where theirs do.
#[test]
fn a_recomputed_unit_in_a_unit_is_proved_on_ranks_without_rows() {
    let model = |vb: &MeshVarBuilder| {
        let outer = FullyShard::new(&vb.pp("outer"), |vb| {
            let inner = FullyShard::new(&vb.pp("inner"), |vb| Linear::new(4, 4, true, vb))?;
            Ok((LayerNorm::new(4, 0.1, &vb.pp("norm"))?, Arc::new(inner)))
        })?;
        let outer = Arc::new(outer);
        Ok(move |xs: &[DTensor], _: Mode| {
            let outer = outer.clone();
            let run = move |x: &DTensor| {
                outer.run(|(norm, inner)| {
                    let inner = inner.clone();
                    recompute(&norm.forward(x)?, move |x| inner.run(|layer| layer.forward(x)))
                })
            };
            // As a segment, and once more on its result.
            run(&recompute(&xs[0], run.clone())?)?.sqr()?.mean_all()
        })
    };
    let x = values(&[3, 2, 4], 1, DType::F64);
    let report = prove(model)
        .axes(&["fsdp"])
        .input("x", &x)
        .only("fsdp=2 f64 batch=1")
        .only("fsdp=4 f64 batch=3")
        .run();
    report.assert();
    assert_eq!(report.right, 2, "{report}");
}

#[test]
fn ranks_with_unlike_calls_are_found() {
    let model = |vb: &MeshVarBuilder| {
        let layers = [0, 1].map(|i| FullyShard::new(&vb.pp(i), |vb| Linear::new(4, 4, true, vb)));
        let [a, b] = layers;
        let (a, b, rank) = (a?, b?, vb.mesh().group()?.rank());
        Ok(move |xs: &[DTensor], _: Mode| {
            let [first, second] = if rank == 0 { [&a, &b] } else { [&b, &a] };
            let first = first.run(|layer| layer.forward(&xs[0]))?;
            first.add(&second.run(|layer| layer.forward(&xs[0]))?)?.sqr()?.mean_all()
        })
    };
    let report =
        prove(model).axes(&["fsdp"]).input("x", &values(&[4, 4], 1, DType::F64)).only("fsdp=2 f64").run();
    let (_, why) = report.smallest.as_ref().unwrap();
    assert!(why.contains("made different calls"), "{why}");
}

/// A model whose ranks end in unlike ways after a fault would hang or differ.
#[test]
fn faults_end_in_one_error() {
    let model = |vb: &MeshVarBuilder| {
        let mlp = mlp(vb)?;
        Ok(move |xs: &[DTensor], _: Mode| mlp(&xs[0])?.sqr()?.mean_all())
    };
    let report = prove(model)
        .input("x", &values(&[4, 4], 1, DType::F64))
        .plan(plan())
        .only("dp=2 tp=2")
        .only("fsdp=2")
        .faults(4)
        .run();
    report.assert();
    assert!(report.faults > 12, "{report}");
}

#[test]
fn a_budget_is_of_any_number_of_ranks_and_finds_more_communication() {
    let proof = |gathers: bool| {
        let model = move |vb: &MeshVarBuilder| {
            let mlp = mlp(vb)?;
            Ok(move |xs: &[DTensor], _: Mode| {
                let y = mlp(&xs[0])?;
                let y = if gathers { y.redistribute(&vec![Replicate; y.mesh().ndim()])? } else { y };
                y.sqr()?.mean_all()
            })
        };
        prove(model).axes(&["dp", "fsdp"]).input("x", &values(&[64, 4], 1, DType::F32)).plan(plan())
    };
    let (folder, setups) = (Scratch::new("budget"), ["fsdp=2 tp=2 f32", "dp=16 fsdp=16 tp=4 f32"]);
    let path = folder.path("comm.lock");
    for _ in 0..2 {
        proof(false).budget(&path, &setups).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(
        text.contains("[dp=16 fsdp=16 tp=4 f32 batch=64]") && text.contains("all_reduce over tp: "),
        "{text}"
    );
    let changed = proof(true).budget(&path, &setups).unwrap_err();
    assert!(changed.contains("all_gather over fsdp: 0 → 1 calls, 0 B → "), "{changed}");
}

#[test]
fn the_toy_transformer_is_proved() {
    let args = ModelArgs {
        n_layers: 1,
        dim: 12,
        n_heads: 3,
        vocab_size: 11,
        max_seq_len: 5,
        ..ModelArgs::default()
    };
    let plans = [Transformer::plan("tp", false), Transformer::plan("tp", true)];
    let model = move |vb: &MeshVarBuilder| {
        let model = Transformer::new(&args, vb)?;
        Ok(move |xs: &[DTensor], mode: Mode| model.forward(&xs[0], mode)?.cross_entropy(&xs[1]))
    };
    let [plain, sequence] = plans;
    let report = prove(model)
        .input("tokens", &tokens(5, 5, 11, 0))
        .input("targets", &tokens(5, 5, 11, 3))
        .plan(plain)
        .plan(sequence)
        .run();
    report.assert();
    println!("{report}");
}

/// The toy Transformer with experts, for the arguments `args`.
fn mixture() -> Proof {
    let args = ModelArgs {
        n_layers: 1,
        dim: 12,
        n_heads: 3,
        vocab_size: 11,
        max_seq_len: 5,
        experts: 3,
        balance_weight: 0.02,
        z_weight: 0.01,
        ..ModelArgs::default()
    };
    let plan = Transformer::plan_of(&args, "tp", false);
    let model = move |vb: &MeshVarBuilder| {
        let model = Transformer::new(&args, vb)?;
        Ok(move |xs: &[DTensor], mode: Mode| {
            let made = model.run(&xs[0], None, mode)?;
            let loss = made.logits.cross_entropy(&xs[1])?;
            made.loss.map_or(Ok(loss.clone()), |more| loss.add(&more.to_dtype(loss.dtype())?))
        })
    };
    // The balance loss is a statistic of the whole batch.
    prove(model)
        .axes(&["fsdp", "ep"])
        .rows_over(&["ep"])
        .passes(&[1])
        .plan(plan)
        .input("tokens", &tokens(6, 5, 11, 0))
        .input("targets", &tokens(6, 5, 11, 3))
}

#[test]
fn a_mixture_is_proved() {
    // Roundings choose other experts.
    let report = mixture().dtypes(&[DType::F64]).run();
    println!("{report}");
    report.assert();
}

#[test]
fn a_sharded_sequence_is_proved() {
    let args = ModelArgs {
        n_layers: 1,
        dim: 12,
        n_heads: 3,
        vocab_size: 11,
        max_seq_len: 6,
        dropout_p: 0.0,
        ..ModelArgs::default()
    };
    let model = move |vb: &MeshVarBuilder| {
        let model = Transformer::new(&args, vb)?;
        Ok(move |xs: &[DTensor], mode: Mode| model.forward(&xs[0], mode)?.cross_entropy(&xs[1]))
    };
    let report = prove(model)
        .axes(&["dp", "cp"])
        .plan(Transformer::plan("tp", false))
        .input_of(ModelInput::new("tokens", &tokens(4, 6, 11, 0)).tokens(1))
        .input_of(ModelInput::new("targets", &tokens(4, 6, 11, 3)).tokens(1))
        .run();
    println!("{report}");
    report.assert();
}

#[test]
fn the_communication_of_the_toy_models_is_that_of_their_budgets() {
    let budgets = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("budgets");
    mixture().budget(budgets.join("mixture.lock"), &["ep=3 f32", "fsdp=2 ep=3 tp=2 f32"]).unwrap();
    let args = ModelArgs {
        n_layers: 2,
        dim: 64,
        n_heads: 8,
        vocab_size: 64,
        max_seq_len: 16,
        ..ModelArgs::default()
    };
    let model = move |vb: &MeshVarBuilder| {
        let model = Transformer::new(&args, vb)?;
        Ok(move |xs: &[DTensor], mode: Mode| model.forward(&xs[0], mode)?.cross_entropy(&xs[1]))
    };
    prove(model)
        .plan(Transformer::plan("tp", false))
        .plan(Transformer::plan("tp", true))
        .input("tokens", &tokens(256, 16, 64, 0))
        .input("targets", &tokens(256, 16, 64, 3))
        .budget(
            budgets.join("transformer.lock"),
            &["tp=2 f32", "tp=2 f32 plan=1", "dp=16 fsdp=8 tp=8 f32 plan=1"],
        )
        .unwrap();
}

#[test]
fn the_toy_transformer_is_proved_as_a_pipeline() {
    let args = ModelArgs {
        n_layers: 2,
        dim: 12,
        n_heads: 3,
        vocab_size: 11,
        max_seq_len: 5,
        ..ModelArgs::default()
    };
    let pipe = TransformerPipe::new(&args, false);
    let report = prove(move || pipe.declare())
        .input("tokens", &tokens(5, 5, 11, 0))
        .input("targets", &tokens(5, 5, 11, 3))
        .plan(Transformer::plan("tp", false))
        .schedules(&[ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::ZbH1])
        .run();
    println!("{report}");
    report.assert();
}
