//! Proofs of models, and that a proof finds faults.
use candle_core::{DType, Device, Tensor};
use candle_pipe::schedule::ScheduleKind;
use candle_shard::nn::{Linear, Mode, ShardedVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Result};
use test_utils::model_args::ModelArgs;
use test_utils::prove::{Input, prove};
use test_utils::toy::{Transformer, TransformerPipe};
use test_utils::values;

fn plan() -> Plan {
    Plan::new("tp").with("up", ColwiseParallel::default()).with("down", RowwiseParallel::default())
}

fn mlp(vb: &ShardedVarBuilder) -> Result<impl Fn(&DTensor) -> Result<DTensor> + use<>> {
    let (up, down) = (Linear::new(4, 6, true, &vb.pp("up"))?, Linear::new(6, 4, true, &vb.pp("down"))?);
    Ok(move |x: &DTensor| down.forward(&up.forward(x)?.gelu()?))
}

fn tokens(rows: usize, len: usize, vocab: u32, first: u32) -> Tensor {
    let ids = (0..(rows * len) as u32).map(|i| (i * 7 + first) % vocab);
    Tensor::from_iter(ids, &Device::Cpu).unwrap().reshape((rows, len)).unwrap()
}

#[test]
fn an_mlp_is_proved() {
    let model = |vb: &ShardedVarBuilder| {
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

#[test]
fn a_mean_over_the_rows_of_a_rank_is_found() {
    // The mean of what this rank has is no mean of the batch.
    let model = |vb: &ShardedVarBuilder| {
        let mlp = mlp(vb)?;
        Ok(move |xs: &[DTensor], _: Mode| {
            let y = mlp(&xs[0])?.sqr()?;
            let mean = y.to_local().mean_all()?;
            DTensor::replicated(&mean, y.mesh())
        })
    };
    let report = prove(model).axes(&["fsdp", "tp"]).input("x", &values(&[6, 4], 1, DType::F64)).plan(plan()).run();
    let (smallest, why) = report.smallest.as_ref().unwrap();
    assert_eq!(smallest.to_string(), "fsdp=2 f64 batch=2");
    assert!(why.contains("loss in step 0"), "{why}");
    assert!(report.to_string().contains(".only(\"fsdp=2 f64 batch=2\")"), "{report}");
}

#[test]
fn a_function_is_proved_and_its_first_wrong_op_named() {
    let report = prove(|xs: &[DTensor]| xs[0].matmul(&xs[1])?.causal_softmax(0.5)?.sqr()?.sum_all())
        .input("x", &values(&[5, 4], 1, DType::F64))
        .input_of(Input::new("w", &values(&[4, 5], 2, DType::F64)).rows(None))
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

#[test]
fn the_toy_transformer_is_proved() {
    let args = ModelArgs { n_layers: 1, dim: 12, n_heads: 3, vocab_size: 11, max_seq_len: 5, ..ModelArgs::default() };
    let plans = [Transformer::plan("tp", false), Transformer::plan("tp", true)];
    let model = move |vb: &ShardedVarBuilder| {
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

#[test]
fn the_toy_transformer_is_proved_as_a_pipeline() {
    let args = ModelArgs { n_layers: 2, dim: 12, n_heads: 3, vocab_size: 11, max_seq_len: 5, ..ModelArgs::default() };
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
