//! Every step: its transpose is its adjoint, and both make the expected calls.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::functional::Step;
use candle_dist::{Collective, Cut, Error, Op, ProcessGroup, ReduceOp, Result, comm};
use itertools::iproduct;
use test_utils::on_ranks;

const WORLDS: std::ops::RangeInclusive<usize> = 1..=5;
/// The size of the dims that are not cut.
const OTHER: usize = 3;

/// The state of a value in a group, which decides how inner products are counted.
#[derive(Clone, Copy, PartialEq)]
enum State {
    /// Every rank has its own value, and all values count.
    Own,
    /// Every rank has the same value, which counts once.
    Invariant,
    /// Every rank has the same value, and each copy counts.
    Same,
}
use State::{Invariant, Own, Same};

/// One row of the table of pairs: the states of the input, of the output and of the output's gradient.
struct Pair {
    name: &'static str,
    step: Step,
    shape: [usize; 3],
    input: State,
    output: State,
    gradient: State,
    forward: Option<Op>,
    backward: Option<Op>,
}

/// Returns all pairs for a dim with these pieces and another dim, for one rank.
fn pairs(rank: usize, dim: usize, sizes: &[usize], other: usize, other_sizes: &[usize]) -> Vec<Pair> {
    let cut = || Cut::new(dim, sizes);
    let shape = |len: usize| {
        let mut shape = [OTHER; 3];
        shape[dim] = len;
        shape
    };
    let (whole, piece) = (shape(sizes.iter().sum()), shape(sizes[rank]));
    let mut crossed = piece;
    crossed[other] = other_sizes.iter().sum();
    // A different count for each pair of ranks, some of them zero.
    let routes: Vec<Vec<usize>> =
        sizes.iter().map(|a| other_sizes.iter().map(|b| (a * 2 + b) % 4).collect()).collect();
    let routed = [routes[rank].iter().sum(), OTHER, OTHER];
    let row = |name, step, shape, (input, output, gradient), (forward, backward)| Pair {
        name,
        step,
        shape,
        input,
        output,
        gradient,
        forward,
        backward,
    };
    let (reduce, gather, scatter) = (Some(Op::AllReduce), Some(Op::AllGather), Some(Op::ReduceScatter));
    vec![
        row("all_reduce", Step::AllReduce(ReduceOp::Sum), whole, (Own, Invariant, Invariant), (reduce, None)),
        row("to_varying", Step::ToVarying, whole, (Invariant, Own, Own), (None, reduce)),
        row("to_invariant", Step::ToInvariant, whole, (Same, Invariant, Invariant), (None, None)),
        row(
            "all_gather",
            Step::AllGather { cut: cut(), varying: true },
            piece,
            (Own, Own, Own),
            (gather, scatter),
        ),
        row(
            "all_gather_invariant",
            Step::AllGather { cut: cut(), varying: false },
            piece,
            (Own, Invariant, Invariant),
            (gather, None),
        ),
        row(
            "slice",
            Step::Slice { cut: cut(), varying: false },
            whole,
            (Invariant, Own, Own),
            (None, gather),
        ),
        row("slice_varying", Step::Slice { cut: cut(), varying: true }, whole, (Own, Own, Own), (None, None)),
        row("pad", Step::Pad(cut()), piece, (Own, Own, Own), (None, None)),
        row("reduce_scatter", Step::ReduceScatter(cut()), whole, (Own, Own, Own), (scatter, gather)),
        row("to_partial", Step::ToPartial { varying: false }, whole, (Invariant, Own, Same), (None, None)),
        row("to_partial_varying", Step::ToPartial { varying: true }, whole, (Own, Own, Own), (None, None)),
        row(
            "all_to_all",
            Step::AllToAll { split: Cut::new(other, other_sizes), concat: cut() },
            crossed,
            (Own, Own, Own),
            (Some(Op::AllToAll), Some(Op::AllToAll)),
        ),
        row(
            "recut",
            Step::Recut { from: cut(), to: Cut::new(dim, &sizes.iter().rev().copied().collect::<Vec<_>>()) },
            piece,
            (Own, Own, Own),
            (Some(Op::AllToAll), Some(Op::AllToAll)),
        ),
        row(
            "windows",
            Step::Windows { cut: cut(), windows: windows(sizes) },
            piece,
            (Own, Own, Own),
            (Some(Op::AllToAll), Some(Op::AllToAll)),
        ),
        row(
            "all_to_all_single",
            Step::all_to_all_single(&routes),
            routed,
            (Own, Own, Own),
            (Some(Op::AllToAll), Some(Op::AllToAll)),
        ),
    ]
}

