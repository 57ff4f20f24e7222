//! Windows, documents, rows that see nothing, and what is refused.
use super::harness::{Pairs, allowed, errors, truth};
use super::ways::{has_ring, ways};
use candle_core::{DType, Device, Tensor};
use candle_shard::{
    Attention, ContextWay, DTensor, Documents, Placement, Replicate, Result, Shard, TokenOrder,
};
use itertools::Itertools;
use test_utils::{distribute, on_ranks, values};

/// The document of each of `len` rows.
pub(super) fn of_rows(ends: &[usize], len: usize) -> Vec<Option<usize>> {
    (0..len).map(|row| (1..ends.len()).find(|&d| (ends[d - 1]..ends[d]).contains(&row))).collect()
}

#[test]
fn each_mask_equals_one_device() {
    for world in 1..=5 {
        on_ranks(world, "masks", move |ctx| -> Result<()> {
            let (mesh, ways) = (ctx.mesh(&[("cp", world)])?, ways(ctx));
            let len = 13;
            let lists: [Vec<Vec<usize>>; 4] = [
                vec![],
                vec![vec![0, 7, 12, 12, 13]],
                vec![vec![0, 3, 10]],
                vec![vec![0, 13], vec![0, 2, 9]],
            ];
            for causal in [false, true] {
                for window in [None, Some(1), Some(4), Some(usize::MAX)] {
                    let in_f32 = matches!(window, None | Some(4));
                    let dtypes = if in_f32 { &[DType::F64, DType::F32][..] } else { &[DType::F64] };
                    for (list, &dtype) in lists.iter().cartesian_product(dtypes) {
                        let documents = list.iter().map(|ends| of_rows(ends, len)).collect();
                        let pairs = Pairs {
                            causal,
                            window: window.map(|window| window.min(1000)),
                            chunk: None,
                            documents,
                            cap: None,
                            sinks: causal,
                        };
                        let truth = truth([2, 4, 2, 4, 4], (len, len), (&pairs, 0.6), dtype)?;
                        let documents = (!list.is_empty()).then(|| Documents::of_each(list.clone()));
                        let orders = [
                            None,
                            Some(TokenOrder::zigzag(len, world)),
                            list.first()
                                .map(|ends| TokenOrder::zigzag_of_documents(len, ends, world))
                                .transpose()?,
                        ];
                        for (&way, order) in
                            ways.iter().flat_map(|way| orders.clone().map(move |order| (way, order)))
                        {
                            let documents = documents.clone();
                            let options = Attention::default()
                                .scale(0.6)
                                .causal(causal)
                                .window(window)
                                .documents(documents)
                                .order(order)
                                .way(way);
                            let sizes = options.order.as_ref().map(|order| order.sizes().to_vec());
                            let error = errors(&truth, &options, &mesh, [sizes.as_deref(); 2])?;
                            assert!(error < allowed(dtype), "{options:?} in {dtype:?}: {error:e}");
                        }
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn chunks_equal_one_device_in_every_way() {
    for world in 1..=4 {
        on_ranks(world, "chunks", move |ctx| -> Result<()> {
            let (mesh, ways) = (ctx.mesh(&[("cp", world)])?, ways(ctx));
            let len = 13;
            let lists = [vec![], vec![vec![0, 7, 12, 12, 13]], vec![vec![0, 13], vec![0, 2, 9]]];
            for (causal, chunk, list) in
                [(true, 1), (true, 4), (false, 5), (true, 100)].into_iter().flat_map(|(causal, chunk)| {
                    lists.iter().map(move |list: &Vec<Vec<usize>>| (causal, chunk, list))
                })
            {
                let documents = list.iter().map(|ends| of_rows(ends, len)).collect();
                let pairs = Pairs { causal, chunk: Some(chunk), documents, ..Pairs::default() };
                let truth = truth([2, 4, 2, 4, 4], (len, len), (&pairs, 0.6), DType::F64)?;
                for (&way, order) in
                    ways.iter().cartesian_product([None, Some(TokenOrder::zigzag(len, world))])
                {
                    let documents = (!list.is_empty()).then(|| Documents::of_each(list.clone()));
                    let options = Attention::default().scale(0.6).causal(causal).chunk(chunk);
                    let options = options.documents(documents).order(order).way(way);
                    let sizes = options.order.as_ref().map(|order| order.sizes().to_vec());
                    let error = errors(&truth, &options, &mesh, [sizes.as_deref(); 2])?;
                    assert!(error < allowed(DType::F64), "{options:?}: {error:e}");
                }
            }
            // The last query is at the position of the last key.
            let pairs = Pairs { causal: true, chunk: Some(4), ..Pairs::default() };
            let truth = truth([2, 4, 2, 4, 4], (5, 10), (&pairs, 0.6), DType::F64)?;
            let options = Attention::default().scale(0.6).causal(true).chunk(4);
            let error = errors(&truth, &options, &mesh, [None; 2])?;
            assert!(error < allowed(DType::F64), "{options:?} of 5 queries: {error:e}");
            Ok(())
        });
    }
}

#[test]
fn windows_of_more_queries_than_keys_equal_one_device() {
    on_ranks(3, "windows", |ctx| -> Result<()> {
        let (mesh, has_ring) = (ctx.mesh(&[("cp", 3)])?, has_ring(ctx));
        for (queries, keys) in [(10, 5), (5, 10), (7, 1)] {
            for window in [1, 3, 7, 100, usize::MAX] {
                let pairs = Pairs { window: Some(window.min(1000)), ..Pairs::default() };
                let truth = truth([2, 4, 2, 4, 4], (queries, keys), (&pairs, 0.6), DType::F64)?;
                for way in [None, Some(ContextWay::Gather)]
                    .into_iter()
                    .chain(has_ring.then_some(Some(ContextWay::Ring)))
                {
                    let options = Attention::default().scale(0.6).window(window).way(way);
                    let error = errors(&truth, &options, &mesh, [None; 2])?;
                    assert!(error < allowed(DType::F64), "{queries} {keys} {options:?}: {error:e}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn capped_scores_equal_one_device_in_every_way() {
    for world in 1..=4 {
        on_ranks(world, "caps", move |ctx| -> Result<()> {
            let (mesh, ways) = (ctx.mesh(&[("cp", world)])?, ways(ctx));
            for (causal, window, cap, scale) in
                [(true, None, 0.5, 0.6), (true, Some(4), 0.2, -0.6), (false, Some(3), 30.0, 2.0)]
            {
                let pairs = Pairs { causal, window, cap: Some(cap), ..Pairs::default() };
                let truth = truth([2, 4, 2, 4, 4], (13, 13), (&pairs, scale), DType::F64)?;
                for &way in &ways {
                    let options =
                        Attention::default().scale(scale).cap(cap).causal(causal).window(window).way(way);
                    let error = errors(&truth, &options, &mesh, [None; 2])?;
                    assert!(error < allowed(DType::F64), "{options:?}: {error:e}");
                    let without = errors(&truth, &options.cap(None), &mesh, [None; 2])?;
                    assert!(without > 1e-3, "the cap {cap:?} changes nothing: {without:e}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn rows_that_see_nothing_give_zeros() {
    on_ranks(3, "nothing", |ctx| -> Result<()> {
        let (mesh, ways) = (ctx.mesh(&[("cp", 3)])?, ways(ctx));
        let x = distribute(&values(&[1, 7, 2, 4], 1, DType::F32), &mesh, &[Shard(1)])?;
        for &way in &ways {
            let options = Attention::default().documents(Documents::new(vec![0, 2])).way(way);
            let out = options.of(&x, &x, &x)?.full_tensor()?;
            let zeros = out.narrow(1, 2, 5)?.flatten_all()?.to_vec1::<f32>()?;
            assert!(zeros.iter().all(|&x| x == 0.0), "{way:?}: {zeros:?}");
            assert!(out.narrow(1, 0, 2)?.abs()?.sum_all()?.to_scalar::<f32>()? > 0.1);
        }
        Ok(())
    });
}

#[test]
fn options_that_do_not_fit_are_one_error_on_all_ranks() {
    let errors = on_ranks(3, "refusals", |ctx| -> Result<Vec<String>> {
        let mesh = ctx.mesh(&[("cp", 3)])?;
        let of = |rows: usize, at: Placement| {
            distribute(&Tensor::ones((2, rows, 2, 4), DType::F32, &Device::Cpu)?, &mesh, &[at])
        };
        let (x, other, whole) = (of(7, Shard(1))?, of(5, Shard(1))?, of(7, Replicate)?);
        let documents = |list: Vec<Vec<usize>>| Attention::default().documents(Documents::of_each(list));
        let order = |len| Attention::default().order(TokenOrder::zigzag(len, 3));
        let by = |way| Attention::default().way(way);
        let cases = [
            (documents(vec![vec![0, 8]]), &x, &x, "[0, 8] in 7 rows"),
            (documents(vec![vec![1, 7]]), &x, &x, "begin with 0"),
            (documents(vec![vec![0, 5, 3]]), &x, &x, "do not decrease"),
            (documents(vec![vec![]]), &x, &x, "begin with 0"),
            (documents(vec![vec![0, 7]; 3]), &x, &x, "3 lists of documents for a batch of 2"),
            (documents(vec![]), &x, &x, "0 lists of documents for a batch of 2"),
            (documents(vec![vec![0, 5]]), &x, &other, "7 queries and 5 keys"),
            (Attention::default().window(0), &x, &x, "a window of 0 keys"),
            (Attention::default().chunk(0), &x, &x, "a chunk of 0 positions"),
            (Attention::default().window(3).chunk(4), &x, &x, "a window of 3 and a chunk of 4"),
            (Attention::default().scale(f64::NAN), &x, &x, "a finite number"),
            (Attention::default().cap(0.0), &x, &x, "a cap of 0"),
            (order(6), &x, &x, "an order of 6 tokens"),
            (order(7).key_order(TokenOrder::zigzag(7, 3)), &x, &x, "give one of them"),
            (Attention::default().key_order(TokenOrder::zigzag(6, 3)), &x, &x, "a key order of 6"),
            (by(ContextWay::Heads), &x, &other, "unlike shards"),
            (by(ContextWay::Ring), &whole, &whole, "shard the rows of all three"),
        ];
        let refused = |(options, q, k, text): (Attention, &DTensor, &DTensor, &str)| {
            let error = options
                .of(q, k, k)
                .err()
                .map_or_else(|| format!("no error for {options:?}"), |e| e.to_string());
            assert!(error.starts_with("flash_attn: ") && error.contains(text), "{text}: {error}");
            error
        };
        let mut errors: Vec<String> = cases.into_iter().map(refused).collect();
        errors.push(TokenOrder::new(vec![0, 2, 2], vec![1, 2]).unwrap_err().to_string());
        errors.push(TokenOrder::new(vec![0, 1], vec![1, 2]).unwrap_err().to_string());
        errors.push(TokenOrder::new(vec![0, 1], vec![usize::MAX, 3]).unwrap_err().to_string());
        errors.push(Attention::default().work(&[usize::MAX, 1]).unwrap_err().to_string());
        Ok(errors)
    });
    assert!(errors.iter().all(|of_rank| *of_rank == errors[0]));
    assert!(errors[0][17].contains("position 1 of 3 is missing") && errors[0][18].contains("add up to 2"));
}
