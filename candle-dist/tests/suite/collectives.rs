//! Collectives of the thread backend: definitions, errors and counts. `conformance` has the other tests.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor};
use candle_dist::{Collective, Cut, Error, Op, ProcessGroup, ReduceOp, Result, comm};
use test_utils::on_ranks;

const WORLDS: std::ops::RangeInclusive<usize> = 1..=5;
const DTYPES: [DType; 7] =
    [DType::U8, DType::U32, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64];

/// Returns the tensor of `rank`: small whole numbers, which are exact in every dtype.
fn input(rank: usize, shape: &[usize], dtype: DType) -> candle_core::Result<Tensor> {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i| ((i * 7 + rank * 3) % 5 + 1) as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
}

fn values(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_same(got: &Tensor, want: &Tensor, what: &str) {
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()), "{what}");
    assert_eq!(values(got), values(want), "{what}");
    assert!(got.is_contiguous(), "{what}");
}

/// Returns the reduction in rank order, elementwise in f64.
fn reduced(n: usize, shape: &[usize], dtype: DType, op: ReduceOp) -> Tensor {
    let all: Vec<Vec<f64>> = (0..n).map(|r| values(&input(r, shape, dtype).unwrap())).collect();
    let out: Vec<f64> = (0..all[0].len())
        .map(|i| {
            let column = all.iter().map(|v| v[i]);
            match op {
                ReduceOp::Sum => column.sum(),
                ReduceOp::Avg => column.sum::<f64>() / n as f64,
                ReduceOp::Min => column.fold(f64::INFINITY, f64::min),
                ReduceOp::Max => column.fold(f64::NEG_INFINITY, f64::max),
                ReduceOp::Product => column.product(),
                // The conformance suite compares the other ones.
                other => panic!("no {other} here"),
            }
        })
        .collect();
    Tensor::from_vec(out, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Returns sizes of a dim for `n` ranks: even, uneven, and with empty pieces.
fn cuts(n: usize) -> Vec<Vec<usize>> {
    let empty_tail = (0..n).map(|r| if r == 0 { 3 } else { 0 }).collect();
    vec![vec![2; n], (0..n).map(|r| (r * 2) % 3 + 1).collect(), (0..n).collect(), empty_tail]
}

fn start(sizes: &[usize], rank: usize) -> usize {
    sizes[..rank].iter().sum()
}

#[test]
fn gathers_and_scatters_of_uneven_pieces_on_every_dim() {
    for n in WORLDS {
        on_ranks(n, "pieces", move |ctx| -> Result<()> {
            let (g, r) = (ctx.group(), ctx.rank());
            for dtype in DTYPES {
                for sizes in cuts(n) {
                    for dim in 0..3 {
                        let mut shape = [3, 2, 4];
                        shape[dim] = sizes.iter().sum();
                        let whole = input(9, &shape, dtype)?;
                        let piece = whole.narrow(dim, start(&sizes, r), sizes[r])?;
                        let what = format!("dim {dim} sizes {sizes:?} {dtype:?}");
                        assert_same(
                            &g.call(Collective::all_gather(Cut::new(dim, &sizes)))
                                .run(&piece)?
                                .contiguous()?,
                            &whole,
                            &what,
                        );
                        for root in [0, n - 1] {
                            let gathered = g.gather(&piece, dim, &sizes, root)?;
                            assert_eq!(gathered.is_some(), r == root);
                            if let Some(gathered) = gathered {
                                assert_same(&gathered.contiguous()?, &whole, &what);
                            }
                            let given = (r == root).then_some(&whole);
                            let mine = g.scatter(given, (&shape[..], dtype), dim, &sizes, root)?;
                            assert_same(&mine, &piece.contiguous()?, &what);
                        }
                        let mine = input(r, &shape, dtype)?;
                        let sum = reduced(n, &shape, dtype, ReduceOp::Sum);
                        let want = sum.narrow(dim, start(&sizes, r), sizes[r])?.contiguous()?;
                        let got = g
                            .call(Collective::reduce_scatter(Cut::new(dim, &sizes), ReduceOp::Sum))
                            .run(&mine)?;
                        assert_same(&got, &want, &what);
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn any_view_goes_in() {
    on_ranks(3, "views", |ctx| -> Result<()> {
        let g = ctx.group();
        let base = input(ctx.rank(), &[5, 7, 6], DType::F32)?;
        for view in [base.transpose(0, 2)?, base.narrow(1, 2, 3)?, base.narrow(2, 1, 4)?.permute((1, 2, 0))?]
        {
            let dense = view.force_contiguous()?;
            assert_same(
                &g.all_reduce(&view, ReduceOp::Sum)?,
                &g.all_reduce(&dense, ReduceOp::Sum)?,
                "all_reduce",
            );
            for dim in 0..3 {
                assert_same(&g.all_gather(&view, dim)?, &g.all_gather(&dense, dim)?, "all_gather");
            }
            assert_same(&g.broadcast(&view, 1)?, &g.broadcast(&dense, 1)?, "broadcast");
        }
        Ok(())
    });
}

#[test]
fn broadcast_send_recv_and_barrier() {
    for n in WORLDS {
        on_ranks(n, "broadcast", move |ctx| -> Result<()> {
            let (g, r) = (ctx.group(), ctx.rank());
            for root in 0..n {
                assert_same(
                    &g.broadcast(&input(r, &[3, 4], DType::I64)?, root)?,
                    &input(root, &[3, 4], DType::I64)?,
                    "",
                );
            }
            // A ring, two messages deep: sends do not wait, and the order is kept.
            if n > 1 {
                let (next, before) = ((r + 1) % n, (r + n - 1) % n);
                g.send(&input(r, &[2, 3], DType::BF16)?.t()?, next)?;
                g.call(Collective::Send { to: next, tag: 0 })
                    .owned()
                    .run_all(&[input(r + 10, &[1], DType::F64)?])
                    .map(drop)?;
                let first = g.recv((3, 2), DType::BF16, before)?;
                assert_same(&first, &input(before, &[2, 3], DType::BF16)?.t()?.contiguous()?, "first");
                assert_same(
                    &g.recv(1, DType::F64, before)?,
                    &input(before + 10, &[1], DType::F64)?,
                    "second",
                );
            }
            g.barrier()
        });
    }
}

#[test]
fn subgroups_and_split_count_ranks_in_their_own_order() {
    on_ranks(5, "split", |ctx| -> Result<()> {
        let (g, r) = (ctx.group(), ctx.rank());
        let half = g.split(Some((r % 2) as u32), -(r as i64))?.expect("every rank gave a color");
        let members: Vec<usize> = if r % 2 == 0 { vec![4, 2, 0] } else { vec![3, 1] };
        assert_eq!(half.ranks(), members);
        assert_eq!(half.ranks()[half.rank()], r);
        let sum =
            half.all_reduce(&Tensor::new(r as f32, &Device::Cpu)?, ReduceOp::Sum)?.to_scalar::<f32>()?;
        assert_eq!(sum, members.iter().sum::<usize>() as f32);
        assert!(g.split((r > 0).then_some(0), 0)?.is_some() == (r > 0));
        // Only the members of a subgroup create it, any number of times.
        if r >= 3 {
            for _ in 0..3 {
                let pair = g.subgroup(&[4, 3])?;
                assert_eq!((pair.size(), pair.rank()), (2, 4 - r));
                pair.barrier()?;
            }
        } else {
            assert!(g.subgroup(&[3, 4]).unwrap_err().to_string().contains("only members"));
        }
        g.barrier()
    });
}

#[test]
fn results_are_bit_identical_on_all_ranks_and_from_run_to_run() {
    let run = || {
        on_ranks(4, "determinism", |ctx| -> Result<Vec<u32>> {
            let x: Vec<f32> = (0..1000).map(|i| ((i * 37 + ctx.rank() * 101) as f32).sin() * 1e3).collect();
            let x = Tensor::new(x, &Device::Cpu)?;
            let sum = ctx.group().all_reduce(&x, ReduceOp::Sum)?.to_vec1::<f32>()?;
            Ok(sum.iter().map(|v| v.to_bits()).collect())
        })
    };
    let (first, second) = (run(), run());
    assert!(first.iter().chain(&second).all(|bits| bits == &first[0]));
}

#[test]
fn sixteen_bit_sums_accumulate_in_f32() {
    on_ranks(5, "f16", |ctx| -> Result<()> {
        // In f16, adding 1 to 2048 has no effect; in f32 it does.
        let x = if ctx.rank() == 0 { 2048.0 } else { 1.0 };
        for dtype in [DType::F16, DType::BF16] {
            let x = Tensor::new(&[x as f32], &Device::Cpu)?.to_dtype(dtype)?;
            let sum = values(&ctx.group().all_reduce(&x, ReduceOp::Sum)?);
            assert_eq!(sum, values(&Tensor::new(&[2052f32], &Device::Cpu)?.to_dtype(dtype)?));
        }
        Ok(())
    });
}

#[test]
fn min_and_max_propagate_nan() {
    for n in 2..=3 {
        on_ranks(n, "nan", move |ctx| -> Result<()> {
            for who in 0..n {
                let x = Tensor::new(&[if ctx.rank() == who { f32::NAN } else { 1.0 }], &Device::Cpu)?;
                for op in [ReduceOp::Min, ReduceOp::Max] {
                    assert!(ctx.group().all_reduce(&x, op)?.to_vec1::<f32>()?[0].is_nan(), "{op} {who}");
                }
            }
            Ok(())
        });
    }
}

/// Makes a call with wrong arguments on every rank. Each gets this text, and the group stays usable.
fn refused(label: &str, parts: &'static [&'static str], call: fn(&ProcessGroup) -> Result<Tensor>) {
    on_ranks(2, label, move |ctx| -> Result<()> {
        let error = call(ctx.group()).expect_err("the arguments are wrong");
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        let text = error.to_string();
        assert!(
            parts.iter().all(|p| text.contains(p)) && text.contains(&format!("rank {}", ctx.rank())),
            "{text}"
        );
        ctx.group().barrier()
    });
}

#[test]
fn wrong_arguments_are_refused_before_anything_is_sent() {
    fn x() -> Tensor {
        Tensor::zeros((3, 4), DType::F32, &Device::Cpu).unwrap()
    }
    refused("root", &["broadcast", "rank 2 is outside", "0 to 1"], |g| g.broadcast(&x(), 2));
    refused("dim", &["all_gather", "dim 2", "[3, 4]"], |g| g.all_gather(&x(), 2));
    refused("indivisible", &["reduce_scatter", "does not divide by 2"], |g| {
        g.reduce_scatter(&x(), 0, ReduceOp::Sum)
    });
    refused("sizes", &["[1, 1]", "dim 0"], |g| {
        g.call(Collective::reduce_scatter(Cut::new(0, &[1, 1]), ReduceOp::Sum)).run(&x())
    });
    refused("count", &["[3]", "2 ranks"], |g| g.call(Collective::all_gather(Cut::new(0, &[3]))).run(&x()));
    refused("same dim", &["two different dims"], |g| {
        g.call(Collective::AllToAll { split: Cut::new(0, &[2, 1]), concat: Cut::new(0, &[3, 3]) }).run(&x())
    });
    refused("routes", &["do not cut dim 0", "[1, 1]"], |g| g.all_to_all_single(&x(), &[[1, 1], [1, 1]]));
    refused("no table", &["expected 2 counts for each of 2 ranks"], |g| g.all_to_all_single(&x(), &[[3]]));
    refused("self", &["recv", "this rank"], |g| g.recv(1, DType::F32, g.rank()));
    refused("split", &["all_to_all", "does not divide"], |g| g.all_to_all(&x(), 0, 1));
    refused("average", &["reduce", "avg of u32", "cast to a float"], |g| {
        g.reduce(&x().to_dtype(DType::U32)?, 0, ReduceOp::Avg).map(|_| x())
    });
    refused("dtype", &["recv", "f4", "cast to one of"], |g| g.recv(1, DType::F4, 1 - g.rank()));
    refused("overflow", &["do not cut dim 0"], |g| {
        g.call(Collective::reduce_scatter(Cut::new(0, &[usize::MAX, 4]), ReduceOp::Sum)).run(&x())
    });
    refused("twice", &["subgroup", "twice"], |g| g.subgroup(&[0, 0]).map(|_| x()));
}

#[test]
fn communication_is_counted_and_a_group_of_one_has_none() {
    for n in [1, 3] {
        on_ranks(n, "counts", move |ctx| -> Result<()> {
            let g = ctx.group();
            let x = Tensor::zeros((2, 3), DType::F64, &Device::Cpu)?;
            let (result, counts) = comm::record(|| -> Result<()> {
                g.all_reduce(&x, ReduceOp::Sum)?;
                let (inner, counts) = comm::record(|| g.all_gather(&x, 1));
                assert_eq!(counts.total(), usize::from(n > 1));
                inner?;
                g.all_reduce(&x, ReduceOp::Max)?;
                g.barrier()
            });
            result?;
            let times = |op| counts.get(op).count;
            let want = if n > 1 { (2, 1, 1) } else { (0, 0, 0) };
            assert_eq!((times(Op::AllReduce), times(Op::AllGather), times(Op::Barrier)), want);
            assert_eq!(counts.get(Op::AllReduce).bytes, if n > 1 { 96 } else { 0 });
            Ok(())
        });
    }
}

#[test]
fn an_empty_view_may_begin_behind_its_memory() {
    on_ranks(2, "behind", |ctx| -> Result<()> {
        let x = Tensor::ones((3, 2), DType::F32, &Device::Cpu)?.narrow(0, 3, 0)?.narrow(1, 2, 0)?;
        assert_eq!(ctx.group().all_reduce(&x, ReduceOp::Sum)?.dims(), [0, 0]);
        Ok(())
    });
}