/// A window around each piece: more rows before than behind, and some outside of the whole.
fn windows(sizes: &[usize]) -> Vec<std::ops::Range<isize>> {
    let ends = sizes.iter().scan(0, |end, &size| {
        *end += size as isize;
        Some(*end - size as isize..*end)
    });
    ends.map(|rows| rows.start - 4..rows.end + 1).collect()
}

/// Returns numbers in ±1 that depend on the seed, and on the rank if every rank has its own value.
fn numbers(shape: &[usize], seed: usize, state: State, rank: usize) -> candle_core::Result<Tensor> {
    let start = seed * 1000 + if state == Own { rank * 100 } else { 0 };
    let count: usize = shape.iter().product();
    let numbers: Vec<f64> = (start..start + count).map(|i| ((i * i) as f64 * 0.7 + 0.3).sin()).collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu)
}

/// Returns the inner product over all ranks. An invariant value counts once.
fn inner(group: &ProcessGroup, a: &Tensor, b: &Tensor, state: State) -> Result<f64> {
    let sum = group.all_reduce(&(a * b)?.sum_all()?, ReduceOp::Sum)?.to_scalar::<f64>()?;
    Ok(if state == Invariant { sum / group.size() as f64 } else { sum })
}

fn cuts(n: usize) -> Vec<Vec<usize>> {
    vec![
        vec![2; n],
        (0..n).map(|r| (r * 2) % 3 + 1).collect(),
        (0..n).collect(),
        (0..n).map(|r| n - 1 - r).collect(),
    ]
}

