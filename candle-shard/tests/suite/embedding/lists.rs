//! The case lists of PyTorch's own tests, and what these leave out, on worlds 1 to 5.
use crate::embedding::cases::{Bag, Lookup, bag, plain};
use crate::embedding::check::{check, layouts};
use crate::embedding::oracle::Case;
use candle_shard::Result;
use candle_shard::kernels::BagMode::{Max, Mean, Sum};
use std::sync::Arc;
use test_utils::on_ranks;

const INF: f64 = f64::INFINITY;

/// Tables cut by columns, by rows evenly and by rows unevenly in PyTorch's tests; here each is cut in every way.
const LOOKUPS: [Lookup; 32] = [
    plain(&[5, 4], 17, 12),
    plain(&[6, 7, 6], 21, 11),
    plain(&[8, 6, 5, 4], 23, 13),
    plain(&[8, 6, 5, 4, 7], 23, 16),
    plain(&[4], 15, 14),
    plain(&[34], 15, 14).padding(10),
    plain(&[8, 6, 5, 4], 23, 13).padding(12),
    plain(&[4, 5, 6], 23, 13).limit(2.5, 2.0),
    plain(&[12, 7, 16], 23, 13).limit(2.5, 2.0),
    plain(&[8, 16, 20], 12, 12).limit(1.25, 1.0),
    plain(&[30], 15, 14).limit(2.0, 2.0),
    plain(&[5, 12], 16, 22),
    plain(&[5, 4], 32, 12),
    plain(&[6, 7, 6], 64, 11),
    plain(&[5, 12], 16, 22).limit(2.5, 2.0),
    plain(&[6, 7, 6], 64, 11).padding(30),
    plain(&[6, 5, 3], 26, 11).limit(2.0, 2.0),
    plain(&[8, 6, 5, 4], 19, 11),
    plain(&[4], 21, 11),
    plain(&[8, 6, 5, 4], 21, 11).padding(10),
    plain(&[6, 5, 8], 28, 5).limit(2.0, 2.0),
    plain(&[4], 14, 11).limit(2.5, 2.0),
    // What PyTorch's tests leave out.
    plain(&[9], 7, 3).padding(-1),
    plain(&[9], 7, 3).padding(-7).limit(1.0, 2.0),
    plain(&[9], 7, 4).limit(1.0, INF),
    plain(&[9], 7, 4).limit(0.1, -INF),
    plain(&[9], 7, 4).limit(2.0, 0.0),
    plain(&[9], 7, 4).limit(1.5, 3.0),
    plain(&[9], 7, 4).limit(4.0, 0.5),
    plain(&[9], 7, 4).limit(0.3, -1.0),
    plain(&[5], 2, 1), // more ranks than rows and columns
    plain(&[0, 4], 5, 6).limit(1.0, 2.0),
];

const BAGS: [Bag; 40] = [
    bag(Sum, plain(&[5, 5], 17, 14)),
    bag(Mean, plain(&[5, 5], 17, 14)),
    bag(Max, plain(&[5, 5], 17, 14)),
    bag(Sum, plain(&[5, 4], 17, 12)).weighted(),
    bag(Sum, plain(&[6, 7], 21, 11)).weighted(),
    bag(Sum, plain(&[8, 6], 24, 13).padding(10)).weighted(),
    bag(Mean, plain(&[8, 6], 24, 13).padding(10)),
    bag(Max, plain(&[8, 6], 24, 13).padding(10)),
    bag(Sum, plain(&[4, 5], 21, 11).limit(2.5, 2.0)),
    bag(Mean, plain(&[4, 5], 21, 11).limit(2.5, 2.0)),
    bag(Max, plain(&[4, 5], 21, 11).limit(1.15, 1.0)),
    bag(Sum, plain(&[12], 17, 12)).offsets(3),
    bag(Sum, plain(&[12], 17, 12)).offsets(3).weighted(),
    bag(Mean, plain(&[12], 17, 12)).offsets(3),
    bag(Max, plain(&[12], 17, 12)).offsets(3),
    bag(Sum, plain(&[5], 23, 13)).offsets(2).with_last(),
    bag(Mean, plain(&[5], 23, 13)).offsets(2).with_last(),
    bag(Max, plain(&[5], 23, 13)).offsets(2).with_last(),
    bag(Sum, plain(&[14], 16, 8).padding(6)).offsets(4).weighted().with_last(),
    bag(Mean, plain(&[14], 16, 8).padding(6)).offsets(4),
    bag(Max, plain(&[14], 16, 8).padding(12)).offsets(4),
    bag(Sum, plain(&[12], 19, 11).padding(12).limit(1.15, 2.0)).offsets(4),
    bag(Max, plain(&[12], 19, 11).limit(2.0, 1.0)).offsets(4).with_last(),
    // What PyTorch's tests leave out.
    bag(Sum, plain(&[6], 5, 3).padding(-2)).offsets(4),
    bag(Mean, plain(&[6], 5, 3).padding(-2)).offsets(4),
    bag(Max, plain(&[6], 5, 3).padding(-2)).offsets(4),
    bag(Sum, plain(&[3, 2], 2, 3).padding(0)), // bags of nothing but padding
    bag(Mean, plain(&[3, 2], 2, 3).padding(0)),
    bag(Max, plain(&[3, 2], 2, 3).padding(0)),
    bag(Sum, plain(&[2], 6, 3)).offsets(7), // more bags than ids
    bag(Mean, plain(&[2], 6, 3)).offsets(7).with_last(),
    bag(Max, plain(&[2], 6, 3)).offsets(7),
    bag(Sum, plain(&[0], 6, 3)).offsets(3).weighted(),
    bag(Mean, plain(&[0], 6, 3)).offsets(3),
    bag(Max, plain(&[0], 6, 3)).offsets(3),
    bag(Mean, plain(&[4, 3], 9, 4).limit(1.0, INF)),
    bag(Sum, plain(&[4, 3], 9, 4).limit(3.0, 0.5)).weighted(),
    bag(Max, plain(&[4, 3], 1, 4)), // every row the same: ties
    bag(Max, plain(&[9], 3, 1)).offsets(2),
    bag(Sum, plain(&[4, 0], 3, 2)),
];

/// Checks cases in every layout on worlds 1 to 5.
fn check_all(label: &'static str, cases: impl Fn(usize) -> Vec<Case>) {
    for world in 1..=5 {
        let cases = Arc::new(cases(world));
        on_ranks(world, label, move |ctx| -> Result<()> {
            for case in cases.iter() {
                let expected = case.on_one_device();
                layouts(world).iter().try_for_each(|layout| check(case, layout, ctx.group(), &expected))?;
            }
            Ok(())
        });
    }
}

#[test]
fn rows_are_those_of_one_device() {
    check_all("embedding", |world| LOOKUPS.iter().map(|lookup| lookup.case(world, false)).collect());
}

#[test]
fn every_rank_may_have_its_own_number_of_ids() {
    check_all("ragged embedding", |world| LOOKUPS.iter().map(|lookup| lookup.case(world, true)).collect());
}

#[test]
fn bags_are_those_of_one_device() {
    check_all("embedding_bag", |world| BAGS.iter().map(|bag| bag.case(world, false)).collect());
}

#[test]
fn every_rank_may_have_its_own_number_of_bags() {
    check_all("ragged embedding_bag", |world| BAGS.iter().map(|bag| bag.case(world, true)).collect());
}
