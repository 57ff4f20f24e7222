//! Random tensors: the same bits however they are cut, sound distributions, and values that never change.

use std::ops::Range;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_shard::random::{Distribution, Stream, sample, sample_full};
use proptest::prelude::*;

const CPU: &Device = &Device::Cpu;
const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];
const DISTRIBUTIONS: [Distribution; 3] = [
    Distribution::Uniform { lo: -0.5, up: 2.0 },
    Distribution::Normal { mean: 1.0, stdev: 3.0 },
    Distribution::Bernoulli { p: 0.3 },
];

/// Exact: every dtype here embeds in f64.
fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    // candle panics on a strided copy out of an empty storage.
    if tensor.elem_count() == 0 {
        return Ok(vec![]);
    }
    tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

fn slice(tensor: &Tensor, block: &[Range<usize>]) -> Result<Tensor> {
    block
        .iter()
        .enumerate()
        .try_fold(tensor.clone(), |t, (dim, range)| t.narrow(dim, range.start, range.len()))
}

/// A shape and, per dim, the cuts of a split: `[0, c1, c2, size]`, with repeats for empty pieces.
fn split_shape() -> impl Strategy<Value = (Vec<usize>, Vec<Vec<usize>>)> {
    // One dim may be long, so that both short and long gaps between runs occur.
    let sizes = (prop::collection::vec(0..7usize, 0..3), 0..7usize, 0..200usize, any::<bool>());
    sizes
        .prop_map(|(mut shape, last, long, add_long)| {
            shape.push(last);
            if add_long {
                shape.push(long);
            }
            shape
        })
        .prop_flat_map(|shape| {
            let cuts: Vec<_> = shape
                .iter()
                .map(|&size| {
                    prop::collection::vec(0..=size, 0..3).prop_map(move |mut cuts| {
                        cuts.extend([0, size]);
                        cuts.sort_unstable();
                        cuts
                    })
                })
                .collect();
            (Just(shape), cuts)
        })
}

