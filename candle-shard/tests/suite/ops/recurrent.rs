//! Layers that keep a state of a sequence, against each token by itself on one device.
use crate::common::*;
use crate::ops::sweep::{Case, Input, Kind::Float, sweep, sweep_in};
use crate::plain;
use candle_core::{DType, Device::Cpu, Tensor};
use candle_dist::comm;
use candle_shard::{DTensor, Documents, Placement, Replicate, Result, Shard, Spec};
use test_utils::on_ranks;

#[test]
fn short_convolutions() {
    let shapes: [[&[usize]; 2]; 7] = [
        [&[4, 6, 5], &[5, 3]],
        [&[1, 5, 6], &[6, 4]],
        [&[3, 1, 7], &[7, 1]],
        [&[2, 4, 1], &[1, 2]],
        [&[2, 3, 4], &[4, 4]], // no tokens
        [&[0, 5, 4], &[4, 2]],
        [&[2, 5, 0], &[0, 2]],
    ];
    let case = |shapes: [&'static [usize]; 2]| {
        let inputs = shapes.map(|shape| (shape, Float));
        let plain = |x: &[Tensor]| plain::short_conv(&x[0], &x[1]);
        Case::new("short_conv", &inputs, |x| x[0].short_conv(&x[1], None), plain)
    };
    let filled = shapes[..4].iter().map(|&shapes| case(shapes));
    let none = shapes[4..].iter().map(|&[x, weight]| {
        let inputs: [Input; 2] = [(x, Float), (weight, Float)];
        let plain = |x: &[Tensor]| x[0].narrow(1, 0, x[0].dim(1)? + 1 - x[1].dim(1)?)? * 0.0;
        Case::new("short_conv of nothing", &inputs, |x| x[0].short_conv(&x[1], None), plain)
    });
    sweep("short_conv", filled.chain(none).collect());
}

/// The documents of each sequence, and where they begin; those behind the last end are one more.
fn documents() -> (Documents, [Vec<usize>; 2]) {
    let ends = vec![vec![0, 2, 3], vec![0, 1, 5]];
    (Documents::of_each(ends), [vec![0, 2, 3, 5], vec![0, 1, 5]])
}

