//! What PyTorch computes on one device (`benchmarks/embedding_facts.py`): the oracle says the same, and so do the ops.
use crate::embedding::check::{check, layouts};
use crate::embedding::oracle::{Call, Case, Op};
use candle_shard::kernels::BagMode;
use candle_shard::{EmbeddingBagOptions, EmbeddingOptions, Result};
use serde_json::Value;
use std::sync::Arc;
use test_utils::on_ranks;

/// A case of rank 0, and PyTorch's result, table, and gradients of table and weights.
struct Fact {
    name: String,
    case: Case,
    want: [Vec<f64>; 4],
}

/// The numbers of nested lists in row-major order, and the lengths of the lists.
fn numbers(value: &Value) -> (Vec<f64>, Vec<usize>) {
    match value {
        Value::Array(parts) => {
            let inner: Vec<_> = parts.iter().map(numbers).collect();
            let dims = inner.first().map_or(Vec::new(), |(_, dims)| dims.clone());
            (inner.into_iter().flat_map(|(numbers, _)| numbers).collect(), [vec![parts.len()], dims].concat())
        }
        Value::String(text) => (vec![text.parse().unwrap()], Vec::new()),
        value => (vec![value.as_f64().unwrap()], Vec::new()),
    }
}

fn facts() -> Vec<Fact> {
    let facts: Value = serde_json::from_str(include_str!("facts.json")).unwrap();
    facts.as_array().unwrap().iter().map(fact).collect()
}

fn fact(fact: &Value) -> Fact {
    let list = |key: &str| numbers(&fact[key]).0;
    let given = |key: &str| (!fact[key].is_null()).then(|| list(key));
    let whole = |numbers: Vec<f64>| numbers.into_iter().map(|x| x as i64).collect::<Vec<_>>();
    let (table, dims) = numbers(&fact["weight"]);
    let lookup = EmbeddingOptions::default()
        .padding_idx(fact["padding_idx"].as_i64())
        .max_norm(fact["max_norm"].as_f64())
        .norm_type(numbers(&fact["norm_type"]).0[0]);
    let include_last_offset = fact["include_last_offset"].as_bool().unwrap();
    let mode = match fact["mode"].as_str() {
        None => None,
        Some("sum") => Some(BagMode::Sum),
        Some("mean") => Some(BagMode::Mean),
        Some("max") => Some(BagMode::Max),
        Some(other) => panic!("mode {other}"),
    };
    let op = match mode {
        None => Op::Embedding(lookup),
        Some(mode) => Op::Bag(
            EmbeddingBagOptions::default().mode(mode).include_last_offset(include_last_offset).lookup(lookup),
        ),
    };
    let (ids, id_dims) = numbers(&fact["ids"]);
    let mut call = Call::new(whole(ids), &id_dims);
    call.offsets = given("offsets").map(whole);
    call.weights = given("per_sample_weights");
    call.upstream = Some(list("g"));
    let want = ["output", "weight_after", "weight_grad"].map(list);
    let [output, after, grad] = want;
    let case = Case { rows: dims[0], width: dims[1], table, op, calls: vec![call] };
    let name = fact["name"].as_str().unwrap().to_string();
    Fact { name, case, want: [output, after, grad, given("weights_grad").unwrap_or_default()] }
}

#[test]
fn the_oracle_is_pytorch() {
    for Fact { name, case, want } in facts() {
        let expected = case.on_one_device();
        let got = [&expected.found[0], &expected.table, &expected.table_grad, &expected.weight_grads[0]];
        for (what, got, want) in itertools::izip!(["output", "table", "gradient", "weights"], got, want) {
            assert_eq!(got.len(), want.len(), "{name}: {what}");
            let same = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-14 * b.abs().max(1.0);
            assert!(got.iter().zip(&want).all(same), "{name}: {what} {got:?}, PyTorch {want:?}");
        }
    }
}

#[test]
fn sharded_tables_give_what_pytorch_gives() {
    for world in 1..=4 {
        let facts = Arc::new(facts());
        on_ranks(world, "facts", move |ctx| -> Result<()> {
            for Fact { case, .. } in facts.iter() {
                let mut case = case.clone();
                let first = case.calls[0].clone();
                let dims = [&[0], &first.dims[1..]].concat();
                let last = matches!(case.op, Op::Bag(options) if options.include_last_offset);
                // The other ranks look up nothing.
                let offsets = first.offsets.map(|_| if last { vec![0] } else { Vec::new() });
                let weights = first.weights.map(|_| Vec::new());
                let idle = Call { offsets, weights, ..Call::new(Vec::new(), &dims) };
                case.calls.resize(world, idle);
                let expected = case.on_one_device();
                layouts(world).iter().try_for_each(|layout| check(&case, layout, ctx.group(), &expected))?;
            }
            Ok(())
        });
    }
}
