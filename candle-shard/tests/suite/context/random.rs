//! Random lengths, heads, masks, orders and meshes against one device.
use super::harness::{Pairs, errors, truth};
use super::masks::of_rows;
use super::ways::{WAYS, has_ring};
use candle_core::DType;
use candle_shard::{Attention, ContextWay, Documents, Result, TokenOrder};
use proptest::prelude::*;
use proptest::sample::subsequence;
use test_utils::on_ranks;

/// Ends of documents in `len` rows: a 0, then some ascending ones, not always up to the last row.
fn documents(len: usize) -> impl Strategy<Value = Vec<usize>> {
    subsequence((0..=len).collect::<Vec<_>>(), 0..=(len + 1).min(6))
        .prop_map(|ends| std::iter::once(0).chain(ends).collect())
}

/// Returns the sizes of `parts` pieces of `len` rows. Pieces may be empty.
fn sizes(len: usize, parts: usize) -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(0..=len, parts - 1).prop_map(move |mut ends| {
        ends.sort_unstable();
        let starts = std::iter::once(0).chain(ends.iter().copied());
        starts.zip(ends.iter().copied().chain([len])).map(|(start, end)| end - start).collect()
    })
}

/// How the rows lie.
#[derive(Debug, Clone)]
enum Lie {
    Even,
    Sizes(Vec<usize>),
    Zigzag,
    ZigzagOfDocuments,
    Any(Vec<usize>, Vec<usize>),
}

#[derive(Debug, Clone)]
struct Drawn {
    batch: usize,
    len: usize,
    dp: usize,
    cp: usize,
    lists: Vec<Vec<usize>>,
    lie: Lie,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let meshes =
        prop_oneof![(Just(1usize), 1usize..6), Just((2, 2)), Just((2, 1)), Just((3, 2)), Just((2, 3))];
    (1usize..4, 1usize..68, meshes).prop_flat_map(|(batch, len, (dp, cp))| {
        let lists = prop_oneof![
            Just(vec![]),
            documents(len).prop_map(|ends| vec![ends]),
            proptest::collection::vec(documents(len), batch),
        ];
        let lie = prop_oneof![
            Just(Lie::Even),
            sizes(len, cp).prop_map(Lie::Sizes),
            Just(Lie::Zigzag),
            Just(Lie::ZigzagOfDocuments),
            (Just((0..len).collect::<Vec<_>>()).prop_shuffle(), sizes(len, cp))
                .prop_map(|(at, cut)| Lie::Any(at, cut)),
        ];
        (lists, lie).prop_map(move |(lists, lie)| Drawn { batch, len, dp, cp, lists, lie })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(384) })]

    #[test]
    fn any_attention_on_any_mesh_equals_one_device(
        drawn in drawn(),
        (kv_heads, group, dim, width) in (1usize..4, 1usize..4, 1usize..5, 1usize..5),
        (causal, window, cap) in (any::<bool>(), proptest::option::of(1usize..70), proptest::option::of(0.3f64..3.0)),
        (way, sinks) in (0usize..4, any::<bool>()),
    ) {
        let Drawn { batch, len, dp, cp, lists, lie } = drawn.clone();
        let pairs = Pairs {
            causal,
            window,
            chunk: None,
            documents: lists.iter().map(|ends| of_rows(ends, len)).collect(),
            cap,
            sinks,
        };
        let truth = truth([batch, kv_heads * group, kv_heads, dim, width], (len, len), (&pairs, 0.6), DType::F64).unwrap();
        let (order, cut) = match lie {
            Lie::Even => (None, None),
            Lie::Sizes(cut) => (None, Some(cut)),
            Lie::Zigzag => (Some(TokenOrder::zigzag(len, cp)), None),
            Lie::ZigzagOfDocuments => {
                let ends = lists.first().cloned().unwrap_or_else(|| vec![0, len]);
                (Some(TokenOrder::zigzag_of_documents(len, &ends, cp).unwrap()), None)
            }
            Lie::Any(positions, cut) => (Some(TokenOrder::new(positions, cut).unwrap()), None),
        };
        let cut = order.as_ref().map(|order| order.sizes().to_vec()).or(cut);
        // Asking for a way needs a sequence that is cut.
        let way: Option<ContextWay> = WAYS[if cp == 1 { 0 } else { way }];
        let options = Attention::default()
            .scale(0.6)
            .cap(cap)
            .causal(causal)
            .window(window)
            .documents((!lists.is_empty()).then(|| Documents::of_each(lists)))
            .order(order)
            .way(way);
        on_ranks(dp * cp, "any", move |ctx| -> Result<()> {
            let mut options = options.clone();
            if options.way == Some(ContextWay::Ring) && !has_ring(ctx) {
                options.way = Some(ContextWay::Gather);
            }
            let mesh = if dp == 1 { ctx.mesh(&[("cp", cp)])? } else { ctx.mesh(&[("dp", dp), ("cp", cp)])? };
            let error = errors(&truth, &options, &mesh, [cut.as_deref(); 2])?;
            assert!(error < 1e-12, "{drawn:?} {kv_heads} × {group}, {options:?}: {error:e}");
            Ok(())
        });
    }
}