/// What `run` makes of each document by itself, of inputs `[batch, 5, ..]`.
fn apart(
    x: &[Tensor],
    run: impl Fn(&[Tensor]) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Tensor> {
    let (_, borders) = documents();
    let of_element = |(element, borders): (usize, &Vec<usize>)| {
        let part = |border: &[usize]| {
            let part = |x: &Tensor| x.narrow(0, element, 1)?.narrow(1, border[0], border[1] - border[0]);
            run(&x.iter().map(part).collect::<candle_core::Result<Vec<_>>>()?)
        };
        Tensor::cat(&borders.windows(2).map(part).collect::<candle_core::Result<Vec<_>>>()?, 1)
    };
    Tensor::cat(&borders.iter().enumerate().map(of_element).collect::<candle_core::Result<Vec<_>>>()?, 0)
}

#[test]
fn documents_see_themselves_alone() {
    let conv = Case::new(
        "short_conv of documents",
        &[(&[2, 5, 6], Float), (&[6, 3], Float)],
        |x| x[0].pad_with_zeros(1, 2, 0)?.short_conv(&x[1], Some(&documents().0)),
        |x| {
            let weight = &x[1];
            apart(&x[..1], |x| plain::short_conv(&x[0].pad_with_zeros(1, 2, 0)?, weight))
        },
    );
    let delta = Case::new(
        "gated_delta_rule of documents",
        &[
            (&[2, 5, 3, 4], Float),
            (&[2, 5, 3, 4], Float),
            (&[2, 5, 3, 4], Float),
            (&[2, 5, 3, 2], Float),
            (&[2, 5, 3, 2], Float),
        ],
        |x| {
            let [made, _] =
                x[0].gated_delta_rule([&x[1], &x[2]], [&x[3], &x[4]], None, Some(&documents().0))?;
            Ok(made)
        },
        |x| apart(x, |x| plain::gated_delta_rule(x, None).map(|[made, _]| made)),
    );
    let scan = Case::new(
        "state_space_scan of documents",
        &[(&[2, 5, 2, 4], Float), (&[2, 5, 2, 4], Float), (&[2, 5, 2, 3, 2], Float), (&[2, 5, 2, 3], Float)],
        |x| {
            let [made, _] = x[0].state_space_scan([&x[1], &x[2]], &x[3], None, Some(&documents().0))?;
            Ok(made)
        },
        |x| apart(x, |x| plain::state_space_scan(x, None).map(|[made, _]| made)),
    );
    sweep("documents", vec![conv, delta, scan]);
}

const DELTA: [[&[usize]; 5]; 6] = [
    [&[2, 5, 4, 3], &[2, 5, 4, 3], &[2, 5, 4, 6], &[2, 5, 4, 2], &[2, 5, 4, 2]],
    [&[3, 4, 3, 2], &[3, 4, 3, 2], &[3, 4, 3, 5], &[3, 4, 3, 1], &[3, 4, 3, 1]],
    [&[1, 11, 5, 2], &[1, 11, 5, 2], &[1, 11, 5, 6], &[1, 11, 5, 3], &[1, 11, 5, 3]],
    [&[1, 1, 1, 4], &[1, 1, 1, 4], &[1, 1, 1, 4], &[1, 1, 1, 2], &[1, 1, 1, 2]],
    [&[2, 0, 3, 2], &[2, 0, 3, 2], &[2, 0, 3, 2], &[2, 0, 3, 1], &[2, 0, 3, 1]],
    [&[2, 3, 0, 2], &[2, 3, 0, 2], &[2, 3, 0, 2], &[2, 3, 0, 1], &[2, 3, 0, 1]],
];

fn ruled(x: &[DTensor]) -> Result<DTensor> {
    let [made, _] = x[0].gated_delta_rule([&x[1], &x[2]], [&x[3], &x[4]], None, None)?;
    Ok(made)
}

const STATE_SPACE: [[&[usize]; 4]; 7] = [
    [&[2, 5, 4, 3], &[2, 5, 4, 3], &[2, 5, 4, 2, 3], &[2, 5, 4, 2]],
    [&[2, 4, 1, 3], &[2, 4, 1, 3], &[2, 4, 1, 5, 2], &[2, 4, 1, 5]],
    [&[1, 11, 3, 2], &[1, 11, 3, 2], &[1, 11, 3, 4, 1], &[1, 11, 3, 4]],
    [&[1, 1, 1, 4], &[1, 1, 1, 4], &[1, 1, 1, 1, 2], &[1, 1, 1, 1]],
    [&[2, 0, 3, 2], &[2, 0, 3, 2], &[2, 0, 3, 2, 2], &[2, 0, 3, 2]],
    [&[2, 3, 0, 2], &[2, 3, 0, 2], &[2, 3, 0, 1, 2], &[2, 3, 0, 1]],
    [&[2, 3, 1, 2], &[2, 3, 1, 2], &[2, 3, 1, 0, 2], &[2, 3, 1, 0]],
];

fn scanned(x: &[DTensor]) -> Result<DTensor> {
    let [made, _] = x[0].state_space_scan([&x[1], &x[2]], &x[3], None, None)?;
    Ok(made)
}

/// Sweeps an op whose third input has the shape of its result, against `plain`, which takes no tensors without elements.
fn sweep_scans<const N: usize>(
    name: &str,
    shapes: &[[&'static [usize]; N]],
    run: fn(&[DTensor]) -> Result<DTensor>,
    plain: fn(&[Tensor], Option<&Tensor>) -> candle_core::Result<[Tensor; 2]>,
) {
    let case = |shapes: &[&'static [usize]; N]| {
        let is_empty = shapes[2].contains(&0);
        Case::new(name, &shapes.map(|shape| (shape, Float)), run, move |x| match is_empty {
            true => x[2].sqr()?.sqrt(),
            false => plain(x, None).map(|[made, _]| made),
        })
    };
    sweep(name, shapes.iter().map(case).collect());
}

#[test]
fn gated_delta_rules() {
    sweep_scans("gated_delta_rule", &DELTA, ruled, plain::gated_delta_rule);
}

#[test]
fn state_space_scans() {
    sweep_scans("state_space_scan", &STATE_SPACE, scanned, plain::state_space_scan);
}

#[test]
fn states_of_16_bits_have_32() {
    let case = Case::new("gated_delta_rule", &DELTA[0].map(|shape| (shape, Float)), ruled, |x| {
        let wide = x.iter().map(|x| x.to_dtype(DType::F32)).collect::<candle_core::Result<Vec<_>>>()?;
        plain::gated_delta_rule(&wide, None)?[0].to_dtype(x[0].dtype())
    });
    let conv = Case::new(
        "short_conv",
        &[(&[4, 6, 5], Float), (&[5, 3], Float)],
        |x| x[0].short_conv(&x[1], None),
        |x| {
            let wide = x.iter().map(|x| x.to_dtype(DType::F32)).collect::<candle_core::Result<Vec<_>>>()?;
            plain::short_conv(&wide[0], &wide[1])?.to_dtype(x[0].dtype())
        },
    );
    let scan = Case::new("state_space_scan", &STATE_SPACE[1].map(|shape| (shape, Float)), scanned, |x| {
        let wide = x.iter().map(|x| x.to_dtype(DType::F32)).collect::<candle_core::Result<Vec<_>>>()?;
        plain::state_space_scan(&wide, None)?[0].to_dtype(x[0].dtype())
    });
    sweep_in(&[DType::BF16, DType::F16], "recurrent in 16 bits", vec![case, conv, scan]);
}

#[test]
fn dims_in_units() {
    let case = |(shape, dim, unit, to): (&'static [usize], usize, usize, &'static [usize])| {
        let split = move |x: &[DTensor]| x[0].split_units(dim, unit);
        Case::new(&format!("split_units {dim} by {unit}"), &[(shape, Float)], split, move |x| {
            x[0].reshape(to)
        })
    };
    let cases = [
        (&[4, 6][..], 1, 2, &[4, 3, 2][..]),
        (&[2, 10, 3], 1, 5, &[2, 2, 5, 3]),
        (&[7], 0, 7, &[1, 7]),
        (&[3, 0], 1, 2, &[3, 0, 2]),
    ];
    sweep("split_units", cases.map(case).to_vec());
}

/// Whole tensors `[q, k, v, beta, g]` of so many tokens.
fn whole(tokens: usize) -> Vec<Tensor> {
    let (heads, key, values, width) = (5, 4, 2, 3);
    [key, key, values * width, values, values]
        .iter()
        .enumerate()
        .map(|(i, &size)| values_of(&[2, tokens, heads, size], i as u64))
        .collect()
}

fn values_of(shape: &[usize], seed: u64) -> Tensor {
    values(shape, seed, DType::F64)
}

#[test]
fn texts_go_on_from_their_states_on_any_number_of_ranks() {
    for ranks in 1..=5 {
        on_ranks(ranks, "states", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[ranks])?;
            let all = whole(9);
            let [want, last] = plain::gated_delta_rule(&all, None)?;
            // Uneven shards of key heads, empty ones included.
            let mut sizes = vec![0; ranks];
            (sizes[0], sizes[ranks - 1]) = (if ranks == 1 { 5 } else { 2 }, if ranks == 1 { 5 } else { 3 });
            let laid = |x: &Tensor| -> Result<DTensor> {
                let spec = Spec::new(&mesh, &[Shard(2)], x.dims(), x.dtype())?;
                let spec = spec.with_sizes(0, Some(sizes.iter().copied().collect()))?;
                let block = spec.local_block();
                let own = x.narrow(2, block[2].start.min(4), block[2].len())?.contiguous()?;
                DTensor::from_local_with_spec(own, spec)
            };
            let (mut made, mut state, mut start) = (Vec::new(), None, 0);
            let (run, counts) = comm::record(|| -> Result<()> {
                for tokens in [4, 1, 1, 3] {
                    let part = |x: &Tensor| laid(&x.narrow(1, start, tokens)?);
                    let x = all.iter().map(part).collect::<Result<Vec<_>>>()?;
                    let [y, next] =
                        x[0].gated_delta_rule([&x[1], &x[2]], [&x[3], &x[4]], state.as_ref(), None)?;
                    assert_eq!((y.placements(), next.placements()), (&[Shard(2)][..], &[Shard(2)][..]));
                    made.push(y);
                    (state, start) = (Some(next), start + tokens);
                }
                Ok(())
            });
            run?;
            assert_eq!(counts.total(), 0);
            let far = |a: &Tensor, b: &Tensor| (a - b)?.abs()?.max_all()?.to_scalar::<f64>();
            assert!(far(&DTensor::cat(&made, 1)?.full_tensor()?, &want)? < 1e-12);
            // [batch, heads, values, key, width] to [batch, key, heads, values · width]
            let last = last.permute((0, 3, 1, 2, 4))?.contiguous()?.reshape((2, 4, 5, 6))?;
            assert!(
                far(&state.map_or_else(|| Ok(want.clone()), |state| state.full_tensor())?, &last)? < 1e-12
            );
            Ok(())
        });
    }
}

/// The heads of one group over ranks, of which some have none; all have what the group reads and writes with.
#[test]
fn heads_of_one_group_go_on_from_their_states() {
    for ranks in 1..=5 {
        on_ranks(ranks, "heads of a group", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[ranks])?;
            let shapes: [&[usize]; 4] = [&[2, 9, 1, 4], &[2, 9, 1, 4], &[2, 9, 1, 3, 5], &[2, 9, 1, 3]];
            let all: Vec<Tensor> =
                shapes.iter().enumerate().map(|(i, shape)| values_of(shape, i as u64)).collect();
            let [want, last] = plain::state_space_scan(&all, None)?;
            let cuts = [Replicate, Replicate, Shard(3), Shard(3)];
            let (mut made, mut state, mut start) = (Vec::new(), None, 0);
            let (run, counts) = comm::record(|| -> Result<()> {
                for tokens in [4, 1, 1, 3] {
                    let part = |(x, cut): (&Tensor, Placement)| {
                        DTensor::distribute(&x.narrow(1, start, tokens)?.contiguous()?, &mesh, &[cut])
                    };
                    let x = all.iter().zip(cuts).map(part).collect::<Result<Vec<_>>>()?;
                    let [y, next] = x[0].state_space_scan([&x[1], &x[2]], &x[3], state.as_ref(), None)?;
                    assert_eq!((y.placements(), next.placements()), (&[Shard(3)][..], &[Shard(3)][..]));
                    made.push(y);
                    (state, start) = (Some(next), start + tokens);
                }
                Ok(())
            });
            run?;
            assert_eq!(counts.total(), 0);
            let far = |a: &Tensor, b: &Tensor| (a - b)?.abs()?.max_all()?.to_scalar::<f64>();
            assert!(far(&DTensor::cat(&made, 1)?.full_tensor()?, &want)? < 1e-12);
            // [batch, groups, heads, state, width] to [batch, state, groups, heads, width]
            let last = last.permute((0, 3, 1, 2, 4))?;
            assert!(
                far(&state.map_or_else(|| Ok(want.clone()), |state| state.full_tensor())?, &last)? < 1e-12
            );
            Ok(())
        });
    }
}