/// All boxes of the split that `cuts` describes.
fn boxes(cuts: &[Vec<usize>]) -> Vec<Vec<Range<usize>>> {
    cuts.iter().fold(vec![vec![]], |boxes, cuts| {
        boxes
            .iter()
            .flat_map(|head| {
                cuts.windows(2)
                    .map(move |w| head.iter().cloned().chain(std::iter::once(w[0]..w[1])).collect())
            })
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_split_is_the_slices_of_the_whole(
        (shape, cuts) in split_shape(),
        seed in any::<u64>(),
        dtype in prop::sample::select(&DTYPES),
        dist in prop::sample::select(&DISTRIBUTIONS),
    ) {
        let stream = Stream::new(seed, "split");
        let whole = sample_full(stream, dist, &shape, dtype, CPU).unwrap();
        prop_assert_eq!(whole.dims(), &shape);
        prop_assert_eq!(whole.dtype(), dtype);
        for block in boxes(&cuts) {
            let part = sample(stream, dist, &shape, &block, dtype, CPU).unwrap();
            let expected = slice(&whole, &block).unwrap();
            prop_assert_eq!(part.dims(), expected.dims());
            prop_assert_eq!(values(&part).unwrap(), values(&expected).unwrap(), "block {:?}", block);
        }
    }
}

#[test]
fn a_scalar_is_the_first_element() -> Result<()> {
    let stream = Stream::new(3, "scalar");
    for dist in DISTRIBUTIONS {
        let scalar = sample(stream, dist, &[], &[], DType::F32, CPU)?;
        let row = sample_full(stream, dist, &[5], DType::F32, CPU)?;
        assert_eq!(scalar.to_scalar::<f32>()?, row.get(0)?.to_scalar::<f32>()?);
    }
    Ok(())
}

/// The position in the key stream is 64 bits wide and more: a box far out costs no more than one at the start.
#[test]
fn a_box_of_a_huge_tensor_is_cheap_and_its_own() -> Result<()> {
    let stream = Stream::new(3, "huge");
    let shape = [1 << 40, 1 << 20];
    let dist = Distribution::Normal { mean: 0.0, stdev: 1.0 };
    let draw = |row: usize| values(&sample(stream, dist, &shape, &[row..row + 1, 0..8], DType::F64, CPU)?);
    let (first, last) = (draw(0)?, draw((1 << 40) - 1)?);
    assert!(first.iter().zip(&last).all(|(a, b)| a != b));
    Ok(())
}

#[test]
fn moments_and_ranges_are_those_of_the_distribution() -> Result<()> {
    let n = 1 << 18;
    for dtype in [DType::F32, DType::F64] {
        for (dist, mean, stdev) in [
            (DISTRIBUTIONS[0], 0.75, 2.5 / 12f64.sqrt()),
            (DISTRIBUTIONS[1], 1.0, 3.0),
            (DISTRIBUTIONS[2], 0.3, 0.21f64.sqrt()),
        ] {
            let x = sample_full(Stream::new(11, "moments"), dist, &[n], dtype, CPU)?.to_dtype(DType::F64)?;
            let seen_mean = x.mean_all()?.to_scalar::<f64>()?;
            let seen_stdev = x.var(D::Minus1)?.to_scalar::<f64>()?.sqrt();
            // Five standard errors of the mean; the stdev's own are smaller than these for all three.
            let tolerance = 5.0 * stdev / (n as f64).sqrt();
            assert!((seen_mean - mean).abs() < tolerance, "{dist:?} {dtype:?}: mean {seen_mean}");
            assert!((seen_stdev - stdev).abs() < tolerance, "{dist:?} {dtype:?}: stdev {seen_stdev}");
            let (lo, up) = (x.min(0)?.to_scalar::<f64>()?, x.max(0)?.to_scalar::<f64>()?);
            match dist {
                Distribution::Uniform { .. } => {
                    assert!((-0.5..2.0).contains(&lo) && (1.99..2.0).contains(&up));
                }
                Distribution::Bernoulli { .. } => assert_eq!((lo, up), (0.0, 1.0)),
                Distribution::Normal { .. } => {
                    assert!((-17.0..-9.0).contains(&lo) && (11.0..19.0).contains(&up));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_bernoulli_of_probability_0_or_1_is_certain() -> Result<()> {
    for dtype in DTYPES {
        for p in [0.0, 1.0] {
            let x = sample_full(Stream::new(1, "sure"), Distribution::Bernoulli { p }, &[999], dtype, CPU)?;
            assert!(values(&x)?.iter().all(|&value| value == p));
        }
    }
    Ok(())
}

#[test]
fn seeds_names_folds_and_neighbors_are_uncorrelated() -> Result<()> {
    let n = 1 << 14;
    let base = Stream::new(0, "a");
    let streams = [
        base,
        Stream::new(1, "a"),
        Stream::new(1 << 63, "a"),
        Stream::new(0, "b"),
        Stream::new(0, "ab"),
        Stream::new(0, ""),
        base.fold(0),
        base.fold(1),
        base.fold(u64::MAX),
        base.fold(0).fold(1),
        base.fold(1).fold(0),
    ];
    let dist = Distribution::Normal { mean: 0.0, stdev: 1.0 };
    let drawn: Vec<Vec<f64>> = streams
        .iter()
        .map(|&stream| values(&sample_full(stream, dist, &[n], DType::F32, CPU)?))
        .collect::<Result<_>>()?;
    let correlation = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() / n as f64;
    let limit = 5.0 / (n as f64).sqrt();
    for (i, a) in drawn.iter().enumerate() {
        assert!(correlation(&a[1..], a).abs() < limit, "stream {i} against its own neighbors");
        for (j, b) in drawn.iter().enumerate().skip(i + 1) {
            assert!(correlation(a, b).abs() < limit, "streams {i} and {j}");
        }
    }
    Ok(())
}

/// These values are a promise: a checkpointed run resumes, and a mesh grows, with the numbers it began with.
#[test]
fn golden_values_never_change() -> Result<()> {
    let draw = |dist, dtype| {
        let stream = Stream::new(0x0123_4567_89ab_cdef, "golden").fold(5);
        values(&sample(stream, dist, &[100, 100], &[57..58, 31..34], dtype, CPU)?)
    };
    let uniform = Distribution::Uniform { lo: 0.0, up: 1.0 };
    let normal = Distribution::Normal { mean: 0.0, stdev: 1.0 };
    assert_eq!(draw(uniform, DType::F32)?, [0.5772920846939087, 0.3071144223213196, 0.5416532754898071]);
    assert_eq!(draw(uniform, DType::F64)?, [0.5598470525481599, 0.35188371696103193, 0.5460588043550155]);
    assert_eq!(draw(uniform, DType::BF16)?, [0.578125, 0.306640625, 0.54296875]);
    assert_eq!(draw(normal, DType::F32)?, [-1.1650904417037964, -0.8743451237678528, -1.3015930652618408]);
    assert_eq!(draw(normal, DType::F64)?, [0.6121330883555176, -0.0581007063054733, -0.20871855641116463]);
    assert_eq!(draw(normal, DType::F16)?, [-1.1650390625, -0.87451171875, -1.3017578125]);
    assert_eq!(draw(Distribution::Bernoulli { p: 0.5 }, DType::F32)?, [0.0, 1.0, 0.0]);
    Ok(())
}

#[test]
fn impossible_requests_are_errors_that_say_why() {
    let stream = Stream::new(0, "bad");
    let uniform = DISTRIBUTIONS[0];
    let message = |dist, block: &[Range<usize>], dtype| {
        sample(stream, dist, &[4, 6], block, dtype, CPU).unwrap_err().to_string()
    };
    let fits: &[Range<usize>] = &[0..4, 0..6];
    for (got, expected) in [
        (message(uniform, &[0..4, 3..7], DType::F32), "leaves the tensor of shape [4, 6] in dim 1"),
        (message(uniform, &[Range { start: 3, end: 2 }, 0..6], DType::F32), "in dim 0"),
        (message(uniform, &fits[..1], DType::F32), "needs 2 ranges"),
        (message(uniform, fits, DType::U32), "not u32"),
        (message(Distribution::Uniform { lo: 1.0, up: 0.0 }, fits, DType::F32), "lo <= up"),
        (message(Distribution::Uniform { lo: f64::MIN, up: f64::MAX }, fits, DType::F32), "finite"),
        (message(Distribution::Normal { mean: 0.0, stdev: -1.0 }, fits, DType::F32), "stdev >= 0"),
        (message(Distribution::Bernoulli { p: f64::NAN }, fits, DType::F32), "probability in [0, 1]"),
    ] {
        assert!(got.contains(expected), "{got:?} should mention {expected:?}");
    }
    let huge = sample(stream, uniform, &[usize::MAX, 3], &[0..0, 0..0], DType::F32, CPU).unwrap_err();
    assert!(huge.to_string().contains("more than 2^64 elements"));
}
