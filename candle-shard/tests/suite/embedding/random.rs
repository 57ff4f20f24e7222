//! Random tables, cuts, ids and options.
use crate::embedding::cases::{Numbers, table};
use crate::embedding::check::{Layout, check};
use crate::embedding::oracle::{Call, Case, Op};
use candle_shard::kernels::BagMode;
use candle_shard::{EmbeddingBagOptions, EmbeddingOptions, Result};
use proptest::prelude::*;
use proptest::sample::select;
use test_utils::on_ranks;

fn lookups(rows: usize) -> impl Strategy<Value = EmbeddingOptions> {
    let rows = rows as i64;
    let norms = select(vec![0.0, 0.5, 1.0, 2.0, 3.0, -1.0, f64::INFINITY, f64::NEG_INFINITY]);
    (prop::option::of(-rows..rows), prop::option::of(0.1f64..4.0), norms).prop_map(
        |(padding_idx, max_norm, norm_type)| {
            EmbeddingOptions::default().padding_idx(padding_idx).max_norm(max_norm).norm_type(norm_type)
        },
    )
}

fn ops(rows: usize) -> impl Strategy<Value = Op> {
    let modes = select(vec![BagMode::Sum, BagMode::Mean, BagMode::Max]);
    let bag = (modes, any::<bool>(), lookups(rows)).prop_map(|(mode, include_last_offset, lookup)| {
        Op::Bag(
            EmbeddingBagOptions::default().mode(mode).include_last_offset(include_last_offset).lookup(lookup),
        )
    });
    prop_oneof![lookups(rows).prop_map(Op::Embedding), bag]
}

/// One rank's call, from a seed.
fn call(op: Op, rows: usize, weighted: bool, seed: u64) -> Call {
    let mut numbers = Numbers::new(seed);
    let n = numbers.below(12);
    let ids = numbers.ids(n, rows);
    let Op::Bag(options) = op else { return Call::new(ids, &[n]) };
    let mut offsets: Vec<i64> = (0..numbers.below(5)).map(|_| numbers.below(n + 1) as i64).collect();
    offsets.push(0);
    offsets.sort_unstable();
    offsets.extend(options.include_last_offset.then_some(n as i64));
    let weights =
        (weighted && options.mode == BagMode::Sum).then(|| (0..n).map(|_| numbers.real()).collect());
    Call { offsets: Some(offsets), weights, ..Call::new(ids, &[n]) }
}

/// A dim cut into pieces of some of the ranks, in any order; usual chunks, or of any sizes.
fn cuts(world: usize, dims: [usize; 2]) -> impl Strategy<Value = Layout> {
    let ranks = Just((0..world).collect::<Vec<_>>()).prop_shuffle();
    (ranks, 1..=world, 0..2usize, any::<bool>(), any::<bool>(), any::<u64>()).prop_map(
        move |(ranks, holders, dim, by_rows, chunks, seed)| {
            let mut numbers = Numbers::new(seed);
            let mut ends: Vec<usize> = (1..holders).map(|_| numbers.below(dims[dim] + 1)).collect();
            ends.sort_unstable();
            ends.push(dims[dim]);
            let starts = std::iter::once(0).chain(ends.clone());
            let sizes = ends.iter().zip(starts).map(|(end, start)| (!chunks).then_some(end - start));
            Layout { dim, order: ranks.into_iter().zip(sizes).collect(), by_rows }
        },
    )
}

fn cases() -> impl Strategy<Value = (Case, Layout)> {
    (1..=4usize, 1..12usize, 1..7usize).prop_flat_map(|(world, rows, width)| {
        let seeds = prop::collection::vec(any::<u64>(), world);
        (ops(rows), any::<bool>(), seeds, cuts(world, [rows, width]), any::<u64>()).prop_map(
            move |(op, weighted, seeds, layout, seed)| {
                let calls = seeds.into_iter().map(|seed| call(op, rows, weighted, seed)).collect();
                (Case { rows, width, table: table(rows, width, seed), op, calls }, layout)
            },
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn random_calls_give_what_one_device_gives((case, layout) in cases()) {
        let expected = std::sync::Arc::new(case.on_one_device());
        on_ranks(case.calls.len(), "random", move |ctx| -> Result<()> { check(&case, &layout, ctx.group(), &expected) });
    }
}