/// A scan of many tokens keeps its chunks: the gradients of 70 tokens are those of the plain rule.
#[test]
fn long_texts_have_the_gradients_of_each_token() {
    let shapes: [&[usize]; 5] =
        [&[1, 70, 2, 8], &[1, 70, 2, 8], &[1, 70, 2, 16], &[1, 70, 2, 2], &[1, 70, 2, 2]];
    let decayed = |g: &Tensor| g.sqr()?.neg();
    let case = Case::new(
        "a long text",
        &shapes.map(|shape| (shape, Float)),
        |x| {
            let k = (&x[1] * 0.3)?;
            let [made, _] =
                x[0].gated_delta_rule([&k, &x[2]], [&x[3].sigmoid()?, &x[4].sqr()?.neg()?], None, None)?;
            Ok(made)
        },
        move |x| {
            let beta = candle_nn::ops::sigmoid(&x[3])?;
            let x = [x[0].clone(), (&x[1] * 0.3)?, x[2].clone(), beta, decayed(&x[4])?];
            plain::gated_delta_rule(&x, None).map(|[made, _]| made)
        },
    );
    let scan = Case::new(
        "a long text",
        &[
            (&[1, 70, 1, 8], Float),
            (&[1, 70, 1, 8], Float),
            (&[1, 70, 1, 4, 3], Float),
            (&[1, 70, 1, 4], Float),
        ],
        |x| {
            let [made, _] = x[0].state_space_scan([&x[1], &x[2]], &x[3].sqr()?.neg()?, None, None)?;
            Ok(made)
        },
        move |x| {
            let x = [x[0].clone(), x[1].clone(), x[2].clone(), decayed(&x[3])?];
            plain::state_space_scan(&x, None).map(|[made, _]| made)
        },
    );
    sweep_in(
        &[DType::F64],
        "long texts",
        vec![
            case,
            scan,
            Case::new("uneven", &[(&[5, 3], Float)], |x| x[0].relu(), |x| x[0].relu()),
            Case::new("empty", &[(&[1, 3], Float)], |x| x[0].relu(), |x| x[0].relu()),
        ],
    );
}