/// Runs `check` for every pair on worlds of 1 to 5 ranks, with even, uneven and empty pieces of every dim.
fn for_every_pair(check: fn(&ProcessGroup, &Pair) -> Result<()>) {
    for n in WORLDS {
        on_ranks(n, "pairs", move |ctx| -> Result<()> {
            for (sizes, others, dim, step) in iproduct!(cuts(n), cuts(n), 0..3, 1..3) {
                for pair in pairs(ctx.rank(), dim, &sizes, (dim + step) % 3, &others) {
                    check(ctx.group(), &pair)?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn the_backward_step_is_the_adjoint_of_the_forward_step() {
    for_every_pair(|group, pair| {
        let x = Var::from_tensor(&numbers(&pair.shape, 1, pair.input, group.rank())?)?;
        let y = pair.step.clone().apply(&x, group)?;
        let g = numbers(y.dims(), 2, pair.gradient, group.rank())?;
        let loss = (&y * &g)?.sum_all()?;
        let grads = loss.backward()?;
        let back = grads.get(&x).cloned().map_or_else(|| x.zeros_like(), Ok)?;
        assert_eq!(back.dims(), x.dims(), "{}", pair.name);
        let out = inner(group, &y, &g, pair.output)?;
        let input = inner(group, &x, &back, pair.input)?;
        assert!(
            (out - input).abs() < 1e-11,
            "{} of {:?}: {out} forward, {input} backward",
            pair.name,
            pair.shape
        );
        Ok(())
    });
}

#[test]
fn invariant_values_and_gradients_are_alike_on_all_ranks() {
    for_every_pair(|group, pair| {
        let x = Var::from_tensor(&numbers(&pair.shape, 1, pair.input, group.rank())?)?;
        let y = pair.step.clone().apply(&x, group)?;
        let alike = |t: &Tensor| -> Result<bool> {
            let max = group.all_reduce(&t.detach(), ReduceOp::Max)?;
            Ok(max.to_vec3::<f64>()? == t.to_vec3::<f64>()?)
        };
        if pair.output == Invariant {
            assert!(alike(&y)?, "{}", pair.name);
        }
        if pair.input == Invariant {
            let g = numbers(y.dims(), 2, pair.gradient, group.rank())?;
            let grads = (&y * &g)?.sum_all()?.backward()?;
            let back = grads.get(&x).cloned().map_or_else(|| x.zeros_like(), Ok)?;
            assert!(alike(&back)?, "{}", pair.name);
        }
        Ok(())
    });
}

#[test]
fn each_step_communicates_what_the_table_says() {
    for_every_pair(|group, pair| {
        let x = Var::from_tensor(&numbers(&pair.shape, 1, pair.input, group.rank())?)?;
        let (y, forward) = comm::record(|| pair.step.clone().apply(&x, group));
        let loss = y?.sum_all()?;
        let (grads, backward) = comm::record(|| loss.backward());
        grads?;
        for (counts, want) in [(forward, pair.forward), (backward, pair.backward)] {
            let want = want.filter(|_| group.size() > 1);
            assert_eq!(counts.total(), usize::from(want.is_some()), "{}: {counts}", pair.name);
            assert!(want.is_none_or(|op| counts.get(op).count == 1), "{}: {counts}", pair.name);
        }
        Ok(())
    });
}

#[test]
fn what_is_not_tracked_stays_so() {
    for_every_pair(|group, pair| {
        let x = numbers(&pair.shape, 1, pair.input, group.rank())?;
        let y = pair.step.clone().apply(&x, group)?;
        assert!(!y.track_op(), "{}", pair.name);
        let tracked = pair.step.clone().apply(Var::from_tensor(&x)?.as_tensor(), group)?;
        assert!(tracked.track_op(), "{}", pair.name);
        assert_eq!(y.to_vec3::<f64>()?, tracked.to_vec3::<f64>()?, "{}", pair.name);
        Ok(())
    });
}

#[test]
fn a_known_result_is_not_communicated_again() {
    on_ranks(3, "known", |ctx| -> Result<()> {
        let (group, sizes) = (ctx.group(), [2, 0, 1]);
        let x = Var::from_tensor(&numbers(&[sizes[ctx.rank()], 4], 1, Own, ctx.rank())?)?;
        let pair = || Step::AllGather { cut: Cut::new(0, &sizes), varying: true };
        let y = pair().apply(&x, group)?;
        let (known, counts) = comm::record(|| pair().with_known_result(&x, &y, group));
        let known = known?;
        assert_eq!(counts.total(), 0);
        assert_eq!(known.to_vec2::<f64>()?, y.to_vec2::<f64>()?);
        let g = numbers(&[3, 4], 2, Own, ctx.rank())?;
        let grad = |y: &Tensor| -> Result<Vec<Vec<f64>>> {
            Ok((y * &g)?.sum_all()?.backward()?.get(&x).unwrap().to_vec2::<f64>()?)
        };
        assert_eq!(grad(&known)?, grad(&y)?);
        Ok(())
    });
}

#[test]
fn a_result_does_not_alias_the_variable_it_came_from() {
    on_ranks(2, "alias", |ctx| -> Result<()> {
        let x = Var::from_tensor(&Tensor::ones((2, 2), DType::F64, &Device::Cpu)?)?;
        let y = Step::ToVarying.apply(&x, ctx.group())?;
        x.set(&Tensor::zeros((2, 2), DType::F64, &Device::Cpu)?)?;
        assert_eq!(y.to_vec2::<f64>()?, [[1.0; 2]; 2]);
        Ok(())
    });
}

#[test]
fn pieces_that_do_not_fit_are_refused_before_anything_is_sent() {
    let texts = on_ranks(2, "refused", |ctx| -> Result<Vec<String>> {
        let x = Tensor::zeros((4, 3), DType::F32, &Device::Cpu)?;
        let wrong = [
            Step::AllGather { cut: Cut::new(0, &[3, 3]), varying: true },
            Step::AllGather { cut: Cut::new(2, &[4, 4]), varying: true },
            Step::AllGather { cut: Cut::new(0, &[4]), varying: true },
            Step::ReduceScatter(Cut::new(0, &[1, 2])),
            Step::AllToAll { split: Cut::new(1, &[1, 2]), concat: Cut::new(1, &[3, 3]) },
            Step::AllToAll { split: Cut::new(1, &[2, 2]), concat: Cut::new(0, &[4, 4]) },
            Step::Slice { cut: Cut::new(0, &[3, 3]), varying: false },
            Step::Slice { cut: Cut::new(0, &[4]), varying: false },
            Step::Slice { cut: Cut::new(2, &[1, 1]), varying: false },
            Step::Pad(Cut::new(0, &[3, 3])),
            Step::Pad(Cut::new(2, &[4, 4])),
            Step::Recut { from: Cut::new(0, &[4, 4]), to: Cut::new(0, &[3, 4]) },
            Step::Recut { from: Cut::new(0, &[4, 4]), to: Cut::new(1, &[4, 4]) },
            Step::Recut { from: Cut::new(0, &[3, 3]), to: Cut::new(0, &[2, 4]) },
            Step::Windows { cut: Cut::new(0, &[3, 3]), windows: vec![0..3, 3..6] },
            Step::Windows { cut: Cut::new(0, &[4, 4]), windows: vec![0..8; 1] },
            Step::Windows { cut: Cut::new(2, &[4, 4]), windows: vec![0..8, 0..8] },
        ];
        let mut texts = Vec::new();
        for step in wrong {
            let (result, counts) = comm::record(|| step.clone().apply(&x, ctx.group()));
            assert_eq!(counts.total(), 0);
            match result {
                Err(Error::InvalidArgument { reason, .. }) => texts.push(reason),
                other => panic!("{step:?}: {other:?}"),
            }
        }
        ctx.group().barrier()?;
        Ok(texts)
    });
    assert_eq!(texts[0], texts[1]);
    let reasons = [
        "of shape [4, 3]",
        "split and concat dims are equal; name two different dims",
        "cannot become Cut",
        "windows [0..8] do not fit 2 ranks",
    ];
    let is_told = |text: &String| reasons.iter().any(|reason| text.contains(reason));
    assert!(texts[0].iter().all(is_told), "{:?}", texts[0]);
}

#[test]
fn shares_of_a_value_of_16_bits_add_up_to_it() {
    on_ranks(3, "shares", |ctx| -> Result<()> {
        let values: Vec<f32> = (1..200).map(|i| i as f32 * 1.01).collect();
        let x = Var::from_tensor(&Tensor::new(values, &Device::Cpu)?.to_dtype(DType::BF16)?)?;
        let want = x.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let wide = |t: &Tensor| Ok::<_, Error>(t.to_dtype(DType::F32)?.to_vec1::<f32>()?);
        for step in [Step::ToPartial { varying: false }, Step::ToPartial { varying: true }] {
            let sum = ctx.group().all_reduce(&step.apply(&x, ctx.group())?, ReduceOp::Sum)?;
            assert_eq!(wide(&sum)?, want);
        }
        // The shares of the gradient too.
        let loss = (Step::ToInvariant.apply(&x, ctx.group())? * x.detach())?.sum_all()?;
        let shares = loss.backward()?.get(&x).unwrap().clone();
        assert_eq!(wide(&ctx.group().all_reduce(&shares, ReduceOp::Sum)?)?, want);
        Ok(())
    });
}

#[test]
fn a_recut_sends_only_what_changes_hands() {
    on_ranks(4, "recut", |ctx| -> Result<()> {
        let (from, to) = ([8, 8, 8, 0], [6, 6, 6, 6]);
        let whole = Tensor::arange(0f64, 72., &Device::Cpu)?.reshape((3, 24))?;
        let piece = |sizes: [usize; 4]| {
            whole.narrow(1, sizes[..ctx.rank()].iter().sum::<usize>().min(23), sizes[ctx.rank()])
        };
        let recut = Step::Recut { from: Cut::new(1, &from), to: Cut::new(1, &to) };
        let (moved, counts) = comm::record(|| recut.apply(&piece(from)?, ctx.group()));
        assert_eq!(moved?.to_vec2::<f64>()?, piece(to)?.to_vec2::<f64>()?);
        assert_eq!(counts.total_bytes(), [2, 4, 6, 0][ctx.rank()] * 3 * 8, "{counts}");
        Ok(())
    });
}

#[test]
fn windows_send_only_rows_that_a_rank_lacks_and_pad_with_zeros() {
    on_ranks(4, "windows", |ctx| -> Result<()> {
        let (sizes, me) = ([2, 0, 3, 1], ctx.rank());
        let whole = Tensor::arange(1f64, 19., &Device::Cpu)?.reshape((3, 6))?;
        let mine = match sizes[me] {
            0 => whole.narrow(1, 0, 0)?,
            size => whole.narrow(1, sizes[..me].iter().sum(), size)?,
        };
        let padded = whole.pad_with_zeros(1, 9, 9)?;
        // Wider than the pieces of the neighbors, narrower than the piece, outside of the whole, nothing.
        let all =
            [vec![-3..5, 1..1, 3..4, -9..-7], vec![0..6, 0..6, 0..6, 0..6], vec![7..9, 5..8, -1..1, 2..2]];
        for windows in all {
            let step = Step::Windows { cut: Cut::new(1, &sizes), windows: windows.clone() };
            let (got, counts) = comm::record(|| step.apply(&mine, ctx.group()));
            let window = &windows[me];
            let want = padded.narrow(1, (window.start + 9) as usize, window.len())?;
            assert_eq!(got?.to_vec2::<f64>()?, want.to_vec2::<f64>()?, "{windows:?}");
            let start: usize = sizes[..me].iter().sum();
            let lacks = |(rank, window): (usize, &std::ops::Range<isize>)| {
                let has = |row: &usize| window.contains(&(*row as isize)) && rank != me;
                (start..start + sizes[me]).filter(has).count()
            };
            let rows: usize = windows.iter().enumerate().map(lacks).sum();
            assert_eq!(counts.total_bytes(), rows * 3 * 8, "{windows:?}: {counts}");
        }
        // Each rank has the rows of its window.
        let own = Step::Windows { cut: Cut::new(1, &sizes), windows: vec![-2..1, 3..3, 2..5, 5..7] };
        let (got, counts) = comm::record(|| own.apply(&mine, ctx.group()));
        assert_eq!((got?.dim(1)?, counts.total()), ([3, 0, 3, 2][me], 0));
        Ok(())
    });
}

/// The gradients 256, 1, 1 and 1 of a row in four windows are 259, and bf16 rounds that to 260. One after the other, each 1
/// would be lost.
#[test]
fn gradients_of_16_bit_windows_are_rounded_once() {
    on_ranks(4, "16-bit windows", |ctx| -> Result<()> {
        let x = Var::ones(1, DType::BF16, &Device::Cpu)?;
        let windows = Step::Windows { cut: Cut::new(0, &[1; 4]), windows: vec![0..4; 4] };
        let seen = windows.apply(x.as_tensor(), ctx.group())?;
        let factor = if ctx.rank() == 0 { 256.0 } else { 1.0 };
        let grads = seen.affine(factor, 0.0)?.sum_all()?.backward()?;
        let grad = grads.get(&x).unwrap();
        assert_eq!((grad.dtype(), grad.to_dtype(DType::F32)?.to_vec1::<f32>()?), (DType::BF16, vec![260.0]));
        Ok(())
    });
}

#[test]
fn a_known_result_of_another_shape_is_refused() {
    on_ranks(2, "known result", |ctx| -> Result<()> {
        let x = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
        let gather = || Step::AllGather { cut: Cut::new(0, &[2, 2]), varying: true };
        let whole = Tensor::zeros((4, 3), DType::F32, &Device::Cpu)?;
        assert_eq!(gather().with_known_result(&x, &whole, ctx.group())?.dims(), [4, 3]);
        for wrong in [whole.narrow(0, 0, 3)?, whole.to_dtype(DType::F64)?] {
            let text = gather().with_known_result(&x, &wrong, ctx.group()).unwrap_err().to_string();
            assert!(text.contains("the step returns [4, 3] f32"), "{text}");
        }
        Ok(())
    });
}

#[test]
fn one_rank_has_the_results_of_steps_that_are_not_free() {
    on_ranks(1, "alone", |ctx| -> Result<()> {
        let x = Tensor::new(&[1f64, 2.0, 3.0, 4.0, 5.0], &Device::Cpu)?;
        let half = Step::AllReduce(ReduceOp::pre_mul_sum(0.5)).apply(&x, ctx.group())?;
        assert_eq!(half.to_vec1::<f64>()?, [0.5, 1.0, 1.5, 2.0, 2.5]);
        let windows = Step::Windows { cut: Cut::new(0, &[3]), windows: vec![-1..4; 1] };
        let sums = windows.transpose().unwrap().apply(&x, ctx.group())?;
        assert_eq!(sums.to_vec1::<f64>()?, [2.0, 3.0, 4.0]);
        Ok(())
    });
}

#[test]
fn a_gradient_through_a_maximum_is_refused_before_anything_is_sent() {
    on_ranks(2, "maximum", |ctx| -> Result<()> {
        let x = Var::new(&[1f64], &Device::Cpu)?;
        let (made, counts) = comm::record(|| Step::AllReduce(ReduceOp::Max).apply(&x, ctx.group()));
        assert!(made.unwrap_err().to_string().contains("has no gradient"));
        assert_eq!(counts.total(), 0);
        Ok(())
    });
}

#[test]
fn a_scatter_reads_only_the_tensor_of_its_root() {
    for root in 0..3 {
        on_ranks(3, "scatter", move |ctx| -> Result<()> {
            let x = Tensor::new(&[0u32, 1, 2], &Device::Cpu)?;
            let mine = if ctx.rank() == root { x } else { Tensor::zeros((), DType::U32, &Device::Cpu)? };
            let scatter = Collective::Scatter { cut: Cut::even(0, 1, 3), root };
            let got = ctx.group().call(scatter).of(3, DType::U32).run(&mine)?;
            assert_eq!(got.to_vec1::<u32>()?, [ctx.rank() as u32]);
            Ok(())
        });
    }
}