#[test]
fn what_does_not_fit_is_one_error() {
    on_ranks(2, "errors", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let of = |shape: &[usize]| DTensor::zeros(shape, DType::F32, &Cpu, &mesh, &[Replicate]);
        let x = of(&[2, 6, 4])?;
        let said = |made: Result<DTensor>| made.map(drop).unwrap_err().to_string();
        for weight in [&[3, 2][..], &[4, 8], &[4, 0], &[4]] {
            let said = said(x.short_conv(&of(weight)?, None));
            assert!(said.contains("short_conv") && said.contains("[channels, taps]"), "{said}");
        }
        let documents = Documents::new(vec![0, 9]);
        assert!(said(x.short_conv(&of(&[4, 2])?, Some(&documents))).contains("documents that end at [0, 9]"));
        let rule = |shapes: [&[usize]; 5], state: Option<&[usize]>| -> Result<DTensor> {
            let x = shapes.iter().map(|shape| of(shape)).collect::<Result<Vec<_>>>()?;
            let state = state.map(of).transpose()?;
            let [made, _] = x[0].gated_delta_rule([&x[1], &x[2]], [&x[3], &x[4]], state.as_ref(), None)?;
            Ok(made)
        };
        let fits: [&[usize]; 5] = [&[1, 3, 2, 4], &[1, 3, 2, 4], &[1, 3, 2, 6], &[1, 3, 2, 2], &[1, 3, 2, 2]];
        rule(fits, Some(&[1, 4, 2, 6]))?;
        let other: [(usize, &[usize]); 5] =
            [(1, &[1, 3, 2, 5]), (2, &[1, 3, 2, 5]), (3, &[1, 3, 2, 0]), (4, &[1, 3, 2, 1]), (0, &[1, 3, 8])];
        for (at, shape) in other {
            let mut shapes = fits;
            shapes[at] = shape;
            let said = said(rule(shapes, None));
            assert!(said.contains("gated_delta_rule") && said.contains("values · width"), "{said}");
        }
        assert!(said(rule(fits, Some(&[1, 2, 4, 6]))).contains("perhaps a state"));
        let scan = |shapes: [&[usize]; 4], state: Option<&[usize]>| -> Result<DTensor> {
            let x = shapes.iter().map(|shape| of(shape)).collect::<Result<Vec<_>>>()?;
            let [made, _] =
                x[0].state_space_scan([&x[1], &x[2]], &x[3], state.map(of).transpose()?.as_ref(), None)?;
            Ok(made)
        };
        let fits: [&[usize]; 4] = [&[1, 3, 2, 4], &[1, 3, 2, 4], &[1, 3, 2, 5, 6], &[1, 3, 2, 5]];
        scan(fits, Some(&[1, 4, 2, 5, 6]))?;
        let other: [(usize, &[usize]); 4] =
            [(1, &[1, 3, 2, 5]), (2, &[1, 3, 2, 30]), (3, &[1, 3, 2, 6]), (0, &[1, 3, 8])];
        for (at, shape) in other {
            let mut shapes = fits;
            shapes[at] = shape;
            let said = said(scan(shapes, None));
            assert!(said.contains("state_space_scan") && said.contains("groups, heads, width"), "{said}");
        }
        assert!(said(scan(fits, Some(&[1, 2, 4, 5, 6]))).contains("perhaps states"));
        Ok(())
    });
}
